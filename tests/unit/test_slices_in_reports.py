"""What refusals, explanations and notes say of kernels in slices."""

from __future__ import annotations

import pytest
from layered_steps import Layer, training_step
from planner_problems import optimizer_of

from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.ir.permits import CLOSE, SLICE, TACTICS
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel

ROWS, WIDTH = 512, 128
SCORES = """
%x = Placeholder() {dtype=float32} -> float32[64,64,16]
%e = Exp(%x) {T=float32} -> float32[64,64,16]
%s = Einsum(%e, %e) {N=2, T=float32, equation=b"abc,adc->abd"} -> float32[64,64,64]
%axes = Const() {dtype=int32} -> int32[3] = (0, 1, 2)
%most = Max(%s, %axes) {T=float32, Tidx=int32, keep_dims=false} -> float32[]
feeds %x
fetches %most
"""


@pytest.mark.parametrize(
    ("tactics", "values", "remedy"),
    [
        (
            TACTICS,
            "bits",
            "or more, add 'slice' to tactics and pass values=\"close\", so that this kernel may run in slices",
        ),
        (TACTICS, CLOSE, "or more, add 'slice' to tactics, so that"),
        ((*TACTICS, SLICE), "bits", 'or more, pass values="close", so that'),
        ((*TACTICS, SLICE), CLOSE, "or more, or make the batch smaller"),
    ],
)
def test_a_refusal_names_what_slices_need(tactics: tuple[str, ...], values: str, remedy: str) -> None:
    optimizer = Optimizer(parse_graph(SCORES), DeviceModel(), Options(tactics, values=values))
    assert remedy in str(optimizer.infeasible(1))


WHOLE = """
%x = Placeholder() {dtype=float32} -> float32[64,64,16]
%e = Exp(%x) {T=float32} -> float32[64,64,16]
feeds %x
fetches %e
"""
"""A kernel that could run in slices, which would free nothing: what it reads and makes is whole."""
CUT = """
%x = Placeholder() {dtype=float32} -> float32[64,1,1]
%t = BroadcastTo(%x, %shape) {T=float32, Tidx=int32} -> float32[64,64,64]
%shape = Const() {dtype=int32} -> int32[3] = (64, 64, 64)
%e = Exp(%t) {T=float32} -> float32[64,64,64]
%s = Sum(%e, %last) {T=float32, Tidx=int32, keep_dims=false} -> float32[64,64]
%last = Const() {dtype=int32} -> int32[1] = (-1,)
%scores = Einsum(%s, %y) {N=2, T=float32, equation=b"ab,cb->ac"} -> float32[64,2048]
%most = Max(%scores, %both) {T=float32, Tidx=int32, keep_dims=false} -> float32[]
%both = Const() {dtype=int32} -> int32[2] = (0, 1)
%y = Placeholder() {dtype=float32} -> float32[2048,64]
feeds %x, %y
fetches %most
"""
"""With slices a kernel needs the most that runs so with close values alone."""


def test_a_refusal_names_no_slices_that_would_not_help() -> None:
    optimizer = Optimizer(parse_graph(WHOLE), DeviceModel(), Options((*TACTICS, SLICE)))
    assert "or more, or make the batch smaller" in str(optimizer.infeasible(1))


def test_a_refusal_of_a_step_in_slices_names_what_more_slices_need() -> None:
    optimizer = Optimizer(parse_graph(CUT), DeviceModel(), Options((*TACTICS, SLICE)))
    lowest = optimizer.search.fastest(optimizer.floor_bytes())
    assert lowest is not None and lowest.variant.rewriting.sliced
    assert "most of all Einsum 'scores'" in (refusal := str(optimizer.infeasible(1)))
    assert 'or more, pass values="close", so that' in refusal


@pytest.mark.tensorflow  # the unoptimised step is as Grappler leaves it
def test_an_explanation_says_what_slices_would_hold() -> None:
    optimizer = optimizer_of(training_step([Layer("dense"), Layer("relu")] * 3, rows=ROWS, width=WIDTH))
    assert f"or more, add {SLICE!r} to tactics" in str(optimizer.infeasible(1))
    report = optimizer.report(optimizer.plan(None))
    relu = next(node.name for node in optimizer.graph if node.op == "Relu")
    found = report.explain(relu)
    nbytes = 2 * ROWS * WIDTH * 4
    assert found.slices == ("bits", nbytes)
    assert f'its kernel may run so, with values="bits": each of 16 would hold {nbytes // 16 // 1024}.0 KiB' in str(
        found
    )
