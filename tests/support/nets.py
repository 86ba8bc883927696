"""A network to train in tests, and comparisons of values: bit by bit, with those of the same tf.function.

Without Grappler's memory optimizer, whose sums differ from run to run; without Grappler where tfswap leaves that off.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import tfswap
from tfswap.exporters.function import grappler_off, memory_optimizer_off
from tfswap.ir import custom_ops

WIDTH = 128
LIMIT = "50%"


class Net:
    """A stack of dense layers, with the step that trains it."""

    def __init__(self, layers: int = 6, seed: int = 0, width: int = WIDTH):
        self.weights = [
            tf.Variable(tf.random.stateless_normal([width, width], seed=(i, seed)) * 0.1) for i in range(layers)
        ]

    def loss(self, x, scale=1.0):
        h = x
        for weight in self.weights:
            h = tf.nn.relu(tf.sin(h @ weight))
        return tf.reduce_mean(h) * scale

    def step(self, x, scale=1.0):
        with tf.GradientTape() as tape:
            loss = self.loss(x, scale)
        for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss


def batch(rows: int = 1024, seed: int = 7):
    return tf.random.stateless_normal([rows, WIDTH], seed=(seed, seed))


def recurrent(cell, rate: float = 1e-6):
    """A step of twelve products in a loop, which trains `cell`."""

    def step(x):
        with tf.GradientTape() as tape:
            _, h = tf.while_loop(
                lambda i, _: i < 12,
                lambda i, h: (i + 1, tf.nn.relu(tf.sin(h @ cell))),
                [0, x],
                maximum_iterations=12,
            )
            loss = tf.reduce_sum(h)
        cell.assign_sub(rate * tape.gradient(loss, cell))
        return loss

    return step


def recurrent_cell():
    return tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], seed=(1, 2)) * 0.1)


def averaged(strategy, net):
    """A step of a replica, and of all replicas of a strategy, whose gradients are summed over them."""

    def replica(x):
        with tf.GradientTape() as tape:
            loss = net.loss(x)
        gradients = tape.gradient(loss, net.weights)
        gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
        for weight, gradient in zip(net.weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return replica, lambda x: strategy.reduce("MEAN", strategy.run(replica, (x,)), None)


def bits(structure) -> list[bytes]:
    arrays = [np.asarray(t) for t in tf.nest.flatten(structure) if t is not None]
    return [repr(a.tolist()).encode() if a.dtype == object else a.tobytes() for a in arrays]


def unoptimised(function, *args, **kwargs):
    with memory_optimizer_off():
        return function(*args, **kwargs)


def as_traced(function, *args, **kwargs):
    """What a step gives that Grappler is off for: with loops or conditionals, or on several devices."""
    with grappler_off():
        return function(*args, **kwargs)


def trained(weights, start, function, *calls):
    """Weights set to `start`, and a call with each of `calls`: the bits of all results and weights, and the peak."""
    for weight, value in zip(weights, start, strict=True):
        weight.assign(value)
    tf.config.experimental.reset_memory_stats("CPU:0")
    found = [bits(function(*arguments)) for arguments in calls]
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return [found, bits(weights)], peak


def floor_of(function, *args, **asked) -> int:
    try:
        tfswap.optimize(function, memory_limit=1, **asked)(*args)
    except tfswap.InfeasibleMemoryLimit as error:
        return error.floor_bytes
    raise AssertionError("no step fits into a byte")


def swaps(concrete) -> int:
    return sum(op.type in custom_ops.ALL for op in concrete.graph.get_operations())


def pool_in_use() -> int:
    """Host memory for handles and copies."""
    import tfswap.ops

    stats = tfswap.ops.stats()
    return stats.pool_in_use_bytes - stats.home_bytes


def called(net, **traced):
    return tfswap.optimize(tf.function(net.step, **traced), memory_limit=LIMIT)
