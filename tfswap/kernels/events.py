"""What a kernel asks of the allocator, as events in order."""

from __future__ import annotations

from typing import Literal

EventKind = Literal["temp", "out", "free", "release", "split", "part", "rest"]
"""Kinds of events, each with a number: "temp" requests a temporary of so many bytes; "out" requests the output of that
number; "free" frees the temporary of that number. Of loops and conditionals also "release": frees the value of that
number; "split": one of the next requests, of so many bytes, gets a chunk of its own size; "part": the last such request
has been named; "rest": what parts the latest of them is freed."""

Event = tuple[EventKind, int]


def temp(nbytes: int) -> Event:
    """A temporary is requested."""
    return ("temp", nbytes)


def out(index: int) -> Event:
    """An output is requested."""
    return ("out", index)


def free(number: int) -> Event:
    """A temporary is freed, by its number among the kernel's temporaries."""
    return ("free", number)
