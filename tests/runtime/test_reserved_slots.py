"""Places for small tensors in an arena that may grow no further."""

from __future__ import annotations

import tensorflow as tf
from planner_problems import facts, named
from processes import on_arena
from step_peaks import measuring

import tfswap
from tfswap.analysis.dataflow import Dataflow
from tfswap.plan.schedule import Step, build_schedule
from tfswap.planner.small_slots import choose_slots, cut
from tfswap.runtime import step_compiler
from tfswap.runtime.step_compiler import StepCompiler
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.bfc_allocator import Arena
from tfswap.simulator.memory import simulate_memory

KIB = 1024
MAP, LARGE, SPARE = 256 * KIB, 512 * KIB, 64 * KIB

# Two small tensors stay until the end; the large one needs the places of both maps, which have gone by then.
TEXT = """
%x = Placeholder() {dtype=float32} -> float32[65536]
%axis = Const() -> int32[] = (0,)
%a = Exp(%x) {T=float32} -> float32[65536]
%first = Sum(%a, %axis) {T=float32} -> float32[64]
%b = Exp(%a) {T=float32} -> float32[65536]
%second = Sum(%b, %axis) {T=float32} -> float32[64]
%c = Sum(%b, %axis) {T=float32} -> float32[1024]
%large = MatMul(%c, %c) {T=float32} -> float32[131072]
%d = MatMul(%first, %second) {T=float32} -> float32[64]
%end = MatMul(%d, %large) {T=float32} -> float32[64]
feeds %x
fetches %end
"""


def schedule() -> tuple[Dataflow, list[Step]]:
    flow = facts(TEXT)
    return flow, build_schedule(named(flow, "a first b second c large d end"), ())


def arena(slots: list[int]) -> ArenaSnapshot:
    """One region with room for a map, the large tensor, and little more."""
    limit = MAP + LARGE + SPARE
    chunks, end = [], 0
    for size in slots:
        chunks += [(end, size, False), (end + size, 256, True)]
        end += size + 256
    chunks += [(end, MAP, True), (end + MAP, limit - end - MAP, False)]
    used = sum(size for _, size, in_use in chunks if in_use)
    return ArenaSnapshot(used, tuple(chunks), instantiated=True, limit_bytes=limit)


def test_there_are_as_many_as_there_are_small_live_tensors():
    flow, steps = schedule()
    # first and second, then d and end while they are there; c; and one constant.
    assert choose_slots(flow, steps, ArenaSnapshot()) == [256] * 5 + [4096]


def test_small_tensors_in_slots_do_not_part_large_ones():
    flow, steps = schedule()
    parted, whole = (
        simulate_memory(flow, steps, snapshot=arena(slots))
        for slots in ([], choose_slots(flow, steps, ArenaSnapshot()))
    )
    limit = MAP + LARGE + SPARE
    assert parted.peak_bytes > limit, "a request was not met"
    assert whole.peak_bytes <= limit


MIB = 1 << 20


def step(x):
    a = tf.exp(x)
    first = tf.reduce_sum(tf.reshape(a, [64, -1]), 1)
    b = tf.exp(a)
    second = tf.reduce_sum(tf.reshape(b, [64, -1]), 1)
    c = tf.reduce_sum(tf.reshape(b, [1024, -1]), 1)
    large = tf.exp(tf.tile(c, [4096]))
    return tf.reduce_sum(large) + tf.reduce_sum(first * second)


def run(limit, large=1):
    """Measured peaks, the planned one and the limit of a step in an arena whose first region is full."""
    _filler = tf.raw_ops.Empty(shape=[2 * MIB - 8192], dtype=tf.uint8)  # the arena's first region
    slab = tf.raw_ops.Empty(shape=[26 * MIB], dtype=tf.uint8)
    del slab
    x = tf.raw_ops.StatelessRandomUniform(shape=[2 * MIB], seed=(1, 1))
    if large > 1:
        x = tf.tile(x[: 1 << 20], [large])
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    planned = tfswap.optimize(tf.function(step, autograph=False), memory_limit=limit, tactics=())
    peaks = []
    try:
        for _ in range(3):
            with measuring(peaks):
                planned(x)
    except tfswap.InfeasibleMemoryLimit as error:
        left = tf.config.experimental.get_memory_info("CPU:0")["current"] - before
        return {"floor": error.floor_bytes, "limit": error.limit_bytes, "left": left}
    return {"peaks": peaks, "planned": planned.plan().planned_peak_bytes}


def test_a_step_whose_tensors_have_no_place_gets_slots_and_runs():
    found = on_arena(lambda: run(28 * MIB), 28)
    assert set(found["peaks"]) == {found["planned"]}
    assert found["planned"] <= 28 * MIB


def test_without_slots_it_is_refused():
    def program():
        StepCompiler.make_slots = lambda compiler, optimizer: False
        return run(28 * MIB)

    assert on_arena(program, 28)["floor"] > 28 * MIB


def test_a_step_that_needs_more_than_the_arena_has_gets_none():
    def program():
        made, make = [], StepCompiler.make_slots
        StepCompiler.make_slots = lambda *given: made.append(make(*given)) or made[-1]
        assert "floor" in run(28 * MIB, large=3)
        return made

    made = on_arena(program, 28)
    assert made
    assert not any(made)


def test_where_there_is_no_room_for_them_it_is_refused_and_they_are_gone():
    def program():
        step_compiler.reserved_slots = lambda search, snapshot: [64 << 10] * 1000
        return run(28 * MIB)

    found = on_arena(program, 28)
    assert found["limit"] == 28 * MIB
    assert found["left"] < 64 << 10


def batches():
    import random
    import threading
    import time

    import tensorflow as tf

    import tfswap

    slab = tf.raw_ops.Empty(shape=[62 << 20], dtype=tf.uint8)
    del slab
    layers = [tf.Variable(tf.random.stateless_normal([64, 64], [i, 1]) / 10) for i in range(12)]
    batch = tf.random.stateless_normal([64, 64], [9, 9])

    def step(batch):
        with tf.GradientTape() as tape:
            h = tf.tile(batch, [48, 1])
            for layer in layers:
                h = tf.nn.softplus(h @ layer)
                h = tf.tanh(h - tf.reduce_mean(h, 1, keepdims=True))
            loss = tf.reduce_mean(h * h)
        for layer, slope in zip(layers, tape.gradient(loss, layers), strict=True):
            layer.assign_sub(slope)
        return loss

    planned = tfswap.optimize(tf.function(step, autograph=False), memory_limit="45%")
    planned.batches_ahead = {"CPU:0": 2}
    planned(batch)
    ended, drawn = threading.Event(), random.Random(3)

    def wait():  # batches come at any moment of a step
        time.sleep(drawn.random() * 0.003)

    def pipeline():
        while not ended.is_set():
            waiting = [tf.raw_ops.Empty(shape=batch.shape, dtype=tf.float32)]
            wait()
            waiting.append(tf.raw_ops.Empty(shape=batch.shape, dtype=tf.float32))
            wait()
            del waiting[0]
            wait()
            del waiting[0]
            wait()

    thread = threading.Thread(target=pipeline)
    thread.start()
    peaks = []
    for _ in range(60):
        with measuring(peaks):
            planned(batch)
    ended.set()
    thread.join()
    return [max(peaks), planned.plan().planned_peak_bytes, planned.plan().limit_bytes]


def test_batches_that_are_made_while_a_step_runs_take_what_they_are_and_no_more():
    highest, planned, limit = on_arena(batches, 64)
    assert planned < highest <= planned + 2 * (16 * KIB + 1024)  # two batches, and what eager code makes with them
    assert highest <= limit


def test_a_share_is_of_the_batches_too_that_the_floor_counts():
    def program():
        import tensorflow as tf

        import tfswap

        weights = tf.Variable(tf.random.stateless_normal([256, 8], [1, 1]))
        batch = tf.random.stateless_normal([1024, 256], [9, 9])

        def step(batch):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.nn.softplus(batch @ weights))
            weights.assign_sub(tape.gradient(loss, weights))
            return loss

        planned = tfswap.optimize(tf.function(step, autograph=False), memory_limit="100%")
        planned.batches_ahead = {"CPU:0": 2}
        planned(batch)
        report = planned.report()
        return [report.floor_bytes, report.memory_limit_bytes, report.baseline_peak_bytes]

    floor, limit, baseline = on_arena(
        program,
        64,
    )
    assert 3 << 20 < floor <= limit == baseline


def test_slots_lie_apart_and_in_the_smallest_chunks():
    slots = [256, 768, 4096, 16 * KIB, 16 * KIB]
    chunks = [(0, 256, True), (256, 768, False), (1024, 256, True), (1280, 20 * KIB, False)]
    end = chunks[-1][0] + chunks[-1][1]
    chunks += [(end, 256, True), (end + 256, 1024 * KIB, False)]
    arena = Arena(chunks, limit_bytes=end + 256 + 1024 * KIB)
    copy = arena.copy()
    requests = cut(slots, copy)
    made = [arena.allocate(size) for size, _ in requests]
    assert copy.chunks == arena.chunks
    for address, (_, stays) in zip(made, requests, strict=True):
        if not stays:
            arena.free(address)
    free = [size for _, size, in_use in arena.chunks if not in_use]
    rest = 20 * KIB - 4096 - 256 - 2 * 256
    assert free == [768, 4096, 256, rest, 16 * KIB, 16 * KIB, 1024 * KIB - 2 * (16 * KIB + 256)]


def test_slots_come_where_the_arena_grows():
    arena = Arena(limit_bytes=64 << 20)
    assert cut([4096, 256], arena) == [(4096, False), (256, True), (256, False), (256, True)]
    assert arena.peak_bytes == 4096 + 3 * 256


def run_in_an_arena_that_may_grow():
    """Measured peaks, the planned one and the limit of a step with three large tensors. Two regions would be added, of
    which each has room for one of them.
    """
    _filler = tf.raw_ops.Empty(shape=[2 * MIB - 8192], dtype=tf.uint8)  # the arena's first region
    x = tf.fill([3 * MIB // 4], 1.0)  # the second, of 4 MiB

    def three(x):
        a = tf.fill([33 * MIB // 16], x[0])
        b = tf.cumsum(a)
        c = tf.cumsum(b)
        return tf.reduce_sum(x) + tf.reduce_sum(b * c) + tf.reduce_max(a)

    planned, peaks = tfswap.optimize(tf.function(three, autograph=False), memory_limit=31 * MIB, tactics=()), []
    for _ in range(2):
        with measuring(peaks):
            planned(x)
    report = planned.report()
    return {"peaks": peaks, "planned": report.planned_peak_bytes, "limit": report.memory_limit_bytes}


def test_a_step_whose_regions_would_be_too_small_gets_one_region():
    found = on_arena(run_in_an_arena_that_may_grow, 32)
    assert set(found["peaks"]) == {found["planned"]} and found["planned"] <= found["limit"]
