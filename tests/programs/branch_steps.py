"""Training steps with conditionals and masks, each with its variables and arguments."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from micro_batch_steps import stack_loss
from step_parts import Made, descend, make_data, make_weights


def _residual(x: Any, weights: list[Any]) -> Any:
    for w in weights:
        x = tf.tanh(x @ w) + x
    return x


def masked_loss() -> Made:
    """A loss of the rows that a mask takes."""
    weights = make_weights(*[(64, 64)] * 6)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = _residual(x, weights)
            rows = tf.boolean_mask(h, x[:, 0] > 0.3)
            loss = tf.reduce_mean(rows * rows)
        return descend(tape, loss, weights)

    return weights, step, [make_data(2048, 64)]


def hard_examples() -> Made:
    """A loss of the rows that are worse than the mean, and of the distinct groups that they are in."""
    weights = make_weights(*[(64, 64)] * 6)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = _residual(x, weights)
            error = tf.reduce_mean((h - x) ** 2, 1)
            hard = tf.where(error > tf.reduce_mean(error))[:, 0]
            groups, _ = tf.unique(hard // 4)
            loss = tf.reduce_mean(tf.gather(error, hard)) + tf.reduce_mean(tf.gather(h, groups) ** 2)
        return descend(tape, loss, weights)

    return weights, step, [make_data(2048, 64)]


def cond() -> Made:
    """Conditionals in the forward pass, and so in the backward pass; the larger branch is taken."""
    weights = make_weights(*[(64, 64)] * 6)

    def layer(i: int, h: Any) -> Any:
        w = weights[i]
        if i % 2 == 0:
            return tf.tanh(h @ w)
        return tf.cond(tf.reduce_sum(h) > -1e9, lambda: tf.nn.relu(tf.tanh(h @ w)), lambda: h * 0.5)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for i in range(len(weights)):
                h = layer(i, h)
            loss = tf.reduce_mean(h * h)
        return descend(tape, loss, weights)

    return weights, step, [make_data(2000, 64)]


def skipped() -> Made:
    """Layers that are skipped by chance: a branch hands on what it is given, which has no buffer of its own then."""
    weights = make_weights(*[(64, 64)] * 6)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for i, w in enumerate(weights):
                kept = tf.reduce_sum(h) > (-1e9 if i % 3 else 1e9)
                h = tf.sin(tf.cond(kept, lambda h=h, w=w: h + tf.nn.elu(h @ w), lambda h=h: h))
            loss = tf.reduce_mean(h * h)
        return descend(tape, loss, weights)

    return weights, step, [make_data(2000, 64)]


def conditional_update() -> Made:
    """Updates, with momentum, in a conditional: variables are assigned in its body."""
    weights = make_weights(*[(128, 128)] * 6)
    momenta = [tf.Variable(tf.zeros_like(w)) for w in weights]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = tf.nn.relu(tf.tanh(h @ w))
            loss = tf.reduce_mean(h * h)
        gradients = tape.gradient(loss, weights)

        def update() -> Any:
            for w, m, g in zip(weights, momenta, gradients, strict=True):
                m.assign(0.9 * m + g)
                w.assign_sub(0.01 * m)
            return tf.constant(True)

        tf.cond(tf.math.is_finite(loss), update, lambda: tf.constant(False))
        return loss

    return [*weights, *momenta], step, [make_data(1000, 128)]


def training_branch() -> Made:
    """The larger branch of a conditional holds most of the step."""
    weights = make_weights(*[(64, 64)] * 6)

    def train_on(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = stack_loss(x, weights)
        return descend(tape, loss, weights)

    def step(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > -1e9, lambda: train_on(x), lambda: tf.reduce_mean(x))

    return weights, step, [make_data(1000, 64)]
