"""The exact solver: its choices keep the target, its bound holds, and it finds the optimum of small cases."""

from __future__ import annotations

import math
import sys

import pytest
from graphs import training_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layered_steps import Layer, training_step
from planner_problems import CHAIN, CPU, UNIT, check_choice, facts, live_peak, problem_of

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import kernel_seconds
from tfswap.analysis.dataflow import Dataflow
from tfswap.compiler.compiler import Optimizer
from tfswap.errors import TfswapError
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import Rates, default_rates
from tfswap.plan.schedule import Interval, build_schedule
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.ordering import choose_order
from tfswap.planner.problem import Choice, Problem, make_problem
from tfswap.planner.solver_table import BOTH
from tfswap.planner.solvers import milp, milp_stages
from tfswap.simulator.timing import simulate_time

pytest.importorskip("scipy")
LIMIT_S = 20.0

some = settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],  # the same patch for all
)


def problem_on(device: DeviceModel, flow: Dataflow) -> Problem:
    rates = default_rates(device)
    seconds_of = [kernel_seconds(node, rates) for node in flow.nodes]
    return make_problem(flow, choose_order(flow, seconds_of), rates, seconds_of)


def seconds(problem: Problem, choice: Choice) -> float:
    return simulate_time(problem.flow, build_schedule(*choice), problem.cost_s, problem.rates).total_s


@pytest.mark.parametrize("device", [CPU, DeviceModel("gpu")], ids=["cpu", "gpu"])
@pytest.mark.parametrize("followed", [0, milp_stages.MAX_FOLLOWED])
@some
@given(training_steps(max_layers=4), st.integers(50, 100))
def test_the_choice_keeps_the_target_and_no_solver_beats_the_bound(monkeypatch, followed, device, graph, percent):
    monkeypatch.setattr(milp_stages, "MAX_FOLLOWED", followed)
    flow = analyse_dataflow(graph, CPU)
    problem = problem_on(device, flow)
    target = problem.live_peak_bytes * percent // 100
    found = milp.optimise(problem, target, 2.0)
    others = [choice for solve in BOTH if (choice := solve(problem, LiveTarget(target))) is not None]
    assert all(seconds(problem, choice) >= found.bound_s * (1 - milp.GAP_SHARE) for choice in others)
    if found.choice is None:
        assert found.total_s == math.inf
        return
    check_choice(flow, found.choice)
    assert live_peak(flow, *found.choice) <= target
    assert found.total_s == seconds(problem, found.choice) >= found.bound_s * (1 - milp.GAP_SHARE)


# In the given order `skip1` reuses the buffer of `back2`. Where that is kept, it reuses that of `relu0`, recomputed.
OTHER_BUFFER = """\
%x = Placeholder() {dtype=float32} -> float32[512,130]
%relu0 = Relu(%x) {T=float32} -> float32[512,130]
%mix1 = Mul(%relu0, %x) {T=float32} -> float32[512,130]
%relu2 = Relu(%mix1) {T=float32} -> float32[512,130]
%relu3 = Relu(%relu2) {T=float32} -> float32[512,130]
%loss = L2Loss(%relu3) {T=float32} -> float32[]
%back3 = ReluGrad(%relu3, %relu3) {T=float32} -> float32[512,130]
%back2 = ReluGrad(%back3, %relu2) {T=float32} -> float32[512,130]
%back1 = Mul(%back2, %x) {T=float32} -> float32[512,130]
%skip1 = Mul(%back2, %relu0) {T=float32} -> float32[512,130]
%back0 = ReluGrad(%back1, %relu0) {T=float32} -> float32[512,130]
feeds %x
fetches %loss
"""


def test_a_buffer_that_is_kept_leaves_the_output_another_to_reuse():
    problem = problem_on(DeviceModel("gpu"), facts(OTHER_BUFFER))
    faster = Choice([1, 2, 3, 4, 5, 6, 7, 8, 1, 9, 1, 8, 10], [Interval(3, 2, 5, 6, 6)])
    target = live_peak(problem.flow, *faster)
    found = milp.optimise(problem, target, LIMIT_S)
    assert found.bound_s <= seconds(problem, faster)


LONGER = """\
%x = Placeholder() {dtype=float32} -> float32[25600]
%a = MatMul(%x, %x) -> float32[25600]
%b = MatMul(%a, %a) -> float32[25600]
%c = MatMul(%b, %b) -> float32[25600,2]
%e = MatMul(%c, %c) -> float32[256]
%d = MatMul(%e, %a) -> float32[256]
feeds %x
fetches %d
"""


def priced_problem(copy_s: float) -> Problem:
    """LONGER, its kernels a second each; a copy of a takes the lane, and the kernels, `copy_s`."""
    flow = facts(LONGER)
    order = [flow.place[name] for name in ("a", "b", "c", "e", "d")]
    rates = Rates(1.0, 1.0, 1.0, UNIT / copy_s, UNIT / copy_s, 0.0, copy_share=1.0)
    return make_problem(flow, order, rates, [1.0] * len(flow.nodes))


@pytest.mark.parametrize(("copy_s", "reruns", "swaps", "extra_s"), [(0.25, 0, 1, 0.5), (50.0, 1, 0, 1.0)])
def test_it_copies_what_is_cheaper_to_copy_and_runs_again_what_is_cheaper_to_run(copy_s, reruns, swaps, extra_s):
    problem = priced_problem(copy_s)
    # It peaks while c runs, which does not need a; d does.
    found = milp.optimise(problem, problem.live_peak_bytes - UNIT // 2, LIMIT_S)
    assert found.proven
    assert found.choice is not None
    assert (len(found.choice.order), len(found.choice.intervals)) == (5 + reruns, swaps)
    assert found.total_s == pytest.approx(5 + extra_s)
    assert found.bound_s == pytest.approx(5 + extra_s, rel=2 * milp.GAP_SHARE)


def test_it_knows_what_copies_take_that_have_no_memory_at_the_same_time():
    """A step that mostly waits for copies, in and out by turns: what is found takes no longer than the bound."""
    layers = [Layer("dense"), Layer("relu"), Layer("relu", 1), Layer("add", 1)]
    planner = Optimizer(training_step(layers, 8192, 128), DeviceModel("gpu")).planner
    problem = planner.problems[0]
    found = milp.optimise(problem, problem.live_peak_bytes * 84 // 100, 10 * LIMIT_S)
    assert found.proven
    assert found.total_s > 3 * problem.starts_s[-1]
    assert found.total_s == pytest.approx(found.bound_s, rel=2 * milp.GAP_SHARE)


SMALL_TOO = """\
%x = Placeholder() {dtype=float32} -> float32[25600]
%a = SplitV(%x) {num_split=2} -> float32[25600], float32[63]
%b = MatMul(%a, %a) -> float32[25600]
%c = MatMul(%b, %b) -> float32[25600,2]
%e = MatMul(%c, %c) -> float32[256]
%d = MatMul(%e, %a) -> float32[256]
%f = MatMul(%d, %a:1) -> float32[256]
feeds %x
fetches %f
"""


def test_what_is_small_is_gone_too_where_its_kernel_runs_again():
    flow = facts(SMALL_TOO)
    order = [flow.place[name] for name in ("a", "b", "c", "e", "d", "f")]
    rates = Rates(1.0, 1.0, 1.0, UNIT / 50, UNIT / 50, 0.0, copy_share=1.0)
    problem = make_problem(flow, order, rates, [1.0] * len(flow.nodes))
    again = Choice([*order[:4], order[0], *order[4:]], [])
    found = milp.optimise(problem, problem.live_peak_of(again), LIMIT_S)
    assert found.proven
    assert found.choice is not None
    assert (found.choice.order, found.choice.intervals) == (again.order, [])


def test_what_can_not_be_met_is_proven_so():
    found = milp.optimise(problem_of(facts(CHAIN)), 3 * UNIT, LIMIT_S)
    assert found == milp.Optimum(None, math.inf, math.inf, True)


def test_out_of_time_it_proves_nothing():
    problem = priced_problem(1.0)
    found = milp.optimise(problem, problem.live_peak_bytes, 0.0)
    assert found.bound_s <= problem.starts_s[-1] * (1 + milp.GAP_SHARE)
    assert found.proven == (found.total_s < math.inf)


def test_without_scipy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(TfswapError, match=r"pip install 'tfswap\[exact\]'"):
        milp.optimise(problem_of(facts(CHAIN)), 3 * UNIT, LIMIT_S)
