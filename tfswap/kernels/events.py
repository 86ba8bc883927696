"""The requests and frees of one kernel, as events in order."""

from __future__ import annotations

from typing import Literal

EventKind = Literal["temp", "out", "free", "release", "split", "part", "rest"]
"""Kinds of events, each with a number.

- "temp": a temporary of that many bytes is requested.
- "out": the output of that number is requested.
- "free": the temporary of that number is freed.

Loops and conditionals have more kinds:

- "release": the value of that number is freed.
- "split": one of the next requests, of that many bytes, gets a chunk of exactly its size.
- "part": the last request of a chunk split has been listed.
- "rest": the remainder of the latest chunk split is freed.
"""

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
