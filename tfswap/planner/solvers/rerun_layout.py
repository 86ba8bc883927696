"""What is live when, with kernels that run again and values that return by a copy.

Everything has a number: `copies` numbers, one for the return of each value by a copy, and then one for each kernel, in
the order of the step. So at one position of the order copies return first, and a rerun comes after those that it reads.
A rerun or a return before a position has the key `position * width + number`; the kernel of the order itself has the
highest key of its position.

Invariant: a layout depends on the set of its keys alone, not on the order in which these were added and removed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tfswap.analysis.flat_dataflow import Lists
from tfswap.planner.problem import NEVER, Problem

TICKS = 1 << 40
"""The step's own time. Times are whole numbers, so that sums do not depend on their order."""


@dataclass(frozen=True)
class Facts:
    """A problem's facts that do not depend on the target: those of csrc/core/rerun_search.h, field for field.

    Values and kernels have numbers of their own, those of the values that may leave or be recomputed, and of kernels by
    position.

    Attributes:
        count, copies: the numbers of kernels and of values.
        nbytes: rounded bytes per value.
        extra: per position, live bytes other than those values, while its kernel runs.
        waiting: per position, live bytes other than those values, before its kernel runs.
        makers: per value, the number of the kernel that makes it.
        stays: per value, whether it may not leave.
        reads, makes: by number, the values.
        ticks: by number, of one more run or of the copies.
        needs: by number, temporary bytes of one more run.
        until: by number, the last position before which it may run again; -1 for never.
    """

    count: int
    copies: int
    nbytes: array[int]
    extra: array[int]
    waiting: array[int]
    makers: array[int]
    stays: array[int]
    reads: Lists
    makes: Lists
    ticks: array[int]
    needs: array[int]
    until: array[int]

    @property
    def width(self) -> int:
        """The number of keys of one position."""
        return self.copies + self.count + 1

    @cached_property
    def least_bytes(self) -> int:
        """What no layout is below: the largest working set."""
        return max(
            (
                extra
                + self._bytes(self.reads, self.copies + position)
                + self._bytes(self.makes, self.copies + position)
                for position, extra in enumerate(self.extra)
            ),
            default=0,
        )

    def _bytes(self, lists: Lists, i: int) -> int:
        return sum(self.nbytes[v] for v in lists.elements[lists.begins[i] : lists.begins[i + 1]])


def values_of(problem: Problem) -> list[int]:
    """The problem's values, in the order of their numbers."""
    return sorted(problem.uses.positions)


def facts_of(problem: Problem, copy_price: float) -> Facts:
    """The facts of a problem.

    Args:
        copy_price: the share of a copy's seconds that counts; infinite where nothing is swapped.
    """
    uses, order, flow = problem.uses, problem.order, problem.flow
    values = values_of(problem)
    number = {v: n for n, v in enumerate(values)}
    nbytes = [uses.nbytes[v] for v in values]
    makes = [[number[v] for v in uses.makes[kernel]] for kernel in order]
    change = np.zeros(len(order) + 1, dtype=np.int64)
    for v, size in zip(values, nbytes, strict=True):
        positions = uses.positions[v]
        change[positions[0]] += size
        change[positions[-1] + 1] -= size
    held = np.cumsum(change[:-1])
    made = np.array([sum(nbytes[v] for v in each) for each in makes], dtype=np.int64)
    scale = TICKS / max(sum(problem.cost_s[kernel] for kernel in order), 1e-30)
    copy_s = sum(copy_price / rate for rate in problem.tiers.nearest_rates(problem.rates))
    swaps = copy_price < NEVER
    may_copy = [swaps and v in uses.slot and problem.may_swap(v) for v in values]
    place = {kernel: position for position, kernel in enumerate(order)}
    return Facts(
        len(order),
        len(values),
        array("q", nbytes),
        array("q", (problem.live_bytes - held).tolist()),
        array("q", (problem.before_bytes - held + made).tolist()),
        array("q", [len(values) + place[flow.values[v].producer] for v in values]),
        array("b", [v in problem.refusals for v in values]),
        _lists([*([()] * len(values)), *([number[v] for v in uses.reads[kernel]] for kernel in order)]),
        _lists([*([v] for v in range(len(values))), *makes]),
        array(
            "q",
            [
                *(round(size * copy_s * scale) if may else 0 for size, may in zip(nbytes, may_copy, strict=True)),
                *(round(problem.rerun_s(kernel) * scale) for kernel in order),
            ],
        ),
        array("q", [*([0] * len(values)), *(max(0, uses.needs[k] - int(m)) for k, m in zip(order, made, strict=True))]),
        array("q", [*(len(order) if may else -1 for may in may_copy), *(_until(problem, kernel) for kernel in order)]),
    )


def _until(problem: Problem, kernel: int) -> int:
    if not problem.repeatable[kernel]:
        return -1
    ended = problem.uses.ended
    return min((ended[u] for u in problem.flow.reads[kernel] if u in ended), default=len(problem.order))


def _lists(lists: Sequence[Sequence[int]]) -> Lists:
    begins = array("q", [0])
    for each in lists:
        begins.append(begins[-1] + len(each))
    return Lists(begins, array("q", [element for each in lists for element in each]))


class Layout:
    """A set of reruns and returns, laid out in order.

    Attributes:
        keys: of all that runs, in order: reruns, returns, and each kernel of the order.
        live: per key, the live bytes.
        marks: per value, twice the key of each that makes or reads it, in order; one more for those that make it, with
            which a new buffer of it begins.
        added: the keys of reruns and returns, in order.
        ticks: of these.
    """

    def __init__(self, facts: Facts):
        self.facts, self.width = facts, facts.width
        self.reads = [_of(facts.reads, number) for number in range(facts.copies + facts.count)]
        self.makes = [_of(facts.makes, number) for number in range(facts.copies + facts.count)]
        self.keys = [position * self.width + self.width - 1 for position in range(facts.count)]
        self.added: list[int] = []
        self.ticks = 0
        self.marks: list[list[int]] = [[] for _ in range(facts.copies)]
        for position, key in enumerate(self.keys):
            for v in self.reads[facts.copies + position]:
                self.marks[v].append(2 * key)
            for v in self.makes[facts.copies + position]:
                self.marks[v].append(2 * key + 1)
        change = np.zeros(facts.count + 1, dtype=np.int64)
        for marks, nbytes in zip(self.marks, facts.nbytes, strict=True):
            change[marks[0] // 2 // self.width] += nbytes
            change[marks[-1] // 2 // self.width + 1] -= nbytes
        self.live = np.array(facts.extra, dtype=np.int64) + np.cumsum(change[:-1])

    def at(self, key: int) -> int:
        """The place of a key among all."""
        return bisect_left(self.keys, key)

    def before(self, v: int, key: int) -> int:
        """The place of the last mark of `v` before a key; -1 for none."""
        return bisect_left(self.marks[v], 2 * key) - 1

    def last(self, v: int, mark: int) -> int:
        """The last key of the buffer of `v` that a mark is of."""
        marks = self.marks[v]
        while mark + 1 < len(marks) and not marks[mark + 1] & 1:
            mark += 1
        return marks[mark] // 2

    def become(self, added: Iterable[int]) -> None:
        """Change to another set of reruns and returns."""
        wanted = set(added)
        for key in [key for key in self.added if key not in wanted]:
            self.remove(key)
        for key in sorted(wanted.difference(self.added)):
            self.add(key)

    def add(self, key: int) -> None:
        """One more rerun or return."""
        facts, live, at, number = self.facts, self.live, self.at(key), key % self.width
        held = int(live[at]) - self._extra(self.keys[at]) - sum(facts.nbytes[v] for v in self._made_at(at))
        self.live = live = np.insert(live, at, held + facts.waiting[key // self.width] + facts.needs[number])
        self.keys.insert(at, key)
        for u in self.reads[number]:
            before, nbytes = self.before(u, key), facts.nbytes[u]
            last = self.last(u, before)
            if last < key:
                live[self.at(last) + 1 : at + 1] += nbytes
            self.marks[u].insert(before + 1, 2 * key)
        for v in self.makes[number]:
            before, nbytes = self.before(v, key), facts.nbytes[v]
            if self.last(v, before) > key:
                live[self.at(self.marks[v][before] // 2) + 1 : at] -= nbytes
            else:
                live[at] += nbytes
            self.marks[v].insert(before + 1, 2 * key + 1)
        insort(self.added, key)
        self.ticks += facts.ticks[number]

    def remove(self, key: int) -> None:
        """The opposite of `add`."""
        facts, live, at, number = self.facts, self.live, self.at(key), key % self.width
        for v in self.makes[number]:
            before, marks = self.before(v, key), self.marks[v]
            del marks[before + 1]
            if self.last(v, before) > key:
                live[self.at(marks[before] // 2) + 1 : at] += facts.nbytes[v]
        for u in self.reads[number]:
            before, marks = self.before(u, key), self.marks[u]
            del marks[before + 1]
            if self.last(u, before) < key:
                live[self.at(marks[before] // 2) + 1 : at + 1] -= facts.nbytes[u]
        del self.keys[at]
        self.live = np.delete(live, at)
        del self.added[bisect_left(self.added, key)]
        self.ticks -= facts.ticks[number]

    def _made_at(self, place: int) -> list[int]:
        position, number = divmod(self.keys[place], self.width)
        return self.makes[self.facts.copies + position if number == self.width - 1 else number]

    def _extra(self, key: int) -> int:
        """The live bytes at a key other than values."""
        position, number = divmod(key, self.width)
        facts = self.facts
        own = number == self.width - 1
        return facts.extra[position] if own else facts.waiting[position] + facts.needs[number]


def _of(lists: Lists, i: int) -> list[int]:
    return list(lists.elements[lists.begins[i] : lists.begins[i + 1]])
