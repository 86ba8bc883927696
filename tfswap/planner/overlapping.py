"""Orders whose kernels run concurrently, each on one core, as in a list schedule with bounded memory.

A step that accumulates gradients of micro-batches has kernels enough that need nothing of each other: gradients of
weights, and the forward pass of a micro-batch beside the backward pass of the one before. TensorFlow's executor runs
whatever is ready, and holds what that takes. Here the kernel that comes first in an order of low memory starts where a
core is free and the live bytes stay within a bound (Graham's list scheduling), and the schedule says when each starts
and when it has ended (csrc/core/started_kernel.cc). So its memory is known to the byte, and none waits for the longer
of two, as in pairs.

Not handled: orders in which tensors are swapped or recomputed; a kernel whose time differs much from its cost holds up
what comes after its end.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from tfswap.analysis.cost import one_core_seconds
from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import Rates
from tfswap.plan.plan import Overlap
from tfswap.plan.schedule import build_schedule
from tfswap.planner.pairing import stands_alone
from tfswap.simulator.simulate import simulate_memory

LEAST_STARTED_S = 150e-6
"""What a kernel takes on one core to be worth the thread that it wakes."""
LEAST_ALONE_S = 30e-6
"""What a kernel takes that stays on the thread of the order, and on one core while another runs."""
LIVE_SHARES = (0.85, 0.9, 0.95, 0.98, 1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0)
"""Bounds of live bytes, over the peak of the order that they are made from."""
LOOKED_AT = 64
"""So many ready kernels are looked at for one that the bound has room for."""


def overlapping_orders(
    flow: Dataflow, order: Sequence[int], cost_s: Sequence[float], rates: Rates
) -> list[tuple[list[int], tuple[Overlap, ...]]]:
    """Orders of the kernels that run concurrently, with which of them do, for ever higher bounds of live bytes."""
    lowest_bytes = simulate_memory(flow, build_schedule(order, ()), live=True).peak_bytes
    seconds = {i: one_core_seconds(flow.nodes[i], cost_s[i], rates) for i in order if stands_alone(flow, i)}
    startable, alone = ({i for i, s in seconds.items() if s > least_s} for least_s in (LEAST_STARTED_S, LEAST_ALONE_S))
    found: list[tuple[list[int], tuple[Overlap, ...]]] = []
    for share in LIVE_SHARES:
        made = _Schedule(flow, order, cost_s, rates, startable, alone, lowest_bytes * share).made()
        if made[1] and made not in found:
            found.append(made)
    return found


class _Running(NamedTuple):
    """A kernel that has started: when it ends, and its position in the order that is made."""

    end_s: float
    position: int


class _Schedule:
    """One list schedule.

    Args:
        order: who comes first among the kernels that can start.
        startable: kernels that others may run concurrently with.
        alone: kernels that can stay on one core.
        most_bytes: that are live while more than one kernel runs.
    """

    def __init__(
        self,
        flow: Dataflow,
        order: Sequence[int],
        cost_s: Sequence[float],
        rates: Rates,
        startable: set[int],
        alone: set[int],
        most_bytes: float,
    ):
        self._flow, self._order, self._cost_s, self._rates = flow, order, cost_s, rates
        self._startable, self._alone, self._most_bytes = startable, alone, most_bytes
        self._place = {i: position for position, i in enumerate(order)}
        self._waits_for = {i: len(flow.kernels_before(i)) for i in order}
        self._users: dict[int, list[int]] = {i: [] for i in order}
        for i in order:
            for before in flow.kernels_before(i):
                self._users[before].append(i)
        self._unread = [0] * len(flow.values)
        for i in order:
            for v in flow.held[i]:
                self._unread[v] += 1
        for v in flow.fetched:
            self._unread[v] += 1
        self._size = [round_up(value.nbytes) for value in flow.values]
        self._stays = set(flow.persistent)
        self._live_bytes = sum(self._size[v] for v in self._stays)
        self._now = 0.0
        self._ready = [self._place[i] for i in order if not self._waits_for[i]]
        heapq.heapify(self._ready)
        self._running: list[_Running] = []
        self._made: list[int] = []
        self._ends: dict[int, int] = {}  # by position of a kernel that was started: how many had started at its end

    def made(self) -> tuple[list[int], tuple[Overlap, ...]]:
        """The kernels as they start, and those that run concurrently with others."""
        cores = int(self._rates.cores)
        while self._ready or self._running:
            i = self._next() if len(self._running) < cores else None
            if i is None:
                self._finish()
                continue
            seconds = self._cost_s[i]
            if self._running or i in self._startable:
                seconds = one_core_seconds(self._flow.nodes[i], seconds, self._rates)
            position = len(self._made)
            self._made.append(i)
            self._live_bytes += self._needs(i)
            if i in self._startable:
                self._now += self._rates.launch_s
                heapq.heappush(self._running, _Running(self._now + seconds, position))
            else:
                self._now += seconds
                self._end(i)
                if self._running and i in self._alone:
                    self._ends[position] = position + 1
            while self._running and self._running[0].end_s <= self._now:
                self._finish()
        starts = sorted(self._ends)
        covered = 0  # positions below are those of kernels that others run concurrently with
        overlaps: list[Overlap] = []
        for start in starts:
            end = self._ends[start]
            if end > start + 1 or start < covered:
                overlaps.append(Overlap(start, end))
            covered = max(covered, end)
        return self._made, tuple(overlaps)

    def _next(self) -> int | None:
        """The first kernel that is ready and that there is room for; None where what runs has to end before."""
        passed_by: list[int] = []
        found: int | None = None
        while found is None and self._ready and len(passed_by) < LOOKED_AT:
            position = heapq.heappop(self._ready)
            i = self._order[position]
            if self._running and self._live_bytes + self._needs(i) > self._most_bytes:
                passed_by.append(position)
            else:
                found = i
        for position in passed_by:
            heapq.heappush(self._ready, position)
        return found

    def _finish(self) -> None:
        """The kernel that ends first has ended."""
        end_s, position = heapq.heappop(self._running)
        self._now = max(self._now, end_s)
        self._ends[position] = len(self._made)
        self._end(self._made[position])

    def _needs(self, i: int) -> int:
        return sum(round_up(request.nbytes) for request in self._flow.requests[i] if request.nbytes > 0)

    def _end(self, i: int) -> None:
        """What a kernel frees, and who can start then."""
        kept = {v for _, v in self._flow.makes[i]}
        self._live_bytes -= self._needs(i) - sum(self._size[v] for v in kept if self._unread[v])
        for v in self._flow.held[i]:
            self._unread[v] -= 1
            if not self._unread[v] and v not in self._stays:
                self._live_bytes -= self._size[v]
        for user in self._users[i]:
            self._waits_for[user] -= 1
            if not self._waits_for[user]:
                heapq.heappush(self._ready, self._place[user])
