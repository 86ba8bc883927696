"""Steps with tables of embeddings, which are read and updated in part: what test_tables.py runs on arenas."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

WIDTH = 64
ROWS = 20000


def normal(shape: list[int], seed: int) -> Any:
    return tf.random.stateless_normal(shape, seed=(seed, 0))


def batch(count: int, different: int) -> list[Any]:
    """`count` ids, of which `different` are different, and what their rows are compared with."""
    ids = np.resize(np.random.default_rng(1).permutation(ROWS - 8)[:different], count)
    return [tf.constant(ids, tf.int32), normal([count, WIDTH], 4)]


def mean_of_squares(x: Any) -> Any:
    return tf.reduce_mean(x * x)


class Net:
    """A table, a weight and the table's slot."""

    def __init__(self, rows: int = ROWS):
        self.table = tf.Variable(normal([rows, WIDTH], 1))
        self.weight = tf.Variable(normal([WIDTH, WIDTH], 2) * 0.1)
        self.slot = tf.Variable(tf.zeros([rows, WIDTH]))
        self.variables = [self.table, self.weight, self.slot]

    def loss(self, ids: Any, other: Any) -> Any:
        h = tf.nn.tanh(tf.gather(self.table, ids) @ self.weight)
        return mean_of_squares(tf.nn.relu(h @ self.weight) - other)

    def step(self, ids: Any, other: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss(ids, other)
        gradients: Any = tape.gradient(loss, [self.table, self.weight])
        self.update(gradients[0])
        self.weight.assign_sub(1e-2 * gradients[1])
        return loss

    def update(self, gradient: Any) -> None:
        raise NotImplementedError


class Whole(Net):
    """Looked up, then updated as a whole, as Keras' optimizers do; read so as well, as tied embeddings are."""

    def loss(self, ids: Any, other: Any) -> Any:
        decay = 1e-3 * mean_of_squares(self.table + 0.0)
        return super().loss(ids, other) + decay

    def update(self, gradient: Any) -> None:
        self.slot.assign(0.9 * self.slot + tf.convert_to_tensor(gradient))
        self.table.assign_sub(0.1 * self.slot)


class Sparse(Net):
    """Updated in part, by sums over equal ids, and its slot with it; both then decay as a whole."""

    def update(self, gradient: Any) -> None:
        rows, places = tf.unique(gradient.indices)
        sums = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
        tf.raw_ops.ResourceSparseApplyMomentum(
            var=self.table.handle, accum=self.slot.handle, lr=1e-2, grad=sums, indices=rows, momentum=0.9
        )
        self.table.assign_sub(1e-3 * self.table)
        self.slot.assign(0.99 * self.slot)


class Inside(Net):
    """Looked up in a loop, and updated in part by a conditional."""

    def step(self, ids: Any, other: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.zeros_like(other)
            for i in tf.range(3):
                h = tf.nn.tanh((h + tf.gather(self.table, ids + i)) @ self.weight)
            loss = mean_of_squares(h - other)
        gradient: Any = tape.gradient(loss, self.weight)
        if loss > 0.0:
            self.table.scatter_sub(tf.IndexedSlices(1e-3 * other, ids))
        else:
            self.table.scatter_add(tf.IndexedSlices(1e-3 * other, ids))
        self.table.assign_sub(1e-3 * self.table)
        self.weight.assign_sub(1e-2 * gradient)
        return loss


class OnlyInPart(Net):
    """Looked up and updated in part, and never touched as a whole."""

    def update(self, gradient: Any) -> None:
        self.table.scatter_sub(tf.IndexedSlices(1e-2 * gradient.values, gradient.indices))


NETS = {made.__name__: made for made in (Whole, Sparse, Inside, OnlyInPart)}
