"""The input that a sum begins with, by iteration and by the branches that were taken, from several runs.

A table has a row for each branch of a decision that the order depends on. These decisions are found like the splits of
a decision tree (Breiman et al., 1984): each time the one that makes the runs most predictable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfswap.simulator.decisions import Decision, Outcome
from tfswap.simulator.iteration_table import IterationTable

EITHER = 2
"""The first inputs, whose order makes no difference: a + b is b + a."""
MOST_KNOWN_TRIPS = 4096
"""In a loop with more iterations, the last ones are assumed to be like those before."""
MOST_DECISIONS = 4
MOST_OUTCOMES = 32
"""The most decisions of one sum, and the most outcomes of these together."""
NOTICED, NOTICED_IN_RACES = 32, 8
"""A decision must make one run in this number predictable. A smaller effect could be a race."""
_ROUNDING = 1e-6
"""Gains that differ by less are equal, so that each machine takes the first of such decisions."""


class FirstTerm(NamedTuple):
    """The input that an AddN begins with; 0 stands for the first two.

    Attributes:
        table: by iteration of the loops around it, and then by the branches of `decisions`.
    """

    table: IterationTable
    decisions: tuple[Decision, ...]


class _Sample(NamedTuple):
    iterations: tuple[int, ...]
    position: int
    outcome: Outcome


_Cell = tuple[tuple[int, ...], tuple[int, ...]]
"""Iterations, and branches."""


class SumSamples:
    """The first input of a sum in each of its runs.

    Args:
        races: whether threads race.

    Attributes:
        positions: how often it began with each input.
    """

    def __init__(self, races: bool) -> None:
        self._samples: list[_Sample] = []
        self.positions: Counter[int] = Counter()
        self._noticed = NOTICED_IN_RACES if races else NOTICED

    def add(self, iterations: tuple[int, ...], position: int, outcome: Outcome) -> None:
        position = position if position >= EITHER else 0
        self._samples.append(_Sample(iterations, position, outcome))
        self.positions[position] += 1

    def first(
        self,
        trips: Callable[[tuple[int, ...]], tuple[int, int | None]],
        seen: Callable[[], Sequence[Decision]],
    ) -> FirstTerm:
        """The input that the sum begins with most often.

        Args:
            trips: by iterations of the loops around the next loop: the number of its iterations that were run, and
                their number, None if unknown.
            seen: the decisions that it may depend on.
        """
        decisions = self._decisions(seen)
        counts: dict[_Cell, Counter[int]] = {}
        for sample in self._samples:
            branches = tuple(sample.outcome.of(decision, sample.iterations) for decision in decisions)
            for known in range(len(branches) + 1):
                counts.setdefault((sample.iterations, branches[:known]), Counter())[sample.position] += 1
        usual = _most(self.positions)
        depth = len(self._samples[0].iterations)

        def by_branch(around: tuple[int, ...], branches: tuple[int, ...], usual: int) -> IterationTable:
            each = counts.get((around, branches))  # in a branch that is not taken it does not run
            most = _most(each) if each else usual
            if len(branches) == len(decisions):
                return IterationTable.of(most)
            rows = range(decisions[len(branches)].predicate.branches)
            return IterationTable.stack([by_branch(around, (*branches, row), most) for row in rows])

        def of(around: tuple[int, ...]) -> IterationTable:
            if len(around) == depth:
                return by_branch(around, (), usual)
            ran, there_are = trips(around)
            begun = (s.iterations[len(around)] + 1 for s in self._samples if s.iterations[: len(around)] == around)
            more_conditions = max(0, max(begun, default=0) - ran)  # a condition runs once more
            rows = [of((*around, i)) for i in range(max(1, ran + more_conditions))]
            return IterationTable.stack(_with_all(rows, None if there_are is None else there_are + more_conditions))

        return FirstTerm(of(()), decisions)

    def _decisions(self, seen: Callable[[], Sequence[Decision]]) -> tuple[Decision, ...]:
        """The decisions that it depends on."""
        cells: list[_Cell] = [(sample.iterations, ()) for sample in self._samples]
        chosen: list[Decision] = []
        left: Sequence[Decision] | None = None
        outcomes = 1
        while len(chosen) < MOST_DECISIONS:
            undecided = _undecided(cells, self._samples)
            if not undecided:
                break
            left = seen() if left is None else left
            best, best_gain, best_cells = None, 0.0, cells
            for decision in left:
                if decision in chosen or outcomes * decision.predicate.branches > MOST_OUTCOMES:
                    continue
                split = list(cells)
                for i in undecided:
                    sample, (iterations, branches) = self._samples[i], cells[i]
                    split[i] = iterations, (*branches, sample.outcome.of(decision, sample.iterations))
                gain = self._gain(undecided, cells, split)
                if gain > best_gain + _ROUNDING:
                    best, best_gain, best_cells = decision, gain, split
            if best is None:
                break
            chosen.append(best)
            cells = best_cells
            outcomes *= best.predicate.branches
        return tuple(chosen)

    def _gain(self, undecided: Sequence[int], cells: Sequence[_Cell], split: Sequence[_Cell]) -> float:
        """The gain in predictability by splitting the cells; 0 if no iteration gains."""
        before, after = (self._impurity(undecided, each) for each in (cells, split))
        there = Counter(self._samples[i].iterations for i in undecided)
        gains = {at: before[at] - after.get(at, 0.0) for at in there}
        return sum(gains.values()) if any(gain * self._noticed >= there[at] for at, gain in gains.items()) else 0.0

    def _impurity(self, undecided: Sequence[int], cells: Sequence[_Cell]) -> dict[tuple[int, ...], float]:
        """By iterations, Gini's impurity of the positions in each cell times its samples."""
        positions: dict[_Cell, Counter[int]] = {}
        for i in undecided:
            positions.setdefault(cells[i], Counter())[self._samples[i].position] += 1
        found: dict[tuple[int, ...], float] = {}
        for (iterations, _), counts in positions.items():
            n = counts.total()
            found[iterations] = found.get(iterations, 0.0) + n - sum(count * count for count in counts.values()) / n
        return found


def _undecided(cells: Sequence[_Cell], samples: Sequence[_Sample]) -> list[int]:
    """The samples in whose cells there are several positions."""
    first: dict[_Cell, int] = {}
    several = {c for c, s in zip(cells, samples, strict=True) if first.setdefault(c, s.position) != s.position}
    return [i for i, cell in enumerate(cells) if cell in several]


def _with_all(rows: list[IterationTable], trips: int | None) -> list[IterationTable]:
    """The rows of all `trips` iterations of a loop, from `rows` of those that were run: the first and the last ones."""
    half = len(rows) // 2
    if trips is None or trips * max(len(row.values) for row in rows) > MOST_KNOWN_TRIPS:
        return rows[: half + 1]
    return rows[:half] + [rows[half]] * max(0, trips - len(rows)) + rows[half:]


def _most(counts: Counter[int]) -> int:
    return max(counts, key=lambda k: (counts[k], -k))
