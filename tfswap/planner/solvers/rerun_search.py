"""Searches for cheaper choices of what is recomputed or swapped: takes some of a choice out, and repairs it.

A choice is a set of reruns and of returns by a copy, each before a position of the step's order (rerun_layout.py).
Every tensor is held from what makes it to the last kernel that reads it before it is made the next time. So a rerun
holds what it reads for longer, or needs more of them: by what is cheaper. cheapest_eviction.py goes through the order
once, and has freed by then what no later kernel reads.

Repair: at the position with the most live bytes, the rerun or return with the least time for the bytes that it takes
off the excess of all positions, as long as there is any. What repair made needless is taken out. Then some are removed
at random and the choice is repaired again; it stays where it is no slower. This is large neighbourhood search (Shaw,
"Using constraint programming and local search methods to solve vehicle routing problems", 1998), with a deterministic
draw.

The core library has the same search (csrc/core/rerun_search.h), with the same results to the bit in a small part of the
time: what is compared is whole numbers, or one product and one quotient of these. Tests compare the two.

Not handled: where a kernel's buffer is forwarded in the step's own order, but not in the choice's, the bytes counted
here are too few, and so they are while a copy runs; the result is therefore simulated, and dropped where it exceeds the
target.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from heapq import merge
from statistics import NormalDist
from weakref import WeakKeyDictionary

import numpy as np

from tfswap.analysis.draws import Draws
from tfswap.plan.schedule import build_schedule
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.problem import NEVER, Choice, Gap, Problem, Solver, Uses
from tfswap.planner.solvers import native_reruns
from tfswap.planner.solvers.belady import place_copies, trim
from tfswap.planner.solvers.rerun_layout import Facts, Layout, facts_of, values_of
from tfswap.simulator.memory import simulate_memory

SHORT_VISITS, VISITS, LONG_VISITS = 4_000, 50_000, 1_000_000
"""Of kernels, for one target: by default where swaps are allowed, where they are not, and where only the search runs.
With the first, the Python form takes some 20 ms for a target of a step of 40 kernels.
"""
LEAST_TRIES, MOST_TRIES = 4, 400
"""Of repairs."""
MOST_CHAIN = 24
"""The most kernels that are rerun for one tensor."""
NOISE = 0.8
"""The spread of the random factors on costs, as a standard deviation of their logarithm."""
WORSE = 0.1
"""The share by which a choice that the search goes on with may be slower at first; none in the end."""
LEAST_REMOVED, REMOVED_SHARE = 8, 7
"""The most that are removed at random: the first number, or one in the second, whichever is more."""
CHANGE_SHARE = 8
"""A change of the layout counts as a visit of the kernels divided by this."""

FACTORS = tuple(round(math.exp(NOISE * NormalDist().inv_cdf((n + 0.5) / 256)), 6) for n in range(256))
"""Equally likely factors on costs."""


def solver(first: Solver, visits: int = VISITS, copy_price: float = NEVER) -> Solver:
    """A solver that begins with another's choice, and with none.

    Args:
        visits: about how many kernels the search for one target visits: it bounds the time.
        copy_price: the share of a copy's seconds that counts, as in cheapest_eviction.py; infinite for no swaps.
    """
    facts_by_uses: WeakKeyDictionary[Uses, Facts] = WeakKeyDictionary()

    def solve(problem: Problem, target: LiveTarget) -> Choice | None:
        most_bytes = target.alone()
        found = first(problem, LiveTarget(most_bytes))
        if problem.uses not in facts_by_uses:
            swaps = problem.tiers.room_bytes == math.inf  # the search does not count what is in host memory together
            facts_by_uses[problem.uses] = facts_of(problem, copy_price if swaps else NEVER)
        facts = facts_by_uses[problem.uses]
        if most_bytes < facts.least_bytes:
            return found
        keys = searched(facts, most_bytes, visits, [_keys_of(problem, facts, found), []] if found else [[]])
        choice = None if keys is None else _choice_of(problem, facts, keys, LiveTarget(most_bytes))
        return found if choice is None or problem.live_peak_of(choice) > most_bytes else choice

    return solve


def searched(facts: Facts, most_bytes: int, visits: int, begins: Sequence[Sequence[int]]) -> list[int] | None:
    """As `RerunSearch.run`, in C++ where that is available."""
    if not native_reruns.is_available():
        return RerunSearch(facts, most_bytes, visits).run(begins)
    constants = (LEAST_TRIES, MOST_TRIES, MOST_CHAIN, LEAST_REMOVED, REMOVED_SHARE, CHANGE_SHARE)
    return native_reruns.search(facts, most_bytes, visits, begins, constants=constants, worse=WORSE, factors=FACTORS)


def _keys_of(problem: Problem, facts: Facts, choice: Choice) -> list[int]:
    """The reruns and returns of a choice."""
    values = values_of(problem)
    place = {kernel: position for position, kernel in enumerate(problem.order)}
    keys: set[int] = set()
    positions: list[int] = []
    position = 0
    for kernel in choice.order:
        positions.append(position)
        if position < facts.count and kernel == problem.order[position]:
            position += 1
        else:
            keys.add(position * facts.width + facts.copies + place[kernel])
    for move in choice.intervals:
        number = bisect_left(values, move.value)
        if number < len(values) and values[number] == move.value and facts.until[number] >= 0:
            keys.add(positions[move.use] * facts.width + number)
    return sorted(keys)


def _choice_of(problem: Problem, facts: Facts, keys: Sequence[int], target: LiveTarget) -> Choice:
    """The choice with these reruns and returns."""
    uses, width, values = problem.uses, facts.width, values_of(problem)
    order: list[int] = []
    reruns: list[tuple[int, int]] = []
    gaps: list[Gap] = []
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    away: set[int] = set()  # values that return with the next kernel that reads them
    for position, number in (divmod(key, width) for key in merge(range(width - 1, facts.count * width, width), keys)):
        if number < facts.copies:
            away.add(values[number])
            continue
        kernel = problem.order[position if number == width - 1 else number - facts.copies]
        now = len(order)
        order.append(kernel)
        if number < width - 1:
            reruns.append((position, kernel))
        for v in uses.reads[kernel]:
            if v in away and now - last[v] > 1:
                gaps.append(Gap(v, problem.flow.values[v].nbytes, made[v], last[v], now))
            away.discard(v)
            last[v] = now
        for v in uses.makes[kernel]:
            away.discard(v)
            made[v] = last[v] = now
    if not gaps:
        return Choice(order, [])
    memory = simulate_memory(problem.flow, build_schedule(order, ()), live=True)
    live_bytes = np.array(memory.during_bytes, dtype=np.int64) + problem.there_bytes
    extended = problem.extended(reruns, live_bytes)
    gaps.sort(key=lambda gap: (gap.start, gap.end, gap.value))
    return Choice(order, place_copies(extended, trim(extended, gaps, target), target))


class RerunSearch:
    """The search for one target.

    Args:
        visits: about how many kernels it visits: it bounds the time.
    """

    def __init__(self, facts: Facts, most_bytes: int, visits: int):
        self._facts, self._most, self._visits, self._all_visits = facts, most_bytes, visits, visits
        self._layout, self._draws = Layout(facts), Draws()
        stays, until = facts.stays, facts.until
        self._leaves = [
            v for v in range(facts.copies) if not stays[v] and (until[v] >= 0 or until[facts.makers[v]] >= 0)
        ]

    def run(self, begins: Sequence[Sequence[int]]) -> list[int] | None:
        """The keys of the cheapest choice found; None where none meets the target.

        Args:
            begins: choices to begin with. A good choice of one pass may be far from a better one.
        """
        best: tuple[int, list[int]] | None = None
        nearest: tuple[int, list[int]] | None = None  # of those that do not meet it
        for begin in begins:
            self._become(begin)
            if not self._repair(False):
                nearest = self._nearer(nearest)
            elif best is None or self._layout.ticks < best[0]:
                best = self._now()
        current = best
        for tries in range(1, MOST_TRIES):
            if (tries >= LEAST_TRIES and self._visits <= 0) or (best is not None and not best[1]):
                break
            before = current or (nearest if self._draws.below(2) else None)
            self._become(self._without_some(before[1]) if before and before[1] else [])
            if not self._repair(True):
                nearest = self._nearer(nearest)
                continue
            ticks = self._layout.ticks
            worse = WORSE * (max(0, self._visits) / self._all_visits)
            if current is None or ticks <= current[0] * (1 + worse):
                current = self._now()
            if best is None or ticks < best[0]:
                best = self._now()
        return None if best is None else best[1]

    def _nearer(self, nearest: tuple[int, list[int]] | None) -> tuple[int, list[int]]:
        """Of this choice, which exceeds the target, and another the one with the lower excess of all positions."""
        excess = int(np.maximum(self._layout.live - self._most, 0).sum())
        return (excess, list(self._layout.added)) if nearest is None or excess < nearest[0] else nearest

    def _now(self) -> tuple[int, list[int]]:
        return self._layout.ticks, list(self._layout.added)

    def _become(self, added: Sequence[int]) -> None:
        self._visits -= len(self._layout.keys)
        self._layout.become(added)

    def _changed(self) -> None:
        self._visits -= len(self._layout.keys) // CHANGE_SHARE

    def _without_some(self, added: Sequence[int]) -> list[int]:
        """The choice without some: those near one position, or any."""
        keys, draws, width = list(added), self._draws, self._facts.width
        count = min(len(keys), 1 + draws.below(max(LEAST_REMOVED, len(keys) // REMOVED_SHARE)))
        if draws.below(2):
            middle = keys[draws.below(len(keys))] // width
            keys.sort(key=lambda key: (abs(key // width - middle), key))
        else:
            for n in range(count):
                other = n + draws.below(len(keys) - n)
                keys[n], keys[other] = keys[other], keys[n]
        return keys[count:]

    def _repair(self, noisy: bool) -> bool:
        """Add what meets the target, and remove what is not needed; False where nothing takes off any of the excess."""
        layout = self._layout
        for _ in range(4 * self._facts.count):
            if not len(layout.live) or int(layout.live.max()) <= self._most:
                self._shave()
                return True
            self._visits -= len(layout.keys)
            added = _Repair(layout, self._most, self._draws if noisy else None).best(self._leaves)
            if not added:
                return False
            for key in added:
                layout.add(key)
                self._changed()
        return False

    def _shave(self) -> None:
        """Remove what is not needed for the target, the longest first."""
        layout, ticks, width = self._layout, self._facts.ticks, self._facts.width
        for key in sorted(layout.added, key=lambda key: (-ticks[key % width], key)):
            if self._fits_without(key):
                layout.remove(key)
                self._changed()
                if int(layout.live.max()) > self._most:
                    layout.add(key)
                    self._changed()

    def _fits_without(self, key: int) -> bool:
        """Whether there is room for the buffers before a rerun to stay until those that read the rerun's."""
        layout, at = self._layout, self._layout.at(key)
        for v in layout.makes[key % self._facts.width]:
            last = layout.marks[v][layout.before(v, key)] // 2
            held = layout.live[layout.at(last) + 1 : at]
            if len(held) and int(held.max()) + self._facts.nbytes[v] > self._most:
                return False
        return True


class _Repair:
    """One more rerun or return for a layout that exceeds the target."""

    def __init__(self, layout: Layout, most_bytes: int, draws: Draws | None):
        self._layout, self._facts, self._draws = layout, layout.facts, draws
        self._most, self._room = most_bytes, most_bytes - layout.live
        self._over = np.maximum(-self._room, 0)
        self._over_sums = np.concatenate([[0], np.cumsum(self._over)])
        self._added = set(layout.added)

    def best(self, leaves: Sequence[int]) -> list[int]:
        """The keys with the least time for what they take off the excess.

        Where nothing does: those that would if what they hold were where there is no excess yet. From such a choice
        others lead on. None where there are none of these either.
        """
        width, layout = self._facts.width, self._layout
        offers = sorted(self._offers(leaves))
        best: list[int] = []
        hopeful: list[int] = []
        least = least_hoped = math.inf
        for optimistic, end, number, relief, factor in offers:
            if optimistic >= least:
                break
            position = layout.keys[end] // width
            for price in dict.fromkeys((0.0, least, math.inf)):
                numbers, ticks, harm = self._chain(number, end, position, least * relief / factor, price)
                if ticks * factor / relief >= least:
                    continue
                keys = [key for n in sorted(numbers) if (key := position * width + n) not in self._added]
                gain = self._gain(keys)
                if gain > 0 and (score := ticks * factor / gain) < least:
                    best, least = keys, score
                elif relief > harm and (score := ticks * factor / (relief - harm)) < least_hoped:
                    hopeful, least_hoped = keys, score
        return best or hopeful

    def _gain(self, keys: Sequence[int]) -> int:
        """What more reruns or returns take off the excess of all places."""
        before = self._excess()
        for key in keys:
            self._layout.add(key)
        gain = before - self._excess()
        for key in reversed(keys):
            self._layout.remove(key)
        return gain

    def _excess(self) -> int:
        return int(np.maximum(self._layout.live - self._most, 0).sum())

    def _offers(self, leaves: Sequence[int]) -> Iterator[tuple[float, int, int, int, float]]:
        """What waits at the peak: (score if that takes nothing else, place of its next reader, number of what makes it,
        relief of the excess, random factor).
        """
        layout, facts, keys = self._layout, self._facts, self._layout.keys
        peak = int(self._over.argmax())
        peak_key = keys[peak]
        for v in leaves:
            before, marks = layout.before(v, peak_key), layout.marks[v]
            if before < 0 or before + 1 == len(marks) or marks[before + 1] & 1 or marks[before + 1] == 2 * peak_key:
                continue
            last, end = layout.at(marks[before] // 2), layout.at(marks[before + 1] // 2)
            # Just before its next reader, or as soon as there is room: what it is computed from may be there still.
            over = np.flatnonzero(self._over[peak:end])
            for at in dict.fromkeys((end, peak + int(over[-1]) + 1)):
                position = keys[at] // facts.width
                relief = 0
                for number in (v, facts.makers[v]):
                    if facts.until[number] < position or position * facts.width + number in self._added:
                        continue
                    relief = relief or int(np.minimum(self._over[last + 1 : at], facts.nbytes[v]).sum())
                    factor = 1.0 if self._draws is None else FACTORS[self._draws.bits() >> 56]
                    yield (facts.ticks[number] + 1) * factor / relief, at, number, relief, factor

    def _chain(self, first: int, end: int, position: int, most: float, price: float) -> tuple[set[int], int, int]:
        """What is recomputed or copied before `end` for one rerun or return, its ticks, and the excess that the rest of
        what it reads adds, if held for that alone.

        Args:
            most: ticks from which on the chain is of no use.
            price: ticks per byte of excess, by which it is decided what is held and what is not.
        """
        facts, numbers = self._facts, {first}
        ticks, pending, seen, room = facts.ticks[first] + 1, [first], set[int](), int(self._room[end])
        harm = 0
        while pending and ticks < most:
            for u in self._layout.reads[pending.pop()]:
                if u in seen:
                    continue
                seen.add(u)
                until, number = self._held_until(u, end), self._maker(u, position)
                if until >= end:
                    continue
                held = self._harm(until + 1, end + 1, facts.nbytes[u])
                again = max(0, facts.nbytes[u] - room) - max(0, -room)
                worth = number >= 0 and again < held and (held - again) * price > facts.ticks[number]
                if worth and number not in numbers and len(numbers) < MOST_CHAIN:
                    numbers.add(number)
                    pending.append(number)
                    ticks += facts.ticks[number]
                    held = again
                harm += held
        return numbers, ticks, harm

    def _maker(self, v: int, position: int) -> int:
        """What makes another buffer of `v` before a position: its copy where that is cheaper; -1 for nothing."""
        facts, maker = self._facts, self._facts.makers[v]
        copies, reruns = facts.until[v] >= position, facts.until[maker] >= position
        if copies and not (reruns and facts.ticks[maker] < facts.ticks[v]):
            return v
        return maker if reruns else -1

    def _held_until(self, v: int, place: int) -> int:
        """The last place at which the buffer of `v` before a place is held."""
        layout = self._layout
        return layout.at(layout.last(v, layout.before(v, layout.keys[place])))

    def _harm(self, begin: int, end: int, nbytes: int) -> int:
        """The excess that is added by `nbytes` more at these places."""
        now = int(self._over_sums[end] - self._over_sums[begin])
        return int(np.maximum(nbytes - self._room[begin:end], 0).sum()) - now
