"""Plans of graphs made without TensorFlow: limits, floors, rewritten graphs, files."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from itertools import pairwise
from unittest import mock

import numpy as np
import plan_digest
import pytest
from graphs import training_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layered_steps import Layer, training_step
from planner_problems import (
    CHAIN,
    CPU,
    KIB,
    LONG,
    MIB,
    TWO_CORES,
    check_choice,
    facts,
    optimizer_of,
    slow,
)
from processes import last_json, run_python

from tfswap.analysis.dataflow import Dataflow
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.concurrency import SHARES
from tfswap.compiler.options import Options
from tfswap.errors import InfeasibleMemoryLimit, InvalidModel, UnsupportedGraph
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import reads_variable, writes_variable
from tfswap.ir.text import parse_graph
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.order import chain_nodes
from tfswap.passes.tactics.swap import insert_schedule
from tfswap.passes.verify import verify
from tfswap.plan.plan import Eviction, Plan, fingerprint
from tfswap.plan.schedule import Interval
from tfswap.planner import plan_search
from tfswap.planner.concurrent import least_bytes
from tfswap.planner.planner import Planner
from tfswap.planner.problem import Choice
from tfswap.simulator.arena_snapshot import ArenaSnapshot


def test_an_order_that_is_slow_hides_no_plan_in_another():
    planner = Planner(facts(LONG), Target(CPU), snapshot=ArenaSnapshot(chunks=((0, 1 << 30, False),)))
    limit = planner.unmoved[0].apart.peak_bytes - 1
    fastest = planner.candidate(limit)
    assert fastest is not None
    assert fastest.choice not in [judged.draft.choice for judged in planner.unmoved]
    between = dataclasses.replace(fastest.timing, total_s=fastest.timing.total_s * 1.001)
    order = planner.problems[0].order
    slow = planner.judged(Choice([*order, *order[:2]], []))
    assert slow.draft.timing.total_s > between.total_s
    planner.problems.append(planner.problems[0])
    planner.unmoved.append(slow)
    assert planner.candidate(limit, dataclasses.replace(fastest, timing=between)) == fastest


WRITTEN = """\
%v = Placeholder() {dtype=resource} -> resource[]
%x = Placeholder() {dtype=float32} -> float32[1024,1024]
%up = Placeholder() {dtype=float32} -> float32[1024,2048]
%down = Placeholder() {dtype=float32} -> float32[2048,1024]
%h = Exp(%x) -> float32[1024,1024]
%write = AssignVariableOp(%v, %h) {dtype=float32}
%wide = MatMul(%h, %up) -> float32[1024,2048]
%narrow = MatMul(%wide, %down) -> float32[1024,1024]
%wider = MatMul(%narrow, %up) -> float32[1024,2048]
%last = MatMul(%wider, %down) -> float32[1024,1024]
%use = Mul(%h, %last) -> float32[1024,1024]
feeds %v, %x, %up, %down
fetches %use
targets %write
"""


@pytest.mark.tensorflow
def test_what_an_unread_variable_is_set_to_can_be_swapped():
    """The variable's versions are known by that tensor: none but the tensor's own value goes by its name."""
    optimizer = Optimizer(parse_graph(WRITTEN), CPU, Options(tactics=("swap",)))
    plan = optimizer.plan(optimizer.floor_bytes())
    assert [eviction.tensor for eviction in plan.evictions] == ["h:0"]
    assert verify(optimizer.rewrite(plan)) == 4
    (row,) = optimizer.report(plan).swapped
    assert row.name == "h:0"


def meaning(graph: Graph, known: dict[object, int]) -> dict[str, list[tuple[int, int]]]:
    """What a graph computes: what it fetches and what it writes, as terms; `known` numbers the terms that are equal."""
    terms: dict[Node, int] = {}
    for node in graph.topological():
        inputs = tuple((terms[t.node], t.index) for t in node.inputs)
        if node.op in custom_ops.ALL:  # they pass a tensor on
            terms[node] = terms[node.inputs[0].node]
            continue
        is_its_own = not inputs or writes_variable(node.op) or reads_variable(node.op)
        content = node.name if is_its_own else (node.op, str(sorted(node.attrs.items())), inputs)
        terms[node] = known.setdefault(content, len(known))
    written = {n.name: [(terms[t.node], t.index) for t in n.inputs] for n in graph if writes_variable(n.op)}
    return written | {"": [(terms[f.node], f.index) for f in graph.fetches]}


def left_alone_from(optimizer: Optimizer) -> int:
    """The least limit with which nothing is rewritten: a tenth above the unoptimised peak."""
    return optimizer.baseline.peak_bytes * 11 // 10


def the_floor_is_planned_and_one_byte_less_is_refused(optimizer: Optimizer) -> None:
    floor = optimizer.floor_bytes()
    plan = optimizer.plan(floor)
    assert plan.planned_peak_bytes <= floor or plan.changes_nothing
    if floor - 1 >= left_alone_from(optimizer):
        return
    with pytest.raises(InfeasibleMemoryLimit) as error:
        optimizer.plan(floor - 1)
    assert (error.value.floor_bytes, error.value.limit_bytes) == (floor, floor - 1)
    assert str(floor) in str(error.value)


ROUNDING = 1e-12
"""The seconds of the same kernels add up to other last bits in another order."""


def more_limit_never_costs_time_and_less_never_memory(optimizer: Optimizer) -> None:
    """Without the search near plans, which gains more for some limits than for others."""
    floor = optimizer.floor_bytes()
    top = max(floor + 1, left_alone_from(optimizer) - 1)
    with mock.patch.object(plan_search, "is_worthwhile", lambda timing: False):
        plans = [optimizer.plan(int(limit)) for limit in np.linspace(floor, top, 25)]
    for plan in plans:
        assert plan.limit_bytes is not None
        if not plan.changes_nothing:
            assert plan.planned_peak_bytes <= plan.limit_bytes
    for less, more in pairwise(plans):
        assert more.seconds <= less.seconds * (1 + ROUNDING)
        if not more.changes_nothing:
            assert less.planned_peak_bytes <= more.planned_peak_bytes


BELOW_ITS_TARGET = "relu 0, add 1, add 0, scale 3, dense 3, relu 2, relu 2, add 3, dense 6, scale 5, add 6, dense 11"


@pytest.mark.tensorflow
def test_a_choice_that_holds_less_than_the_next_target_is_found_from_its_own_peak_on():
    """Here a plan for 212,880 bytes peaks at 199,168: 200,940 gets no slower one that peaks higher."""
    layers = [Layer(kind, int(skip)) for kind, skip in map(str.split, BELOW_ITS_TARGET.split(","))]
    optimizer = optimizer_of(training_step(layers, rows=128, width=64))
    more_limit_never_costs_time_and_less_never_memory(optimizer)


def a_step_that_fits_by_a_tenth_is_left_alone(optimizer: Optimizer) -> None:
    if left_alone_from(optimizer) >= optimizer.planner.live_peak_bytes:  # without an order no less is live
        assert optimizer.plan("110%").changes_nothing
    less = left_alone_from(optimizer) - 1
    assert less < optimizer.floor_bytes() or not optimizer.plan(less).changes_nothing


def a_plan_can_be_carried_out(optimizer: Optimizer, share: float) -> None:
    """The rewritten graph is sound and runs in the plan's order; its evictions lie in gaps."""
    floor = optimizer.floor_bytes()
    plan = optimizer.plan(floor + int(max(0, optimizer.baseline.peak_bytes - floor) * share))
    if plan.changes_nothing:
        return
    form = optimizer.variant_of(plan)
    flow = form.flow
    order = [flow.place[name] for name in plan.order]
    intervals = [Interval(flow.value_named[a.tensor], a.out, a.release, a.back, a.use) for a in plan.evictions]
    check_choice(flow, Choice(order, intervals))
    made = form.graph.copy()
    chain = insert_schedule(made, Target(DeviceModel()), flow, plan)
    chain_nodes(made, chain)
    verify(made)
    ran = {node: i for i, node in enumerate(made.topological())}
    assert [ran[node] for node in chain] == sorted(ran[node] for node in chain)
    added = (*custom_ops.ALL, custom_ops.SPLIT_CHUNK, custom_ops.EXACT_CHUNKS, custom_ops.FREE_REST)
    kernels = [node.name for node in chain if node.op not in added]
    for position, (kernel, planned) in enumerate(zip(kernels, plan.order, strict=True)):
        again = planned in plan.order[:position]
        assert kernel.startswith(custom_ops.AGAIN + planned) if again else kernel == planned
    known: dict[object, int] = {}
    assert meaning(made, known) == meaning(form.graph, known)
    assert {fetch.node.name for fetch in made.fetches} == {fetch.node.name for fetch in optimizer.graph.fetches}
    # Without fragmentation, too, the order and the evictions give what the planner judged.
    assert optimizer.search.fastest(plan.limit_bytes) is not None


def a_plan_survives_json_and_is_refused_on_another_graph(optimizer: Optimizer) -> None:
    plan = optimizer.plan(optimizer.floor_bytes())
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text
    optimizer.rewrite(Plan.from_json(text))
    other = optimizer.graph.copy()
    node = next(node for node in other if node.op == "L2Loss")
    node.attrs = {**node.attrs, "more": 1}
    with pytest.raises(InvalidModel, match="another graph"):
        optimizer_of(other).rewrite(plan)


def the_floor_holds_under_a_host_limit(free: Optimizer, share: int) -> None:
    host = free.plan(free.floor_bytes()).host_bytes * share // 5
    optimizer = optimizer_of(free.graph, host_limit_bytes=host)
    floor = optimizer.floor_bytes()
    plan = optimizer.plan(floor)
    assert plan.host_bytes <= host
    if floor - 1 < left_alone_from(optimizer):
        with pytest.raises(InfeasibleMemoryLimit):
            optimizer.plan(floor - 1)


@pytest.mark.tensorflow
@slow
@given(training_steps(min_layers=4), st.floats(0, 1), st.integers(1, 5))
def test_what_holds_of_any_plan(graph, share, host_share):
    """All of it of one planner: to plan takes most of the time."""
    optimizer = optimizer_of(graph)
    the_floor_is_planned_and_one_byte_less_is_refused(optimizer)
    more_limit_never_costs_time_and_less_never_memory(optimizer)
    a_step_that_fits_by_a_tenth_is_left_alone(optimizer)
    a_plan_can_be_carried_out(optimizer, share)
    a_plan_survives_json_and_is_refused_on_another_graph(optimizer)
    the_floor_holds_under_a_host_limit(optimizer, host_share)


@pytest.mark.tensorflow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(training_steps(min_layers=4))
def test_more_limit_never_costs_time_where_kernels_run_in_groups(graph):
    optimizer = Optimizer(graph, TWO_CORES, Options())
    more_limit_never_costs_time_and_less_never_memory(optimizer)
    variants, live_bytes = optimizer.search.variants, optimizer.planner.live_peak_bytes
    for share in SHARES if variants.group_members else ():
        schedules = variants.schedules(int(share * live_bytes))
        for group, schedule in zip(variants.group_members, schedules, strict=True):
            assert least_bytes(group) <= schedule.live_bytes


@pytest.mark.tensorflow
def test_groups_that_hold_less_than_their_kernels_one_after_another_are_found_from_their_own_peak_on():
    """Here they hold 393,472 bytes, and 459,008 in the order with the lowest live peak."""
    kinds = "dense 0, add 0, scale 1, relu 1, dense 0, add 2, add 2, add 6"
    layers = [Layer(kind, int(skip)) for kind, skip in map(str.split, kinds.split(","))]
    step = training_step(layers, rows=128, width=128, assign=True)
    more_limit_never_costs_time_and_less_never_memory(Optimizer(step, TWO_CORES, Options()))


@pytest.mark.tensorflow
def test_a_step_of_that_kind_has_groups_from_some_limit_on():
    layers = [Layer("dense"), Layer("dense", 1), Layer("add"), Layer("dense", 1), Layer("dense", 2)]
    optimizer = Optimizer(training_step(layers, rows=512, width=128), TWO_CORES, Options())
    less, more = map(optimizer.search.fastest, (optimizer.floor_bytes(), left_alone_from(optimizer)))
    assert less is not None and not less.variant.rewriting.concurrent
    assert more is not None and more.variant.rewriting.concurrent


@st.composite
def arenas(draw: st.DrawFn, flow: Dataflow) -> ArenaSnapshot:
    """An arena before a step, with holes of one to two times the sizes of its tensors; limited or unlimited."""
    sizes = sorted({round_up(value.nbytes) for value in flow.values if value.nbytes >= 4096})
    holes = draw(st.lists(st.tuples(st.sampled_from(sizes), st.integers(100, 199)), max_size=8))
    there = flow.persistent_bytes
    chunks, end = [(0, there, True)], there
    for nbytes, percent in holes:
        hole = nbytes * percent // 100 // 256 * 256
        chunks += [(end, hole, False), (end + hole, 256, True)]
        end += hole + 256
    arena_bytes = None
    if draw(st.booleans()):
        arena_bytes = end + sum(round_up(value.nbytes) for value in flow.values) * draw(st.integers(20, 100)) // 100
    chunks.append((end, (1 << 40) if arena_bytes is None else (arena_bytes - end) // 256 * 256, False))
    used = sum(size for _, size, is_used in chunks if is_used)
    return ArenaSnapshot(used, tuple(c for c in chunks if c[1]), instantiated=True, limit_bytes=arena_bytes)


MACHINES = {
    "cpu": DeviceModel(),
    "pairs": DeviceModel(inter_op_threads=2, intra_op_threads=2),
    "gpu": DeviceModel("gpu"),
}


@settings(slow, max_examples=10)
@pytest.mark.parametrize("machine", MACHINES)
@given(training_steps(min_layers=4, max_layers=8), st.data())
def test_what_holds_of_plans_in_any_arena(machine, graph, data):
    """Holes, an end of the arena, and kernels side by side leave peaks to chance, but not which plan a limit gets."""
    optimizer = Optimizer(graph, MACHINES[machine])
    optimizer.assume_arena(data.draw(arenas(optimizer.flow)))
    floor, top = optimizer.floor_bytes(), optimizer.planner.lowest_unmoved().peak_bytes
    assert optimizer.search.fastest(floor - 1) is None
    plans = [optimizer.search.fastest(int(limit)) for limit in np.linspace(floor, max(floor, top) + MIB, 9)]
    found = [plan.candidate for plan in plans if plan is not None]
    assert len(found) == len(plans)
    assert found[0].peak_bytes == floor
    for less, more in pairwise(found):
        assert more.timing.total_s <= less.timing.total_s
        assert less.peak_bytes <= more.peak_bytes


SUMMED = """\
%x = Placeholder() {dtype=float32} -> float32[25600]
%a = MatMul(%x, %x) -> float32[25600]
%b = MatMul(%a, %a) -> float32[25600]
%c = MatMul(%b, %b) -> float32[25600]
%d = AddN(%a, %b, %c) {N=3, T=float32} -> float32[25600]
feeds %x
fetches %d
"""


def test_sizes_that_no_device_has_are_refused():
    huge = SUMMED.replace("25600", str(2**47))
    with pytest.raises(UnsupportedGraph, match="more than any device has"):
        optimizer_of(parse_graph(huge))
    with pytest.raises(UnsupportedGraph, match="more than any device has"):
        Optimizer(parse_graph(SUMMED), CPU, snapshot=ArenaSnapshot(2**50))


def test_a_refusal_names_the_kernel_that_needs_as_much():
    """Where it runs, and not where as much is in use before it: its bytes and what is always there are the floor."""
    with pytest.raises(
        InfeasibleMemoryLimit, match=r"most of all AddN 'd', which reads 300\.0 KiB, makes 100\.0 KiB\."
    ):
        optimizer_of(parse_graph(SUMMED)).plan(KIB)


@pytest.mark.tensorflow
@slow
@given(training_steps())
def test_tactics_without_swap_only_order(graph):
    optimizer = optimizer_of(graph, tactics=())
    plan = optimizer.plan(optimizer.floor_bytes())
    assert plan.evictions == ()


@pytest.mark.tensorflow
def test_kept_tensors_stay():
    graph = parse_graph(LONG)
    for tactic, absent, again in (("swap", ["a:0"], []), ("recompute", [], ["a"])):
        free = optimizer_of(graph, tactics=(tactic,))
        plan = free.plan(free.floor_bytes())
        assert [a.tensor for a in plan.evictions] == absent
        assert [name for name, count in Counter(plan.order).items() if count > 1] == again
        kept = optimizer_of(graph, tactics=(tactic,), keep=frozenset(("a:0",)))
        plan = kept.plan(kept.floor_bytes())
        assert plan.evictions == ()
        assert len(plan.order) == len(set(plan.order))
        assert kept.floor_bytes() > free.floor_bytes()


def test_the_fingerprint_is_of_the_structure():
    graph = parse_graph(CHAIN)
    renamed = parse_graph(CHAIN.replace("%b", "%other"))
    assert fingerprint(graph) == fingerprint(renamed) == fingerprint(graph.copy())
    different = [
        CHAIN.replace("MatMul(%c, %a)", "MatMul(%a, %c)"),
        CHAIN.replace("MatMul(%c, %a)", "MatMul(%c, %a) ^b"),
        CHAIN.replace("MatMul(%c, %a)", "MatMul(%c, %a) {transpose_a=true}"),
        CHAIN.replace("float32[25600]", "float32[25601]"),
        CHAIN.replace("%d = MatMul", "%d = Mul"),
        CHAIN.replace("fetches %d", "fetches %c"),
        CHAIN.replace("%a = MatMul(%x, %x)", '%a = MatMul(%x, %x) @"/device:GPU:0"'),
    ]
    prints = [fingerprint(parse_graph(text)) for text in different]
    assert len({*prints, fingerprint(graph)}) == len(different) + 1


def test_a_plan_is_refused_where_nodes_have_other_names():
    optimizer = optimizer_of(parse_graph(LONG))
    plan = optimizer.plan(optimizer.floor_bytes())
    with pytest.raises(InvalidModel, match="names the node 'b'"):
        optimizer_of(parse_graph(LONG.replace("%b", "%other"))).rewrite(plan)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "order": 3}', "null", '{"format": 99}']
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(InvalidModel):
        Plan.from_json(text)


def test_saving_is_whole_or_not_at_all(tmp_path):
    plan = Plan("f", 1, ("a", "b", "c"), (Eviction("a:0", 4, 0, 1, 2, 2),), 1, 1, 1, 1.5, "furthest")
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert json.loads(path.read_text())["order"] == ["a", "b", "c"]
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode, "who may read other files may read this one"
    with pytest.raises(InvalidModel, match="nowhere"):
        Plan.load(tmp_path / "nowhere.json")


@pytest.mark.tensorflow
def test_plans_do_not_depend_on_the_hash_seed():
    """This process has one of its own."""
    other = run_python("import json, plan_digest; print(json.dumps(plan_digest.digest()))", PYTHONHASHSEED="1")
    digest, swapped = plan_digest.digest()
    assert last_json(other) == [digest, swapped]
    assert swapped
