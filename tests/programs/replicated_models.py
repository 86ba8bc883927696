"""Small Keras models that replicas train in mirrored_programs.py, and examples for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from gpu_compare import draws


def images(count: int) -> tuple[Any, Any]:
    """Some of 16 x 16 pixels, and their classes."""
    return draws(count, 16, 16, 3), np.arange(count) % 10


def tokens(count: int) -> tuple[Any, Any]:
    """Sequences of 32, and those that are to follow each."""
    drawn = np.random.default_rng(1).integers(0, 200, (2, count, 32))
    return drawn[0].astype("int32"), drawn[1]


def convolutions(normalization: Callable[[], Any]) -> Any:
    """A net of three convolutions with layers that normalize; logits are in float32."""
    made = tf.keras.layers
    x = images_in = made.Input((16, 16, 3))
    for width in (16, 16, 32):
        x = made.ReLU()(normalization()(made.Conv2D(width, 3, padding="same", use_bias=False)(x)))
    return tf.keras.Model(images_in, made.Dense(10, dtype="float32")(made.GlobalAveragePooling2D()(x)))


def normalized_over_replicas() -> Any:
    return convolutions(lambda: tf.keras.layers.BatchNormalization(synchronized=True))


def normalized_in_groups() -> Any:
    return convolutions(lambda: tf.keras.layers.GroupNormalization(4))


def half_precision() -> Any:
    """`normalized_over_replicas` in float16, with variables in float32."""
    tf.keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        return normalized_over_replicas()
    finally:
        tf.keras.mixed_precision.set_dtype_policy("float32")


def transformer() -> Any:
    """Three blocks with causal attention and dropout."""
    made = tf.keras.layers
    x = tokens_in = made.Input((32,), dtype="int32")
    x = made.Embedding(200, 64)(x)
    for _ in range(3):
        attention = made.MultiHeadAttention(4, 16, dropout=0.1)
        x = made.LayerNormalization()(x + attention(x, x, use_causal_mask=True))
        x = made.LayerNormalization()(x + made.Dense(64)(made.Dense(256, "gelu")(x)))
    return tf.keras.Model(tokens_in, made.Dense(200)(x))


def recurrent_layers() -> Any:
    made = tf.keras.layers
    lstm, gru = made.LSTM(64, return_sequences=True, use_cudnn=False), made.GRU(64, use_cudnn=False)
    return tf.keras.Sequential([made.Input((24, 32)), lstm, gru, made.Dense(10)])
