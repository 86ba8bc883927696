"""Rewritings of a step with its kernels in groups (planner/concurrent.py), with the predicted time of each.

The rewritings and their gains do not depend on the limit, so that a higher limit never gives a slower plan.

Not handled: groups in steps with reduced precision, and in steps of more than `MOST_KERNELS`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.compiler.rewriting import PLAIN, Rewriting
from tfswap.compiler.variants import Variants
from tfswap.planner.concurrent import ListSchedule, least_bytes

SHARES = (3.0, 2.0, 1.75, 1.6, 1.5, 1.4, 1.3, 1.2, 1.1, 1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)
"""The bytes that concurrent kernels may hold, as multiples of the live peak of the best order."""
LEAST_GAIN = 1.02
"""The least speed-up of groups, which hold their inputs until the last of their kernels has ended."""
MOST_KERNELS = 8_000
"""The most kernels of a step: scheduling this many takes about a second."""


def concurrent_rewritings(
    variants: Variants, order: Sequence[int], live_bytes: int, room_bytes: int
) -> list[tuple[float, Rewriting]]:
    """Rewritings with groups that may fit into `room_bytes`, each with its predicted seconds, the fastest first.

    Args:
        order: the order of the step's kernels with the lowest live peak.
        live_bytes: that peak.
    """
    if variants.base != PLAIN or len(order) > MOST_KERNELS or not variants.group_members:
        return []
    if max(map(least_bytes, variants.group_members)) > room_bytes:  # a bound that no schedule is below
        return []
    cost_s = variants.cost_s(variants.plain)
    serial_s = sum(cost_s[i] for i in order)
    found: list[tuple[float, Rewriting]] = []
    seen: list[list[ListSchedule]] = []
    for share in SHARES:
        rewriting = PLAIN._replace(concurrent=int(share * live_bytes))
        schedules = variants.schedules(rewriting.concurrent)
        if any(schedules is other for other in seen):
            continue
        seen.append(schedules)
        total_s = serial_s - sum(sum(cost_s[i] for i in each.order) - each.now_s for each in schedules)
        if total_s * LEAST_GAIN <= serial_s and max(each.live_bytes for each in schedules) <= room_bytes:
            found.append((total_s, rewriting))
    return sorted(found, key=lambda entry: entry[0])
