"""Gradients of micro-batches, accumulated in a loop: what test_unroll.py runs in processes of their own."""

from __future__ import annotations

import gc
import hashlib
import json  # noqa: F401 for what imports all
import random
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from micro_batches import micro_batches
from step_peaks import measuring

import tfswap
from tfswap.errors import InfeasibleMemoryLimit
from tfswap.passes.prepare import unroll_loops

Run = Callable[[Any], tuple[str, int]]


def model_step(make: Callable[[], Any], shape: tuple[int, ...], parts: int = 4) -> tuple[Any, Run]:
    """A step of micro-batches, and what runs a function of it: to a digest of losses and variables after three steps,
    and the peak.
    """
    keras.utils.set_random_seed(0)
    model = make()
    step = micro_batches(model, shape, parts, learning_rate=0.05)
    x = tf.random.stateless_normal(shape, seed=(1, 2))
    y = tf.random.stateless_uniform([shape[0]], seed=(3, 4), maxval=10, dtype=tf.int32)
    return step, runner([*model.variables, *step.optimizer.variables], x, y)


def runner(state: list[Any], *arguments: Any) -> Run:
    """What runs a step three times, from the state that the variables have now."""
    begin = [variable.numpy() for variable in state]

    def run(function: Any) -> tuple[str, int]:
        for variable, value in zip(state, begin, strict=True):
            variable.assign(value)
        losses, peaks = [], []
        for _ in range(3):
            with measuring(peaks):
                losses.append(function(*arguments).numpy().tobytes())
        values = [variable.numpy().tobytes() for variable in state]
        return hashlib.sha256(b"".join(losses + values)).hexdigest(), max(peaks)

    return run


def mlp() -> Any:
    make = keras.layers
    return keras.Sequential([keras.Input((256,)), *[make.Dense(256, "tanh") for _ in range(6)], make.Dense(10)])


def convolutions() -> Any:
    """Dropout's seeds, and the averages of a batch norm, are written in each iteration."""
    make = keras.layers
    first = [make.Conv2D(32, 3, padding="same"), make.BatchNormalization(), make.ReLU(), make.Dropout(0.3)]
    rest = [make.MaxPooling2D(), make.Conv2D(32, 3, activation="relu"), make.Dropout(0.2)]
    ends = [make.GlobalAveragePooling2D(), make.Dense(10)]
    return keras.Sequential([keras.Input((32, 32, 3)), *first, *rest, *ends])


def attention() -> Any:
    """Kernels of one core, and gradients of weights that nothing waits for."""
    make = keras.layers
    h = inputs = keras.Input((128, 128))
    for _ in range(2):
        h = make.Add()([h, make.MultiHeadAttention(4, 32)(h, h)])
        h = make.Add()([h, make.Dense(128)(make.Dense(256, "gelu")(make.LayerNormalization()(h)))])
    return keras.Model(inputs, make.Dense(10)(make.GlobalAveragePooling1D()(h)))


def burn(seconds: float) -> None:
    end = time.monotonic() + seconds
    a = np.ones((300, 300))
    while time.monotonic() < end:
        a @ a


def measured(make: Callable[[], Any], shape: tuple[int, ...], share: float, busy: int = 0) -> dict[str, Any]:
    """Bits and peaks with and without a limit, a share of the unoptimised peak. Grappler is off, for its last bits.

    Args:
        busy: the number of other threads that run meanwhile.
    """
    step, run = model_step(make, shape)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    wanted, unoptimised = run(tf.function(step))
    optimised = tfswap.optimize(tf.function(step), memory_limit=int(unoptimised * share))
    others = [threading.Thread(target=burn, args=(3.0,)) for _ in range(busy)]
    for thread in others:
        thread.start()
    bits, peak = run(optimised)
    plan = optimised.plan()
    return {
        "same": bits == wanted,
        "peak": peak,
        "planned": plan.planned_peak_bytes,
        "limit": plan.limit_bytes,
        "order": list(plan.order),
        "concurrent": plan.concurrent,
    }


def random_loop(seed: int) -> tuple[Any, Run]:
    """Gradients summed in a loop whose body may update weights or an average, draw masks, loop, and branch."""
    choose = random.Random(seed)
    weights = [tf.Variable(0.1 * tf.random.stateless_normal([64, 64], (i, seed))) for i in range(choose.randint(2, 4))]
    average, count = tf.Variable(tf.zeros([64])), tf.Variable(0)
    parts, most = choose.randint(1, 6), choose.choice((None, 9))
    x = tf.random.stateless_normal([parts, choose.choice((256, 512)), 64], (seed, 3))
    updates, averages, masks, loops, branches = (choose.random() < 0.4 for _ in range(5))
    layers = [choose.choice((tf.tanh, tf.nn.relu, tf.sigmoid)) for _ in weights]

    def loss_of(h: Any, i: Any) -> Any:
        for weight, layer in zip(weights, layers, strict=True):
            h = layer(h @ weight)
            if masks:
                h = tf.nn.experimental.stateless_dropout(h, 0.3, seed=tf.stack([count.read_value(), i]))
        return tf.reduce_mean(h * h)

    def body(i: Any, total: Any, *sums: Any) -> Any:
        count.assign_add(i)
        h = x[i]
        if loops:
            h = tf.while_loop(lambda j, _: j < 3, lambda j, h: (j + 1, h + tf.tanh(h) * tf.cast(j, h.dtype)), (0, h))[1]
        if branches:
            h = tf.cond(tf.reduce_sum(h) > 0, lambda: h * 2.0, lambda: tf.tanh(h))
        if averages:
            average.assign(0.9 * average + 0.1 * tf.reduce_mean(h, 0))
            h -= average
        with tf.GradientTape() as tape:
            loss = loss_of(h, i)
        gradients = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, gradients if updates else (), strict=updates):
            weight.assign_sub(0.05 * gradient)
        return (i + 1, total + loss, *[s + g for s, g in zip(sums, gradients, strict=True)])

    def step() -> Any:
        given = (tf.constant(0), tf.constant(0.0), *map(tf.zeros_like, weights))
        _, total, *sums = tf.while_loop(lambda i, *_: i < parts, body, given, maximum_iterations=most)
        for weight, gradient in zip(weights, sums, strict=True):
            weight.assign_sub(0.1 * gradient)
        return total

    return step, runner([*weights, average, count])


def random_loops(seeds: range) -> list[list[bool]]:
    """Of each random loop whether it has the loop's bits, whether it keeps its limit, whether it was unrolled, and
    whether its smallest limit is no higher than the loop's.
    """
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    unroll_loops.LEAST_MEAN_S = 0.0
    slab = tf.raw_ops.Empty(shape=[200 << 20], dtype=tf.uint8)  # one region
    del slab
    found: list[list[bool]] = []
    for step, run in map(random_loop, seeds):
        wanted, _ = run(tf.function(step))
        floor = _floor(step)
        with mock.patch.object(unroll_loops, "MOST_TRIPS", -1):
            looped = _floor(step)
        optimised = tfswap.optimize(tf.function(step), memory_limit=int(1.02 * floor))
        bits, peak = run(optimised)
        names = optimised.plan().order
        unrolled = not names or any("iteration_0" in name for name in names)  # some fit as they are
        found.append([bits == wanted, peak <= 1.02 * floor, unrolled, floor <= 1.01 * looped])
    return found


def _floor(step: Any) -> int:
    gc.collect()  # tensors of functions before, which would go before the step is planned again
    try:
        tfswap.optimize(tf.function(step), memory_limit=1)()
    except InfeasibleMemoryLimit as error:
        return error.floor_bytes
    raise AssertionError("no step fits into a byte")
