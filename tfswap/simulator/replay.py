"""Replays a schedule in an arena: requests and releases in the order in which the executor makes them.

Memory follows the executor and the allocator to the byte: outputs are allocated when a kernel runs, an input is freed
when its last reader has run, a kernel forwards the buffer of an input that has no other holder.

Invariant: the same schedule in the same arena gives the same addresses.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from tfswap.analysis.dataflow import Dataflow, Update
from tfswap.plan.schedule import (
    AWAIT,
    EXACT,
    IN,
    KERNELS,
    LEAD,
    OUT,
    RELEASE,
    RERUN,
    SPLIT,
    Step,
)
from tfswap.simulator.arena_snapshot import Allocator, ArenaSnapshot

MAX_REPEATS = 3
BEGIN, FINISH = "begin", "finish"
"""The halves of RUN, for kernels that run concurrently. Plans do not have them."""


class Repeats(NamedTuple):
    """The highest of several repeats of a schedule.

    Attributes:
        before_bytes, during_bytes: of the first repeat.
    """

    peak_bytes: int
    peak_step: int
    before_bytes: array[int]
    during_bytes: array[int]


class Buffer:
    """One allocation: the number of remaining reads, and of pins (a variable holds it)."""

    __slots__ = ("address", "pins", "refs")

    def __init__(self, address: int, refs: int, pins: int = 0):
        self.address = address
        self.refs = refs
        self.pins = pins


class Replay:
    """The state of a replay: buffers by value, an allocator, and the variables that repeats of the step leave.

    Args:
        arena: with the contents before the step, as `fill` does it.
        addresses: of the persistent values, in order.
        snapshot: the snapshot of these contents.
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
        self.forwarded: list[tuple[int, int]] | None = None  # a list to collect forwarded buffers in
        self.step = -1  # the number of the running step
        self.renewed: dict[int, int] = {}  # by value: the number of buffers after its original
        self.changed = False

    def _count_reads(self) -> None:
        """Count, per value, the reads of its original (`refs`) and of each later buffer (`late`)."""
        self.refs = refs = [0] * len(self.flow.values)
        self.late: dict[int, list[int]] = {}
        late, held = self.late, self.flow.held
        for kind, subject in self.steps:
            if kind in KERNELS or kind == BEGIN:
                for v in held[subject]:
                    if v in late:
                        late[v][-1] += 1
                    else:
                        refs[v] += 1
            elif kind == OUT:
                # A copy reads too: by its own edge, then by its handle, until RELEASE.
                if subject in late:
                    late[subject][-1] += 1
                else:
                    refs[subject] += 1
            if kind == RERUN:
                for _, v in self.flow.makes[subject]:
                    late.setdefault(v, []).append(0)
            elif kind == AWAIT:
                late.setdefault(subject, []).append(0)
        for v in self.flow.fetched:
            refs[v] += 1

    def _next_reads(self, value: int) -> int:
        """The number of reads of the buffer of `value` that is made now."""
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
            before_bytes, during_bytes: get, per step, the bytes in use before it, and the most while it runs.
            most_bytes: end with the first step that uses more.
        """
        arena = self.arena
        buffers = self.start()
        held: dict[int, Buffer] = {}
        coming: dict[int, Buffer] = {}
        self.renewed = {}
        running: list[tuple[int, list[int]]] = []  # kernels, and their temporaries
        started: dict[int, list[int]] = {}
        peak_step, peak = 0, -1
        rests: list[int] = []
        for number, (kind, subject) in enumerate(self.steps):
            self.step = number
            before = arena.peak_bytes = arena.in_use_bytes
            if kind in KERNELS:
                if kind == RERUN:
                    self._make_anew(subject, buffers)
                alone = kind != LEAD and not running
                running.append((subject, self.begin(subject, buffers, may_forward=alone)))
                if kind != LEAD:
                    for i, temps in running:
                        self.finish(i, buffers, temps)
                    running = []
            elif kind == BEGIN:
                started[subject] = self.begin(subject, buffers)
            elif kind == FINISH:
                self.finish(subject, buffers, started.pop(subject))
            elif kind == OUT:
                held[subject] = buffers[subject]
            elif kind == RELEASE:
                self._unread(held.pop(subject))
            elif kind == IN:
                self.renewed.setdefault(subject, 0)
                coming[subject] = self.bring_back(subject)
            elif kind == SPLIT:
                if self.steps[number + 1].kind != SPLIT:
                    rests = arena.split(self._splits_until(number))
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
                    arena.free(rest)
                rests = []
        self.peak = peak
        if peak <= most_bytes:
            self.end(buffers)
        return peak_step

    def _make_anew(self, i: int, buffers: dict[int, Buffer]) -> None:
        """Recompute a kernel: its outputs get new buffers."""
        for _, v in self.flow.makes[i]:
            self.renewed.setdefault(v, 0)
            del buffers[v]

    def _splits_until(self, number: int) -> list[int]:
        """The next kernel's requests that get exact chunks: those of the SPLIT steps up to this one."""
        first = number
        while first and self.steps[first - 1].kind == SPLIT:
            first -= 1
        return [step.subject for step in self.steps[first : number + 1]]

    def start(self) -> dict[int, Buffer]:
        """The buffers that exist when a step starts, by value."""
        for v, buffer in self.persistent.items():
            buffer.refs = self.refs[v]
        return dict(self.persistent)

    def end(self, buffers: dict[int, Buffer]) -> None:
        """End a step: the caller releases the fetches, and variables have their updated buffers."""
        for v in sorted(self.flow.fetched):  # a buffer that a fetch shares with a variable stays
            self._unread(buffers[v])
        for us in self.flow.updates:
            for u in us:
                self._carry_over(u.old, u.new, buffers)

    def _unread(self, buffer: Buffer) -> None:
        """Count one read less, and free the buffer after the last."""
        buffer.refs -= 1
        if not buffer.refs and not buffer.pins:
            self.arena.free(buffer.address)
            buffer.address = -1

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

    def begin(self, i: int, buffers: dict[int, Buffer], *, may_forward: bool = True) -> list[int]:
        """Start a kernel: make its requests. Returns its temporaries.

        Args:
            may_forward: whether buffers that it reads last can be forwarded to its outputs.
        """
        flow, refs, late = self.flow, self.refs, self.late
        allocate, free = self.arena.allocate, self.arena.free
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
            if kind == "out" or kind == "temp":
                for c in candidates if may_forward else ():
                    source = buffers[c]
                    if source.refs == 1 and not source.pins and source.address >= 0:  # no other kernel holds it
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
            elif kind == "free":
                free(temps[subject])
                temps[subject] = -1
            elif kind == "release":
                self._unread(buffers[subject])
            elif kind == "split":
                parted.append(nbytes)
            elif kind == "part":
                rests.append(self.arena.split(parted))
                parted = []
            elif kind == "rest":
                # In a body by itself splits are nodes: no chunk was split here.
                for rest in rests.pop() if rests else ():
                    free(rest)
        return temps

    def finish(self, i: int, buffers: dict[int, Buffer], temps: list[int]) -> None:
        """End a kernel: free its temporaries, update variables, and free inputs that it read last."""
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
            if not buffer.refs and not buffer.pins:  # it has no readers
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


def repeated(replay: Replay, most_bytes: float, repeats: int) -> Repeats | None:
    """Run a schedule up to `repeats` times, as long as each leaves another arena. None where the peak is above
    `most_bytes`. Forwarded buffers are collected in the first repeat only.
    """
    before, during = array("q"), array("q")
    peak_step = replay.repeat(before, during, most_bytes)
    replay.forwarded = None
    peak = replay.peak
    for _ in range(repeats - 1):
        if not replay.changed or peak > most_bytes:
            break
        step = replay.repeat(most_bytes=most_bytes)
        if replay.peak > peak:
            peak, peak_step = replay.peak, step
    return Repeats(peak, peak_step, before, during) if peak <= most_bytes else None
