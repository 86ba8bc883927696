"""The log of requests and releases of a replay of bodies, and its conversion to the events of one kernel.

Buffers in host memory are logged with 0 bytes, and give no events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from tfswap.kernels.events import Event

Logged = tuple[Literal["request", "free", "release", "split", "part", "rest"], int, int]
"""(kind, subject, bytes): an event (kernels/events.py) before it is known which requests are outputs. The subject is
the number of the request or the value, or bytes for "split"; the bytes are those of a request."""


def events_of(log: Sequence[Logged], names: Mapping[int | None, int]) -> list[Event]:
    """The log as events. Requests in `names` are outputs, all others temporaries."""
    temps: dict[int, int] = {}
    events: list[Event] = []
    for kind, number, nbytes in log:
        if kind == "free":
            if number in temps:
                events.append(("free", temps[number]))
        elif kind != "request":
            events.append((kind, number))
        elif number in names:
            events.append(("out", names[number]))
        elif nbytes:
            temps[number] = len(temps)
            events.append(("temp", nbytes))
    return events
