"""The step with its kernels in groups (planner/concurrent.py): which schedules are tried, and what each is to take.

Which there are does not depend on the limit, nor whether one gains enough: so more limit never gives a slower plan.

Not handled: groups of kernels that compute in reduced precision, and of steps of more than `MOST_KERNELS`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.analysis.cost import Costs
from tfswap.compiler.rewriting import PLAIN, Rewriting
from tfswap.compiler.variants import Variants
from tfswap.planner.concurrent import ListSchedule, serial_bytes

SHARES = (3.0, 2.0, 1.75, 1.6, 1.5, 1.4, 1.3, 1.2, 1.1, 1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)
"""What kernels may hold while several run, over the live peak of the order that holds least."""
LEAST_GAIN = 1.02
"""What groups must gain: they hold what they read until the last of their kernels has ended."""
MOST_KERNELS = 8_000
"""Of a step: to schedule so many takes about a second."""


def concurrent_rewritings(
    variants: Variants, costs: Costs, order: Sequence[int], live_bytes: int, room_bytes: int
) -> list[tuple[float, Rewriting]]:
    """The step with kernels in groups that so much room may be enough for, the fastest first, and what each takes.

    Args:
        order: of the step's kernels, that holds least.
        live_bytes: the live peak of this order.
    """
    if variants.base != PLAIN or len(order) > MOST_KERNELS or SHARES[-1] * live_bytes > room_bytes:
        return []
    if not variants.group_members or max(map(serial_bytes, variants.group_members)) > room_bytes:
        return []
    cost_s = costs.of_step(variants.plain.flow)
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
