"""The solvers and the planner's ladder, on graphs made without TensorFlow."""

from __future__ import annotations

import dataclasses
import math

import pytest
from graphs import training_steps
from hypothesis import given
from hypothesis import strategies as st
from layered_steps import Layer, training_step
from planner_problems import (
    CHAIN,
    CPU,
    LONG,
    MIB,
    UNIT,
    check_choice,
    facts,
    live_peak,
    optimizer_of,
    problem_of,
    slow,
    value,
)

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import kernel_seconds
from tfswap.analysis.dataflow import PERSISTENT
from tfswap.compiler.compiler import Optimizer
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import default_rates
from tfswap.passes.verify import verify
from tfswap.plan.schedule import build_schedule
from tfswap.planner import ordering
from tfswap.planner import planner as planning
from tfswap.planner.host_tiers import ANYTHING, Tiers
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.planner import Planner
from tfswap.planner.problem import make_problem
from tfswap.planner.solver_table import RECOMPUTE
from tfswap.planner.solvers import belady, cheapest_eviction, rerun_search
from tfswap.simulator.memory import simulate_memory

SOLVERS = {
    "furthest": belady.solve,
    "recompute": cheapest_eviction.solver(cheapest_eviction.Prices(copy=math.inf)),
    "both": cheapest_eviction.solver(cheapest_eviction.Prices(copy=1.0)),
    "search": rerun_search.solver(RECOMPUTE[0], visits=1000),
}


@slow
@pytest.mark.parametrize("name", SOLVERS)
@given(training_steps(), st.integers(30, 100))
def test_the_solver_keeps_its_target(name, graph, percent):
    flow = analyse_dataflow(graph, CPU)
    problem = problem_of(flow)
    target = problem.live_peak_bytes * percent // 100
    choice = SOLVERS[name](problem, LiveTarget(target))
    if choice is None:
        return
    check_choice(flow, choice)
    assert live_peak(flow, *choice) <= max(target, 0)


@slow
@pytest.mark.parametrize("name", SOLVERS)
@given(training_steps())
def test_nothing_is_promised_below_the_working_set(name, graph):
    flow = analyse_dataflow(graph, CPU)
    problem = problem_of(flow)
    persistent = flow.persistent_bytes
    # What one kernel reads and makes can't be less, short of forwarded buffers.
    working_set = persistent + max(
        sum(flow.values[v].nbytes for v in set(flow.reads[i]) if flow.values[v].producer != PERSISTENT)
        for i in problem.order
    )
    assert SOLVERS[name](problem, LiveTarget(working_set - 1)) is None


def test_what_there_is_no_room_to_recompute_is_copied_instead(monkeypatch):
    """A chain of products, cheaper to run again than to copy, which are needed one right after the other."""
    layers = [Layer("relu"), Layer("dense"), Layer("dense"), Layer("dense"), Layer("add", 1)]
    flow = analyse_dataflow(training_step(layers, 2048, 512), CPU)
    rates = default_rates(DeviceModel("gpu"))
    seconds = [kernel_seconds(node, rates) for node in flow.nodes]
    problem = make_problem(flow, ordering.choose_order(flow, seconds), rates, seconds)
    target = problem.live_peak_bytes * 72 // 100
    solve = cheapest_eviction.solver(cheapest_eviction.Prices(copy=0.5))
    choice = solve(problem, LiveTarget(target))
    assert choice is not None
    assert live_peak(flow, *choice) <= target
    assert choice.intervals
    assert len(choice.order) > len(problem.order)
    monkeypatch.setattr(cheapest_eviction, "MAX_SWEEPS", 1)
    assert solve(problem, LiveTarget(target)) is None


def test_only_what_there_is_no_room_to_make_is_copied_instead():
    """One kernel reads two values that can't both be recomputed: what they are made of still can, for other readers."""
    layers = [Layer("dense"), Layer("add"), Layer("dense", 1), Layer("dense", 1), Layer("scale", 1)]
    planner = Optimizer(training_step(layers, 8192, 256), DeviceModel("gpu")).planner
    problem = planner.problems[0]
    solve = cheapest_eviction.solver(cheapest_eviction.Prices(copy=0.5))
    choice = solve(problem, LiveTarget(problem.live_peak_bytes * 52 // 100))
    assert choice is not None
    copied = {planner.flow.values[stay.value].tensor.node.name for stay in choice.intervals}
    assert copied == {"dense3", "back4", "skip4"}  # and not dense2, which dense3 is made of


@pytest.mark.parametrize("room_mib", [0, 2, 4])
def test_what_host_memory_has_no_room_for_runs_again(room_mib):
    """Copies are cheap, and without a limit all that leaves is swapped; with one, the rest is recomputed."""
    flow = analyse_dataflow(training_step([Layer("dense"), Layer("relu")] * 6, 2048, 256), DeviceModel("gpu"))
    rates = default_rates(DeviceModel("gpu"))
    seconds = [kernel_seconds(node, rates) for node in flow.nodes]
    order, solve = ordering.choose_order(flow, seconds), cheapest_eviction.solver(cheapest_eviction.Prices(copy=0.1))

    def solved(tiers: Tiers) -> tuple[int, int]:
        problem = make_problem(flow, order, rates, seconds, tiers=tiers)
        choice = solve(problem, LiveTarget(problem.live_peak_bytes * 60 // 100))
        assert choice is not None
        return simulate_memory(flow, build_schedule(*choice)).host_peak_bytes, len(choice.order) - len(order)

    whole_bytes, reruns = solved(ANYTHING)
    assert whole_bytes > 4 * MIB
    assert not reruns
    held_bytes, reruns = solved(Tiers(room_mib * MIB))
    assert held_bytes == room_mib * MIB
    assert reruns
    assert solved(Tiers(room_mib * MIB, disk_bytes=None)) == (whole_bytes, 0)


IN_PLACE = """\
%x = Placeholder() {dtype=float32} -> float32[25600]
%a = MatMul(%x, %x) -> float32[25600]
%b = Exp(%a) -> float32[25600]
%s = Sum(%b) -> float32[64]
%d = MatMul(%s, %a) -> float32[64]
feeds %x
fetches %d
"""


@pytest.mark.parametrize("name", SOLVERS)
def test_what_is_read_again_leaves_for_the_kernel_that_takes_its_buffer_over(name):
    flow = facts(IN_PLACE)
    problem = problem_of(flow)
    small = 2 * 256
    assert problem.live_peak_bytes == 3 * UNIT + 256  # x, a, b and s
    choice = SOLVERS[name](problem, LiveTarget(2 * UNIT + small))
    assert choice is not None
    check_choice(flow, choice)
    memory = simulate_memory(flow, build_schedule(*choice), live=True, detail=True)
    assert memory.peak_bytes <= 2 * UNIT + small
    assert memory.forwarded == [(value(flow, "b"), value(flow, "a"))]


def test_a_plan_that_forwards_a_buffer_fits_its_graph():
    for tactic in ("swap", "recompute"):
        optimizer = optimizer_of(parse_graph(IN_PLACE), tactics=(tactic,))
        assert optimizer.floor_bytes() < 3 * UNIT
        verify(optimizer.rewrite(optimizer.plan(optimizer.floor_bytes())))


AGAIN_IN_PLACE = """\
%x = Placeholder() {dtype=float32} -> float32[25600]
%a = MatMul(%x, %x) -> float32[25600]
%b = Exp(%a) -> float32[25600]
%s = Sum(%b) -> float32[64]
%big = MatMul(%x, %s) -> float32[25600]
%t = Sum(%big) -> float32[64]
%d = MatMul(%t, %b) -> float32[64]
feeds %x
fetches %d
"""


def test_a_recomputed_kernel_forwards_what_was_made_for_it_only():
    flow = facts(AGAIN_IN_PLACE)
    problem = problem_of(flow)
    target = 2 * UNIT + 2 * 256
    choice = SOLVERS["recompute"](problem, LiveTarget(target))
    assert choice is not None
    assert [flow.nodes[i].name for i in choice.order] == ["a", "b", "s", "big", "t", "a", "b", "d"]
    assert live_peak(flow, *choice) <= target


RESTARTED = [Layer("dense"), Layer("relu"), Layer("dense", 1), Layer("scale", 1), Layer("scale", 2)]


def fastest_within(planner: Planner, share: float) -> float:
    """Of all rungs whose live bytes are within a share of the unmoved step's, the least seconds."""
    limit = planner.problems[0].live_peak_bytes * share
    rungs = [ladder.judged(rung) for ladder in planner.ladders for rung in range(len(ladder.targets))]
    drafts = [judged.draft for judged in rungs if judged is not None]
    return min(d.timing.total_s for d in drafts if live_peak(planner.flow, *d.choice) <= limit)


def test_restarts_find_what_one_order_of_prices_misses(monkeypatch):
    graph, device = training_step(RESTARTED, 2048, 256), DeviceModel("gpu")
    many = fastest_within(Optimizer(graph, device).planner, 0.69)
    monkeypatch.setattr(planning, "RESTARTS", {})
    assert many < 0.8 * fastest_within(Optimizer(graph, device).planner, 0.69)


@pytest.mark.parametrize("sweeps", [20, 60, 200])
def test_who_allows_more_than_swapping_gets_what_swapping_alone_finds(sweeps: int, monkeypatch):
    """Ladder by ladder, and rung by rung."""
    graph = training_step(RESTARTED * 4, 512, 64)
    kernels = len(optimizer_of(graph).planner.problems[0].order)
    monkeypatch.setattr(planning, "KERNELS_SWEPT", sweeps * kernels)
    swaps, more = (
        {(ladder.solve, tuple(ladder.problem.order), ladder.count) for ladder in optimizer.planner.ladders}
        for optimizer in (optimizer_of(graph, tactics=tactics) for tactics in (("swap",), ("swap", "recompute")))
    )
    assert swaps < more


def test_large_steps_are_not_restarted(monkeypatch):
    graph = training_step(RESTARTED, 512, 64)
    assert len(optimizer_of(graph).planner.ladders) > len(planning.BOTH)
    monkeypatch.setattr(planning, "KERNELS_SWEPT", 20 * planning.MIN_SWEEPS)
    assert len(optimizer_of(graph).planner.ladders) <= len(planning.BOTH)


def test_rungs_that_are_one_choice_are_judged_once(monkeypatch):
    judged: list[object] = []
    planner = optimizer_of(parse_graph(LONG)).planner
    whole = planning.Judge.memory
    monkeypatch.setattr(planning.Judge, "memory", lambda self, *args: judged.append(args[0]) or whole(self, *args))
    assert planner.lowest().peak_bytes < planner.unmoved[0].apart.peak_bytes
    assert judged
    assert all(one != other for i, one in enumerate(judged) for other in judged[:i])


def test_a_higher_target_is_never_refused_when_a_lower_one_is_met():
    flow = facts(CHAIN)
    problem = problem_of(flow)
    met = [belady.solve(problem, LiveTarget(units * UNIT)) is not None for units in range(6)]
    assert met == sorted(met)


def test_how_far_ahead_a_copy_back_starts_follows_from_the_rate_of_the_link():
    chain = "".join(f"%k{i + 1} = Exp(%k{i}) -> float32[25600]\n" for i in range(20))
    text = f"""\
%x = Placeholder() {{dtype=float32}} -> float32[25600]
%a = Exp(%x) -> float32[25600]
%b = Exp(%a) -> float32[25600]
%big = Concat(%b, %b) -> float32[102400]
%k0 = Sum(%big) -> float32[25600]
{chain}%d = Mul(%k20, %a) -> float32[25600]
feeds %x
fetches %d
"""
    problem = problem_of(facts(text))
    starts = problem.starts_s
    use = len(problem.order) - 1
    for ahead in (3, 7, 12):  # the kernels that should take as long as the copy, with its slack
        copy_s = (starts[use] - starts[use - ahead]) * 0.99
        rates = dataclasses.replace(problem.rates, in_bytes_per_s=4 * 25600 * belady.PREFETCH_SLACK / copy_s)
        choice = belady.solve(dataclasses.replace(problem, rates=rates), LiveTarget(problem.live_peak_bytes - 1))
        assert choice is not None
        (eviction,) = choice.intervals
        assert (eviction.use, eviction.back) == (use, use - ahead)
