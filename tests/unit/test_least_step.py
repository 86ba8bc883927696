"""The least time of a step whose variables are copied (benchmarks/least_step.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_steps import Layer, training_step
from least_step import Read, Written, least_seconds, needs_of
from planner_problems import CPU

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import Costs
from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import Rates
from tfswap.kernels.target import Target
from tfswap.passes.tactics.state_homes import keep_at_home, movable_variables
from tfswap.plan.schedule import build_schedule
from tfswap.planner.ordering import traced_order
from tfswap.planner.planner import Planner
from tfswap.simulator.timing import simulate_time

FAST = 1e30


def copy_s(nbytes: int) -> float:
    return 0.5 + nbytes


def staying(copies: Sequence[Written], room_bytes: int) -> Iterator[list[Written]]:
    """What is copied, for each set of variables that may stay."""
    for kept in itertools.product((False, True), repeat=len(copies)):
        if sum(copy.nbytes for copy, stays in zip(copies, kept, strict=True) if stays) <= room_bytes:
            yield [copy for copy, stays in zip(copies, kept, strict=True) if not stays]


def seconds(kernels_s: Sequence[float], loads: Sequence[Written], stores: Sequence[Written], last_waits: bool) -> float:
    """The time of a step whose copies start in these orders, each as early as it can."""
    ready: dict[int, float] = {}
    now = lane = out = 0.0
    for load in loads:
        lane += copy_s(load.nbytes)
        ready[load.position] = lane
    ends: list[float] = []
    for position, kernel_s in enumerate(kernels_s):
        if last_waits and position == len(kernels_s) - 1:
            for store in stores:
                out = max(out, ends[store.position]) + copy_s(store.nbytes)
            now = max(now, out)
        now = max(now, ready.get(position, 0.0)) + kernel_s
        ends.append(now)
    if not last_waits:
        for store in stores:
            out = max(out, ends[store.position]) + copy_s(store.nbytes)
    return max(now, out)


def fastest(
    kernels_s: Sequence[float], loads: Sequence[Written], stores: Sequence[Written], room_bytes: int, last_waits: bool
) -> float:
    """The least time of all orders of copies and all variables that may stay."""
    return min(
        seconds(kernels_s, copied, back, last_waits)
        for some in staying(loads, room_bytes)
        for copied in itertools.permutations(some)
        for others in staying(stores, room_bytes)
        for back in itertools.permutations(others)
    )


@st.composite
def steps(
    draw: st.DrawFn, sizes: st.SearchStrategy[int]
) -> tuple[list[float], list[Written], list[Written], int, bool]:
    kernels_s = [float(each) for each in draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))]
    places = st.integers(0, len(kernels_s) - 2)  # nothing writes in the last kernel, which may wait for all
    copies = st.lists(st.builds(Written, places, sizes), max_size=3)
    return kernels_s, draw(copies), draw(copies), draw(st.integers(0, 6)), draw(st.booleans())


def least(kernels_s: list[float], loads: list[Written], stores: list[Written], room: int, last_waits: bool) -> float:
    awaited = {len(kernels_s) - 1: stores} if last_waits else {}
    return least_seconds(kernels_s, [Read((at,), nbytes) for at, nbytes in loads], stores, room, copy_s, None, awaited)


@given(steps(st.integers(1, 4)))
def test_no_order_of_copies_is_faster(step) -> None:
    assert least(*step) <= fastest(*step) + 1e-9


@given(steps(st.just(2)))
def test_some_order_of_copies_takes_no_longer_where_all_have_one_size(step) -> None:
    assert least(*step) == pytest.approx(fastest(*step))


def least_with_reloads(kernels_s: Sequence[int], reads: Sequence[set[int]], rooms: Sequence[int], copy_s: int) -> int:
    """The least time of a step whose kernels read variables of one size. As each runs, `rooms` of these fit.

    All choices, one unit of time after the other: a state is the next kernel, the running one's remaining time, the
    variables on the device, the one on its way, and its remaining time.
    """
    names = set().union(*reads)
    states = {(0, 0, frozenset[int](), -1, 0)}
    for now in itertools.count():
        later = set()
        for position, left_s, there, coming, copy_left_s in states:
            if coming >= 0 and copy_left_s == 0:
                there, coming = there | {coming}, -1
            if left_s == 0 and position == len(kernels_s):
                return now
            running = position - 1
            for kept in (frozenset(some) for n in range(len(there) + 1) for some in itertools.combinations(there, n)):
                for begun in [coming] if coming >= 0 else [-1, *(names - kept)]:
                    used = len(kept) + (begun >= 0)
                    begun_left_s = copy_left_s if coming >= 0 else copy_s
                    if left_s:
                        if used <= rooms[running] and reads[running] <= kept:
                            later.add((position, left_s - 1, kept, begun, begun_left_s - 1))
                        continue
                    later.add((position, 0, kept, begun, begun_left_s - 1))
                    if used <= rooms[position] and reads[position] <= kept:
                        later.add((position + 1, kernels_s[position] - 1, kept, begun, begun_left_s - 1))
        states = later
    raise AssertionError


@st.composite
def rereading(draw: st.DrawFn) -> tuple[list[int], list[set[int]], list[int], int]:
    kernels_s = draw(st.lists(st.integers(1, 2), min_size=2, max_size=5))
    reads = [draw(st.sets(st.integers(0, 2), max_size=1)) for _ in kernels_s]
    rooms = [draw(st.integers(max(1, len(read)), 3)) for read in reads]
    return kernels_s, reads, rooms, draw(st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(rereading())
def test_no_order_of_copies_with_reloads_is_faster(step) -> None:
    kernels_s, reads, rooms, each_s = step
    names = set().union(*reads)
    read = [Read(tuple(n for n, some in enumerate(reads) if name in some), 1) for name in sorted(names)]
    assert least_seconds(kernels_s, read, [], 0, lambda _: each_s, rooms) <= least_with_reloads(*step)


def test_variables_without_room_are_copied_again() -> None:
    """One variable has room: the second read of the first one waits for its second copy."""
    reads, rooms = [{0}, {1}, {0}], [1, 1, 1]
    read = [Read((0, 2), 1), Read((1,), 1)]
    assert least_seconds([1, 1, 1], read, [], 0, lambda _: 5, rooms) == least_with_reloads([1, 1, 1], reads, rooms, 5)
    assert least_seconds([1, 1, 1], read, [], 0, lambda _: 5) == 12


def test_a_plan_takes_no_less() -> None:
    """Copies take as long as three kernels: they make the step longer. One variable that stays saves two copies."""
    graph = training_step([Layer("dense", i) for i in range(6)], 8, 128)
    keep_at_home(graph, Target(CPU), list(movable_variables(graph)))
    graph.prune()
    flow = analyse_dataflow(graph, CPU)
    nbytes = round_up(4 * 128 * 128)
    rates = Rates(FAST, FAST, FAST, out_bytes_per_s=nbytes / 3, in_bytes_per_s=nbytes / 3, launch_s=1.0)
    planner = Planner(flow, Target(CPU), costs=Costs(rates))
    candidate = planner.candidate(1 << 30)
    assert candidate is not None
    steps = build_schedule(*candidate.choice)
    needs = needs_of(flow, steps, planner.cost_s)
    assert {copy.nbytes for copy in (*needs.read, *needs.written)} == {nbytes}
    assert len(needs.read) == len(needs.written) == 6

    def copy_s(nbytes: int) -> float:
        return nbytes / rates.in_bytes_per_s

    least_s = needs.least_seconds(needs.once_s, copy_s, 1 << 30)
    planned_s = simulate_time(flow, steps, planner.cost_s, rates).total_s
    assert sum(needs.kernels_s) < least_s <= planned_s < 1.1 * least_s
    some_stay_s = least_seconds(needs.kernels_s, needs.read, needs.written, nbytes, copy_s, None, needs.awaited)
    assert some_stay_s == pytest.approx(least_s - 6.0)


def test_a_new_value_in_a_temporarys_buffer_counts_once() -> None:
    """All wait for their copies home to the end of the step. Before it the last update has its gradient besides."""
    graph = training_step([Layer("dense", i) for i in range(3)], 8, 128)
    keep_at_home(graph, Target(CPU), list(movable_variables(graph)))
    graph.prune()
    flow = analyse_dataflow(graph, CPU)
    order = traced_order(flow)
    waits = [kernel for kernel in order if kernel in flow.commits]
    late = [kernel for kernel in order if kernel not in flow.commits] + waits
    steps, cost_s = build_schedule(late, []), [1.0] * len(flow.nodes)
    needs = needs_of(flow, steps, cost_s)
    assert needs.held_bytes[-1] < 2 * needs.written[-1].nbytes
