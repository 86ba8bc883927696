"""Training steps of Keras' recurrent layers, attention and loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from step_parts import Made, descend, make_data, make_weights


def _keras(model: Any, optimizer: Any, x: Any, loss_of: Callable[[Any], Any] = lambda loss: loss) -> Made:
    optimizer.build(model.trainable_variables)
    measure = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = measure(y, model(x, training=True))
            scaled = loss_of(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    y = tf.random.stateless_uniform([x.shape[0]], seed=(3, 4), maxval=10, dtype=tf.int32)
    return [*model.variables, *optimizer.variables], step, [x, y]


def _recurrent(kind: str) -> Made:
    layers = tf.keras.layers
    inputs = tf.keras.Input((12, 32))
    h = getattr(layers, kind)(48, return_sequences=True)(inputs)
    model = tf.keras.Model(inputs, layers.Dense(10)(getattr(layers, kind)(48)(h)))
    return _keras(model, tf.keras.optimizers.Adam(1e-3), make_data(32, 12, 32))


def lstm() -> Made:
    return _recurrent("LSTM")


def gru() -> Made:
    return _recurrent("GRU")


def attention() -> Made:
    """A decoder that adds its state to all keys in each iteration."""
    w, b, v = weights = make_weights((64, 64), (64,), (64,))

    def body(i: Any, h: Any, keys: Any) -> tuple[Any, ...]:
        scores = tf.reduce_sum(v * tf.tanh(keys + (h @ w + b)[:, None]), -1)
        return i + 1, tf.tanh(h + tf.reduce_sum(tf.nn.softmax(scores)[:, :, None] * keys, 1)), keys

    def step(keys: Any) -> Any:
        with tf.GradientTape() as tape:
            first = (0, keys[:, 0], keys)
            h = tf.while_loop(lambda i, *_: i < 20, body, first, maximum_iterations=20)[1]
            loss = tf.reduce_sum(h * h)
        return descend(tape, loss, weights)

    return weights, step, [make_data(16, 50, 64)]


def bidirectional() -> Made:
    """Masks, dropout in the recurrence, and a layer that reads its input in reverse."""
    layers = tf.keras.layers
    inputs = tf.keras.Input((12,), dtype="int32")
    h = layers.Embedding(50, 32, mask_zero=True)(inputs)
    h = layers.Bidirectional(layers.LSTM(48, return_sequences=True, recurrent_dropout=0.2, seed=1))(h)
    model = tf.keras.Model(inputs, layers.Dense(10)(layers.Bidirectional(layers.GRU(32))(h)))
    words = tf.random.stateless_uniform([64, 12], seed=(1, 2), maxval=50, dtype=tf.int32)
    return _keras(model, tf.keras.optimizers.Adam(1e-3), words)


def loss_scale() -> Made:
    layers = tf.keras.layers
    stack = [layers.Input((128,)), *(layers.Dense(128, activation="relu") for _ in range(6)), layers.Dense(10)]
    optimizer = tf.keras.optimizers.LossScaleOptimizer(tf.keras.optimizers.Adam(1e-3))
    return _keras(tf.keras.Sequential(stack), optimizer, make_data(512, 128), optimizer.scale_loss)
