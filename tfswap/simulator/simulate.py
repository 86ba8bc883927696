"""Judges any schedule, whoever made it: its peak in the real allocator's terms, and its time on three lanes.

Memory follows the executor and the allocator to the byte: outputs are allocated when a kernel runs, an input
is freed when its last reader has run, a kernel takes over an input that nobody else holds. Time is the
compute lane, which the schedule's total order makes serial, and one copy lane in each direction.

Invariant: no solver has a say in it; the same schedule gives the same numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

from tfswap.analysis.cost import concurrent_seconds
from tfswap.analysis.dataflow import Dataflow, Update
from tfswap.kernels.alignment import ALIGNMENT_BYTES, SPLIT_SLACK_BYTES, round_up
from tfswap.kernels.hardware import Rates
from tfswap.plan.schedule import (
    AWAIT,
    COPIES,
    EXACT,
    IN,
    KERNELS,
    LEAD,
    OUT,
    RELEASE,
    RERUN,
    RUN,
    SPLIT,
    Step,
    at_extremes,
    is_exact,
)
from tfswap.simulator.bfc_allocator import Arena, Chunk

TAKEN_PART, MOST_TAKEN_BYTES = 64, 16 << 10
"""Of each hole of an arena that nobody has seen, so much is taken: some dozens of the allocator's least chunks, but a
small part of what a hole has room for."""
MAX_REPEATS = 3


class Allocator(Protocol):
    in_use_bytes: int
    peak_bytes: int

    def allocate(self, size_bytes: int) -> int: ...

    def free(self, address: int) -> None: ...

    def split(self, sizes: Sequence[int]) -> list[int]: ...

    def split_all(self) -> None: ...


class Ledger:
    """Counts bytes as if memory never fragmented: the live bytes, rounded.

    Attributes:
        widest: from now on, count for each request the largest chunk that the allocator hands out for it.
    """

    def __init__(self) -> None:
        self.widest = False
        self.in_use_bytes = 0
        self.peak_bytes = 0
        self._sizes: list[int] = []

    def allocate(self, size_bytes: int) -> int:
        if size_bytes <= 0:
            return -1
        rounded = round_up(size_bytes)
        if self.widest:
            rounded += min(rounded, SPLIT_SLACK_BYTES) - ALIGNMENT_BYTES
        self._sizes.append(rounded)
        self.in_use_bytes += rounded
        if self.in_use_bytes > self.peak_bytes:
            self.peak_bytes = self.in_use_bytes
        return len(self._sizes) - 1

    def copy(self) -> Ledger:
        made = Ledger()
        made.in_use_bytes, made.peak_bytes, made._sizes = self.in_use_bytes, self.peak_bytes, self._sizes.copy()
        return made

    def split(self, sizes: Sequence[int]) -> list[int]:
        return []  # it has no chunks

    def split_all(self) -> None:
        pass

    def free(self, address: int) -> None:
        if address >= 0:
            self.in_use_bytes -= self._sizes[address]


@dataclass
class Memory:
    """What a schedule does to device memory.

    Attributes:
        peak_bytes: the allocator's peak.
        peak_step: index in the schedule of the step at which it is reached.
        before_bytes: per step, what is in use when it starts (first repeat).
        during_bytes: per step, the most in use while it runs (first repeat).
        host_peak_bytes: the most held in host memory at once.
        out_bytes, in_bytes: that travel to the host, and back.
        alive_at_peak: values in device memory at the peak, where detail was asked for.
        forwarded: (value made, value whose buffer it took over), in the order of the first repeat; likewise.
        disk_peak_bytes: the most held on disk at once.
    """

    peak_bytes: int
    peak_step: int
    before_bytes: array[int]
    during_bytes: array[int]
    host_peak_bytes: int
    out_bytes: int
    in_bytes: int
    alive_at_peak: list[int]
    forwarded: list[tuple[int, int]]
    disk_peak_bytes: int = 0


@dataclass(frozen=True)
class ArenaSnapshot:
    """What is in the arena before the step.

    Attributes:
        total_bytes: bytes in use; 0 where unknown: then the step's own variables, arguments and constants.
        chunks: the arena's chunks as (address, bytes, in use), in order of address; empty where unknown. The
            step's variables and arguments are among them.
        instantiated: whether the step's constants are among them too.
        limit_bytes: what the arena may grow to; None where unknown: then it is taken to have no end.
        collects: whether the arena gives up regions that nothing uses, to make room for a larger one.
        shared: feeds of the step that are handles of variables whose buffers tensors hold too: the first update of
            each requests another buffer, and the first stays.
    """

    total_bytes: int = 0
    chunks: tuple[Chunk, ...] = ()
    instantiated: bool = False
    limit_bytes: int | None = None
    collects: bool = False
    shared: frozenset[str] = frozenset()

    def unseen(self) -> ArenaSnapshot:
        """What may be there by the time that a step runs which is planned now.

        Small tensors have come meanwhile. What hangs most on where chunks lie are holes that several tensors just fit
        into: here something lies at the beginning of each.
        """
        if not self.chunks:
            return self
        chunks: list[Chunk] = []
        total_bytes = self.total_bytes
        for address, size, in_use in self.chunks:
            if not in_use and size > ALIGNMENT_BYTES:
                taken = round_up(min(size // TAKEN_PART, MOST_TAKEN_BYTES)) or ALIGNMENT_BYTES
                chunks.append((address, taken, True))
                address, size = address + taken, size - taken
                total_bytes += taken
            chunks.append((address, size, in_use))
        return dataclasses.replace(self, total_bytes=total_bytes, chunks=tuple(chunks))

    def with_allocations(self, sizes: Sequence[int]) -> ArenaSnapshot:
        """This content and tensors of so many bytes."""
        if not self.chunks or not sizes:
            return self
        arena = self.arena()
        for size in sizes:
            arena.allocate(size)
        return dataclasses.replace(self, total_bytes=arena.in_use_bytes, chunks=tuple(arena.chunks))

    def arena(self) -> Arena:
        """A fresh arena with this content."""
        return Arena(self.chunks, self.limit_bytes, self.collects)

    def ledger(self) -> Ledger:
        """A fresh ledger with this content."""
        made = Ledger()
        self.enter(made)
        return made

    def enter(self, ledger: Ledger) -> None:
        """Count this content in an empty ledger, where `fill` does not add it piece by piece."""
        if self.chunks:
            ledger.allocate(self.total_bytes)


NOTHING_KNOWN = ArenaSnapshot()


class Buffer:
    """One allocation: who still reads it, and how often it is pinned (a variable holds it)."""

    __slots__ = ("address", "pins", "refs")

    def __init__(self, address: int, refs: int, pins: int = 0):
        self.address = address
        self.refs = refs
        self.pins = pins


def fill(arena: Allocator, sizes: Sequence[int], snapshot: ArenaSnapshot) -> list[int]:
    """Put the contents before a step into an arena that has `snapshot`'s chunks, as far as they are known.

    Args:
        sizes: as of `added_bytes`.

    Returns the addresses of the persistent values; -1 where they are among the chunks.
    """
    addresses = [arena.allocate(size) for size in sizes]
    arena.allocate(snapshot.total_bytes - arena.in_use_bytes)
    return addresses


def added_bytes(flow: Dataflow, snapshot: ArenaSnapshot) -> tuple[int, ...]:
    """Per persistent value the bytes that it takes besides `snapshot`'s chunks."""
    if not snapshot.chunks:
        return tuple([flow.values[v].nbytes for v in flow.persistent])
    if snapshot.instantiated:
        return (0,) * len(flow.persistent)
    values = [flow.values[v] for v in flow.persistent]
    made = flow.made_with_step
    return tuple([value.nbytes if value.tensor.node in made else 0 for value in values])


@lru_cache(maxsize=8)
def _filled(snapshot: ArenaSnapshot, sizes: tuple[int, ...], live: bool) -> tuple[Arena | Ledger, list[int]]:
    """Plans are judged by the dozen in one arena, and graphs have thousands of constants."""
    arena = snapshot.ledger() if live else snapshot.arena()
    return arena, fill(arena, sizes, snapshot)


def filled(flow: Dataflow, snapshot: ArenaSnapshot, live: bool = False) -> tuple[Arena | Ledger, list[int]]:
    """An arena of one's own, or a ledger, with the contents before the step; the addresses as of `fill`."""
    arena, addresses = _filled(snapshot, added_bytes(flow, snapshot), live)
    return arena.copy(), addresses


class Replay:
    """One machine: buffers by value, an allocator, and what the step's repeats leave behind.

    Args:
        arena: with the contents before the step, as `fill` does it.
        addresses: of the persistent values, in order.
        snapshot: what that is.
    """

    def __init__(
        self, flow: Dataflow, steps: Sequence[Step], arena: Allocator, addresses: Sequence[int], snapshot: ArenaSnapshot
    ):
        self.flow = flow
        self.steps = steps
        self.arena = arena
        self._count_reads()
        self.persistent = {v: Buffer(address, 0, 1) for v, address in zip(flow.persistent, addresses, strict=True)}
        for v in flow.first_versions(snapshot.shared):
            self.persistent[v].pins += 1
        self.forwarded: list[tuple[int, int]] | None = None  # a list to get what takes over what
        self.step = -1  # number of the one that runs
        self.renewed: dict[int, int] = {}  # by value: how many buffers have come after its original
        self.changed = False

    def _count_reads(self) -> None:
        """Count, per value, the reads of its original (`refs`) and of each buffer that comes after it (`late`)."""
        self.refs = refs = [0] * len(self.flow.values)
        self.late: dict[int, list[int]] = {}
        late, held = self.late, self.flow.held
        for kind, subject in self.steps:
            if kind in KERNELS or kind == OUT:
                # A copy reads too: its own edge first, then the handle that it makes, held until RELEASE.
                for v in (subject,) if kind == OUT else held[subject]:
                    if v in late:
                        late[v][-1] += 1
                    else:
                        refs[v] += 1
            if kind == RERUN:
                for _, v in self.flow.makes[subject]:
                    late.setdefault(v, []).append(0)
            elif kind == AWAIT:
                late.setdefault(subject, []).append(0)
        for v in self.flow.fetched:
            refs[v] += 1

    def _next_reads(self, value: int) -> int:
        """How often the buffer of `value` that is made now will be read."""
        later = self.late.get(value)
        if later is None or value not in self.renewed:
            return self.refs[value]
        self.renewed[value] += 1
        return later[self.renewed[value] - 1]

    def repeat(
        self,
        before_bytes: array[int] | None = None,
        during_bytes: array[int] | None = None,
        most_bytes: float = math.inf,
    ) -> int:
        """Run the schedule once; returns the index of the step with the highest use.

        Args:
            before_bytes, during_bytes: both get, per step, what is in use before it, and the most while it runs.
            most_bytes: end with the first step that uses more.
        """
        flow, arena = self.flow, self.arena
        buffers = self.start()
        held: dict[int, Buffer] = {}
        coming: dict[int, Buffer] = {}
        self.renewed = {}
        running: list[tuple[int, list[int]]] = []  # kernels, and their temporaries
        peak_step, peak = 0, -1
        free = arena.free
        rests: list[int] = []
        parted: list[int] = []  # requests of the next step's
        for number, (kind, subject) in enumerate(self.steps):
            self.step = number
            before = arena.peak_bytes = arena.in_use_bytes
            if kind in KERNELS:
                if kind == RERUN:
                    for _, v in flow.makes[subject]:
                        self.renewed.setdefault(v, 0)
                        del buffers[v]
                alone = kind != LEAD and not running
                running.append((subject, self.begin(subject, buffers, takes_over=alone)))
                if kind != LEAD:
                    for i, temps in running:
                        self.finish(i, buffers, temps)
                    running = []
            elif kind == OUT:
                held[subject] = buffers[subject]
            elif kind == RELEASE:
                buffer = held.pop(subject)
                buffer.refs -= 1
                if not buffer.refs and not buffer.pins:
                    free(buffer.address)
            elif kind == IN:
                self.renewed.setdefault(subject, 0)
                coming[subject] = self.bring_back(subject)
            elif kind == SPLIT:
                parted.append(subject)
                if self.steps[number + 1].kind != SPLIT:
                    rests = arena.split(parted)
                    parted = []
            elif kind == EXACT:
                arena.split_all()
            else:
                buffers[subject] = coming.pop(subject)
            if arena.peak_bytes > peak:
                peak, peak_step = arena.peak_bytes, number
                if peak > most_bytes:
                    break
            if before_bytes is not None and during_bytes is not None:
                before_bytes.append(before)
                during_bytes.append(arena.peak_bytes)
            if rests and kind != SPLIT:
                for rest in rests:
                    free(rest)
                rests = []
        self.peak = peak
        if peak <= most_bytes:
            self.end(buffers)
        return peak_step

    def start(self) -> dict[int, Buffer]:
        """The buffers that are there when a step starts, by value."""
        for v, buffer in self.persistent.items():
            buffer.refs = self.refs[v]
        return dict(self.persistent)

    def end(self, buffers: dict[int, Buffer]) -> None:
        """A step has ended: the caller releases what was fetched, and variables are what they were updated to."""
        for v in sorted(self.flow.fetched):  # what a fetch shares with a variable stays
            buffer = buffers[v]
            buffer.refs -= 1
            if not buffer.refs and not buffer.pins:
                self.arena.free(buffer.address)
        for us in self.flow.updates:
            for u in us:
                self._carry_over(u.old, u.new, buffers)

    def _carry_over(self, old: int, new: int, buffers: dict[int, Buffer]) -> None:
        """The next repeat starts from the variable's newest version."""
        first = next(v for v in self._versions(old) if v in self.persistent)
        if self.persistent[first] is not buffers[new]:
            self.changed = True
            self.persistent[first] = buffers[new]

    @cached_property
    def _older(self) -> dict[int, int]:
        """By version of a variable, the one before it."""
        return {u.new: u.old for us in self.flow.updates for u in us}

    def _versions(self, value: int) -> list[int]:
        chain = [value]
        while chain[-1] in self._older:
            chain.append(self._older[chain[-1]])
        return chain

    def bring_back(self, value: int) -> Buffer:
        """The buffer that a copy back of `value` gets."""
        return Buffer(self.arena.allocate(self.flow.values[value].nbytes), self._next_reads(value))

    def begin(self, i: int, buffers: dict[int, Buffer], *, takes_over: bool = True) -> list[int]:
        """A kernel starts: what it allocates. Returns its temporaries.

        Args:
            takes_over: whether buffers that it reads last can be forwarded to its outputs.
        """
        flow, refs, late = self.flow, self.refs, self.late
        allocate = self.arena.allocate
        temps: list[int] = []
        rests: list[list[int]] = []  # of splits inside of bodies
        parted: list[int] = []
        for update in flow.updates[i]:
            old = buffers[update.old]
            held = update.copies or old.pins > 1 or old.refs > flow.reads[i].count(update.old)
            if update.adopted is None and held:
                buffers[update.new] = Buffer(allocate(flow.values[update.new].nbytes), refs[update.new], 1)
                old.pins -= 1
                self.changed = True
        for kind, subject, nbytes, candidates in flow.requests[i]:
            if kind == "free":
                self.arena.free(temps[subject])
                temps[subject] = -1
                continue
            if kind == "release":
                buffer = buffers[subject]
                buffer.refs -= 1
                if not buffer.refs and not buffer.pins:
                    self.arena.free(buffer.address)
                    buffer.address = -1
                continue
            if kind == "split":
                parted.append(nbytes)
                continue
            if kind == "part":
                rests.append(self.arena.split(parted))
                parted = []
                continue
            if kind == "rest":
                for rest in rests.pop() if rests else ():  # in a body by itself splits are nodes: nothing was parted
                    self.arena.free(rest)
                continue
            for c in candidates if takes_over else ():
                source = buffers[c]
                if source.refs == 1 and not source.pins and source.address >= 0:  # nobody but this kernel holds it
                    address, source.address = source.address, -1
                    if kind == "out" and self.forwarded is not None:
                        self.forwarded.append((subject, c))
                    break
            else:
                address = allocate(nbytes)
            if kind == "temp":
                temps.append(address)
            else:
                buffers[subject] = Buffer(address, self._next_reads(subject) if subject in late else refs[subject])
        return temps

    def finish(self, i: int, buffers: dict[int, Buffer], temps: list[int]) -> None:
        """A kernel ends: its temporaries go, variables change, and inputs that it read last are freed."""
        flow, free = self.flow, self.arena.free
        for update in flow.updates[i]:
            self._commit(update, buffers, self.refs)
        for address in reversed(temps):
            free(address)
        for v in flow.reads[i]:
            buffer = buffers[v]
            buffer.refs -= 1
            if not buffer.refs and not buffer.pins:
                free(buffer.address)
                buffer.address = -1
        for _, v in flow.makes[i]:
            buffer = buffers[v]
            if not buffer.refs and not buffer.pins:  # nobody reads it
                free(buffer.address)
                buffer.address = -1

    def _commit(self, update: Update, buffers: dict[int, Buffer], counts: list[int]) -> None:
        old = buffers[update.old]
        if update.adopted is None:
            if update.new not in buffers:  # in place
                old.refs += counts[update.new]
                buffers[update.new] = old
            elif not old.refs and not old.pins:
                self.arena.free(old.address)
            return
        adopted = buffers[update.adopted]
        adopted.pins += 1
        adopted.refs += counts[update.new]
        buffers[update.new] = adopted
        old.pins -= 1
        if not old.refs and not old.pins:
            self.arena.free(old.address)


def simulate_memory(
    flow: Dataflow,
    steps: Sequence[Step],
    *,
    snapshot: ArenaSnapshot = NOTHING_KNOWN,
    live: bool = False,
    detail: bool = False,
    arena: Allocator | None = None,
    disk: Collection[int] = (),
) -> Memory:
    """Replay `steps` through the allocator.

    Args:
        snapshot: the contents before the step.
        live: count live bytes only, as if memory never fragmented.
        detail: also list what is alive at the peak, and what takes over what.
        arena: replay in this one, which has `snapshot`'s chunks.
        disk: values that go to disk.
    """
    memory = memory_within(flow, steps, math.inf, snapshot=snapshot, live=live, detail=detail, arena=arena, disk=disk)
    assert memory is not None, "any peak is within that"
    return memory


def memory_within(
    flow: Dataflow,
    steps: Sequence[Step],
    most_bytes: float,
    *,
    snapshot: ArenaSnapshot = NOTHING_KNOWN,
    live: bool = False,
    detail: bool = False,
    arena: Allocator | None = None,
    disk: Collection[int] = (),
) -> Memory | None:
    """As `simulate_memory`; None where the peak is above `most_bytes`, which takes no longer than to get there."""
    if arena is None:
        replay = Replay(flow, steps, *filled(flow, snapshot, live), snapshot)
    else:
        replay = Replay(flow, steps, arena, fill(arena, added_bytes(flow, snapshot), snapshot), snapshot)
    forwarded: list[tuple[int, int]] = []
    replay.forwarded = forwarded if detail else None
    before, during = array("q"), array("q")
    peak_step = replay.repeat(before, during, most_bytes)
    replay.forwarded = None
    peak = replay.peak
    # Where buffers are shared the first step leaves another arena, which is looked at before the next one.
    for _ in range(0 if snapshot.shared else MAX_REPEATS - 1):
        if not replay.changed or peak > most_bytes:
            break
        step = replay.repeat(most_bytes=most_bytes)
        if replay.peak > peak:
            peak, peak_step = replay.peak, step
    if peak > most_bytes:
        return None
    host_peak, disk_peak, out_bytes, in_bytes = _host_traffic(flow, steps, disk)
    alive = _alive_at(flow, steps, peak_step) if detail else []
    return Memory(peak, peak_step, before, during, host_peak, out_bytes, in_bytes, alive, forwarded, disk_peak)


def widest_bytes(flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot = NOTHING_KNOWN) -> int:
    """What any course of the step, and any sizes that its values decide, take at most wherever chunks lie.

    At each point some of the facts hold no less than the step can (`Dataflow.covered`). A chunk is smaller than twice
    the request that it serves, or it would be split. While a request is given the end of a chunk, all of the arena may
    be in use.
    """
    most = max(_widest_bytes(*extreme, snapshot) for extreme in at_extremes(flow, steps))
    if any(kind == SPLIT and nbytes < 0 for kind, nbytes in steps):
        most = max(most, snapshot.limit_bytes or 0)
    return most


def _widest_bytes(flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot) -> int:
    ledger, addresses = filled(flow, snapshot, live=True)
    assert isinstance(ledger, Ledger)
    ledger.widest = not is_exact(steps)
    replay = Replay(flow, steps, ledger, addresses, snapshot)
    most = 0
    for _ in range(MAX_REPEATS):
        replay.repeat()
        most = max(most, replay.peak)
    return most


def judge_memory(
    flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot = NOTHING_KNOWN, disk: Collection[int] = ()
) -> Memory:
    """What `steps` do to memory at worst, of the extremes of what is known only by a bound."""
    memory = Judge(flow, snapshot).memory(steps, disk)
    assert memory is not None, "any peak is within that"
    return memory


class Judge:
    """Judges schedules of one step in one arena, at the extremes of what is known only by a bound.

    A schedule that is refused needs one extreme that refuses it: that which refused the last is tried first.
    """

    def __init__(self, flow: Dataflow, snapshot: ArenaSnapshot):
        self._flow = flow
        self._snapshot = snapshot
        self._strictest = 0

    def memory(self, steps: Sequence[Step], disk: Collection[int] = (), most_bytes: float = math.inf) -> Memory | None:
        """What `steps` do to memory at worst; None where that peaks above `most_bytes`."""
        first = self._strictest
        if most_bytes < math.inf and first:
            extreme = next(itertools.islice(at_extremes(self._flow, steps), first, None))
            if memory_within(*extreme, most_bytes, snapshot=self._snapshot, disk=disk) is None:
                return None
        memories: list[Memory] = []
        for number, extreme in enumerate(at_extremes(self._flow, steps)):
            memory = memory_within(*extreme, most_bytes, snapshot=self._snapshot, disk=disk)
            if memory is None:
                self._strictest = number
                return None
            memories.append(memory)
        worst = max(memories, key=lambda memory: memory.peak_bytes)
        # What goes to disk is known by the numbers that values have in the facts themselves.
        host_peak, disk_peak, out_bytes, in_bytes = _host_traffic(self._flow, steps, disk)
        return dataclasses.replace(
            worst, host_peak_bytes=host_peak, disk_peak_bytes=disk_peak, out_bytes=out_bytes, in_bytes=in_bytes
        )


def _host_traffic(flow: Dataflow, steps: Sequence[Step], disk: Collection[int]) -> tuple[int, int, int, int]:
    """The most in host memory at once, and on disk, and the bytes that travel out and in.

    What loops swap inside of their bodies is taken to be there all the time, as far as it stays when they have ended.
    """
    moves = [(n, kind, v) for n, (kind, v) in enumerate(steps) if kind in COPIES]
    last: dict[tuple[int, int], int] = {}  # by value and copy out: the last copy in of it
    copies: dict[int, int] = {}
    for n, kind, v in moves:
        if kind == OUT:
            copies[v] = copies.get(v, 0) + 1
        elif kind == AWAIT:
            last[v, copies[v]] = n
    held, peaks = [0, 0], [0, 0]  # in host memory, on disk
    out_bytes = in_bytes = 0
    copies = {}
    for n, kind, v in moves:
        nbytes, tier = flow.values[v].nbytes, int(v in disk)
        if kind == OUT:
            copies[v] = copies.get(v, 0) + 1
            held[tier] += round_up(nbytes)
            out_bytes += nbytes
            peaks[tier] = max(peaks[tier], held[tier])
        elif kind == IN:
            in_bytes += nbytes
        elif kind == AWAIT and last[v, copies[v]] == n:
            held[tier] -= round_up(nbytes)
    inner_out, inner_in = flow.inner_out_bytes, flow.inner_in_bytes
    return peaks[0] + flow.inner_host_bytes, peaks[1], out_bytes + inner_out, in_bytes + inner_in


def _alive_at(flow: Dataflow, steps: Sequence[Step], at: int) -> list[int]:
    """Values whose buffers are in device memory during step `at`, the largest first."""
    last_read: dict[tuple[int, int], int] = {}
    nth = [0] * len(flow.values)
    for n, (kind, subject) in enumerate(steps):
        if kind in KERNELS:
            for v in flow.reads[subject]:
                last_read[v, nth[v]] = n
            if kind == RERUN:
                for _, v in flow.makes[subject]:
                    nth[v] += 1
        elif kind == RELEASE:
            last_read[subject, nth[subject]] = max(n, last_read.get((subject, nth[subject]), n))
        elif kind == AWAIT:
            nth[subject] += 1
    alive: set[int] = set()
    nth = [0] * len(flow.values)
    for n, (kind, subject) in enumerate(steps[: at + 1]):
        made: list[int] = []
        if kind in KERNELS:
            made = [v for _, v in flow.makes[subject]]
        elif kind == IN:
            alive.add(subject)
        alive.update(made)
        if kind == AWAIT:
            nth[subject] += 1
        elif kind == RERUN:
            for v in made:
                nth[v] += 1
        if n < at and (kind in KERNELS or kind == RELEASE):
            touched = (subject,) if kind == RELEASE else (*flow.reads[subject], *made)
            for v in touched:
                if v not in flow.fetched and last_read.get((v, nth[v]), -1) <= n:
                    alive.discard(v)
    return sorted(alive.union(flow.persistent), key=lambda v: (-flow.values[v].nbytes, v))


@dataclass
class Timing:
    """What a schedule costs.

    Attributes:
        total_s: from the first kernel's start to the last one's end.
        compute_s: the kernels alone, each once.
        rerun_s: the kernels that run again.
        stall_s: time that the compute lane waits for copies.
        lost_s: time that kernels lose to concurrent copies.
    """

    total_s: float
    compute_s: float
    rerun_s: float
    stall_s: float
    lost_s: float

    def no_less_than(self, seconds: float) -> Timing:
        """This, where the whole is known to take no less."""
        return self if self.total_s >= seconds else dataclasses.replace(self, total_s=seconds)


class Span(NamedTuple):
    """When a step of a schedule runs: a kernel, a copy on its own lane, or the wait for one. Seconds from the start."""

    start_s: float
    end_s: float


SPLIT_S = 20e-6
"""What parting chunks for a kernel takes the host, with giving the rest back: measured among some thousand chunks."""


def simulate_time(
    flow: Dataflow,
    steps: Sequence[Step],
    cost_s: Sequence[float],
    rates: Rates,
    disk: Collection[int] = (),
    spans: list[Span] | None = None,
) -> Timing:
    """Three lanes: kernels in order, copies out and copies in each one after another, overlapping compute.

    What goes to disk, the values `disk`, has a lane of its own in each direction.

    Two kernels side by side share the cores. What kernels lose to concurrent copies (`Rates.copy_share`) comes on
    top, as a whole.

    Args:
        spans: gets one for each step, without what kernels lose.
    """
    now = compute = rerun = lost = 0.0
    out_bytes_per_s, in_bytes_per_s, share = rates.out_bytes_per_s, rates.in_bytes_per_s, rates.copy_share
    out_free, in_free = [0.0, 0.0], [0.0, 0.0]  # of host memory, of the disk
    lead, lead_number = -1, -1  # the kernel that runs concurrently with the next, and its step
    out_end: dict[int, float] = {}
    in_end: dict[int, float] = {}
    for number, (kind, subject) in enumerate(steps):
        start = now
        if kind == RUN:
            seconds = cost_s[subject]
            if lead >= 0:
                pair = [(flow.nodes[i], cost_s[i]) for i in (lead, subject)]
                seconds = concurrent_seconds(pair, rates)
                lead = -1
            now += seconds
            compute += seconds
        elif kind == LEAD:
            lead, lead_number = subject, number
        elif kind == SPLIT:
            if steps[number + 1].kind != SPLIT:
                now += SPLIT_S
        elif kind == RERUN:
            now += cost_s[subject]
            rerun += cost_s[subject]
        elif kind == OUT:
            tier = subject in disk
            seconds = flow.values[subject].nbytes / out_bytes_per_s
            lost += seconds * share
            if tier:
                seconds = flow.values[subject].nbytes / rates.disk_bytes_per_s
            start = max(out_free[tier], now)
            out_end[subject] = out_free[tier] = start + seconds
        elif kind == RELEASE:
            now = max(now, out_end[subject])
        elif kind == IN:
            tier = subject in disk
            start = max(in_free[tier], now, out_end[subject])
            seconds = flow.values[subject].nbytes / in_bytes_per_s
            lost += seconds * share
            if tier:
                seconds = flow.values[subject].nbytes / rates.disk_bytes_per_s
            in_end[subject] = in_free[tier] = start + seconds
        elif kind == AWAIT:
            now = max(now, in_end[subject])
        if spans is not None:
            copied = {OUT: out_end, IN: in_end}.get(kind)
            spans.append(Span(start, now if copied is None else copied[subject]))
            if kind == RUN and lead_number >= 0:
                spans[lead_number] = spans[number]
                lead_number = -1
    return Timing(now + lost, compute, rerun, now - compute - rerun, lost)
