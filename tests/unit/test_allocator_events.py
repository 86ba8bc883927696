"""What an arena held at its highest moment, from its allocator's events."""

from __future__ import annotations

import random

import pytest

from tfswap.analysis.allocator_events import AllocatorEvent, heights, parse_events

pytestmark = pytest.mark.fast

ARENA = "GPU_0_bfc"
TEXT = (
    "MemoryAllocation#allocator_name=GPU_0_bfc,bytes_reserved=0,bytes_allocated=1024,bytes_available=9,"
    "fragmentation=0.08,peak_bytes_in_use=7816704,requested_bytes=1000,allocation_bytes=1024,addr=256,"
    "tf_op=gradient_tape/mul/Mul,id=-1745,region_type=temp,data_type=1,shape=[2,125]#\n"
    "ThreadpoolListener::Record#id=1#\n"
    "MemoryDeallocation#allocator_name=GPU_0_bfc,bytes_reserved=0,bytes_allocated=0,bytes_available=9,"
    "fragmentation=0,peak_bytes_in_use=1024,requested_bytes=1000,allocation_bytes=1024,addr=256,tf_op=,id=0,"
    "region_type=,data_type=0,shape=#\n"
    "MemoryAllocation#allocator_name=GPU_0_bfc,bytes_allocated=1024#\n"
)


class Arena:
    """An arena that writes events, and knows what is in use: address and bytes, with the op or "" from before."""

    def __init__(self, chunks: dict[int, int]):
        self.in_use = {address: (size, "") for address, size in chunks.items()}
        self.events: list[AllocatorEvent] = []

    def total(self) -> int:
        return sum(size for size, _ in self.in_use.values())

    def request(self, address: int, size: int, op: str) -> None:
        self.in_use[address] = size, op
        self.events.append(AllocatorEvent(ARENA, True, address, size, self.total(), op))

    def release(self, address: int) -> None:
        size, _ = self.in_use.pop(address)
        self.events.append(AllocatorEvent(ARENA, False, address, size, self.total()))


def found(arena: Arena, chunks: dict[int, int]) -> tuple[int, dict[int, tuple[int, str]], int]:
    height = heights(arena.events, {ARENA: chunks})[ARENA]
    alive = {a.address: (a.nbytes, "" if a.request is None else a.request.op) for a in height.allocations}
    return height.nbytes, alive, height.unknown_bytes


def test_lines_are_read_as_tensorflow_writes_them() -> None:
    request, release = parse_events(TEXT)
    assert request == AllocatorEvent(
        ARENA, True, 256, 1024, 1024, "gradient_tape/mul/Mul", "[2,125]", 1, is_temporary=True
    )
    assert release == AllocatorEvent(ARENA, False, 256, 1024, 0)


def test_an_unknown_op_has_no_name() -> None:
    line = TEXT.splitlines()[0].replace("gradient_tape/mul/Mul", "(null)")
    assert parse_events(line)[0].op == ""


def test_what_is_alive_at_the_highest_moment_is_found() -> None:
    chunks = {0: 512, 1024: 256}
    arena = Arena(chunks)
    arena.request(2048, 768, "a")
    arena.release(0)
    arena.request(4096, 1024, "b")  # the highest moment
    highest = dict(arena.in_use)
    arena.release(2048)
    arena.release(4096)
    arena.request(0, 512, "c")
    assert found(arena, chunks) == (2048, highest, 0)


def test_the_beginning_can_be_the_highest_moment() -> None:
    arena = Arena({0: 512, 1024: 256})
    arena.release(0)
    arena.request(0, 256, "a")
    assert found(arena, {0: 512, 1024: 256}) == (768, {0: (512, ""), 1024: (256, "")}, 0)


def test_of_equally_high_moments_the_last_has_most_requests() -> None:
    arena = Arena({0: 512})
    arena.release(0)
    arena.request(0, 512, "a")
    assert found(arena, {0: 512}) == (512, {0: (512, "a")}, 0)


def test_bytes_of_unknown_chunks_are_counted() -> None:
    arena = Arena({0: 512, 1024: 256})
    arena.request(2048, 768, "a")
    arena.release(0)
    height, alive, unknown = found(arena, {})
    assert (height, unknown) == (1536, 256)
    assert alive == {2048: (768, "a"), 0: (512, "")}, "the chunk at 0 was allocated before, since it is released"


def test_a_chunk_freed_before_the_first_event_is_not_counted() -> None:
    arena = Arena({})
    arena.request(0, 256, "a")
    assert found(arena, {0: 512}) == (256, {0: (256, "a")}, 0)


def test_allocators_are_apart() -> None:
    one, other = Arena({}), Arena({})
    one.request(0, 256, "a")
    other.request(0, 512, "b")
    mixed = [*one.events, *(AllocatorEvent(**{**vars(e), "allocator": "GPU_1_bfc"}) for e in other.events)]
    assert {name: height.nbytes for name, height in heights(mixed, {}).items()} == {ARENA: 256, "GPU_1_bfc": 512}


@pytest.mark.parametrize("seed", range(20))
def test_all_bytes_are_found_after_any_events(seed: int) -> None:
    draw = random.Random(seed)
    chunks = {4096 * i: 256 * draw.randint(1, 8) for i in range(5)}
    arena = Arena(chunks)
    highest, contents = arena.total(), dict(arena.in_use)
    for number in range(200):
        address = 4096 * draw.randrange(20)
        if address in arena.in_use:
            arena.release(address)
        else:
            arena.request(address, 256 * draw.randint(1, 8), f"op_{number}")
        if arena.total() >= highest:
            highest, contents = arena.total(), dict(arena.in_use)
    assert found(arena, chunks) == (highest, contents, 0)
