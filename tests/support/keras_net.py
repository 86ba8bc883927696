"""What nets of tests have in common that train a Keras model with an optimizer of its own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class KerasNet:
    """Attributes:
    model, optimizer: both built.
    """

    model: Any
    optimizer: Any

    def train(self, x: Any) -> Any:
        """One step; its loss."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(x, training=True)))
        weights = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    @property
    def state(self) -> list[Any]:
        """All variables."""
        return [*self.model.variables, *self.optimizer.variables]
