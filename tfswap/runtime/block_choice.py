"""Chooses which blocks of a step XLA compiles: the tactic "fuse".

Forms of the step with different blocks are steps of their own to the planner. The first has the blocks that save time.
Where it must evict tensors to keep its limit, others are judged: with blocks that also save bytes, at prices of once
and several times the copies that these take otherwise, and the step without blocks. The form with the least predicted
seconds of a step whose live bytes are within the limit is planned.

A block that may hold more than the limit has room for is in no form. A step keeps its blocks where its limit changes
later. Not handled: subsets that lie between these forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfswap.compiler.fused_blocks import fuse
from tfswap.device.live import free_functions
from tfswap.ir.graph import Graph
from tfswap.ir.permits import FUSE
from tfswap.kernels.hardware import Rates
from tfswap.runtime.captures import with_placeholders
from tfswap.runtime.xla_calls import Known, measure_compiled

if TYPE_CHECKING:
    from tfswap.compiler.compiler import Optimizer
    from tfswap.runtime.trace import Trace


PRICES = (1.0, 4.0)
"""Prices of a byte, as multiples of the time of its copies."""


def with_blocks(
    optimizer: Optimizer,
    trace: Trace,
    arguments: Sequence[Any],
    limit_bytes: int | None,
    make: Callable[[Graph], Optimizer],
) -> Optimizer:
    """The optimizer of the form of a step that is fastest under a limit.

    Args:
        optimizer: of the step without blocks.
        arguments: those that the step is planned for.
        make: makes the optimizer of a form's graph.
    """
    options, device = optimizer.options, optimizer.device
    if FUSE not in options.tactics or not trace.may_have_blocks:
        return optimizer
    given = [*arguments, *with_placeholders(trace.concrete)]
    # Blocks run alone to be measured: with the variables there, that has to be within the limit too.
    room_bytes = math.inf if limit_bytes is None else limit_bytes - optimizer.resident_bytes

    def form_of(price_s: float) -> Graph:
        return fuse(optimizer.graph, device, options.names, price_s, room_bytes)

    measured: Known = {}

    def made_of(form: Graph) -> Optimizer:
        measure_compiled(form, trace.concrete, given, trace.device.name, trace.device.model, measured)
        free_functions()
        return make(form)

    fast = form_of(0.0)
    if fast is optimizer.graph:
        return optimizer
    first = made_of(fast)
    if limit_bytes is None or _fits(first, limit_bytes):
        return first
    forms, seen = [first], {fast.blocks}
    for copies in PRICES:
        lean = form_of(copies * price_of_bytes(optimizer.costs.rates))
        if lean.blocks not in seen:
            seen.add(lean.blocks)
            forms.append(made_of(lean))
    return min((*forms, optimizer), key=lambda form: _seconds(form, limit_bytes))


def price_of_bytes(rates: Rates) -> float:
    """The seconds of the copies, out and back, by which a byte would leave the arena."""
    return rates.copy_share * (1 / rates.out_bytes_per_s + 1 / rates.in_bytes_per_s)


def _fits(optimizer: Optimizer, limit_bytes: int) -> bool:
    search = optimizer.search
    return search.planners.unmoved_bytes(search.variants.base) <= limit_bytes - optimizer.extra_margin_bytes


def _seconds(optimizer: Optimizer, limit_bytes: int) -> float:
    """About the least seconds under a limit, without variables at home or kernels in slices; infinite for none."""
    draft = optimizer.planner.drafted(limit_bytes - optimizer.extra_margin_bytes)
    return math.inf if draft is None else draft.timing.total_s
