"""Published policies as solvers: valid choices, and the differences between them."""

from __future__ import annotations

import pytest
from graphs import training_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layered_steps import Layer, training_step
from planner_problems import CPU, check_choice, live_peak, optimizer_of, problem_of

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.errors import InfeasibleMemoryLimit, TfswapError
from tfswap.planner import ladder
from tfswap.planner import planner as planning
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.problem import Problem
from tfswap.planner.solvers import milp, published

SOLVERS = {
    "sqrt": published.sqrt,
    "superneurons": published.superneurons,
    "vdnn_all": published.vdnn_all,
    "vdnn_conv": published.vdnn_conv,
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("name", SOLVERS)
@given(training_steps(), st.integers(50, 100))
def test_a_choice_is_valid_and_keeps_the_target(name, graph, percent):
    flow = analyse_dataflow(graph, CPU)
    problem = problem_of(flow)
    target = problem.live_peak_bytes * percent // 100
    choice = SOLVERS[name](problem, LiveTarget(target))
    if choice is not None:
        check_choice(flow, choice)
        assert live_peak(flow, *choice) <= target


def deep() -> Problem:
    """Twelve layers, each a product and two cheap kernels, of 1 MiB tensors."""
    layers = [Layer(kind, 3 * i + n) for i in range(12) for n, kind in enumerate(("dense", "relu", "scale"))]
    return problem_of(analyse_dataflow(training_step(layers, 2048, 128), CPU))


def lowest(problem: Problem, name: str) -> int:
    """The lowest percentage of the live peak that a solver meets."""
    peak = problem.live_peak_bytes
    return min(p for p in range(5, 101) if SOLVERS[name](problem, LiveTarget(peak * p // 100)) is not None)


@pytest.mark.parametrize("name", SOLVERS)
def test_each_saves_memory_on_a_deep_step(name):
    problem = deep()
    percent = lowest(problem, name)
    assert percent < 90
    choice = SOLVERS[name](problem, LiveTarget(problem.live_peak_bytes * percent // 100))
    assert choice is not None
    again = len(choice.order) - len(problem.order)
    assert (again > 0, len(choice.intervals) > 0) == (
        (True, False) if name in ("sqrt", "superneurons") else (False, True)
    )


def test_sqrt_makes_each_kernel_again_at_most_once():
    problem = deep()
    choice = published.sqrt(problem, LiveTarget(problem.live_peak_bytes * lowest(problem, "sqrt") // 100))
    assert choice is not None
    assert max(map(choice.order.count, choice.order)) == 2


def test_superneurons_runs_no_contraction_again():
    problem = deep()
    percent = lowest(problem, "superneurons")
    choice = published.superneurons(problem, LiveTarget(problem.live_peak_bytes * percent // 100))
    assert choice is not None
    again = {kernel for kernel in choice.order if choice.order.count(kernel) > 1}
    assert {problem.flow.nodes[kernel].op for kernel in again} <= {"Relu", "Mul"}


def test_vdnn_conv_moves_a_part_of_what_vdnn_all_moves():
    problem = deep()
    every, some = (solve(problem, LiveTarget(1 << 40)) for solve in (published.vdnn_all, published.vdnn_conv))
    assert every is not None
    assert some is not None
    assert set(some.intervals) < set(every.intervals)


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", SOLVERS)
def test_options_take_them_by_name(name):
    layers = [Layer(kind, 3 * i + n) for i in range(12) for n, kind in enumerate(("dense", "relu", "scale"))]
    optimizer = optimizer_of(training_step(layers, 2048, 128), solver=name)
    floor = optimizer.floor_bytes()
    assert floor < optimizer.baseline.peak_bytes
    assert optimizer.plan(floor).planned_peak_bytes <= floor
    with pytest.raises(InfeasibleMemoryLimit):
        optimizer.plan(floor - 1)


@pytest.mark.parametrize(
    ("solver", "tactics", "reported"),
    [
        ("best", ("swap",), "solver is 'best'; known are 'default'"),
        ("sqrt", ("swap",), "solver='sqrt' takes tactics 'recompute'; or 'recompute' and 'swap', and tactics is"),
        ("vdnn_all", (), "solver='vdnn_all' takes tactics 'swap'; or"),
    ],
)
def test_a_solver_without_its_tactics_is_refused(solver, tactics, reported):
    with pytest.raises(TfswapError) as error:
        optimizer_of(training_step([Layer("dense", 0)], 64, 64), tactics=tactics, solver=solver)
    assert reported in str(error.value)


def test_all_solvers_are_asked_alike(monkeypatch):
    pytest.importorskip("scipy")
    for module, name in (
        (ladder, "BISECTIONS"),
        (ladder, "MIN_SWEEPS"),
        (planning, "MIN_SWEEPS"),
        (planning, "MAX_RUNGS"),
    ):
        monkeypatch.setattr(module, name, 4)  # the program takes a while for each
    monkeypatch.setattr(milp, "SOLVE_S", 1.0)
    graph = training_step([Layer("dense", 0), Layer("relu", 1), Layer("dense", 2)], 2048, 128)
    default = optimizer_of(graph, tactics=("swap", "recompute"))
    optimal = optimizer_of(graph, tactics=("swap", "recompute"), solver="exact")
    limit = max(default.floor_bytes(), optimal.floor_bytes())
    assert optimal.plan(limit).seconds <= default.plan(limit).seconds * 1.01
    assert optimal.plan(limit).solver == "exact"
