"""Buffers of a replay of bodies (analysis/heap.py), and the elements of lists."""

from __future__ import annotations

from typing import NamedTuple

from tfswap.analysis.integer_values import Values


class Element(NamedTuple):
    """The known facts about an element of a list.

    Attributes:
        nbytes: its bytes.
        values: its integers; None where unknown.
        value: the value of the step that it is; None where unknown.
        output: in a Record, the output of the node that it is, counted as in `Record.events`, in place of `value`.
        parts: the elements of an element that is a list; None where unknown.
        is_list: whether it is a list or an optional.
        pool: as of `Part`.
    """

    nbytes: int
    values: Values | None
    value: int | None = None
    output: int | None = None
    parts: tuple[Element | None, ...] | None = ()
    is_list: bool = False
    pool: tuple[int, ...] | None = None


Contents = tuple[Element | None, ...]
"""The known facts about a list's elements; None for an element that is not set."""


class Buffer:
    """One allocation of a replay, or one from before it.

    Attributes:
        number: the allocation's number. None: from before the replay, never released or written over.
        nbytes: its size.
        on_host: whether it is in host memory, outside of the arena.
        source: the input of the replayed node that it belongs to.
        value: the value of the step that it is; None where unknown.
        refs: the number of references to it.
        parts: the elements of the list in it; None for an element that is not set.
        endless: whether it is an unknown list, which is assumed to have any number of elements.
        away_bytes: for the handle of a swapped tensor, the bytes of the copy in host memory.
        ahead: the buffer into which that copy is being copied back, for the next reader of the handle.
    """

    __slots__ = ("ahead", "away_bytes", "endless", "nbytes", "number", "on_host", "parts", "refs", "source", "value")

    def __init__(self, number: int | None, nbytes: int, source: int | None = None, value: int | None = None):
        self.number = number
        self.nbytes = nbytes
        self.on_host = False
        self.source = source
        self.value = value
        self.refs = 0
        self.parts: list[Part | None] = []
        self.endless = False
        self.away_bytes = 0
        self.ahead: Buffer | None = None

    @property
    def arena_bytes(self) -> int:
        """The bytes that it takes in the arena."""
        return 0 if self.on_host else self.nbytes


class Part(NamedTuple):
    """An element of a list.

    Attributes:
        buffer: its buffer: for a slice that of the whole tensor, for a variable that of the handle.
        nbytes: its own size.
        values: its integers; None where unknown.
        is_list: whether it is a list or an optional.
        pool: the sizes of the elements that this part represents (analysis/pools.py); () where another part has them.
    """

    buffer: Buffer
    nbytes: int
    values: Values | None = None
    is_list: bool = False
    pool: tuple[int, ...] | None = None
