"""Arguments of steps, and a step of a model, its loss and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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


def minimised(loss_of: Callable[..., Any], variables: Sequence[Any], optimizer: Any) -> Any:
    """A step that changes `variables` by the optimizer, which is built here, and returns the loss of its arguments."""
    optimizer.build(variables)

    def step(*arguments: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(*arguments)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    step.variables = variables
    return step


def trained(model: Any, loss_of: Callable[..., Any], optimizer: Any = None) -> Any:
    """A step that trains `model`, by Adam where no optimizer is given. The loss has the model before its arguments."""
    step = minimised(partial(loss_of, model), model.trainable_variables, optimizer or keras.optimizers.Adam(1e-3))
    step.variables = model.variables
    return step
