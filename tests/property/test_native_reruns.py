"""The search over reruns in C++ has the results of the one in Python."""

from __future__ import annotations

from random import Random
from unittest import mock

import pytest

pytest.importorskip("tensorflow")

from graphs import training_steps
from hypothesis import given
from hypothesis import strategies as st
from instances.graphs import UNIT_BYTES, Instance
from layered_steps import Layer, training_step
from planner_problems import CPU, problem_of, slow

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.ir.graph import Graph
from tfswap.kernels.hardware import default_rates
from tfswap.native.load import load
from tfswap.planner.problem import NEVER, Problem, make_problem
from tfswap.planner.solvers import native_reruns, rerun_search
from tfswap.planner.solvers.rerun_layout import facts_of

VISITS = 3000


def compare(problem: Problem, target: int, price: float, begins: list[list[int]]) -> list[int] | None:
    load()
    assert native_reruns.is_available()
    facts = facts_of(problem, price)
    found = rerun_search.searched(facts, target, VISITS, begins)
    with mock.patch.object(native_reruns, "is_available", lambda: False):
        assert rerun_search.searched(facts, target, VISITS, begins) == found
    return found


@slow
@given(training_steps(), st.integers(30, 100), st.sampled_from((NEVER, 0.1, 0.5)))
def test_training_steps(graph: Graph, percent: int, price: float):
    problem = problem_of(analyse_dataflow(graph, CPU))
    compare(problem, problem.live_peak_bytes * percent // 100, price, [[]])


@pytest.mark.parametrize("price", [NEVER, 0.5])
def test_a_deeper_step_from_a_given_choice(price: float):
    draw = Random(3)
    layers = [Layer(draw.choice(("dense", "relu", "scale", "add")), draw.randint(0, i)) for i in range(12)]
    problem = problem_of(analyse_dataflow(training_step(layers, 2048, 256), CPU))
    facts, peak = facts_of(problem, price), problem.live_peak_bytes
    given = rerun_search.RerunSearch(facts, peak * 70 // 100, VISITS).run([[]])
    assert given
    assert compare(problem, peak * 85 // 100, price, [given, []]) not in (None, given)


@pytest.mark.parametrize("percent", [55, 65, 75, 90])
def test_irregular_graphs(percent: int):
    draw, count = Random(percent), 40
    inputs = ((), *(tuple({draw.randrange(max(0, v - 12), v) for _ in range(2)}) for v in range(1, count)))
    sizes, times = (tuple(draw.randint(1, 9) for _ in range(count)) for _ in range(2))
    instance = Instance("irregular", sizes, times, inputs, tuple(range(count)))
    problem = make_problem(instance.flow(), instance.order, default_rates(CPU), instance.cost_s)
    compare(problem, instance.peak * percent // 100 * UNIT_BYTES, NEVER, [[]])
