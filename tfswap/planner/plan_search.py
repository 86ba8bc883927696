"""Searches for a faster plan near one whose kernels wait for copies: a local search over where its copies are.

Solvers place copies by a model of what is live, before it is known when the copies of variables at home run. Here they
are moved together: one copy at a time, chosen at random, starts earlier or later, or is left out with the kernels that
run again. What is no slower, and fits within the limit, is kept. It is replayed in the arena for that: plans of the
same live bytes leave other holes in it, so that one with fewer of them may not fit where one with more does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from tfswap.analysis.draws import Draws
from tfswap.plan.schedule import build_schedule
from tfswap.planner.candidates import Candidate, Judged
from tfswap.planner.home_copies import Reads, first_waiting, moved_kernels
from tfswap.planner.problem import Choice
from tfswap.planner.validate import buffer_uses
from tfswap.simulator.timing import Timing

if TYPE_CHECKING:
    from tfswap.planner.planner import Planner

LEAST_STALL = 0.005
"""The least share of a step's time that kernels wait for copies, or run again, for a search."""
ROUNDS, VAIN_ROUNDS = 20, 3
"""The most rounds, and how many in a row may find nothing. Each goes on from the fastest choice of those before."""
TRIES, FEWEST_TRIES = 500, 50
STEPS_VISITED = 250_000
"""About how many steps of schedules the tries of a round visit in total, which bounds their number. With fewer than
FEWEST_TRIES there is no search.
"""
DISTANCES = (1, 1, 2, 3, 5, 8, 13, 21, 34)
"""By how many kernels copies are moved."""
GAIN = 1e-9
"""The least share of a step's time that counts as a gain."""


class NearPlans:
    """What searches near a planner's candidates find.

    Attributes:
        found: for all candidates so far.
    """

    def __init__(self, planner: Planner) -> None:
        self.found: list[Candidate] = []
        self._planner = planner
        self._improved: dict[tuple[object, ...], Candidate] = {}  # by the choice and the limit

    def improved(self, candidate: Candidate, limit_bytes: int) -> Candidate:
        """`candidate`, or a faster one near it within the limit."""
        choice = candidate.choice
        if choice.paired or not (is_worthwhile(candidate.timing) and _tries(choice)):
            return candidate
        key = (tuple(choice.order), tuple(choice.intervals), choice.splits, choice.exact_chunks, limit_bytes)
        if key not in self._improved:
            self._improved[key] = best = self._searched(candidate, limit_bytes)
            self.found += [best] if best is not candidate else []
        return self._improved[key]

    def _searched(self, best: Candidate, limit_bytes: int) -> Candidate:
        vain = 0
        for number in range(ROUNDS):
            faster = faster_choices(self._planner, best.choice, limit_bytes, number)
            found = Judged(self._planner, faster[-1], 0.0).fitting(limit_bytes) if faster else None
            if found is not None and found.timing.total_s < best.timing.total_s:
                best, vain = found, 0
            elif (vain := vain + 1) == VAIN_ROUNDS:
                break
        return best


def is_worthwhile(timing: Timing) -> bool:
    """Whether a plan may gain by a search."""
    return timing.stall_s + timing.rerun_s > LEAST_STALL * timing.total_s


def faster_choices(planner: Planner, choice: Choice, limit_bytes: int, number: int = 0) -> list[Choice]:
    """Choices near `choice` that fit within a limit, from slow to fast. Each is faster than those before.

    Args:
        choice: one of the planner's that fits, without concurrent kernels. Its splits are left out.
        number: of the round, which decides the draws.
    """
    tries = _tries(choice)
    search = _PlanSearch(planner, choice._replace(splits=()), limit_bytes, Draws(number + 1))
    return list(search.run(tries)) if tries else []


def _tries(choice: Choice) -> int:
    """The number of tries of a round; 0 for a step that is too large."""
    tries = min(TRIES, STEPS_VISITED // max(1, len(build_schedule(*choice))))
    return tries if tries >= FEWEST_TRIES else 0


class _Window(NamedTuple):
    """Where a kernel that copies a variable may be: before the kernel at one of the positions `first` to `last`."""

    position: int
    first: int
    last: int


class _PlanSearch:
    """The search near one choice.

    Attributes:
        choice: the best so far.
    """

    def __init__(self, planner: Planner, choice: Choice, limit_bytes: int, draws: Draws) -> None:
        self._planner, self._flow, self._limit_bytes, self._draws = planner, planner.flow, limit_bytes, draws
        self.choice, self._seconds = choice, planner.timing(choice).total_s
        self._survey()

    def run(self, tries: int) -> Iterator[Choice]:
        """Yield each choice that is faster than all before."""
        for _ in range(tries):
            tried = self._neighbour()
            if tried is None:
                continue
            seconds = self._planner.timing(tried).total_s
            if seconds > self._seconds or not self._fits(tried):
                continue
            is_faster = seconds < self._seconds * (1 - GAIN)
            self.choice, self._seconds = tried, seconds
            self._survey()
            if is_faster:
                yield tried

    def _survey(self) -> None:
        """Find what can be moved or left out."""
        flow, order = self._flow, self.choice.order
        reads, latest = Reads(flow, order), first_waiting(flow, order, [*flow.loads, *flow.commits])
        ran: dict[int, int] = {}
        self._windows: list[_Window] = []
        self._repeats: list[int] = []
        evicted = {each.value for each in self.choice.intervals}
        for position, kernel in enumerate(order):
            if kernel in flow.loads:
                last = reads.first_after(position)
                if kernel not in ran:  # kernels may wait for the first copy that read nothing of it
                    last = min(last, latest[kernel])
                if flow.loads[kernel] in evicted:  # its copy out may start right after it
                    last = position
                self._windows.append(_Window(position, reads.earliest(position), last))
            elif kernel in flow.commits:
                after = max((ran[k] for k in flow.kernels_before(kernel) if k in ran), default=-1) + 1
                self._windows.append(_Window(position, after, latest[kernel]))
            if kernel in ran and evicted.isdisjoint(v for _, v in flow.makes[kernel]):
                self._repeats.append(position)
            ran.setdefault(kernel, position)
        self._uses = buffer_uses(flow, order, evicted)

    def _neighbour(self) -> Choice | None:
        """A choice that differs by one copy or kernel; None where the one that was drawn can't be moved so."""
        windows, intervals, repeats = self._windows, self.choice.intervals, self._repeats
        count = len(windows) + 3 * len(intervals) + len(repeats)
        if not count:
            return None
        drawn = self._draws.below(count)
        if drawn < len(windows):
            return self._with_kernel_moved(windows[drawn])
        drawn -= len(windows)
        if drawn < len(repeats):
            return moved_kernels(self.choice, {}, {repeats[drawn]})
        number, part = divmod(drawn - len(repeats), 3)
        return (self._with_release_moved, self._with_return_moved, self._without_eviction)[part](number)

    def _distance(self) -> int:
        drawn = self._draws.below(2 * len(DISTANCES))
        return DISTANCES[drawn // 2] * (1 if drawn % 2 else -1)

    def _with_kernel_moved(self, window: _Window) -> Choice | None:
        # Before the next kernel is where it is: one further is the first other place.
        to = window.position + (distance if (distance := self._distance()) < 0 else distance + 1)
        to = min(max(to, window.first), window.last)
        if to in (window.position, window.position + 1):
            return None
        return moved_kernels(self.choice, {window.position: to})

    def _with_return_moved(self, number: int) -> Choice | None:
        """With a swapped tensor's copy back moved."""
        each = self.choice.intervals[number]
        back = min(max(each.back + self._distance(), each.release), each.use)
        return None if back == each.back else self._with(number, back=back)

    def _with_release_moved(self, number: int) -> Choice | None:
        """With the wait for a swapped tensor's copy out moved."""
        each = self.choice.intervals[number]
        if each.out is None:
            return None
        read = max(p for buffer in self._uses[each.value] for p in buffer if p < each.back)
        first = min(each.release, max(each.out, read) + 1)
        release = min(max(each.release + self._distance(), first), each.back)
        return None if release == each.release else self._with(number, release=release)

    def _without_eviction(self, number: int) -> Choice | None:
        value = self.choice.intervals[number].value
        if sum(each.value == value for each in self.choice.intervals) > 1:
            return None  # one of them has the copy out of all
        rest = [each for each in self.choice.intervals if each.value != value]
        return self.choice._replace(intervals=rest)

    def _with(self, number: int, **changed: int) -> Choice:
        intervals = [*self.choice.intervals]
        intervals[number] = intervals[number]._replace(**changed)
        return self.choice._replace(intervals=intervals)

    def _fits(self, choice: Choice) -> bool:
        judged = Judged(self._planner, choice, 0.0)
        found = judged.first_fitting(self._limit_bytes) if judged.may_fit(self._limit_bytes) else None
        return found is not None and self._planner.tiers.fit(found.memory)
