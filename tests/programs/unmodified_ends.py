"""A program that trains for one step. Its argument is how it ends: "usual", "abrupt", or with an "own limit"."""

from __future__ import annotations

import os
import sys

import tensorflow as tf

weights = tf.Variable(tf.ones([64, 64]))


@tf.function
def train_step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.tanh(x @ weights))
    weights.assign_sub(0.1 * tape.gradient(loss, weights))


if __name__ == "__main__":
    if sys.argv[1] == "own limit":
        import tfswap

        train_step = tfswap.optimize(train_step, memory_limit="1GiB")
    train_step(tf.ones([32, 64]))
    if sys.argv[1] == "abrupt":
        os._exit(3)
