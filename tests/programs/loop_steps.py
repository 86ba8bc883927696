"""Training steps with loops, each with its variables and arguments."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from step_parts import Made, descend, make_data, make_weights


def while_loop() -> Made:
    (w,) = weights = make_weights((64, 64))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            _, h = tf.while_loop(lambda i, h: i < 8, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, x], maximum_iterations=8)
            loss = tf.reduce_sum(h * h)
        return descend(tape, loss, weights)

    return weights, step, [make_data(1000, 64)]


def until_small() -> Made:
    """How many of at most 6 iterations there are depends on the values."""
    (w,) = weights = make_weights((64, 64))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.while_loop(lambda h: tf.reduce_max(h) > 0.1, lambda h: [tf.tanh(h @ w)], [x], maximum_iterations=6)[
                0
            ]
            loss = tf.reduce_sum(h * h)
        return descend(tape, loss, weights)

    return weights, step, [make_data(1000, 64)]


def nested() -> Made:
    """A loop in a loop: what the inner one saves is saved by the outer one."""
    (w,) = weights = make_weights((64, 64))

    def rows(h: Any) -> Any:
        return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, h], maximum_iterations=3)[1]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            _, h = tf.while_loop(lambda i, h: i < 4, lambda i, h: (i + 1, rows(h)), [0, x], maximum_iterations=4)
            loss = tf.reduce_sum(h * h)
        return descend(tape, loss, weights)

    return weights, step, [make_data(1000, 64)]


def overwritten() -> Made:
    """Each iteration replaces a value that it does not read."""
    (w,) = weights = make_weights((64, 64))

    def step(x: Any) -> Any:
        h = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(tf.tanh(x @ w) @ w)), [0, x])[1]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(x @ w + tf.stop_gradient(h)))
        return descend(tape, loss, weights)

    return weights, step, [make_data(1000, 64)]


def slopes() -> Made:
    """Gradients of gradients of a loop in a loop: backward loops have backward loops."""
    (w,) = weights = make_weights((64, 64))

    def rows(h: Any) -> Any:
        return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, h], maximum_iterations=3)[1]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                _, h = tf.while_loop(lambda i, h: i < 4, lambda i, h: (i + 1, rows(h)), [0, x], maximum_iterations=4)
                loss = tf.reduce_sum(h * h)
            slope = inner.gradient(loss, x)
            loss += tf.reduce_sum(slope * slope)
        return descend(tape, loss, weights)

    return weights, step, [make_data(1000, 64)]


def slopes_of_branches() -> Made:
    """Gradients of gradients of a loop with a choice in it, which saves optionals, and of most branches nothing."""
    v, w = weights = make_weights((64, 64), (64, 64))

    def layer(i: Any, h: Any) -> Any:
        return tf.switch_case(i % 3, [lambda: tf.tanh(h @ v), lambda: tf.sigmoid(h @ w) * h, lambda: h * h])

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                _, h = tf.while_loop(
                    lambda i, h: i < 6, lambda i, h: (i + 1, layer(i, h)), [0, x], maximum_iterations=6
                )
                loss = tf.reduce_sum(h * h)
            slope = inner.gradient(loss, x)
            loss = 0.001 * loss + tf.reduce_mean(slope * slope)
        return descend(tape, loss, weights)

    return weights, step, [make_data(512, 64)]


def branches() -> Made:
    """Conditionals in a loop: what their branches save is in lists of optionals."""
    (w,) = weights = make_weights((64, 64))

    def layer(i: Any, h: Any) -> Any:
        return tf.cond(i % 2 == 0, lambda: tf.tanh(h @ w), lambda: tf.nn.relu(h @ w))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            _, h = tf.while_loop(lambda i, h: i < 8, lambda i, h: (i + 1, layer(i, h)), [0, x], maximum_iterations=8)
            loss = tf.reduce_sum(h * h)
        return descend(tape, loss, weights)

    return weights, step, [make_data(1000, 64)]


def act() -> Made:
    """Adaptive computation time: a state is refined, at most ten times, until all rows have halted; here none does."""
    w, u, p = weights = make_weights((64, 64), (64, 64), (64, 1))

    def step(x: Any) -> Any:
        def refine(i: Any, h: Any, halted: Any, total: Any) -> tuple[Any, ...]:
            h = tf.tanh(h @ w + x @ u)
            share = tf.minimum(tf.sigmoid(h @ p - 3.0)[:, 0], 1 - halted) * tf.cast(halted < 0.99, tf.float32)
            return i + 1, h, halted + share, total + share[:, None] * h

        first = (0, tf.zeros_like(x), tf.zeros(x.shape[:1]), tf.zeros_like(x))
        with tf.GradientTape() as tape:
            *_, halted, total = tf.while_loop(
                lambda i, h, halted, *_: tf.reduce_any(halted < 0.99), refine, first, maximum_iterations=10
            )
            loss = tf.reduce_mean(total * total) + 0.01 * tf.reduce_mean(halted)
        return descend(tape, loss, weights)

    return weights, step, [make_data(1000, 64)]


def scan() -> Made:
    u, w = weights = make_weights((64, 64), (64, 64))

    def step(xs: Any) -> Any:
        with tf.GradientTape() as tape:
            hs = tf.scan(lambda h, x: tf.tanh(h @ w + x @ u), xs, initializer=tf.zeros([256, 64]))
            loss = tf.reduce_mean(hs * hs)
        return descend(tape, loss, weights)

    return weights, step, [make_data(12, 256, 64)]


def map_fn() -> Made:
    (w,) = weights = make_weights((64, 64))

    def step(xs: Any) -> Any:
        with tf.GradientTape() as tape:
            hs = tf.map_fn(lambda x: tf.nn.relu(tf.tanh(x @ w) @ w), xs)
            loss = tf.reduce_mean(hs * hs)
        return descend(tape, loss, weights)

    return weights, step, [make_data(12, 256, 64)]


def gradients_of_examples() -> Made:
    """Each example's own, clipped: `tf.vectorized_map` runs the gradients of convolutions in a loop, which is given the
    filters' shape.
    """
    filters, dense = weights = make_weights((5, 5, 1, 8), (1152, 10))

    def step(x: Any) -> Any:
        def gradients(image: Any) -> Any:
            with tf.GradientTape() as tape:
                h = tf.nn.relu(tf.nn.conv2d(image[None], filters, 1, "VALID"))
                loss = tf.reduce_sum(tf.square(tf.reshape(h, [1, -1]) @ dense))
            return loss, tape.gradient(loss, weights)

        losses, made = tf.vectorized_map(gradients, x)
        for weight, each in zip(weights, made, strict=True):
            weight.assign_sub(0.01 * tf.reduce_mean(tf.clip_by_norm(each, 1.0, range(1, len(each.shape))), 0))
        return tf.reduce_sum(losses)

    return weights, step, [make_data(32, 16, 16, 1)]


def ctc() -> Made:
    """TensorFlow's own loss scans with functions of TensorFlow 1, which a node calls by their name."""
    weights = make_weights((3, 40, 128), (128, 30))
    labels = tf.random.stateless_uniform([16, 20], seed=(3, 4), minval=1, maxval=30, dtype=tf.int32)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = tf.nn.relu(tf.nn.conv1d(x, weights[0], 1, "SAME")) @ weights[1]
            label_length, logit_length = tf.fill([16], 20), tf.fill([16], 100)
            loss = tf.reduce_mean(
                tf.nn.ctc_loss(labels, tf.transpose(logits, [1, 0, 2]), label_length, logit_length, blank_index=0)
            )
        return descend(tape, loss, weights)

    return weights, step, [make_data(16, 100, 40)]


def called() -> Made:
    """A loop and a conditional inside of functions that the step calls."""
    w, v = weights = make_weights((64, 64), (64, 64))

    @tf.function
    def looped(x: Any) -> Any:
        return tf.while_loop(lambda i, h: i < 6, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, x], maximum_iterations=6)[1]

    @tf.function
    def either(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > -1e9, lambda: tf.nn.relu(tf.tanh(x @ v)), lambda: x * 0.5)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = either(looped(x))
            loss = tf.reduce_sum(h * h)
        return descend(tape, loss, weights)

    return weights, step, [make_data(1000, 64)]
