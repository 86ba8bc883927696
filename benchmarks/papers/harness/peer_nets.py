"""The nets of peers.py in segments, and the steps that train them: as they are, recomputed, and in micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Model(NamedTuple):
    """A model in segments, so that a segment can be wrapped."""

    variables: list[Any]
    blocks: list[Callable[[Any], Any]]
    loss_of: Callable[[Any, Any], Any]  # of the last block's output and the targets
    arguments: tuple[Any, Any]  # the first block's input and the targets


class Weights(list[Any]):
    """All variables that a model has made, from numbered seeds."""

    def make(self, *shape: int, scale: float) -> Any:
        import tensorflow as tf

        self.append(tf.Variable(scale * tf.random.stateless_normal(shape, seed=(len(self), 7))))
        return self[-1]


def normalised(h: Any, axes: Sequence[int]) -> Any:
    import tensorflow as tf

    mean, variance = tf.nn.moments(h, axes, keepdims=True)
    return (h - mean) * tf.math.rsqrt(variance + 1e-5)


def transformer(layers: int = 6, width: int = 192, heads: int = 4, length: int = 96, batch: int = 8) -> Model:
    """Blocks of causal attention and a GELU layer, each behind a normalisation."""
    import tensorflow as tf

    weights = Weights()
    mask = tf.linalg.band_part(tf.ones([length, length]), -1, 0)

    def make_block() -> Callable[[Any], Any]:
        gains = [weights.make(width, scale=1.0) for _ in range(2)]
        project = weights.make(width, 3 * width, scale=width**-0.5)
        join = weights.make(width, width, scale=width**-0.5)
        widen = weights.make(width, 4 * width, scale=width**-0.5)
        narrow = weights.make(4 * width, width, scale=0.5 * width**-0.5)

        def block(h: Any) -> Any:
            qkv = tf.reshape((gains[0] * normalised(h, [-1])) @ project, [h.shape[0], length, 3, heads, width // heads])
            q, k, v = tf.unstack(tf.transpose(qkv, [2, 0, 3, 1, 4]))
            scores = tf.matmul(q, k, transpose_b=True) * (width // heads) ** -0.5
            mixed = tf.nn.softmax(scores - 1e9 * (1 - mask)) @ v
            h += tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [h.shape[0], length, width]) @ join
            return h + tf.nn.gelu((gains[1] * normalised(h, [-1])) @ widen) @ narrow

        return block

    blocks = [make_block() for _ in range(layers)]
    arguments = [tf.random.stateless_normal([batch, length, width], seed=(i, 9)) for i in range(2)]
    return Model(weights, blocks, lambda h, y: tf.reduce_mean((h - y) ** 2), (arguments[0], arguments[1]))


def resnet(layers: int = 8, width: int = 16, size: int = 32, batch: int = 16) -> Model:
    """Bottleneck blocks on images, normalised over space and channels, so that parts of a batch do as the whole."""
    import tensorflow as tf

    weights = Weights()

    def make_block() -> Callable[[Any], Any]:
        shapes = (1, 4 * width, width), (3, width, width), (1, width, 4 * width)
        kernels = [weights.make(n, n, i, o, scale=(2 / (n * n * i)) ** 0.5) for n, i, o in shapes]

        def block(h: Any) -> Any:
            inner = h
            for kernel in kernels:
                inner = normalised(tf.nn.conv2d(tf.nn.relu(inner), kernel, 1, "SAME"), [1, 2, 3])
            return h + inner

        return block

    blocks = [make_block() for _ in range(layers)]
    arguments = [tf.random.stateless_normal([batch, size, size, 4 * width], seed=(i, 9)) for i in range(2)]
    return Model(weights, blocks, lambda h, y: tf.reduce_mean((h - y) ** 2), (arguments[0], arguments[1]))


MODELS: dict[str, Callable[[], Model]] = {
    "transformer": transformer,
    "wide_transformer": functools.partial(transformer, layers=4, width=384, heads=6, length=128, batch=16),
    "resnet": resnet,
    "wide_resnet": functools.partial(resnet, layers=6, width=64, size=56, batch=8),
}


def gradients_of(model: Model, x: Any, y: Any, wrap: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        h = x
        for block in model.blocks:
            h = wrap(block)(h)
        loss = model.loss_of(h, y)
    return loss, tape.gradient(loss, model.variables)


def make_step(model: Model, wrap: Callable[[Any], Any] = lambda block: block) -> Callable[[Any, Any], Any]:
    """The step of all variants but accumulation: momentum, all in one call."""
    import tensorflow as tf

    slots = [tf.Variable(tf.zeros_like(v)) for v in model.variables]

    def step(x: Any, y: Any) -> Any:
        loss, gradients = gradients_of(model, x, y, wrap)
        update(model.variables, slots, gradients)
        return loss

    return step


def rematerialised(block: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A block as a Keras layer that Keras runs again in the backward pass."""
    import keras

    class Block(keras.layers.Layer):
        def call(self, h: Any) -> Any:
            return block(h)

    with keras.RematScope(mode="full"):
        return Block()


def update(variables: Sequence[Any], slots: Sequence[Any], gradients: Sequence[Any]) -> None:
    for variable, slot, gradient in zip(variables, slots, gradients, strict=True):
        slot.assign(0.9 * slot + gradient)
        variable.assign_sub(1e-2 * slot)


def accumulating(model: Model, parts: int) -> Callable[[Any, Any], Any]:
    """One call for each micro-batch, which adds to the sums, and one that updates."""
    import tensorflow as tf

    slots, sums = ([tf.Variable(tf.zeros_like(v)) for v in model.variables] for _ in range(2))

    @tf.function
    def accumulate(x: Any, y: Any) -> Any:
        loss, gradients = gradients_of(model, x, y, lambda block: block)
        for total, gradient in zip(sums, gradients, strict=True):
            total.assign_add(gradient / parts)
        return loss / parts

    @tf.function
    def update_all() -> None:
        update(model.variables, slots, sums)
        for total in sums:
            total.assign(tf.zeros_like(total))

    # A data pipeline hands out micro-batches; they are cut here once, so that no step has a copy of its input.
    pieces = list(zip(*(tf.split(argument, parts) for argument in model.arguments), strict=True))

    def step(*_: Any) -> Any:
        loss = tf.add_n([accumulate(x, y) for x, y in pieces])
        update_all()
        return loss

    return step
