"""What plans of a file leave free for tensors that are in the arena before the step (offline.py). Variables at home on
the host need none of it: plans with all of them at home leave less free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfswap.compiler.rewriting import PLAIN, Found

if TYPE_CHECKING:
    from tfswap.compiler.compiler import Optimizer


def margin_of(optimizer: Optimizer, at_home: tuple[str, ...]) -> int:
    """What plans with these variables at home leave free in addition."""
    state = optimizer.search.state if optimizer.margin_is_of_residents and at_home else None
    if state is None or at_home != state.all_at_home:
        return optimizer.extra_margin_bytes
    resident_bytes = optimizer.search.planners.snapshot_of(PLAIN._replace(at_home=at_home)).total_bytes
    return min(optimizer.extra_margin_bytes, resident_bytes)


def fastest(optimizer: Optimizer, limit_bytes: int | None, near: bool = True) -> Found | None:
    """The fastest candidate whose peak, with its margin, keeps a limit; None where there is none.

    Args:
        near: as of `Search.fastest`.
    """
    search = optimizer.search
    if limit_bytes is None:
        return search.fastest(None)
    found = search.fastest(limit_bytes - optimizer.extra_margin_bytes, near)
    if found is None and optimizer.margin_is_of_residents and search.state is not None:
        margin_bytes = margin_of(optimizer, search.state.all_at_home)
        found = search.state.fastest_full(limit_bytes - margin_bytes)
    return found


def floor_bytes(optimizer: Optimizer) -> int:
    """The smallest limit that a plan keeps."""
    search = optimizer.search
    floor = search.lowest().candidate.peak_bytes + optimizer.extra_margin_bytes
    if not optimizer.margin_is_of_residents or search.state is None:
        return floor
    full, margin_bytes = search.state.lowest_full(), margin_of(optimizer, search.state.all_at_home)
    return floor if full is None else min(floor, full.candidate.peak_bytes + margin_bytes)
