"""Sizes that values decide, on emulated GPUs (tests/emulated_gpu): no value makes a step peak above its plan."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import tensorflow as tf
from gpu_compare import DEVICE, draws, reporting, trained, weights
from step_peaks import measuring

import tfswap
from tfswap.exporters.function import grappler_off, memory_optimizer_off

ROWS = 512


def layers(variables, x):
    for variable in variables:
        x = tf.nn.relu(x @ variable)
    return x


def squared(x):
    return tf.reduce_sum(x * x)


def masked(variables, x, mask):
    return squared(layers(variables[4:], tf.boolean_mask(layers(variables[:4], x), mask)))


def taken(variables, x, mask):
    return squared(layers(variables[4:], tf.gather(layers(variables[:4], x), tf.where(mask)[:, 0])))


def distinct(variables, x, mask):
    ids, places = tf.unique(tf.cast(100 * x[:, 0], tf.int32) * tf.cast(mask, tf.int32))
    rows = tf.math.unsorted_segment_sum(layers(variables[:4], x), places, tf.size(ids))
    return squared(layers(variables[4:], rows))


def parted(variables, x, mask):
    out, kept = tf.dynamic_partition(layers(variables[:4], x), tf.cast(mask, tf.int32), 2)
    return squared(layers(variables[4:6], out)) + squared(layers(variables[6:], kept))


def counted(variables, x, mask):
    numbers = tf.cast(1000 * tf.abs(x[:, 0]), tf.int32) * tf.cast(mask, tf.int32)
    counts = tf.math.bincount(numbers, maxlength=ROWS, dtype=tf.float32)
    return squared(layers(variables, x)) + tf.reduce_sum(tf.tanh(counts))


EXACT_WITH_ALL = (masked, taken, counted)
"""Steps that need what is planned where the mask is true throughout. Two parts are never both of all rows."""


@pytest.mark.parametrize("loss_of", [masked, taken, distinct, parted, counted])
def test_no_mask_makes_a_step_peak_above_its_plan(on_gpus, loss_of):
    def program(_):
        random = np.random.default_rng(1)
        none, every = np.zeros(ROWS, bool), np.ones(ROWS, bool)
        masks = [none, every, *(random.random(ROWS) < share for share in random.random(10)), none, every]
        x = tf.constant(draws(ROWS, 64))

        def run(optimized):
            step = optimized(trained(loss_of, weights(*[[64, 64]] * 8)))
            losses, peaks = [], []
            for mask in map(tf.constant, masks):
                with measuring(peaks, DEVICE):
                    losses.append(step(x, mask).numpy().tobytes().hex())
            return losses, peaks, step

        with memory_optimizer_off():
            expected = run(lambda step: step)[0]
        found, peaks, step = run(lambda step: tfswap.optimize(step, memory_limit="60%"))
        plan = step.plan()
        return {
            "same": found == expected,
            "peaks": peaks,
            "planned": plan.planned_peak_bytes,
            "limit": plan.limit_bytes,
            "moves": bool(plan.moves),
        }

    found = on_gpus(reporting(program))
    assert found["same"] and found["report"] == [] and found["moves"]
    assert max(found["peaks"]) <= found["planned"] <= found["limit"]
    if loss_of in EXACT_WITH_ALL:
        assert found["peaks"][1] == found["peaks"][-1] == found["planned"]


@pytest.mark.parametrize("optimizer", ["RMSprop", "Adagrad"])
def test_keras_optimizers_of_an_embedding(on_gpus, optimizer):
    """Sparse gradients: conditionals with an op that has no GPU kernel, and with rows whose number values decide."""

    def program(_):
        batches = [np.random.default_rng(seed).integers(0, 2000, (256, 16), "int32") for seed in range(3)]

        def run(optimized):
            tf.keras.utils.set_random_seed(0)
            layers = [tf.keras.layers.Input((16,), dtype="int32"), tf.keras.layers.Embedding(2000, 32)]
            layers += [tf.keras.layers.Flatten(), *(tf.keras.layers.Dense(256, "relu") for _ in range(3))]
            model = tf.keras.Sequential([*layers, tf.keras.layers.Dense(1)])
            rule = getattr(tf.keras.optimizers, optimizer)()
            rule.build(model.trainable_variables)

            @optimized
            @tf.function
            def step(ids):
                with tf.GradientTape() as tape:
                    loss = squared(model(ids))
                gradients = tape.gradient(loss, model.trainable_variables)
                rule.apply(gradients, model.trainable_variables)
                return loss

            values, peaks = [], []
            for ids in map(tf.constant, batches):
                tf.config.experimental.reset_memory_stats(DEVICE)
                values.append(step(ids).numpy().tobytes().hex())
                peaks.append(tf.config.experimental.get_memory_info(DEVICE)["peak"])
            values += [each.numpy().tobytes().hex() for each in (*model.variables, *rule.variables)]
            return values, peaks, step

        with grappler_off():
            expected, unoptimised = run(lambda step: step)[:2]
        gc.collect()  # the first model's variables
        found, peaks, step = run(lambda step: tfswap.optimize(step, memory_limit=int(0.85 * max(unoptimised))))
        plan = step.plan()
        return {
            "same": found == expected,
            "peaks": peaks,
            "planned": plan.planned_peak_bytes,
            "limit": plan.limit_bytes,
        }

    found = on_gpus(reporting(program))
    assert found["same"] and found["report"] == []
    assert max(found["peaks"]) <= found["planned"] <= found["limit"]
