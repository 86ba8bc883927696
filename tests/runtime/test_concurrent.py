"""Kernels of a step that run as a group: which kernels, their places in memory, values, and planned peaks."""

from __future__ import annotations

from typing import Any

import pytest
from graphs import draw_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_steps import Layer, training_step
from processes import TWO_THREADS, on_arena
from slow import slow
from test_pairs import RATES, TWO_CORES, facts

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import Costs
from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.groups import Concurrent
from tfswap.compiler.compiler import Optimizer
from tfswap.ir import custom_ops
from tfswap.ir.text import parse_graph
from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import default_rates
from tfswap.kernels.target import Target
from tfswap.passes.tactics.join_concurrent import join_concurrent
from tfswap.passes.verify import verify
from tfswap.plan.schedule import build_schedule
from tfswap.planner.candidates import Candidate
from tfswap.planner.concurrent import find_members, schedule_group
from tfswap.planner.group_places import place_group
from tfswap.planner.group_requests import Group
from tfswap.planner.planner import Planner
from tfswap.simulator.memory import simulate_memory

MIB = 1 << 20
MAP = "float32[4,256,256]"
TWO_WAYS = f"""\
%x = Placeholder() {{dtype=float32}} -> {MAP}
%w = VarHandleOp() -> resource[]
%r = ReadVariableOp(%w) -> {MAP}
%a = Exp(%x) -> {MAP}
%b = Sin(%r) -> {MAP}
%c = Neg(%a) -> {MAP}
%v = Identity(%c) -> {MAP}
%d = AddV2(%v, %b) -> {MAP}
%u = AssignSubVariableOp(%w, %d)
%e = Exp(%d) -> {MAP}
%f = Sin(%e) -> {MAP}
%seen = Identity(%v) -> {MAP}
feeds %x, %w
fetches %f, %seen
targets %u
"""
AFTER_THE_UPDATE = TWO_WAYS.replace("%e = Exp(%d)", f"%n = ReadVariableOp(%w) ^u -> {MAP}\n%e = AddV2(%d, %n)")


def groups_of(flow: Dataflow, most_bytes: float = 1e12) -> list[Concurrent]:
    order = [i for i, kernel in enumerate(flow.is_kernel) if kernel]
    cost_s = [1e-3] * len(flow.nodes)
    return [
        place_group(schedule_group(Group(flow, m), cost_s, RATES, most_bytes), 2) for m in find_members(flow, order)
    ]


def test_kernels_between_two_that_change_a_state_are_a_group() -> None:
    flow = facts(TWO_WAYS)
    named = [{flow.nodes[i].name for i in group.order} for group in groups_of(flow)]
    assert named == [{"a", "b", "c", "d", "e", "f"}]
    flow = facts(AFTER_THE_UPDATE)
    named = [{flow.nodes[i].name for i in group.order} for group in groups_of(flow)]
    assert named == [{"a", "b", "c", "d"}, {"e", "f"}]


def test_one_node_runs_the_kernels_and_gives_what_others_read() -> None:
    graph = parse_graph(TWO_WAYS)
    flow = analyse_dataflow(graph.copy(), TWO_CORES)
    assert join_concurrent(graph, Target(TWO_CORES), flow, groups_of(flow)) == 6
    verify(graph)
    (node,) = (node for node in graph if node.op == custom_ops.GROUP)
    attrs: dict[str, Any] = dict(node.attrs)
    kernels = [kernel.name for kernel in attrs["kernels"]]
    assert sorted(kernels) == ["a", "b", "c", "d", "e", "f", "v"]
    kept = {name for name, kept in zip(kernels, attrs["kept"], strict=True) if kept}
    assert kept == {"c", "d", "f"}, "a view that others read is recomputed, of what the group gives"
    assert graph.fetches[1].node.inputs[0].node.inputs[0].node is node
    assert graph["u"].inputs[1].node is node
    memory = simulate_memory(joint := analyse_dataflow(graph, TWO_CORES), schedule(joint), live=True)
    assert memory.peak_bytes == joint.persistent_bytes + sum(attrs["chunks"])
    assert attrs["chunks"][1:] == (MIB, MIB, MIB)


def test_each_group_is_a_node() -> None:
    graph = parse_graph(AFTER_THE_UPDATE)
    flow = analyse_dataflow(graph.copy(), TWO_CORES)
    join_concurrent(graph, Target(TWO_CORES), flow, groups_of(flow))
    verify(graph)
    nodes = [node for node in graph if node.op == custom_ops.GROUP]
    assert [len(dict[str, Any](node.attrs)["kernels"]) for node in nodes] == [5, 2]


def draw_step(data: st.DataObject) -> str:
    """Kernels that can be of a group, updates that cannot, shapes, constants and nodes that only wait, with control
    edges between any of them, as text.
    """
    lines = [f"%x = Placeholder() {{dtype=float32}} -> {MAP}", "%w = VarHandleOp() -> resource[]"]
    maps, names, targets = ["x"], ["x"], list[str]()

    def one_of(given: list[str]) -> str:
        return "%" + data.draw(st.sampled_from(given))

    for i in range(data.draw(st.integers(4, 16))):
        kind = data.draw(st.sampled_from(["kernel", "kernel", "kernel", "update", "shape", "constant", "wait"]))
        controls = "".join(f" ^{name}" for name in data.draw(st.lists(st.sampled_from(names), max_size=2, unique=True)))
        if kind == "kernel":
            lines.append(f"%n{i} = AddV2({one_of(maps)}, {one_of(maps)}){controls} -> {MAP}")
        elif kind == "update":
            lines.append(f"%n{i} = AssignSubVariableOp(%w, {one_of(maps)}){controls}")
            targets.append(f"%n{i}")
        elif kind == "shape":
            lines.append(f"%s{i} = Shape({one_of(maps)}) -> int32[3]")
            lines.append(f"%n{i} = Reshape({one_of(maps)}, %s{i}){controls} -> {MAP}")
        elif kind == "constant":
            lines.append(f"%k{i} = Const(){controls} -> float32[]")
            lines.append(f"%n{i} = Mul({one_of(maps)}, %k{i}) -> {MAP}")
        else:
            lines.append(f"%n{i} = NoOp(){controls}")
        names.append(f"n{i}")
        if kind not in ("update", "wait"):
            maps.append(f"n{i}")
    ends = [f"targets {', '.join(targets)}"] if targets else []
    return "\n".join([*lines, "feeds %x, %w", f"fetches %{maps[-1]}", *ends, ""])


@settings(max_examples=200)
@given(st.data())
def test_groups_close_no_cycle(data: st.DataObject) -> None:
    graph = parse_graph(draw_step(data))
    flow = analyse_dataflow(graph.copy(), TWO_CORES)
    join_concurrent(graph, Target(TWO_CORES), flow, groups_of(flow))
    verify(graph)


def schedule(flow: Dataflow) -> Any:
    return build_schedule([i for i, kernel in enumerate(flow.is_kernel) if kernel], ())


@given(st.data())
def test_no_place_is_used_by_two_at_a_time_in_any_run(data: st.DataObject) -> None:
    flow = facts(draw_kernels(data))
    for group in groups_of(flow, MIB * data.draw(st.integers(0, 12))):
        _require_apart(flow, group)


def _require_apart(flow: Dataflow, group: Concurrent) -> None:
    before: dict[int, set[int]] = {}  # by kernel, those that have ended when it starts, whatever else runs
    for i in group.order:
        waits = {d for d in flow.kernels_before(i) if d in before} | group.waits.get(i, set())
        assert waits <= before.keys()
        before[i] = waits.union(*(before[d] for d in waits))
    uses: list[tuple[int, int, int, set[int], int]] = []  # chunk, begin, end, users, and who makes it
    for i in group.order:
        made = [v for _, v in flow.makes[i]]
        for served, v in zip(group.served[i], made, strict=True):
            users = {i, *(n for n in group.order if v in flow.held[n])}
            nbytes = round_up(flow.values[v].nbytes)
            if any(v in flow.held[n] for n in range(len(flow.nodes)) if n not in before) or v in flow.fetched:
                users.add(-1)  # never before another
            if served.over is not None:
                tensor = flow.nodes[i].inputs[served.over]
                over = flow.value_of[tensor.node, tensor.index]
                readers = {n for n in group.order if over in flow.held[n]} - {i}
                assert readers <= before[i], "who reads what is written over has ended"
            uses.append((served.chunk, served.offset, served.offset + nbytes, users, i))
            assert served.offset + nbytes <= group.sizes[served.chunk]
    for n, (chunk, begin, end, users, _) in enumerate(uses):
        for other, b, e, _, maker in uses[n + 1 :]:
            if chunk == other and begin < e and b < end:
                assert users - {maker} <= before[maker]


@given(st.data())
def test_bounds_that_allow_the_same_kernels_give_the_same_schedule(data: st.DataObject) -> None:
    flow = facts(draw_kernels(data))
    order = [i for i, kernel in enumerate(flow.is_kernel) if kernel]
    cost_s = [data.draw(st.floats(1e-4, 1e-2)) for _ in flow.nodes]
    for members in find_members(flow, order):
        most_bytes = MIB * data.draw(st.integers(0, 12))
        group = Group(flow, members)
        made = schedule_group(group, cost_s, RATES, most_bytes)
        assert made.order == schedule_group(Group(flow, members), cost_s, RATES, most_bytes).order
        if made.allowed_bytes <= most_bytes:
            less = schedule_group(group, cost_s, RATES, made.allowed_bytes)
            assert (less.order, less.now_s) == (made.order, made.now_s)


def test_a_kernel_of_one_core_has_another_next_to_it_that_nothing_waits_for() -> None:
    """Gradients of filters are left for when the only other kernel leaves a core idle."""
    volume, kernel = "float32[2,24,24,24,16]", "float32[3,3,3,16,16]"
    lines = [
        f"%x = Placeholder() -> {volume}",
        f"%g = Placeholder() -> {volume}",
        f"%w = Placeholder() -> {kernel}",
        "%s = Placeholder() -> int32[5]",
        *(f"%filter_{n} = Conv3DBackpropFilterV2(%x, %s, %g) -> {kernel}" for n in range(3)),
        f"%image = Conv3DBackpropInputV2(%s, %w, %g) -> {volume}",
        f"%pool = MaxPool3DGrad(%x, %x, %image) -> {volume}",
        f"%after = Conv3DBackpropInputV2(%s, %w, %pool) -> {volume}",
        "feeds %x, %g, %w, %s",
        "fetches %after, %filter_0, %filter_1, %filter_2",
    ]
    flow = facts("\n".join(lines) + "\n")
    costs = Costs(default_rates(TWO_CORES))
    cost_s = costs.of_step(flow)
    order = [i for i, is_kernel in enumerate(flow.is_kernel) if is_kernel]
    made = schedule_group(Group(flow, order), cost_s, costs.rates, 1e12)
    named = [flow.nodes[i].name for i in made.order]
    assert named.index("pool") < max(named.index(f"filter_{n}") for n in range(3))
    assert made.now_s < sum(cost_s[i] for i in order) - 0.4 * cost_s[flow.place["pool"]]


@given(st.data())
def test_no_more_is_in_use_than_the_bound_or_what_an_order_needs(data: st.DataObject) -> None:
    flow = facts(draw_kernels(data))
    order = [i for i, kernel in enumerate(flow.is_kernel) if kernel]
    lowest = simulate_memory(flow, build_schedule(order, ()), live=True).peak_bytes
    for group in groups_of(flow, lowest):
        # Places leave holes at times.
        assert sum(group.sizes) <= 1.5 * lowest


@pytest.mark.parametrize("busy", [*slow(0), 3])
def test_micro_batches_have_the_loops_bits_and_the_planned_peak(busy: int) -> None:
    call = f"measured(attention, (16, 128, 128), 0.8, busy={busy})"
    found = on_arena(f"from unrolled_steps import *\nprint(json.dumps({call}))", **TWO_THREADS)
    assert found["concurrent"]
    assert found["same"]
    assert 0.99 * found["planned"] < found["peak"] <= found["planned"] <= found["limit"]


def test_groups_that_hold_as_much_as_ones_that_do_not_fit_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [Layer("dense"), Layer("dense", 1), Layer("add"), Layer("dense", 1), Layer("dense", 2)]
    optimizer = Optimizer(training_step(layers, rows=512, width=128), TWO_CORES)
    search = optimizer.search
    limit_bytes = 4 * optimizer.planner.live_peak_bytes
    tried: list[list[int]] = []

    def fits_not(planner: Planner, limit_bytes: int, best: Candidate | None = None) -> None:
        (rewriting,) = [r for r, made in search.planners._planners.items() if made is planner]
        tried.append([group.reserved + sum(group.sizes) for group in search.variants.groups(rewriting.concurrent)])

    monkeypatch.setattr(Planner, "unmoved_candidate", fits_not)
    assert search._fastest_concurrent(None, limit_bytes) is None
    assert len(tried) > 1
    for n, held in enumerate(tried):
        assert not any(all(a >= b for a, b in zip(held, before, strict=True)) for before in tried[:n])
