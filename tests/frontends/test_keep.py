"""tfswap.keep: marked tensors stay."""

from __future__ import annotations

import tensorflow as tf

import tfswap


def _step(mark):
    weights = [tf.Variable(tf.random.stateless_normal([256, 256], seed=(i, 1)) * 0.06) for i in range(6)]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for i, w in enumerate(weights):
                h = tf.nn.relu(h @ w)
                if mark and i == 1:
                    h = tfswap.keep(h)
            loss = tf.reduce_mean(h * h)
        for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    return step


def test_a_marked_tensor_is_never_swapped() -> None:
    x = tf.random.stateless_normal([4096, 256], seed=(1, 2))
    for mark in (False, True):
        step = tfswap.optimize(_step(mark), memory_limit="60%")
        step(x)
        swapped = {row.name for row in step.report().swapped}
        assert swapped
        assert ("Relu_1:0" in swapped) is not mark
        if mark:
            reasons = {row.name: row.reason for row in step.report().rows}
            assert "keep" in reasons["Relu_1:0"]


def test_outside_of_a_function_it_hands_its_argument_back() -> None:
    x = tf.constant(1.0)
    assert tfswap.keep(x) is x
