"""Published graphs: what is read of them, what is refused, and the schedules of the planner and of other solvers."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import solver_instances
from hypothesis import given
from hypothesis import strategies as st
from instances import checkmate, moccasin, planned
from instances.graphs import UNIT_BYTES, DamagedInstance, Instance, instance_of, read_instance
from planner_problems import CPU, slow

from tfswap.kernels.hardware import default_rates
from tfswap.plan.schedule import build_schedule
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.problem import make_problem
from tfswap.planner.solver_table import RECOMPUTE
from tfswap.planner.solvers import rerun_search
from tfswap.simulator.memory import simulate_memory

NET: dict[str, Any] = {
    "nodes": [{"id": n, "cost_ram": ram, "cost_cpu": cpu} for n, (ram, cpu) in enumerate(((4, 1), (2, 5), (3, 2)))],
    "links": [{"source": 0, "target": 1}, {"source": 1, "target": 2}, {"source": 0, "target": 2}],
}
RANDOM: dict[str, Any] = {
    "graph": {"order": [1, 0, 2]},
    "nodes": [{"name": n, "out_cost": n + 1, "duration": n} for n in range(3)],
    "links": [{"0": 0, "1": 2}, {"0": 1, "1": 2}],
}


@st.composite
def layered(draw: st.DrawFn) -> Instance:
    """A graph of up to nine nodes, each of which reads up to three earlier ones."""
    count = draw(st.integers(1, 9))
    costs = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    inputs = [tuple(sorted(draw(st.sets(st.integers(0, v - 1), max_size=3)))) if v else () for v in range(count)]
    return Instance("drawn", tuple(draw(costs)), tuple(draw(costs)), tuple(inputs), tuple(range(count)))


def test_both_forms_are_read():
    net, drawn = instance_of("net", NET), instance_of("random", RANDOM)
    assert (net.sizes, net.times, net.inputs, net.order) == ((4, 2, 3), (1, 5, 2), ((), (0,), (1, 0)), (0, 1, 2))
    assert (drawn.sizes, drawn.times, drawn.order) == ((1, 2, 3), (0, 1, 2), (1, 0, 2))
    assert (net.peak, net.floor, drawn.peak) == (9, 9, 6)


def changed(document: dict[str, Any], where: str, row: int, **fields: Any) -> dict[str, Any]:
    """A document with other fields in one row of a list; without those that are None."""
    document = copy.deepcopy(document)
    document[where][row] = {k: v for k, v in {**document[where][row], **fields}.items() if v is not None}
    return document


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], 'no list "nodes"'),
        ({"nodes": []}, 'no list "links"'),
        ({"nodes": [], "links": []}, "no nodes"),
        ({"nodes": [{"id": 0}, {"id": 0}], "links": []}, "or one twice"),
        (changed(NET, "nodes", 1, cost_ram=None), 'node 1: "cost_ram" is None, not a number'),
        (changed(NET, "nodes", 1, cost_cpu="5"), "node 1: \"cost_cpu\" is '5', not a number"),
        (changed(NET, "nodes", 2, cost_cpu=float("nan")), 'node 2: "cost_cpu" is nan, not a number'),
        (changed(NET, "nodes", 2, cost_ram=-1), 'node 2: "cost_ram" is -1, not a whole number of at least 0'),
        (changed(NET, "nodes", 2, cost_ram=2**50), 'the "cost_ram" of its nodes add up to'),
        (changed(NET, "links", 2, target=7), "edge 2 has an end, 7, that is no node"),
        (changed(NET, "links", 2, source=[0]), "edge 2 has an end, [0], that is no node"),
        (changed(NET, "links", 2, source=2, target=0), "a cycle, 0 -> 1 -> 2 -> 0"),
        ({**RANDOM, "graph": {"order": [0, 1]}}, "does not name each node once"),
        ({**RANDOM, "graph": {"order": [0, 1, 5]}}, "no list of nodes"),
        ({**RANDOM, "graph": {"order": [0, 2, 1]}}, "has node 2 before one that it reads"),
    ],
)
def test_what_is_damaged_is_named(document: Any, message: str):
    with pytest.raises(DamagedInstance) as error:
        instance_of("damaged", document)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, None])
def test_a_file_that_is_no_document_is_named(tmp_path: Path, text: str | None):
    path = tmp_path / "cut.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DamagedInstance, match="cut.json can't be read as JSON"):
        read_instance(path)
    path.write_text(json.dumps(changed(NET, "nodes", 0, cost_ram=-4)))
    with pytest.raises(DamagedInstance, match=r"cut.json: node 0: .* Download it again"):
        read_instance(path)


def test_a_schedule_needs_its_inputs_and_all_nodes():
    net = instance_of("net", NET)
    assert net.peak_of([0, 1, 0, 2]) == 9
    assert net.extra_time([0, 1, 0, 2]) == 1 / 8
    with pytest.raises(ValueError, match="node 1 runs at 0, before its input 0"):
        net.peak_of([1, 0, 2])
    with pytest.raises(ValueError, match="1 nodes never run"):
        net.peak_of([0, 1])


@slow
@given(layered(), st.integers(30, 100), st.randoms(use_true_random=False))
def test_schedules_keep_the_budget_and_peaks_are_the_simulators(instance: Instance, percent: int, draw: Any):
    budget = instance.peak * percent // 100
    again = [v for v in instance.order for _ in range(1 + (draw.random() < 0.3))]
    flow, place = instance.flow(), {v: i for i, v in enumerate(instance.order)}
    steps = build_schedule([place[v] for v in again], ())
    assert simulate_memory(flow, steps, live=True).peak_bytes == instance.peak_of(again) * UNIT_BYTES
    found = {}
    for solve in (planned.ladders, planned.search, planned.checkpoints):
        order = found[solve] = solve(instance, budget)
        assert order is None or instance.peak_of(order) <= budget
        assert order is None or budget >= instance.floor
    problem = make_problem(instance.flow(), instance.order, default_rates(CPU), instance.cost_s)
    one_pass, ladders = RECOMPUTE[0](problem, LiveTarget(budget * UNIT_BYTES)), found[planned.ladders]
    if one_pass is not None:
        again = [instance.order[i] for i in one_pass.order]
        assert ladders is not None and instance.extra_time(ladders) <= instance.extra_time(again) + 1e-12


def irregular(seed: int) -> Instance:
    """Twenty-four nodes that read one to three earlier ones."""
    draw, count = Random(seed), 24
    inputs: list[tuple[int, ...]] = [()]
    for v in range(1, count):
        near = {draw.randrange(max(0, v - 8), v) for _ in range(draw.randint(1, 2))}
        far = {draw.randrange(v)} if draw.random() < 0.3 else set()
        inputs.append(tuple(sorted(near | far)))
    sizes, times = (tuple(draw.randint(1, 9) for _ in range(count)) for _ in range(2))
    return Instance("irregular", sizes, times, tuple(inputs), tuple(range(count)))


@pytest.mark.parametrize(("seed", "percent"), [(0, 90), (2, 90), (2, 80)])
def test_the_search_is_as_good_as_cp_sat_where_that_is_proven(seed: int, percent: int):
    pytest.importorskip("ortools.sat.python.cp_model")
    instance = irregular(seed)
    budget = instance.peak * percent // 100
    exact, order = moccasin.solve(instance, budget, 20.0), planned.search(instance, budget)
    assert exact.order is not None and order is not None
    assert instance.peak_of(exact.order) <= budget
    assert exact.bound == pytest.approx(instance.extra_time(exact.order))
    assert instance.extra_time(order) <= exact.bound + 1e-9


def test_cp_sat_proves_that_a_budget_is_too_low():
    pytest.importorskip("ortools.sat.python.cp_model")
    instance = irregular(2)
    assert moccasin.solve(instance, instance.floor - 1, 20.0).impossible


@pytest.mark.parametrize("seed", [3, 10])
def test_the_search_finds_much_cheaper_reruns_than_one_pass(seed: int):
    instance = irregular(seed)
    budget = instance.peak * 85 // 100
    problem = make_problem(instance.flow(), instance.order, default_rates(CPU), instance.cost_s)
    one_pass, ladders = RECOMPUTE[0](problem, LiveTarget(budget * UNIT_BYTES)), planned.ladders(instance, budget)
    assert one_pass is not None and ladders is not None
    assert instance.extra_time(ladders) < instance.extra_time(one_pass.order) / 2


def test_the_search_holds_what_is_dearer_to_recompute():
    instance = irregular(0)
    budget = instance.peak * 85 // 100
    problem = make_problem(instance.flow(), instance.order, default_rates(CPU), instance.cost_s)
    choice = rerun_search.solver(lambda *_: None)(problem, LiveTarget(budget * UNIT_BYTES))
    assert choice is not None
    assert instance.peak_of(choice.order) <= budget
    assert instance.extra_time(choice.order) < 0.12  # CP-SAT's optimum, with two runs of a node, is 0.128


def test_the_search_finds_the_same_again():
    instance = irregular(8)
    budget = instance.peak * 3 // 4
    assert planned.search(instance, budget) == planned.search(instance, budget) is not None


def test_the_lowest_budget_is_met():
    instance = irregular(6)
    lowest = planned.lowest(instance)
    assert instance.floor <= lowest < instance.peak
    order = planned.search(instance, lowest)
    assert order is not None and instance.peak_of(order) <= lowest
    problem = make_problem(instance.flow(), instance.order, default_rates(CPU), instance.cost_s)
    assert RECOMPUTE[0](problem, LiveTarget(lowest * UNIT_BYTES)) is None


def passes(layers: int) -> Instance:
    """A chain whose outputs its second half reads again, in the opposite order, as a backward pass does."""
    count = 2 * layers
    reads = [{v - 1} if v < layers else {v - 1, count - 1 - v} for v in range(1, count)]
    inputs = ((), *(tuple(sorted(each)) for each in reads))
    sizes, times = tuple(4 if v < layers else 1 for v in range(count)), tuple(1 + v % 3 for v in range(count))
    return Instance("passes", sizes, times, inputs, tuple(range(count)))


def test_rounding_keeps_the_budget():
    pytest.importorskip("scipy")
    instance = passes(5)
    budget = instance.peak * 90 // 100
    order, best = checkmate.solve(instance, budget, 10.0), planned.search(instance, budget)
    assert order is not None and best is not None
    assert instance.peak_of(order) <= budget
    assert instance.extra_time(best) <= instance.extra_time(order)
    assert checkmate.solve(instance, instance.floor - 1, 10.0) is None


def compared(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["solver_instances.py", *map(str, arguments)])
    solver_instances.main()


def test_the_benchmark_compares_all_solvers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    pytest.importorskip("ortools.sat.python.cp_model")
    pytest.importorskip("scipy")
    instance = passes(4)
    links = [{"source": u, "target": v} for v, inputs in enumerate(instance.inputs) for u in inputs]
    nodes = [{"id": v, "cost_ram": instance.sizes[v], "cost_cpu": instance.times[v]} for v in instance.order]
    (tmp_path / "passes_nx.json").write_text(json.dumps({"nodes": nodes, "links": links}))
    results = tmp_path / "results"
    compared(monkeypatch, tmp_path, "--limit-s", 5, "--json", results)
    table = capsys.readouterr().out
    rows = json.loads(results.read_text())
    assert [row["share"] for row in rows[:3]] == list(solver_instances.SHARES)
    assert all(row["instance"] == "passes" and row["search"]["extra"] is not None for row in rows)
    assert all(row["search"]["extra"] <= row["cpsat"]["extra"] + 1e-9 for row in rows if not row["cpsat"]["impossible"])
    assert table.count("| passes (8) |") == len(rows)
    assert f"both meet {sum(row['cpsat']['extra'] is not None for row in rows)} budgets" in table
    compared(monkeypatch, tmp_path, "--others", results)
    assert json.loads(results.read_text()) == rows


def test_the_benchmark_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(SystemExit):
        compared(monkeypatch, tmp_path)
    assert "has no file *.json" in capsys.readouterr().err
    (tmp_path / "net.json").write_text(json.dumps(RANDOM))
    with pytest.raises(SystemExit):
        compared(monkeypatch, tmp_path)
    assert "pip install 'tfswap[bench]'" in capsys.readouterr().err
    (tmp_path / "net.json").write_text("{")
    with pytest.raises(SystemExit):
        compared(monkeypatch, tmp_path)
    assert "net.json can't be read as JSON" in capsys.readouterr().err
