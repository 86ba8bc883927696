"""TensorFlow's BFC allocator, simulated: which chunk each request gets, and so the peak that will be measured.

Follows tensorflow/core/common_runtime/bfc_allocator.cc: requests are rounded up to 256 bytes; 21 bins hold
free chunks by size, each ordered by (size, address); the first chunk that fits is taken, and split only when
it is at least twice the request or at least 128 MiB larger; freed chunks coalesce with free neighbours; the
statistics count whole chunks.

Not modelled: how regions grow on demand (`allow_growth`): one without bound stands for all that come;
timestamped frees; garbage collection of free regions.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

ALIGNMENT_BYTES = 256
BIN_COUNT = 21
SPLIT_SLACK_BYTES = 128 << 20
UNBOUNDED_BYTES = 1 << 50


def round_up(size_bytes: int) -> int:
    """The allocator's rounding of a request; 0 stays 0 (nothing is allocated for it)."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """The allocator's chunks, by address, and an unbounded region beyond them.

    Args:
        chunks: (address, bytes, in use) in order of address; where addresses are not contiguous a new region
            starts, and chunks never coalesce across.

    Attributes:
        in_use_bytes: bytes of the chunks that are handed out now, each counted whole.
        peak_bytes: the most that `in_use_bytes` has been.
    """

    def __init__(self, chunks: Iterable[tuple[int, int, bool]] = ()):
        self.in_use_bytes = 0
        self._size: dict[int, int] = {}  # chunk sizes by address, free and used
        self._before: dict[int, int] = {}  # address of the chunk before, -1 for the first of a region
        self._free: set[int] = set()
        self._bins: list[list[tuple[int, int]]] = [[] for _ in range(BIN_COUNT)]
        self._occupied = 0  # bit b is set while bin b holds a chunk
        before, end = -1, 0
        for address, size, in_use in chunks:
            self._size[address] = size
            self._before[address] = before if address == end else -1
            before, end = address, address + size
            if in_use:
                self.in_use_bytes += size
            else:
                self._insert(address, size)
        self.peak_bytes = self.in_use_bytes
        beyond = end + ALIGNMENT_BYTES  # not contiguous: what the allocator would ask the device for
        self._size[beyond], self._before[beyond] = UNBOUNDED_BYTES, -1
        self._insert(beyond, UNBOUNDED_BYTES)

    def allocate(self, size_bytes: int) -> int:
        """Hand out a chunk for `size_bytes` and return its address; -1 for an empty request.

        Raises MemoryError when no free chunk is large enough.
        """
        if size_bytes <= 0:
            return -1
        rounded = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        bin_index = min(BIN_COUNT - 1, (rounded >> 8).bit_length() - 1)
        bin_ = self._bins[bin_index]
        position = bisect_left(bin_, (rounded, -1))
        if position == len(bin_):
            higher = self._occupied >> (bin_index + 1) << (bin_index + 1)
            if not higher:
                raise MemoryError(f"no free chunk of {rounded} bytes ({self.in_use_bytes} in use)")
            bin_index = (higher & -higher).bit_length() - 1
            bin_, position = self._bins[bin_index], 0
        size, address = bin_.pop(position)
        if not bin_:
            self._occupied &= ~(1 << bin_index)
        self._free.discard(address)
        if size >= rounded * 2 or size - rounded >= SPLIT_SLACK_BYTES:
            rest = address + rounded
            self._size[address] = rounded
            self._size[rest] = size - rounded
            self._before[rest] = address
            after = address + size
            if after in self._before:
                self._before[after] = rest
            self._insert(rest, size - rounded)
            size = rounded
        self.in_use_bytes += size
        if self.in_use_bytes > self.peak_bytes:
            self.peak_bytes = self.in_use_bytes
        return address

    def free(self, address: int) -> None:
        """Take back the chunk at `address`; -1, an empty request's, is ignored."""
        if address < 0:
            return
        size = self._size[address]
        self.in_use_bytes -= size
        after = address + size
        if after in self._free:
            size += self._remove(after)
            del self._size[after], self._before[after]
        before = self._before[address]
        if before in self._free:
            size += self._remove(before)
            del self._size[address], self._before[address]
            address = before
        self._size[address] = size
        after = address + size
        if after in self._before:
            self._before[after] = address
        self._insert(address, size)

    def chunk_bytes(self, address: int) -> int:
        """Size of the chunk at `address`, which can be larger than what was asked for."""
        return self._size[address] if address >= 0 else 0

    def _insert(self, address: int, size: int) -> None:
        index = min(BIN_COUNT - 1, (size >> 8).bit_length() - 1)
        insort(self._bins[index], (size, address))
        self._occupied |= 1 << index
        self._free.add(address)

    def _remove(self, address: int) -> int:
        size = self._size[address]
        index = min(BIN_COUNT - 1, (size >> 8).bit_length() - 1)
        bin_ = self._bins[index]
        del bin_[bisect_left(bin_, (size, address))]
        if not bin_:
            self._occupied &= ~(1 << index)
        self._free.discard(address)
        return size
