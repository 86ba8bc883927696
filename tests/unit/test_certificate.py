"""Bounds of all plans of a step: no plan passes them, and they are close to the best ones."""

from __future__ import annotations

import pytest
from graphs import training_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layered_steps import Layer, training_step
from planner_problems import CPU, TWO_CORES

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import kernel_seconds
from tfswap.compiler.certify import bounds_of
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.errors import InfeasibleMemoryLimit
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import default_rates
from tfswap.plan.schedule import build_schedule
from tfswap.planner.certificate import LeastCosts, LeastWork
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.ordering import rank_orders
from tfswap.planner.problem import make_problem
from tfswap.planner.solver_table import BOTH
from tfswap.planner.solvers import milp
from tfswap.simulator.timing import simulate_time

DEVICES = {"cpu": CPU, "gpu": DeviceModel("gpu")}
ROUNDING = 1 + 1e-9
TACTICS = ("swap", "recompute")
ALL = (*TACTICS, "encode", "state")

some = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.mark.parametrize("device", DEVICES)
@some
@given(graph=training_steps(max_layers=6), percent=st.integers(40, 100))
def test_no_choice_in_any_order_is_faster_or_smaller(device, graph, percent):
    flow = analyse_dataflow(graph, CPU)
    rates = default_rates(DEVICES[device])
    cost_s = [kernel_seconds(node, rates) for node in flow.nodes]
    problems = [make_problem(flow, order, rates, cost_s) for order in rank_orders(flow, cost_s)]
    target = problems[0].live_peak_bytes * percent // 100
    costs = LeastCosts(problems[0], TACTICS, LeastWork.in_turn(flow, cost_s))
    choices = [(p, c) for p in problems for solve in BOTH if (c := solve(p, LiveTarget(target))) is not None]
    taken = [(simulate_time(flow, build_schedule(*c), cost_s, rates).total_s, p.live_peak_of(c)) for p, c in choices]
    for seconds, peak_bytes in taken:
        if peak_bytes <= target:
            assert costs.least_seconds(target, seconds) <= seconds * ROUNDING
            assert costs.least_seconds(target, 2 * seconds) <= seconds * ROUNDING
        assert costs.least_bytes(seconds, 2 * peak_bytes) <= peak_bytes


@some
@given(graph=training_steps(max_layers=3), percent=st.integers(50, 100))
def test_the_exact_solver_finds_nothing_faster(graph, percent):
    pytest.importorskip("scipy")
    flow = analyse_dataflow(graph, CPU)
    rates = default_rates(CPU)
    cost_s = [kernel_seconds(node, rates) for node in flow.nodes]
    problem = make_problem(flow, rank_orders(flow, cost_s)[0], rates, cost_s)
    target = problem.live_peak_bytes * percent // 100
    found = milp.optimise(problem, target, 5.0)
    costs = LeastCosts(problem, TACTICS, LeastWork.in_turn(flow, cost_s))
    if found.choice is not None and problem.live_peak_of(found.choice) <= target:
        assert costs.least_seconds(target, 2 * found.total_s) <= found.total_s * ROUNDING


@pytest.mark.tensorflow  # the unoptimised step is as Grappler leaves it
@pytest.mark.parametrize("model", [CPU, TWO_CORES, DeviceModel("gpu")], ids=["cpu", "two_cores", "gpu"])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(graph=training_steps(max_layers=5))
def test_no_plan_of_any_limit_passes_the_bounds(model, graph):
    optimizer = Optimizer(graph, model, Options())
    floor, peak = optimizer.floor_bytes(), optimizer.baseline.peak_bytes
    plans = []
    for share in (0.0, 0.2, 0.5, 0.8):
        try:
            plans.append(optimizer.plan(int(floor + share * max(0, peak - floor)), ordered=True))
        except InfeasibleMemoryLimit:
            assert share > 0.0, "the floor has a plan"
    for plan in plans:
        bounds = bounds_of(optimizer, plan)
        assert bounds is not None
        for other in plans:
            if other.planned_peak_bytes <= plan.limit_bytes:
                assert other.seconds >= bounds.seconds / ROUNDING
            if other.seconds <= plan.seconds:
                assert other.planned_peak_bytes >= bounds.peak_bytes


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("tactics", "slower"), [(("swap",), 1.02), (("recompute",), 1.05), (TACTICS, 1.02), (ALL, 1.05)]
)
def test_plans_of_dense_layers_are_proven_close_to_the_best(tactics, slower):
    graph = training_step([Layer("dense"), Layer("relu")] * 8, rows=512, width=128)
    optimizer = Optimizer(graph, CPU, Options(tactics))
    for percent in (50, 60, 70):
        plan = optimizer.plan(optimizer.baseline.peak_bytes * percent // 100, ordered=True)
        bounds = bounds_of(optimizer, plan)
        assert bounds is not None
        assert bounds.seconds <= plan.seconds * ROUNDING
        assert plan.seconds <= slower * bounds.seconds
        assert 0.5 * plan.planned_peak_bytes < bounds.peak_bytes <= plan.planned_peak_bytes
