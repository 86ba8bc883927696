"""Products that read a weight at home in slices of its rows, and what keeps it whole."""

from __future__ import annotations

import pytest

from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.tactics.sliced_weights import AHEAD, count_weight_slices, slice_weights

CPU = DeviceModel("cpu", intra_op_threads=2, l1_l2_bytes=(32768, 1 << 20), l3_cache_bytes=1 << 25)
DEPTH, WIDTH, BATCH = 1280, 512, 32
SLICE_BYTES = 320 * WIDTH * 4
HEAD = f"""\
%x = Placeholder() {{dtype=float32}} -> float32[{BATCH},{DEPTH}]
%dy = Placeholder() {{dtype=float32}} -> float32[{BATCH},{WIDTH}]
%b = Placeholder() {{dtype=float32}} -> float32[{WIDTH}]
%v = Placeholder() {{_tfswap_at_home_bytes={4 * DEPTH * WIDTH}, dtype=resource}} -> resource[]
%w = Tfswap>ReadHome(%v) {{dtype=float32, shape=[{DEPTH},{WIDTH}]}} -> float32[{DEPTH},{WIDTH}]
"""
FORWARD = f"%y = MatMul(%x, %w) {{T=float32, transpose_a=false, transpose_b=false}} -> float32[{BATCH},{WIDTH}]\n"
FUSED = (
    "%y = _FusedMatMul(%x, %w, %b) {T=float32, fused_ops=(b'BiasAdd', b'Relu'), num_args=1, transpose_a=false, "
    f"transpose_b=false}} -> float32[{BATCH},{WIDTH}]\n"
)
BACKWARD = f"%dx = MatMul(%dy, %w) {{T=float32, transpose_a=false, transpose_b=true}} -> float32[{BATCH},{DEPTH}]\n"
WRITE = """\
%zero = Sub(%new, %new) {T=float32} -> float32[1280,512]
%store = Tfswap>StoreHome(%zero) {T=float32} -> variant[]
%write = Tfswap>CommitHome(%v, %zero, %store) {T=float32} ^w
"""


def step(*lines: str, fetches: str = "%y, %dx", feeds: str = "", targets: str = "") -> Graph:
    given = f"%new = Placeholder() {{dtype=float32}} -> float32[{DEPTH},{WIDTH}]\n" if feeds else ""
    ends = f"feeds %x, %dy, %b, %v{feeds}\nfetches {fetches}\n" + (f"targets {targets}\n" if targets else "")
    return parse_graph(HEAD + given + "".join(lines) + ends)


def loads(graph: Graph) -> list[Node]:
    return [node for node in graph if node.op == custom_ops.READ_HOME]


@pytest.mark.parametrize("forward", [FORWARD, FUSED])
def test_products_share_the_slices_of_a_weight(forward: str) -> None:
    graph = step(forward, BACKWARD)
    assert count_weight_slices(graph, CPU, SLICE_BYTES) == slice_weights(graph, Target(CPU), SLICE_BYTES) == 4
    assert [(node.attrs["begin"], node.outputs[0].shape) for node in loads(graph)] == [
        (begin, (320, WIDTH)) for begin in range(0, DEPTH, 320)
    ]
    sums = [node for node in graph if node.op == custom_ops.ADD_PRODUCTS]
    assert [node.inputs[1].node for node in sums] == loads(graph)
    assert [len(node.inputs) for node in sums] == [2, 3, 3, 3], "closed sums have no state"
    y, dx = (tensor.node for tensor in graph.fetches)
    assert (y.op == "Relu") == (forward is FUSED)
    assert dx.op == "ConcatV2"
    assert [tensor.node.inputs[1].node for tensor in dx.inputs[:-1]] == loads(graph)


def test_two_slices_need_to_be_there_at_one_time() -> None:
    graph = step(FORWARD, BACKWARD)
    slice_weights(graph, Target(CPU), SLICE_BYTES)
    sums = [node for node in graph if node.op == custom_ops.ADD_PRODUCTS]
    waits = [node.controls for node in loads(graph)]
    assert waits == [()] * AHEAD + [(node,) for node in sums[:-AHEAD]]


def test_slices_wait_for_what_the_read_waits_for() -> None:
    graph = step(FORWARD, BACKWARD, "%before = NoOp() {}\n")
    graph["w"].controls = (graph["before"],)
    slice_weights(graph, Target(CPU), SLICE_BYTES)
    assert all(graph["before"] in node.controls for node in loads(graph)) and len(loads(graph)) == 4


def test_a_write_waits_for_all_slices() -> None:
    graph = step(FORWARD, BACKWARD, WRITE, feeds=", %new", targets="%write")
    slice_weights(graph, Target(CPU), SLICE_BYTES)
    assert set(graph["write"].controls) == set(loads(graph))


WHOLE = {
    "another kernel reads it": (
        step(FORWARD, "%a = Abs(%w) {T=float32} -> float32[1280,512]\n", fetches="%y, %a"),
        CPU,
    ),
    "the step returns it": (step(FORWARD, fetches="%y, %w"), CPU),
    "oneDNN's products": (step(FORWARD, fetches="%y"), CPU._replace(onednn=True)),
    "unknown caches": (step(FORWARD, fetches="%y"), CPU._replace(l1_l2_bytes=None)),
    "a GPU": (step(FORWARD, fetches="%y"), DeviceModel("gpu")),
    "it is the left factor": (
        step(
            "%y = MatMul(%w, %w) {T=float32, transpose_a=true, transpose_b=false} -> float32[512,512]\n", fetches="%y"
        ),
        CPU,
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_weights_that_stay_whole(name: str) -> None:
    graph, device = WHOLE[name]
    assert count_weight_slices(graph, device, SLICE_BYTES) == slice_weights(graph, Target(device), SLICE_BYTES) == 0


def test_a_weight_of_one_slice_stays_whole() -> None:
    assert count_weight_slices(step(FORWARD, BACKWARD), CPU, 4 * DEPTH * WIDTH) == 0
