"""Runs portable models as TensorFlow does: what is imported here imports no tfswap."""

from __future__ import annotations

import hashlib

import numpy as np
import tensorflow as tf
from portable_models import SIZE, WIDTH


def memory(key="peak"):
    return tf.config.experimental.get_memory_info("CPU:0")[key]


def digest(array):
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()


def served(path, x):
    model = tf.saved_model.load(path)
    model.serve(x)
    there = memory("current")
    tf.config.experimental.reset_memory_stats("CPU:0")
    y = model.serve(x)
    return memory(), there, digest(y)


def in_session(path, x):
    x = x.numpy()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        signature = tf.compat.v1.saved_model.load(session, ["serve"], path).signature_def["serving_default"]
        (given,), (result,) = signature.inputs.values(), signature.outputs.values()
        session.run(result.name, {given.name: x})
        there = memory("current")
        tf.config.experimental.reset_memory_stats("CPU:0")
        y = session.run(result.name, {given.name: x})
        return memory(), there, digest(y)


def trained(path, x):
    model = tf.saved_model.load(path)
    losses = [digest(model.train_step(x)) for _ in range(2)]
    tf.config.experimental.reset_memory_stats("CPU:0")
    losses.append(digest(model.train_step(x)))
    return memory(), losses


def without_grappler(run, *given):
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    found = run(*given)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    return found


def normal(*shape):
    return tf.raw_ops.RandomStandardNormal(shape=shape, dtype=tf.float32, seed=1, seed2=1)


def settle():
    """One region, which all that follows fits."""
    slab = tf.raw_ops.Empty(shape=[120, 2**20], dtype=tf.uint8)
    del slab


def serve(plain, *others):
    """A served model's bits without Grappler, and its peaks and bits and others', served and in sessions."""
    settle()
    images = normal(8, SIZE, SIZE, 3)
    runs = [how(path, images) for how in (served, in_session) for path in (plain, *others)]
    return [without_grappler(served, plain, images), *runs]


def train(plain, smaller):
    """A model's losses without Grappler, and peaks and losses of both."""
    settle()
    rows = normal(4096, WIDTH)
    return [without_grappler(trained, plain, rows), trained(smaller, rows), trained(plain, rows)]
