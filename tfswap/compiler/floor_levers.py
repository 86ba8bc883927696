"""What would lower a step's smallest limit (report/levers.py): from the plan for that limit, and from plans of its own.

Planning in slices takes minutes for large steps, so it is left out above MOST_KERNELS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfswap.compiler.rewriting import Rewriting
from tfswap.ir.permits import SLICE, STATE
from tfswap.passes.tactics.state_homes import movable_variables
from tfswap.report import levers
from tfswap.report.levers import Floor, Lever
from tfswap.support import progress

if TYPE_CHECKING:
    from tfswap.compiler.compiler import Optimizer

MOST_KERNELS = 200
"""Slices are planned for steps of at most this number of kernels."""
MOST_TRIES = 3
"""The sizes of slices that are planned, until one lowers the limit."""


@progress.task("finding what would lower the smallest limit")
def floor_of(optimizer: Optimizer) -> Floor:
    """The smallest limit of a step, and what would lower it."""
    with optimizer.at_floor() as floor_bytes:
        return _floor_of(optimizer, floor_bytes)


def _floor_of(optimizer: Optimizer, floor_bytes: int) -> Floor:
    search = optimizer.search
    found = search.lowest()
    form = optimizer.form_of(optimizer.plan_of(found, floor_bytes))
    record = form.record(optimizer.costs, search.planners.snapshot_of(found.variant.rewriting))
    variables = movable_variables(optimizer.settled)
    shapes = [kind.shape for kind in variables.values()]
    slices, note = _in_slices(optimizer, floor_bytes, sum(record.flow.is_kernel))
    return Floor.of(
        floor_bytes,
        (
            levers.half_batch(record, floor_bytes, shapes),
            levers.smaller_floats(record, floor_bytes),
            None
            if STATE in optimizer.options.tactics
            else levers.at_home([kind.nbytes or 0 for kind in variables.values()], floor_bytes),
            slices,
        ),
        note,
    )


def _in_slices(optimizer: Optimizer, floor_bytes: int, kernels: int) -> tuple[Lever | None, str]:
    """The lever of slices, as planned; and why there is none where it is not known."""
    options, device, search = optimizer.options, optimizer.device, optimizer.search
    if SLICE in options.tactics or options.portable or options.solver != "default" or not device.has_own_kernels:
        return None, ""
    if kernels > MOST_KERNELS:
        return None, f'"slice" in tactics may lower it too: not planned here, since the step has {kernels} kernels'
    tried: list[Rewriting] = search.alternatives.in_row_slices[::-1][:MOST_TRIES]
    for rewriting in tried:
        variant = search.variants[rewriting]
        if (lowest := search.planners.of(variant).lowest(floor_bytes)) is not None:
            return levers.in_slices(lowest.peak_bytes), ""
    return None, ""
