"""Variables, data and updates of the steps in loops and conditionals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

Made = tuple[list[Any], Callable[..., Any], list[Any]]
"""Variables, the step's function, and its arguments."""


def make_weights(*shapes: tuple[int, ...]) -> list[Any]:
    return [tf.Variable(tf.random.stateless_normal(shape, seed=(i, 7)) * 0.05) for i, shape in enumerate(shapes)]


def make_data(*shape: int) -> Any:
    return tf.random.stateless_normal(shape, seed=(1, 2))


def descend(tape: Any, loss: Any, weights: list[Any]) -> Any:
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(0.01 * tf.convert_to_tensor(gradient))
    return loss
