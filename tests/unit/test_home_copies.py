"""Copies of variables from their homes and back: they overlap with kernels, as memory allows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from unittest import mock

import pytest
import test_state_homes as state_graphs
from graphs import training_steps
from hypothesis import given
from layered_steps import Layer, training_step
from planner_problems import CPU, live_peak, slow

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import Costs
from tfswap.analysis.dataflow import Dataflow
from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import DISK, HOST, Rates
from tfswap.kernels.target import Target
from tfswap.passes.tactics.state_homes import bytes_at_home, keep_at_home, movable_variables, start_reads
from tfswap.passes.verify import VerificationError, verify
from tfswap.plan.plan import Plan
from tfswap.plan.schedule import Interval, build_schedule
from tfswap.planner import home_copies
from tfswap.planner.home_copies import with_home_copies
from tfswap.planner.host_tiers import Tiers
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.ordering import early_update_order, rank_orders, traced_order
from tfswap.planner.planner import Planner
from tfswap.planner.problem import Choice
from tfswap.planner.solvers import cheapest_eviction
from tfswap.planner.validate import require_fit
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN
from tfswap.simulator.memory import simulate_memory
from tfswap.simulator.timing import Span, simulate_time

FAST = 1e30
MIB = 1 << 20
RATES = Rates(FAST, FAST, FAST, out_bytes_per_s=FAST, in_bytes_per_s=FAST, launch_s=1.0, copy_share=0.0)
"""A kernel takes a second, and a copy no time."""


def at_home(graph: Graph) -> Dataflow:
    keep_at_home(graph, Target(CPU), list(movable_variables(graph)))
    graph.prune()
    return analyse_dataflow(graph, CPU)


def dense(layers: int) -> Dataflow:
    return at_home(training_step([Layer("dense", i) for i in range(layers)], 512, 8))


def rates_of(flow: Dataflow, copy_s: float) -> Rates:
    """Rates with which the largest variable's copy takes `copy_s` seconds."""
    largest = max((flow.values[v].nbytes for v in flow.loads.values()), default=1)
    return dataclasses.replace(RATES, in_bytes_per_s=largest / copy_s, out_bytes_per_s=largest / copy_s)


def choices(planner: Planner) -> list[Choice]:
    """Some choices of each solver, without early copies."""
    found = [Choice(problem.order, []) for problem in planner.problems]
    with mock.patch("tfswap.planner.planner.with_home_copies", lambda flow, choice, *rest: [choice]):
        for ladder in planner.ladders:
            made = [ladder.judged(rung) for rung in range(0, len(ladder.targets), 3)]
            found += [judged.draft.choice._replace(paired=()) for judged in made if judged is not None]
    return found


def test_kernels_do_not_wait_for_copies_that_can_start_early() -> None:
    flow = dense(8)
    rates = dataclasses.replace(rates_of(flow, copy_s=0.5), out_bytes_per_s=FAST)
    costs = Costs(rates)
    cost_s = costs.of_step(flow)
    late = Choice(Planner(flow, Target(CPU), costs=costs).problems[0].order, [])
    (early,) = with_home_copies(flow, late, cost_s, rates, NOTHING_KNOWN)
    before, after = (simulate_time(flow, build_schedule(*c), cost_s, rates) for c in (late, early))
    assert before.stall_s == pytest.approx(0.5 * len(flow.loads))
    assert after.stall_s == pytest.approx(0.5), "only the first copy has no kernel before it"
    assert after.compute_s == before.compute_s
    assert live_peak(flow, early.order) <= live_peak(flow, late.order)


@pytest.mark.parametrize("copy_s", [0.1, 100.0])
def test_a_slow_link_does_not_change_the_orders(copy_s: float) -> None:
    """Copies overlap with kernels: they hold no bytes for longer. Else updates would come late, and gradients wait."""
    flow = dense(8)
    cost_s = Costs(rates_of(flow, copy_s)).of_step(flow)
    without_s = [0.0 if i in flow.copying else seconds for i, seconds in enumerate(cost_s)]
    assert rank_orders(flow, cost_s) == rank_orders(flow, without_s)


def test_homes_on_disk_take_its_lanes_and_its_space() -> None:
    graph = training_step([Layer("dense", i) for i in range(3)], 512, 8)
    sizes = {name: kind.nbytes or 0 for name, kind in movable_variables(graph).items()}
    largest = max(sizes.values())
    disk = [name for name in sizes if sizes[name] == largest][1:]
    keep_at_home(graph, Target(CPU), list(sizes), disk)
    graph.prune()
    flow = analyse_dataflow(graph, CPU)
    rates = dataclasses.replace(RATES, disk_bytes_per_s=float(largest))
    assert bytes_at_home(graph, disk=True) == len(disk) * largest > 0
    assert bytes_at_home(graph) == sum(sizes.values()) - len(disk) * largest
    order = Planner(flow, Target(CPU), costs=Costs(rates)).problems[0].order
    steps, spans = build_schedule(order, ()), list[Span]()
    simulate_time(flow, steps, Costs(rates).of_step(flow), rates, spans=spans)
    kinds = {i: span.end_s - span.start_s for (_, i), span in zip(steps, spans, strict=True)}
    on_disk = [kinds[i] for i in flow.copying if flow.home_tiers[i] == DISK]
    assert on_disk and all(seconds == pytest.approx(1.0) for seconds in on_disk)
    assert all(kinds[i] < 1e-9 for i in flow.copying if flow.home_tiers[i] == HOST)
    memory = simulate_memory(flow, steps)
    assert largest <= memory.disk_peak_bytes <= len(disk) * largest
    assert memory.host_peak_bytes <= bytes_at_home(graph)


def test_no_home_is_on_disk_where_the_device_does_not_reach_it() -> None:
    graph = training_step([Layer("dense", 0)], 64, 8)
    names = list(movable_variables(graph))
    with pytest.raises(InvalidModel, match="keeps variables on disk"):
        keep_at_home(graph, Target(DeviceModel("gpu")), names, names)


def test_kernels_do_not_wait_for_copies_to_homes_but_for_the_last_one() -> None:
    flow = dense(8)
    rates = dataclasses.replace(rates_of(flow, copy_s=0.5), in_bytes_per_s=FAST)
    cost_s = Costs(rates).of_step(flow)
    soon = Choice([i for i in early_update_order(flow, traced_order(flow)) if flow.is_kernel[i]], [])
    (late,) = with_home_copies(flow, soon, cost_s, rates, NOTHING_KNOWN)
    before, after = (simulate_time(flow, build_schedule(*c), cost_s, rates) for c in (soon, late))
    assert before.stall_s == pytest.approx(0.5 * len(flow.stores))
    assert after.stall_s == pytest.approx(0.5), "only the last copy has no kernel after it"
    assert live_peak(flow, late.order) <= live_peak(flow, soon.order)


@pytest.mark.parametrize(("out_s", "place"), [(FAST**-1, 3), (100.0, 6)])
def test_a_load_does_not_start_before_the_commit_that_it_reads_has_ended(out_s: float, place: int) -> None:
    """The load should start three kernels before its reader. A slow copy to the home ends later."""
    step = state_graphs.Step()
    v, w = step.variable("v"), step.variable("w")
    before, other = step.read("before", v), step.read("other", w)
    write = step.write(custom_ops.ASSIGN_IN_PLACE, "write", v, step.compute("value", before, before), before)
    kernels = [other]
    for number in range(6):
        kernels.append(step.compute(f"kernel{number}", kernels[-1], kernels[-1]))
    result = step.compute("result", step.read("after", v, write), kernels[-1])
    step.fetches.append(result.out())
    flow = at_home(step)
    rates = dataclasses.replace(rates_of(flow, copy_s=2.0), out_bytes_per_s=state_graphs.FLOATS.nbytes / out_s)
    names = "before", "value", "tfswap/write/store", "write", *(node.name for node in kernels), "after", "result"
    choice = Choice([flow.place[name] for name in names], [])
    *_, placed = with_home_copies(flow, choice, Costs(rates).of_step(flow), rates, NOTHING_KNOWN)
    order = [flow.nodes[i].name for i in placed.order]
    assert order.index("write") < order.index("after")
    assert [name for name in order[: order.index("after")] if name.startswith("kernel")] == [
        f"kernel{number}" for number in range(place)
    ]


def test_host_memory_has_room_for_new_values_that_wait_for_their_copies() -> None:
    """Copies take ten times as long as kernels, so that old and new values of more and more variables wait."""
    flow = dense(8)
    rates = dataclasses.replace(rates_of(flow, copy_s=10.0), in_bytes_per_s=FAST)
    cost_s = Costs(rates).of_step(flow)
    soon = Choice([i for i in early_update_order(flow, traced_order(flow)) if flow.is_kernel[i]], [])

    def host_bytes(choice: Choice) -> int:
        return simulate_memory(flow, build_schedule(*choice), live=True).host_peak_bytes

    least_bytes = host_bytes(soon)
    roomy, tight = (
        max(map(host_bytes, with_home_copies(flow, soon, cost_s, rates, NOTHING_KNOWN, Tiers(limit))))
        for limit in (None, 2 * least_bytes)
    )
    assert least_bytes < tight <= 2 * least_bytes < roomy


def test_swapped_tensors_leave_room_for_new_values_of_variables() -> None:
    flow = at_home(training_step([Layer("dense", i) for i in range(8)], 512, 256))
    tight = 0
    for limit in range(MIB, 5 * MIB, MIB // 2):
        planner = Planner(flow, Target(CPU), tiers=Tiers(limit), costs=Costs(RATES))
        (problem, *_) = planner.problems
        solve = cheapest_eviction.solver(cheapest_eviction.Prices(copy=0.1))
        for share in (0.4, 0.6, 0.8):
            choice = solve(problem, LiveTarget(int(share * problem.live_peak_bytes)))
            if choice is not None:
                memory = simulate_memory(flow, build_schedule(*choice), live=True)
                assert memory.host_peak_bytes <= limit
                tight += memory.host_peak_bytes > 0.8 * limit
    assert tight


def test_a_copy_takes_its_lane_and_no_time_of_kernels() -> None:
    flow = dense(2)
    cost_s = Costs(RATES).of_step(flow)
    order = Planner(flow, Target(CPU), costs=Costs(RATES)).problems[0].order
    timing = simulate_time(flow, build_schedule(order, ()), cost_s, RATES)
    assert timing.total_s == pytest.approx(len(order) - len(flow.loads) - len(flow.stores) - len(flow.commits))
    assert timing.stall_s == pytest.approx(0.0)


def test_what_a_copy_to_a_home_holds_does_not_leave() -> None:
    """Between its start and its wait the tensor's buffer would not be free."""
    flow = dense(4)
    (problem, *_) = Planner(flow, Target(CPU), costs=Costs(RATES)).problems
    assert flow.stores and problem.refusals.keys() >= set(flow.stores.values())


@slow
@given(training_steps())
def test_plans_stay_plans_and_hold_no_more_than_they_have_room_for(graph) -> None:
    flow = at_home(graph)
    rates = rates_of(flow, copy_s=3.0)
    planner = Planner(flow, Target(CPU), costs=Costs(rates))
    (problem, *_) = planner.problems
    largest = max((round_up(flow.values[v].nbytes) for v in (*flow.loads.values(), *flow.stores.values())), default=0)
    for choice in choices(planner):
        least_bytes = live_peak(flow, choice.order, choice.intervals)
        for number, placed in enumerate(with_home_copies(flow, choice, planner.cost_s, rates, NOTHING_KNOWN)):
            assert not Counter(placed.order) - Counter(choice.order) and {*placed.order} == {*choice.order}
            room = largest * home_copies.COPIES_WITH_ROOM[-1] if number else 0
            assert live_peak(flow, placed.order, placed.intervals) <= least_bytes + room
            order, evictions = placed.named(flow)
            require_fit(Plan("", None, order, evictions, 0, 0, 0, 1.0, "test"), problem)


def test_copies_take_the_room_that_makes_a_step_faster() -> None:
    """Copies of 1 MiB take four kernels' time, and feature maps are small."""
    flow = at_home(training_step([Layer("dense", i) for i in range(12)], 1, 512))
    costs = Costs(rates_of(flow, copy_s=4.0))

    def seconds() -> list[float]:
        planner = Planner(flow, Target(CPU), costs=costs)
        found = [planner.candidate(limit) for limit in range(3 * MIB, 15 * MIB, MIB)]
        return [candidate.timing.total_s for candidate in found if candidate is not None]

    roomy = seconds()
    with mock.patch.object(home_copies, "COPIES_WITH_ROOM", ()):
        tight = seconds()
    assert len(roomy) == len(tight) and all(fast <= slow for fast, slow in zip(roomy, tight, strict=True))
    assert roomy == sorted(roomy, reverse=True), "a higher limit gives no slower plan"
    assert min(fast / slow for fast, slow in zip(roomy, tight, strict=True)) < 0.95


def test_writes_wait_for_the_copies_before_them() -> None:
    graph = training_step([Layer("dense", 0)], 512, 8)
    keep_at_home(graph, Target(CPU), list(movable_variables(graph)))
    chain = [node for node in graph.topological() if node.op not in ("Placeholder", "Const")]
    started = start_reads(graph, chain)
    loads = [node for node in started if node.op == custom_ops.LOAD_HOME]
    assert loads and not any(node.op == custom_ops.READ_HOME for node in graph)
    waits = {node for node in graph if node.op == custom_ops.AWAIT and node.inputs[0].node in loads}
    commits = [node for node in graph if node.op == custom_ops.COMMIT_HOME]
    assert commits and waits.isdisjoint(control for commit in commits for control in commit.controls)
    writes = [node for node in graph if node.op == "ResourceApplyGradientDescent"]
    assert all(waits.intersection(write.controls) for write in writes)


def test_a_copy_that_is_read_before_its_end_is_noticed() -> None:
    graph = training_step([Layer("dense", 0)], 512, 8)
    keep_at_home(graph, Target(CPU), list(movable_variables(graph)))
    graph.prune()
    start_reads(graph, list(graph.topological()))
    verify(graph)
    wait = next(node for node in graph if node.op == custom_ops.AWAIT)
    reader = next(node for node in graph if wait.out() in node.inputs)
    reader.inputs = tuple(wait.inputs[0] if tensor == wait.out() else tensor for tensor in reader.inputs)
    with pytest.raises(VerificationError, match="read before its copy has ended"):
        verify(graph)


def test_a_load_that_nothing_reads_before_its_next_run_is_left_out() -> None:
    flow = dense(1)
    (load, *_), kernels = flow.loads, Planner(flow, Target(CPU)).problems[0].order
    again = [load, load, *(kernel for kernel in kernels if kernel != load)]
    (read,) = with_home_copies(flow, Choice(again, []), [1.0] * len(flow.nodes), RATES, NOTHING_KNOWN)
    assert read.order == again[1:]


def test_copies_stay_where_a_kernel_before_them_is_left_out() -> None:
    choice = Choice([10, 11, 12, 13], [Interval(0, 1, 2, 3, 3)])
    left = home_copies.moved_kernels(choice, {}, {1})
    assert left.order == [10, 12, 13]
    assert left.intervals == [Interval(0, 0, 1, 2, 2)]


def test_a_kernel_that_is_moved_ahead_takes_the_copies_at_its_place_along() -> None:
    """Positions 0 to 4; the kernel at 3 moves before 1. Copies before a kernel stay before it."""
    choice = Choice([10, 11, 12, 13, 14], [Interval(0, 0, 1, 3, 4), Interval(1, 3, 4, 4, 5)])
    moved = home_copies.moved_kernels(choice, {3: 1})
    assert moved.order == [10, 13, 11, 12, 14]
    assert moved.intervals == [Interval(0, 1, 2, 4, 4), Interval(1, 3, 4, 4, 5)]


def read_twice() -> tuple[Dataflow, Choice, Rates]:
    """A step that reads a variable in its first kernel and in its last, and copies it for each. A copy takes ten times
    as long as a kernel.
    """
    step = state_graphs.Step()
    read = step.read("read", step.variable("v"))
    kernels = [step.compute("first", read, read)]
    for number in range(4):
        kernels.append(step.compute(f"kernel{number}", kernels[-1], kernels[-1]))
    step.fetches.append(step.compute("last", read, kernels[-1]).out())
    flow = at_home(step)
    names = "read", *(node.name for node in kernels), "read", "last"
    return flow, Choice([flow.place[name] for name in names], []), rates_of(flow, copy_s=10.0)


def test_a_variable_stays_between_two_reads_where_memory_has_room() -> None:
    flow, choice, rates = read_twice()
    load = flow.place["read"]
    cost_s = Costs(rates).of_step(flow)
    tight, roomy = with_home_copies(flow, choice, cost_s, rates, NOTHING_KNOWN)
    assert (tight.order.count(load), roomy.order.count(load)) == (2, 1)
    assert live_peak(flow, tight.order) == live_peak(flow, choice.order) < live_peak(flow, roomy.order)
    before, after = (simulate_time(flow, build_schedule(*c), cost_s, rates).total_s for c in (tight, roomy))
    assert before - after > 5.0, "the second copy overlaps with four kernels, and the last one waits for it"


def test_what_is_read_first_is_copied_first() -> None:
    """The first kernels wait for copies: none that is read later may be ahead of them."""
    flow = dense(8)
    rates = rates_of(flow, copy_s=3.0)
    choice = Choice(Planner(flow, Target(CPU), costs=Costs(rates)).problems[0].order, [])
    *_, placed = with_home_copies(flow, choice, Costs(rates).of_step(flow), rates, NOTHING_KNOWN)
    loads = [kernel for kernel in placed.order if kernel in flow.loads]
    readers = [next(i for i, k in enumerate(placed.order) if flow.loads[load] in flow.reads[k]) for load in loads]
    assert readers == sorted(readers)
