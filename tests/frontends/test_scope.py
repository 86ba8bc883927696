"""Variables that are made at home in host memory: models that are larger than the arena."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib

import numpy as np
import pytest
import tensorflow as tf
from processes import on_arena
from slow import slow
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


def made_in_first_trace(how, limit):
    """Losses and a digest of a net whose slots, or weights too, the first trace of its step makes."""
    tf.keras.utils.set_random_seed(1)
    dense, made = [tf.keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS // 2)], []
    model, optimizer = tf.keras.Sequential(dense), tf.keras.optimizers.SGD(0.01, momentum=0.9)
    if how == "slots":
        with tfswap.scope() if limit else contextlib.nullcontext():
            model.build((None, WIDTH))

    def step(x):
        if how == "variables" and not made:
            draws = [functools.partial(tf.random.stateless_normal, [WIDTH, WIDTH], (n, 1)) for n in range(LAYERS)]
            made.extend(tf.Variable(lambda draw=draw: 0.01 * draw() * 3.0) for draw in draws)
        with tf.GradientTape() as tape:
            h = x if made else model(x)
            for variable in made:
                h = tf.tanh(h @ variable)
            loss = tf.reduce_mean(tf.square(h))
        weights = made or model.trainable_variables
        for weight, gradient in zip(made, tape.gradient(loss, made), strict=True) if made else ():
            weight.assign_sub(0.1 * gradient)
        if not made:
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    called = tf.function(step)
    called, peaks = tfswap.optimize(called, memory_limit=limit) if limit else called, []
    x, losses = tf.random.stateless_normal([16, WIDTH], (1, 2)), []
    for _ in range(2):
        with measuring(peaks):
            losses.append(float(called(x)))
    state = made or [*model.variables, *optimizer.variables]
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in state)).hexdigest()
    return {"result": [losses, digest], "peak": max(peaks)}


@pytest.mark.parametrize("how", ["variables", *slow("slots", "weights")])
def test_variables_that_the_first_trace_makes_are_at_home(how: str) -> None:
    """They are more than the arena holds."""
    limit = (ARENA_MIB << 20) - (1 << 19)

    def program():
        return made_in_first_trace(how, limit)

    def plain():
        return made_in_first_trace(how, None)

    found = on_arena(program, ARENA_MIB)
    assert found["result"] == on_arena(plain)["result"]
    assert found["peak"] <= limit


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


def made(kernel="glorot_uniform"):
    """Variables whose largest has 10 MiB, with slots."""
    keras = tf.keras
    keras.utils.set_random_seed(1)
    generator = tf.random.Generator.from_seed(3)
    shared = keras.random.SeedGenerator(4)
    layers = [keras.layers.Embedding(40_961, 64), keras.layers.Dense(700, kernel_initializer=kernel)]
    kernels = ("truncated_normal", "ones", keras.initializers.Constant(0.3), keras.initializers.HeNormal(shared))
    layers += [keras.layers.Dense(401, kernel_initializer=each) for each in kernels]
    layers += [keras.layers.Dense(40, kernel_initializer=keras.initializers.RandomNormal(seed=shared))]
    for layer in layers:
        layer.build((None, 803))
    variables = [variable for layer in layers for variable in layer.variables]
    optimizer = keras.optimizers.Adam()
    optimizer.build(variables)
    makers = {
        "drawn": lambda: generator.normal([700, 77]),
        "array": lambda: np.arange(300_000.0).reshape(100, 3000),
        "constant": lambda: tf.constant(2.0, shape=[300, 500]),
        "cast": lambda: tf.cast(tf.random.stateless_uniform([501, 501], (1, 2), -1, 1), tf.bfloat16) * 3,
        "eager": lambda: tf.random.uniform([7, 50]),  # keeps a generator's state
    }
    variables += [tf.Variable(make, name=name) for name, make in makers.items()]
    return [*variables, *optimizer.variables, generator.state, shared.state]


def digests(variables):
    return [hashlib.sha256(variable.numpy().tobytes()).hexdigest() for variable in variables]


def test_variables_that_are_larger_than_the_limit_are_made_in_slices() -> None:
    def program():
        figures, peaks, expected = [], [], digests(made())
        for limit in (512 << 10, 24 << 20, None):
            gc.collect()
            with measuring(peaks), tfswap.scope(limit):
                variables = made()
            info = tf.config.experimental.get_memory_info("CPU:0")
            figures.append([digests(variables) == expected, peaks[-1], info["current"]])
            del variables
        with pytest.raises(tfswap.InfeasibleMemoryLimit) as refused, tfswap.scope("512KiB"):
            made("orthogonal")
        with pytest.raises(tfswap.InfeasibleMemoryLimit) as in_slices, tfswap.scope("48KiB"):
            made()
        return [figures, [str(refused.value), str(in_slices.value)], refused.value.floor_bytes]

    figures, errors, floor = on_arena(program, 256)
    for (same, peak, _), limit in zip(figures, (512 << 10, 24 << 20, 16 << 20), strict=True):
        assert same and peak <= limit, figures
    assert figures[0][2] < 64 << 10 and figures[1][2] > 6 << 20 and figures[2][2] < 64 << 10, figures
    assert "variable 'kernel' of 2.1 MiB" in errors[0] and "as a whole: " in errors[0], errors
    assert "variable 'embeddings' of 10.0 MiB" in errors[1] and "even in slices" in errors[1], errors
    assert floor > 803 * 700 * 4


@pytest.mark.emulated_gpu(memory=64 << 20, count=2)
def test_variables_that_are_larger_than_the_limit_are_made_on_gpus(on_gpus) -> None:
    """One, and one with a copy for a second replica."""

    def program(gpus):
        tf.config.experimental.enable_op_determinism()
        expected, peaks = digests(made()[:4]), []
        gc.collect()
        strategy = tf.distribute.MirroredStrategy()
        with measuring(peaks, "GPU:0"), measuring(peaks, "GPU:1"), tfswap.scope("512KiB"):
            found = digests(made()[:4])
            with strategy.scope():
                table = tf.keras.layers.Embedding(
                    40_961, 64, embeddings_initializer=lambda *_, **__: tf.ones([40_961, 64])
                )
                table.build(None)
        copies = [float(tf.reduce_min(copy[40_000:])) for copy in table.variables[0].value.values]
        return [found == expected, copies, peaks, gpus.report().splitlines()]

    same, copies, peaks, races = on_gpus(program)
    assert same and copies == [1.0, 1.0] and max(peaks) <= 512 << 10 and races == [], peaks


@pytest.mark.parametrize("limit", ["60%", "much", -1])
def test_a_malformed_limit_is_refused(limit) -> None:
    with pytest.raises(tfswap.TfswapError, match="memory_limit"), tfswap.scope(limit):
        pass
