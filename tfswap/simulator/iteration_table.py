"""A number for each iteration of nested loops."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class IterationTable(NamedTuple):
    """A number for each iteration.

    Attributes:
        shape: the number of rows of each loop, the outermost first; empty outside of loops. All iterations from the
            last row on have its number.
        values: the numbers, row by row.
    """

    shape: tuple[int, ...]
    values: tuple[int, ...]

    @classmethod
    def of(cls, value: int) -> IterationTable:
        """The table of a number outside of loops."""
        return cls((), (value,))

    @classmethod
    def stack(cls, rows: Sequence[IterationTable]) -> IterationTable:
        """The table of a loop, from the tables of its iterations, one or more."""
        end = len(rows)
        while end > 1 and rows[end - 1] == rows[end - 2]:
            end -= 1
        shape = tuple(map(max, zip(*(row.shape for row in rows[:end]), strict=True)))
        return cls((end, *shape), tuple(value for row in rows[:end] for value in row._widened(shape)))

    @property
    def is_uniform(self) -> bool:
        """Whether all iterations have the same number."""
        return len(set(self.values)) == 1

    @property
    def middle(self) -> int:
        """The number of an iteration in the middle of each loop."""
        at = 0
        for size in self.shape:
            at = at * size + size // 2
        return self.values[at]

    def fixed(self, axis: int, iteration: int) -> IterationTable:
        """The table of the other loops, in this iteration of the loop `axis`."""
        size, inner = self.shape[axis], prod(self.shape[axis + 1 :])
        at = min(iteration, size - 1)
        kept = (value for i, value in enumerate(self.values) if i // inner % size == at)
        return IterationTable(self.shape[:axis] + self.shape[axis + 1 :], tuple(kept))

    def _widened(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Its values in a table of this shape, with the last row of each loop repeated."""
        if not shape:
            return self.values
        rows = [self.fixed(0, i) for i in range(shape[0])]
        return tuple(value for row in rows for value in row._widened(shape[1:]))
