"""TensorFlow's BFC allocator, simulated: which chunk each request gets, and so the peak that will be measured.

Follows tensorflow/core/common_runtime/bfc_allocator.cc: requests are rounded up to 256 bytes; 21 bins hold
free chunks by size, each ordered by (size, address); the first chunk that fits is taken, and split only when
it is at least twice the request or at least 128 MiB larger; freed chunks coalesce with free neighbours; the
statistics count whole chunks.

Invariant: the arena is one region from the start, as a GPU's is by default. Not modelled: regions that grow
on demand (`allow_growth`), timestamped frees, and garbage collection of free regions.
"""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGNMENT_BYTES = 256
BIN_COUNT = 21
SPLIT_SLACK_BYTES = 128 << 20
UNBOUNDED_BYTES = 1 << 50


def round_up(size_bytes: int) -> int:
    """The allocator's rounding of a request; 0 stays 0 (nothing is allocated for it)."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """One BFC region. Addresses are bytes from its start.

    Attributes:
        in_use_bytes: bytes of the chunks that are handed out now, each counted whole.
        peak_bytes: the most that `in_use_bytes` has been.
    """

    def __init__(self, capacity_bytes: int = UNBOUNDED_BYTES):
        self.in_use_bytes = 0
        self.peak_bytes = 0
        self._size = {0: capacity_bytes}  # chunk sizes by address, free and used
        self._before = {0: -1}  # address of the chunk before, -1 for the first
        self._end = capacity_bytes
        self._free: set[int] = set()
        self._bins: list[list[tuple[int, int]]] = [[] for _ in range(BIN_COUNT)]
        self._occupied = 0  # bit b is set while bin b holds a chunk
        self._insert(0, capacity_bytes)

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
            if after != self._end:
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
        if after != self._end:
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
