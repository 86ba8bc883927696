"""TensorFlow's BFC allocator, simulated: which chunk each request gets, and so the peak that will be measured.

Follows bfc_allocator.cc (xla/tsl/framework): requests are rounded up to 256 bytes; 21 bins hold free chunks by
size, each ordered by (size, address); the first chunk that fits is taken, and split only when it is at least
twice the request or at least 128 MiB larger; freed chunks coalesce with free neighbours of their region; the
statistics count whole chunks. A request that no free chunk fits adds a region: of 2 MiB at first, then of twice
the last one's size as a rule, and at most of what the arena's limit leaves (`BFCAllocator::Extend`).

Not modelled: timestamped frees; a device that has less memory left than the arena's limit (the allocator then asks
for ever smaller regions).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from tfswap.kernels.alignment import ALIGNMENT_BYTES, round_up

BIN_COUNT = 21
SPLIT_SLACK_BYTES = 128 << 20
FIRST_REGION_BYTES = 2 << 20
UNBOUNDED_BYTES = 1 << 50
MOST_MISSED = 8
"""Chunks that a split holds back, since they fit better what is to be taken of another."""
MOST_BETWEEN = 64
"""What parts a chunk that the allocator would split itself is smaller than what is asked for by this factor."""

Chunk = tuple[int, int, bool]
"""Address, bytes, and whether it is in use."""


def regions_of(chunks: Iterable[Chunk]) -> list[list[Chunk]]:
    """Chunks, in order of address, by the region that they are in.

    A region ends where addresses are not contiguous, and between two free chunks: within a region they would be
    one. (Regions that the device happened to give side by side look like one where they meet in a used chunk.)
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
    """The size of the region that an arena with regions of these sizes adds next, if nothing larger is asked for.

    The allocator doubles it after each region, except where a request larger than it has made it so large.
    Regions only get larger, but for one that the limit cut short, after which none is added.
    """
    following = min(FIRST_REGION_BYTES, round_up(limit_bytes))
    for size in sorted(sizes):
        following = size if size > following else following * 2
    return following


class Arena:
    """The allocator's chunks, by address.

    Args:
        chunks: in order of address, each region's side by side (`regions_of`).
        limit_bytes: what all regions may have together; None for an arena in one region without end.
        collects: whether regions that nothing uses are given up when no other can be added.

    Attributes:
        in_use_bytes: bytes of the chunks that are handed out now, each counted whole.
        peak_bytes: the most that `in_use_bytes` has been; where a request did not fit, more than the limit, and no
            less than it would have been in a larger arena.
    """

    def __init__(
        self,
        chunks: Iterable[Chunk] = (),
        limit_bytes: int | None = None,
        collects: bool = False,
    ):
        self.in_use_bytes = 0
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
        """In order of address, without the region that has no end."""
        sizes = sorted(self._size.items())
        return [(address, size, address not in self._free) for address, size in sizes if size < UNBOUNDED_BYTES // 2]

    @property
    def smallest_bytes(self) -> int:
        """Of the free chunks; 0 where there is none."""
        return self._best_fit_bytes(ALIGNMENT_BYTES)

    def copy(self) -> Arena:
        """An arena of its own with the same chunks."""
        made = Arena.__new__(Arena)
        made.__dict__.update(self.__dict__)
        made._size, made._before = self._size.copy(), self._before.copy()
        made._free, made._bins = self._free.copy(), [bin_.copy() for bin_ in self._bins]
        return made

    def allocate(self, size_bytes: int) -> int:
        """Hand out a chunk for `size_bytes` and return its address; -1 for an empty request."""
        if size_bytes <= 0:
            return -1
        rounded = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        bin_index = min(BIN_COUNT - 1, (rounded >> 8).bit_length() - 1)
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
        """From now on give each request a chunk of its own size. As csrc/core/chunk_split_ops.cc does it."""
        self._splits_all = True

    def _splits(self, size: int, rounded: int) -> bool:
        """Whether a free chunk that is larger than a request is split for it."""
        return self._splits_all or size >= rounded * 2 or size - rounded >= SPLIT_SLACK_BYTES

    def split(self, sizes: Sequence[int]) -> list[int]:
        """Have chunks of their own sizes for the next requests, which are held together, where larger ones would be
        given whole.

        Args:
            sizes: bytes. Negative, and alone, those of a request that is to lie at the end of the largest free chunk.

        Returns the addresses of what parts them from the rest, and stays in use. As csrc/core/chunk_split_ops.cc does
        it, step by step.
        """
        if len(sizes) == 1 and sizes[0] < 0:
            return self._part_end(-sizes[0])
        parting: list[int] = []
        pieces: list[int] = []
        later_bytes = sum(map(round_up, sizes))
        for size in sizes:
            later_bytes -= round_up(size)
            parting.append(self._part(size, later_bytes))
            if later_bytes:
                pieces.append(self.allocate(size))  # so that the next is not parted from it
        for address in pieces:
            self.free(address)
        return [address for address in parting if address >= 0]

    def _part(self, size_bytes: int, later_bytes: int) -> int:
        """Part the chunk that a request would be given from what it needs; -1 where there is nothing to do, or no way.

        Never more is in use on the way than with that chunk handed out, and as a rule no more than is asked for.

        Args:
            later_bytes: of the requests that come after it. Where there are some, what the allocator splits itself is
                parted too, or it would join what is parted from them.
        """
        needed = round_up(size_bytes)
        whole = self._best_fit_bytes(needed)
        if not whole:
            self.free(self.allocate(size_bytes))  # the arena grows
            whole = self._best_fit_bytes(needed)
        rest_bytes = whole - needed
        splits_itself = rest_bytes >= min(needed, SPLIT_SLACK_BYTES)
        if not rest_bytes or (splits_itself and not later_bytes):
            return -1
        # What parts the two is cut from this chunk where no free one fits it: it is larger than those that are too
        # small for the request, but for the largest of them, which are held back meanwhile. That may take something
        # besides what is asked for, but no more than would stay in use otherwise.
        first_bytes = needed if splits_itself else rest_bytes
        missed: list[int] = []
        smaller = self._smaller_bytes(needed)
        largest = next(smaller, 0)
        while (
            largest
            and len(missed) < MOST_MISSED
            and sum(missed) + largest + first_bytes <= later_bytes + needed + min(largest, rest_bytes)
        ):
            missed.append(largest)
            largest = next(smaller, 0)
        if largest >= rest_bytes:
            return -1
        between_bytes = largest + ALIGNMENT_BYTES
        if splits_itself and between_bytes * MOST_BETWEEN > needed:
            return -1
        if 2 * between_bytes > rest_bytes:
            between_bytes = rest_bytes
        held = [self.allocate(size) for size in missed]
        held.append(self.allocate(needed if splits_itself else rest_bytes - between_bytes))
        between = self.allocate(between_bytes)
        for address in held:
            self.free(address)
        return between

    def _part_end(self, size_bytes: int) -> list[int]:
        """Part the end of the largest free chunk, for a request that fits it, from all before it.

        What lies before is taken in pieces of at most half of what is left of the chunk, or the allocator would not
        split it. The other free chunks would fit those better: they are held meanwhile, but for small ones, and what
        parts the two is larger than these. So as good as all of the arena is in use on the way.
        """
        needed = round_up(size_bytes)
        free = self._smaller_bytes(UNBOUNDED_BYTES // 2)
        before = next(free, 0) - needed
        missed = list(islice(free, MOST_MISSED))
        between = next(free, 0) + ALIGNMENT_BYTES
        if before < between or 2 * between > needed:
            return []
        held = [self.allocate(size) for size in missed]
        while True:
            half = (before + needed) // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            piece = min(half, before - between)
            if piece < between:
                break
            held.append(self.allocate(piece))
            before -= piece
        parting = self.allocate(before)
        for address in held:
            self.free(address)
        return [parting]

    def room_bytes(self, limit_bytes: int) -> int:
        """The largest request that could be met with no more than `limit_bytes` in use."""
        free = (limit_bytes - self.in_use_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if free <= 0:
            return 0
        below = next(self._smaller_bytes(free + ALIGNMENT_BYTES), 0)
        above = self._best_fit_bytes(free)
        if above:
            most = above if self._splits_all else max(above // 2, above - SPLIT_SLACK_BYTES)  # that it is split for
            return max(below, min(free, most // ALIGNMENT_BYTES * ALIGNMENT_BYTES))
        grown = self.copy()
        size = min(free, (self._limit_bytes - self._pool_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        if size > below and grown._extend(size):
            grown.allocate(size)
            if grown.in_use_bytes <= limit_bytes:
                return size
        return below

    def with_bytes(self, size_bytes: int) -> int:
        """What would be in use with a request of so many bytes besides; UNBOUNDED_BYTES where it can't be met."""
        needed = round_up(size_bytes)
        whole = self._best_fit_bytes(needed) if needed else 0
        if whole or not needed:
            return self.in_use_bytes + (needed if self._splits(whole, needed) else whole)
        grown = self.copy()
        if not grown._extend(needed):
            return UNBOUNDED_BYTES
        grown.allocate(needed)
        return grown.in_use_bytes

    def _best_fit_bytes(self, rounded: int) -> int:
        """Bytes of the chunk that a request finds, before it is split; 0 for none."""
        for index in range(min(BIN_COUNT - 1, (rounded >> 8).bit_length() - 1), BIN_COUNT):
            bin_ = self._bins[index]
            position = bisect_left(bin_, (rounded, -1))
            if position < len(bin_):
                return bin_[position][0]
        return 0

    def _smaller_bytes(self, rounded: int) -> Iterator[int]:
        """Bytes of the free chunks that are too small for a request, the largest first."""
        for index in range(min(BIN_COUNT - 1, (rounded >> 8).bit_length() - 1), -1, -1):
            bin_ = self._bins[index]
            for position in range(bisect_left(bin_, (rounded, -1)) - 1, -1, -1):
                yield bin_[position][0]

    def free(self, address: int) -> None:
        """Take back the chunk at `address`; -1, an empty request's, is ignored."""
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
        """Give up the regions that are one free chunk, if that can be enough. Follows DeallocateFreeRegions."""
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
        # Below all others, where Linux maps new memory. It decides between free chunks of one size, no more.
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
        """An address beyond all chunks, and not side by side with any."""
        last = max(self._size, default=0)
        return last + self._size.get(last, 0) + ALIGNMENT_BYTES

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
