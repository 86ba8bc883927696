"""TensorFlow's BFC allocator, simulated: the chunk that each request gets, and so the peak that will be measured.

Follows bfc_allocator.cc (xla/tsl/framework): requests are rounded up to 256 bytes; 21 bins hold free chunks by
size, each ordered by (size, address); the first chunk that fits serves the request, and is split only when it is at
least twice the request or at least 128 MiB larger; freed chunks coalesce with free neighbours of their region; the
statistics count whole chunks. A request that no free chunk fits adds a region: of 2 MiB at first, then of twice the
last one's size as a rule, and at most of what the arena's limit leaves (`BFCAllocator::Extend`).

Not modelled: timestamped frees; a device that has less memory left than the arena's limit (the allocator then requests
ever smaller regions).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

from tfswap.kernels.alignment import ALIGNMENT_BYTES, SPLIT_SLACK_BYTES, round_up
from tfswap.simulator.chunk_splits import split_chunks

BIN_COUNT = 21
BIN_OF_BITS = [min(BIN_COUNT, max(bits - 8, 0)) - 1 for bits in range(128)]
"""The bin of a chunk, by the bit length of its bytes."""
FIRST_REGION_BYTES = 2 << 20
UNBOUNDED_BYTES = 1 << 50

Chunk = tuple[int, int, bool]
"""Address, bytes, and whether it is in use."""


def regions_of(chunks: Iterable[Chunk]) -> list[list[Chunk]]:
    """Chunks, in order of address, by the region that they are in.

    A region ends where addresses are not contiguous, and between two free chunks: within a region they would be
    one. (Adjacent regions look like one where they meet in a used chunk.)
    """
    regions: list[list[Chunk]] = []
    end, was_free = -1, False
    for chunk in chunks:
        address, size, in_use = chunk
        if address != end or (was_free and not in_use):
            regions.append([])
        regions[-1].append(chunk)
        end, was_free = address + size, not in_use
    return regions


def next_region_bytes(sizes: Sequence[int], limit_bytes: int) -> int:
    """The size of the region that an arena with regions of these sizes adds next, if no larger request comes.

    The allocator doubles it after each region, unless a larger request has set it.
    Regions only grow, except for one that the limit cuts short, which is the last.
    """
    following = min(FIRST_REGION_BYTES, round_up(limit_bytes))
    for size in sorted(sizes):
        following = size if size > following else following * 2
    return following


class Arena:
    """The allocator's chunks, by address.

    Args:
        chunks: in order of address, contiguous within a region (`regions_of`).
        limit_bytes: the most bytes of all regions together; None for an arena of one endless region.
        collects: whether unused regions are freed when no other can be added.

    Attributes:
        in_use_bytes: bytes of the allocated chunks, each counted whole.
        peak_bytes: the maximum of `in_use_bytes`. Where a request did not fit, it is above the limit, and no lower than
            in a larger arena.
        added_regions: bytes of the regions that requests have added.
    """

    def __init__(
        self,
        chunks: Iterable[Chunk] = (),
        limit_bytes: int | None = None,
        collects: bool = False,
    ):
        self.in_use_bytes = 0
        self.added_regions: tuple[int, ...] = ()
        self._size: dict[int, int] = {}  # chunk sizes by address, free and used
        self._before: dict[int, int] = {}  # address of the chunk before, -1 for the first of a region
        self._free: set[int] = set()
        self._bins: list[list[tuple[int, int]]] = [[] for _ in range(BIN_COUNT)]
        self._splits_all = False
        self._occupied = 0  # bit b is set while bin b holds a chunk
        regions = regions_of(chunks)
        for region in regions:
            before = -1
            for address, size, in_use in region:
                self._size[address] = size
                self._before[address] = before
                before = address
                if in_use:
                    self.in_use_bytes += size
                else:
                    self._insert(address, size)
        self.peak_bytes = self.in_use_bytes
        if limit_bytes is None:
            self._add_endless_region()
            return
        sizes = [sum(size for _, size, _ in region) for region in regions]
        self._limit_bytes = limit_bytes
        self._pool_bytes = sum(sizes)
        self._next_region_bytes = next_region_bytes(sizes, limit_bytes)
        self._collects = collects

    @property
    def chunks(self) -> list[Chunk]:
        """In order of address, without the endless region."""
        sizes = sorted(self._size.items())
        return [(address, size, address not in self._free) for address, size in sizes if size < UNBOUNDED_BYTES // 2]

    @property
    def smallest_bytes(self) -> int:
        """Of the free chunks; 0 where there is none."""
        return self.best_fit_bytes(ALIGNMENT_BYTES)

    def copy(self) -> Arena:
        """An arena of its own with the same chunks."""
        made = Arena.__new__(Arena)
        made.__dict__.update(self.__dict__)
        made._size, made._before = self._size.copy(), self._before.copy()
        made._free, made._bins = self._free.copy(), [bin_.copy() for bin_ in self._bins]
        return made

    def allocate(self, size_bytes: int) -> int:
        """Allocate a chunk for `size_bytes` and return its address; -1 for an empty request."""
        if size_bytes <= 0:
            return -1
        rounded = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        bin_index = BIN_OF_BITS[rounded.bit_length()]
        bin_ = self._bins[bin_index]
        position = bisect_left(bin_, (rounded, -1))
        if position == len(bin_):
            higher = self._occupied >> (bin_index + 1) << (bin_index + 1)
            if not higher:
                self._grow(rounded)
                return self.allocate(size_bytes)
            bin_index = (higher & -higher).bit_length() - 1
            bin_, position = self._bins[bin_index], 0
        size, address = bin_.pop(position)
        if not bin_:
            self._occupied &= ~(1 << bin_index)
        self._free.discard(address)
        if size != rounded and self._splits(size, rounded):
            rest = address + rounded
            self._size[address] = rounded
            self._size[rest] = size - rounded
            self._before[rest] = address
            after = address + size
            if self._before.get(after) == address:
                self._before[after] = rest
            self._insert(rest, size - rounded)
            size = rounded
        self.in_use_bytes += size
        if self.in_use_bytes > self.peak_bytes:
            self.peak_bytes = self.in_use_bytes
        return address

    def split_all(self) -> None:
        """Give each later request a chunk of exactly its size, as csrc/core/chunk_split_ops.cc does."""
        self._splits_all = True

    def _splits(self, size: int, rounded: int) -> bool:
        """Whether a free chunk that is larger than a request is split for it."""
        return self._splits_all or size >= rounded * 2 or size - rounded >= SPLIT_SLACK_BYTES

    def split(self, sizes: Sequence[int]) -> list[int]:
        """As `chunk_splits.split_chunks`."""
        return split_chunks(self, sizes)

    def room_bytes(self, limit_bytes: int) -> int:
        """The largest request that could be met with no more than `limit_bytes` in use."""
        free = (limit_bytes - self.in_use_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if free <= 0:
            return 0
        below = next(self.smaller_bytes(free + ALIGNMENT_BYTES), 0)
        above = self.best_fit_bytes(free)
        if above:
            most = (
                above if self._splits_all else max(above // 2, above - SPLIT_SLACK_BYTES)
            )  # the largest request that it is split for
            return max(below, min(free, most // ALIGNMENT_BYTES * ALIGNMENT_BYTES))
        grown = self.copy()
        size = min(free, (self._limit_bytes - self._pool_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        if size > below and grown._extend(size):
            grown.allocate(size)
            if grown.in_use_bytes <= limit_bytes:
                return size
        return below

    def with_bytes(self, size_bytes: int) -> int:
        """Bytes in use with one more request of this size; UNBOUNDED_BYTES where it can't be met."""
        needed = round_up(size_bytes)
        whole = self.best_fit_bytes(needed) if needed else 0
        if whole or not needed:
            return self.in_use_bytes + (needed if self._splits(whole, needed) else whole)
        grown = self.copy()
        if not grown._extend(needed):
            return UNBOUNDED_BYTES
        grown.allocate(needed)
        return grown.in_use_bytes

    def free_sizes(self) -> Iterator[int]:
        """Bytes of the free chunks, without the endless region, the largest first."""
        return self.smaller_bytes(UNBOUNDED_BYTES // 2)

    def best_fit_bytes(self, rounded: int) -> int:
        """Bytes of the chunk that a request finds, before it is split; 0 for none."""
        for index in range(BIN_OF_BITS[rounded.bit_length()], BIN_COUNT):
            bin_ = self._bins[index]
            position = bisect_left(bin_, (rounded, -1))
            if position < len(bin_):
                return bin_[position][0]
        return 0

    def smaller_bytes(self, rounded: int) -> Iterator[int]:
        """Bytes of the free chunks that are too small for a request, the largest first."""
        for index in range(BIN_OF_BITS[rounded.bit_length()], -1, -1):
            bin_ = self._bins[index]
            for position in range(bisect_left(bin_, (rounded, -1)) - 1, -1, -1):
                yield bin_[position][0]

    def free(self, address: int) -> None:
        """Free the chunk at `address`; -1, an empty request's, is ignored."""
        if address < 0:
            return
        size = self._size[address]
        self.in_use_bytes -= size
        last, after = address, address + size
        if after in self._free and self._before[after] == address:
            size += self._remove(after)
            del self._size[after], self._before[after]
            last = after
        before = self._before[address]
        if before in self._free:
            size += self._remove(before)
            del self._size[address], self._before[address]
            address = before
        self._size[address] = size
        after = address + size
        if self._before.get(after) == last:
            self._before[after] = address
        self._insert(address, size)

    def _grow(self, rounded: int) -> None:
        """Make room for a request that no free chunk fits."""
        if self._extend(rounded) or (self._collects and self._collect(rounded) and self._extend(rounded)):
            return
        self.peak_bytes = max(self.peak_bytes, self._limit_bytes + ALIGNMENT_BYTES)
        self._add_endless_region()

    def _extend(self, rounded: int) -> bool:
        available = (self._limit_bytes - self._pool_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if rounded > available:
            return False
        enough = rounded <= self._next_region_bytes
        while rounded > self._next_region_bytes:
            self._next_region_bytes *= 2
        size = min(self._next_region_bytes, available)
        if enough:
            self._next_region_bytes *= 2
        self._pool_bytes += size
        self._add_region(size)
        return True

    def _collect(self, rounded: int) -> bool:
        """Free the regions that are one free chunk, if that can be enough. Follows DeallocateFreeRegions."""
        unused = [a for a in self._free if self._before[a] < 0 and self._before.get(a + self._size[a]) != a]
        freed = sum(self._size[a] for a in unused)
        if not freed or rounded > self._limit_bytes - self._pool_bytes + freed:
            return False
        for address in unused:
            self._remove(address)
            del self._size[address], self._before[address]
        self._pool_bytes -= freed
        return True

    def _add_region(self, size: int) -> None:
        # Below all others, where Linux maps new memory, as a rule. It decides between free chunks of one size.
        self.added_regions += (size,)
        address = min(self._size, default=UNBOUNDED_BYTES) - size - ALIGNMENT_BYTES
        if address < 0:
            address = self._end()
        self._size[address], self._before[address] = size, -1
        self._insert(address, size)

    def _add_endless_region(self) -> None:
        address = self._end()
        self._size[address], self._before[address] = UNBOUNDED_BYTES, -1
        self._insert(address, UNBOUNDED_BYTES)

    def _end(self) -> int:
        """An address beyond all chunks, and adjacent to none."""
        last = max(self._size, default=0)
        return last + self._size.get(last, 0) + ALIGNMENT_BYTES

    def _insert(self, address: int, size: int) -> None:
        index = BIN_OF_BITS[size.bit_length()]
        insort(self._bins[index], (size, address))
        self._occupied |= 1 << index
        self._free.add(address)

    def _remove(self, address: int) -> int:
        size = self._size[address]
        index = BIN_OF_BITS[size.bit_length()]
        bin_ = self._bins[index]
        del bin_[bisect_left(bin_, (size, address))]
        if not bin_:
            self._occupied &= ~(1 << index)
        self._free.discard(address)
        return size
