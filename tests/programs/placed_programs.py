"""Training programs whose parts are placed by hand, for test_programs_on_several_gpus.py. The form is that of
mirrored_programs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from gpu_compare import draws
from mirrored_programs import Program, at_each, gradients_of, stages, without_grappler
from several_gpu_kinds import on
from several_gpus import gpus, trained


def all_forward_first() -> Program:
    """Each stage is on a device of its own. All forward passes run before the first backward pass (GPipe)."""
    variables, loss_of, x = stages()

    def step(x):
        total, gradients = gradients_of(lambda x: tf.add_n([loss_of(x[i]) for i in range(4)]), variables, x)
        at_each(variables, lambda variable, gradient: variable.assign_sub(0.01 * gradient), gradients)
        return total

    return Program(variables, step, [[x]] * 3)


def branches_elsewhere() -> Program:
    """A conditional on the first device whose branches run on the last. Bits are those of TensorFlow without its
    optimizers.
    """
    without_grappler()
    first, last = gpus()[0], gpus()[-1]
    with tf.device(first):
        variables = [tf.Variable(0.1 * draws(64, 64, seed=i)) for i in range(4)]
    with tf.device(last):
        others = [tf.Variable(0.1 * draws(64, 64, seed=4 + i)) for i in range(6)]

    def through(h, some):
        with tf.device(last):
            for variable in some:
                h = tf.sin(h @ variable)
            return h

    def loss_of(x, flag):
        with tf.device(first):
            h = x
            for variable in variables:
                h = tf.nn.relu(tf.sin(h @ variable))
            h = tf.cond(flag, lambda: through(h, others[:3]), lambda: through(h, others[3:]))
            return tf.reduce_mean(h * h)

    def step(x, flag):
        return trained([*variables, *others], loss_of, x, flag)

    x = on(0, draws(1024, 64))
    return Program([*variables, *others], step, [[x, tf.constant(flag)] for flag in (True, False, True, False)])


def branches_of_other_lengths() -> Program:
    """A conditional whose branches have one to three layers, on both devices, or one conditional in the other, and then
    another conditional: gradients go through all. Bits are those of TensorFlow without its optimizers.
    """
    without_grappler()
    first, last = gpus()[0], gpus()[-1]
    variables = []
    for i in range(9):
        with tf.device(first if i < 3 else last):
            variables.append(tf.Variable(0.1 * draws(64, 64, seed=i)))
    here, there = variables[:3], variables[3:]

    def through(h, some):
        for variable in some:
            with tf.device(variable.device):
                h = tf.nn.softplus(h @ variable)
        return h

    def loss_of(x, number):
        h = through(x, here)
        inner = lambda: tf.cond(tf.reduce_sum(h) > 1e9, lambda: h, lambda: through(h, there[3:]))  # noqa: E731
        h = tf.switch_case(number, [lambda: through(h, there[:1]), lambda: through(h, [*there[1:3], *here[:1]]), inner])
        with tf.device(last):
            h = tf.cond(number > 0, lambda: through(h, here[1:]), lambda: h * 1.5)
            return tf.reduce_mean(h * h)

    def step(x, number):
        return trained(variables, loss_of, x, number)

    x = on(0, draws(1024, 64))
    return Program(variables, step, [[x, tf.constant(number)] for number in (0, 1, 2, 1)])


PROGRAMS: dict[str, tuple[Callable[[], Program], Any]] = {
    make.__name__: (make, limits)
    for make, limits in (
        (all_forward_first, {"GPU:0": "90%", "GPU:1": "85%"}),
        (branches_elsewhere, {"GPU:0": "80%", "GPU:1": "130%"}),
    )
}
