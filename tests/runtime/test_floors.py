"""Floors: at a floor a step runs, and below it it is refused, also where its bodies have constants.

Floors are compared to the byte: a plan is a promise about the allocator, and the allocator is simulated.
"""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
import tensorflow as tf
from arena_programs import MIB, Dense, floor_of, info, peak_of, run, settle
from slow import slow

import tfswap
from tfswap.ir.permits import TENSOR_TACTICS
from tfswap.runtime.arena_watch import ArenaWatch
from tfswap.runtime.function_maker import FunctionMaker

pytest.importorskip("tensorflow")

# --- floors -----------------------------------------------------------------------------------------------


def floor_and_runs(width, rows, settled, floor=None, tried=(0, -1, 0), other=False):
    """A floor, and whether the step runs in each of some limits, which are given as bytes above the floor. Variables
    stay on the device: each step begins with the same bytes there.

    Args:
        other: whether another tensor is in the arena.
    """
    net = Dense(width, 4)
    if settled:
        settle()
    _held = tf.zeros([100]) if other else None
    x = net.batch(rows)
    function = tf.function(net.step)

    def runs(limit):
        try:
            step = tfswap.optimize(function, memory_limit=limit, on_exceeded="raise", tactics=TENSOR_TACTICS)
            peak = max(peak_of(step, x) for _ in range(3))
            return peak <= limit and step.report().floor_bytes <= limit
        except tfswap.InfeasibleMemoryLimit:
            return False

    floor = floor or floor_of(function, x, tactics=TENSOR_TACTICS)
    return [floor, [runs(floor + more) for more in tried]]


@pytest.mark.parametrize(
    ("width", "rows", "settled"),
    [(16, 64, True), (128, 4096, False), *slow((16, 64, False), (128, 4096, True))],
)
def test_at_the_floor_the_step_runs_and_below_it_is_refused(width, rows, settled):
    """The large step has constants of megabytes, which are allocated after the arena was first read."""
    floor, ran = run(lambda: floor_and_runs(width, rows, settled))
    assert ran == [True, False, True]
    for other in (False, True):
        _, ran = run(lambda other=other: floor_and_runs(width, rows, settled, floor, (0,), other))
        assert ran == [True], f"in a fresh process, with another tensor: {other}"


def test_a_floor_holds_though_tracing_again_leaves_something_in_the_arena():
    def program():
        net = Dense(128, 4)
        settle()
        x = net.batch(4096)
        floor = floor_of(tf.function(net.step), x)
        _held = tf.zeros([500])
        step = tfswap.optimize(tf.function(net.step), memory_limit=floor, on_exceeded="raise")
        return [info()["current"], peak_of(step, x) <= floor]

    held, ran = run(program)
    assert held
    assert ran


# --- bodies of loops and conditionals -------------------------------------------------------------------------


def with_bodies(forward):
    """A step's function with bodies of loops or conditionals, and its batch."""
    settle()
    weights = [tf.Variable(tf.random.stateless_normal([128, 128], seed=(i, 0)) * 0.1) for i in range(3)]

    def constant(value):
        return tf.constant(np.full((128, 128), value, np.float32))

    def positive(h):
        return tf.reduce_sum(h) > 0

    def branched(h, w):
        return tf.cond(positive(h), lambda: tf.sin(h @ w) @ constant(0.01), lambda: tf.tanh(h @ w) @ constant(0.02))

    def cond(h):
        for w in weights:
            h = branched(h, w)
        return h

    def thrice(layer, h):
        return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, layer(h)), [0, h], maximum_iterations=3)[1]

    def while_loop(h):
        return thrice(lambda h: tf.tanh(h @ weights[0] + tf.sin(h @ weights[1]) @ constant(0.01)), h)

    def nested(h):
        return thrice(
            lambda h: tf.cond(
                positive(h),
                lambda: tf.tanh(h @ weights[0]) @ constant(0.01),
                lambda: tf.sin(h @ weights[1]) @ constant(0.02),
            ),
            h,
        )

    forward = {"cond": cond, "while_loop": while_loop, "nested": nested}[forward]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(forward(x) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            if gradient is not None:
                weight.assign_sub(0.1 * gradient)
        return loss

    return tf.function(step), tf.random.stateless_normal([2048, 128], seed=(1, 1))


def keeps(forward, limit):
    function, x = with_bodies(forward)
    step = tfswap.optimize(function, memory_limit=limit, on_exceeded="raise")
    return max(peak_of(step, x) for _ in range(3)) <= limit


FORWARD = ["cond", *slow("nested", "while_loop")]


@pytest.mark.parametrize("forward", FORWARD)
def test_constants_of_bodies_go_with_the_function_that_they_were_made_for(forward):
    """The gate, and each kernel that runs a body, release the counts that they took, once each."""

    def program():
        function, x = with_bodies(forward)

        def grown(tries, attempt):
            sizes = []
            for _ in range(tries):
                attempt()
                gc.collect()
                sizes.append(info()["current"])
            return [after - before for before, after in itertools.pairwise(sizes)]

        floors = []
        refused = grown(2, lambda: floors.append(floor_of(function, x)))
        limit = floors[0] + (1 << 20)

        def use():
            step = tfswap.optimize(function, memory_limit=limit)
            for _ in range(2):
                step(x)

        dropped = grown(2, use)

        made, forgetful = [], []
        instantiate, fits = FunctionMaker.instantiate, ArenaWatch.fits
        FunctionMaker.instantiate = lambda self, *args: made.append(1) or instantiate(self, *args)
        ArenaWatch.fits = lambda self, info: not forgetful and fits(self, info)
        step = tfswap.optimize(function, memory_limit=limit)
        step(x)

        def plan_again():
            made.clear()
            forgetful.append(1)
            step(x)
            forgetful.clear()
            step(x)
            assert made

        again = grown(2, plan_again)
        return [refused, dropped, again, floors]

    refused, dropped, again, floors = run(program)
    assert refused == dropped == again == [0]
    assert len(set(floors)) == 1


@pytest.mark.parametrize("forward", FORWARD)
def test_the_floor_of_a_step_with_bodies_holds_in_a_fresh_process(forward):

    def floors():
        function, x = with_bodies(forward)
        return [floor_of(function, x), floor_of(function, x)]

    floor, same = run(floors)
    assert floor == same
    assert run(lambda: keeps(forward, floor))

    def reported():
        function, x = with_bodies(forward)
        step = tfswap.optimize(function, memory_limit=floor + MIB)
        step(x)
        return step.report().floor_bytes

    reported_floor = run(reported)
    assert run(lambda: keeps(forward, reported_floor)), "the floor that a report names"
