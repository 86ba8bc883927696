"""The smallest limit under which a step is not much slower: what `max_slowdown` requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfswap.compiler.resident_margin import fastest, margin_of
from tfswap.errors import InfeasibleMemoryLimit
from tfswap.support import progress
from tfswap.support.sizes import format_bytes

if TYPE_CHECKING:
    from tfswap.compiler.compiler import Optimizer

RESOLUTION = 1 / 512
"""The search ends where the limits left to try differ by this share."""
MOST_GAIN = 0.1
"""The share of a step's time that a search near a plan may gain: up to 8% was measured (docs/measurements/state.md)."""


@progress.task("searching the smallest limit for the time")
def smallest_limit(optimizer: Optimizer, max_slowdown: float, limit_bytes: int | None = None) -> int | None:
    """The smallest limit, in bytes, whose plan is predicted to take at most `max_slowdown` times the unoptimised step.

    More memory never gives a slower plan, so limits are bisected.

    Args:
        limit_bytes: a limit that the plan has to keep too.

    Returns:
        The limit; `limit_bytes` where only the unchanged step is as fast.

    Raises:
        InfeasibleMemoryLimit: no plan within `limit_bytes` is as fast, or there is none. `floor_bytes` is then the
            smallest limit for this slowdown, or for any.
    """
    floor_bytes, margin_bytes = optimizer.floor_bytes(), optimizer.extra_margin_bytes
    if limit_bytes is not None and limit_bytes < floor_bytes:
        raise optimizer.infeasible(limit_bytes)
    smallest = _smallest(optimizer, max_slowdown, floor_bytes)
    if smallest is None:
        if limit_bytes is None or optimizer.fits_unchanged(limit_bytes - margin_bytes):
            return limit_bytes
        smallest = optimizer.unoptimised.likely_bound_bytes + margin_bytes
    if limit_bytes is None or smallest <= limit_bytes:
        return smallest
    ratio = _least_ratio(optimizer, limit_bytes)
    raise InfeasibleMemoryLimit(
        f"memory_limit is {limit_bytes} bytes ({format_bytes(limit_bytes)}), under which this step is predicted to "
        f"take {ratio:.3f} times as long as unoptimised, and max_slowdown is {max_slowdown:g}: ask for "
        f"memory_limit={smallest} ({format_bytes(smallest)}) or more, or allow more time.",
        floor_bytes=smallest,
        limit_bytes=limit_bytes,
    )


def _smallest(optimizer: Optimizer, max_slowdown: float, floor_bytes: int) -> int | None:
    """The smallest limit with a plan that is as fast; None where there is none up to the unoptimised peak."""

    if bytes_for(optimizer, max_slowdown, floor_bytes) is not None:
        return floor_bytes
    low, tried = floor_bytes, optimizer.baseline.peak_bytes + optimizer.extra_margin_bytes
    high = bytes_for(optimizer, max_slowdown, tried)
    if high is None:
        return None
    while high - low > RESOLUTION * high:
        middle = (low + high) // 2
        if (needed_bytes := bytes_for(optimizer, max_slowdown, middle)) is None:
            low = middle
        else:
            tried, high = middle, needed_bytes
    # A GPU's plan is slower under a lower limit, which leaves convolutions less room.
    return tried if bytes_for(optimizer, max_slowdown, high) is None else high


def bytes_for(optimizer: Optimizer, max_slowdown: float, limit_bytes: int) -> int | None:
    """The bytes that the plan for a limit needs; None where it takes more than `max_slowdown` allows, or none fits."""
    for near in (False, True):
        found = fastest(optimizer, limit_bytes, near)
        if found is None:
            return None
        ratio = optimizer.baseline.time_ratio(found.candidate.timing.total_s)
        if ratio <= max_slowdown:
            return found.candidate.peak_bytes + margin_of(optimizer, found.variant.rewriting.at_home)
        if ratio > max_slowdown * (1 + MOST_GAIN):
            return None
    return None


def _least_ratio(optimizer: Optimizer, limit_bytes: int) -> float:
    """The predicted time of the fastest plan for a limit over that of the unoptimised step."""
    found = fastest(optimizer, limit_bytes)
    assert found is not None, "a limit from the floor on has a plan"
    return optimizer.baseline.time_ratio(found.candidate.timing.total_s)
