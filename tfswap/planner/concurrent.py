"""Kernels of a step that run as one group: each starts as soon as its inputs are computed and its memory is free.

TensorFlow's executor runs every kernel that is ready, without a bound of memory. An order runs one kernel after
another, and most kernels leave cores idle. In a group all kernels between two that change a state are one node
(csrc/core/group_ops.cc). Each buffer has a place in its chunks (group_places.py), from a list schedule (Graham's) whose
live bytes stay within a bound. So the peak is known before the step runs, whichever kernel ends first, and a kernel
that takes longer than its cost delays only its readers.

Invariant: no more than the bound is in use while more than one kernel runs.

Not handled: swaps and recomputation inside of a group. The inputs of a group are held until all of it has ended.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.groups import passes_on_buffers
from tfswap.ir.op_traits import only_waits
from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import Rates
from tfswap.planner.group_requests import Group, Requested
from tfswap.planner.groups import can_join
from tfswap.support.topological import topological

MOST_TRIED = 64
"""The number of ready kernels that are tried for room within the bound."""
LONG_S, SHARED_S = 400e-6, 2e-3
"""Seconds of a kernel on one core. From LONG_S on it uses all cores if other ready kernels leave them idle, from
SHARED_S on in any case: kLongS and kSharedS of csrc/core/group_run.h."""
MOST_WEIGHED = 8
"""The number of kernels in the midst of a group whose bytes are added up for `least_bytes`."""
URGENT_GAIN = 1.01
"""The gain in time for which the most urgent kernels start first, which holds more bytes."""


class Buffer:
    """A buffer of a group.

    Attributes:
        nbytes: rounded.
        maker: the kernel that requests it.
        users: the kernels that make or read it.
        stays: whether anything outside of the group reads it.
        value: the latest value in it; -1 for a temporary.
        begin: the event at which it is requested.
        freed: the event at which its maker frees it, for a temporary that is freed before the others; otherwise 0.
    """

    __slots__ = ("begin", "freed", "maker", "nbytes", "stays", "users", "value")

    def __init__(self, nbytes: int, maker: int, begin: int):
        self.nbytes, self.maker, self.begin = nbytes, maker, begin
        self.freed = 0
        self.users: set[int] = {maker}
        self.stays = False
        self.value = -1


def find_members(flow: Dataflow, order: Sequence[int]) -> list[list[int]]:
    """Groups of a step: kernels that depend on equally many kernels that can't be in a group, in their order.

    Kernels are left out if only kernels outside of the group read them and they make more bytes than they free.
    """
    device = flow.nodes[order[0]].device if order else ""
    can = {i for i in order if flow.nodes[i].device == device and can_join(flow, i) and _makes_all(flow, i)}
    # By node: the number of kernels outside of groups on its longest path; whether the path ends with a group's kernel.
    level: dict[int, tuple[int, bool]] = {}
    edges = _edges(flow)
    order_of_all = topological(edges)
    if len(order_of_all) < len(edges):
        return []  # a cycle: edges without memory contradict an order of kernels
    for i in order_of_all:
        before = [level[d] for d in edges[i]]
        # Anything else between two kernels of a group would close a cycle.
        if i in can or passes_on_buffers(flow, i) or only_waits(flow.nodes[i].op):
            most = max((count for count, _ in before), default=0)
            level[i] = most, i in can or (most, True) in before
        else:
            level[i] = max((count + is_last for count, is_last in before), default=0), False
    number = {i: count for i, (count, _) in level.items()}
    members = _without_ends(flow, can, number, order_of_all, edges)
    groups: dict[int, list[int]] = {}
    for i in order:
        if i in members:
            groups.setdefault(number[i], []).append(i)
    return [group for _, group in sorted(groups.items()) if len(group) > 1]


def _edges(flow: Dataflow) -> list[set[int]]:
    """By node, its predecessors: by dependency, and by every edge of the graph, also those without memory, such as of a
    shape. A node that joins several others must not close a cycle of any of these.
    """
    place = {node: i for i, node in enumerate(flow.nodes)}
    return [
        set()  # constants need not wait
        if node in flow.constants
        else {*flow.deps[i], *(place[t.node] for t in node.inputs), *(place[c] for c in node.controls)}
        for i, node in enumerate(flow.nodes)
    ]


def _makes_all(flow: Dataflow, i: int) -> bool:
    """Whether no output of a kernel shares a buffer with an input."""
    made = {v for _, v in flow.makes[i]}
    node = flow.nodes[i]
    return all(flow.value_of.get((node, o)) in made for o in range(len(node.outputs)))


def _without_ends(
    flow: Dataflow,
    can: Collection[int],
    number: Mapping[int, int],
    order_of_all: Sequence[int],
    edges: Sequence[Collection[int]],
) -> set[int]:
    """The kernels of groups without those that no kernel of their group waits for and that make more bytes than they
    free.

    Args:
        can: all kernels of groups.
        number: the group of each node, or the one in which it is between two kernels.
        order_of_all: an order of all nodes.
        edges: as of `_edges`.
    """
    members = set(can)
    readers: dict[int, set[int]] = {}
    for i, held in enumerate(flow.held):
        for v in held:
            readers.setdefault(v, set()).add(i)
    awaited: set[int] = set()  # nodes that a kernel of their group waits for, or a node on the way to one

    def frees(i: int) -> int:
        """Bytes of inputs that only kernels of the group read, this one last."""

        def is_of_group(kernel: int) -> bool:
            return kernel in members and number[kernel] == number[i]

        own = {v for v in flow.held[i] if is_of_group(flow.values[v].producer) and v not in flow.fetched}
        return sum(flow.values[v].nbytes for v in own if all(map(is_of_group, readers[v])))

    for i in reversed(order_of_all):
        if i in members and i not in awaited and frees(i) < sum(flow.values[v].nbytes for _, v in flow.makes[i]):
            members.discard(i)
        if i in members or i in awaited:
            awaited.update(d for d in edges[i] if number[d] == number[i])
    return members


def schedule_group(group: Group, cost_s: Sequence[float], rates: Rates, most_bytes: float) -> ListSchedule:
    """The faster of two schedules of a group, each within the memory.

    In one, kernels start in the order of the group, which holds few bytes. In the other, the kernels before the longest
    path of work start first, and those that no kernel waits for run late, while another kernel uses only one core.
    """
    low = ListSchedule(group, group.members, cost_s, rates, most_bytes)
    urgent = ListSchedule(group, _by_urgency(group, cost_s), cost_s, rates, most_bytes)
    fits = urgent.live_bytes <= max(most_bytes, low.live_bytes)
    made = urgent if fits and urgent.now_s * URGENT_GAIN < low.now_s else low
    made.allowed_bytes = max(low.allowed_bytes, urgent.allowed_bytes, made.live_bytes)
    return made


def least_bytes(group: Group) -> int:
    """A lower bound of the bytes that a group holds at one time, whatever its schedule.

    It is the most of: what one kernel requests; what others read, which the group holds at its end; and for some
    kernels what their predecessors make and their successors read, which is held while they run.
    """
    made = [(i, v) for i in group.members for _, v in group.flow.makes[i]]
    kept = sum(group.nbytes[v] for _, v in made if v in group.outside)
    largest = max(group.requested(i, tuple(group.over[i])).most_bytes for i in group.members)
    bit = {i: 1 << place for place, i in enumerate(group.members)}
    before, after = dict.fromkeys(group.members, 0), dict.fromkeys(group.members, 0)
    for i in group.members:
        for d in group.before[i]:
            before[i] |= before[d] | bit[d]
    for i in reversed(group.members):
        for d in group.before[i]:
            after[d] |= after[i] | bit[i]
    readers = {v: sum(bit[user] for user in users) for v, users in group.users.items()}
    middle = sorted(group.members, key=lambda i: -min(before[i].bit_count(), after[i].bit_count()))[:MOST_WEIGHED]
    held = (
        sum(
            group.nbytes[v]
            for maker, v in made
            if bit[maker] & before[i] and (v in group.outside or readers.get(v, 0) & after[i])
        )
        for i in middle
    )
    return max(kept, largest, *held)


def _by_urgency(group: Group, cost_s: Sequence[float]) -> list[int]:
    """Kernels of a group by the time of the longest path that starts with them, the longest first."""
    members = group.members
    left_s = dict.fromkeys(members, 0.0)  # of the longest path after the kernel
    place = {i: p for p, i in enumerate(members)}
    for i in reversed(members):
        left_s[i] += cost_s[i]
        for d in group.before[i]:
            left_s[d] = max(left_s[d], left_s[i])
    return sorted(members, key=lambda i: (-left_s[i], place[i]))


@dataclass
class _Running:
    """A kernel that runs.

    Attributes:
        left_s: its remaining core seconds.
        cores: the number of cores that it can use.
    """

    left_s: float
    cores: float


class ListSchedule:
    """A schedule in which no more than `most_bytes` are in use while more than one kernel runs.

    Args:
        order: the group's kernels; those that are ready start in this order where there is room.

    Attributes:
        flow: the facts of the step.
        now_s: when the last kernel has ended.
        live_bytes: the most bytes in use at one time.
        allowed_bytes: a bound from this to `most_bytes` gives the same schedule.
        order: kernels as they start.
        ends: by kernel, the event at which it ends. Requests are events too.
        buffers: of the group.
        served: by kernel, the buffers of its requests, and the position of the input that each writes over.
        waits: by kernel that writes over an input, the earlier readers of that input.
    """

    def __init__(self, group: Group, order: Sequence[int], cost_s: Sequence[float], rates: Rates, most_bytes: float):
        self.flow, self._group, self._members = group.flow, group, order
        self._works = group.works(cost_s, rates)
        self._cost_s, self._most_bytes = cost_s, most_bytes
        self._place = {i: p for p, i in enumerate(order)}
        self._place_s = [cost_s[i] for i in order]
        self._readers: dict[int, list[int]] = {i: [] for i in order}
        self._waits_for: dict[int, int] = {}
        for i in order:
            self._waits_for[i] = len(group.before[i])
            for d in group.before[i]:
                self._readers[d].append(i)
        self._lies: dict[int, Buffer] = {}  # by value
        self._left = {v: len(users) for v, users in group.users.items()}
        self._live_bytes = self.live_bytes = 0
        self.allowed_bytes = 0
        self._held: dict[int, int] = {}  # by running kernel, the bytes that it holds
        self._event = 0
        self._cores = max(1, int(rates.cores))
        self.now_s = 0.0
        self._ready = [p for p, i in enumerate(order) if not self._waits_for[i]]
        self._running: dict[int, _Running] = {}  # by place
        self.order: list[int] = []
        self.ends = dict.fromkeys(order, 0)
        self._first = 0  # the place of the first that has not started
        self._serial = _Serial(group, order)
        self.buffers: list[Buffer] = []
        self.served: dict[int, list[tuple[Buffer, int | None]]] = {}
        self.waits: dict[int, set[int]] = {}
        self._run()

    def _run(self) -> None:
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
        """The work of a kernel and its number of cores, as in csrc/core/group_run.h."""
        one_core_s, cores = self._works[i]
        if one_core_s < SHARED_S and (self._running or self._fitting(concurrent=True) is not None):
            others_s = sum(map(self._place_s.__getitem__, self._ready[:MOST_TRIED]))
            if one_core_s < LONG_S or others_s >= one_core_s * (self._cores - 1):
                return _Running(one_core_s, 1.0)
        return _Running(self._cost_s[i] * cores, cores)

    def _fitting(self, *, concurrent: bool) -> int | None:
        """The place of the first ready kernel that the bound has room for; None if there is none.

        Args:
            concurrent: whether another kernel runs.
        """
        for place in self._ready[:MOST_TRIED]:
            if place == self._first and not concurrent:
                return place
            _, needed, made = self._requested(self._members[place])
            most_bytes = self._live_bytes + needed
            if most_bytes > self._most_bytes:
                continue
            # Those before it can still run one after another.
            if made:
                most_bytes = max(most_bytes, self._serial.most_bytes(self._first, place) + made)
            if most_bytes <= self._most_bytes:
                self.allowed_bytes = max(self.allowed_bytes, most_bytes)
                return place
        return None

    def _requested(self, i: int) -> Requested:
        """The requests of a kernel that starts now. It writes over a value in the group's memory that it reads last."""
        lies, left, over = self._lies, self._left, self._group.over[i]
        last = tuple([v for v in over if v in lies and left[v] == 1]) if over else ()
        return self._group.requested(i, last)

    def _request(self, i: int) -> None:
        """A kernel makes its requests."""
        self._serial.start(i, self._first)
        served = self.served[i] = []
        requested = self._requested(i)
        self._held[i] = requested.most_bytes
        self._live_bytes += self._held[i]
        self.live_bytes = max(self.live_bytes, self._live_bytes)
        temporaries: list[Buffer] = []
        for kind, subject, nbytes, over in requested.requests:
            self._event += 1
            if kind == "free":
                temporaries[subject].freed = self._event
                continue
            if over is None:
                buffer = Buffer(nbytes, i, self._event)
                self.buffers.append(buffer)
            else:
                self._serial.end(over, self._first)
                buffer = self._lies[over]
                self.waits.setdefault(i, set()).update(buffer.users - {i})
            if nbytes:
                served.append((buffer, None if over is None else self._group.position(i, over)))
            if kind == "temp":
                temporaries.append(buffer)
            else:
                self._lies[subject] = buffer
                buffer.users |= {i, *self._group.users.get(subject, ())}
                buffer.value = subject
                buffer.stays = subject in self._group.outside

    def _advance(self) -> int:
        """Advance the time until a kernel ends; returns its place."""
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
        own = [buffer for buffer, over in self.served[i] if over is None]
        self._live_bytes += sum(b.nbytes for b in own if b.value >= 0) - self._held.pop(i)
        for v, is_made in self._group.ended[i]:
            buffer = self._lies.get(v)
            if buffer is not None:
                if not is_made:
                    self._left[v] -= 1
                if not self._left.get(v) and buffer.value == v and not buffer.stays:
                    self._live_bytes -= buffer.nbytes
                    self._serial.end(v, self._first)
        for reader in self._readers[i]:
            self._waits_for[reader] -= 1
            if not self._waits_for[reader]:
                bisect.insort(self._ready, self._place[reader])


class _Serial:
    """The live bytes if the kernels that have not started run one after another, in their order.

    Args:
        members: the kernels in that order; a place is a position there.
    """

    def __init__(self, group: Group, members: Sequence[int]):
        self._flow = flow = group.flow
        self._nbytes = group.nbytes
        self._place = {i: p for p, i in enumerate(members)}
        self._live = np.zeros(len(members), np.int64)
        self._spans: dict[int, tuple[int, int]] = {}  # by value, the places between which it is live
        for place, i in enumerate(members):
            own = temporary_peak(flow, i)
            self._live[place] += own
            for _, v in flow.makes[i]:
                last = max((self._place[user] for user in group.users.get(v, ())), default=place)
                self._spans[v] = place, len(members) if v in group.outside else last + 1
        for place, i in enumerate(members):
            for kind, _, nbytes, candidates in flow.requests[i]:
                if kind == "out" and nbytes:
                    over = next((v for v in candidates if self._spans.get(v, (0, 0))[1] == place + 1), None)
                    if over is not None and group.position(i, over) is not None:
                        self._spans[over] = self._spans[over][0], place
        for v, (begin, end) in self._spans.items():
            self._add(v, begin, end, 1)

    def _add(self, v: int, begin: int, end: int, sign: int) -> None:
        self._live[begin:end] += sign * self._nbytes[v]

    def most_bytes(self, begin: int, end: int) -> int:
        """The most live bytes at these places."""
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
    """The most bytes of a kernel's temporaries at one time, rounded."""
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
