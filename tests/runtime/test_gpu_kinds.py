"""Steps of many kinds on emulated GPUs: peaks as planned, to the byte, with identical values and no races.

Unlike those of test_gpus.py, these are about what single ops do on a GPU.
"""

from __future__ import annotations

import gc

import numpy as np
import tensorflow as tf
from gpu_compare import compare, draws, reporting


def compare_alone(gpus, *arguments, **options):
    """As `compare`, in addition the races of this comparison alone."""
    gc.collect()  # or what it frees later is in the first plan
    found = compare(gpus, *arguments, **options)
    found["races"] = gpus.report()
    gpus.clear_races()
    return found


def check_exact(found: dict) -> None:
    assert found.pop("report") == []
    for name, kind in found.items():
        planned, measured = kind["planned"]
        assert kind["same"] and not kind["races"], (name, kind)
        assert measured == planned, (name, kind)


def test_a_ctc_loss_behind_convolutions(on_gpus):
    """Its loops compute their state anew in each iteration, and its constants include a matrix of `tf.eye`."""

    def loss_of(variables, x, labels):
        for kernel in variables[:2]:
            x = tf.nn.relu(tf.nn.conv1d(x, kernel, 1, "SAME"))
        lengths, frames = tf.fill([8], 5), tf.fill([8], 40)
        loss = tf.nn.ctc_loss(labels, x @ variables[2], lengths, frames, logits_time_major=False, blank_index=-1)
        return tf.reduce_mean(loss)

    def program(gpus):
        labels = np.random.default_rng(0).integers(1, 11, (8, 5)).astype("i")
        shapes = [[3, 16, 64], [3, 64, 64], [64, 12]]
        return {
            share: compare_alone(gpus, loss_of, shapes, draws(8, 40, 16), labels, limit=share)
            for share in ("92%", "150%")
        }

    check_exact(on_gpus(reporting(program)))


CONSTANTS = {
    "a diagonal": lambda: tf.eye(64),
    "a range": lambda: tf.range(64.0),
    "an interval": lambda: tf.linspace(0.0, 1.0, 64),
    "padded": lambda: tf.pad(tf.constant(np.arange(32.0, dtype="f")), [[0, 32]], constant_values=2.0),
    "a band": lambda: tf.linalg.band_part(tf.ones([64, 64]), -1, 0),
    "one hot": lambda: tf.one_hot(tf.constant(np.arange(64, dtype="i")), 64),
}


def scaled_loss(variables, x, made):
    y = tf.nn.relu((x @ variables[0]) * made()) @ variables[1]
    # With a loop in it, a step is planned as it was traced: Grappler folds nothing.
    (small,) = tf.while_loop(lambda y: tf.reduce_max(y) > 0.01, lambda y: (y * 0.5,), [tf.stop_gradient(x[:4])])
    return tf.reduce_mean(y * y) + tf.reduce_mean(small)


def test_kernels_of_constants_that_tensorflow_does_not_fold(on_gpus):
    def program(gpus):
        found = {}
        for name, made in CONSTANTS.items():

            def loss_of(variables, x, made=made):
                return scaled_loss(variables, x, made)

            found[name] = compare_alone(gpus, loss_of, [[64, 64]] * 2, draws(64, 64), limit="92%")
        return found

    check_exact(on_gpus(reporting(program)))
