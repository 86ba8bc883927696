"""Pools of buffers that cover the contents of lists and optionals in all courses of a step.

After a conditional whose branch the step decides, or a loop that may end early, the contents of lists depend on the
course. A pool has, for each course, at least as many buffers, none of them smaller: its largest is as large as the
largest of any course, its second as the second, and so on. Each list that may contain some of these buffers holds the
whole pool, and so does an element that is read from such a list. Buffers that are in the lists of all courses are not
pooled.

Invariant: while any buffer of a course is in the arena, the pool is too.

Not handled: the identity of the element that a list gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from tfswap.analysis.buffers import Buffer, Part
from tfswap.analysis.integer_values import Values, common
from tfswap.kernels.alignment import round_up
from tfswap.support.reach import reach

LARGEST_SHARED_BYTES = 128 << 20
"""Up to this size, one chunk covers several buffers of the same total size (SPLIT_SLACK_BYTES in
kernels/alignment.py)."""


def is_pooled(buffer: Buffer) -> bool:
    """Whether it is a list whose contents are a pool."""
    return any(part is not None and part.pool is not None for part in buffer.parts)


def element_sizes(buffer: Buffer) -> tuple[int, ...]:
    """The bytes of the elements that a list may have, repeated elements included."""
    sizes: list[int] = []
    for part in buffer.parts:
        if part is not None and part.pool is not None:
            sizes += part.pool
        elif part is not None:
            sizes.append(part.nbytes)
            sizes += element_sizes(part.buffer)
    return tuple(sizes)


class Way(NamedTuple):
    """The results of one branch, or of a loop that ends after one iteration.

    Attributes:
        results: its buffers.
        nbytes: the bytes of each result.
        kept: the buffers in lists among them, each once.
        elements: the sizes of each result's elements, the largest first.
        values: bounds of the integers of each result's elements; None where unknown.
        unset: whether each result has elements that are not set.
    """

    results: tuple[Buffer, ...]
    nbytes: tuple[int, ...]
    kept: dict[Buffer, None]
    elements: tuple[tuple[int, ...], ...]
    values: tuple[Values | None, ...]
    unset: tuple[bool, ...]

    @classmethod
    def of(cls, results: Sequence[Buffer]) -> Way:
        """A snapshot of the results, which later kernels may change."""
        return cls(
            tuple(results),
            tuple([0 if _is_outside(b) else b.nbytes for b in results]),
            {b: None for result in results for b in reached(result)},
            tuple([tuple(sorted(element_sizes(b), reverse=True)) for b in results]),
            tuple(map(_element_values, results)),
            tuple([None in b.parts for b in results]),
        )


class Merged(NamedTuple):
    """Results that cover those of all branches or iterations.

    Attributes:
        nbytes: the bytes of each result.
        same: the buffer of each result, where it is the same in all; None otherwise.
        shared: buffers that are in lists of all.
        pool_bytes: the sizes of the pool's buffers.
        elements: the sizes of each result's elements.
        values: bounds of the integers of each result's elements.
        unset: whether each result may have elements that are not set.
    """

    nbytes: tuple[int, ...]
    same: tuple[Buffer | None, ...]
    shared: tuple[Buffer, ...]
    pool_bytes: tuple[int, ...]
    elements: tuple[tuple[int, ...], ...]
    values: tuple[Values | None, ...]
    unset: tuple[bool, ...]

    @classmethod
    def of(cls, ways: Sequence[Way]) -> Merged:
        """Cover ways that end in the same state except for their results."""
        first = ways[0]
        shared = [b for b in first.kept if all(b in way.kept for way in ways)]
        seen = set(shared)
        kept = [sorted((round_up(b.nbytes) for b in way.kept if b not in seen), reverse=True) for way in ways]
        pool = _largest(kept)
        most = max(map(sum, kept))
        if most < min(sum(pool), LARGEST_SHARED_BYTES):
            pool = (most,)
        results = zip(*(way.results for way in ways), strict=True)
        return cls(
            tuple(map(max, zip(*(way.nbytes for way in ways), strict=True))),
            tuple([several[0] if len(set(several)) == 1 else None for several in results]),
            tuple(shared),
            pool,
            tuple(map(_largest, zip(*(way.elements for way in ways), strict=True))),
            tuple(common([way.values for way in ways], bounds=True)),
            tuple(map(any, zip(*(way.unset for way in ways), strict=True))),
        )

    def parts(self, result: int, pool: Buffer) -> list[Part | None]:
        """The elements of a result that is a list. `pool` holds all shared and pooled buffers."""
        kept = [Part(pool, 0, self.values[result], pool=self.elements[result])] if self.elements[result] else []
        return [*kept, *([None] if self.unset[result] else [])]


def _is_outside(buffer: Buffer) -> bool:
    """Whether it takes no bytes of its own: a constant, a handle, an element of a pool."""
    return buffer.number is None and buffer.source is None


def reached(result: Buffer) -> Iterator[Buffer]:
    """The buffers in the arena that a list holds, directly or not; each once."""
    return (b for b in reach([result], holds) if b is not result and not _is_outside(b) and b.nbytes)


def holds(buffer: Buffer) -> list[Buffer]:
    """The buffers that a list holds, and the one that comes next in an endless list's loop."""
    ahead = [] if buffer.ahead is None else [buffer.ahead]
    return [*(part.buffer for part in buffer.parts if part is not None), *ahead]


def _element_values(buffer: Buffer) -> Values | None:
    known = [part.values for part in buffer.parts if part is not None]
    return common([[values] for values in known], bounds=True)[0] if known else None


def _largest(ways: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The largest of all first items, of all second items, and so on."""
    return tuple(map(max, zip_longest(*ways, fillvalue=0)))


def structure(buffers: Sequence[Buffer]) -> tuple[object, ...]:
    """A state of a replay, for comparison: its buffers, and the lists that hold them."""
    numbers: dict[Buffer, int] = {}
    found: list[object] = []
    pending = list(reversed(buffers))
    while pending:
        buffer = pending.pop()
        if buffer in numbers:
            found.append(numbers[buffer])
            continue
        numbers[buffer] = len(numbers)
        parts = [None if p is None else (p.nbytes, p.values, p.pool, p.is_list) for p in buffer.parts]
        found.append((buffer.nbytes, buffer.source, buffer.number is None, buffer.endless, *parts))
        pending += [p.buffer for p in reversed(buffer.parts) if p is not None]
        pending += [] if buffer.ahead is None else [buffer.ahead]
    return tuple(found)
