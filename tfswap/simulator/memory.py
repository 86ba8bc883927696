"""Judges the memory of any schedule: its peak, as the allocator counts, and its host memory.

Invariant: it does not depend on the solver; the same schedule gives the same numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import DISK, HOST
from tfswap.plan.schedule import (
    AWAIT,
    COPIES,
    HOST_ONLY,
    IN,
    KERNELS,
    OUT,
    RELEASE,
    RERUN,
    SPLIT,
    CopyTiers,
    Step,
    at_extremes,
    is_exact,
)
from tfswap.simulator import native_replay
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN, Allocator, ArenaSnapshot, Ledger, added_bytes, fill, filled
from tfswap.simulator.replay import MAX_REPEATS, Replay, repeated


@dataclass
class Memory:
    """A schedule's use of memory.

    Attributes:
        peak_bytes: the allocator's peak.
        peak_step: index in the schedule of the step at which it is reached.
        before_bytes: per step, the bytes in use when it starts (first repeat).
        during_bytes: per step, the most bytes in use while it runs (first repeat).
        host_peak_bytes: the peak of host memory.
        out_bytes, in_bytes: bytes copied to the host, and back.
        alive_at_peak: values in device memory at the peak, with `detail`.
        forwarded: (value made, value whose buffer was forwarded to it), in the order of the first repeat, with
            `detail`.
        disk_peak_bytes: the peak of bytes on disk.
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


def simulate_memory(
    flow: Dataflow,
    steps: Sequence[Step],
    *,
    snapshot: ArenaSnapshot = NOTHING_KNOWN,
    live: bool = False,
    detail: bool = False,
    arena: Allocator | None = None,
    tiers: CopyTiers = HOST_ONLY,
) -> Memory:
    """Replay `steps` through the allocator.

    Args:
        snapshot: the contents before the step.
        live: count live bytes only, as if memory never fragmented.
        detail: also list the values alive at the peak, and the forwarded buffers.
        arena: the arena to replay in, which has `snapshot`'s chunks.
        tiers: those of values that do not go to host memory.
    """
    memory = memory_within(flow, steps, math.inf, snapshot=snapshot, live=live, detail=detail, arena=arena, tiers=tiers)
    assert memory is not None, "any peak is within an infinite limit"
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
    tiers: CopyTiers = HOST_ONLY,
) -> Memory | None:
    """As `simulate_memory`; None where the peak is above `most_bytes`: the replay ends there."""
    # Where buffers are shared, the first step leaves another arena, which is checked before the next one.
    repeats = 1 if snapshot.shared else MAX_REPEATS
    forwarded: list[tuple[int, int]] = []
    if arena is None and not detail and native_replay.is_available(snapshot):
        found = native_replay.replay(flow, steps, snapshot, live=live, most_bytes=most_bytes, repeats=repeats)
    else:
        if arena is None:
            replay = Replay(flow, steps, *filled(flow, snapshot, live), snapshot)
        else:
            replay = Replay(flow, steps, arena, fill(arena, added_bytes(flow, snapshot), snapshot), snapshot)
        replay.forwarded = forwarded if detail else None
        found = repeated(replay, most_bytes, repeats)
    if found is None:
        return None
    peak, peak_step, before, during = found
    host_peak, disk_peak, out_bytes, in_bytes = _host_copies(flow, steps, tiers)
    alive = _alive_at(flow, steps, peak_step) if detail else []
    return Memory(peak, peak_step, before, during, host_peak, out_bytes, in_bytes, alive, forwarded, disk_peak)


def widest_bytes(flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot = NOTHING_KNOWN) -> int:
    """An upper bound of the peak over all courses of the step, all sizes that its values decide and all arenas. At each
    point some of the facts hold at least as much as the step (`Dataflow.covered`). A chunk is smaller than twice the
    request that it serves, or it would be split. While a request is served from the end of a chunk, all of the arena
    may be in use.
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
    flow: Dataflow,
    steps: Sequence[Step],
    snapshot: ArenaSnapshot = NOTHING_KNOWN,
    tiers: CopyTiers = HOST_ONLY,
) -> Memory:
    """The memory of `steps` in the worst case, over the extremes of bounds."""
    memory = Judge(flow, snapshot).memory(steps, tiers)
    assert memory is not None, "any peak is within an infinite limit"
    return memory


class Judge:
    """Judges schedules of one step in one arena, at the extremes of bounds. One extreme is enough to refuse a schedule:
    the one that refused the last schedule is tried first.
    """

    def __init__(self, flow: Dataflow, snapshot: ArenaSnapshot):
        self._flow = flow
        self._snapshot = snapshot
        self._strictest = 0

    def memory(
        self, steps: Sequence[Step], tiers: CopyTiers = HOST_ONLY, most_bytes: float = math.inf
    ) -> Memory | None:
        """The memory of `steps` in the worst case; None where its peak is above `most_bytes`."""
        first = self._strictest
        if most_bytes < math.inf and first:
            extreme = next(itertools.islice(at_extremes(self._flow, steps), first, None))
            if memory_within(*extreme, most_bytes, snapshot=self._snapshot, tiers=tiers) is None:
                return None
        memories: list[Memory] = []
        for number, extreme in enumerate(at_extremes(self._flow, steps)):
            memory = memory_within(*extreme, most_bytes, snapshot=self._snapshot, tiers=tiers)
            if memory is None:
                self._strictest = number
                return None
            memories.append(memory)
        worst = max(memories, key=lambda memory: memory.peak_bytes)
        # Values are numbered as in the facts themselves.
        host_peak, disk_peak, out_bytes, in_bytes = _host_copies(self._flow, steps, tiers)
        return dataclasses.replace(
            worst, host_peak_bytes=host_peak, disk_peak_bytes=disk_peak, out_bytes=out_bytes, in_bytes=in_bytes
        )


def _host_copies(flow: Dataflow, steps: Sequence[Step], tiers: CopyTiers) -> tuple[int, int, int, int]:
    """The peaks of host memory and of bytes on disk, and the bytes copied out and in.

    Tensors swapped inside of loops' bodies that stay after the loops count throughout the step. Variables at home on
    the host do not count, but their new values on the way there do.
    """
    at_home = flow.copying | flow.commits.keys()
    moves = [(n, kind, i) for n, (kind, i) in enumerate(steps) if kind in COPIES or i in at_home]
    last: dict[tuple[int, int], int] = {}  # by value and copy out: its last copy in
    copies: dict[int, int] = {}
    for n, kind, v in moves:
        if kind == OUT:
            copies[v] = copies.get(v, 0) + 1
        elif kind == AWAIT:
            last[v, copies[v]] = n
    held, peaks = [0, 0, 0], [0, 0, 0]  # by tier
    out_bytes = in_bytes = 0
    copies = {}
    for n, kind, subject in moves:
        tier = HOST
        if kind in KERNELS:
            tier = flow.home_tiers.get(subject, HOST)
            held[tier] += flow.home_changes.get(subject, 0)
            if subject in flow.loads:
                in_bytes += flow.values[flow.loads[subject]].nbytes
            elif subject in flow.stores:
                out_bytes += flow.values[flow.stores[subject]].nbytes
        elif kind in COPIES:
            nbytes, tier = flow.values[subject].nbytes, tiers.get(subject, HOST)
            if kind == OUT:
                copies[subject] = copies.get(subject, 0) + 1
                held[tier] += round_up(nbytes)
                out_bytes += nbytes
            elif kind == IN:
                in_bytes += nbytes
            elif kind == AWAIT and last[subject, copies[subject]] == n:
                held[tier] -= round_up(nbytes)
        peaks[tier] = max(peaks[tier], held[tier])
    inner_out, inner_in = flow.inner_out_bytes, flow.inner_in_bytes
    return peaks[HOST] + flow.inner_host_bytes, peaks[DISK], out_bytes + inner_out, in_bytes + inner_in


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
