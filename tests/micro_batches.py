"""Gradients of micro-batches, accumulated in a loop: what test_unroll.py runs in processes of their own."""

from __future__ import annotations

import hashlib
import json  # noqa: F401 for what imports all
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import tfswap

Run = Callable[[Any], tuple[str, int]]


def micro_batches(make: Callable[[], Any], shape: tuple[int, ...], parts: int = 4) -> tuple[Any, Run]:
    """A step, and what runs a function of it: to a digest of losses and variables after three steps, and the peak."""
    keras.utils.set_random_seed(0)
    model = make()
    variables = model.trainable_variables
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(variables)
    size = shape[0] // parts
    x = tf.random.stateless_normal(shape, seed=(1, 2))
    y = tf.random.stateless_uniform([shape[0]], seed=(3, 4), maxval=10, dtype=tf.int32)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> Any:
        sums, total = [tf.zeros_like(v) for v in variables], 0.0
        for i in tf.range(parts):
            some_x = tf.ensure_shape(x[i * size : (i + 1) * size], [size, *shape[1:]])
            some_y = tf.ensure_shape(y[i * size : (i + 1) * size], [size])
            with tf.GradientTape() as tape:
                loss = loss_of(some_y, model(some_x, training=True)) / parts
            sums = [s + g for s, g in zip(sums, tape.gradient(loss, variables), strict=True)]
            total += loss
        optimizer.apply_gradients(zip(sums, variables, strict=True))
        return total

    state = [*model.variables, *optimizer.variables]
    begin = [v.numpy() for v in state]

    def run(function: Any) -> tuple[str, int]:
        for variable, value in zip(state, begin, strict=True):
            variable.assign(value)
        losses, peaks = [], []
        for _ in range(3):
            tf.config.experimental.reset_memory_stats("CPU:0")
            losses.append(function(x, y).numpy().tobytes())
            peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        values = [variable.numpy().tobytes() for variable in state]
        return hashlib.sha256(b"".join(losses + values)).hexdigest(), max(peaks)

    return step, run


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


def measured(make: Callable[[], Any], shape: tuple[int, ...], share: float) -> dict[str, Any]:
    """Bits and peaks with and without a limit, a share of the unoptimised peak. Grappler is off, for its last bits."""
    step, run = micro_batches(make, shape)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    wanted, unoptimised = run(tf.function(step))
    optimised = tfswap.optimize(tf.function(step), memory_limit=int(unoptimised * share))
    bits, peak = run(optimised)
    plan = optimised.plan()
    return {
        "same": bits == wanted,
        "unoptimised": unoptimised,
        "peak": peak,
        "planned": plan.planned_peak_bytes,
        "limit": plan.limit_bytes,
        "order": list(plan.order),
        "predicted": optimised.report().baseline_peak_bytes,
    }
