"""The replay of schedules in C++ has the results of the one in Python."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from statistics import median_low
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from graphs import training_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_problems import CPU, MIB, TWO_CORES, VARIABLE, facts, kernels, slow

from tfswap.analysis.dataflow import Dataflow, Request
from tfswap.compiler.compiler import Optimizer
from tfswap.ir.graph import Graph
from tfswap.kernels.alignment import round_up
from tfswap.native.load import load
from tfswap.plan.plan import Split
from tfswap.plan.schedule import RUN, Step, build_schedule
from tfswap.simulator import native_replay
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN, ArenaSnapshot
from tfswap.simulator.bfc_allocator import Arena
from tfswap.simulator.lives import BEFORE, Lives, simulate_lives
from tfswap.simulator.memory import memory_within
from tfswap.simulator.unordered import simulate_unordered


def in_python(work: Callable[[], object]) -> object:
    with mock.patch.object(native_replay, "is_available", lambda snapshot: False):
        return work()


def compare(flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot) -> None:
    load()
    assert native_replay.is_available(snapshot)
    for live in (False, True):
        for most_bytes in (
            math.inf,
            0,
            memory_within(flow, steps, math.inf, snapshot=snapshot, live=live).peak_bytes - 1,
        ):

            def judged(live: bool = live, most_bytes: float = most_bytes) -> object:
                return memory_within(flow, steps, most_bytes, snapshot=snapshot, live=live)

            assert judged() == in_python(judged)
    found, expected = simulate_lives(flow, steps, snapshot), in_python(lambda: simulate_lives(flow, steps, snapshot))
    assert isinstance(expected, Lives)
    assert without_bytes_before(found) == without_bytes_before(expected)


def without_bytes_before(lives: Lives) -> tuple[object, ...]:
    """Bytes of allocations from before the schedule are rounded in C++."""
    nbytes = [n for n, made in zip(lives.nbytes, lives.made, strict=True) if made != BEFORE]
    return nbytes, *(getattr(lives, field.name) for field in dataclasses.fields(lives)[1:])


def used_arena(draw: random.Random, flow: Dataflow) -> ArenaSnapshot:
    """An arena in several regions with holes of one to two times the sizes of a step's tensors. Some are too small."""
    sizes = sorted({value.nbytes for value in flow.values if value.nbytes})
    whole = sum(round_up(value.nbytes) for value in flow.values)
    limit = draw.choice((None, whole // 2, whole, 4 * whole + 8 * MIB))
    arena = Arena((), limit)
    held = [arena.allocate(draw.choice(sizes) * draw.randint(100, 199) // 100) for _ in range(draw.randint(1, 20))]
    for address in draw.sample(held, len(held) // 2):
        arena.free(address)
    chunks = tuple(arena.chunks)
    collects = draw.random() < 0.3
    return ArenaSnapshot(arena.in_use_bytes, chunks, draw.random() < 0.7, limit, collects)


def some_splits(draw: random.Random, flow: Dataflow, steps: Sequence[Step]) -> tuple[Split, ...]:
    """Splits for some kernels' outputs, of which one may be at a chunk's end."""
    found: list[Split] = []
    for place, (kind, subject) in enumerate(steps):
        made = flow.makes[subject] if kind == RUN else ()
        if made and draw.random() < 0.3:
            found.append(Split(place, max(1, flow.values[made[0][1]].nbytes), at_end=draw.random() < 0.3))
    return tuple(found)


@settings(slow, max_examples=25)
@given(training_steps(min_layers=3, max_layers=8), st.integers(0, 2**32), st.sampled_from((CPU, TWO_CORES)))
def test_plans_of_a_step_in_any_arena(graph: Graph, seed: int, device: object) -> None:
    draw = random.Random(seed)
    optimizer = Optimizer(graph, device)
    planned = []
    for limit in np.linspace(optimizer.floor_bytes(), optimizer.planner.lowest_unmoved().peak_bytes + MIB, 3):
        found = optimizer.search.fastest(int(limit))
        assert found is not None
        planned.append((optimizer.search.planners.of(found.variant).flow, found.candidate.choice))
    for flow, choice in planned:
        compare(flow, build_schedule(*choice), NOTHING_KNOWN)
        for snapshot in (used_arena(draw, flow), used_arena(draw, flow)):
            compare(flow, build_schedule(*choice), snapshot)
            alone = choice._replace(paired=(), splits=())
            splits = some_splits(draw, flow, build_schedule(*alone))
            compare(flow, build_schedule(*alone._replace(splits=splits)), snapshot)
            compare(flow, build_schedule(*alone._replace(exact_chunks=True)), snapshot)


@settings(slow, max_examples=25)
@given(training_steps(min_layers=3, max_layers=8), st.integers(0, 2**32))
def test_steps_without_an_order(graph: Graph, seed: int) -> None:
    load()
    optimizer = Optimizer(graph, TWO_CORES)
    flow = optimizer.flow
    snapshot = random.Random(seed).choice((NOTHING_KNOWN, used_arena(random.Random(seed), flow)))

    def predicted() -> object:
        return median_low(simulate_unordered(flow, optimizer.planner.cost_s, TWO_CORES, snapshot=snapshot))

    assert predicted() == in_python(predicted)


def test_a_variable_whose_buffer_is_replaced() -> None:
    flow = facts(VARIABLE)
    steps = build_schedule(kernels(flow), ())
    for shared in (frozenset(), frozenset({"v"})):
        arena = Arena((), 16 * MIB)
        arena.allocate(1024)
        snapshot = ArenaSnapshot(arena.in_use_bytes, tuple(arena.chunks), False, 16 * MIB, shared=shared)
        compare(flow, steps, snapshot)
        flow.updates = [tuple(update._replace(copies=True) for update in its) for its in flow.updates]
        flow = dataclasses.replace(flow)


def test_requests_of_bodies() -> None:
    """Splits, temporaries that are freed early, and inputs that are released while a loop runs."""
    flow = facts(
        """\
%x = Placeholder() {dtype=float32} -> float32[25600]
%a = MatMul(%x, %x) -> float32[25600]
%b = MatMul(%a, %x) -> float32[25600]
%c = MatMul(%b, %b) -> float32[25600]
feeds %x
fetches %c
"""
    )
    order = kernels(flow)
    node, a = order[1], flow.makes[order[0]][0][1]
    out = next(request for request in flow.requests[node] if request.kind == "out")
    body = [
        Request("temp", 0, 100_000, ()),
        *(Request("split", 0, 70_000, ()), Request("split", 0, 50_000, ()), Request("part", 0, 0, ())),
        *(Request("temp", 1, 70_000, ()), Request("temp", 2, 50_000, ()), Request("rest", 0, 0, ())),
        Request("free", 0, 0, ()),
        Request("release", a, 0, ()),
        out,
        Request("rest", 0, 0, ()),
        Request("free", 2, 0, ()),
    ]
    changed = dataclasses.replace(flow, consumes={node: (a,)})
    changed.reads = [tuple(v for v in its if i != node or v != a) for i, its in enumerate(flow.reads)]
    changed.requests = [tuple(body) if i == node else its for i, its in enumerate(flow.requests)]
    for seed in range(20):
        compare(changed, build_schedule(order, ()), used_arena(random.Random(seed), flow))


def test_a_schedule_of_another_step_is_refused() -> None:
    load()
    flow = facts(VARIABLE)
    with pytest.raises(ValueError, match="not one of this step"):
        memory_within(flow, [Step(RUN, kernels(flow)[-1])], math.inf)
