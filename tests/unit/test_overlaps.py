"""Which kernels next to each other may run concurrently."""

from __future__ import annotations

import pytest

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.plan.schedule import Interval
from tfswap.planner.pairing import overlaps

STEP = """
%x = Placeholder() {dtype=float32} -> float32[64]
%a = Exp(%x) {T=float32} -> float32[64]
%b = Tanh(%x) {T=float32} -> float32[64]
%c = Mul(%a, %b) {T=float32} -> float32[64]
feeds %x
fetches %c
"""


@pytest.mark.parametrize(("release", "back", "allowed"), [(1, 2, False), (2, 2, False), (1, 3, True), (0, 2, True)])
def test_no_copy_comes_back_between_two_kernels_that_run_concurrently(release: int, back: int, allowed: bool) -> None:
    """The old buffer's last reader is the first of both: a new buffer would come before it."""
    flow = analyse_dataflow(parse_graph(STEP), DeviceModel())
    order = [flow.place[name] for name in ("x", "a", "b", "c")]
    evicted = Interval(0, None, release, back, 3)
    assert overlaps(flow, order, [evicted])(2) is allowed
