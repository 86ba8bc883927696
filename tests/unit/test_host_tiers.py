"""Where swapped tensors wait: places in memory that another device lends, and the times of copies to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layered_steps import Layer, training_step

from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.errors import InvalidModel
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import DISK, HOST, LENT, default_rates
from tfswap.plan.plan import Plan
from tfswap.plan.schedule import build_schedule, tiers_of
from tfswap.planner.host_tiers import Tiers
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.problem import Gap
from tfswap.planner.solvers import belady, cheapest_eviction
from tfswap.simulator.memory import simulate_memory
from tfswap.simulator.timing import simulate_time

GPU = DeviceModel("gpu")
MIB = 1 << 20


@st.composite
def gaps(draw: st.DrawFn) -> list[Gap]:
    found: list[Gap] = []
    for value in range(draw(st.integers(1, 12))):
        made = draw(st.integers(0, 20))
        nbytes, ends = draw(st.integers(1, 4096)), draw(st.lists(st.integers(1, 12), min_size=1, max_size=2))
        found += [Gap(value, nbytes, made, made, made + sum(ends[: n + 1])) for n in range(len(ends))]
    return found


def stay(found: Sequence[Gap], value: int) -> tuple[int, int, int]:
    own = [gap for gap in found if gap.value == value]
    return min(gap.made for gap in own), max(gap.end for gap in own), round_up(own[0].nbytes)


@given(gaps(), st.integers(0, 16384))
def test_no_two_tensors_are_in_one_place_at_one_time(found: list[Gap], lent_bytes: int):
    places = Tiers(lent_bytes=lent_bytes).chosen(found).lent
    for value, place in places.items():
        assert 0 <= place <= lent_bytes - stay(found, value)[2]
    for one, other in combinations(places, 2):
        (begin, end, nbytes), (begins, ends, others) = stay(found, one), stay(found, other)
        together = begin <= ends and begins <= end
        assert not together or places[one] + nbytes <= places[other] or places[other] + others <= places[one]


def test_the_shortest_stays_are_in_lent_memory_and_the_longest_on_disk():
    found = [Gap(value, 1024, made=value, start=value, end=20 - value) for value in range(4)]
    places = Tiers(host_bytes=2048, disk_bytes=None, lent_bytes=1024).chosen(found)
    assert [places.tier(value) for value in range(4)] == [DISK, HOST, HOST, LENT]


@pytest.fixture(scope="module")
def optimizer() -> Optimizer:
    return Optimizer(training_step([Layer("dense"), Layer("relu")] * 6, 2048, 256), GPU, Options(tactics=("swap",)))


@pytest.mark.parametrize("solve", [belady.solve, cheapest_eviction.solver(cheapest_eviction.Prices(copy=0.1))])
def test_lent_memory_is_used_first_and_takes_none_of_the_host(optimizer: Optimizer, solve):
    problem = optimizer.planner.problems[0]
    rates = dataclasses.replace(default_rates(GPU), peer_bytes_per_s=100e9)
    target = LiveTarget(problem.live_peak_bytes * 60 // 100)
    host = [
        simulate_memory(problem.flow, build_schedule(*choice), tiers=tiers_of(choice.intervals)).host_peak_bytes
        for lent_bytes in (0, 2 * MIB, 1024 * MIB)
        if (choice := solve(dataclasses.replace(problem, rates=rates, tiers=Tiers(lent_bytes=lent_bytes)), target))
    ]
    assert len(host) == 3 and host[0] >= host[1] + 2 * MIB and host[2] == 0, host


def test_copies_to_another_device_have_a_lane_and_a_rate_of_their_own(optimizer: Optimizer):
    plan = optimizer.plan("50%")
    form = optimizer.form_of(plan)
    flow, steps = form.variant.flow, form.schedule
    rates = dataclasses.replace(default_rates(GPU), out_bytes_per_s=1e9, in_bytes_per_s=1e9, peer_bytes_per_s=100e9)
    cost_s = [1e-5] * len(flow.nodes)
    swapped = {flow.value_named[a.tensor] for a in plan.evictions}
    assert len(swapped) > 2
    by_host = simulate_time(flow, steps, cost_s, rates).total_s
    half = simulate_time(flow, steps, cost_s, rates, dict.fromkeys(sorted(swapped)[::2], LENT)).total_s
    lent = simulate_time(flow, steps, cost_s, rates, dict.fromkeys(swapped, LENT)).total_s
    assert lent < half < by_host


def test_a_plan_with_a_place_outside_of_the_lent_memory_is_refused(optimizer: Optimizer):
    plan = optimizer.plan("50%")
    first = plan.evictions[0]
    for place, nbytes, wrong in ((0, first.nbytes, False), (256, first.nbytes, True), (-1, first.nbytes, True)):
        moved = [dataclasses.replace(a, lent=place) if a.tensor == first.tensor else a for a in plan.evictions]
        made = dataclasses.replace(plan, evictions=tuple(moved), lent_bytes=nbytes)
        if wrong:
            with pytest.raises(InvalidModel, match="which is among the"):
                Plan.from_json(made.to_json())
        else:
            assert Plan.from_json(made.to_json()) == made
