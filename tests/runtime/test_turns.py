"""Optimized steps of several threads run one at a time: each keeps its limit and its bits, and none waits for ever."""

from __future__ import annotations

import gc
import random
import threading
import time

import pytest
import tensorflow as tf
from processes import on_arena
from slow import slow

import tfswap
from tfswap.ir.permits import TENSOR_TACTICS


def batch():
    return tf.random.stateless_normal([2048, 128], (1, 2))


class Net:
    def __init__(self, seed, layers=8):
        start = [tf.random.stateless_normal([128, 128], (seed, n), stddev=0.1) for n in range(layers)]
        self.weights = [tf.Variable(each) for each in start]  # of NumPy's arrays some would not be in the arena yet

    def loss(self, x):
        for weight in self.weights:
            x = tf.nn.relu(x @ weight)
        return tf.reduce_sum(x * x)

    def train(self, x):
        with tf.GradientTape() as tape:
            loss = self.loss(x)
        for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            weight.assign_sub(1e-7 * gradient)
        return loss


def together(*programs):
    """What each gives, each in a thread of its own; none may take for ever."""
    given = [None] * len(programs)

    def run(n):
        try:
            given[n] = programs[n]()
        except BaseException as error:
            given[n] = repr(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(programs))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
        assert not each.is_alive(), "waits for ever"
    return given


def rounds(step, x, seed, count=20):
    delays = random.Random(seed)

    def run():
        results = []
        for _ in range(count):
            time.sleep(delays.random() * 0.01)
            results.append(step(x))
        return results

    return run


def peak():
    return tf.config.experimental.get_memory_info("CPU:0")["peak"]


def reset():
    tf.config.experimental.reset_memory_stats("CPU:0")


def run(program):
    """The result of `program`, which gets a batch."""
    return on_arena(lambda: program(batch()), 128)


@pytest.mark.parametrize("inside", [False, *slow(True)])
def test_steps_of_two_threads_keep_the_limit_of_one(inside):
    """First calls too; and within functions of TensorFlow's own.

    Nothing is allocated or freed outside of a step while another runs: one small tensor in a hole that the plan counts
    on can cost a step of this size 1 MiB, and is not the step's. So the steps return nothing, and the functions around
    them have no kernels of their own. They are
    traced beforehand.
    """

    def program(x):
        def steps():
            nets = [Net(n) for n in range(2)]

            def optimized(net):
                def train(x):
                    net.train(x)

                function = tf.function(train)
                function.get_concrete_function(x)
                return tfswap.optimize(function, memory_limit="9MiB")

            made = [optimized(net) for net in nets]
            called = [tf.function(lambda x, s=s: s(x)) for s in made] if inside else made
            if inside:
                [step.get_concrete_function(x) for step in called]
            return nets, made, called

        def weights(nets):
            return [weight.numpy().tolist() for net in nets for weight in net.weights]

        nets, made, called = steps()
        for step in called:
            for _ in range(21):
                step(x)
        expected = weights(nets)
        del nets, made, called, step
        gc.collect()
        gc.disable()
        nets, made, called = steps()
        planned = threading.Barrier(2)

        def training(n):
            def run():
                first = called[n](x)
                planned.wait(100)
                return [first, *rounds(called[n], x, n)()]

            return run

        reset()
        got = together(training(0), training(1))
        return [
            peak(),
            [s.plan().limit_bytes for s in made],
            [s.plan().moves for s in made],
            got == [[None] * 21] * 2 and expected == weights(nets),
        ]

    found = run(program)
    highest, limits, moves, same = found
    assert same
    assert all(moves)
    assert highest <= max(limits)


class Trained(Net):
    """Its variables are in NumPy's memory until they are planned for. Grappler is off, for the same bits."""

    def __init__(self, seed):
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        super().__init__(seed)
        self.weights = [tf.Variable(weight.numpy()) for weight in self.weights]
        self.step = tfswap.optimize(tf.function(self.train), memory_limit="12MiB")

    @property
    def bits(self):
        return [weight.numpy().tobytes().hex() for weight in self.weights]


def test_a_step_inside_another_function_is_planned_for_the_arena_that_it_finds():
    """Or refused before it runs: it was traced when that was another one."""

    def program(x):
        def traced_then(held_mib):
            net, twin = Trained(1), Net(1)
            with tf.device("CPU:0"):  # the device that the step's nodes then have
                net.step = tfswap.optimize(tf.function(net.train), memory_limit="12MiB", tactics=TENSOR_TACTICS)
                outer = tf.function(lambda x: net.step(x) + 1.0)
                outer.get_concrete_function(x)
            before, expected = net.bits, float(tf.function(lambda x: twin.train(x) + 1.0)(x))
            twin = None
            gc.collect()
            _others = tf.zeros([held_mib << 18])
            reset()
            try:
                reported, same = "", float(outer(x)) == expected
            except tf.errors.ResourceExhaustedError as error:
                reported, same = error.message, net.bits == before
            return reported, same, peak(), net.step.plan().moves

        return [traced_then(mib) for mib in (1, 4, 9)]

    found = run(program)
    assert [same for _, same, _, _ in found] == [True] * 3
    assert [bool(reported) for reported, *_ in found] == [False, False, True]
    assert "this step needs at least" in found[2][0]
    assert all(peak <= 12 * 2**20 for _, _, peak, _ in found[:2])
    assert found[0][3] < found[1][3]


@pytest.mark.parametrize("concurrent", [False, True])
def test_loops_around_steps_keep_their_limits(concurrent):
    """Over a range, an iterator or a dataset, each around a step of its own.

    The loop over a dataset runs alone: tf.data makes tensors of which no other step knows.
    """

    def program(x):
        import step_loops

        batches = tf.data.Dataset.from_tensors(x).repeat()

        nets = [Trained(n) for n in range(3)]
        loops = [tf.function(loop(batches)) for loop in step_loops.LOOPS[: 2 if concurrent else 3]]
        programs = [
            lambda loop=loop, net=net: [loop(net.step) for _ in range(3)]
            for loop, net in zip(loops, nets, strict=False)
        ]
        for loop, net in zip(loops, nets, strict=False):
            loop.get_concrete_function(net.step)
        reset()
        if concurrent:
            assert together(*programs) == [[None] * 3] * 2
        else:
            for program in programs:
                program()
        most, twins = peak(), [Trained(n) for n in range(len(loops))]
        for twin in twins:
            train = tf.function(twin.train)
            for _ in range(3 * step_loops.STEPS):
                train(x)
        same = [net.bits == twin.bits for net, twin in zip(nets, twins, strict=False)]
        return [most, same, [net.step.plan().moves for net, _ in zip(nets, loops, strict=False)]]

    found = run(program)
    most, same, moves = found
    assert all(same)
    assert all(moves)
    assert most <= 12 * 2**20


def test_what_a_step_calls_does_not_wait_for_it():
    """A step within another, by a call and by a Python function, with another thread that waits for its turn."""

    def program(x):
        inner = tfswap.optimize(tf.function(Net(1).train), memory_limit="9MiB")
        net = Net(2)
        calls = tfswap.optimize(tf.function(lambda x: net.train(x) + inner(x)), memory_limit="40MiB")
        python = tfswap.optimize(
            tf.function(lambda x: net.train(x) + tf.py_function(lambda x: inner(x), [x], tf.float32)),
            memory_limit="40MiB",
        )
        other = tfswap.optimize(tf.function(Net(3).train), memory_limit="40MiB")
        got = together(rounds(calls, x, 1, 3), rounds(other, x, 2, 10), rounds(python, x, 3, 3))
        return [len(each) if isinstance(each, list) else each for each in got]

    found = run(program)
    assert found == [3, 10, 3]


def test_a_turn_ends_with_a_call_that_fails():
    def program(x):
        net = Net(1)

        def fails(x):
            loss = net.train(x)
            tf.debugging.assert_less(loss, -1.0)
            return loss

        step = tfswap.optimize(tf.function(fails), memory_limit="9MiB")
        refused = tfswap.optimize(tf.function(net.train), memory_limit="1MiB")
        reported = []
        for each, error in ((step, tf.errors.InvalidArgumentError), (refused, tfswap.InfeasibleMemoryLimit)):
            try:
                each(x)
            except error:
                reported.append("failed")
        other = tfswap.optimize(tf.function(net.train), memory_limit="12MiB")
        return [reported, len(together(rounds(other, x, 1, 2))[0])]

    found = run(program)
    assert found == [["failed", "failed"], 2]


def test_gradients_taken_outside_by_two_threads():
    def program(x):
        nets = [Net(n) for n in range(2)]
        steps = [tfswap.optimize(tf.function(net.loss), memory_limit="20MiB") for net in nets]

        def trained(n):
            def run():
                for _ in range(5):
                    with tf.GradientTape() as tape:
                        loss = steps[n](x)
                    tape.gradient(loss, nets[n].weights)
                return float(loss)

            return run

        return [together(trained(0), trained(1)), [float(net.loss(x)) for net in nets]]

    found = run(program)
    got, expected = found
    assert got == pytest.approx(expected)


def test_a_wait_can_be_interrupted():
    """A thread that has stopped waiting does not get the turn."""

    def program(x):
        import signal

        from tfswap.runtime import turn

        class Interrupted(Exception):
            pass

        def interrupt(*_):
            raise Interrupted

        def holds():
            turn.begin(waits=False)
            taken.set()
            end.wait(60)
            turn.end(0)

        signal.signal(signal.SIGALRM, interrupt)
        taken, end, reported = threading.Event(), threading.Event(), []
        other = threading.Thread(target=holds, daemon=True)
        other.start()
        taken.wait()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            turn.begin(waits=False)
        except Interrupted:
            turn.end(0)
            reported.append(turn.held())
        end.set()
        other.join()
        reported.append(turn.alone(turn.begin(waits=False)))
        turn.end(0)
        return reported

    found = run(program)
    assert found == [0, True]
