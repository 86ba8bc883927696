"""The simulated BFC allocator: against the real one, chunk by chunk, and by its own invariants."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import on_arena

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


# --- against the real one -------------------------------------------------------------------------------

HELPERS = """
import json, random
import numpy as np
import tensorflow as tf
import tfswap.ops
from tfswap.device import arena
from tfswap.native.load import load
from tfswap.simulator.bfc_allocator import Arena, regions_of

ops = load().ops

def real_chunks():
    return [tuple(row) for row in sorted(ops.tfswap_arena_map().chunks.numpy().tolist())]

def limit():
    return int(ops.tfswap_arena_map().limit)

def info():
    found = tf.config.experimental.get_memory_info("CPU:0")
    return found["current"], found["peak"]

def allocate(size):
    # The shape is copied into a tensor of its own, which eager execution keeps: made before it counts.
    return tf.raw_ops.Empty(shape=shape_of(size), dtype=tf.uint8)

shapes = {}
def shape_of(size):
    if size not in shapes:
        shapes[size] = tf.constant([size], tf.int32)
    return shapes[size]

def address_of(tensor):
    return np.asarray(memoryview(tensor)).__array_interface__["data"][0]

"""

REAL = """
read, allocator = tfswap.ops.arena_reader(), arena.allocator("CPU:0")
layouts, chunks_of = {}, {}

def compare(step):
    expected = real_chunks()
    seen = read(allocator, True)
    assert layouts.setdefault(tuple(expected), seen.layout) == seen.layout, step
    assert chunks_of.setdefault(seen.layout, expected) == expected, step
    assert (seen.current_bytes, seen.peak_bytes) == info(), step
    mapped = {address for address, _, _ in expected}
    simulated = sorted((a, s, int(a not in arena._free)) for a, s in arena._size.items() if a in mapped)
    assert simulated == expected, (step, [p for p in zip(simulated, expected) if p[0] != p[1]][:3])
    assert (arena.in_use_bytes, arena.peak_bytes) == info(), (step, arena.in_use_bytes, arena.peak_bytes, info())

random = random.Random(SEED)
sizes = [random.choice([random.randint(1, 3000), random.randint(1, 1 << 20), random.randint(1, 24 << 20)])
         for _ in range(40)] + [512, 256, 257, 1 << 20]
for size in sizes:
    shape_of(size)
warm = allocate(256 << 10); address_of(warm); del warm
if SETTLED:
    slab = allocate((512 << 20) - (2 << 20)); del slab
else:
    # Regions on demand, and holes in them.
    first = [allocate(random.choice(sizes)) for _ in range(30)]
    del first[::3]
tf.config.experimental.reset_memory_stats("CPU:0")
start = tuple((a, s, bool(u)) for a, s, u in real_chunks())
arena = Arena(start)
compare("start")
held, splits, in_parts, in_whole, at_end, exact = [], 0, 0, 0, 0, None
for step in range(STEPS + STEPS // 4):
    if step == STEPS:
        exact = ops.tfswap_exact_chunks()
        arena.split_all()
        compare("exact")
    allocating = not held or (arena.in_use_bytes < LOAD and random.random() < 0.6)
    if allocating:
        splitting = random.random() < 0.4
        together = random.choices(sizes, k=random.choice([1, 1, 2, 3]) if splitting else 1)
        if splitting:
            ending = len(together) == 1 and random.random() < 0.5
            asked = [-together[0]] if ending else together
            taken, rests = ops.tfswap_split_chunk(nbytes=asked), arena.split(asked)
            at_end += ending and bool(rests)
            splits += bool(rests)
            in_parts += len(rests) > 1
            compare((step, "split"))
        for size in together:
            tensor = allocate(size)
            address = arena.allocate(size)
            assert address == address_of(tensor), (step, size)
            in_whole += arena._size[address] > size + 255
            assert exact is None or arena._size[address] <= size + 255
            held.append((tensor, address))
        if splitting:
            assert not rests or len(together) > 1 or arena._size[address] <= size + 255, (step, size)
            if rests and ending:  # the first of the free chunks that have just its size
                end = rests[0] + arena._size[rests[0]]
                assert address == end or (address < end and arena._size[end] == arena._size[address]), (step, size)
            ops.tfswap_free_rest(rest=taken)
            for rest in rests:
                arena.free(rest)
    else:
        tensor, address = held.pop(random.randrange(len(held)))
        del tensor
        arena.free(address)
    compare(step)
while held:
    tensor, address = held.pop()
    del tensor
    arena.free(address)
compare("end")
ops.tfswap_free_rest(rest=exact)
assert sorted((a, s, a not in arena._free) for a, s in arena._size.items())[:len(start)] == sorted(start)
counted = {"in_whole": in_whole, "splits": splits, "in_parts": in_parts, "at_end": at_end}
print(json.dumps({**counted, "peak": arena.peak_bytes, "chunks": len(start)}))
"""


@pytest.mark.parametrize(("settled", "seed"), [(True, 1), (False, 2)])
def test_every_address_chunk_and_figure_of_a_random_program_is_the_real_ones(settled, seed):
    pytest.importorskip("tensorflow")
    # Unsettled, what is asked for must find room in the regions that there are: none may be added.
    head = f"SEED, SETTLED, STEPS, LOAD = {seed}, {settled}, 400, {400 * MIB if settled else 60 * MIB}\n"
    result = on_arena(head + HELPERS + REAL)
    assert result["in_whole"] > 10, "no chunk was handed out whole: the program shows nothing"
    assert result["splits"] > 10 and result["in_parts"] > 2 and result["at_end"] > 10
    assert result["peak"] > 50 * MIB


# An arena that grows while it is compared. New regions lie where malloc puts them: chunks are compared by their
# region, and by where they lie in it.
GROWING = """
def by_region(chunks):
    return [[(a - region[0][0], size, used) for a, size, used in region] for region in regions_of(chunks)]

def pair_new_regions():
    simulated, real = (
        {region[0][0] for region in regions_of(chunks)} for chunks in (simulated_chunks(), real_chunks())
    )
    new, found = simulated - pairs.keys(), real - set(pairs.values())
    assert len(new) == len(found) <= 1, (new, found)
    pairs.update(zip(new, found))

def simulated_chunks():
    return sorted((a, s, int(a not in arena._free)) for a, s in arena._size.items())

def address_in_its_region(address, starts):
    start = max(s for s in starts if s <= address)
    return start, address - start

random = random.Random(SEED)
sizes = [random.choice([random.randint(1, 3000), random.randint(1, 1 << 20), random.randint(1, 24 << 20)])
         for _ in range(40)] + [512, 256, 257, 1 << 20]
for size in sizes:
    shape_of(size)
warm = allocate(FIRST); address_of(warm); del warm
tf.config.experimental.reset_memory_stats("CPU:0")
start = [(a, s, bool(u)) for a, s, u in real_chunks()]
arena = Arena(start, limit())
pairs = {region[0][0]: region[0][0] for region in regions_of(start)}
before = len(pairs)
held = []
for step in range(STEPS):
    if not held or (arena.in_use_bytes < LOAD and random.random() < 0.7):
        size = random.choice(sizes)
        tensor, address = allocate(size), arena.allocate(size)
        pair_new_regions()
        simulated, offset = address_in_its_region(address, pairs.keys())
        assert (pairs[simulated], offset) == address_in_its_region(address_of(tensor), pairs.values()), step
        held.append((tensor, address))
    else:
        tensor, address = held.pop(random.randrange(len(held)))
        del tensor
        arena.free(address)
    assert (arena.in_use_bytes, arena.peak_bytes) == info(), step
regions = {real: region for real, region in zip(sorted(pairs.values()), by_region(real_chunks()))}
for simulated, region in zip(sorted(pairs), by_region(simulated_chunks())):
    assert regions[pairs[simulated]] == region
# More than the limit leaves, while the free chunks would be enough if they were one.
size = min(limit() - arena.in_use_bytes, max(s for _, s, used in simulated_chunks() if not used) + (1 << 20))
shape_of(size)
try:
    allocate(size)
    fits = True
except tf.errors.ResourceExhaustedError:
    fits = False
arena.allocate(size)
print(json.dumps({"regions": [before, len(pairs)], "fits": fits, "shortage": arena.peak_bytes > limit()}))
"""


@pytest.mark.parametrize(
    ("first", "cap", "load", "fits"),
    [
        (1000, 512, 150, True),
        (20 * MIB, 512, 150, True),  # an early request that makes a region larger than twice the last
        (1000, 128, 60, False),  # the last region is what is left, and then there is none
    ],
)
def test_an_arena_that_grows_grows_as_the_real_one(first, cap, load, fits):
    pytest.importorskip("tensorflow")
    head = f"SEED, FIRST, STEPS, LOAD = 3, {first}, 300, {load * MIB}\n"
    result = on_arena(head + HELPERS + GROWING, cap)
    before, after = result["regions"]
    assert after >= before + 3
    assert result["fits"] == fits
    assert result["shortage"] == (not fits)


EXACT = """
slab = allocate(32 << 20)
del slab
shape_of(2 << 20)
pair = [allocate(3 << 20) for _ in range(2)]

def taken():
    # More than before, for two thirds of what the hole has.
    before = info()[0]
    hole = allocate(2 << 20)
    return info()[0] - before

pair.pop(0)
found = [taken()]
first, second = ops.tfswap_exact_chunks(), ops.tfswap_exact_chunks()
found.append(taken())
ops.tfswap_free_rest(rest=first)
ops.tfswap_free_rest(rest=first)
found.append(taken())
del second  # as when a step fails
found.append(taken())
print(json.dumps(found))
"""


def test_chunks_are_exact_as_long_as_a_step_asks_for_it():
    pytest.importorskip("tensorflow")
    assert on_arena(HELPERS + EXACT, mib=64) == [3 * MIB, 2 * MIB, 2 * MIB, 3 * MIB]
