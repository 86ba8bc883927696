"""The simulated BFC allocator against the real one, chunk by chunk."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from processes import on_arena
from test_allocator import MIB

from tfswap.simulator.bfc_allocator import Arena, regions_of


class RealArena:
    """TensorFlow's allocator of this process, which holds tensors that are requested by size."""

    def __init__(self, sizes: list[int]) -> None:
        import tensorflow as tf

        from tfswap.native.load import load

        self.ops = load().ops
        # A shape is copied into a tensor of its own, which eager execution keeps: made before it counts.
        self.shapes = {size: tf.constant([size], tf.int32) for size in sizes}

    def chunks(self) -> list[tuple[int, int, int]]:
        return [tuple(row) for row in sorted(self.ops.tfswap_arena_map().chunks.numpy().tolist())]

    def limit(self) -> int:
        return int(self.ops.tfswap_arena_map().limit)

    def info(self) -> tuple[int, int]:
        import tensorflow as tf

        found = tf.config.experimental.get_memory_info("CPU:0")
        return found["current"], found["peak"]

    def reset_peak(self) -> None:
        import tensorflow as tf

        tf.config.experimental.reset_memory_stats("CPU:0")

    def allocate(self, size: int) -> Any:
        import tensorflow as tf

        return tf.raw_ops.Empty(shape=self.shapes[size], dtype=tf.uint8)

    def warm_up(self, size: int) -> None:
        address_of(self.allocate(size))


def address_of(tensor: Any) -> int:
    return np.asarray(memoryview(tensor)).__array_interface__["data"][0]


def simulated_chunks(arena: Arena) -> list[tuple[int, int, int]]:
    return sorted((a, s, int(a not in arena._free)) for a, s in arena._size.items())


def random_sizes(draws: random.Random) -> list[int]:
    return [
        *(draws.choice([draws.randint(1, 3000), draws.randint(1, MIB), draws.randint(1, 24 * MIB)]) for _ in range(40)),
        *(512, 256, 257, MIB),
    ]


class Comparison:
    """A random program of requests and frees on both allocators, compared after each."""

    def __init__(self, seed: int, settled: bool) -> None:
        import tfswap.ops
        from tfswap.device import arena

        self.read, self.allocator = tfswap.ops.arena_reader(), arena.allocator("CPU:0")
        self.layouts: dict[Any, Any] = {}
        self.chunks_of: dict[Any, Any] = {}
        self.random = random.Random(seed)
        self.sizes = random_sizes(self.random)
        self.real = RealArena([*self.sizes, MIB // 4, 510 * MIB])
        self.real.warm_up(MIB // 4)
        self.first: list[Any] = []
        if settled:
            slab = self.real.allocate(510 * MIB)
            del slab
        else:  # regions on demand, and holes in them
            self.first = [self.real.allocate(self.random.choice(self.sizes)) for _ in range(30)]
            del self.first[::3]
        self.real.reset_peak()
        self.start = tuple((a, s, bool(u)) for a, s, u in self.real.chunks())
        self.arena = Arena(self.start)
        self.held: list[tuple[Any, int]] = []
        self.exact: Any = None
        self.counts = dict.fromkeys(("in_whole", "splits", "in_parts", "at_end"), 0)

    def compare(self, step: Any) -> None:
        expected, arena = self.real.chunks(), self.arena
        seen = self.read(self.allocator, True)
        assert self.layouts.setdefault(tuple(expected), seen.layout) == seen.layout, step
        assert self.chunks_of.setdefault(seen.layout, expected) == expected, step
        assert (seen.current_bytes, seen.peak_bytes) == self.real.info(), step
        mapped = {address for address, _, _ in expected}
        simulated = [chunk for chunk in simulated_chunks(arena) if chunk[0] in mapped]
        assert simulated == expected, (step, [p for p in zip(simulated, expected, strict=False) if p[0] != p[1]][:3])
        assert (arena.in_use_bytes, arena.peak_bytes) == self.real.info(), step

    def request(self, step: int) -> None:
        """Requests one or several tensors, of which some come from a chunk that is split for them."""
        arena, splitting = self.arena, self.random.random() < 0.4
        together = self.random.choices(self.sizes, k=self.random.choice([1, 1, 2, 3]) if splitting else 1)
        taken, rests, ending = None, [], False
        if splitting:
            ending = len(together) == 1 and self.random.random() < 0.5
            requested = [-together[0]] if ending else together
            taken, rests = self.real.ops.tfswap_split_chunk(nbytes=requested), arena.split(requested)
            self.counts["at_end"] += ending and bool(rests)
            self.counts["splits"] += bool(rests)
            self.counts["in_parts"] += len(rests) > 1
            self.compare((step, "split"))
        for size in together:
            tensor = self.real.allocate(size)
            address = arena.allocate(size)
            assert address == address_of(tensor), (step, size)
            self.counts["in_whole"] += arena._size[address] > size + 255
            assert self.exact is None or arena._size[address] <= size + 255
            self.held.append((tensor, address))
        if splitting:
            assert not rests or len(together) > 1 or arena._size[address] <= size + 255, (step, size)
            if rests and ending:  # the first of the free chunks that have just its size
                end = rests[0] + arena._size[rests[0]]
                assert address == end or (address < end and arena._size[end] == arena._size[address]), (step, size)
            self.real.ops.tfswap_free_rest(rest=taken)
            for rest in rests:
                arena.free(rest)

    def free(self, place: int) -> None:
        tensor, address = self.held.pop(place)
        del tensor
        self.arena.free(address)

    def run(self, steps: int, load: int) -> dict[str, int]:
        self.compare("start")
        for step in range(steps + steps // 4):
            if step == steps:
                self.exact = self.real.ops.tfswap_exact_chunks()
                self.arena.split_all()
                self.compare("exact")
            if not self.held or (self.arena.in_use_bytes < load and self.random.random() < 0.6):
                self.request(step)
            else:
                self.free(self.random.randrange(len(self.held)))
            self.compare(step)
        while self.held:
            self.free(-1)
        self.compare("end")
        self.real.ops.tfswap_free_rest(rest=self.exact)
        left = [(a, s, bool(used)) for a, s, used in simulated_chunks(self.arena)]
        assert left[: len(self.start)] == sorted(self.start)
        return {**self.counts, "peak": self.arena.peak_bytes}


@pytest.mark.parametrize(("settled", "seed"), [(True, 1), (False, 2)])
def test_every_address_chunk_and_figure_of_a_random_program_is_the_real_ones(settled, seed):
    pytest.importorskip("tensorflow")
    # Unsettled, what is requested must find room in the regions that there are: none may be added.
    result = on_arena(lambda: Comparison(seed, settled).run(400, 400 * MIB if settled else 60 * MIB))
    assert result["in_whole"] > 10, "no chunk was handed out whole: the program shows nothing"
    assert result["splits"] > 10 and result["in_parts"] > 2 and result["at_end"] > 10
    assert result["peak"] > 50 * MIB


class GrowingComparison:
    """An arena that grows while it is compared. New regions lie where malloc puts them: chunks are compared by their
    region, and by where they lie in it.
    """

    def __init__(self, first: int) -> None:
        self.random = random.Random(3)
        self.sizes = random_sizes(self.random)
        self.real = RealArena([*self.sizes, first])
        self.real.warm_up(first)
        self.real.reset_peak()
        start = [(a, s, bool(u)) for a, s, u in self.real.chunks()]
        self.arena = Arena(start, self.real.limit())
        self.pairs = {region[0][0]: region[0][0] for region in regions_of(start)}
        self.held: list[tuple[Any, int]] = []

    def pair_new_regions(self) -> None:
        simulated, real = (
            {region[0][0] for region in regions_of(chunks)}
            for chunks in (simulated_chunks(self.arena), self.real.chunks())
        )
        new, found = simulated - self.pairs.keys(), real - set(self.pairs.values())
        assert len(new) == len(found) <= 1, (new, found)
        self.pairs.update(zip(new, found, strict=True))

    def step(self, step: int, load: int) -> None:
        if not self.held or (self.arena.in_use_bytes < load and self.random.random() < 0.7):
            size = self.random.choice(self.sizes)
            tensor, address = self.real.allocate(size), self.arena.allocate(size)
            self.pair_new_regions()
            simulated, offset = address_in_its_region(address, self.pairs.keys())
            real = address_in_its_region(address_of(tensor), self.pairs.values())
            assert (self.pairs[simulated], offset) == real, step
            self.held.append((tensor, address))
        else:
            tensor, address = self.held.pop(self.random.randrange(len(self.held)))
            del tensor
            self.arena.free(address)
        assert (self.arena.in_use_bytes, self.arena.peak_bytes) == self.real.info(), step

    def run(self, steps: int, load: int) -> dict[str, Any]:
        import tensorflow as tf

        before = len(self.pairs)
        for step in range(steps):
            self.step(step, load)
        regions = dict(zip(sorted(self.pairs.values()), by_region(self.real.chunks()), strict=True))
        for simulated, region in zip(sorted(self.pairs), by_region(simulated_chunks(self.arena)), strict=True):
            assert regions[self.pairs[simulated]] == region
        # More than the limit leaves, while the free chunks would be enough if they were one.
        largest = max(s for _, s, used in simulated_chunks(self.arena) if not used)
        size = min(self.real.limit() - self.arena.in_use_bytes, largest + MIB)
        try:
            tf.raw_ops.Empty(shape=[size], dtype=tf.uint8)
            fits = True
        except tf.errors.ResourceExhaustedError:
            fits = False
        self.arena.allocate(size)
        shortage = self.arena.peak_bytes > self.real.limit()
        return {"regions": [before, len(self.pairs)], "fits": fits, "shortage": shortage}


def by_region(chunks: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    return [[(a - region[0][0], size, used) for a, size, used in region] for region in regions_of(chunks)]


def address_in_its_region(address: int, starts: Any) -> tuple[int, int]:
    start = max(s for s in starts if s <= address)
    return start, address - start


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
    result = on_arena(lambda: GrowingComparison(first).run(300, load * MIB), cap)
    before, after = result["regions"]
    assert after >= before + 3
    assert result["fits"] == fits
    assert result["shortage"] == (not fits)


def exact_chunks() -> list[int]:
    real = RealArena([2 * MIB, 3 * MIB, 32 * MIB])
    slab = real.allocate(32 * MIB)
    del slab
    pair = [real.allocate(3 * MIB) for _ in range(2)]

    def taken() -> int:
        """More than before, for two thirds of what the hole has."""
        before = real.info()[0]
        hole = real.allocate(2 * MIB)
        after = real.info()[0]
        del hole
        return after - before

    pair.pop(0)
    found = [taken()]
    first, second = real.ops.tfswap_exact_chunks(), real.ops.tfswap_exact_chunks()
    found.append(taken())
    real.ops.tfswap_free_rest(rest=first)
    real.ops.tfswap_free_rest(rest=first)
    found.append(taken())
    del second  # as when a step fails
    found.append(taken())
    return found


def test_chunks_are_exact_as_long_as_a_step_requests_it():
    pytest.importorskip("tensorflow")
    assert on_arena(exact_chunks, mib=64) == [3 * MIB, 2 * MIB, 2 * MIB, 3 * MIB]
