"""The simulated BFC allocator against the real one, chunk by chunk."""

from __future__ import annotations

import pytest
from processes import on_arena
from test_allocator import MIB

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


def test_chunks_are_exact_as_long_as_a_step_requests_it():
    pytest.importorskip("tensorflow")
    assert on_arena(HELPERS + EXACT, mib=64) == [3 * MIB, 2 * MIB, 2 * MIB, 3 * MIB]
