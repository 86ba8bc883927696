"""Buffers of a replay of bodies (analysis/heap.py), and what lists keep."""

from __future__ import annotations

from typing import NamedTuple

from tfswap.analysis.integer_values import Values


class Element(NamedTuple):
    """What is known of an element of a list: its bytes, its integers, and which value of the step it is.

    In a Record, what the node itself makes is known by its output instead, counted as in `Record.events`.

    Attributes:
        parts: of a list, what is known of it in turn; None of one of which nothing is known.
        is_list: whether it is a list or an optional in turn.
        pool: as of the Part.
    """

    nbytes: int
    values: Values | None
    value: int | None = None
    output: int | None = None
    parts: tuple[Element | None, ...] | None = ()
    is_list: bool = False
    pool: tuple[int, ...] | None = None


Contents = tuple[Element | None, ...]
"""What is known of a list; None for an element that is not set."""


class Buffer:
    """One allocation, or one that is there before.

    Attributes:
        number: of the allocation; None for what the run does not allocate: it is never released or written over.
        nbytes: its size.
        on_host: whether it is in host memory, outside of the arena.
        source: the input that it comes with.
        value: the value of the step that it is, where that is known.
        refs: who holds it.
        parts: what the list in it keeps; None for an element that is not set.
        endless: a list of which nothing is known: it has as many elements as are asked for.
        away_bytes: what goes with it in host memory: the copy that it is the handle of.
        ahead: the tensor that this copy is on its way back into, for the next reader of the handle.
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
        """What it requests from the arena."""
        return 0 if self.on_host else self.nbytes


class Part(NamedTuple):
    """An element that a list keeps.

    Attributes:
        buffer: that it lies in: a slice in that of the whole, what is read of a variable in that of its handle.
        nbytes: its own size.
        values: its integers where they are known.
        is_list: whether it is a list or an optional in turn.
        pool: of a part that stands for several elements (analysis/pools.py), their sizes; () where another part has
            them.
    """

    buffer: Buffer
    nbytes: int
    values: Values | None = None
    is_list: bool = False
    pool: tuple[int, ...] | None = None
