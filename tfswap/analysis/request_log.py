"""What a replay of bodies requests and releases, in order, and the same as the events of one kernel.

Not handled: what is in host memory is logged with no bytes, and is no event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from tfswap.kernels.events import Event

Logged = tuple[Literal["request", "free", "release", "split", "part", "rest"], int, int]
"""A kind of event (kernels/events.py), where it is not known yet whether a request is an output's; the number of the
request or the value, or bytes; and the bytes of a request."""


def events_of(log: Sequence[Logged], names: Mapping[int | None, int]) -> list[Event]:
    """The log as events: what outputs keep is an output's, by `names`, all else a temporary."""
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
