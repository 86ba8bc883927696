"""Records a simulated step for reports: the bytes of the arena that each tensor holds, over time.

A planned step is replayed as by `simulate_memory`, an unoptimised one as by `simulate_unordered`, on an allocator that
records. States of the arena are numbered: state n is its content after n requests and releases.

Invariant: in every state the held bytes and `others_bytes` add up to the simulated allocator's bytes in use, chunks
counted whole, and the maximum of all states is the peak of `judge_memory`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import Rates
from tfswap.plan.schedule import AWAIT, COPIES, HOST_ONLY, KERNELS, RELEASE, CopyTiers, Step, at_extremes
from tfswap.simulator.arena_snapshot import Allocator, ArenaSnapshot, filled
from tfswap.simulator.replay import MAX_REPEATS, Buffer, Replay
from tfswap.simulator.timing import Span, Timing, simulate_time

NO_ID = -1


class Hold(NamedTuple):
    """The time of one buffer in the arena.

    Attributes:
        value: the value in the buffer; NO_ID for a kernel's temporary.
        kernel: the kernel of a temporary; NO_ID for the rest of a chunk that a split keeps back.
        nbytes: of the chunk; for persistent tensors, of the request.
        first, last: its states, the last one excluded.
    """

    value: int
    kernel: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Record:
    """One run of a step.

    Attributes:
        flow: the facts that it was replayed with.
        holds: the buffers in the arena, by their first state.
        in_use_bytes: by state, the allocator's bytes in use.
        began_s: by state, its begin in seconds from the step's start, in ascending order.
        total_s: the end of the last kernel, in seconds.
    """

    flow: Dataflow
    holds: tuple[Hold, ...]
    in_use_bytes: array[int]
    began_s: array[float]
    total_s: float

    @property
    def peak_bytes(self) -> int:
        return max(self.in_use_bytes)

    @property
    def peak_state(self) -> int:
        return self.in_use_bytes.index(self.peak_bytes)


@dataclass(frozen=True)
class PlannedRecord(Record):
    """One run of a planned step.

    Attributes:
        steps: its schedule.
        spans: the times of each step of the schedule.
        timing: the timing of the schedule.
        tiers: of swapped values, by their numbers in `flow`.
    """

    steps: tuple[Step, ...]
    spans: tuple[Span, ...]
    timing: Timing
    tiers: CopyTiers


class Recorder:
    """An allocator that records the calls of another one.

    Args:
        there: the first entries: value, address (-1 where unknown) and bytes.
        clock: gives the time.

    Attributes:
        kernel: the kernel of the next requests, unless these are `give`n to a value.
        used, began_s: as `Record` has them.
    """

    def __init__(self, arena: Allocator, there: Collection[tuple[int, int, int]], clock: Callable[[], float]):
        self._arena = arena
        self._clock = clock
        self.kernel = NO_ID
        self._closed: list[Hold] = []
        self._unplaced = [Hold(value, NO_ID, nbytes, 0, 0) for value, address, nbytes in there if address < 0]
        self._open = {a: Hold(value, NO_ID, nbytes, 0, 0) for value, a, nbytes in there if a >= 0}
        self.used = array("q", [arena.in_use_bytes])
        self.began_s = array("d", [0.0])

    @property
    def in_use_bytes(self) -> int:
        return self._arena.in_use_bytes

    @property
    def peak_bytes(self) -> int:
        return self._arena.peak_bytes

    @peak_bytes.setter
    def peak_bytes(self, peak_bytes: int) -> None:
        self._arena.peak_bytes = peak_bytes

    def allocate(self, size_bytes: int) -> int:
        return self._came(self._arena.allocate(size_bytes))

    def split(self, sizes: Sequence[int]) -> list[int]:
        kernel, self.kernel = self.kernel, NO_ID
        addresses = [self._came(address) for address in self._arena.split(sizes)]
        self.kernel = kernel
        return addresses

    def split_all(self) -> None:
        self._arena.split_all()

    def free(self, address: int) -> None:
        self._arena.free(address)
        if address >= 0:
            self._next_state()
            if (hold := self._open.pop(address, None)) is not None:
                self._close(hold)

    def give(self, address: int, value: int) -> None:
        """Give the buffer at `address` to `value`: since its request, or from now on if it was another value's."""
        hold = self._open.get(address)
        if hold is None or hold.value == value:
            return
        if hold.value == NO_ID:
            self._open[address] = hold._replace(value=value, kernel=NO_ID)
            return
        self._close(hold)
        self._open[address] = hold._replace(value=value, first=len(self.used) - 1)

    def finished(self) -> list[Hold]:
        """All holds of a step that has ended."""
        last = len(self.used)
        still = (*self._unplaced, *self._open.values())
        return sorted(
            (*self._closed, *(hold._replace(last=last) for hold in still)), key=lambda h: (h.first, -h.nbytes)
        )

    def stamp(self, since: int) -> None:
        """Set the time of all states from this number on to the present time."""
        for state in range(since, len(self.began_s)):
            self.began_s[state] = self._clock()

    def _came(self, address: int) -> int:
        if address >= 0:
            nbytes = self._arena.in_use_bytes - self.used[-1]
            self._next_state()
            self._open[address] = Hold(NO_ID, self.kernel, nbytes, len(self.used) - 1, 0)
        return address

    def _next_state(self) -> None:
        self.used.append(self._arena.in_use_bytes)
        self.began_s.append(max(self._clock(), self.began_s[-1]))

    def _close(self, hold: Hold) -> None:
        state = len(self.used) - 1
        if hold.first < state:
            self._closed.append(hold._replace(last=state))


class Watched(Replay):
    """A replay whose allocator records each buffer's value.

    Args:
        spans: the times of its schedule, if it has one.

    Attributes:
        notes: the record of the step that is replayed.
        now_s: the time, if there is no schedule.
    """

    def __init__(self, flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot, spans: Sequence[Span] = ()):
        self._inner, addresses = filled(flow, snapshot)
        super().__init__(flow, steps, self._inner, addresses, snapshot)
        self.now_s = 0.0
        self._spans = spans
        self._ending = False
        self.take_notes()

    def take_notes(self) -> None:
        """Record the step that starts now."""
        there = [(v, b.address, round_up(self.flow.values[v].nbytes)) for v, b in self.persistent.items()]
        self.arena = self.notes = Recorder(self._inner, there, self._now)

    def bring_back(self, value: int) -> Buffer:
        buffer = super().bring_back(value)
        self.notes.give(buffer.address, value)
        return buffer

    def begin(self, i: int, buffers: dict[int, Buffer], *, may_forward: bool = True) -> list[int]:
        self._ending = False
        self.notes.kernel = i
        temporaries = super().begin(i, buffers, may_forward=may_forward)
        copied = (update.new for update in self.flow.updates[i] if update.adopted is None and update.new in buffers)
        for v in (*(v for _, v in self.flow.makes[i]), *copied):
            self.notes.give(buffers[v].address, v)
        return temporaries

    def finish(self, i: int, buffers: dict[int, Buffer], temps: list[int]) -> None:
        self._ending = True
        super().finish(i, buffers, temps)
        for update in self.flow.updates[i]:
            if update.adopted is not None:
                self.notes.give(buffers[update.new].address, update.new)

    def _now(self) -> float:
        if not self._spans:
            return self.now_s
        span = self._spans[self.step]
        return span.end_s if self._ending else span.start_s


def record_planned(
    flow: Dataflow,
    steps: Sequence[Step],
    cost_s: Sequence[float],
    rates: Rates,
    *,
    snapshot: ArenaSnapshot,
    tiers: CopyTiers = HOST_ONLY,
    arrivals: Mapping[int, float] = MappingProxyType({}),
) -> PlannedRecord:
    """The run of `steps` with the peak of `judge_memory`: at the worse extreme, and in the highest repeat."""
    spans: list[Span] = []
    timing = simulate_time(flow, steps, cost_s, rates, tiers, spans, arrivals)
    on_lane = _on_compute_lane(flow, steps, spans)
    best: tuple[Dataflow, Sequence[Step], Recorder] | None = None
    for extreme, its in at_extremes(flow, steps):
        replay = Watched(extreme, its, snapshot, on_lane)
        for _ in range(MAX_REPEATS):
            replay.repeat()
            if best is None or max(replay.notes.used) > max(best[2].used):
                best = extreme, its, replay.notes
            if not replay.changed:
                break
            replay.take_notes()
    assert best is not None, "a step has facts"
    extreme, its, notes = best
    total_s = max((span.end_s for span in on_lane), default=0.0)
    its_tiers = {v: tiers[u] for (kind, u), (_, v) in zip(steps, its, strict=True) if kind in COPIES and u in tiers}
    held = tuple(notes.finished())
    return PlannedRecord(extreme, held, notes.used, notes.began_s, total_s, tuple(its), tuple(spans), timing, its_tiers)


def _on_compute_lane(flow: Dataflow, steps: Sequence[Step], spans: Sequence[Span]) -> list[Span]:
    """When each step of the schedule begins and ends on the compute lane, without waiting for copies."""
    now = 0.0
    found: list[Span] = []
    for (kind, subject), span in zip(steps, spans, strict=True):
        if kind in KERNELS and subject not in flow.copying:
            found.append(span)
        else:
            if kind in (RELEASE, AWAIT):
                now = max(now, span.end_s)
            found.append(Span(now, now))
        now = max(now, found[-1].end_s)
    return found
