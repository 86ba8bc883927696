"""The orders of a step's kernels that plans are made for, each made at its first use.

Invariant: they depend only on the step's facts and costs: not on the arena, nor on evictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.hardware import Rates
from tfswap.planner.ordering import lower_order, rank_orders
from tfswap.planner.pairing import brought_together, orders_with_room

REQUESTS_OF_A_KERNEL = 3
"""The most requests of a kernel outside of loops."""
MOST_WITH_ROOM = 50_000
"""The most kernels of steps for which orders with room, and with a lower peak, are searched. On larger steps planning
would take longer than tracing.
"""


class StepOrders:
    """The orders of one step.

    Args:
        cost_s: seconds per node.
    """

    def __init__(self, flow: Dataflow, cost_s: Sequence[float], rates: Rates):
        self._flow, self._cost_s, self._rates = flow, cost_s, rates
        self._together: list[list[int]] = []

    @cached_property
    def ranked(self) -> list[list[int]]:
        """Distinct orders, the one with the lowest live peak first (`rank_orders`)."""
        return rank_orders(self._flow, self._cost_s)

    @cached_property
    def lower(self) -> list[list[int]]:
        """The order that a search finds (`lower_order`), where that gains something."""
        order = self.ranked[0]
        if kernels_run(self._flow, order) > MOST_WITH_ROOM:
            return []
        found = lower_order(self._flow, order)
        return [] if found is None else [found]

    def together(self, count: int) -> list[list[int]]:
        """The first `count` of `ranked`, changed so that kernels that gain as pairs are next to each other."""
        for order in self.ranked[len(self._together) : count]:
            self._together.append(brought_together(self._flow, order, self._cost_s, self._rates))
        return self._together[:count]

    @cached_property
    def with_room(self) -> list[list[int]]:
        """Orders with more pairs, which hold more bytes."""
        order = self.ranked[0]
        if kernels_run(self._flow, order) > MOST_WITH_ROOM:
            return []
        return orders_with_room(self._flow, order, self._cost_s, self._rates)


def kernels_run(flow: Dataflow, order: Sequence[int]) -> int:
    """About how many kernels a step runs. A loop makes the requests of all kernels that it runs, and a block that XLA
    compiles counts as those that it replaces: else a step with blocks would be searched longer than without.
    """
    run = sum(flow.nodes[kernel].measured.kernels or 1 for kernel in order)
    return max(1, run, sum(map(len, flow.requests)) // REQUESTS_OF_A_KERNEL)
