"""Targets of live bytes: a solver's choice is the same for all targets with the same answers."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import training_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layered_steps import Layer, training_step
from planner_problems import problem_of

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.compiler.compiler import Optimizer
from tfswap.kernels.device import DeviceModel
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.solver_table import BOTH, RESTARTS
from tfswap.planner.solvers import cheapest_eviction, meng, published

CPU = DeviceModel()
DRAWN = cheapest_eviction.solver(RESTARTS[frozenset({"swap", "recompute"})][4])
SOLVERS = (*BOTH, DRAWN, meng.solve, published.sqrt, published.superneurons, published.vdnn_all)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(training_steps(), st.integers(30, 100), st.floats(0, 1))
def test_all_targets_in_the_range_have_the_same_choice(graph, percent, share):
    problem = problem_of(analyse_dataflow(graph, CPU))
    peak = problem.live_peak_bytes
    for solve in SOLVERS:
        target = LiveTarget(peak * percent // 100)
        choice = solve(problem, target)
        assert target.least <= target.nbytes < target.beyond
        last = int(min(target.beyond - 1, peak))
        for other in {target.least, int(target.least + share * (last - target.least)), last}:
            assert solve(problem, LiveTarget(other)) == choice


def test_a_ladder_asks_its_solver_once_for_what_is_the_same():
    layers = [Layer(kind, (3 * i) // 4) for i, kind in enumerate(("dense", "relu", "scale", "add") * 4)]
    ladders = Optimizer(training_step(layers, 512, 128), CPU).planner.ladders
    asked: list[int] = []
    for ladder in ladders:
        solve = ladder.solve
        ladder.solve = lambda problem, target, solve=solve: asked.append(target.nbytes) or solve(problem, target)
        chosen = [ladder.choice(target) for target in ladder.targets]
        assert chosen == [solve(ladder.problem, LiveTarget(target)) for target in ladder.targets]
    assert len(asked) < sum(len(ladder.targets) for ladder in ladders) / 2


@pytest.mark.parametrize(
    ("live", "first", "after_last", "least", "beyond"),
    [
        ([5, 9, 3, 9, 4], 1, 4, 7, 11),
        ([9, 1], 0, 1, 3, 11),
        ([1, 2, 3], 3, 0, 5, float("inf")),
        ([], 0, 0, 0, float("inf")),
    ],
)
def test_positions_that_exceed_a_target(live, first, after_last, least, beyond):
    target = LiveTarget(10)
    assert target.first_exceeded(np.array(live, dtype=np.int64), 2) == first
    assert target.after_last_exceeded(np.array(live, dtype=np.int64), 2) == after_last
    assert (target.least, target.beyond) == (least, beyond)


def test_a_solver_that_computes_with_a_target_answers_for_no_other():
    target = LiveTarget(10)
    assert target.alone() == 10
    assert (target.least, target.beyond) == (10, 11)
