"""Pieces of which kernels in slices read and make rows."""

from __future__ import annotations

from test_slice_kernels import choose_slices

from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.tactics.rows_first import keep_rows_first
from tfswap.passes.tactics.slice_kernels import slice_kernels
from tfswap.plan.plan import Slices

TARGET = Target(DeviceModel("cpu", intra_op_threads=2, l3_cache_bytes=32 << 20, l1_l2_bytes=(32 << 10, 1 << 20)))

PROJECTED = """
%x = Placeholder() {dtype=float32} -> float32[16,32,3,4,16]
%order = Const() {dtype=int32} -> int32[5] = (2, 0, 3, 1, 4)
%back = Const() {dtype=int32} -> int32[5] = (1, 3, 0, 2, 4)
%exp = Exp(%x) {T=float32} -> float32[16,32,3,4,16]
%moved = Transpose(%exp, %order) {T=float32, Tperm=int32} -> float32[3,16,4,32,16]
%three = Unpack(%moved) {T=float32, axis=0, num=3} -> float32[16,4,32,16], float32[16,4,32,16], float32[16,4,32,16]
%scores = BatchMatMulV2(%three:0, %three:1) {T=float32, adj_x=false, adj_y=true} -> float32[16,4,32,32]
%mixed = BatchMatMulV2(%scores, %three:2) {T=float32, adj_x=false, adj_y=false} -> float32[16,4,32,16]
%pack = Pack(%mixed, %three:0, %three:2) {N=3, T=float32, axis=0} -> float32[3,16,4,32,16]
%unmoved = Transpose(%pack, %back) {T=float32, Tperm=int32} -> float32[16,32,3,4,16]
%log = Log(%unmoved) {T=float32} -> float32[16,32,3,4,16]
feeds %x
fetches %log
"""


def test_a_chain_goes_through_what_is_projected_together() -> None:
    graph = parse_graph(PROJECTED)
    assert keep_rows_first(graph, TARGET) == 2
    (groups,) = choose_slices(graph, TARGET.device, (4,))
    assert [(each.rows, each.of) for each in groups] == [(4, 16)]
    graph = parse_graph(PROJECTED)
    assert keep_rows_first(graph, TARGET, groups) == 2
    slice_kernels(graph, TARGET, groups)
    made = [node.op for node in graph]
    assert [made.count(op) for op in ("Transpose", "Pack", "Unpack", "BatchMatMulV2")] == [24, 4, 4, 8]
    assert [node.op for node in graph if node.outputs[0].shape == (16, 32, 3, 4, 16)] == [
        "Placeholder",
        *["Tfswap>StoreRows"] * 4,
    ], "nothing but the argument and the result is whole"


def test_only_where_kernels_run_in_slices() -> None:
    graph = parse_graph(PROJECTED)
    assert keep_rows_first(graph, TARGET, [Slices(("exp", "log"), 4, 16)]) == 0
    assert len(graph) == len(parse_graph(PROJECTED))


def test_what_stays() -> None:
    other = PROJECTED.replace("(2, 0, 3, 1, 4)", "(2, 1, 3, 0, 4)").replace("(1, 3, 0, 2, 4)", "(3, 1, 0, 2, 4)")
    for text in (other, PROJECTED.replace("axis=0", "axis=1")):
        assert keep_rows_first(parse_graph(text.replace("float32[3,16,4,32,16]", "float32[3,32,4,16,16]")), TARGET) == 0


def test_rows_that_are_first_already_stay() -> None:
    first = PROJECTED.replace("(2, 0, 3, 1, 4)", "(0, 1, 3, 2, 4)").replace("(1, 3, 0, 2, 4)", "(0, 1, 3, 2, 4)")
    assert keep_rows_first(parse_graph(first), TARGET) == 0


def test_what_is_packed_and_read_elsewhere_stays() -> None:
    graph = parse_graph(PROJECTED.replace("fetches %log", "fetches %log, %pack"))
    assert keep_rows_first(graph, TARGET) == 1
    assert graph["unmoved"].op == "Transpose"


def test_what_transposes_wait_for_is_waited_for() -> None:
    """Also by what unpacks and packs in their place, and who fetches a piece gets the transposed one."""
    text = PROJECTED.replace(
        "(%exp, %order) {T=float32, Tperm=int32}", "(%exp, %order) {T=float32, Tperm=int32} ^first"
    )
    text = text.replace(
        "axis=0} -> float32[3,16,4,32,16]\n%unmoved", "axis=0} ^last -> float32[3,16,4,32,16]\n%unmoved"
    )
    graph = parse_graph(
        text.replace("fetches %log", "fetches %log, %three:1").replace(
            "%exp =", "%first = NoOp()\n%last = NoOp()\n%exp ="
        )
    )
    assert keep_rows_first(graph, TARGET) == 2
    assert graph["three"].controls == (graph["first"],) and graph["unmoved"].controls == (graph["last"],)
    assert graph.fetches[1].node.op == "Transpose" and graph.fetches[1].type.shape == (16, 4, 32, 16)
