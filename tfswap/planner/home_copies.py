"""Places the copies of variables from their homes on the host, and back, so that kernels need not wait for them.

A solver places a copy from a home like a kernel: right before the first one that reads it. Here it is moved ahead. The
wait for a copy to a home comes right after its start. Here it is moved back. Both move as far as the copies need and as
the memory below the choice's own peak allows. So the peak of live bytes stays.

A solver may drop such a copy before anything has read it, and start it again. Then the first start is left out.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import Rates
from tfswap.plan.schedule import KERNELS, Interval, build_schedule
from tfswap.planner.problem import Choice, starts_of
from tfswap.planner.solvers.belady import PREFETCH_SLACK
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.memory import simulate_memory


def with_home_copies(
    flow: Dataflow, choice: Choice, cost_s: Sequence[float], rates: Rates, snapshot: ArenaSnapshot
) -> Choice:
    """`choice` with copies from homes started earlier, those to homes awaited later, and unread ones left out.

    Args:
        choice: a solver's, without pairs and splits.
        cost_s: seconds per node.
        snapshot: the arena before the step.
    """
    if not flow.copying:
        return choice
    computing_s = [0.0 if i in flow.copying else seconds for i, seconds in enumerate(cost_s)]
    read = _moved(choice, {}, _unread_loads(flow, choice.order))
    early = _with_early_loads(flow, read, computing_s, rates, snapshot)
    return _with_late_commits(flow, early, computing_s, rates, snapshot)


def _unread_loads(flow: Dataflow, order: Sequence[int]) -> frozenset[int]:
    """The positions of loads that run again before anything has read what they have filled."""
    reads = _Reads(flow, order)
    runs = (pair for places in reads.loaded.values() for pair in itertools.pairwise(places))
    return frozenset(position for position, again in runs if not position < reads.first_after(position) < again)


def _with_early_loads(
    flow: Dataflow, choice: Choice, computing_s: Sequence[float], rates: Rates, snapshot: ArenaSnapshot
) -> Choice:
    """`choice` with copies from homes started earlier.

    Args:
        computing_s: seconds per node, without copies.
    """
    order = choice.order
    loads = [position for position, kernel in enumerate(order) if kernel in flow.loads]
    starts = starts_of(order, computing_s, {})
    room = _Room(flow, choice, snapshot)
    reads = _Reads(flow, order)
    ahead: dict[int, int] = {}  # by position of a load, the position before which it starts
    lanes: dict[int, float] = {}  # by tier, when the next copy on its lane starts
    for position in sorted(loads, key=lambda p: (reads.first_after(p), p), reverse=True):
        value = flow.loads[order[position]]
        nbytes, tier = round_up(flow.values[value].nbytes), flow.home_tiers[order[position]]
        finish = min(lanes.get(tier, float("inf")), starts[reads.first_after(position)])
        begin = finish - PREFETCH_SLACK * (rates.copy_latency_s + nbytes / rates.in_rate(tier))
        wanted = max(reads.earliest(position), int(starts.searchsorted(begin, side="right")) - 1)
        found = room.take_before(wanted, position, nbytes)
        if found < position:
            ahead[position] = found
        lanes[tier] = min(begin, starts[found])
    return _moved(choice, ahead)


def _with_late_commits(
    flow: Dataflow, choice: Choice, computing_s: Sequence[float], rates: Rates, snapshot: ArenaSnapshot
) -> Choice:
    """`choice` with copies to homes awaited later."""
    order = choice.order
    commits = [position for position, kernel in enumerate(order) if kernel in flow.commits]
    starts = starts_of(order, computing_s, {})
    room = _Room(flow, choice, snapshot)
    latest = _latest(flow, order)
    began = {kernel: starts[position] for position, kernel in enumerate(order) if kernel in flow.stores}
    behind: dict[int, int] = {}  # by position of a commit, the position before which it comes
    lanes: dict[int, float] = {}  # by tier, when its lane has ended the latest copy
    for position in commits:
        store = flow.commits[order[position]]
        nbytes, tier = round_up(flow.values[flow.stores[store]].nbytes), flow.home_tiers[store]
        taken_s = PREFETCH_SLACK * (rates.copy_latency_s + nbytes / rates.out_rate(tier))
        lanes[tier] = max(lanes.get(tier, 0.0), began[store]) + taken_s
        wanted = min(latest[order[position]], int(starts.searchsorted(lanes[tier])))
        found = room.take_after(position, wanted, nbytes)
        if found > position + 1:
            behind[position] = found
    return _moved(choice, behind)


def _latest(flow: Dataflow, order: Sequence[int]) -> dict[int, int]:
    """By commit, the position of the first kernel that waits for it: at the latest it comes before that."""
    found = dict.fromkeys(flow.commits, len(order))
    for position in reversed(range(len(order))):
        for before in flow.kernels_before(order[position]):
            if before in found:
                found[before] = position
    return found


class _Room:
    """The bytes below the peak of live bytes, between the kernels of a choice."""

    def __init__(self, flow: Dataflow, choice: Choice, snapshot: ArenaSnapshot):
        steps = build_schedule(*choice)
        memory = simulate_memory(flow, steps, snapshot=snapshot, live=True)
        self._live = np.array(memory.during_bytes, dtype=np.int64)
        self._peak = int(self._live.max(initial=0))
        kernels = [n for n, step in enumerate(steps) if step.kind in KERNELS]
        # A load that is moved before a kernel comes before the copies at its place too.
        self._begins = [0, *(n + 1 for n in kernels)]
        self._at = kernels

    def take_after(self, position: int, wanted: int, nbytes: int) -> int:
        """Keeps the tensor of the commit at `position` until before position `wanted`, or as long as there is room;
        returns before which position.
        """
        first = self._at[position] + 1
        last = first if wanted <= position else self._begins[wanted]
        over = np.flatnonzero(self._live[first:last] > self._peak - nbytes)
        if len(over):
            last = first + int(over[0])
        found = next((p for p in range(wanted, position, -1) if self._begins[p] <= last), position)
        self._live[first : self._begins[found]] += nbytes if found > position else 0
        return found

    def take_before(self, wanted: int, position: int, nbytes: int) -> int:
        """Moves the allocation of a load ahead, to position `wanted` if there is room; returns where to."""
        first, last = self._begins[wanted], self._at[position]
        over = np.flatnonzero(self._live[first:last] > self._peak - nbytes)
        if len(over):
            first += int(over[-1]) + 1
        found = next((p for p in range(wanted, position) if self._begins[p] >= first), position)
        self._live[self._begins[found] : last] += nbytes if found < position else 0
        return found


class _Reads:
    """When values are read and variables are written, in an order of kernels.

    Attributes:
        loaded: by kernel that loads a value, the positions at which it runs.
    """

    def __init__(self, flow: Dataflow, order: Sequence[int]):
        self._flow = flow
        self._order = order
        self._positions: dict[int, list[int]] = {}
        watched = set(flow.loads.values())
        for position, kernel in enumerate(order):
            for value in watched.intersection(flow.reads[kernel]):
                self._positions.setdefault(value, []).append(position)
        self._ran = {kernel: position for position, kernel in reversed(list(enumerate(order)))}  # the first time
        self.loaded: dict[int, list[int]] = {}
        for position, kernel in enumerate(order):
            if kernel in flow.loads:
                self.loaded.setdefault(kernel, []).append(position)

    def first_after(self, position: int) -> int:
        """The first kernel that reads what the load at `position` fills."""
        reads = self._positions.get(self._flow.loads[self._order[position]], ())
        return next((p for p in reads if p > position), position)

    def earliest(self, position: int) -> int:
        """The earliest position before which the load at `position` can start: after all that it waits for, and after
        the kernels that read what it filled before.
        """
        kernel = self._order[position]
        before = [self._ran[k] for k in self._flow.kernels_before(kernel) if k in self._ran]
        before += [p for p in self._positions.get(self._flow.loads[kernel], ()) if p < position]
        before += [p for p in self.loaded[kernel] if p < position]
        return max(before, default=-1) + 1


def _moved(choice: Choice, to: Mapping[int, int], left_out: Collection[int] = frozenset()) -> Choice:
    """The choice with kernels moved.

    Args:
        to: by position of such a kernel, the position of the one that it comes before, or that of the end.
        left_out: positions of kernels that do not run.
    """
    if not to and not left_out:
        return choice
    ranks = sorted((to.get(p, p), p not in to, p) for p in range(len(choice.order)) if p not in left_out)
    # Copies before a kernel come after the kernels that are moved to its place, and before all later ones.
    before = [bisect_left(ranks, (p, True)) for p in range(len(choice.order) + 1)]

    def moved(a: Interval) -> Interval:
        out = None if a.out is None else before[a.out + 1] - 1
        return a._replace(out=out, release=before[a.release], back=before[a.back], use=before[a.use])

    return choice._replace(order=[choice.order[p] for _, _, p in ranks], intervals=[moved(a) for a in choice.intervals])
