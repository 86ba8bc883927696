"""Searches for orders with a lower live peak: changes one window of an order after the other.

A window is around a kernel whose live bytes are near the peak. Its first kernel, and those in it that depend on it,
come after all others of it; or its last, and those that it depends on, before all others. The change stays where the
bytes above a bound just below the peak become fewer, summed over all kernels. So of several equal peaks each counts,
and the order changes only where that gains something. Windows of all lengths are drawn, as are their places, with a
deterministic draw. Small steps are solved exactly (exact_order.py).

What is live after some kernels depends on which have run, not on their order. So only the window is replayed, from a
state that was saved before it; the order is replayed to its end when a change stays.

The core library has the same search (csrc/core/order_search.cc), with the same results in a small part of the time.
Tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.draws import Draws
from tfswap.planner import exact_order, native_orders
from tfswap.simulator.kernel_replay import KernelReplay

VISITS, TRIES = 1_000_000, 4_000
"""The most requests that are replayed, with the nodes of all windows, and the most changes tried. With these the search
takes some 20 ms; the Python form takes some seconds.
"""
MOST_NODES = 100_000
"""Of steps that are searched. Few changes of larger ones could be tried."""
NEAR_PEAK = 64
"""Bytes count as an excess from the peak less this part of it on."""
LEAST_STRIDE, MOST_STATES = 32, 64
"""The fewest nodes between saved states, and about the most states."""


def searched_order(flow: Dataflow, kernels: Sequence[int]) -> list[int]:
    """An order with at most the live peak of `kernels`: the lowest of all orders where the step is small."""
    if len(kernels) < 3 or len(flow.nodes) > MOST_NODES:
        return list(kernels)
    return exact_order.lowest_order(flow, kernels) or searched(flow, kernels)


def searched(flow: Dataflow, kernels: Sequence[int], visits: int = VISITS, tries: int = TRIES) -> list[int]:
    """An order found by changes of `kernels`, for tests too."""
    nodes = with_others(flow, kernels)
    if native_orders.is_available():
        constants = native_orders.Constants(visits, tries, NEAR_PEAK, LEAST_STRIDE, MOST_STATES)
        found = native_orders.search(flow, nodes, constants)
    else:
        found = OrderSearch(flow, nodes, visits).run(tries)
    return [i for i in found if flow.is_kernel[i]]


def with_others(flow: Dataflow, kernels: Sequence[int]) -> list[int]:
    """All nodes: kernels in their order, others as soon as they can be."""
    waiting = [len(deps) for deps in flow.deps]
    order: list[int] = []

    def ran(pending: list[int]) -> None:
        while pending:
            order.append(pending.pop())
            for user in flow.users[order[-1]]:
                waiting[user] -= 1
                if not waiting[user] and not flow.is_kernel[user]:
                    pending.append(user)

    ran([i for i, count in enumerate(waiting) if not count and not flow.is_kernel[i]])
    for kernel in kernels:
        ran([kernel])
    return order


class OrderSearch:
    """The search from one order, in Python.

    Args:
        nodes: all nodes, in order.
        visits: as VISITS.
    """

    def __init__(self, flow: Dataflow, nodes: Sequence[int], visits: int):
        self._flow, self._order, self._visits = flow, list(nodes), visits
        count = len(nodes)
        self._scales = max(1, (count - 1).bit_length())
        self._stride = max(LEAST_STRIDE, count // MOST_STATES)
        self._draws = Draws()
        self._replay = KernelReplay(flow, [i for i in nodes if flow.is_kernel[i]])
        self._states = [self._replay.saved()] * (count // self._stride + 1)
        self._during = [0] * count
        self._visits_of = [max(1, len(requests)) for requests in flow.requests]
        self._replay_from(0)

    def run(self, tries: int) -> list[int]:
        """The order found, of all nodes."""
        for _ in range(tries):
            if self._visits <= 0 or not self._over:
                break
            begin, window = self._moved()
            if window != self._order[begin : begin + len(window)] and self._improves(begin, window):
                self._take(begin, window)
        return self._order

    def _replay_from(self, begin: int) -> None:
        """Replay the order from a multiple of the stride on."""
        stride, replay = self._stride, self._replay
        replay.restore(self._states[begin // stride])
        for place in range(begin, len(self._order)):
            if place % stride == 0:
                self._states[place // stride] = replay.saved()
            self._during[place] = self._run(self._order[place])
        self._peak = max(self._during, default=0)
        self._most = self._peak - self._peak // NEAR_PEAK
        over = [max(0, during - self._most) for during in self._during]
        self._excess = [0, *accumulate(over)]
        self._over = [place for place, excess in enumerate(over) if excess]

    def _run(self, node: int) -> int:
        if not self._flow.is_kernel[node]:
            return 0
        self._visits -= self._visits_of[node]
        return self._replay.run(node)

    def _distance(self) -> int:
        return self._draws.below(min(len(self._order), 2 << self._draws.below(self._scales)))

    def _moved(self) -> tuple[int, list[int]]:
        """A changed window, and its begin."""
        order = self._order
        at = self._over[self._draws.below(len(self._over))]
        postpones = self._draws.below(2)
        begin = max(0, at - self._distance())
        end = min(len(order), at + (1 if postpones else 2) + self._distance())
        self._visits -= end - begin
        window = order[begin:end]
        edges = self._flow.deps if postpones else self._flow.users
        moved: set[int] = set()
        for node in window if postpones else reversed(window):
            if not moved or not moved.isdisjoint(edges[node]):
                moved.add(node)
        rest = [node for node in window if node not in moved]
        those = [node for node in window if node in moved]
        return begin, rest + those if postpones else those + rest

    def _improves(self, begin: int, window: Sequence[int]) -> bool:
        """Whether a window has less excess than the one in the order, and no higher peak."""
        saved = begin // self._stride
        self._replay.restore(self._states[saved])
        for node in self._order[saved * self._stride : begin]:
            self._run(node)
        left = self._excess[begin + len(window)] - self._excess[begin]
        for node in window:
            during = self._run(node)
            left -= max(0, during - self._most)
            if during > self._peak or left <= 0:
                return False
        return True

    def _take(self, begin: int, window: list[int]) -> None:
        """The window becomes part of the order, unless the whole order then peaks higher."""
        peak, end = self._peak, begin + len(window)
        before, self._order[begin:end] = self._order[begin:end], window
        self._replay_from(begin // self._stride * self._stride)
        if self._peak > peak:
            self._order[begin:end] = before
            self._replay_from(begin // self._stride * self._stride)
