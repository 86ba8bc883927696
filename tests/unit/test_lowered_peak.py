"""The unoptimised peak of a step with loops, as TensorFlow lowers them."""

from __future__ import annotations

from statistics import median_low

import pytest

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.simulator import lowered_peak
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN
from tfswap.simulator.lowered_peak import TooLarge, simulate_lowered

ROW = 4096
ONE = DeviceModel("cpu", False, 1, 1)

# A loop pops a row in each iteration; a list says how often it runs.
LOOP = """\
%x = Placeholder() {dtype=float32} -> float32[8, 1024]
%length = Placeholder() {dtype=int32} -> int32[]
%start = Placeholder() {dtype=float32} -> float32[1024]
%i = Const() -> int32[] = (0,)
%n = Const() -> int32[] = (TRIPS,)
%scalar = Const() -> int32[0] = ()
%shape = Const() -> int32[1] = (1024,)
%empty = EmptyTensorList(%scalar, %length) -> variant[]
%pushed = TensorListPushBack(%empty, %n) -> variant[]
%popped = TensorListPopBack(%pushed, %scalar) -> variant[], int32[]
%given = TensorListFromTensor(%x, %shape) -> variant[]
%made = EmptyTensorList(%shape, %n) -> variant[]
%loop = While(%i, %popped:1, %given, %made, %start) -> int32[], int32[], variant[], variant[], float32[1024]
LATE%end = MatMul(%loop:4, %start) -> float32[1024]
feeds %x, %length, %start
fetches %end, %loop:3
body %loop
  %i = Placeholder() -> int32[]
  %n = Placeholder() -> int32[]
  %given = Placeholder() -> variant[]
  %made = Placeholder() -> variant[]
  %state = Placeholder() -> float32[1024]
  %less = Less(%i, %n) -> bool[]
  feeds %i, %n, %given, %made, %state
  fetches %less
body %loop
  %i = Placeholder() -> int32[]
  %n = Placeholder() -> int32[]
  %given = Placeholder() -> variant[]
  %made = Placeholder() -> variant[]
  %state = Placeholder() -> float32[1024]
  %one = Const() -> int32[] = (1,)
  %next = AddV2(%i, %one) -> int32[]
  %shape = Const() -> int32[1] = (1024,)
  %pop = TensorListPopBack(%given, %shape) -> variant[], float32[1024]
  %new = MatMul(%pop:1, %state) -> float32[1024]
  %pushed = TensorListPushBack(%made, %new) -> variant[]
  feeds %i, %n, %given, %made, %state
  fetches %next, %n, %pop, %pushed, %new
"""
READ_LATE = "%late = TensorListLength(%given) ^loop -> int32[]\n"


ALSO_BY_VALUES = """\
  %less = Less(%i, %n) -> bool[]
  %axes = Const() -> int32[1] = (0,)
  %below = Less(%state, %state) -> bool[1024]
  %some = Any(%below, %axes) -> bool[]
  %both = LogicalAnd(%less, %some) -> bool[]
  feeds %i, %n, %given, %made, %state
  fetches %both
"""


def rows(trips: int, late: str = "", *, by_values: bool = False) -> int:
    """The peak in whole rows."""
    text = LOOP.replace("TRIPS", str(trips)).replace("LATE", late)
    if by_values:
        start, end = text.index("  %less"), text.index("body", text.index("  %less"))
        text = text[:start] + ALSO_BY_VALUES + text[end:]
        text = text.replace("While(%i, %popped:1,", "While(%i, %n,")
    graph = parse_graph(text)
    if late:
        graph.fetches.append(graph["late"].out())
    flow = analyse_dataflow(graph, ONE, lowered=lambda _: 1e-6)
    return median_low(simulate_lowered(graph, flow, ONE, lambda _: 1e-6, snapshot=NOTHING_KNOWN)) // ROW


def test_what_a_loop_pops_is_freed_unless_another_edge_holds_the_list():
    given = 8 + 1  # the arguments
    assert rows(6) == given + 8 + 1  # one row is made before the first is freed
    assert rows(6, READ_LATE) == given + 8 + 6


def test_integers_that_lists_hold_say_how_often_a_loop_runs():
    assert [rows(trips, READ_LATE) for trips in (2, 4, 6)] == [9 + 8 + trips for trips in (2, 4, 6)]


def test_a_loop_that_values_may_end_and_that_gathers_results_runs_its_maximum_of_iterations():
    assert [rows(trips, by_values=True) for trips in (2, 12, 14)] == [rows(trips) for trips in (2, 12, 14)]


def test_a_step_of_very_many_items_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowered_peak, "LARGEST", 50)
    with pytest.raises(TooLarge):
        rows(8)
