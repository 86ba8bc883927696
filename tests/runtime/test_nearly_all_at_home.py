"""Plans with nearly all variables at home on the host: those that stay on the device save their copies."""

from __future__ import annotations

from unittest import mock

from layered_steps import Layer, training_step
from test_costs import CPU, MIB

from tfswap.analysis.cost import Costs
from tfswap.compiler import alternatives
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.compiler.rewriting import Found
from tfswap.kernels.hardware import Rates
from tfswap.planner import plan_search
from tfswap.simulator.arena_snapshot import ArenaSnapshot, Variable

LAYERS, WIDTH, ROWS = 16, 512, 1
FAST = 1e30
RATES = Rates(FAST, FAST, FAST, out_bytes_per_s=MIB / 3, in_bytes_per_s=MIB / 3, launch_s=1.0)
"""A kernel takes a second, and the copy of a weight three."""
TACTICS = ("swap", "state")


def optimizer(host_limit_bytes: int | None = None) -> Optimizer:
    """Of a step with weights of 1 MiB, which are in the arena, and small feature maps."""
    variables = tuple(Variable(f"w{i}", i + 1, MIB) for i in range(LAYERS))
    return Optimizer(
        training_step([Layer("dense", i) for i in range(LAYERS)], ROWS, WIDTH, assign=True),
        CPU,
        Options(tactics=TACTICS, host_limit_bytes=host_limit_bytes),
        snapshot=ArenaSnapshot(LAYERS * MIB, variables=variables),
        costs=Costs(RATES),
    )


def plans(made: Optimizer, limits: range) -> list[Found | None]:
    return [made.search.fastest(limit) for limit in limits]


def test_the_first_weights_stay_where_copies_would_make_the_step_wait() -> None:
    limits = range(4 * MIB, 9 * MIB, MIB)
    with mock.patch.object(plan_search, "is_worthwhile", lambda timing: False):
        found = [each for each in plans(optimizer(), limits) if each is not None]
        with mock.patch.object(alternatives, "FEWER_STAY", ()):
            without = [each for each in plans(optimizer(), limits) if each is not None]
    fast, slow = ([each.candidate.timing.total_s for each in some] for some in (found, without))
    assert len(found) == len(without) == len(limits)
    assert all(ours <= theirs for ours, theirs in zip(fast, slow, strict=True))
    assert fast == sorted(fast, reverse=True), "a higher limit gives no slower plan"
    staying = [{f"w{i}" for i in range(LAYERS)} - set(each.variant.rewriting.at_home) for each in found]
    assert {"w0"} in staying or {"w0", "w1"} in staying
    assert min(ours / theirs for ours, theirs in zip(fast, slow, strict=True)) < 0.95
    assert all(each.candidate.peak_bytes <= limit for each, limit in zip(found, limits, strict=True))


def test_a_higher_limit_gives_no_slower_plan_than_one_before() -> None:
    """A search near a plan may find a faster one than near that for a higher limit."""
    made, limits = optimizer(), range(4 * MIB, 9 * MIB, MIB)
    with mock.patch.object(plan_search, "is_worthwhile", lambda timing: False):
        without = [each.candidate.timing.total_s for each in plans(optimizer(), limits) if each is not None]
    found = [each for each in plans(made, limits) if each is not None]
    seconds = [each.candidate.timing.total_s for each in found]
    assert seconds == sorted(seconds, reverse=True)
    assert all(ours <= theirs for ours, theirs in zip(seconds, without, strict=True)) and seconds != without
    assert all(each.candidate.peak_bytes <= limit for each, limit in zip(found, limits, strict=True))


def test_no_graph_is_made_whose_variables_have_no_room_in_host_memory() -> None:
    """A step with slices is made only to find that out, which takes long."""
    made = optimizer(host_limit_bytes=10 * MIB)
    assert made.search.fastest(3 * MIB) is None
    rewritings = made.search.variants._made
    assert max(len(rewriting.at_home) for rewriting in rewritings) == 8
    assert not any(rewriting.slice_bytes for rewriting in rewritings)
