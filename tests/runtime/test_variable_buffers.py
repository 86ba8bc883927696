"""Callers change the holders of variables' buffers between steps; limits hold."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf
from processes import on_arena
from slow import slow
from step_peaks import measuring

import tfswap
from tfswap.ir.permits import TACTICS, TENSOR_TACTICS

ROWS, WIDTH = 128, 256


def at(offset, array):
    room = np.empty(array.nbytes + 128, np.uint8)
    begin = -room.ctypes.data % 64 + offset
    made = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


class Trained:
    """Weights and slots that are assigned in each step, and others that are only read."""

    def __init__(self, frozen):
        def draw(seed, n):
            return tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], (seed, n)) * 0.06)

        self.weights = [draw(1, n) for n in range(5)]
        self.slots = [tf.Variable(tf.zeros_like(weight)) for weight in self.weights]
        self.frozen = [draw(3, n) for n in range(frozen)]
        self.held = []

    def train(self, x):
        with tf.GradientTape() as tape:
            h = x
            for weight in (*self.weights, *self.frozen):
                h = tf.nn.relu(h @ weight)
            loss = tf.reduce_mean(tf.square(h))
        for weight, slot, gradient in zip(self.weights, self.slots, tape.gradient(loss, self.weights), strict=True):
            slot.assign(0.9 * slot + gradient)
            weight.assign_sub(0.1 * slot)
        return loss

    def between(self, how, call):
        """Read, assign or hold variables before this call."""
        if how == "held":
            self.held.clear()
        for variable in self.frozen:
            variable.sparse_read(tf.constant([0]))
        for n, variable in enumerate((*self.weights, *self.slots)):
            if how == "held":
                self.held.append(tf.identity(variable))
            elif how == "from NumPy":  # which TensorFlow adopts, or copies to memory outside of the arena
                variable.assign(at(4 * ((n + call) % 2), variable.numpy()))
            elif how == "some" and (n + call) % 3 == 0:
                variable.assign(at(0, variable.numpy()))
            elif how == "from tensors":
                variable.assign(variable * 0.99)
            elif how == "in part" and n % 2 == 0:  # which turns on its copy-on-read mode
                variable.sparse_read(tf.constant([0]))
            elif how == "one for all" and n < 5:
                variable.assign(self.weights[0])


def steps(how, limit, frozen=0, tactics=TACTICS):
    """Measured and planned peaks, the limit, and what tfswap logs."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("tfswap").addHandler(handler)
    net = Trained(frozen)
    x = tf.random.stateless_normal([ROWS, WIDTH], (2, 2))
    step = tfswap.optimize(tf.function(net.train), memory_limit=limit, tactics=tactics)
    measured, planned = [], []
    for call in range(6):
        if call:
            net.between(how, call)
        with measuring(measured):
            step(x)
        planned.append(step.report().planned_peak_bytes)
    return [measured, planned, step.report().memory_limit_bytes, messages]


@pytest.mark.parametrize(
    ("how", "limit"),
    [
        ("held", "100%"),
        ("from NumPy", "75%"),
        ("one for all", "80%"),
        ("frozen", "75%"),
        *slow(("some", "75%"), ("from tensors", "80%"), ("in part", "75%")),
    ],
)
def test_variables_may_be_assigned_and_held_between_steps(how: str, limit: str) -> None:
    measured, planned, kept, messages = on_arena(lambda: steps(how, limit, 4 * (how == "frozen")))
    assert max(measured) <= kept
    assert measured == planned
    assert not messages


def test_copies_without_room_are_reported_before_the_step() -> None:
    messages = on_arena(lambda: steps("held", "90%", tactics=TENSOR_TACTICS))[-1]
    assert messages
    for message in messages:
        assert "can no longer be kept" in message
        assert "share their buffers with tensors that are still held" in message


def test_a_variable_that_is_shared_is_copied_by_its_first_update_only() -> None:
    def program():
        from tfswap.device.variable_buffers import StepVariables

        a, b, inner = (tf.Variable(tf.zeros([1000]) + n) for n in range(3))
        variables = StepVariables({"a": a.handle, "b": b.handle, "inner": inner.handle}, {"inner"})
        variables.own()
        found = [sorted(variables.shared())]
        held = [tf.identity(a), tf.identity(inner)]
        found.append(sorted(variables.shared()))  # from then on `inner` has its own
        array = np.ones(1000 + 16, np.float32)
        array = array[-array.ctypes.data % 64 // 4 :][:1000]
        b.assign(array)
        found.append(sorted(variables.shared()))
        b.assign_add(tf.ones([1000]))
        a.assign_add(tf.ones([1000]))
        found.append(sorted(variables.shared()))
        del b  # which is no longer asked about
        found.append(sorted(variables.shared()))
        return [found, [float(tf.reduce_sum(t)) for t in (*held, a)], float(array.sum())]

    before, sums, own = on_arena(program)
    assert before == [[], ["a"], ["a"], [], []]
    assert sums == [0, 2000, 1000]
    assert own == 1000
