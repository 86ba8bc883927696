"""Sizes that values decide, on emulated GPUs (tests/emulated_gpu): no value makes a step peak above its plan."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from gpu_compare import DEVICE, draws, reporting, trained, weights
from step_peaks import measuring

import tfswap
from tfswap.exporters.function import memory_optimizer_off

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
