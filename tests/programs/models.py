"""Models, small, with their training steps: what test_models.py runs in processes of their own.

    python models.py MODEL unoptimised    # Grappler off: the reference for the bits
    python models.py MODEL default        # TensorFlow as it is: the reference for the unoptimised peak
    python models.py MODEL predicted      # only the unoptimised peak that tfswap expects
    python models.py MODEL LIMIT          # a share such as 70%, or "floor"

Prints a JSON object: the measured peak, the planned figures, and a digest of losses and variables.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from accuracy import trained

STEPS = 3

Made = tuple[Any, Callable[..., Any], list[Any]]


def _images(batch: int, size: int) -> list[Any]:
    x = tf.random.stateless_normal([batch, size, size, 3], seed=(1, 2))
    return [x, tf.random.stateless_uniform([batch], seed=(3, 4), maxval=10, dtype=tf.int32)]


def vgg() -> Made:
    layers = tf.keras.layers
    stack: list[Any] = [layers.Input((64, 64, 3))]
    for width in (16, 32, 64):
        stack += [layers.Conv2D(width, 3, padding="same", activation="relu") for _ in range(2)]
        stack.append(layers.MaxPooling2D())
    stack += [layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10)]
    model = tf.keras.Sequential(stack)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.SGD(1e-2)
    return model, trained(model, loss_of, optimizer), _images(16, 64)


def mobilenet() -> Made:
    model = tf.keras.applications.MobileNetV2(weights=None, input_shape=(96, 96, 3), classes=10)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy()
    optimizer = tf.keras.optimizers.SGD(1e-2, momentum=0.9)
    return model, trained(model, loss_of, optimizer), _images(8, 96)


def transformer() -> Made:
    layers, width, heads, length, words = tf.keras.layers, 128, 4, 64, 500
    inputs = tf.keras.Input((length,), dtype="int32")
    h = layers.Embedding(words, width)(inputs)
    a = layers.LayerNormalization()(h)
    attention = layers.MultiHeadAttention(heads, width // heads, dropout=0.1, seed=0)
    h = layers.Add()([h, attention(a, a, use_causal_mask=True)])
    m = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(h))
    h = layers.Add()([h, layers.Dropout(0.1, seed=9)(layers.Dense(width)(m))])
    model = tf.keras.Model(inputs, layers.Dense(words)(h))
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    tokens = tf.random.stateless_uniform([16, length], seed=(1, 2), maxval=words, dtype=tf.int32)
    return model, trained(model, loss_of, tf.keras.optimizers.Adam(1e-3)), [tokens, tokens]


def swish() -> Made:
    layers = tf.keras.layers
    stack: list[Any] = [layers.Input((64, 64, 3))]
    for width in (16, 32, 64):
        stack += [layers.Conv2D(width, 3, padding="same", use_bias=False), layers.BatchNormalization()]
        stack += [layers.Activation("swish"), layers.MaxPooling2D()]
    model = tf.keras.Sequential([*stack, layers.GlobalAveragePooling2D(), layers.Dense(10)])
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, trained(model, loss_of, tf.keras.optimizers.SGD(1e-2, momentum=0.9)), _images(32, 64)


class _Messages(tf.Module):
    """A graph network, whose layers all average over the same edges."""

    def __init__(self, layers: int = 5, width: int = 64, nodes: int = 1024):
        super().__init__()
        self.nodes = nodes
        self.weights = [
            tf.Variable(tf.random.stateless_normal([width, width], seed=(i, 1)) * 0.1) for i in range(layers)
        ]

    def step(self, x: Any, source: Any, target: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for weight in self.weights:
                messages = tf.gather(h @ weight, source)
                h += tf.nn.elu(tf.math.unsorted_segment_mean(messages, target, self.nodes))
            loss = tf.reduce_mean(h * h)
        gradients: Any = tape.gradient(loss, self.weights)
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.assign_sub(1e-2 * gradient)
        return loss


def messages() -> Made:
    model = _Messages()
    x = tf.random.stateless_normal([model.nodes, 64], seed=(1, 2))
    edges = [tf.random.stateless_uniform([40000], seed=(1, i), maxval=model.nodes, dtype=tf.int32) for i in (3, 4)]
    return model, model.step, [x, *edges]


MODELS: dict[str, Callable[[], Made]] = {
    "vgg": vgg,
    "mobilenet": mobilenet,
    "transformer": transformer,
    "messages": messages,
    "swish": swish,
}


def settle() -> None:
    """Make the arena one free region, as a GPU's is from the start."""
    cap_bytes = int(os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"]) << 20
    slab = tf.raw_ops.Empty(shape=[cap_bytes - (2 << 20)], dtype=tf.uint8)
    del slab
    tf.config.experimental.reset_memory_stats("CPU:0")


def train(model: Any, function: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    digest = hashlib.sha256()
    tf.config.experimental.reset_memory_stats("CPU:0")
    for _ in range(STEPS):
        digest.update(function(*arguments).numpy().tobytes())
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    for variable in model.variables:
        digest.update(variable.numpy().tobytes())
    return {"peak": peak, "digest": digest.hexdigest()}


def main(name: str, limit: str) -> dict[str, Any]:
    import tfswap
    from tfswap.exporters.function import memory_optimizer_off

    settle()
    tf.keras.utils.set_random_seed(0)
    model, step, arguments = MODELS[name]()
    function = tf.function(step)
    if limit == "predicted":
        analysed = tfswap.optimize(function, memory_limit="100%", mode="analyze")
        analysed.get_concrete_function(*arguments)
        return {"baseline": analysed.report().baseline_peak_bytes}
    if limit == "default":
        return train(model, function, arguments)
    if limit == "unoptimised":
        with memory_optimizer_off():
            return train(model, function, arguments)
    if limit == "floor":
        try:
            tfswap.optimize(tf.function(step), memory_limit=1)(*arguments)
        except tfswap.InfeasibleMemoryLimit as error:
            limit_bytes: int | str = int(error.floor_bytes * 1.02)
    else:
        limit_bytes = limit
    optimized = tfswap.optimize(function, memory_limit=limit_bytes, on_exceeded="raise")
    result = train(model, optimized, arguments)
    plan = optimized.plan()
    return {
        **result,
        "limit": plan.limit_bytes,
        "planned": plan.planned_peak_bytes,
        "baseline": optimized.report().baseline_peak_bytes,
        "swapped": len(plan.evictions),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
