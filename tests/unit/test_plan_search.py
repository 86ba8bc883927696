"""The search for a faster plan near one whose kernels wait for copies."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from unittest import mock

from graphs import training_steps
from hypothesis import given
from layered_steps import Layer, training_step
from planner_problems import CPU, live_peak, slow
from test_home_copies import MIB, RATES, at_home, choices

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import Costs
from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.graph import Graph
from tfswap.kernels.target import Target
from tfswap.plan.plan import Plan
from tfswap.plan.schedule import Interval
from tfswap.planner import plan_search
from tfswap.planner.candidates import Judged
from tfswap.planner.plan_search import faster_choices, is_worthwhile
from tfswap.planner.planner import Planner
from tfswap.planner.problem import NEVER, Choice
from tfswap.planner.validate import require_fit
from tfswap.simulator.timing import Timing


def planner_of(flow: Dataflow, copy_s: float) -> Planner:
    """With kernels of a second, and copies of a MiB that take `copy_s`."""
    rates = dataclasses.replace(RATES, in_bytes_per_s=MIB / copy_s, out_bytes_per_s=MIB / copy_s)
    return Planner(flow, Target(CPU), costs=Costs(rates))


def dense(rows: int, layers: int = 12) -> Graph:
    """Weights of 1 MiB."""
    return training_step([Layer("dense", i) for i in range(layers)], rows, 512)


def seconds(planner: Planner, choice: Choice) -> float:
    return planner.timing(choice._replace(splits=())).total_s


def least_limit(planner: Planner, choice: Choice) -> int:
    """The least limit that a choice fits in."""
    found = Judged(planner, choice, 0.0).lowest(NEVER)
    assert found is not None
    return found.peak_bytes


def require_near(planner: Planner, choice: Choice) -> None:
    """Each of the faster choices is a valid plan that fits where `choice` does, faster than the one before."""
    flow, best_s = planner.flow, seconds(planner, choice)
    limit_bytes = least_limit(planner, choice)
    for near in faster_choices(planner, choice, limit_bytes):
        assert Judged(planner, near, 0.0).fitting(limit_bytes) is not None
        near_s = seconds(planner, near)
        assert near_s < best_s
        best_s = near_s
        order, evictions = near.named(flow)
        require_fit(Plan("", None, order, evictions, 0, 0, 0, 1.0, "test"), planner.problems[0])


@slow
@given(training_steps())
def test_what_is_found_is_a_faster_plan_that_fits(graph: Graph) -> None:
    for flow in (at_home(graph.copy()), analyse_dataflow(graph, CPU)):
        planner = planner_of(flow, copy_s=3.0)
        with mock.patch.object(plan_search, "TRIES", 200):
            for choice in choices(planner)[:6]:
                require_near(planner, choice)


def test_a_step_whose_kernels_wait_for_variables_gets_faster() -> None:
    planner = planner_of(at_home(dense(1)), copy_s=2.0)
    found = planner.candidate(4 * MIB)
    assert found is not None and is_worthwhile(found.timing)
    improved = planner.near.improved(found, 4 * MIB)
    assert improved.timing.total_s < 0.98 * found.timing.total_s and improved.peak_bytes <= 4 * MIB
    assert planner.near.found == [improved]
    require_near(planner, found.choice)


def test_copies_stay_before_kernels_that_wait_for_them_without_reading_them() -> None:
    graph = dense(1)
    by_name = {node.name: node for node in graph}
    for layer in range(10):
        graph.add_control(by_name[f"dense{layer}"], by_name[f"read{layer + 2}"])
    planner = planner_of(at_home(graph), copy_s=2.0)
    for choice in choices(planner)[:6]:
        require_near(planner, choice)


def test_a_copy_whose_tensor_is_swapped_stays_before_the_copy_out() -> None:
    """A tensor with a variable's value is swapped where the variable is written before the tensor is read again."""
    planner = planner_of(at_home(dense(1, layers=4)), copy_s=2.0)
    choice = planner.unmoved[0].draft.choice
    for position, kernel in enumerate(choice.order):
        value = planner.flow.loads.get(kernel)
        reads = [p for p, k in enumerate(choice.order) if value is not None and value in planner.flow.reads[k]]
        for last, then in pairwise(reads):
            if then - last > 2:
                swapped = Interval(value, position, last + 1, then, then)
                require_near(planner, choice._replace(intervals=[swapped]))


def test_a_step_gets_faster_where_most_that_is_near_leaves_holes() -> None:
    """The candidate fits in exact chunks only, and the fastest choices of as few live bytes fit in no way."""
    planner = planner_of(at_home(dense(1, layers=8)), copy_s=2.0)
    found = planner.candidate(3 * MIB)
    assert found is not None and found.choice.splits
    improved = planner.near.improved(found, 3 * MIB)
    assert improved.timing.total_s < 0.98 * found.timing.total_s and improved.peak_bytes <= 3 * MIB


def test_a_step_whose_kernels_wait_for_swapped_tensors_gets_faster() -> None:
    planner = planner_of(analyse_dataflow(dense(512), CPU), copy_s=2.0)
    choice = min(
        (c for c in choices(planner) if c.intervals), key=lambda c: live_peak(planner.flow, c.order, c.intervals)
    )
    near = faster_choices(planner, choice, least_limit(planner, choice))
    assert near and seconds(planner, near[-1]) < 0.98 * seconds(planner, choice)
    require_near(planner, choice)


def test_steps_without_waits_and_large_steps_are_not_searched() -> None:
    assert not is_worthwhile(Timing(1.0, 1.0, 0.0, 0.0, 0.0))
    assert is_worthwhile(Timing(1.1, 1.0, 0.0, 0.1, 0.0)) and is_worthwhile(Timing(1.1, 1.0, 0.1, 0.0, 0.0))
    planner = planner_of(at_home(dense(1)), copy_s=2.0)
    found = planner.candidate(4 * MIB)
    assert found is not None and faster_choices(planner, found.choice, 4 * MIB)
    with mock.patch.object(plan_search, "STEPS_VISITED", plan_search.FEWEST_TRIES * len(found.choice.order) - 1):
        assert not faster_choices(planner, found.choice, 4 * MIB)
