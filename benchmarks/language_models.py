"""Training steps of transformers with Adam, of any size: with values, or to be traced only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """The size of a transformer.

    Attributes:
        causal: whether each position reads the ones before it alone, as in a decoder; else all, as in an encoder.
    """

    layers: int
    width: int
    heads: int
    words: int
    length: int
    batch: int
    causal: bool = True

    @property
    def parameters(self) -> int:
        """The number of weights: four square matrices of attention, two of four squares each, and norms and biases."""
        layer = 12 * self.width**2 + 13 * self.width
        return self.layers * layer + (2 * self.words + self.length + 2) * self.width


def with_values(shape: tuple[int, ...], scale: float, number: int) -> Any:
    """A variable with random values, which are made a slice after the other in a `tfswap.scope`; of zeros, or of ones,
    where `scale` is 0 or negative.
    """
    import tensorflow as tf

    if scale <= 0:
        return tf.Variable(lambda: tf.fill(shape, 1.0 if scale else 0.0), shape=shape, dtype=tf.float32)
    return tf.Variable(lambda: tf.random.stateless_normal(shape, seed=(number, 3)) * scale, dtype=tf.float32)


def without_values(shape: tuple[int, ...], scale: float, number: int) -> Any:
    """A variable that a step can be traced with, and that takes no memory."""
    import tensorflow as tf
    from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

    return UninitializedVariable(trainable=scale != 0, shape=shape, dtype=tf.float32)


def training_step(
    of: Shape, variable: Callable[[tuple[int, ...], float, int], Any] = with_values
) -> tuple[Any, list[Any]]:
    """A step, (tokens, labels) -> the loss, and its variables. Norms come before attention, as in GPT-2.

    Args:
        variable: makes one of a shape, with the scale of its values and its number.
    """
    import tensorflow as tf

    weights: list[Any] = []
    slots: list[tuple[Any, Any]] = []

    def weight(*shape: int, scale: float = 0.02) -> Any:
        weights.append(variable(shape, scale, len(weights)))
        slots.append((variable(shape, 0, 0), variable(shape, 0, 0)))
        return weights[-1]

    def norm() -> tuple[Any, Any]:
        return weight(of.width, scale=-1), weight(of.width, scale=1e-9)

    def dense(inner: int, outer: int) -> tuple[Any, Any]:
        return weight(inner, outer), weight(outer, scale=1e-9)

    embedding, positions = weight(of.words, of.width), weight(of.length, of.width)
    blocks = [
        (
            norm(),
            dense(of.width, 3 * of.width),
            dense(of.width, of.width),
            norm(),
            dense(of.width, 4 * of.width),
            dense(4 * of.width, of.width),
        )
        for _ in range(of.layers)
    ]
    last, head = norm(), weight(of.width, of.words)
    count = variable((), 0, 0)

    def normalized(h: Any, scales: tuple[Any, Any]) -> Any:
        mean, variance = tf.nn.moments(h, [-1], keepdims=True)
        return (h - mean) * tf.math.rsqrt(variance + 1e-5) * scales[0] + scales[1]

    def applied(h: Any, by: tuple[Any, Any]) -> Any:
        return tf.nn.bias_add(tf.matmul(h, by[0]), by[1])

    def attended(h: Any, inward: Any, outward: Any) -> Any:
        parts = tf.split(applied(h, inward), 3, -1)
        each = [tf.transpose(tf.reshape(p, [of.batch, of.length, of.heads, -1]), [0, 2, 1, 3]) for p in parts]
        scores = tf.matmul(each[0], each[1], transpose_b=True) * (of.width // of.heads) ** -0.5
        if of.causal:
            past = tf.linalg.band_part(tf.ones([of.length, of.length]), -1, 0)
            scores = scores - 1e9 * (1 - past)
        read = tf.nn.softmax(scores) @ each[2]
        return applied(tf.reshape(tf.transpose(read, [0, 2, 1, 3]), [-1, of.width]), outward)

    def update(w: Any, moments: tuple[Any, Any], gradient: Any, rate: Any) -> None:
        gradient = tf.convert_to_tensor(gradient)
        mean, square = moments
        mean.assign_add((gradient - mean) * 0.1)
        square.assign_add((tf.square(gradient) - square) * 0.001)
        w.assign_sub(mean * rate / (tf.sqrt(square) + 1e-7))

    @tf.function
    def train_step(tokens: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.reshape(tf.gather(embedding, tokens) + positions, [-1, of.width])
            for before, inward, outward, between, up, down in blocks:
                h += attended(normalized(h, before), inward, outward)
                h += applied(tf.nn.gelu(applied(normalized(h, between), up)), down)
            logits = tf.matmul(normalized(h, last), head)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.reshape(labels, [-1]), logits)
            loss = tf.reduce_mean(losses)
        count.assign_add(1.0)
        rate = 1e-4 * tf.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        for w, moments, gradient in zip(weights, slots, tape.gradient(loss, weights), strict=True):
            update(w, moments, gradient, rate)
        return loss

    return train_step, [*weights, *(slot for each in slots for slot in each), count]
