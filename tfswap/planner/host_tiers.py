"""Which swapped tensors go to another device's memory, and which to disk, where host memory does not hold the others.

Another device may lend memory, which is reached faster than the host's (runtime/lending.py). It gets the tensors that
wait for the shortest time: copies of these are the most likely to be waited for. Each has a place there that no other
tensor has meanwhile, so that what fits is known before the step runs.

For the disk it is Belady's rule again: going forward through the order, whenever the copies in host memory pass its
limit, the one that is needed furthest in the future goes to disk instead, from its beginning. A disk is slow, so it
gets the tensors that wait longest.

Tensors that loops swap inside of their bodies are assumed to be in host memory all the time. Those without room go to
disk, the first elements first, since the backward loop needs these last (`Plan.saved_disk_bytes`).
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import DISK, HOST, LENT, Rates

if TYPE_CHECKING:
    from tfswap.planner.problem import Gap
    from tfswap.simulator.memory import Memory

STAGING_BYTES = 2 * (4 * (256 << 10) + (512 << 10) + (160 << 10)) + 4096
"""Host memory through which tensors go to disk and come back (Staging::kBytes in csrc/core/spill_file.h)."""


class Places(NamedTuple):
    """The places of swapped values, if not in host memory.

    Attributes:
        disk: those on disk.
        lent: those in memory that another device lends, in bytes from its start.
    """

    disk: frozenset[int]
    lent: Mapping[int, int]

    def tier(self, value: int) -> int:
        return DISK if value in self.disk else LENT if value in self.lent else HOST


class _Stay(NamedTuple):
    """When a value's copy is outside of the device, as positions in the order.

    Attributes:
        needed: its first read after the copy out.
        nbytes: as whole pieces of memory.
    """

    begin: int
    needed: int
    end: int
    nbytes: int


def _stays(gaps: Iterable[Gap]) -> dict[int, _Stay]:
    """By value, from its first copy out to the last read of a copy."""
    found: dict[int, _Stay] = {}
    for gap in gaps:
        stay = found.get(gap.value, _Stay(gap.made, gap.end, gap.end, round_up(gap.nbytes)))
        found[gap.value] = _Stay(
            min(stay.begin, gap.made), min(stay.needed, gap.end), max(stay.end, gap.end), stay.nbytes
        )
    return found


def _lent(stays: Mapping[int, _Stay], most_bytes: int) -> dict[int, int]:
    """Places of the values that the memory of another device has room for, those of the shortest stays first."""
    places: dict[int, int] = {}
    for v in sorted(stays, key=lambda v: (stays[v].end - stays[v].begin, v)) if most_bytes else ():
        stay = stays[v]
        others = ((places[u], stays[u]) for u in places)
        at = 0
        for place, other in sorted((p, o) for p, o in others if o.begin <= stay.end and stay.begin <= o.end):
            if place - at >= stay.nbytes:
                break
            at = max(at, place + other.nbytes)
        if at + stay.nbytes <= most_bytes:
            places[v] = at
    return places


@dataclass(frozen=True)
class Tiers:
    """The limits of the memory outside of the device that swapped tensors may take.

    Attributes:
        host_bytes: the limit of host memory; None for no limit.
        disk_bytes: the limit of disk space; None for no limit, 0 where nothing may go to disk.
        inner_bytes: those of what is not swapped between kernels of the step: of what loops swap inside of their
            bodies, and of new values of variables.
        lent_bytes: memory that another device lends.
    """

    host_bytes: int | None = None
    disk_bytes: int | None = 0
    inner_bytes: int = 0
    lent_bytes: int = 0

    def besides(self, memory: Memory) -> Tiers:
        """These limits for swapped tensors of a step that takes this memory outside of the device without any."""
        disk_bytes = max(0, self.disk_bytes - memory.disk_peak_bytes) if self.disk_bytes else self.disk_bytes
        return dataclasses.replace(self, inner_bytes=memory.host_peak_bytes, disk_bytes=disk_bytes)

    def spare_bytes(self, memory: Memory) -> dict[int, int]:
        """By tier, what is left of a limit; no limit is left out."""
        limits = {HOST: (self.host_bytes, memory.host_peak_bytes), DISK: (self.disk_bytes, memory.disk_peak_bytes)}
        return {tier: max(0, limit - peak) for tier, (limit, peak) in limits.items() if limit is not None}

    @property
    def room_bytes(self) -> float:
        """The most bytes that can be evicted together, in addition to `inner_bytes`."""
        if self.host_bytes is None or self.disk_bytes is None:
            return math.inf
        return self.host_bytes + self.disk_bytes + self.lent_bytes - self.inner_bytes

    def nearest_rates(self, rates: Rates) -> tuple[float, float]:
        """Bytes per second of copies from and to the nearest tier."""
        tier = LENT if self.lent_bytes else HOST
        return rates.in_rate(tier), rates.out_rate(tier)

    def distance(self, rates: Rates, nbytes: int) -> float:
        """How many times as long copies take as those of the nearest tier, with this many bytes evicted together.
        Infinite where there is no room for them.
        """
        if nbytes > self.room_bytes:
            return math.inf
        if nbytes <= self.lent_bytes or not self.lent_bytes:
            return 1.0
        near_in, near_out = self.nearest_rates(rates)
        return (1 / rates.in_bytes_per_s + 1 / rates.out_bytes_per_s) / (1 / near_in + 1 / near_out)

    def chosen(self, gaps: Iterable[Gap]) -> Places:
        """The places of the values that are swapped out in these gaps."""
        stays = _stays(gaps)
        lent = _lent(stays, self.lent_bytes)
        return Places(self._on_disk({v: stay for v, stay in stays.items() if v not in lent}), lent)

    def _on_disk(self, stays: Mapping[int, _Stay]) -> frozenset[int]:
        """The values that go to disk."""
        if self.host_bytes is None or self.disk_bytes == 0:
            return frozenset()
        room = self.host_bytes - min(self.inner_bytes, self.host_bytes)
        there: list[tuple[int, int]] = []  # heaps
        going: list[tuple[int, int]] = []
        disk: set[int] = set()
        for v in sorted(stays, key=lambda v: (stays[v].begin, v)):
            while going and going[0][0] < stays[v].begin:
                _, gone = heapq.heappop(going)
                room += stays[gone].nbytes if gone not in disk else 0
            room -= stays[v].nbytes
            heapq.heappush(there, (-stays[v].needed, v))
            heapq.heappush(going, (stays[v].end, v))
            while room < 0:
                _, last = heapq.heappop(there)
                if stays[last].end >= stays[v].begin:  # otherwise it has been copied back
                    disk.add(last)
                    room += stays[last].nbytes
        return frozenset(disk)

    def with_overflow(self, memory: Memory) -> Memory:
        """`memory`, with loops' tensors on disk where host memory has no room for them."""
        if self.host_bytes is None or self.disk_bytes == 0:
            return memory
        over = min(self.inner_bytes, max(0, memory.host_peak_bytes - self.host_bytes))
        if not over:
            return memory
        return dataclasses.replace(
            memory,
            host_peak_bytes=memory.host_peak_bytes - over,
            disk_peak_bytes=memory.disk_peak_bytes + over,
        )

    def fit(self, memory: Memory) -> bool:
        """Whether there is room for all swapped tensors."""
        if self.host_bytes is not None and memory.host_peak_bytes > self.host_bytes:
            return False
        return self.disk_bytes is None or memory.disk_peak_bytes <= self.disk_bytes


ANYTHING = Tiers()
