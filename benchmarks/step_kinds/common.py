"""Arguments of steps, and a step of a model, its loss and an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Made = tuple[Any, tuple[Any, ...]]
"""A step, whose `variables` it trains, and its arguments."""

rng = np.random.RandomState(0)


def seed() -> None:
    """Make initial weights the same in each process."""
    keras.utils.set_random_seed(1)


def normal(*shape: int) -> Any:
    """Random numbers in the arena: a tensor made from an array may stay in the array's memory."""
    return tf.raw_ops.AddV2(x=rng.randn(*shape).astype(np.float32), y=np.float32(0))


def integers(most: int, *shape: int) -> Any:
    """Random integers from 0 to `most` - 1."""
    return tf.constant(rng.randint(0, most, shape).astype(np.int32))


def trained(model: Any, loss_fn: Callable[..., Any], optimizer: Any = None) -> Any:
    """A step that trains `model`, by Adam where no optimizer is given."""
    optimizer = optimizer or keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    def step(*arguments: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(model, *arguments)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    step.variables = model.variables
    return step
