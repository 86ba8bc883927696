"""The places of a group's buffers (planner/concurrent.py): one node requests memory for all its kernels.

It requests one chunk for buffers that only the group uses, and one for each tensor that others read. Each buffer has a
place in one of these chunks. If a place has served another buffer before, the kernel waits for all users of that
buffer.

Invariant: two buffers whose places overlap are never in use at the same time, in any run.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfswap.analysis.groups import Concurrent, Served, reserved_bytes
from tfswap.planner.concurrent import Buffer, ListSchedule

OPEN = 1 << 60
"""The end of buffers that others read."""


class _Stay(NamedTuple):
    """A buffer, and the events of the schedule between which it is in use."""

    buffer: Buffer
    begin: int
    end: int


def place_group(listed: ListSchedule, threads: int) -> Concurrent:
    """The places of a schedule's buffers.

    Args:
        threads: largest number of kernels that run at a time.
    """
    process_bytes = (listed.flow.process_bytes.get(i, 0) for i in listed.order)
    made = Concurrent(listed.order, reserved=reserved_bytes(process_bytes, threads), seconds=listed.now_s)
    stays = [
        _Stay(b, b.begin, OPEN if b.stays else b.freed or max(listed.ends[user] for user in b.users))
        for b in listed.buffers
    ]
    place = _pack(stays, made)
    for i, others in listed.waits.items():
        made.waits.setdefault(i, set()).update(others)
    for i, served in listed.served.items():
        made.served[i] = [Served(place[b][0], over, place[b][1]) for b, over in served]
    return made


PACKED_BY: tuple[Callable[[_Stay], tuple[int, ...]], ...] = (
    lambda stay: (-stay.buffer.nbytes, stay.begin),
    lambda stay: (-stay.buffer.nbytes * (stay.end - stay.begin), stay.begin),
    lambda stay: (stay.begin,),
)
"""The orders in which buffers get their places. The order with the fewest bytes of chunks is used."""


class _Place(NamedTuple):
    """A part of a chunk, and the buffer in it."""

    begin: int
    end: int
    stay: _Stay


class _Room:
    """The places of one chunk.

    Attributes:
        most_bytes: of the chunk; None where it grows.
    """

    def __init__(self, most_bytes: int | None):
        self.most_bytes = most_bytes
        self.size = most_bytes or 0
        self._placed: list[_Place] = []

    def lowest(self, stay: _Stay) -> int | None:
        """The lowest offset at which it overlaps no buffer that is in use at the same time."""
        offset = 0
        for begin, end, other in self._placed:
            if other.begin < stay.end and stay.begin < other.end:
                if begin - offset >= stay.buffer.nbytes:
                    break
                offset = max(offset, end)
        fits = self.most_bytes is None or offset + stay.buffer.nbytes <= self.most_bytes
        return offset if fits else None

    def put(self, stay: _Stay, offset: int) -> None:
        end = offset + stay.buffer.nbytes
        bisect.insort(self._placed, _Place(offset, end, stay), key=lambda place: place.begin)
        self.size = max(self.size, end)

    def used(self) -> list[_Place]:
        """The places and their buffers, by their begin."""
        return sorted(self._placed, key=lambda place: place.stay.begin)


def _pack(stays: Sequence[_Stay], made: Concurrent) -> dict[Buffer, tuple[int, int]]:
    """A place for each buffer, as chunk and offset. Adds the chunks, and the kernels that wait for earlier ones, to
    `made`.
    """
    kept = [stay for stay in stays if stay.end == OPEN]
    others = [stay for stay in stays if stay.end != OPEN]
    made.kept = [stay.buffer.value for stay in kept]
    rooms = min((_placed(kept, sorted(others, key=by)) for by in PACKED_BY), key=lambda rooms: rooms[0].size)
    made.sizes = [room.size for room in rooms]
    place = {stay.buffer: (n, begin) for n, room in enumerate(rooms) for begin, _, stay in room.used()}
    for room in rooms:
        last: list[_Place] = []  # the latest buffer in each part of the chunk
        for begin, end, stay in room.used():
            left: list[_Place] = []
            for b, e, other in last:
                if b < end and begin < e:
                    others = other.buffer.users - {stay.buffer.maker}
                    made.waits.setdefault(stay.buffer.maker, set()).update(others)
                left += [_Place(b, min(e, begin), other)] if b < begin else []
                left += [_Place(max(b, end), e, other)] if end < e else []
            last = [*left, _Place(begin, end, stay)]
    return place


def _placed(kept: Sequence[_Stay], others: Sequence[_Stay]) -> list[_Room]:
    """The chunks with a place for each buffer.

    Args:
        kept: buffers that others read. Each has its own chunk, in this order, which serves the group before.
        others: the other buffers, which get their places in this order.
    """
    rooms = [_Room(None), *(_Room(stay.buffer.nbytes) for stay in kept)]
    chunks = [(stay.buffer.nbytes, stay.begin, room) for room, stay in zip(rooms[1:], kept, strict=True)]
    for room, stay in zip(rooms[1:], kept, strict=True):
        room.put(stay, 0)
    for stay in others:
        # A buffer that others read begins at the beginning of its chunk.
        large = [room for nbytes, begin, room in chunks if nbytes >= stay.buffer.nbytes and stay.end <= begin]
        fitting = ((room, room.lowest(stay)) for room in (*large, rooms[0]))
        room, offset = next((room, offset) for room, offset in fitting if offset is not None)
        room.put(stay, offset)
    return rooms
