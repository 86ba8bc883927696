"""The requests of a planned step, in order: enough to compute its peak in any arena, without its graph.

An order fixes the sequence of requests and releases; only addresses differ between arenas. So the sequence is recorded
once, and replayed in each layout of the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.alignment import ALIGNMENT_BYTES, round_up
from tfswap.plan.schedule import Step, at_extremes
from tfswap.simulator.arena_snapshot import ArenaSnapshot, added_bytes, fill
from tfswap.simulator.bfc_allocator import Arena
from tfswap.simulator.memory import simulate_memory
from tfswap.simulator.replay import Replay

FREE_REST: Final = 0
SPLIT_ABOVE: Final = 1 << 52
"""Events above this are splits, since no request is as large."""
END_ABOVE: Final = 1 << 53
"""Events above this are splits at the end of a chunk."""
EXACT_CHUNKS: Final = 1 << 54
"""From this event on each request gets an exact chunk."""
_REST: Final = -2
"""The address of a split's separator, while recording."""


@dataclass(frozen=True)
class Requests:
    """A step's requests and releases.

    Attributes:
        extremes: for each of `at_extremes`, the events as numbers:
            - a request: its bytes;
            - the release of the n-th request's chunk: `-1 - n`;
            - a split for one of the next requests: SPLIT_ABOVE, or END_ABOVE for the end of a chunk, plus its bytes;
            - the end of a list of splits: SPLIT_ABOVE;
            - the release of the latest splits' separators: FREE_REST;
            - exact chunks from here on: EXACT_CHUNKS.
        resident_bytes: bytes in the arena before the step that are among the requests: all, where its chunks were
            unknown.
    """

    extremes: tuple[tuple[int, ...], ...]
    resident_bytes: int

    def peak_bytes(self, snapshot: ArenaSnapshot) -> int:
        """The step's peak in an arena with this content, which includes its constants."""
        more_bytes = 0 if snapshot.chunks else snapshot.total_bytes - self.resident_bytes
        return more_bytes + max(_replay(events, snapshot.arena()).peak_bytes for events in self.extremes)

    def added_regions(self, snapshot: ArenaSnapshot) -> tuple[int, ...]:
        """The bytes of the regions that the step adds to an arena with this content; of the extreme with the most."""
        limit_bytes = snapshot.limit_bytes
        if limit_bytes is None or sum(size for _, size, _ in snapshot.chunks) + ALIGNMENT_BYTES > limit_bytes:
            return ()
        return max((_replay(events, snapshot.arena()).added_regions for events in self.extremes), key=sum)


def _replay(events: Sequence[int], arena: Arena) -> Arena:
    """The arena after these events."""
    allocate, free = arena.allocate, arena.free
    addresses: list[int] = []
    rests: list[list[int]] = []  # a loop that has splits has some in it too
    parted: list[int] = []
    for event in events:
        if event < 0:
            free(addresses[-1 - event])
        elif FREE_REST < event < SPLIT_ABOVE:
            addresses.append(allocate(event))
        elif event == FREE_REST:
            for rest in rests.pop():
                free(rest)
        elif event == SPLIT_ABOVE:
            rests.append(arena.split(parted))
            parted = []
        elif event == EXACT_CHUNKS:
            arena.split_all()
        else:
            parted.append(event - SPLIT_ABOVE if event < END_ABOVE else END_ABOVE - event)
    return arena


class _Recorder:
    """An allocator that only records."""

    def __init__(self, in_use_bytes: int):
        self.in_use_bytes = self.peak_bytes = in_use_bytes
        self.events: list[int] = []
        self._count = 0

    def allocate(self, size_bytes: int) -> int:
        if size_bytes <= 0:
            return -1
        self.in_use_bytes += round_up(size_bytes)
        self.events.append(size_bytes)
        self._count += 1
        return self._count - 1

    def split(self, sizes: Sequence[int]) -> list[int]:
        self.events += [*(SPLIT_ABOVE + size if size > 0 else END_ABOVE - size for size in sizes), SPLIT_ABOVE]
        return [_REST]

    def split_all(self) -> None:
        self.events.append(EXACT_CHUNKS)

    def free(self, address: int) -> None:
        if address >= 0:
            self.events.append(-1 - address)
        elif address == _REST:
            self.events.append(FREE_REST)


def record_requests(flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot) -> Requests:
    """The requests of `steps`, repeated as by `simulate_memory`, in the arena of `snapshot`."""
    there_bytes = snapshot.total_bytes if snapshot.chunks else 0
    recorded: list[_Recorder] = []
    for extreme, its in at_extremes(flow, steps):
        recorder = _Recorder(there_bytes)
        simulate_memory(extreme, its, snapshot=snapshot, arena=recorder)
        recorded.append(recorder)
    return Requests(tuple(tuple(r.events) for r in recorded), snapshot.total_bytes - there_bytes)


IN_PLACE: Final = ArenaSnapshot(ALIGNMENT_BYTES, ((0, ALIGNMENT_BYTES, True),), instantiated=True)
"""Any arena with all of a step's variables, arguments and constants."""


def requests_of_one(flow: Dataflow, steps: Sequence[Step]) -> tuple[tuple[int, ...], ...]:
    """The requests of one run of `steps`, in an arena with all persistent values; as `Requests.extremes`."""
    recorded: list[_Recorder] = []
    for extreme, its in at_extremes(flow, steps):
        recorder = _Recorder(IN_PLACE.total_bytes)
        Replay(extreme, its, recorder, fill(recorder, added_bytes(extreme, IN_PLACE), IN_PLACE), IN_PLACE).repeat()
        recorded.append(recorder)
    return tuple(tuple(recorder.events) for recorder in recorded)
