"""The unoptimised step, replayed: concurrent kernels, the tensors held until they end, and updates in the arena."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

import pytest

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.draws import Draws
from tfswap.analysis.executor import Executor, Program, runs_within
from tfswap.ir.graph import Node
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN, ArenaSnapshot
from tfswap.simulator.unordered import Baseline, range_of, simulate_delayed, simulate_unordered

UNIT = 25600 * 4
ONE, TWO = (DeviceModel("cpu", False, threads, threads) for threads in (1, 2))
GPU = DeviceModel("gpu", False, 1, 2)

# Two branches of three kernels each: large, large, small.
BRANCHES = """\
%x = Placeholder() {dtype=float32} -> float32[64]
%a0 = Tile(%x) -> float32[25600]
%a1 = MatMul(%a0, %a0) -> float32[25600]
%a2 = MatMul(%a1, %a1) -> float32[64]
%b0 = Tile(%x) -> float32[25600]
%b1 = MatMul(%b0, %b0) -> float32[25600]
%b2 = MatMul(%b1, %b1) -> float32[64]
%y = AddV2(%a2, %b2) -> float32[64]
feeds %x
fetches %y
"""


def facts(text: str, device: DeviceModel = TWO) -> Dataflow:
    return analyse_dataflow(parse_graph(text), device)


def units(text: str, device: DeviceModel, seconds: dict[str, float], snapshot: ArenaSnapshot = NOTHING_KNOWN) -> int:
    """The peak in whole UNITs, when kernels take these seconds, by default 1."""
    flow = facts(text, device)
    return (
        median_low(simulate_unordered(flow, [seconds.get(n.name, 1.0) for n in flow.nodes], device, snapshot=snapshot))
        // UNIT
    )


def test_branches_run_side_by_side_on_two_threads_and_in_turn_on_one():
    assert units(BRANCHES, ONE, {}) == 2  # a0 a1, and later b0 b1
    assert units(BRANCHES, TWO, {}) == 4


def test_a_constant_that_waits_keeps_what_reads_it_waiting():
    waiting = BRANCHES.replace("%b0 = Tile(%x)", "%c = Const() ^a2 -> int32[1]\n%b0 = Tile(%x, %c)")
    assert "^a2" in waiting
    assert units(waiting, TWO, {}) == units(BRANCHES, ONE, {}) == 2


def test_which_kernels_meet_depends_on_what_they_take():
    # a0 is gone before b1 starts: three at most.
    assert units(BRANCHES, TWO, {"a0": 1e-3, "a1": 1e-3}) == 3


def test_the_highest_peak_is_that_of_a_run_in_which_a_thread_is_delayed():
    flow = facts(BRANCHES)
    # Kernels that meet only where the first branch is delayed.
    seconds = [{"a0": 1e-6, "a1": 1e-6}.get(n.name, 1e-3) for n in flow.nodes]
    idle = simulate_unordered(flow, seconds, TWO)
    assert len(idle) % 2 == 1 and max(idle) // UNIT == 3
    assert median_low(idle) // UNIT == 3
    assert max(simulate_delayed(flow, seconds, TWO)) // UNIT == 4


def test_one_thread_makes_all_nodes_without_inputs_ready():
    """It keeps the last one, and takes the newest of the others first."""
    lines = []
    for k in range(3):
        lines += [f"%a{k} = RandomUniform() -> float32[64]", f"%b{k} = MatMul(%a{k}, %a{k}) -> float32[64]"]
    flow = facts("\n".join([*lines, "%y = AddN(%b0, %b1, %b2) -> float32[64]", "fetches %y"]), ONE)
    program = Program(flow.nodes, [1.0] * len(flow.nodes), ONE, constants=())
    order = Started(program, flow.nodes)
    order.run()
    assert order.names == ["a2", "b2", "a1", "b1", "a0", "b0", "y"]


class Started(Executor):
    """Notes the names of nodes as they start."""

    def __init__(self, program: Program, nodes: Sequence[Node]):
        super().__init__(program, Draws())
        self.nodes = nodes
        self.names: list[str] = []

    def begin(self, i: int) -> list[int]:
        self.names.append(self.nodes[i].name)
        return []

    def finish(self, i: int, temporaries: list[int]) -> None:
        pass


def test_the_range_is_that_of_ten_runs():
    assert range_of(range(25)) == (2, 22)
    assert range_of([5, 3, 4]) == (3, 5)
    assert range_of([7]) == (7, 7)


def test_the_range_moves_with_the_arena():
    assert Baseline(5, 1.0, lowest_bytes=4, highest_bytes=7).more(3) == Baseline(8, 1.0, 0, 7, 10)


@pytest.mark.parametrize(("most", "runs"), [(0, 1), (1, 1), (2, 1), (8, 7), (9, 9)])
def test_there_is_a_middle_run(most: int, runs: int) -> None:
    assert runs_within(most) == runs


def test_one_thread_starts_all_kernels_of_a_gpu():
    assert units(BRANCHES, GPU, {}) == 3  # in the order in which they are ready: a0 b0 a1 b1


def test_the_newest_task_comes_first():
    # Each r makes its readers s and t ready: t is kept, s queued in front of the older r's, so that r is gone
    # before the next r comes. The oldest first would make all of them before any s.
    lines = ["%x = Placeholder() {dtype=float32} -> float32[64]", "%z = Neg(%x) -> float32[64]"]
    for k in range(4):
        lines.append(f"%r{k} = Tile(%z) -> float32[25600]")
        lines += [f"%{name}{k} = MatMul(%r{k}, %r{k}) -> float32[64]" for name in "st"]
    read = ", ".join(f"%{name}{k}" for name in "st" for k in range(4))
    lines += [f"%y = AddN({read}) -> float32[64]", "feeds %x", "fetches %y"]
    assert units("\n".join(lines), ONE, {}) == 1


UPDATE = """\
%v = Placeholder() {dtype=resource} -> resource[]
%r = ReadVariableOp(%v) -> float32[25600]
%n = MatMul(%r, %r) -> float32[25600]
%w = AssignVariableOp(%v, %n)
feeds %v
targets %w
"""


def test_a_variable_that_adopts_a_buffer_frees_the_one_that_it_had():
    end = 1 << 40
    chunks = ((0, UNIT, True), (UNIT, end, False))
    # Every step: the variable and its next value. Were the old one kept, each of them would add one.
    assert units(UPDATE, TWO, {}, ArenaSnapshot(UNIT, chunks)) == 2


def test_a_prediction_repeats():
    flow = facts(BRANCHES)
    found = {median_low(simulate_unordered(flow, [1e-3] * len(flow.nodes), TWO)) for _ in range(3)}
    assert len(found) == 1


@pytest.mark.parametrize("threads", (1, 2, 16))
def test_all_threads_come_to_an_end(threads):
    flow = facts(BRANCHES)
    device = DeviceModel("cpu", False, threads, threads)
    peak = median_low(simulate_unordered(flow, [1e-6] * len(flow.nodes), device))
    assert 2 * UNIT <= peak <= 4 * UNIT + 4096
