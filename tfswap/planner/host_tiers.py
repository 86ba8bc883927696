"""Which swapped tensors go to disk, where host memory does not hold them all.

Belady's rule again: going forward through the order, whenever the copies in host memory pass its limit, the one that is
needed furthest in the future goes to disk instead, from its beginning. A disk is slow, so it gets the tensors that wait
longest.

Tensors that loops swap inside of their bodies are assumed to be in host memory all the time. Those without room go to
disk, the first elements first, since the backward loop needs these last (`Plan.saved_disk_bytes`).
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfswap.kernels.alignment import round_up

if TYPE_CHECKING:
    from tfswap.planner.problem import Gap
    from tfswap.simulator.memory import Memory

STAGING_BYTES = 2 * (4 * (256 << 10) + (512 << 10) + (160 << 10)) + 4096
"""Host memory through which tensors go to disk and come back (Staging::kBytes in csrc/core/spill_file.h)."""


@dataclass(frozen=True)
class Tiers:
    """The limits of the memory outside of the device that swapped tensors may take.

    Attributes:
        host_bytes: the limit of host memory; None for no limit.
        disk_bytes: the limit of disk space; None for no limit, 0 where nothing may go to disk.
        inner_bytes: bytes that loops swap inside of their bodies.
    """

    host_bytes: int | None = None
    disk_bytes: int | None = 0
    inner_bytes: int = 0

    @property
    def room_bytes(self) -> float:
        """The most bytes that can be evicted together, in addition to what loops swap inside of their bodies."""
        if self.host_bytes is None or self.disk_bytes is None:
            return math.inf
        return self.host_bytes + self.disk_bytes - self.inner_bytes

    def chosen(self, gaps: Iterable[Gap]) -> frozenset[int]:
        """The values that go to disk, of those that are swapped out in these gaps."""
        if self.host_bytes is None or self.disk_bytes == 0:
            return frozenset()
        begins: dict[int, int] = {}
        needed: dict[int, int] = {}  # by value: its first read after the copy out
        ends: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for gap in gaps:
            v = gap.value
            begins[v] = min(begins.get(v, gap.made), gap.made)
            needed[v] = min(needed.get(v, gap.end), gap.end)
            ends[v] = max(ends.get(v, gap.end), gap.end)
            sizes[v] = round_up(gap.nbytes)
        room = self.host_bytes - min(self.inner_bytes, self.host_bytes)
        there: list[tuple[int, int]] = []  # heaps
        going: list[tuple[int, int]] = []
        disk: set[int] = set()
        for v in sorted(begins, key=lambda v: (begins[v], v)):
            while going and going[0][0] < begins[v]:
                _, gone = heapq.heappop(going)
                room += sizes[gone] if gone not in disk else 0
            room -= sizes[v]
            heapq.heappush(there, (-needed[v], v))
            heapq.heappush(going, (ends[v], v))
            while room < 0:
                _, last = heapq.heappop(there)
                if ends[last] >= begins[v]:  # otherwise it has been copied back
                    disk.add(last)
                    room += sizes[last]
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
