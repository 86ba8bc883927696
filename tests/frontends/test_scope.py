"""Variables that are made at home in host memory: models that are larger than the arena."""

from __future__ import annotations

import contextlib

import pytest
import tensorflow as tf
from processes import on_arena
from step_peaks import measuring

import tfswap
from tfswap.ir.permits import TACTICS

WIDTH, LAYERS = 512, 12
ARENA_MIB = 8
"""The variables and slots of the net take 37 MiB."""


def trained(scoped):
    """Losses of a net with Adam, under a limit below the arena's cap or without one."""

    with tfswap.scope() if scoped else contextlib.nullcontext():
        tf.keras.utils.set_random_seed(1)
        dense = [tf.keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS)]
        model = tf.keras.Sequential([tf.keras.Input((WIDTH,)), *dense])
        optimizer = tf.keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    if scoped:
        step = tfswap.optimize(step, memory_limit=(ARENA_MIB << 20) - (1 << 19), tactics=TACTICS)
    x, peaks = tf.random.stateless_normal([16, WIDTH], (1, 2)), []
    losses = []
    for _ in range(3):
        with measuring(peaks):
            losses.append(float(step(x)))
    weights = [float(tf.reduce_sum(tf.abs(v))) for v in model.trainable_variables]
    return {"values": [losses, weights], "peak": max(peaks)}


def test_a_model_larger_than_the_arena_is_made_and_trained() -> None:
    def program():
        return trained(True)

    def plain():
        return trained(False)

    found = on_arena(program, ARENA_MIB)
    assert found["values"] == on_arena(plain)["values"]
    assert found["peak"] <= ARENA_MIB << 20


def test_a_step_larger_than_the_arena_is_profiled() -> None:
    """Profiling puts the variables' values back one by one, each in host memory."""

    def program():
        with tfswap.scope():
            weights = [tf.Variable(tf.ones([WIDTH, WIDTH])) for _ in range(LAYERS)]

        def grow():
            for weight in weights:
                weight.assign(weight * 2.0)

        limit = (ARENA_MIB << 20) - (1 << 19)
        profile = tfswap.profile(tfswap.optimize(tf.function(grow), memory_limit=limit))
        step = tfswap.optimize(tf.function(grow), memory_limit=limit, profile=profile)
        step()
        return [float(weight[0, 0]) for weight in weights]

    assert on_arena(program, ARENA_MIB) == [2.0] * LAYERS


@pytest.mark.parametrize("limit", ["40%", "80%"])
def test_a_share_is_of_a_peak_with_all_variables_on_the_device(limit: str) -> None:
    def program(scoped):
        with tfswap.scope() if scoped else contextlib.nullcontext():
            weights = [tf.Variable(tf.ones([256, 256]) / 256) for _ in range(12)]

        @tf.function
        def train(x):
            with tf.GradientTape() as tape:
                h = x
                for weight in weights:
                    h = tf.nn.relu(h @ weight)
                loss = tf.reduce_mean(h * h)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        step, x = tfswap.optimize(train, memory_limit=limit), tf.ones([64, 256])
        try:
            for _ in range(2):
                step(x)
        except tfswap.InfeasibleMemoryLimit as error:
            assert not scoped, error  # it begins with more on the device
            return error.limit_bytes
        return step.plan().limit_bytes

    plain = on_arena(lambda: program(False))
    scoped = on_arena(lambda: program(True))
    assert plain > 1 << 20 and abs(scoped - plain) < 0.05 * plain


def test_variables_stay_on_the_device_while_there_is_room() -> None:
    def program():
        def in_use():
            return tf.config.experimental.get_memory_info("CPU:0")["current"]

        with tfswap.scope("4MiB"):
            few = [tf.Variable(tf.zeros([256, 256])) for _ in range(32)]
        some = in_use()
        with tfswap.scope():
            more = [tf.Variable(tf.zeros([256, 256])) for _ in range(4)]
        text = tf.Variable("text")
        return {
            "some": some,
            "same": in_use() - some < 4096,
            "sum": float(tf.add_n([*few, *more])[0, 0]),
            "text": text.shape.rank,
        }

    found = on_arena(program)
    assert 3 << 20 < found["some"] <= 4 << 20
    assert found["same"]


@pytest.mark.parametrize("limit", ["60%", "much", -1])
def test_a_malformed_limit_is_refused(limit) -> None:
    with pytest.raises(tfswap.TfswapError, match="memory_limit"), tfswap.scope(limit):
        pass
