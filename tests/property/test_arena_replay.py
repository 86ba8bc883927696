"""A gate's replay of a step's requests, in C++, has the planner's peaks, in any arena."""

from __future__ import annotations

import ctypes
import random

import pytest

pytest.importorskip("tensorflow")

from hypothesis import given, settings
from hypothesis import strategies as st

from tfswap.ir.custom_ops import GATE
from tfswap.ir.text import parse_graph
from tfswap.kernels.alignment import ALIGNMENT_BYTES
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.host_memory import HOST_INPUTS
from tfswap.kernels.target import Target
from tfswap.native.load import load
from tfswap.passes.nodes import add_gate
from tfswap.passes.tactics.limit_check import encode, write_limit
from tfswap.runtime.requests_replay import RequestsReplay
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.bfc_allocator import Arena
from tfswap.simulator.requests import END_ABOVE, EXACT_CHUNKS, FREE_REST, SPLIT_ABOVE, Requests

KIB = 2**10


def replayed(encoded: bytes, snapshot: ArenaSnapshot) -> int:
    rows = (ctypes.c_int64 * (3 * len(snapshot.chunks)))(*(int(n) for chunk in snapshot.chunks for n in chunk))
    limit = snapshot.limit_bytes or 0
    return load().c.tfswap_replay(encoded, len(encoded), rows, len(snapshot.chunks), limit, snapshot.collects)


def used_arena(draw: random.Random, limit_bytes: int) -> Arena:
    """An arena in several regions, in which tensors have come and gone."""
    arena = Arena((), limit_bytes)
    held = [arena.allocate(draw.randint(1, 200 * KIB)) for _ in range(draw.randint(0, 60))]
    for address in draw.sample(held, len(held) // 2):
        arena.free(address)
    return arena


def some_requests(draw: random.Random) -> list[int]:
    """Events as of Requests, with splits, and iterations that repeat."""
    events: list[int] = [EXACT_CHUNKS] if draw.random() < 0.3 else []
    live: list[int] = []
    count = 0

    def request(nbytes: int) -> None:
        nonlocal count
        events.append(nbytes)
        live.append(count)
        count += 1

    for _ in range(draw.randint(1, 12)):
        sizes = [draw.randint(1, 300 * KIB) for _ in range(draw.randint(1, 6))]
        for _ in range(draw.choice((1, 1, 9))):
            before = len(live)
            for size in sizes:
                split = draw.random() < 0.2
                if split:
                    events.extend(((END_ABOVE if draw.random() < 0.3 else SPLIT_ABOVE) + size, SPLIT_ABOVE))
                request(size)
                if split:
                    events.append(FREE_REST)
            while len(live) > before + 1:
                events.append(-1 - live.pop(before))
        for _ in range(draw.randint(0, len(live))):
            events.append(-1 - live.pop(draw.randrange(len(live))))
    return events


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.booleans())
def test_the_gates_replay_has_the_planners_peaks(seed: int, collects: bool) -> None:
    draw = random.Random(seed)
    limit = draw.choice((4, 16, 64)) * 2**20
    arena = used_arena(draw, limit)
    snapshot = ArenaSnapshot(arena.in_use_bytes, tuple(arena.chunks), True, limit, collects)
    if not snapshot.chunks:
        return  # nothing is known of such an arena
    events = some_requests(draw)
    requests = Requests((tuple(events), tuple(some_requests(draw))), 0)
    assert RequestsReplay(requests).peak_bytes(snapshot) == requests.peak_bytes(snapshot)
    found, expected = replayed(encode(events), snapshot), Requests((tuple(events),), 0).peak_bytes(snapshot)
    if expected <= limit:
        assert found == expected
    else:  # by how much a step does not fit is a question of where it is taken to find room
        assert found > limit


def test_what_loops_repeat_is_written_once() -> None:
    iteration = [300 * KIB, 200 * KIB, 100 * KIB]
    events = [n for i in range(10_000) for n in (*iteration, *(-1 - 3 * i - k for k in range(3)))]
    assert len(encode(events)) < 200
    snapshot = ArenaSnapshot(256, ((4096, 256, True), (4352, 2**20, False)), True, 2**30)
    assert replayed(encode(events), snapshot) == 256 + 600 * KIB


@pytest.mark.parametrize(
    "damaged",
    [
        b"\xff",  # a number without an end
        b"\x01",  # releases what nothing requested
        b"\x00",  # requests nothing
        b"\x0a\x01\x01",  # repeats what is not there
        b"\x04\x0a\x01" + b"\xff" * 8 + b"\x01",  # without end
        b"\x04\x12",  # no such event
        b"\x03",  # splits nothing
    ],
)
def test_damaged_requests_are_refused(damaged: bytes) -> None:
    assert replayed(damaged, ArenaSnapshot(256, ((4096, 256, True),), True, 2**30)) == -1


def test_random_bytes_never_end_the_process() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        damaged = bytes(draw.choices(range(256), k=draw.randint(1, 60)))
        peak = replayed(damaged, ArenaSnapshot(256, ((4096, 256, True),), True, 2**30))
        assert peak == -1 or peak >= ALIGNMENT_BYTES


@pytest.mark.parametrize(("device", "on_host"), [("cpu", None), ("gpu", (1,))])
def test_a_gate_reads_the_shape_of_each_argument_where_it_is(device: str, on_host: tuple[int, ...] | None) -> None:
    graph = parse_graph(
        """
        %x = Placeholder() -> float32[4,2]
        %rows = Placeholder() -> int32[3]
        %y = Relu(%x) {T=float32} -> float32[4,2]
        feeds %x, %rows
        fetches %y
        """.replace("        ", "")
    )
    add_gate(graph, 0)
    write_limit(graph, Target(DeviceModel(device)), 1000, [[512, -1]])
    gate = next(node for node in graph if node.op == GATE)
    assert [source.node.name for source in gate.inputs] == ["x", "rows"]
    assert gate.attrs["exact"] is True
    assert gate.attrs.get(HOST_INPUTS) == on_host
