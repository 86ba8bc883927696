"""The peak of a planned step's requests in the arena that the step finds, before it runs.

A program that allocates between two steps changes the arena's layout, often to a new one each time. The simulator's
replay takes some 3 us per request, tens of milliseconds for a loop of a hundred iterations. The replay in C++ of a
saved step's gate (csrc/core/arena_replay.h) finds the same peak in a tenth of that.

Not handled in C++: arenas whose chunks or limit are unknown, and peaks above the arena's limit, which depend on where
the replay places a request that does not fit. The simulator replays these.
"""

from __future__ import annotations

from array import array
from ctypes import c_int64
from functools import cached_property

from tfswap.native.load import load
from tfswap.passes.tactics.limit_check import MOST_EVENTS, encode
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.requests import Requests


class RequestsReplay:
    """Replays one plan's requests in given layouts of the arena."""

    def __init__(self, requests: Requests):
        self._requests = requests

    def peak_bytes(self, snapshot: ArenaSnapshot) -> int:
        """As `Requests.peak_bytes`."""
        limit_bytes = snapshot.limit_bytes
        if snapshot.chunks and limit_bytes is not None and self._encoded:
            rows = array("q", [int(field) for chunk in snapshot.chunks for field in chunk])
            chunks = (c_int64 * len(rows)).from_buffer(rows)
            peaks = [
                load().c.tfswap_replay(each, len(each), chunks, len(snapshot.chunks), limit_bytes, snapshot.collects)
                for each in self._encoded
            ]
            if min(peaks) >= 0 and max(peaks) <= limit_bytes:
                return max(peaks)
        return self._requests.peak_bytes(snapshot)

    @cached_property
    def _encoded(self) -> tuple[bytes, ...]:
        """The requests in the encoding of a saved step's gate; empty where they are too many."""
        extremes = self._requests.extremes
        return () if any(len(events) > MOST_EVENTS for events in extremes) else tuple(map(encode, extremes))
