"""The search over reruns: its layout, and its choices compared with the exact solver's."""

from __future__ import annotations

import dataclasses
import math
from random import Random

import numpy as np
import pytest
from graphs import training_steps
from hypothesis import given
from hypothesis import strategies as st
from instances.graphs import Instance
from layered_steps import Layer, training_step
from planner_problems import CPU, check_choice, live_peak, problem_of, slow

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.ir.graph import Graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import default_rates
from tfswap.kernels.target import Target
from tfswap.plan.schedule import build_schedule
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.planner import Planner
from tfswap.planner.problem import NEVER, Choice, Problem, make_problem
from tfswap.planner.solver_table import RESTARTS, SEARCHES
from tfswap.planner.solvers import milp, rerun_search
from tfswap.planner.solvers.rerun_layout import TICKS, Facts, Layout, facts_of, values_of
from tfswap.simulator.timing import simulate_time

NEITHER = rerun_search.solver(lambda *_: None, visits=20_000)
COPIES = rerun_search.solver(lambda *_: None, visits=20_000, copy_price=0.5)


def random_keys(facts: Facts, draw: Random) -> list[int]:
    """Reruns and returns that may be, each after the first run."""
    keys: set[int] = set()
    for _ in range(draw.randint(0, 2 * facts.count)):
        number, position = draw.randrange(facts.copies + facts.count), draw.randrange(facts.count)
        maker = facts.makers[number] if number < facts.copies else number
        if maker - facts.copies < position <= facts.until[number]:
            keys.add(position * facts.width + number)
    return sorted(keys)


def live_of(layout: Layout) -> list[int]:
    """The live bytes of a layout, computed from its keys alone."""
    facts, runs = layout.facts, []
    for key in layout.keys:
        position, number = divmod(key, facts.width)
        own = number == facts.width - 1
        number = facts.copies + position if own else number
        extra = facts.extra[position] if own else facts.waiting[position] + facts.needs[number]
        runs.append((number, extra))
    live = [extra for _, extra in runs]
    for v in range(facts.copies):
        made, last = -1, -1
        for at, (number, _) in enumerate([*runs, (v, 0)]):
            if v in layout.makes[number] or at == len(runs):
                for place in range(made, last + 1) if made >= 0 else ():
                    live[place] += facts.nbytes[v]
                made = last = at
            elif v in layout.reads[number]:
                last = at
    return live


@slow
@given(training_steps(), st.randoms(use_true_random=False))
def test_a_changed_layout_is_that_of_its_keys(graph: Graph, draw: Random):
    facts = facts_of(problem_of(analyse_dataflow(graph, CPU)), 0.5)
    layout = Layout(facts)
    for _ in range(4):
        keys = random_keys(facts, draw)
        layout.become(keys)
        assert layout.added == keys
        assert layout.ticks == sum(facts.ticks[key % facts.width] for key in keys)
        assert layout.live.tolist() == live_of(layout)
    layout.become([])
    assert layout.live.tolist() == Layout(facts).live.tolist()
    assert layout.marks == Layout(facts).marks


def test_without_reruns_the_layout_has_the_problems_live_bytes():
    problem = problem_of(analyse_dataflow(training_step([Layer("dense")] * 4, 512, 128), CPU))
    assert Layout(facts_of(problem, NEVER)).live.tolist() == problem.live_bytes.tolist()


@slow
@given(training_steps(), st.integers(40, 100))
def test_the_search_keeps_its_target(graph: Graph, percent: int):
    flow = analyse_dataflow(graph, CPU)
    problem = problem_of(flow)
    target = problem.live_peak_bytes * percent // 100
    for solve in (NEITHER, COPIES):
        choice = solve(problem, LiveTarget(target))
        if choice is not None:
            check_choice(flow, choice)
            assert live_peak(flow, *choice) <= target
            assert solve is COPIES or not choice.intervals


def irregular(seed: int, copies: bool) -> Problem:
    """Thirteen nodes that read up to two of the six before them; copies take nearly no time, or forever."""
    draw, count = Random(seed), 13
    inputs = ((), *(tuple({draw.randrange(max(0, v - 6), v) for _ in range(2)}) for v in range(1, count)))
    sizes, times = (tuple(draw.randint(1, 9) for _ in range(count)) for _ in range(2))
    instance, rates = Instance("irregular", sizes, times, inputs, tuple(range(count))), default_rates(CPU)
    rate = 1e18 if copies else 1.0
    rates = dataclasses.replace(rates, in_bytes_per_s=rate, out_bytes_per_s=rate, copy_latency_s=0.0)
    return make_problem(instance.flow(), instance.order, rates, instance.cost_s)


def seconds(problem: Problem, choice: Choice) -> float:
    return simulate_time(problem.flow, build_schedule(*choice), problem.cost_s, problem.rates).total_s


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 5, 7, 8, 9])
def test_the_search_finds_the_exact_solvers_time(seed: int):
    pytest.importorskip("scipy")
    problem = irregular(seed, copies=False)
    target = problem.live_peak_bytes * 90 // 100
    exact, choice = milp.optimise(problem, target, 20.0), NEITHER(problem, LiveTarget(target))
    assert choice is not None and live_peak(problem.flow, *choice) <= target
    assert exact.proven
    assert exact.bound_s * 0.999 <= seconds(problem, choice) <= exact.bound_s * 1.001


@pytest.mark.parametrize("seed", [0, 3, 4, 9])
def test_swaps_are_chosen_where_they_are_cheaper(seed: int):
    problem = irregular(seed, copies=True)
    target = problem.live_peak_bytes * 90 // 100
    reruns, choice = NEITHER(problem, LiveTarget(target)), COPIES(problem, LiveTarget(target))
    assert reruns is not None and choice is not None and choice.intervals
    assert live_peak(problem.flow, *choice) <= target
    assert seconds(problem, choice) < seconds(problem, reruns)


def test_a_choice_is_read_back_as_its_keys():
    problem = irregular(0, copies=True)
    facts, target = facts_of(problem, 0.5), int(0.9 * problem.live_peak_bytes)
    keys = rerun_search.RerunSearch(facts, target, 20_000).run([[]])
    assert keys
    choice = rerun_search._choice_of(problem, facts, keys, LiveTarget(target))
    again = rerun_search._keys_of(problem, facts, choice)
    kernels = {key for key in keys if key % facts.width >= facts.copies}
    assert {key for key in again if key % facts.width >= facts.copies} == kernels
    returned = {values_of(problem)[key % facts.width] for key in again if key % facts.width < facts.copies}
    assert returned == {move.value for move in choice.intervals}


def test_times_are_shares_of_the_step():
    problem = irregular(2, copies=False)
    facts = facts_of(problem, NEVER)
    assert sum(facts.ticks[facts.copies :]) == pytest.approx(TICKS, rel=1e-6)
    assert all(until == -1 for until in facts.until[: facts.copies])


def test_a_target_below_the_largest_working_set_is_not_searched(monkeypatch: pytest.MonkeyPatch):
    problem = irregular(2, copies=False)
    least = facts_of(problem, NEVER).least_bytes
    monkeypatch.setattr(rerun_search, "searched", lambda *_: pytest.fail("searched"))
    assert NEITHER(problem, LiveTarget(least - 1)) is None


def test_the_default_ends_with_the_search():
    """Where nothing is swapped, and in small steps, without one ladder less."""
    graph = training_step([Layer("dense"), Layer("relu")] * 3, 2048, 256)
    flow = analyse_dataflow(graph, CPU)
    for tactics in (("recompute",), ("swap", "recompute")):
        moves = frozenset(tactics)
        ladders = Planner(flow, Target(DeviceModel()), tactics=tactics).ladders
        assert ladders[-1].solve is SEARCHES[moves]
        assert len(ladders) > len(RESTARTS[moves])
    assert not any(
        ladder.solve in SEARCHES.values() for ladder in Planner(flow, Target(DeviceModel()), tactics=("swap",)).ladders
    )


def test_factors_are_around_one():
    logarithms = np.log(rerun_search.FACTORS)
    assert abs(float(logarithms.mean())) < 1e-3
    assert math.isclose(float(logarithms.std()), rerun_search.NOISE, rel_tol=0.02)
