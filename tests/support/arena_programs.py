"""Steps of programs in an arena of their own, and what measures floors and peaks there."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf
from processes import Program, on_arena

import tfswap

MIB = 2**20
messages: list[str] = []
"""What tfswap has logged in this process, since `run` or `listen`."""


class Heard(logging.Handler):
    def emit(self, record):
        messages.append(record.getMessage())


def info():
    return tf.config.experimental.get_memory_info("CPU:0")


def reset():
    tf.config.experimental.reset_memory_stats("CPU:0")


def settle(cap_mib=512):
    """Makes the arena one free region, as a GPU's is from the start."""
    slab = tf.raw_ops.Empty(shape=[(cap_mib - 2) * MIB], dtype=tf.uint8)
    del slab
    reset()


def floor_of(function, *args, **asked):
    try:
        tfswap.optimize(function, memory_limit=1, **asked)(*args)
    except tfswap.InfeasibleMemoryLimit as error:
        return error.floor_bytes


def peak_of(function, *args):
    reset()
    _result = function(*args)  # held while the peak is read
    return info()["peak"]


class Dense:
    def __init__(self, width, layers):
        self.width = width
        self.weights = [
            tf.Variable(tf.random.stateless_normal([width, width], seed=(i, 0)) * 0.1) for i in range(layers)
        ]

    def step(self, x):
        with tf.GradientTape() as tape:
            h = x
            for weight in self.weights:
                h = tf.nn.relu(tf.sin(h @ weight))
            loss = tf.reduce_mean(h)
        for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    def batch(self, rows, seed=1):
        return tf.random.stateless_normal([rows, self.width], seed=(seed, 1))


class Normed:
    def __init__(self):
        self.filters = [tf.Variable(tf.random.stateless_normal([3, 3, 8, 8], seed=(i, 0)) * 0.1) for i in range(6)]
        self.scales = [tf.Variable(tf.ones([8])) for _ in range(6)]
        self.offsets = [tf.Variable(tf.zeros([8])) for _ in range(6)]

    def step(self, x):
        variables = [*self.filters, *self.scales, *self.offsets]
        with tf.GradientTape() as tape:
            h = x
            for kernel, scale, offset in zip(self.filters, self.scales, self.offsets, strict=True):
                h = tf.nn.conv2d(h, kernel, 1, "SAME")
                h, _, _ = tf.compat.v1.nn.fused_batch_norm(h, scale, offset, is_training=True)
                h = tf.nn.relu(h)
            loss = tf.reduce_mean(h)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    def batch(self, rows, seed=1):
        return tf.random.stateless_normal([rows, 32, 32, 8], seed=(seed, 1))


def run(program: Program, cap_mib: int = 512, **env: str) -> Any:
    """The result of `program` in a process with an arena of its own, which collects what tfswap logs in `messages`."""

    def listening():
        logging.getLogger("tfswap").addHandler(Heard(logging.WARNING))
        return program()

    return on_arena(listening, cap_mib, **env)
