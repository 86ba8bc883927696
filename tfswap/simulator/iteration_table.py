"""What holds in each iteration of loops in loops."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class IterationTable(NamedTuple):
    """A number for each iteration.

    Attributes:
        shape: how many iterations of each loop have rows of their own, of the outermost first; what the last says holds
            for all that follow. Empty outside of loops.
        values: row by row.
    """

    shape: tuple[int, ...]
    values: tuple[int, ...]

    @classmethod
    def of(cls, value: int) -> IterationTable:
        """Outside of loops."""
        return cls((), (value,))

    @classmethod
    def stack(cls, rows: Sequence[IterationTable]) -> IterationTable:
        """A loop's, from those of its iterations, of which there is one at least."""
        end = len(rows)
        while end > 1 and rows[end - 1] == rows[end - 2]:
            end -= 1
        shape = tuple(map(max, zip(*(row.shape for row in rows[:end]), strict=True)))
        return cls((end, *shape), tuple(value for row in rows[:end] for value in row._widened(shape)))

    @property
    def is_uniform(self) -> bool:
        """Whether all iterations have the same."""
        return len(set(self.values)) == 1

    @property
    def middle(self) -> int:
        """Of an iteration that is neither one of the first nor one of the last."""
        at = 0
        for size in self.shape:
            at = at * size + size // 2
        return self.values[at]

    def fixed(self, axis: int, iteration: int) -> IterationTable:
        """That of the other loops, in this iteration of one."""
        size, inner = self.shape[axis], prod(self.shape[axis + 1 :])
        at = min(iteration, size - 1)
        kept = (value for i, value in enumerate(self.values) if i // inner % size == at)
        return IterationTable(self.shape[:axis] + self.shape[axis + 1 :], tuple(kept))

    def _widened(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Its values, with the last of each loop repeated."""
        if not shape:
            return self.values
        rows = [self.fixed(0, i) for i in range(shape[0])]
        return tuple(value for row in rows for value in row._widened(shape[1:]))
