"""Reserved slots for small tensors, so that they do not lie between large ones.

Where an arena may grow no further than the limit, as a GPU's, free bytes must also be contiguous. The allocator gives
each request the smallest free chunk that it fits. Where none has about its size, the statistics of a batch norm are cut
off next to the feature map that has just been made, and stay there until the backward pass, long after the map is
freed. A few hundred bytes then divide a chunk that the next map would need whole.

A reserved slot is a free chunk of the size of a small tensor between two chunks in use. There are as many of each size
as a step holds tensors of that size simultaneously; the tensors between them take 256 bytes each. Slots come from the
smallest free chunks, so that the largest stays whole.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.op_traits import is_const
from tfswap.kernels.alignment import ALIGNMENT_BYTES, round_up
from tfswap.plan.schedule import Step
from tfswap.simulator.arena_snapshot import ArenaSnapshot, Ledger, added_bytes, fill
from tfswap.simulator.bfc_allocator import Arena
from tfswap.simulator.replay import Replay

LARGEST_BYTES = 64 << 10
"""The largest slot. Larger tensors of the step are few, and swapped where they fragment it."""


def choose_slots(flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot) -> list[int]:
    """The bytes of each slot that a schedule can use.

    Constants that are made with the step take some of the slots, also those that only make other constants.
    """
    ledger = _Counts()
    snapshot.enter(ledger)
    there = fill(ledger, added_bytes(flow, snapshot), snapshot)
    Replay(flow, steps, ledger, there, snapshot).repeat(array("q"), array("q"))
    ledger.most[ALIGNMENT_BYTES] += sum(is_const(node.op) for node in flow.nodes)
    return sorted(ledger.most.elements())


def cut(slots: Sequence[int], arena: Arena) -> list[tuple[int, bool]]:
    """The requests that make the slots, in order: bytes, and whether the tensor stays. Tensors between two slots stay.
    The others are freed when all requests are served, and leave the slots and the other free chunks.

    Args:
        slots: bytes of each.
        arena: the arena in which they are made; it is changed.
    """
    made: list[tuple[int, bool]] = []

    def take(nbytes: int, stays: bool = False) -> None:
        arena.allocate(nbytes)
        made.append((nbytes, stays))

    left = sorted(slots)
    while left:
        room = arena.smallest_bytes
        fitting = bisect_right(left, room) if room else len(left)  # where nothing is free, the arena grows
        if room and left[fitting - 1] != room:  # one that is as large as the chunk needs nothing next to it
            fitting = bisect_right(left, room // 2)  # of less than twice a request, a chunk is handed out whole
        if not fitting:
            take(room)  # held meanwhile, or requests would get it that are to come from the bytes next to a slot
            continue
        size = left.pop(fitting - 1)
        take(size)
        if size != room:
            take(ALIGNMENT_BYTES, stays=True)
    return made


class _Counts(Ledger):
    """Records how many small tensors of each size have been live together."""

    def __init__(self) -> None:
        super().__init__()
        self.most: Counter[int] = Counter()
        self._now: Counter[int] = Counter()

    def allocate(self, size_bytes: int) -> int:
        size = round_up(size_bytes)
        if 0 < size <= LARGEST_BYTES:
            self._now[size] += 1
            self.most[size] = max(self.most[size], self._now[size])
        return super().allocate(size_bytes)

    def free(self, address: int) -> None:
        super().free(address)
        if address >= 0:
            self._now[self._sizes[address]] -= 1
