"""Evicts, by swapping or recomputing, the values that cost least for the memory and the time that they free.

The solver goes forward through the order of the step. When memory is short, it evicts a value that is not needed now:
the one with the lowest cost per byte and second of eviction. The value returns by a copy, or by recomputing it. When a
kernel needs a value that was dropped, its kernels run again just before, from the values that are present. Intermediate
results stay if they are needed again and there is room. This is Dynamic Tensor Rematerialization (Kirisame et al., ICLR
2021) with two differences: the next uses are known, so Belady's distance replaces staleness; and a copy is an
alternative. Checkpoints every sqrt(n) layers (Chen et al. 2016), and SuperNeurons' choice per segment between keeping
and recomputing (section 3.4), follow from the costs: each dropped value makes its neighbours dearer, and recomputed
values are evicted when memory is short.

Where host memory is limited, values that do not fit there are not swapped, and may be recomputed.

An input of a kernel that is needed later may be evicted for that very kernel, if the kernel writes its result into the
buffer of an input without other holders. So a step reaches the working set of its largest kernel.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from tfswap.planner.live_target import LiveTarget
from tfswap.planner.problem import MAX_CHAIN, NEVER, Choice, Gap, Problem, Uses, Wait
from tfswap.planner.solvers.belady import place_copies, trim

MAX_RERUN_SHARE = 3.0
"""The target counts as unreachable when recomputing takes more than this many times the step's own time."""

MAX_SWEEPS = 6
"""A sweep that has no memory to recompute a value that it dropped is followed by one that does not drop it."""


@dataclass(frozen=True)
class Prices:
    """The costs of swaps and of recomputing, as a solver weighs them.

    Attributes:
        copy: the share of a copy's seconds that counts as cost. Copies overlap kernels, so it is below 1, and lower
            where lanes are idle. The planner tries several, and the simulation decides.
        distance: exponent of the time of eviction by which a cost is divided.
        draw: number of a random draw of factors on all costs; 0 for none. The first evictions decide which later ones
            are cheap, and no price foresees that. Where there is time, several draws find choices that one order of
            prices misses (greedy randomised search, Feo and Resende 1995).
    """

    copy: float
    distance: float = 0.5
    draw: int = 0


class _Offer(NamedTuple):
    """A value at one of its uses, after which it may be evicted.

    Attributes:
        wait: until its next use; None after its last.
        copy_s: cost of a copy out and back.
        score: cost of the eviction, while no value that it is computed from has been dropped.
    """

    value: int
    slot: int
    wait: Wait | None
    copy_s: float
    score: float


def solver(prices: Prices):
    """A solver that works with these prices."""
    offers_of: WeakKeyDictionary[Uses, dict[int, list[_Offer]]] = WeakKeyDictionary()

    def solve(problem: Problem, target: LiveTarget) -> Choice | None:
        undroppable: set[tuple[int, int]] = set()
        if problem.uses not in offers_of:
            offers_of[problem.uses] = _offers(problem, prices)
        for _ in range(MAX_SWEEPS):
            sweep = _Sweep(problem, target, prices, offers_of[problem.uses], undroppable)
            choice = sweep.choice()
            if choice is not None or not sweep.stuck:
                return choice
            undroppable |= sweep.stuck
        return None

    return solve


def _offers(problem: Problem, prices: Prices) -> dict[int, list[_Offer]]:
    """By position, the values that are used there. They are the same for every target."""
    uses = problem.uses
    copy_s = sum(prices.copy / rate for rate in problem.tiers.nearest_rates(problem.rates))

    def offer(v: int, position: int) -> _Offer:
        wait, slot = uses.after.get((v, position)), uses.slot[v]
        if wait is None:
            return _Offer(v, slot, None, NEVER, NEVER)
        cost_s = _copy_s(problem, v, copy_s)
        score = _score(uses, wait, uses.starts[position], min(wait.rerun_s, cost_s), prices)
        return _Offer(v, slot, wait, cost_s, score)

    return {
        position: [offer(v, position) for v in (*reads, *uses.watched_makes[position])]
        for position, reads in uses.watched_reads.items()
    }


def _copy_s(problem: Problem, v: int, byte_s: float) -> float:
    """Cost of copying a value, at `byte_s` seconds per byte."""
    return problem.uses.nbytes[v] * byte_s if problem.may_swap(v) else NEVER


def _score(uses: Uses, wait: Wait, start_s: float, cost_s: float, prices: Prices) -> float:
    """Cost per byte and (root of) second of an eviction that begins at `start_s`."""
    factor = uses.factors(prices.draw).get((wait.value, wait.end), 1.0) if prices.draw else 1.0
    absent_s = max(wait.end_s - start_s, 1e-9)
    return (cost_s + 1e-12) * factor / (uses.nbytes[wait.value] * absent_s**prices.distance)


@dataclass
class _Course:
    """What a sweep has decided.

    Attributes:
        reruns: recomputed kernels, each with the position in the problem's order that it comes before.
        needs: bytes that each of them allocates.
        changes: (position, change from there on) of the live bytes of the problem's order.
        swapped: the gaps in which values are in host memory.
    """

    reruns: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    needs: list[int] = field(default_factory=list[int])
    changes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    swapped: list[Gap] = field(default_factory=list[Gap])

    def choice(self, problem: Problem, target: LiveTarget) -> Choice:
        extended = problem.extended(self.reruns, self.live(problem)) if self.reruns else problem
        chosen = self.until_read(problem, extended.order) if self.reruns else trim(extended, self.swapped, target)
        return Choice(extended.order, place_copies(extended, chosen, target))

    def until_read(self, problem: Problem, order: Sequence[int]) -> list[Gap]:
        """The gaps of `swapped`, each up to the first read: recomputed kernels may run between its return and that."""
        flow = problem.flow
        gaps: list[Gap] = []
        for gap in self.swapped:
            producer, end = flow.values[gap.value].producer, gap.end
            while gap.value not in flow.reads[order[end]] and order[end] != producer:
                end += 1
            if order[end] != producer:  # else it was recomputed before anything read the returned copy
                gaps.append(gap._replace(end=end))
        return gaps

    def live(self, problem: Problem) -> np.ndarray:
        """Live bytes per position of the new order, with swapped values counted as present."""
        uses = problem.uses
        order_length = len(problem.order) + len(self.reruns)
        live = np.empty(order_length + 1, dtype=np.int64)
        first = np.array([p for p, _ in self.reruns], dtype=np.int64)
        again = first + np.arange(len(first))
        kept = np.ones(order_length, dtype=bool)
        kept[again] = False
        live[:-1][kept] = problem.live_bytes
        live[again] = problem.before_bytes[first] + np.array(self.needs, dtype=np.int64)
        change = np.zeros(order_length + 1, dtype=np.int64)
        for position, nbytes in self.changes:
            change[position] += nbytes
        for gap in self.swapped:
            nbytes = uses.nbytes[gap.value]
            change[gap.start + 1] -= nbytes
            change[gap.end] += nbytes
        return (live - np.cumsum(change))[:-1]


def _distinct(uses: Uses, groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The groups without values that can't be evicted, and without those of an earlier group."""
    found: list[tuple[int, ...]] = []
    for group in groups:
        found.append(tuple(v for v in group if v in uses.slot and not any(v in other for other in found)))
    return found


class _Sweep:
    """One pass through the order, under one target.

    Positions in the new order include recomputed kernels: `self.at` is that of the next kernel.

    Attributes:
        undroppable: waits, as (value, position of the use that ends it), over which a value is not dropped.
        stuck: waits over which this sweep dropped a value and then had no room to recompute it.
    """

    def __init__(
        self,
        problem: Problem,
        target: LiveTarget,
        prices: Prices,
        offers: Mapping[int, Sequence[_Offer]],
        undroppable: set[tuple[int, int]],
    ):
        self.problem = problem
        self.target = target
        self.prices = prices
        self.offers = offers
        self.undroppable = undroppable
        self.stuck: set[tuple[int, int]] = set()
        self.uses = uses = problem.uses
        self.moved = 0  # evicted bytes that the problem's live bytes include, less bytes that are present in addition
        self.gone = bytearray(len(uses.nbytes))  # dropped, to be recomputed
        self.away = bytearray(len(uses.nbytes))  # in host memory
        self.away_bytes = 0  # evicted, and not dropped
        self.copied: set[tuple[int, int]] = set()  # buffers of which the host has a copy
        self.extra: set[int] = set()  # present although nothing later in the problem's order reads them
        self.pins: dict[int, int] = {}
        self.takeovers: list[
            tuple[int, ...]
        ] = []  # groups of pinned values, of which the next kernel can take one over
        self.course = course = _Course()
        self.reruns, self.needs, self.changes, self.swapped = (
            course.reruns,
            course.needs,
            course.changes,
            course.swapped,
        )
        self.made = [-1] * len(uses.nbytes)
        self.last_use = [-1] * len(uses.nbytes)
        self.rerun_s = 0.0
        self.limit_s = MAX_RERUN_SHARE * float(problem.starts_s[-1])
        self.position = 0
        slots = len(uses.candidates)
        self.copy_cost = [NEVER] * slots
        self.waiting: list[Wait | None] = [None] * slots
        self.leaving: list[tuple[float, int, int]] = []  # a heap of (score, entry, slot) of values that may be evicted
        self.entry = [0] * slots  # the valid one; 0 for none
        self.entries = 0
        self.in_s, self.out_s = (prices.copy / rate for rate in problem.tiers.nearest_rates(problem.rates))

    def choice(self) -> Choice | None:
        return self.course.choice(self.problem, self.target) if self._run() else None

    def _run(self) -> bool:
        uses, made, gone, away = self.uses, self.made, self.gone, self.away
        for begin, position, most in uses.stretches:
            if self.target.is_exceeded_by(most - self.moved):
                for self.position in range(begin, position):
                    if not self._make_room(uses.live[self.position]):
                        return False
            self.position = position
            if position == len(uses.live):
                return True
            reads, makes = uses.watched_reads[position], uses.watched_makes[position]
            missing = [v for v in reads if gone[v] or away[v]]
            if missing or self.target.is_exceeded_by(uses.live[position] - self.moved):
                self.pins = dict.fromkeys(reads, 1)
                if not all(self._bring(v) for v in missing):
                    return False
                self.takeovers = _distinct(uses, uses.takeovers(position))
                for v in chain.from_iterable(self.takeovers):
                    self._offer(uses.after[v, position])
                if not self._make_room(uses.live[position]):
                    return False
                self.pins, self.takeovers = {}, []
            at = self.at
            for v in makes:
                made[v] = at
            for v, slot, wait, copy_s, score in self.offers[position]:
                if gone[v] or away[v]:
                    continue  # its buffer was reused
                self.last_use[v] = at
                if wait is None:
                    self.waiting[slot] = None
                    self.entry[slot] = 0
                elif (v, made[v]) in self.copied:
                    self._offer(wait)
                else:
                    self.waiting[slot] = wait
                    self.copy_cost[slot] = copy_s
                    self._enter(slot, score)
        return True

    @property
    def at(self) -> int:
        return self.position + len(self.reruns)

    def _move(self, nbytes: int, position: int) -> None:
        self.moved += nbytes
        self.changes.append((position, nbytes))

    def _offer(self, wait: Wait) -> None:
        """A value is present, and may be evicted until its next use."""
        slot, v = wait.slot, wait.value
        copied = (v, self.made[v]) in self.copied
        self.waiting[slot] = wait
        self.copy_cost[slot] = _copy_s(self.problem, v, self.in_s if copied else self.in_s + self.out_s)
        self._reenter(wait)

    def _rerun_cost(self, wait: Wait) -> float:
        """Seconds to recompute a value now: its own chain, and those of the dropped values that it needs."""
        if (wait.value, wait.end) in self.undroppable:
            return NEVER
        cost = wait.rerun_s
        seen = {wait.value}
        pending = [wait]
        while pending:
            for v in pending.pop().sources:
                if self.gone[v] and v not in seen:
                    seen.add(v)
                    below = self.waiting[self.uses.slot[v]]
                    assert below is not None, "a dropped value will be needed"
                    cost += below.rerun_s
                    pending.append(below)
            if cost >= self._copy_cost(wait) or len(seen) > MAX_CHAIN:
                return NEVER
        return cost

    def _copy_cost(self, wait: Wait) -> float:
        """Cost of a copy now; NEVER where host memory has no room for it."""
        nbytes = self.away_bytes + self.uses.nbytes[wait.value]
        return self.copy_cost[wait.slot] * self.problem.tiers.distance(self.problem.rates, nbytes)

    def _reenter(self, wait: Wait) -> None:
        """It may be evicted. Its score is exact if no value that it is computed from was dropped, and otherwise too
        low."""
        self._enter(wait.slot, self._score(wait, min(wait.rerun_s, self.copy_cost[wait.slot])))

    def _enter(self, slot: int, score: float) -> None:
        self.entries += 1
        self.entry[slot] = self.entries
        heapq.heappush(self.leaving, (score, self.entries, slot))

    def _score(self, wait: Wait, cost_s: float) -> float:
        """The score of a value that is evicted now."""
        return _score(self.uses, wait, self.uses.starts[self.position], cost_s, self.prices)

    def _make_room(self, live_bytes: int) -> bool:
        """Evict values until `live_bytes`, counted without evictions, meets the target.

        Scores in the heap are those of the time of entry. They only rise, as uses come near and sources are dropped. So
        the first value whose score is unchanged has the lowest.
        """
        pinned: list[tuple[float, int, int]] = []
        while (short := self.target.is_exceeded_by(live_bytes - self.moved)) and self.leaving:
            score, entry, slot = heapq.heappop(self.leaving)
            if self.entry[slot] != entry:
                continue
            wait = self.waiting[slot]
            assert wait is not None, "a value that may be evicted has a next use"
            if wait.value in self.pins and not any(wait.value in group for group in self.takeovers):
                pinned.append((score, entry, slot))
                continue
            rerun_s, copy_s = self._rerun_cost(wait), self._copy_cost(wait)
            score = self._score(wait, min(rerun_s, copy_s))
            if self.leaving and score > self.leaving[0][0]:
                if score < NEVER:
                    heapq.heappush(self.leaving, (score, entry, slot))
            elif score < NEVER:
                self._evict(wait, rerun_s < copy_s)
        for item in pinned:
            heapq.heappush(self.leaving, item)
        return not short

    def _evict(self, wait: Wait, drop: bool) -> None:
        v = wait.value
        self.entry[wait.slot] = 0
        if v in self.pins:
            self.takeovers = [group for group in self.takeovers if v not in group]
            self.last_use[v] = self.at - 1
        self._move(self.uses.nbytes[v], self.last_use[v] + 1)
        if drop:
            self.gone[v] = True
        else:
            self.away[v] = True
            self.away_bytes += self.uses.nbytes[v]

    def _bring(self, wanted: int) -> bool:
        """Make `wanted` present: copy it back, or recompute it."""
        uses = self.uses
        before = uses.before[self.position]
        entered: set[int] = set()
        stack = [wanted]
        while stack:
            v = stack[-1]
            if self._is_there(v):
                stack.pop()
            elif self.away[v]:
                if not self._make_room(before + uses.nbytes[v]):
                    self._note_stuck(stack)
                    return False
                self._return(v)
                stack.pop()
            else:
                kernel = self.problem.flow.values[v].producer
                reads = uses.reads[kernel]
                if v not in entered:
                    entered.add(v)
                    for u in reads:
                        self.pins[u] = self.pins.get(u, 0) + 1
                missing = [u for u in reads if not self._is_there(u)]
                if missing:
                    stack += missing
                    continue
                needs = self._needs(kernel)
                if not self._make_room(before + needs):
                    self._note_stuck(stack)
                    return False
                self._rerun(kernel, needs)
                entered.discard(v)
                stack.pop()
                if self.rerun_s > self.limit_s:
                    return False
        return True

    def _note_stuck(self, wanted: list[int]) -> None:
        """Note the first of `wanted` that was dropped. Values that it is computed from may be possible for other
        uses."""
        waits = (self.waiting[self.uses.slot[v]] for v in wanted if self.gone[v])
        wait = next(filter(None, waits), None)
        self.stuck = set() if wait is None else {(wait.value, wait.end)}

    def _is_there(self, v: int) -> bool:
        if self.gone[v] or self.away[v]:
            return False
        return v in self.extra or not self.uses.is_dead(v, self.position)

    def _return(self, v: int) -> None:
        """A copy comes back."""
        self.away[v] = False
        self.away_bytes -= self.uses.nbytes[v]
        self.copied.add((v, self.made[v]))
        self._move(-self.uses.nbytes[v], self.at)
        self.swapped.append(Gap(v, self.problem.flow.values[v].nbytes, self.made[v], self.last_use[v], self.at))
        self._again(v)

    def _needs(self, kernel: int) -> int:
        """The most bytes that a kernel allocates if it runs again now. Notes the buffers that it may reuse."""
        uses = self.uses
        needs, groups = uses.needs[kernel], list[tuple[int, ...]]()
        for group in uses.takeable[kernel]:
            own = [v for v in group if self.pins[v] == 1]  # of which no other use is pending
            dying = next((v for v in own if v in self.extra), None)
            if dying is None:
                groups.append(tuple(v for v in own if not uses.is_dead(v, self.position)))
            else:
                needs -= uses.nbytes[dying]
        self.takeovers = _distinct(uses, groups)
        return needs

    def _rerun(self, kernel: int, needs: int) -> None:
        uses, at = self.uses, self.at
        self.reruns.append((self.position, kernel))
        self.needs.append(needs)
        self.takeovers = []
        self.rerun_s += self.problem.rerun_s(kernel)
        for v in uses.reads[kernel]:
            if not (self.gone[v] or self.away[v]):
                self.last_use[v] = at
            self.pins[v] -= 1
            if not self.pins[v]:
                del self.pins[v]
                if v in self.extra:
                    self.extra.discard(v)
                    self._move(uses.nbytes[v], at + 1)
        for v in uses.makes[kernel]:
            self.made[v] = self.last_use[v] = at
            if self.gone[v] or self.away[v]:
                if self.gone[v]:
                    for wait in uses.dependents.get(v, ()):
                        if self.waiting[wait.slot] is wait and not (self.gone[wait.value] or self.away[wait.value]):
                            self._reenter(wait)
                self.away_bytes -= uses.nbytes[v] if self.away[v] else 0
                self.gone[v] = self.away[v] = False
                self._move(-uses.nbytes[v], at + 1)
                self._again(v)
            elif v in self.pins and uses.is_dead(v, self.position):
                self.extra.add(v)
                self._move(-uses.nbytes[v], at + 1)

    def _again(self, v: int) -> None:
        """`v` is present before its next use, and may be evicted again."""
        wait = self.waiting[self.uses.slot[v]]
        assert wait is not None, "a value without a next use does not return"
        self._offer(wait)
