"""Variables of special kinds in a step whose limit is below its state: they stay on the device, with a reason, or are
at home too. The limit is kept, with the same values.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from processes import on_arena
from step_peaks import measuring
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

import tfswap
from tfswap.exporters.function import memory_optimizer_off

WIDTH, LAYERS, ROWS = 256, 8, 16
NBYTES = 4 * WIDTH * WIDTH
LIMIT = 10 * NBYTES
"""The weights and slots have 16 times the bytes of a weight."""


class Net:
    """Layers with a slot each, and a variable of a kind, which the step uses in `other`."""

    def __init__(self, kind):
        with tfswap.scope():
            draws = [tf.random.stateless_normal([WIDTH, WIDTH], (n, 1), 0, 0.1) for n in range(LAYERS)]
            self.weights = [tf.Variable(value) for value in draws]
            self.slots = [tf.Variable(tf.zeros_like(value)) for value in draws]
            del draws
            self.x = tf.random.stateless_normal([ROWS, WIDTH], (1, 2))
            self.other, self.state = KINDS[kind]()

    def train(self, x):
        with tf.GradientTape() as tape:
            h = x
            for weight in self.weights:
                h = tf.nn.relu(h @ weight)
            loss = self.other(tf.reduce_mean(tf.square(h)), x)
        gradients = tape.gradient(loss, self.weights)
        for weight, slot, gradient in zip(self.weights, self.slots, gradients, strict=True):
            slot.assign(0.9 * slot + gradient)
            weight.assign_sub(0.1 * slot)
        return loss

    def values(self):
        return [v.numpy().tobytes().hex() for v in (*self.weights, *self.slots)]


def strings():
    names = tf.Variable(["a"] * 1024)

    def other(loss, x):
        names.assign(tf.strings.join([names, names[::-1]])[:1024])
        return loss * tf.cast(tf.shape(names)[0], tf.float32)

    return other, [names]


def variants():
    """The handle of a list, as of `tf.TensorArray`."""
    kind = tf.raw_ops.EmptyTensorList(element_shape=[WIDTH], max_num_elements=4, element_dtype=tf.float32)
    lists = tf.Variable(kind, dtype=tf.variant, shape=[])

    def other(loss, x):
        length = tf.raw_ops.TensorListLength(input_handle=lists.read_value())
        return loss + tf.cast(length, tf.float32)

    return other, [lists]


def copied_on_read():
    """A variable that TensorFlow copies when it is read, as after an access by rows."""
    table = tf.Variable(tf.ones([WIDTH, WIDTH]))
    table.scatter_nd_add([[0, 0]], [1.0])

    def other(loss, x):
        table.scatter_nd_add([[1, 1]], [1.0])
        return loss + tf.reduce_sum(tf.gather(table, [0, 1]))

    return other, [table]


def of_xla():
    weight = tf.Variable(tf.ones([WIDTH, WIDTH]) / WIDTH)

    @tf.function(jit_compile=True)
    def compiled(x):
        return tf.reduce_mean(x @ weight)

    return lambda loss, x: loss + compiled(x), [weight]


def of_python():
    weight = tf.Variable(tf.ones([WIDTH, WIDTH]))

    def other(loss, x):
        return loss + tf.ensure_shape(tf.py_function(lambda: tf.reduce_mean(weight), [], tf.float32), [])

    return other, [weight]


def of_python_by_value():
    """The tape computes the gradient of the mean, although nothing uses it."""
    weight = tf.Variable(tf.ones([WIDTH, WIDTH]))

    def other(loss, x):
        means = tf.py_function(tf.reduce_mean, [weight], tf.float32), tf.numpy_function(np.mean, [weight], tf.float32)
        return loss + sum(tf.ensure_shape(mean, []) for mean in means)

    return other, [weight]


def in_parts():
    partition = tf.compat.v1.fixed_size_partitioner(4)
    with tf.compat.v1.variable_scope("parts", use_resource=True, partitioner=partition):
        whole = tf.compat.v1.get_variable("table", [WIDTH, WIDTH], initializer=tf.compat.v1.ones_initializer())

    def other(loss, x):
        return loss + tf.reduce_mean(x @ tf.convert_to_tensor(whole))

    return other, list(whole)


KINDS = {
    "strings": strings,
    "variants": variants,
    "copied on read": copied_on_read,
    "xla": of_xla,
    "python": of_python,
    "python by value": of_python_by_value,
    "in parts": in_parts,
}


REASONS = {"strings": "its elements are strings", "variants": "its elements are variants", "xla": "takes its handle"}
"""Parts of the reasons of variables that stay."""


def trained(kind, limit):
    net = Net(kind)
    step, peaks = tf.function(net.train), []
    if limit is not None:
        step = tfswap.optimize(step, memory_limit=limit)
    losses = []
    for _ in range(3):
        with memory_optimizer_off() if limit is None else measuring(peaks):
            losses.append(step(net.x).numpy().tobytes().hex())
    found = {"losses": losses, "values": net.values(), "peaks": peaks}
    if limit is not None:
        found |= {"reasons": [row.reason for row in step.report().variables], "home": len(step.plan().at_home)}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_limit_holds_with_a_variable_of_a_special_kind(kind: str) -> None:
    def ours():
        return trained(kind, LIMIT)

    def plain():
        return trained(kind, None)

    found, expected = on_arena(ours), on_arena(plain)
    assert found["values"] == expected["values"] and found["losses"] == expected["losses"]
    assert max(found["peaks"]) <= LIMIT
    assert found["home"] >= LAYERS // 2
    assert any(REASONS.get(kind, "") in reason for reason in found["reasons"]), found["reasons"]


def test_a_variable_without_a_value_fails_the_step_as_in_tensorflow() -> None:
    def program():
        net = Net("strings")
        empty = UninitializedVariable(shape=[WIDTH, WIDTH], dtype=tf.float32)
        net.other = lambda loss, x: loss + tf.reduce_mean(empty.read_value())
        step = tfswap.optimize(tf.function(net.train), memory_limit=LIMIT)
        with contextlib.suppress(tf.errors.FailedPreconditionError):
            step(net.x)
            return "it ran"
        empty.assign(tf.ones([WIDTH, WIDTH]))
        peaks = []
        with measuring(peaks):
            step(net.x)
        return max(peaks) <= LIMIT

    assert on_arena(program) is True
