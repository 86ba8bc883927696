"""The least time of a step whose variables are copied (benchmarks/least_step.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layered_steps import Layer, training_step
from least_step import Copied, least_seconds, needs_of
from planner_problems import CPU

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import Costs
from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import Rates
from tfswap.kernels.target import Target
from tfswap.passes.tactics.state_homes import keep_at_home, movable_variables
from tfswap.plan.schedule import build_schedule
from tfswap.planner.planner import Planner
from tfswap.simulator.timing import simulate_time

FAST = 1e30


def copy_s(nbytes: int) -> float:
    return 0.5 + nbytes


def staying(copies: Sequence[Copied], room_bytes: int) -> Iterator[list[Copied]]:
    """What is copied, for each set of variables that may stay."""
    for kept in itertools.product((False, True), repeat=len(copies)):
        if sum(copy.nbytes for copy, stays in zip(copies, kept, strict=True) if stays) <= room_bytes:
            yield [copy for copy, stays in zip(copies, kept, strict=True) if not stays]


def seconds(kernels_s: Sequence[float], loads: Sequence[Copied], stores: Sequence[Copied], last_waits: bool) -> float:
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
    kernels_s: Sequence[float], loads: Sequence[Copied], stores: Sequence[Copied], room_bytes: int, last_waits: bool
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
def steps(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> tuple[list[float], list[Copied], list[Copied], int, bool]:
    kernels_s = [float(each) for each in draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))]
    places = st.integers(0, len(kernels_s) - 2)  # nothing writes in the last kernel, which may wait for all
    copies = st.lists(st.builds(Copied, places, sizes), max_size=3)
    return kernels_s, draw(copies), draw(copies), draw(st.integers(0, 6)), draw(st.booleans())


def least(kernels_s: list[float], loads: list[Copied], stores: list[Copied], room: int, last_waits: bool) -> float:
    awaited = {len(kernels_s) - 1: stores} if last_waits else {}
    return least_seconds(kernels_s, loads, stores, room, copy_s, awaited)


@given(steps(st.integers(1, 4)))
def test_no_order_of_copies_is_faster(step) -> None:
    assert least(*step) <= fastest(*step) + 1e-9


@given(steps(st.just(2)))
def test_some_order_of_copies_takes_no_longer_where_all_have_one_size(step) -> None:
    assert least(*step) == pytest.approx(fastest(*step))


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

    def bound(limit_bytes: int = 0) -> float:
        return needs.least_seconds(sum(needs.kernels_s), lambda nbytes: nbytes / rates.in_bytes_per_s, limit_bytes)

    planned_s = simulate_time(flow, steps, planner.cost_s, rates).total_s
    assert sum(needs.kernels_s) < bound() <= planned_s < 1.1 * bound()
    assert bound(needs.held_bytes + nbytes) == pytest.approx(bound() - 6.0)
