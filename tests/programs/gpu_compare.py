"""The common parts of programs of test_gpus.py and others, which run on emulated GPUs."""

from __future__ import annotations

import gc

import numpy as np
import tensorflow as tf

import tfswap
from tfswap.exporters.function import memory_optimizer_off

DEVICE = "GPU:0"


def draws(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype("f")


def weights(*shapes):
    return [tf.Variable(0.1 * draws(*shape, seed=i)) for i, shape in enumerate(shapes)]


def trained(loss_of, variables, signature=None):
    @tf.function(input_signature=signature)
    def step(*inputs):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, *inputs)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    return step


def run(step, inputs, variables, steps=3):
    losses, peaks = [], []
    for _ in range(steps):
        tf.config.experimental.reset_memory_stats(DEVICE)
        losses.append(step(*inputs).numpy().tobytes().hex())
        peaks.append(tf.config.experimental.get_memory_info(DEVICE)["peak"])
    return [*losses, *(each.numpy().tobytes().hex() for each in variables)], max(peaks)


def compare(gpus, loss_of, shapes, *inputs, limit="60%", signature=None, **options):
    inputs = [tf.constant(each) for each in inputs]
    variables = weights(*shapes)
    with memory_optimizer_off():  # Grappler swaps and recomputes by itself, and then adds in another order
        expected, unoptimised = run(trained(loss_of, variables, signature), inputs, variables)
    del variables
    gc.collect()  # what is freed while a step is planned was in use when its peak began to count
    variables = weights(*shapes)
    step = tfswap.optimize(trained(loss_of, variables, signature), memory_limit=limit, **options)
    found, peak = run(step, inputs, variables)
    plan = step.plan()
    return {
        "same": found == expected,
        "kept": peak <= plan.limit_bytes < unoptimised,
        "planned": [plan.planned_peak_bytes, peak],
        "swaps": len(plan.evictions),
        "splits": len(plan.splits),
        "out": gpus.counts().bytes_out,
    }


def relu_loss(variables, x):
    for variable in variables:
        x = tf.nn.relu(x @ variable)
    return tf.reduce_mean(x * x)


SHAPES = [[128, 128]] * 8


def made():
    """The variables of a small step, and the step, which swaps."""
    variables = weights(*SHAPES)
    return variables, tfswap.optimize(trained(relu_loss, variables), memory_limit="60%", tactics=("swap",))


def batch():
    return tf.constant(draws(512, 128))


def reporting(program):
    """A program of the same result, with what was found of races in addition."""

    def reported(gpus):
        tf.config.experimental.enable_op_determinism()
        found = program(gpus)
        return {**found, "report": gpus.report().splitlines()}

    return reported


def check(found: dict, *, swaps: bool = True, exact: bool = True) -> None:
    assert found["report"] == []
    assert found["same"] and found["kept"], found
    assert bool(found["swaps"]) >= swaps
    planned, measured = found["planned"]
    assert measured <= planned
    if exact:
        assert measured == planned
