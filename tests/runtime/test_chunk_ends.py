"""Tensors with long lifetimes at the end of the largest free chunk, in an arena that may not grow."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from planner_problems import facts, named
from processes import on_arena

from tfswap.errors import InvalidModel
from tfswap.ir.permits import TENSOR_TACTICS
from tfswap.plan.plan import Plan, Split
from tfswap.plan.schedule import build_schedule
from tfswap.planner.chunk_splits import choose_ends, choose_splits
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.memory import simulate_memory

KIB = 1024
MAP, LARGE, SPARE = 256 * KIB, 512 * KIB, 16 * KIB

# `stays` is made while `a` and `b` lie before it, and is read last; the large one comes when both are gone.
TEXT = """
%x = Placeholder() {dtype=float32} -> float32[1024]
%axis = Const() -> int32[] = (0,)
%a = MatMul(%x, %x) {T=float32} -> float32[65536]
%b = Softplus(%x) {T=float32} -> float32[1024]
%stays = Exp(%a) {T=float32} -> float32[32768]
%large = MatMul(%b, %b) {T=float32} -> float32[131072]
%d = Sum(%large, %axis) {T=float32} -> float32[64]
%e = Exp(%d) {T=float32} -> float32[64]
%end = MatMul(%stays, %e) {T=float32} -> float32[64]
feeds %x
fetches %end
"""


def test_a_large_tensor_has_room_where_what_stays_is_at_the_end() -> None:
    flow = facts(TEXT)
    order = named(flow, "b a stays large d e end")
    limit = MAP + LARGE + SPARE
    snapshot = ArenaSnapshot(4096, ((0, 4096, True), (4096, limit - 4096, False)), instantiated=True, limit_bytes=limit)
    steps = build_schedule(order, ())
    live_bytes, splits = choose_splits(flow, steps, snapshot)
    assert live_bytes <= limit < simulate_memory(flow, steps, snapshot=snapshot).peak_bytes
    ends = next(choose_ends(flow, steps, snapshot, splits))
    assert Split(order.index(flow.place["stays"]), 128 * KIB, at_end=True) in ends
    assert all(not split.at_end for split in ends if split.step == order.index(flow.place["large"]))
    assert simulate_memory(flow, build_schedule(order, (), splits=ends), snapshot=snapshot).peak_bytes <= limit


def test_one_at_a_chunk_s_end_stands_alone() -> None:
    plan = Plan("", None, ("a", "b"), (), 0, 0, 0, 1.0, "test", splits=(Split(0, 8), Split(1, 8, at_end=True)))
    assert Plan.from_json(plan.to_json()) == plan
    both = dataclasses.replace(plan, splits=(Split(1, 8), Split(1, 8, at_end=True)))
    with pytest.raises(InvalidModel, match="has to be the only one"):
        Plan.from_json(both.to_json())


def recurrent(mib, limited):
    """Losses and the peak of a recurrent net in such an arena, with tfswap or without."""
    import keras
    import tensorflow as tf

    import tfswap

    slab = tf.raw_ops.Empty(shape=[mib - 2, 1 << 20], dtype=tf.uint8)
    del slab  # one region, as a GPU's
    keras.utils.set_random_seed(0)
    inputs = keras.Input((35,), dtype="int32")
    h = keras.layers.LSTM(128, return_sequences=True)(keras.layers.Embedding(1000, 128)(inputs))
    model, head = keras.Model(inputs, h), keras.layers.Dense(1000)
    head.build((None, 128))  # of one axis besides the batch: of more, Keras' versions do differently
    variables = [*model.trainable_variables, *head.trainable_variables]
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    words, following = tf.random.stateless_uniform([2, 126, 35], (1, 2), 0, 1000, tf.int32)

    def step(words, following):
        with tf.GradientTape() as tape:
            rows = head(tf.reshape(model(words, training=True), [-1, 128]))
            loss = loss_of(following, tf.reshape(rows, [126, 35, 1000]))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=False):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    if limited:
        step = tfswap.optimize(tf.function(step), tactics=TENSOR_TACTICS)  # without variables there are fewer holes
    else:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        step = tf.function(step)
    tf.config.experimental.reset_memory_stats("CPU:0")
    losses = [step(words, following).numpy().tobytes().hex() for _ in range(3)]
    found = {"losses": losses, "peak": tf.config.experimental.get_memory_info("CPU:0")["peak"]}
    if limited:
        found |= {
            "ends": sum(split.at_end for split in step.plan().splits),
            "planned": step.report().planned_peak_bytes,
        }
    return found


def test_a_recurrent_net_trains_in_an_arena_that_has_the_bytes_and_not_the_holes() -> None:
    def run(mib: int, limited: bool) -> dict[str, Any]:
        return on_arena(lambda: recurrent(mib, limited), mib)

    found, expected = run(24, limited=True), run(200, limited=False)
    assert found["losses"] == expected["losses"]
    assert found["ends"]
    assert found["peak"] <= found["planned"] <= 24 << 20 < expected["peak"] / 1.3


def test_a_plan_says_which_of_its_splits_are_at_an_end() -> None:
    plan = Plan("", None, ("a",), (), 0, 0, 0, 1.0, "test", splits=(Split(0, 8, at_end=True),))
    assert json.loads(plan.to_json())["splits"] == [{"at_end": True, "nbytes": 8, "step": 0}]
