"""The smallest limit under which a step takes at most a given multiple of the unoptimised step's time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from layered_steps import Layer, training_step
from planner_problems import optimizer_of

from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.request import as_slowdown
from tfswap.compiler.slowdown import RESOLUTION, bytes_for, smallest_limit
from tfswap.errors import InfeasibleMemoryLimit, TfswapError

SLOWDOWNS = (1.01, 1.02, 1.05, 1.1, 1.2)


@pytest.fixture(scope="module")
def optimizer() -> Optimizer:
    return optimizer_of(training_step([Layer("dense"), Layer("relu")] * 6, rows=512, width=128))


@pytest.mark.tensorflow  # the unoptimised step is as Grappler leaves it
def test_no_smaller_limit_allows_the_time(optimizer: Optimizer):
    limits = [smallest_limit(optimizer, slowdown) for slowdown in SLOWDOWNS]
    between = 0
    for slowdown, limit in zip(SLOWDOWNS, limits, strict=True):
        assert limit is not None
        plan = optimizer.plan(limit)
        assert plan.planned_peak_bytes <= limit
        assert optimizer.report(plan).time_ratio <= slowdown
        if limit > optimizer.floor_bytes():
            between += 1
            assert bytes_for(optimizer, slowdown, int(limit * (1 - 2 * RESOLUTION))) is None
    assert between > 1
    assert all(less >= more for less, more in pairwise(map(int, filter(None, limits))))
    assert len({*limits}) > 1


@pytest.mark.tensorflow  # the unoptimised step is as Grappler leaves it
def test_any_time_allows_the_floor_and_a_time_that_no_plan_reaches_no_limit(optimizer: Optimizer):
    assert smallest_limit(optimizer, 100.0) == optimizer.floor_bytes()
    assert smallest_limit(optimizer, 0.5) is None
    above = 2 * optimizer.baseline.peak_bytes
    assert smallest_limit(optimizer, 0.5, above) == above
    with pytest.raises(InfeasibleMemoryLimit, match="or allow more time") as error:
        smallest_limit(optimizer, 0.5, optimizer.baseline.peak_bytes // 2)
    assert optimizer.fits_unchanged(error.value.floor_bytes)


@pytest.mark.tensorflow  # the unoptimised step is as Grappler leaves it
def test_a_limit_that_allows_no_such_time_is_refused(optimizer: Optimizer):
    smallest = smallest_limit(optimizer, 1.05)
    assert smallest is not None
    assert smallest_limit(optimizer, 1.05, smallest) == smallest
    with pytest.raises(
        InfeasibleMemoryLimit, match=r"times as long as unoptimised, and max_slowdown is 1\.05"
    ) as error:
        smallest_limit(optimizer, 1.05, smallest - 1)
    assert error.value.floor_bytes == smallest
    with pytest.raises(InfeasibleMemoryLimit, match="this step needs at least") as error:
        smallest_limit(optimizer, 1.05, optimizer.floor_bytes() - 1)
    assert error.value.floor_bytes == optimizer.floor_bytes()


@pytest.mark.parametrize("given", [0.99, 0, -1, True, "1.1", float("nan"), float("inf"), [1.1]])
def test_what_is_no_slowdown_is_refused(given: object):
    with pytest.raises(TfswapError, match="max_slowdown is .*: give a number of 1 or more"):
        as_slowdown(given, None)
