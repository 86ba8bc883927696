"""Tensors that wait inside of a body: planned as in a step, carried out, counted, reported and run."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from typing import Any

import pytest
from processes import on_arena
from slow import slow
from test_passes import Golden

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.control_flow import record
from tfswap.analysis.records import Record
from tfswap.compiler import tactics, unoptimised
from tfswap.compiler.body_orders import choose_body_orders
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.errors import InfeasibleMemoryLimit, InvalidModel
from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.prepare import unroll_loops
from tfswap.passes.tactics.body_plan import carry_out_in_bodies
from tfswap.passes.verify import verify
from tfswap.plan.plan import Inside, Plan, Split
from tfswap.plan.schedule import build_schedule
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.memory import simulate_memory
from tfswap.simulator.requests import record_requests

CPU = DeviceModel("cpu", False, 2, 2)
ELEMENTS = 1 << 16
NBYTES = 4 * ELEMENTS
LAYERS = 8
TRIPS = 5


@pytest.fixture(autouse=True)
def loops_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few their iterations are."""
    monkeypatch.setattr(unroll_loops, "MOST_TRIPS", -1)


def text(layers: int = LAYERS, elements: int = ELEMENTS) -> str:
    """A loop with a forward and a backward pass in its body, of which one tensor of each layer waits."""
    tensor = f"float32[{elements}]"
    forward = [f"  %f{n} = Tanh(%{f'f{n - 1}' if n else 'h'}) -> {tensor}" for n in range(layers)]
    backward = [
        f"  %b{n} = TanhGrad(%f{n}, %{f'b{n + 1}' if n < layers - 1 else 'h'}) -> {tensor}" for n in range(layers)
    ]
    head = f"  %i = Placeholder() -> int32[]\n  %h = Placeholder() -> {tensor}"
    return "\n".join(
        [
            "%zero = Const() -> int32[] = (0,)",
            f"%h = Placeholder() -> {tensor}",
            f"%loop = StatelessWhile(%zero, %h) -> int32[], {tensor}",
            f"%end = Tanh(%loop:1) -> {tensor}",
            "feeds %h\nfetches %end\nbody %loop",
            head,
            f"  %most = Const() -> int32[] = ({TRIPS},)",
            "  %less = Less(%i, %most) -> bool[]\n  feeds %i, %h\n  fetches %less\nbody %loop",
            head,
            "  %one = Const() -> int32[] = (1,)\n  %next = AddV2(%i, %one) -> int32[]",
            *forward,
            *reversed(backward),
            "  feeds %i, %h\n  fetches %next, %b0\n",
        ]
    )


@pytest.fixture(autouse=True)
def as_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text names no functions, without which there is no GraphDef to ask TensorFlow's optimizers about."""
    monkeypatch.setattr(unoptimised, "as_executed", lambda graph, device, held: graph)


def optimizer(**options: Any) -> Optimizer:
    return Optimizer(parse_graph(text()), CPU, Options(**options))


def carried_out(graph: Graph, inside: Inside) -> None:
    carry_out_in_bodies(graph, Target(CPU), [inside], lambda body, _: analyse_dataflow(body.copy(), CPU))


# --- carried out ------------------------------------------------------------------------------------------


def test_the_rewritten_body():
    golden = Golden("body_plan")
    choose_body_orders(golden.graph, Target(CPU))
    nodes = sum(map(len, golden.graph.all_bodies()))
    name, *order = golden.arguments
    carried_out(golden.graph, Inside(name, tuple(order), tuple(golden.evictions)))
    # A copy out and its release, a copy in and its end, and a kernel that runs again; a view that nothing reads goes.
    assert sum(map(len, golden.graph.all_bodies())) == nodes + 5 - 1
    assert verify(golden.graph) == 4
    body = golden.graph.named_bodies()[name]
    kernels = [n for n in body.topological() if n.op not in ("Placeholder", "Const", "Identity")]
    for before, node in pairwise(kernels):
        assert before in node.controls or any(t.node is before for t in node.inputs), (before, node)
    golden.check()


def test_bodies_of_bodies_have_names():
    inner = "\n".join(f"  {line}" for line in text().splitlines())
    graph = parse_graph(
        "%p = Placeholder() -> bool[]\n%h = Placeholder() -> float32[8]\n%if = If(%p, %h) -> float32[8]\n"
        "feeds %p, %h\nfetches %if\n"
        + "body %if\n"
        + inner.replace(str(ELEMENTS), "8")
        + "\n"
        + "body %if\n  %h = Placeholder() -> float32[8]\n  feeds %h\n  fetches %h\n"
    )
    found = graph.named_bodies()
    assert list(found) == ["if[0]/loop[0]", "if[0]/loop[1]", "if[0]", "if[1]"]
    assert list(found.values()) == list(graph.all_bodies())


# --- replayed ---------------------------------------------------------------------------------------------


def paper(graph: Graph) -> Record:
    node = graph["loop"]
    return record(node, graph.bodies[node], CPU, [None] * 3, [(0,), None, None])


def test_copies_of_one_iteration_are_gone_in_the_next():
    graph = Golden("body_plan").graph
    choose_body_orders(graph, Target(CPU))
    name, *order = Golden("body_plan").arguments
    carried_out(graph, Inside(name, tuple(order), tuple(Golden("body_plan").evictions)))
    made = paper(graph)
    assert (made.out_bytes, made.in_bytes, made.away_bytes, made.passing_bytes) == (5 * 256, 5 * 256, 0, 256)


def test_a_split_is_one_in_every_iteration():
    graph = Golden("body_plan").graph
    choose_body_orders(graph, Target(CPU))
    _, *order = Golden("body_plan").arguments
    once = tuple(dict.fromkeys(order))
    carried_out(graph, Inside("loop[1]", once, splits=(Split(once.index("b"), 64), Split(once.index("b"), 32))))
    kinds = [event for event in paper(graph).events if event[0] in ("split", "part", "rest")]
    assert kinds == [("split", 64), ("split", 32), ("part", 0), ("rest", 0)] * 5


def test_splits_in_a_loop_that_has_splits_itself():
    """What parts chunks is given back by who has parted them, wherever the requests are replayed."""
    graph = Golden("body_plan").graph
    choose_body_orders(graph, Target(CPU))
    _, *order = Golden("body_plan").arguments
    once = tuple(dict.fromkeys(order))
    carried_out(graph, Inside("loop[1]", once, splits=(Split(once.index("next"), 1024), Split(once.index("b"), 1024))))
    flow = analyse_dataflow(graph, CPU)
    order = [i for i, kernel in enumerate(flow.is_kernel) if kernel]
    steps = build_schedule(order, (), splits=(Split(0, 1024), Split(0, 4096)))
    # Holes of almost twice what is asked for, which the allocator would give whole.
    sizes = [(256, True), (1792, False), (256, True), (7936, False), (256, True), (1536, False), (256, True)]
    chunks, address = [], 0
    for size, in_use in [*sizes, (1 << 20, False)]:
        chunks.append((address, size, in_use))
        address += size
    snapshot = ArenaSnapshot(4 * 256, tuple(chunks), instantiated=True)
    simulated = simulate_memory(flow, steps, snapshot=snapshot)
    assert record_requests(flow, steps, snapshot).peak_bytes(snapshot) == simulated.peak_bytes


# --- planned ----------------------------------------------------------------------------------------------


def test_the_floor_is_lower_and_the_plan_says_why():
    made = optimizer()
    floor, without = made.floor_bytes(), optimizer(tactics=()).floor_bytes()
    assert floor <= without - (LAYERS - 3) * NBYTES
    plan = made.plan(floor)
    assert plan.planned_peak_bytes == floor
    assert not plan.evictions
    (inside,) = plan.inside
    assert inside.body == "loop[1]"
    assert inside.moves >= LAYERS - 3
    away = sum(a.nbytes for a in inside.evictions)
    assert plan.host_bytes <= away  # of one iteration
    report = made.report(plan)
    assert {row.name for row in report.swapped} == {f"loop[1]/{a.tensor}" for a in inside.evictions}
    assert sum(row.cost_bytes for row in report.swapped) == 2 * TRIPS * away
    assert report.reruns == TRIPS * (len(inside.order) - len(set(inside.order)))
    assert all("each time that loop[1] runs" in row.reason for row in (*report.swapped, *report.recomputed))
    reported = report.explain(report.swapped[0].name)
    assert (reported.tactic, reported.tensor) == (report.swapped[0].tactic, report.swapped[0].name)
    assert reported.made_by == (reported.tensor.removeprefix("loop[1]/").removesuffix(":0"), "Tanh")
    assert made.plan(plan.planned_peak_bytes * 4, ordered=True).inside == ()


@pytest.mark.parametrize(("tactics", "swaps", "reruns"), [(("swap",), True, False), (("recompute",), False, True)])
def test_with_one_tactic(tactics, swaps, reruns):
    made = optimizer(tactics=tactics)
    (inside,) = made.plan(made.floor_bytes()).inside
    assert (bool(inside.evictions), len(inside.order) > len(set(inside.order))) == (swaps, reruns)


def test_more_memory_never_takes_longer():
    made = optimizer()
    floor, top = made.floor_bytes(), made.baseline.peak_bytes
    plans = [made.plan(floor + (top - floor) * i // 8, ordered=True) for i in range(9)]
    times = [plan.seconds for plan in plans]
    assert times == sorted(times, reverse=True)
    assert len({plan.inside for plan in plans}) > 3
    assert all(plan.keeps_limit for plan in plans)


def test_a_body_has_its_facts_made_once_for_all_that_is_planned_in_it(monkeypatch):
    analysed: list[object] = []
    whole = tactics.analyse_body
    monkeypatch.setattr(tactics, "analyse_body", lambda body, device: analysed.append(body) or whole(body, device))
    made = optimizer(tactics=("swap",))
    floor, peak = made.floor_bytes(), made.baseline.peak_bytes
    plans = [made.plan(floor + (peak - floor) * n // 6, ordered=True) for n in range(5)]
    planned = {plan.inside for plan in plans if plan.inside}
    assert len(planned) > 1
    assert len(analysed) == len({inside.body for plan in planned for inside in plan})


def test_below_the_floor_the_floor_is_reported():
    made = optimizer()
    with pytest.raises(InfeasibleMemoryLimit) as refused:
        made.plan(made.floor_bytes() - 1)
    assert refused.value.floor_bytes == made.floor_bytes()


def test_host_memory_bounds_what_is_swapped_there():
    room = 3 * NBYTES
    made = optimizer(tactics=("swap",), host_limit_bytes=room)
    assert made.floor_bytes() > optimizer(tactics=("swap",)).floor_bytes()
    plan = made.plan(made.floor_bytes())
    assert plan.inside
    assert plan.host_bytes <= room


def test_what_is_marked_in_a_body_stays():
    kept = text().replace(
        "%f3 = Tanh(%f2)", "%kept = Identity(%f2) {_tfswap_keep=true} -> float32[65536]\n  %f3 = Tanh(%kept)"
    )
    made = Optimizer(parse_graph(kept), CPU, Options(tactics=("swap",)))
    (inside,) = made.plan(made.floor_bytes()).inside
    assert "f2:0" not in {a.tensor for a in inside.evictions}
    assert "f1:0" in {a.tensor for a in inside.evictions}


def test_small_bodies_are_left_alone():
    small = text().replace(
        "%end = Tanh(%loop:1)", "%more = BroadcastTo(%loop:1, %shape) -> float32[400,65536]\n%end = Sum(%more, %zero)"
    )
    made = Optimizer(parse_graph("%shape = Const() -> int32[2] = (400,65536)\n" + small), CPU)
    assert made.plan(made.floor_bytes()).inside == ()


# --- kept -------------------------------------------------------------------------------------------------


def test_a_plan_is_saved_with_it_and_read_back():
    made = optimizer()
    plan = made.plan(made.floor_bytes())
    assert Plan.from_json(plan.to_json()) == plan
    made.require_fit(plan)
    assert made.adopt(plan, None).planned_peak_bytes == plan.planned_peak_bytes


def changed(plan: Plan, **fields: Any) -> Plan:
    return dataclasses.replace(plan, inside=tuple(dataclasses.replace(i, **fields) for i in plan.inside))


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"body": "loop[2]"}, "loop\\[2\\]"),
        ({"order": ("next",)}, "has no place for"),
        ({"order": ("unknown",)}, "unknown"),
    ],
)
def test_a_plan_for_another_body_is_refused(fields, reported):
    made = optimizer()
    plan = made.plan(made.floor_bytes())
    with pytest.raises(InvalidModel, match=reported):
        made.require_fit(changed(plan, **fields, evictions=()))


def test_a_damaged_plan_is_refused():
    made = optimizer(tactics=("swap",))
    content = json.loads(made.plan(made.floor_bytes()).to_json())
    content["inside"][0]["evictions"][0]["back"] = 10**6
    with pytest.raises(InvalidModel, match="inside\\[0\\].evictions\\[0\\]"):
        Plan.from_json(json.dumps(content))
    content["inside"][0]["order"] = []
    content["inside"][0]["evictions"] = []
    with pytest.raises(InvalidModel, match="names no kernels"):
        Plan.from_json(json.dumps(content))


@pytest.mark.parametrize("tactics", [("swap",), ("recompute",)])
def test_what_is_not_allowed_is_not_adopted(tactics):
    (other,) = {"swap", "recompute"}.difference(tactics)
    plan = optimizer(tactics=tactics).plan(optimizer(tactics=tactics).floor_bytes())
    with pytest.raises(InvalidModel, match="tactics leaves"):
        optimizer(tactics=(other,)).require_fit(plan)


# --- run --------------------------------------------------------------------------------------------------


LOOPED = "import json, control_flow; from tfswap.passes.prepare import unroll_loops; unroll_loops.MOST_TRIPS = -1"
"""Loops stay loops, however few their iterations are."""


def run(program: str, limit: str, **env: str) -> dict[str, Any]:
    return on_arena(f"{LOOPED}; print(json.dumps(control_flow.main({program!r}, {limit!r})))", **env)


@pytest.mark.parametrize("program", [*slow("micro_batches"), "steps_in_loop", "training_branch"])
def test_a_body_with_most_of_the_step_in_it(program):
    pytest.importorskip("tensorflow")
    expected = run(program, "floor")
    limit = int(1.05 * expected["floor"])
    assert limit < 0.5 * expected["peak"]
    found = run(program, str(limit), TFSWAP_COPY_BANDWIDTH="2e8")  # a slow link: copies wait
    assert found["digest"] == expected["digest"]
    assert found["planned"] == found["peak"] <= found["limit"]
    assert found["inside"]
    assert 0 < found["host_bytes"] < expected["peak"]


def test_a_loop_inside_of_a_body_saves_nothing_there():
    """What a recurrent net saves for its own backward loop, in each micro-batch, is swapped or recomputed inside."""
    pytest.importorskip("tensorflow")
    expected = run("recurrent_micro_batches", "floor")
    limit = int(1.05 * expected["floor"])
    assert limit < 0.7 * expected["peak"]
    found = run("recurrent_micro_batches", str(limit))
    assert found["digest"] == expected["digest"]
    assert found["planned"] == found["peak"] <= found["limit"]
    assert found["accumulators"] + found["recomputed"] > 0


def test_an_iteration_that_fails_leaves_nothing_behind():
    pytest.importorskip("tensorflow")
    found = on_arena(f"{LOOPED}; import failing_steps; print(json.dumps(failing_steps.fail_in_micro_batch()))")
    assert found["moved"] > 0
    assert {key: found[key] for key in ("failed", "host_in_use", "grown")} == {
        "failed": 3,
        "host_in_use": 0,
        "grown": 0,
    }
