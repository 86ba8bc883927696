"""Kernels of a step that run as one group: each starts as soon as what it reads is there, and its memory is free.

TensorFlow's executor runs whatever is ready, and holds what that takes. An order runs one kernel after another, and
most kernels leave cores idle. Here all kernels between two that change a state are one node (csrc/core/group_ops.cc).
It requests one chunk for what the group alone uses, and one for each tensor that others read. Each buffer has a place
in one of these chunks, from a list schedule whose live bytes stay within a bound (Graham's). Where a place has served
another buffer before, the kernel waits for all that used that one. So the peak is known before the step runs, whichever
kernel ends first, and a kernel that takes longer than its cost delays only what needs it.

Invariant: two buffers whose places overlap are never in use at the same time, in any run.

Not handled: swaps and recomputation inside of a group; what a group reads is held until all of it has ended.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tfswap.analysis.cost import cores_used, one_core_seconds
from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.groups import Concurrent, Served, reserved_bytes
from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import Rates
from tfswap.planner.groups import can_join

LOOKED_AT = 64
"""So many ready kernels are looked at for one that the bound has room for."""
LONG_S, SHARED_S = 400e-6, 2e-3
"""A kernel that takes so long on one core shares its work among all where others that are ready leave them idle, or in
any case: kLongS and kSharedS of csrc/core/group_ops.cc."""
OPEN = 1 << 60
"""The end of what others read."""


class _Buffer:
    """A buffer of a group.

    Attributes:
        nbytes: rounded.
        maker: the kernel that requests it.
        users: the kernels that make or read it.
        stays: whether anything outside of the group reads it.
        value: the last that lies there; -1 for a temporary.
        begin: the event at which it is requested.
        freed: the event at which its maker gives it back, for a temporary that goes before the others; otherwise 0.
    """

    __slots__ = ("begin", "freed", "maker", "nbytes", "stays", "users", "value")

    def __init__(self, nbytes: int, maker: int, begin: int):
        self.nbytes, self.maker, self.begin = nbytes, maker, begin
        self.freed = 0
        self.users: set[int] = {maker}
        self.stays = False
        self.value = -1


class _Stay(NamedTuple):
    """A buffer, and the events of the schedule between which it is in use."""

    buffer: _Buffer
    begin: int
    end: int


def find_members(flow: Dataflow, order: Sequence[int]) -> list[list[int]]:
    """Groups of a step: kernels that depend on equally many others that can't be of a group, in their order.

    What only kernels outside of a group read, and what takes more room than what it is made from, is left out.
    """
    level: list[
        tuple[int, bool]
    ] = []  # how many kernels of no group, one after another; whether one of a group is last
    groups: dict[int, list[int]] = {}
    device = flow.nodes[order[0]].device if order else ""
    can = {i for i in order if flow.nodes[i].device == device and can_join(flow, i) and _makes_all(flow, i)}
    for i in range(len(flow.nodes)):
        deps = flow.deps[i]
        passes = i in can or not flow.is_kernel[i]
        if passes:
            most = max((level[d][0] for d in deps), default=0)
            level.append((most, i in can or any(level[d] == (most, True) for d in deps)))
        else:
            level.append((max((level[d][0] + level[d][1] for d in deps), default=0), False))
        if i in can:
            groups.setdefault(level[i][0], []).append(i)
    place = {i: p for p, i in enumerate(order)}
    found = [sorted(group, key=place.__getitem__) for _, group in sorted(groups.items())]
    return [kept for group in found if len(kept := _without_ends(flow, group)) > 1]


def _makes_all(flow: Dataflow, i: int) -> bool:
    """Whether no output of a kernel is what it reads."""
    made = {v for _, v in flow.makes[i]}
    node = flow.nodes[i]
    return all(flow.value_of.get((node, o)) in made for o in range(len(node.outputs)))


def _without_ends(flow: Dataflow, group: Sequence[int]) -> list[int]:
    members = set(group)
    readers: dict[int, set[int]] = {}
    for i, held in enumerate(flow.held):
        for v in held:
            readers.setdefault(v, set()).add(i)
    for i in sorted(group, reverse=True):
        made = [v for _, v in flow.makes[i]]
        if any(readers.get(v, set()) & members for v in made):
            continue
        own = {v for v in flow.held[i] if flow.values[v].producer in members}
        newly = sum(flow.values[v].nbytes for v in own if readers[v] <= members and v not in flow.fetched)
        if newly < sum(flow.values[v].nbytes for v in made):
            members.discard(i)
    return [i for i in group if i in members]


def schedule_group(
    flow: Dataflow, members: Sequence[int], cost_s: Sequence[float], rates: Rates, most_bytes: float, threads: int
) -> Concurrent:
    """The schedule of a group in which no more than `most_bytes` are in use while more than one kernel runs.

    Args:
        members: its kernels in an order that holds little.
        threads: so many kernels run at a time at most.
    """
    run = _List(flow, members, cost_s, rates, most_bytes)
    run.run()
    reserved = reserved_bytes((flow.process_bytes.get(i, 0) for i in members), threads)
    made = Concurrent(run.order, reserved=reserved, seconds=run.now_s)
    stays = [
        _Stay(b, b.begin, OPEN if b.stays else b.freed or max(run.ends[user] for user in b.users)) for b in run.buffers
    ]
    place = _pack(stays, made)
    for i, others in run.waits.items():
        made.waits.setdefault(i, set()).update(others)
    for i, served in run.served.items():
        made.served[i] = [Served(place[b][0], over, place[b][1]) for b, over in served]
    return made


class _Tensors:
    """Who holds the values of a group, besides the kernels that make them.

    Attributes:
        users: by value, the kernels of the group that read it.
        outside: values that others read.
    """

    def __init__(self, flow: Dataflow, members: Sequence[int]):
        group = set(members)
        self._flow = flow
        self.users: dict[int, set[int]] = {}
        self.outside = set(flow.fetched)
        for i, held in enumerate(flow.held):
            for v in held:
                if i in group:
                    self.users.setdefault(v, set()).add(i)
                else:
                    self.outside.add(v)

    def position(self, i: int, v: int) -> int | None:
        """The input of a kernel that is a value; None where several are."""
        found = [p for p, t in enumerate(self._flow.nodes[i].inputs) if self._flow.value_of.get((t.node, t.index)) == v]
        return found[0] if len(found) == 1 else None


@dataclass
class _Running:
    """A kernel that runs.

    Attributes:
        left_s: core seconds that it still takes.
        cores: that it can use.
    """

    left_s: float
    cores: float


class _List:
    """A list schedule.

    Attributes:
        order: kernels as they start.
        ends: by kernel, the event at which it ends. Requests are events too.
        buffers: of the group.
        served: by kernel, the buffers of its requests, and the position of the input that each writes over.
        waits: by kernel that writes over what it reads, who reads that before.
    """

    def __init__(
        self, flow: Dataflow, members: Sequence[int], cost_s: Sequence[float], rates: Rates, most_bytes: float
    ):
        self._flow, self._members, self._rates = flow, members, rates
        self._cost_s, self._most_bytes = cost_s, most_bytes
        self._place = {i: p for p, i in enumerate(members)}
        self._tensors = _Tensors(flow, members)
        self._readers: dict[int, list[int]] = {i: [] for i in members}
        self._waits_for: dict[int, int] = {}
        for i in members:
            before = [d for d in flow.kernels_before(i) if d in self._place]
            self._waits_for[i] = len(before)
            for d in before:
                self._readers[d].append(i)
        self._lies: dict[int, _Buffer] = {}  # by value
        self._left = {v: len(users) for v, users in self._tensors.users.items()}
        self._live_bytes = 0
        self._held: dict[int, int] = {}  # by kernel that runs, what it holds
        self._event = 0
        self._cores = max(1, int(self._rates.cores))
        self.now_s = 0.0
        self._ready = [p for p, i in enumerate(members) if not self._waits_for[i]]
        self._running: dict[int, _Running] = {}  # by place
        self.order: list[int] = []
        self.ends = dict.fromkeys(members, 0)
        self._first = 0  # the place of the first that has not started
        self._serial = _Serial(flow, members, self._tensors)
        self.buffers: list[_Buffer] = []
        self.served: dict[int, list[tuple[_Buffer, int | None]]] = {}
        self.waits: dict[int, set[int]] = {}

    def run(self) -> None:
        while self._ready or self._running:
            place = self._fitting(concurrent=bool(self._running)) if len(self._running) < self._cores else None
            if place is None:
                self._end()
                continue
            self._ready.remove(place)
            i = self._members[place]
            self.order.append(i)
            self._request(i)
            while self._first < len(self._members) and self._members[self._first] in self.served:
                self._first += 1
            self._running[place] = self._started(i)

    def _started(self, i: int) -> _Running:
        """What a kernel has to do on how many cores: as csrc/core/group_ops.cc decides."""
        node, seconds = self._flow.nodes[i], self._cost_s[i]
        one_core_s = one_core_seconds(node, seconds, self._rates)
        if one_core_s < SHARED_S and (self._running or self._fitting(concurrent=True) is not None):
            others_s = sum(self._cost_s[self._members[place]] for place in self._ready[:LOOKED_AT])
            if one_core_s < LONG_S or others_s >= one_core_s * (self._cores - 1):
                return _Running(one_core_s, 1.0)
        cores = cores_used(node, self._rates)
        return _Running(seconds * cores, cores)

    def _fitting(self, *, concurrent: bool) -> int | None:
        """The first that is ready and that there is room for, by its place; None where there is none.

        Args:
            concurrent: whether another one runs.
        """
        for place in self._ready[:LOOKED_AT]:
            if place == self._first and not concurrent:
                return place
            i = self._members[place]
            if self._live_bytes + self._needed(i) > self._most_bytes:
                continue
            # Those before it can still run one after another.
            made = sum(nbytes for kind, _, nbytes, _ in self._requests(i) if kind == "out")
            if not made or self._serial.most_bytes(self._first, place) + made <= self._most_bytes:
                return place
        return None

    def _needed(self, i: int) -> int:
        """The most that a kernel has requested at a time."""
        now = most = 0
        temporaries: list[int] = []
        for kind, subject, nbytes, over in self._requests(i):
            if kind == "free":
                now -= temporaries[subject]
            else:
                now += nbytes if over is None else 0
                most = max(most, now)
            if kind == "temp":
                temporaries.append(nbytes)
        return most

    def _requests(self, i: int) -> list[tuple[str, int, int, int | None]]:
        """What a kernel requests: of which kind, for which value, rounded bytes; and the value that it writes over."""
        found: list[tuple[str, int, int, int | None]] = []
        taken: set[int] = set()
        for kind, subject, nbytes, candidates in self._flow.requests[i]:
            if not nbytes and kind == "out":
                continue
            fitting = (v for v in candidates if kind == "out" and v not in taken and self._is_last(i, v))
            over = next(fitting, None)
            if over is not None:
                taken.add(over)
            found.append((kind, subject, round_up(nbytes), over))
        return found

    def _is_last(self, i: int, v: int) -> bool:
        """Whether a kernel is the last that reads a value, which lies in the group's memory, as one input."""
        return (
            v in self._lies
            and v not in self._tensors.outside
            and self._left[v] == 1
            and self._tensors.position(i, v) is not None
        )

    def _request(self, i: int) -> None:
        """A kernel makes its requests."""
        self._serial.start(i, self._first)
        served = self.served[i] = []
        self._held[i] = self._needed(i)
        self._live_bytes += self._held[i]
        temporaries: list[_Buffer] = []
        for kind, subject, nbytes, over in self._requests(i):
            self._event += 1
            if kind == "free":
                temporaries[subject].freed = self._event
                continue
            if over is None:
                buffer = _Buffer(nbytes, i, self._event)
                self.buffers.append(buffer)
            else:
                self._serial.end(over, self._first)
                buffer = self._lies[over]
                self.waits.setdefault(i, set()).update(buffer.users - {i})
            if nbytes:
                served.append((buffer, None if over is None else self._tensors.position(i, over)))
            if kind == "temp":
                temporaries.append(buffer)
            else:
                self._lies[subject] = buffer
                buffer.users |= {i, *self._tensors.users.get(subject, ())}
                buffer.value = subject
                buffer.stays = subject in self._tensors.outside

    def _advance(self) -> int:
        """Let time pass until a kernel ends; returns its place."""
        given: dict[int, float] = {}
        free = float(self._cores)
        for n, (place, run) in enumerate(sorted(self._running.items(), key=lambda entry: (entry[1].cores, entry[0]))):
            given[place] = min(run.cores, free / (len(self._running) - n))
            free -= given[place]
        passed_s, place = min((run.left_s / given[place], place) for place, run in self._running.items())
        for other, run in self._running.items():
            run.left_s -= passed_s * given[other]
        self.now_s += passed_s
        return place

    def _end(self) -> None:
        place = self._advance()
        i = self._members[place]
        del self._running[place]
        self._event += 1
        self.ends[i] = self._event
        made = {v for _, v in self._flow.makes[i]}
        own = [buffer for buffer, over in self.served[i] if over is None]
        self._live_bytes += sum(b.nbytes for b in own if b.value >= 0) - self._held.pop(i)
        for v in {*self._flow.held[i], *made}:
            if v in self._lies:
                if v not in made:
                    self._left[v] -= 1
                buffer = self._lies[v]
                if not self._left.get(v) and buffer.value == v and not buffer.stays:
                    self._live_bytes -= buffer.nbytes
                    self._serial.end(v, self._first)
        for reader in self._readers[i]:
            self._waits_for[reader] -= 1
            if not self._waits_for[reader]:
                bisect.insort(self._ready, self._place[reader])


class _Serial:
    """What is live while kernels that have not started run one after another, in their order, once others have ended.

    Args:
        members: the kernels in that order; a place is a position there.
    """

    def __init__(self, flow: Dataflow, members: Sequence[int], tensors: _Tensors):
        self._flow = flow
        self._place = {i: p for p, i in enumerate(members)}
        self._live = np.zeros(len(members), np.int64)
        self._spans: dict[int, tuple[int, int]] = {}  # by value, the places between which it is live
        for place, i in enumerate(members):
            own = temporary_peak(flow, i)
            self._live[place] += own
            for _, v in flow.makes[i]:
                last = max((self._place[user] for user in tensors.users.get(v, ())), default=place)
                self._spans[v] = place, len(members) if v in tensors.outside else last + 1
        for place, i in enumerate(members):
            for kind, _, nbytes, candidates in flow.requests[i]:
                if kind == "out" and nbytes:
                    over = next((v for v in candidates if self._spans.get(v, (0, 0))[1] == place + 1), None)
                    if over is not None and tensors.position(i, over) is not None:
                        self._spans[over] = self._spans[over][0], place
        for v, (begin, end) in self._spans.items():
            self._add(v, begin, end, 1)

    def _add(self, v: int, begin: int, end: int, sign: int) -> None:
        self._live[begin:end] += sign * round_up(self._flow.values[v].nbytes)

    def most_bytes(self, begin: int, end: int) -> int:
        """The most that is live at these places."""
        return int(self._live[begin:end].max(initial=0))

    def start(self, i: int, first: int) -> None:
        """A kernel starts before those from the place `first` on."""
        place = self._place[i]
        for _, v in self._flow.makes[i]:
            self._add(v, first, place, 1)
        self._live[place] = 0

    def end(self, v: int, first: int) -> None:
        """A value is free before those from the place `first` on."""
        self._add(v, first, self._spans[v][1], -1)


def temporary_peak(flow: Dataflow, i: int) -> int:
    """The most that a kernel's temporaries take at a time, rounded."""
    sizes: list[int] = []
    now = most = 0
    for kind, subject, nbytes, _ in flow.requests[i]:
        if kind == "temp":
            sizes.append(round_up(nbytes))
            now += sizes[-1]
            most = max(most, now)
        elif kind == "free":
            now -= sizes[subject]
    return most


PACKED_BY: tuple[Callable[[_Stay], tuple[int, ...]], ...] = (
    lambda stay: (-stay.buffer.nbytes, stay.begin),
    lambda stay: (-stay.buffer.nbytes * (stay.end - stay.begin), stay.begin),
    lambda stay: (stay.begin,),
)
"""In which order buffers get their places: the chunks that take least are those of the group."""


class _Place(NamedTuple):
    """A part of a chunk, and what lies there."""

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
        """The lowest offset at which it fits next to all that is in use at the same time."""
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
        """The places and what lies there, by when that begins."""
        return sorted(self._placed, key=lambda place: place.stay.begin)


def _pack(stays: Sequence[_Stay], made: Concurrent) -> dict[_Buffer, tuple[int, int]]:
    """A place for each buffer, as its chunk and offset. `made` gets its chunks, and what waits for an earlier one."""
    kept = [stay for stay in stays if stay.end == OPEN]
    others = [stay for stay in stays if stay.end != OPEN]
    made.kept = [stay.buffer.value for stay in kept]
    rooms = min((_placed(kept, sorted(others, key=by)) for by in PACKED_BY), key=lambda rooms: rooms[0].size)
    made.sizes = [room.size for room in rooms]
    place = {stay.buffer: (n, begin) for n, room in enumerate(rooms) for begin, _, stay in room.used()}
    for room in rooms:
        last: list[_Place] = []  # what was in each part of the chunk last
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
        kept: what others read: each has a chunk of its own, in this order, which serves the group before.
        others: they get their places in this order.
    """
    rooms = [_Room(None), *(_Room(stay.buffer.nbytes) for stay in kept)]
    for room, stay in zip(rooms[1:], kept, strict=True):
        room.put(stay, 0)
    for stay in others:
        fitting = ((room, room.lowest(stay)) for room in (*rooms[1:], rooms[0]))
        room, offset = next((room, offset) for room, offset in fitting if offset is not None)
        room.put(stay, offset)
    return rooms
