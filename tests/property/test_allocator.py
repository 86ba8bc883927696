"""The simulated BFC allocator: against the real one, chunk by chunk, and by its own invariants."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfswap.kernels.alignment import ALIGNMENT_BYTES, SPLIT_SLACK_BYTES, round_up
from tfswap.simulator.bfc_allocator import (
    UNBOUNDED_BYTES,
    Arena,
    next_region_bytes,
    regions_of,
)
from tfswap.simulator.chunk_splits import MOST_MISSED

MIB = 2**20

# --- by its own invariants ------------------------------------------------------------------------------


def chunks_of(arena: Arena) -> list[tuple[int, int, bool]]:
    return sorted((address, size, address not in arena._free) for address, size in arena._size.items())


sizes = (
    st.integers(1, 5000)
    | st.integers(1, 40 * MIB)
    | st.sampled_from((256, 257, 512, 1024, MIB, 127 * MIB, 128 * MIB, 129 * MIB, 300 * MIB))
)
# Each step either requests a number of bytes or gives back one of what is held, by its number.
programs = st.lists(sizes.map(lambda s: ("allocate", s)) | st.integers(0, 9).map(lambda n: ("free", n)), max_size=60)
layouts = st.lists(st.tuples(st.integers(1, 600), st.booleans(), st.booleans()), max_size=12)


def handed_out(arena: Arena, size_bytes: int) -> int:
    """Bytes of the chunk that a request gets."""
    return arena._size[arena.allocate(size_bytes)]


def make_layout(rows) -> list[tuple[int, int, bool]]:
    """(granules, in use, starts a region) to chunks; free neighbours in a region would have coalesced."""
    chunks: list[tuple[int, int, bool]] = []
    end = 4096
    for granules, in_use, new_region in rows:
        if new_region:
            end += ALIGNMENT_BYTES * 16
        elif chunks and not in_use and not chunks[-1][2]:
            in_use = True
        chunks.append((end, granules * ALIGNMENT_BYTES, in_use))
        end += granules * ALIGNMENT_BYTES
    return chunks


def region_starts(arena: Arena) -> set[int]:
    return {address for address, before in arena._before.items() if before < 0}


@given(layouts, programs)
@settings(max_examples=200)
def test_chunks_tile_their_regions_and_free_ones_coalesce(rows, program):
    layout = make_layout(rows)
    arena = Arena(layout)
    initial, regions = chunks_of(arena), region_starts(arena)
    held: list[tuple[int, int]] = []
    peak = arena.peak_bytes
    assert peak == sum(size for _, size, in_use in layout if in_use)
    for action, amount in program:
        if action == "allocate":
            before = chunks_of(arena)
            address = arena.allocate(amount)
            rounded = round_up(amount)
            fitting = sorted((size, a) for a, size, in_use in before if not in_use and size >= rounded)
            # The best fit within the lowest bin that has one; the bin is the power of two.
            lowest = min(min(20, int(math.log2(size >> 8))) for size, _ in fitting)
            best = min(f for f in fitting if min(20, int(math.log2(f[0] >> 8))) == lowest)
            assert address == best[1]
            size = arena._size[address]
            split = best[0] >= 2 * rounded or best[0] - rounded >= SPLIT_SLACK_BYTES
            assert size == (rounded if split else best[0])
            held.append((address, size))
        elif held:
            arena.free(held.pop(amount % len(held))[0])
        now = chunks_of(arena)
        for (a, size, used), (b, _, next_used) in pairwise(now):
            assert a + size <= b
            assert b in regions or a + size == b
            assert used or next_used or b in regions, "two free neighbours"
        assert region_starts(arena) == regions
        in_use = sum(size for _, size, used in now if used)
        assert arena.in_use_bytes == in_use
        peak = max(peak, in_use)
        assert arena.peak_bytes == peak
    for address, _ in held:
        arena.free(address)
    assert chunks_of(arena) == initial


def arena_after(rows, program) -> Arena:
    arena = Arena(make_layout(rows))
    held: list[int] = []
    for action, amount in program:
        if action == "allocate":
            held.append(arena.allocate(amount))
        elif held:
            arena.free(held.pop(amount % len(held)))
    return arena


@given(layouts, programs, st.integers(0, 700 * ALIGNMENT_BYTES))
@settings(max_examples=200)
def test_the_room_is_the_largest_request_that_keeps_a_limit(rows, program, more):
    arena = arena_after(rows, program)
    limit, before = arena.in_use_bytes + more, chunks_of(arena)

    def keeps(nbytes: int) -> bool:
        tried = arena.copy()
        tried.allocate(nbytes)
        return tried.in_use_bytes <= limit

    room = arena.room_bytes(limit)
    assert keeps(room)
    free = [size for _, size, in_use in before if not in_use and size < UNBOUNDED_BYTES // 2]
    bounds = {more, *(n for size in free for n in (size, size // 2, size - SPLIT_SLACK_BYTES))}
    larger = {n // ALIGNMENT_BYTES * ALIGNMENT_BYTES + d for n in bounds for d in (-1, 0, 1, ALIGNMENT_BYTES)}
    assert not any(keeps(n) for n in larger if round_up(n) > room)
    assert arena.room_bytes(arena.in_use_bytes) == 0
    assert chunks_of(arena) == before


def test_the_room_in_an_arena_that_may_grow():
    arena = Arena([(4096, 2 * MIB, False)], limit_bytes=8 * MIB)
    assert arena.room_bytes(MIB) == MIB
    assert arena.room_bytes(3 * MIB) == 2 * MIB  # a new region has 4 MiB, of which 3 would get all
    assert arena.room_bytes(6 * MIB) == 6 * MIB  # all that is left, in one region
    assert arena.room_bytes(7 * MIB) == 6 * MIB
    assert len(chunks_of(arena)) == 1


@given(layouts, programs, sizes)
@settings(max_examples=200)
def test_a_split_leaves_a_chunk_of_the_requests_own_size(rows, program, nbytes):
    arena = arena_after(rows, program)
    before = chunks_of(arena)
    whole = arena.copy()
    taken = handed_out(whole, nbytes)
    most = max(arena.peak_bytes, whole.in_use_bytes)
    rests = arena.split([nbytes])
    assert arena.peak_bytes <= most, "more than with the whole chunk handed out"
    if not rests:
        assert chunks_of(arena) == before
        return
    address = arena.allocate(nbytes)
    assert arena._size[address] == round_up(nbytes) < taken
    assert arena.peak_bytes <= most
    (rest,) = rests
    arena.free(rest)
    arena.free(address)
    assert chunks_of(arena) == before


@given(layouts, programs, st.lists(sizes, min_size=2, max_size=4))
@settings(max_examples=200)
def test_several_requests_are_parted_from_each_other_and_leave_nothing(rows, program, together):
    arena = arena_after(rows, program)
    before = chunks_of(arena)
    rests = arena.split(together)
    given_away = sum(arena._size[address] for address in rests)
    assert arena.in_use_bytes == sum(size for _, size, used in before if used) + given_away, "no more stays in use"
    for address in (*(arena.allocate(nbytes) for nbytes in together), *rests):
        arena.free(address)
    assert chunks_of(arena) == before


def test_two_requests_of_one_kernel_get_chunks_of_their_own_size():
    # A chunk of 36 KiB for two of 16 KiB: parted for one alone, the other is given 20 KiB whole.
    arena = Arena([(0, 36864, False), (36864, 256, True), (40960, 2048, False)])
    rests = arena.split([16384, 16384])
    assert sum(arena._size[rest] for rest in rests) <= 2 * ALIGNMENT_BYTES
    assert [handed_out(arena, 16384) for _ in range(2)] == [16384, 16384]


def test_a_split_is_made_past_what_fits_the_rest_better():
    # Of 1,280 bytes a request of 768 leaves 512, which the first chunk fits as well.
    arena = Arena([(0, 512, False), (512, 256, True), (768, 1280, False), (2048, 256, True)])
    (rest,) = arena.split([768])
    assert (rest, arena._size[rest]) == (1024, 256), "and the 256 bytes before it are free"
    assert arena.in_use_bytes == 768
    # However small a hole is, none is left that what parts the two would have to be larger than.
    arena = Arena([(0, 4096, False), (1 << 20, 3 << 19, False), (5 << 19, 256, True)])
    (rest,) = arena.split([1 << 20])
    assert arena._size[rest] == 256
    # To hold this one back takes 64 KiB more than is asked for; to leave it, as much as it has.
    arena = Arena([(0, 3 << 17, False), (1 << 20, (1 << 20) + (11 << 16), False), (3 << 20, 256, True)])
    (rest,) = arena.split([1 << 20])
    assert (arena._size[rest], arena.peak_bytes) == (256, 256 + (1 << 20) + (1 << 16))
    # To hold all of these back would take more than the chunk itself is.
    chunks = [(n * 2048, 1024, False) for n in range(4)]
    arena = Arena([*chunks, (16384, 2304, False), (18688, 256, True)])
    assert arena.split([1280]) == []
    assert arena.in_use_bytes == 256
    # And these are too many.
    few, many = ([(n * 2048, 256, False) for n in range(count)] for count in (MOST_MISSED, MOST_MISSED + 1))
    for chunks, found in ((few, True), (many, False)):
        arena = Arena([*chunks, (1 << 20, 1 << 19, False), (3 << 19, 256, True)])
        assert bool(arena.split([(1 << 19) - 256])) == found
        assert arena.in_use_bytes == 256 + 256 * found


def test_a_chunk_that_fits_is_not_split():
    arena = Arena([(0, 1024, False)])
    assert arena.split([1024]) == []
    assert arena.split([512]) == [], "the allocator splits it itself"


def test_empty_requests_take_nothing():
    arena = Arena()
    assert arena.allocate(0) == -1
    arena.free(-1)
    assert (arena.in_use_bytes, arena.peak_bytes) == (0, 0)


def test_a_chunk_is_split_when_it_is_twice_the_request():
    arena = Arena([(0, 1024, False)])
    assert handed_out(arena, 513) == 1024
    arena = Arena([(0, 1024, False)])
    assert handed_out(arena, 512) == 512


def test_a_large_chunk_is_split_for_what_128_mib_leave():
    for slack, taken in [(SPLIT_SLACK_BYTES, 300 * MIB), (SPLIT_SLACK_BYTES - 256, 428 * MIB - 256)]:
        arena = Arena([(0, 300 * MIB + slack, False)])
        assert handed_out(arena, 300 * MIB) == taken


def test_chunks_do_not_coalesce_across_regions():
    arena = Arena([(0, 512, True), (4096, 512, True)])
    arena.free(0)
    arena.free(4096)
    assert chunks_of(arena)[:2] == [(0, 512, False), (4096, 512, False)]


def test_free_neighbours_are_of_two_regions():
    chunks = [(0, 512, False), (512, 512, False), (1024, 256, True)]
    assert [len(region) for region in regions_of(chunks)] == [1, 2]
    arena = Arena([(0, 512, True), (512, 256, False), (768, 256, False), (1024, 256, True)])
    arena.free(0)
    arena.free(1024)
    assert chunks_of(arena)[:2] == [(0, 768, False), (768, 512, False)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], 2),
        ([2], 4),
        ([2, 4], 8),
        ([8], 8),  # made so large by a request: not doubled
        ([8, 8], 16),
        ([8, 16], 16),
        ([2, 4, 32, 32, 64], 128),
    ],
)
def test_the_next_region_is_twice_the_last_one_unless_a_request_made_that_so_large(sizes, expected):
    assert next_region_bytes([size * MIB for size in sizes], 1 << 40) == expected * MIB


def test_an_arena_grows_to_its_limit_and_no_further():
    arena = Arena([(4096, 2 * MIB, True)], limit_bytes=7 * MIB)
    assert handed_out(arena, 3 * MIB) == 4 * MIB  # the region, which is less than twice the request
    assert handed_out(arena, MIB) == MIB  # of which 1 MiB was left
    assert arena.peak_bytes == 7 * MIB
    arena.allocate(1)
    assert arena.peak_bytes == 7 * MIB + ALIGNMENT_BYTES, "more than there may be"
    arena.allocate(3 * MIB)
    assert arena.peak_bytes == 10 * MIB + ALIGNMENT_BYTES, "as in a larger one"
    # What is free is enough, and in two chunks.
    arena = Arena([(0, 2 * MIB, False), (2 * MIB, MIB, True), (3 * MIB, 2 * MIB, False)], limit_bytes=5 * MIB)
    arena.allocate(3 * MIB)
    assert arena.peak_bytes == 5 * MIB + ALIGNMENT_BYTES, "a little more than the limit says that it does not fit"


@pytest.mark.parametrize("collects", [False, True])
def test_regions_that_nothing_uses_make_room_where_the_allocator_collects_them(collects):
    chunks = [(1 << 30, 2 * MIB, False), (2 << 30, 4 * MIB, True)]
    arena = Arena(chunks, limit_bytes=10 * MIB, collects=collects)
    arena.allocate(5 * MIB)
    assert (arena.peak_bytes <= 10 * MIB) == collects
    assert ((1 << 30) in arena._size) == (not collects)
