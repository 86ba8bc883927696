"""Training steps that accumulate gradients or train in a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from step_parts import Made, descend, make_data, make_weights


def stack_loss(h: Any, weights: list[Any]) -> Any:
    for w in weights:
        h = tf.nn.relu(tf.tanh(h @ w))
    return tf.reduce_mean(h * h)


def _summed(weights: list[Any], loss_of: Callable[[Any], Any], x: Any) -> Made:
    """Gradients are summed over micro-batches: a forward and a backward pass in each iteration."""
    sums = [tf.Variable(tf.zeros_like(w)) for w in weights]

    def step(x: Any) -> Any:
        total = tf.constant(0.0)
        for i in tf.range(x.shape[0]):
            with tf.GradientTape() as tape:
                loss = loss_of(x[i])
            for s, g in zip(sums, tape.gradient(loss, weights), strict=True):
                s.assign_add(g)
            total += loss
        for w, s in zip(weights, sums, strict=True):
            w.assign_sub(0.01 * s)
            s.assign(tf.zeros_like(s))
        return total

    return [*weights, *sums], step, [x]


def micro_batches() -> Made:
    """A stack of dense layers, whose maps wait."""
    weights = make_weights(*[(64, 64)] * 6)
    return _summed(weights, lambda x: stack_loss(x, weights), make_data(4, 1000, 64))


def pools_in_micro_batches() -> Made:
    """A net whose maps wait for their signs and for where their maxima lie."""
    weights = make_weights((8, 32), (32, 32), (32, 32))

    def loss_of(h: Any) -> Any:
        for w in weights:
            h = tf.nn.max_pool2d(tf.nn.relu(tf.tensordot(h, w, 1)), 2, 2, "SAME")
        return tf.reduce_mean(h * h)

    return _summed(weights, loss_of, make_data(3, 8, 32, 32, 8))


def dropout_in_loop() -> Made:
    """What the loop saves of its masks and of the last map is read for predicates alone."""
    weights = make_weights((64, 64), (64, 64))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for i in tf.range(8):
                y = tf.nn.experimental.stateless_dropout(tf.nn.relu(h @ weights[0]), 0.3, seed=tf.stack([i, 3]))
                h += tf.nn.relu(y @ weights[1])
            loss = tf.reduce_mean(h * h)
        return descend(tape, loss, weights)

    return weights, step, [make_data(1000, 64)]


def recurrent_micro_batches() -> Made:
    """As `micro_batches`, of a net that is a loop itself."""
    (w,) = weights = make_weights((64, 64))
    total = tf.Variable(tf.zeros_like(w))

    def step(x: Any) -> Any:
        total.assign(tf.zeros_like(w))
        for i in tf.range(3):
            with tf.GradientTape() as tape:
                _, h = tf.while_loop(
                    lambda t, h: t < 8, lambda t, h: (t + 1, tf.tanh(h @ w)), [0, x[i]], maximum_iterations=8
                )
                loss = tf.reduce_sum(h * h)
            total.assign_add(tape.gradient(loss, w))
        w.assign_sub(0.01 * total)
        return tf.reduce_sum(total)

    return [*weights, total], step, [make_data(3, 1000, 64)]


def steps_in_loop() -> Made:
    """Several steps in a loop, each of two micro-batches in a loop of its own, with gradients in loop variables."""
    weights = make_weights(*[(64, 64)] * 5)
    loop = functools.partial(tf.while_loop, parallel_iterations=1)  # else who draws first is up to the executor

    def micro_step(i: Any, sums: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = stack_loss(tf.nn.dropout(x[i], 0.1, seed=3), weights)
        return i + 1, [s + g for s, g in zip(sums, tape.gradient(loss, weights), strict=True)], x

    def one_step(k: Any, x: Any) -> Any:
        zeros = [tf.zeros(w.shape) for w in weights]
        sums = loop(lambda i, *_: i < 2, micro_step, [0, zeros, x], maximum_iterations=2)[1]
        for w, s in zip(weights, sums, strict=True):
            w.assign_sub(0.01 * s)
        return k + 1, x

    def step(x: Any) -> Any:
        loop(lambda k, _: k < 3, one_step, [0, x], maximum_iterations=3)
        return stack_loss(x[0], weights)

    return weights, step, [make_data(2, 1000, 64)]
