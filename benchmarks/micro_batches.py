"""A training step that accumulates the gradients of micro-batches in a loop: for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def micro_batches(model: Any, shape: Sequence[int], parts: int, learning_rate: float = 1e-3) -> Any:
    """The step on x and y: gradients of `parts` batches, summed in a loop and applied once, with momentum.

    Args:
        shape: of x; y has the same first axis.

    The step's `optimizer` has variables too.
    """
    import keras
    import tensorflow as tf

    variables = model.trainable_variables
    optimizer = keras.optimizers.SGD(learning_rate, momentum=0.9)
    optimizer.build(variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    size = shape[0] // parts

    def step(x: Any, y: Any) -> Any:
        sums, total = [tf.zeros_like(v) for v in variables], 0.0
        for i in tf.range(parts):
            some_x = tf.ensure_shape(x[i * size : (i + 1) * size], [size, *x.shape[1:]])
            some_y = tf.ensure_shape(y[i * size : (i + 1) * size], [size, *y.shape[1:]])
            with tf.GradientTape() as tape:
                loss = loss_of(some_y, model(some_x, training=True)) / parts
            sums = [s + g for s, g in zip(sums, tape.gradient(loss, variables), strict=True)]
            total += loss
        optimizer.apply_gradients(zip(sums, variables, strict=True))
        return total

    step.optimizer = optimizer
    return step
