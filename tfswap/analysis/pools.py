"""What lists and optionals keep where it is not known how a step runs: a pool that covers each way.

After a conditional of which the step decides the branch, or a loop that may end early, lists keep now this and now
that. A pool has for each way as many buffers as that keeps, none of them smaller: its largest is as large as the
largest of any way, its second as large as the second, and so on. All lists that may keep some of it keep all, and so
does an element that is read from them, whichever it is. What every way keeps is itself.

Invariant: while any of what a way keeps is in the arena, the pool is too.

Not handled: which element a list gives.
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
"""Up to this size one chunk is no smaller than those of several buffers that are as large together (SPLIT_SLACK_BYTES
in simulator/bfc_allocator.py)."""


def is_pooled(buffer: Buffer) -> bool:
    """Whether it is a list of which only what it keeps altogether is known."""
    return any(part is not None and part.pool is not None for part in buffer.parts)


def element_sizes(buffer: Buffer) -> tuple[int, ...]:
    """Bytes of the elements that a list may keep, once for each time that it keeps one."""
    sizes: list[int] = []
    for part in buffer.parts:
        if part is not None and part.pool is not None:
            sizes += part.pool
        elif part is not None:
            sizes.append(part.nbytes)
            sizes += element_sizes(part.buffer)
    return tuple(sizes)


class Way(NamedTuple):
    """What one way gives.

    Attributes:
        results: its buffers.
        nbytes: by result, what it takes.
        kept: what lists among them keep, each buffer once.
        elements: by result, the sizes of its elements, the largest first.
        values: by result, bounds of its elements' integers; None where they are unknown.
        unset: by result, whether it has elements that are not set.
    """

    results: tuple[Buffer, ...]
    nbytes: tuple[int, ...]
    kept: dict[Buffer, None]
    elements: tuple[tuple[int, ...], ...]
    values: tuple[Values | None, ...]
    unset: tuple[bool, ...]

    @classmethod
    def of(cls, results: Sequence[Buffer]) -> Way:
        """As they are now: what runs next may change them."""
        return cls(
            tuple(results),
            tuple([0 if _is_outside(b) else b.nbytes for b in results]),
            {b: None for result in results for b in reached(result)},
            tuple([tuple(sorted(element_sizes(b), reverse=True)) for b in results]),
            tuple(map(_element_values, results)),
            tuple([None in b.parts for b in results]),
        )


class Merged(NamedTuple):
    """What covers all ways.

    Attributes:
        nbytes: by result, what it takes.
        same: by result, the buffer that every way gives.
        shared: what every way keeps.
        pool_bytes: the sizes of all else that lists keep.
        elements: by result, the sizes of its elements.
        values: by result, bounds of their integers.
        unset: by result, whether it may have some that are not set.
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
        """Of ways that end in the same state but for these results."""
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
        """What the list keeps that is this result, where `pool` keeps what is shared and what else lists may keep."""
        kept = [Part(pool, 0, self.values[result], pool=self.elements[result])] if self.elements[result] else []
        return [*kept, *([None] if self.unset[result] else [])]


def _is_outside(buffer: Buffer) -> bool:
    """Whether it takes nothing by itself: a constant, a handle, an element of a pool."""
    return buffer.number is None and buffer.source is None


def reached(result: Buffer) -> Iterator[Buffer]:
    """What a list keeps that is in the arena, and what that keeps in turn; each once."""

    def keeps(buffer: Buffer) -> list[Buffer]:
        ahead = [] if buffer.ahead is None else [buffer.ahead]
        return [*(part.buffer for part in buffer.parts if part is not None), *ahead]

    return (b for b in reach([result], keeps) if b is not result and not _is_outside(b) and b.nbytes)


def _element_values(buffer: Buffer) -> Values | None:
    known = [part.values for part in buffer.parts if part is not None]
    return common([[values] for values in known], bounds=True)[0] if known else None


def _largest(ways: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The largest of the first of all, of the second, and so on."""
    return tuple(map(max, zip_longest(*ways, fillvalue=0)))


def structure(buffers: Sequence[Buffer]) -> tuple[object, ...]:
    """What distinguishes two states of a run: which buffers there are, and who keeps which."""
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
