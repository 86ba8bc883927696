"""Places the copies of variables from their homes on the host, and back, so that kernels need not wait for them.

A solver places a copy from a home like a kernel: right before the first one that reads it. Here it is moved ahead. The
wait for a copy to a home comes right after its start. Here it is moved back. Both move as far as the copies need and as
memory allows: that below the choice's own peak, so that the peak of live bytes stays, or more where that saves time.
Until that wait the home has the old value and the new one: the memory outside of the device must have room for both.

A solver may drop such a copy before anything has read it, and start it again. Then the first start is left out.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import Rates
from tfswap.plan.schedule import AWAIT, IN, KERNELS, OUT, RELEASE, Interval, Step, build_schedule, tiers_of
from tfswap.planner.host_tiers import ANYTHING, Tiers
from tfswap.planner.problem import Choice, starts_of
from tfswap.planner.solvers.belady import PREFETCH_SLACK
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.memory import simulate_memory
from tfswap.simulator.timing import CopyLanes

COPIES_WITH_ROOM = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of copies of the largest variable that have room above the choice's own peak."""
LEAST_GAIN = 0.01
"""The least share of a step's time that more room must save."""


def with_home_copies(
    flow: Dataflow,
    choice: Choice,
    cost_s: Sequence[float],
    rates: Rates,
    snapshot: ArenaSnapshot,
    tiers: Tiers = ANYTHING,
) -> list[Choice]:
    """`choice` with copies from homes started earlier, those to homes awaited later, and unread ones left out: within
    its own peak, and with more and more room, as long as that makes the step faster.

    Args:
        choice: a solver's, without pairs and splits.
        cost_s: seconds per node.
        snapshot: the arena before the step.
        tiers: the memory outside of the device.
    """
    if not flow.copying:
        return [choice]
    copies = _Copies(flow, moved_kernels(choice, {}, _unread_loads(flow, choice.order)), cost_s, rates, snapshot, tiers)
    found = [copies.placed(0)]
    fastest_s = copies.placed(math.inf).seconds
    for count in COPIES_WITH_ROOM:
        if found[-1].seconds <= fastest_s * (1 + LEAST_GAIN):
            break
        placed = copies.placed(count * copies.largest_bytes)
        if placed.seconds < found[-1].seconds * (1 - LEAST_GAIN):
            found.append(placed)
    return [placed.choice for placed in found]


def _unread_loads(flow: Dataflow, order: Sequence[int]) -> frozenset[int]:
    """The positions of loads that run again before anything has read what they have filled."""
    reads = Reads(flow, order)
    runs = (pair for places in reads.loaded.values() for pair in itertools.pairwise(places))
    return frozenset(position for position, again in runs if not position < reads.first_after(position) < again)


class _Placed(NamedTuple):
    """A choice with its copies placed, and about the seconds that its step takes."""

    choice: Choice
    seconds: float


class _Load(NamedTuple):
    """A copy from a home.

    Attributes:
        position: of the kernel that starts it.
        first: the position of the kernel that reads it first.
        dropped: the position of the last kernel that read it before, where the choice drops it then; -1 for none.
        wanted: the position before which it should start, for no kernel to wait.
        spare_s: seconds that it should end earlier, since the model of its time is not exact.
    """

    position: int
    first: int
    dropped: int
    wanted: int
    nbytes: int
    tier: int
    spare_s: float


class _Copies:
    """The copies of a choice from homes and to them.

    Attributes:
        largest_bytes: the bytes of the largest one.
    """

    def __init__(
        self,
        flow: Dataflow,
        choice: Choice,
        cost_s: Sequence[float],
        rates: Rates,
        snapshot: ArenaSnapshot,
        tiers: Tiers,
    ) -> None:
        self._flow, self._choice, self._rates = flow, choice, rates
        self._computing_s = [0.0 if i in flow.copying else seconds for i, seconds in enumerate(cost_s)]
        self._steps = build_schedule(*choice)
        memory = simulate_memory(flow, self._steps, snapshot=snapshot, live=True, tiers=tiers_of(choice.intervals))
        self._live, self._spare_bytes = memory.during_bytes, tiers.spare_bytes(memory)
        self._latest = first_waiting(flow, choice.order, flow.commits)
        self._loads = self._wanted_loads()
        self.largest_bytes = max(round_up(flow.values[v].nbytes) for v in (*flow.loads.values(), *flow.stores.values()))

    def _wanted_loads(self) -> list[_Load]:
        """The loads, by when they are read first."""
        flow, order, rates = self._flow, self._choice.order, self._rates
        starts, reads = starts_of(order, self._computing_s, {}), Reads(flow, order)
        first = {position: reads.first_after(position) for position, kernel in enumerate(order) if kernel in flow.loads}
        lanes: dict[int, float] = {}  # by tier, when the next copy on its lane starts
        found: list[_Load] = []
        for position in sorted(first, key=lambda p: (first[p], p), reverse=True):
            nbytes, tier = round_up(flow.values[flow.loads[order[position]]].nbytes), flow.home_tiers[order[position]]
            seconds = rates.copy_latency_s + nbytes / rates.in_rate(tier)
            finish = min(lanes.get(tier, math.inf), float(starts[first[position]]))
            lanes[tier] = finish - PREFETCH_SLACK * seconds
            wanted = max(reads.earliest(position), int(starts.searchsorted(lanes[tier], side="right")) - 1)
            spare_s = (PREFETCH_SLACK - 1) * seconds
            found.append(_Load(position, first[position], reads.dropped(position), wanted, nbytes, tier, spare_s))
        return found[::-1]

    def placed(self, room_bytes: float) -> _Placed:
        """The choice with copies placed in the course of the step, with so much room above its peak of live bytes."""
        run = _Run(
            self._flow, self._choice, self._steps, self._computing_s, self._rates, self._latest, self._spare_bytes
        )
        run.within(self._live, room_bytes, self._loads)
        return _Placed(moved_kernels(self._choice, run.moved, run.kept.keys()), run.now)


def first_waiting(flow: Dataflow, order: Sequence[int], kernels: Iterable[int]) -> dict[int, int]:
    """By kernel, the position of the first one that waits for it, or of the end: at the latest it comes before that."""
    found = dict.fromkeys(kernels, len(order))
    for position in reversed(range(len(order))):
        for before in flow.kernels_before(order[position]):
            if before in found:
                found[before] = position
    return found


class _Run:
    """A step in its course, whose copies are placed as memory has room and their lanes are free.

    A copy from a home starts when it is wanted and its lane is about to be free, in the order of the first reads. One
    that the choice drops and copies again stays meanwhile, as long as no copy that is read earlier needs its room: as
    in integrated prefetching and caching (Cao et al., A study of integrated prefetching and caching strategies, 1995).
    The tensor of a copy to a home stays until that has ended, or until its room is needed.

    Args:
        latest: by commit, as of `first_waiting`.
        spare_bytes: by tier, what the choice leaves of the memory outside of the device.

    Attributes:
        now: the time of the kernels.
        moved: by position of a kernel, the position of the one that it comes before.
        kept: by position, the copies from homes that are left out, since the one before stays.
    """

    def __init__(
        self,
        flow: Dataflow,
        choice: Choice,
        steps: Sequence[Step],
        computing_s: Sequence[float],
        rates: Rates,
        latest: Mapping[int, int],
        spare_bytes: Mapping[int, int],
    ):
        self._flow, self._order, self._steps = flow, choice.order, steps
        self._computing_s, self._latest, self._spare_bytes = computing_s, latest, spare_bytes
        self._lanes = CopyLanes(flow, rates, tiers_of(choice.intervals))
        self._at = [n for n, step in enumerate(steps) if step.kind in KERNELS]
        # A kernel that is moved before another one comes before the copies at its place too.
        self._begins = [0, *(n + 1 for n in self._at)]
        self._stored: list[int] = []  # positions of commits that are still to come
        self._held_bytes, self._old_bytes = 0, Counter[int]()
        self.now = 0.0
        self.moved: dict[int, int] = {}
        self.kept: dict[int, _Load] = {}

    def within(self, live: Sequence[int], room_bytes: float, loads: Sequence[_Load]) -> None:
        """Place the copies.

        Args:
            live: by step, the live bytes without moved copies.
            room_bytes: those above their peak.
            loads: in the order of their first reads.
        """
        self._live = np.array(live, dtype=np.int64)
        self._most = max(live, default=0) + room_bytes
        waiting = deque(loads)
        dropped: dict[int, list[_Load]] = {}
        for load in loads:
            dropped.setdefault(load.dropped, []).append(load)
        for position in range(len(self._order)):
            self._commit(position)
            self._load(position, waiting)
            for step in self._steps[self._begins[position] : self._begins[position + 1]]:
                self._run(step, position)
            for load in dropped.get(position, ()):
                self._keep(load)
        for position in self._stored:
            self._end(position, len(self._order))

    def _commit(self, position: int) -> None:
        """Wait for copies to homes where they have ended, or must have before the kernel at `position`; the others keep
        their tensors.
        """
        if not self._stored:
            return
        for commit in [*self._stored]:
            if self._latest[self._order[commit]] <= position or self._ends(commit) <= self.now:
                self._end(commit, position)
        steps = slice(self._begins[position], self._begins[position + 1])
        most = int(self._live[steps].max(initial=0))
        while self._stored and most + self._held_bytes > self._most:
            self._end(self._stored[0], position)
        for tier, spare_bytes in self._spare_bytes.items():
            while self._old_bytes[tier] > spare_bytes:
                self._end(next(c for c in self._stored if self._flow.home_tiers[self._order[c]] == tier), position)
        self._live[steps] += self._held_bytes

    def _count(self, commit: int, sign: int) -> None:
        """Count the bytes that wait for a commit: those of its tensor, and of a home that it replaces."""
        flow, kernel = self._flow, self._order[commit]
        self._held_bytes += sign * round_up(flow.values[flow.stores[flow.commits[kernel]]].nbytes)
        self._old_bytes[flow.home_tiers[kernel]] -= sign * flow.home_changes.get(kernel, 0)

    def _ends(self, commit: int) -> float:
        """When the copy that a commit waits for has ended."""
        return self._lanes.store_end[self._flow.commits[self._order[commit]]]

    def _end(self, commit: int, position: int) -> None:
        self._stored.remove(commit)
        self._count(commit, -1)
        self.now = max(self.now, self._ends(commit))
        if position > commit + 1:
            self.moved[commit] = position

    def _load(self, position: int, waiting: deque[_Load]) -> None:
        """Start copies from homes before the kernel at `position`."""
        if not waiting or (waiting[0].position > position and waiting[0].wanted > position):
            return
        kernel = self._order[position]
        end_s = self._lanes.read(self._flow.reads[kernel], self.now) + self._computing_s[kernel]
        while waiting:
            load = waiting[0]
            if load.position == position and load.position not in self.kept:
                break  # it starts here, before those that are read later
            if load.position > position and load.position not in self.moved and load.position not in self.kept:
                if load.wanted > position or self._lanes.free_in(load.tier) > end_s + load.spare_s:
                    break
                stored = {self._order[commit] for commit in self._stored}
                if not stored.isdisjoint(self._flow.kernels_before(self._order[load.position])):
                    break  # its home has no value yet
                steps = slice(self._begins[position], self._at[load.position])
                if not self._make_room(steps, load):
                    break
                self._live[steps] += load.nbytes
                self.moved[load.position] = position
                self._lanes.load(self._order[load.position], self.now)
            waiting.popleft()

    def _keep(self, load: _Load) -> None:
        """Have the tensor of a load stay from its last reader until then, where memory has room."""
        kernel, value = self._order[load.dropped], self._flow.loads[self._order[load.position]]
        taken = itertools.chain(self._flow.forwards[kernel], self._flow.temp_forwards.get(kernel, {}).items())
        is_taken = any(value in candidates for _, candidates in taken)  # its buffer would not be forwarded
        steps = slice(self._at[load.dropped] + (not is_taken), self._at[load.position])
        if self._has_room(steps, load.nbytes):
            self._live[steps] += load.nbytes
            self.kept[load.position] = load

    def _has_room(self, steps: slice, nbytes: int) -> bool:
        return int(self._live[steps].max(initial=0)) + nbytes <= self._most

    def _make_room(self, steps: slice, load: _Load) -> bool:
        """Whether there is room for a load, also in place of tensors that stay and are read later."""
        if self._has_room(steps, load.nbytes):
            return True
        released: list[_Load] = []
        kept = (kept for kept in self.kept.values() if self._begins[kept.position] >= steps.start)
        later = sorted((each for each in kept if each.first > load.first), key=lambda each: each.first)
        while not (has_room := self._has_room(steps, load.nbytes)) and later:
            released.append(later.pop())
            self._live[steps.start : self._at[released[-1].position]] -= released[-1].nbytes
        for each in released:
            if has_room:
                del self.kept[each.position]
            else:
                self._live[steps.start : self._at[each.position]] += each.nbytes
        return has_room

    def _run(self, step: Step, position: int) -> None:
        """A kernel, or a copy of a swapped tensor."""
        flow, lanes = self._flow, self._lanes
        kind, subject = step
        if kind == OUT:
            lanes.start_out(subject, self.now)
        elif kind == IN:
            lanes.start_in(subject, self.now)
        elif kind in (RELEASE, AWAIT):
            self.now = max(self.now, (lanes.out_end if kind == RELEASE else lanes.in_end)[subject])
        elif subject in flow.commits:
            self._stored.append(position)
            self._count(position, 1)
        elif subject in flow.stores:
            lanes.store(subject, self.now)
        elif subject not in flow.loads:
            self.now = lanes.read(flow.reads[subject], self.now) + self._computing_s[subject]
        elif position not in self.moved and position not in self.kept:
            lanes.load(subject, self.now)


class Reads:
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

    def dropped(self, position: int) -> int:
        """The last kernel that reads what the load at `position` has filled before; -1 where it runs first there."""
        kernel = self._order[position]
        reads = [p for p in self._positions.get(self._flow.loads[kernel], ()) if p < position]
        return reads[-1] if reads and self.loaded[kernel][0] < position else -1

    def earliest(self, position: int) -> int:
        """The earliest position before which the load at `position` can start: after all that it waits for, and after
        the kernels that read what it filled before.
        """
        kernel = self._order[position]
        before = [self._ran[k] for k in self._flow.kernels_before(kernel) if k in self._ran]
        before += [p for p in self._positions.get(self._flow.loads[kernel], ()) if p < position]
        before += [p for p in self.loaded[kernel] if p < position]
        return max(before, default=-1) + 1


def moved_kernels(choice: Choice, to: Mapping[int, int], left_out: Collection[int] = frozenset()) -> Choice:
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
