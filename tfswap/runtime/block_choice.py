"""Chooses which blocks of a step XLA compiles: the tactic "fuse".

Forms of the step with different blocks are steps of their own to the planner. The first has the blocks that save time.
Where it must evict tensors to keep its limit, two more are judged: one whose blocks also save bytes, at the price of
the copies that these take otherwise, and the step without blocks. The form with the least predicted seconds under the
limit is planned: those of its kernels, and of a copy of each byte above the limit.

A step keeps its blocks where its limit changes later. Not handled: subsets that lie between these forms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfswap.compiler.calibration import calibrated
from tfswap.compiler.fused_blocks import fuse
from tfswap.compiler.options import Options
from tfswap.device.live import free_functions
from tfswap.ir.graph import Graph
from tfswap.ir.permits import FUSE
from tfswap.kernels.hardware import Rates
from tfswap.runtime.captures import with_placeholders
from tfswap.runtime.xla_calls import measure_compiled

if TYPE_CHECKING:
    from tfswap.compiler.compiler import Optimizer
    from tfswap.runtime.trace import Trace


class BlockChoice:
    """The choice for one step.

    Args:
        graph: the step without blocks.
        with_blocks: gives it with blocks that are worth their bytes at a price in seconds, compiled and measured.
        make: makes the optimizer of a graph.
    """

    def __init__(self, graph: Graph, with_blocks: Callable[[float], Graph], make: Callable[[Graph], Optimizer]):
        self._graph, self._with_blocks, self._make = graph, with_blocks, make

    @classmethod
    def of(
        cls, trace: Trace, graph: Graph, arguments: Sequence[Any], options: Options, make: Callable[[Graph], Optimizer]
    ) -> BlockChoice | None:
        """None for steps that have no blocks.

        Args:
            arguments: those that the step is planned for.
        """
        model = trace.device.model
        if FUSE not in options.on(model).tactics or not trace.may_have_blocks:
            return None
        device, given = calibrated(model, options), [*arguments, *with_placeholders(trace.concrete)]

        def with_blocks(price_s: float) -> Graph:
            made = fuse(graph, device, options.names, price_s)
            measure_compiled(made, trace.concrete, given, trace.device.name, model)
            free_functions()
            return made

        return cls(graph, with_blocks, make)

    @functools.cached_property
    def without_limit(self) -> Optimizer:
        """That of the step with the blocks that save time."""
        return self._make(self._with_blocks(0.0))

    def fastest(self, limit_bytes: int | None) -> Optimizer:
        """That of the form with the least predicted seconds under a limit."""
        first = self.without_limit
        if limit_bytes is None or _fits(first, limit_bytes):
            return first
        lean = self._with_blocks(price_of_bytes(first.costs.rates))
        forms = [first]
        if lean.blocks != first.graph.blocks:
            forms.append(self._make(lean))
        if first.graph is not self._graph:
            forms.append(self._make(self._graph))
        return min(forms, key=lambda form: _seconds(form, limit_bytes))


def price_of_bytes(rates: Rates) -> float:
    """The seconds of the copies, out and back, by which a byte would leave the arena."""
    return rates.copy_share * (1 / rates.out_bytes_per_s + 1 / rates.in_bytes_per_s)


def _fits(optimizer: Optimizer, limit_bytes: int) -> bool:
    search = optimizer.search
    return search.planners.unmoved_bytes(search.variants.base) <= limit_bytes - optimizer.extra_margin_bytes


def _seconds(optimizer: Optimizer, limit_bytes: int) -> float:
    search = optimizer.search
    return search.planners.least_evicted_s(search.variants.base, limit_bytes - optimizer.extra_margin_bytes)
