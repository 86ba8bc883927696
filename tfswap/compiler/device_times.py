"""The times of one device's part of a step on several devices, as other devices' parts let it run.

The part is planned for when the others have done what it waits for, with nothing moved there. Reports show when they
have by their plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tfswap.plan.plan import Plan
from tfswap.plan.schedule import build_schedule
from tfswap.simulator.device_timing import PartLanes, TimedPart, simulate_devices

if TYPE_CHECKING:
    from tfswap.compiler.compiler import Optimizer
    from tfswap.passes.device_parts import Parts


def lanes_of(optimizer: Optimizer, plan: Plan | None) -> PartLanes:
    """The schedule of a plan; without one that of the order that is planned first, with nothing moved."""
    variants, rates = optimizer.search.variants, optimizer.costs.rates
    if plan is None:
        flow, cost_s = variants.plain.flow, variants.cost_s(variants.plain)
        order = variants.orders_of(variants.plain.rewriting).ranked[0]
        return PartLanes(flow, build_schedule(order, ()), cost_s, rates)
    form = optimizer.form_of(plan)
    return PartLanes(form.variant.flow, form.schedule, variants.cost_s(form.variant), rates, form.tiers)


def assume_times(optimizer: Optimizer, unmoved: TimedPart) -> None:
    """Plan from now on for these times, which are those with nothing moved on any device."""
    note_times(optimizer, unmoved)
    optimizer.search.planners.assume_costs(optimizer.costs)
    optimizer.unoptimised.least_s = unmoved.timing.total_s


def note_times(optimizer: Optimizer, planned: TimedPart) -> None:
    """Report these times, which are those of plans."""
    optimizer.costs = dataclasses.replace(optimizer.costs, arrivals=planned.arrivals)


def times_of(parts: Parts, optimizers: Mapping[str, Optimizer], plans: Mapping[str, Plan]) -> dict[str, TimedPart]:
    """The time of each device's part under these plans; without them, as `lanes_of`.

    Args:
        parts: the step.
        optimizers: of the planned parts, by device.
    """
    lanes = {where: lanes_of(optimizer, plans.get(where)) for where, optimizer in optimizers.items()}
    others = {where: part for where, part in parts.graphs.items() if where not in lanes}
    return simulate_devices(lanes, parts.sources, others)
