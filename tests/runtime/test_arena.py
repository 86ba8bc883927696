"""Limits in arenas as programs have them: growing, fragmented, shared. Each program in a process of its own.

Peaks are compared to the byte: a plan is a promise about the allocator, and the allocator is simulated.
"""

from __future__ import annotations

from unittest import mock

import pytest
import tensorflow as tf
from arena_programs import MIB, Dense, Normed, floor_of, info, messages, peak_of, reset, run, settle
from slow import slow

import tfswap
from tfswap.device import arena
from tfswap.exporters.function import grappler_off, memory_optimizer_off
from tfswap.runtime import planning_loop
from tfswap.runtime import step as step_module

pytest.importorskip("tensorflow")


# --- the first call ---------------------------------------------------------------------------------------


def test_what_acts_runs_once_in_a_first_call():
    """A first call makes the step's kernels, for each plan that is tried, before it runs them."""

    def program():
        net = Dense(256, 6)
        ran, queue = [], tf.queue.FIFOQueue(10, [tf.float32], [[]])

        def train(x):
            tf.py_function(lambda: ran.append(1), [], [])
            queue.enqueue([1.0])
            return net.step(x)

        step = tfswap.optimize(tf.function(train), memory_limit="70%")
        step(net.batch(1024))
        assert step.plan().order
        return [len(ran), int(queue.size())]

    assert run(program) == [1, 1]


# --- regions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "rows", "cap_mib"),
    [((Normed,), 64, 512), ((Dense, 256, 8), 2048, 14), *slow(((Dense, 256, 8), 2048, 512), ((Normed,), 64, 56))],
)
def test_in_an_arena_that_grows_the_planned_peak_is_the_measured_one(model, rows, cap_mib):
    """One of 14 MiB has an allocator that may have little more than the limit."""

    def program():
        kind, *sizes = model
        net = kind(*sizes)
        x = net.batch(rows)
        found = []
        for limit in ("80%", "60%"):
            step = tfswap.optimize(tf.function(net.step), memory_limit=limit)
            for _ in range(3):
                peak = peak_of(step, x)
                found.append([peak, step.plan().planned_peak_bytes, step.plan().limit_bytes, len(step.plan().order)])
            del step
        return found

    found = run(
        program,
        cap_mib,
    )
    assert len(found) == 6
    for peak, planned, limit, kernels in found:
        assert peak == planned <= limit
        assert kernels


def test_an_arena_that_grows_gets_its_regions_before_the_step():
    """Of two free chunks of one size a request gets the one with the lower address."""

    def program():
        def arena_bytes():
            return sum(size for _, size, _ in arena.snapshot("CPU:0").chunks)

        class Noted(planning_loop.PlanningLoop):
            def run(self):
                noted.append(arena_bytes())
                found = super().run()
                noted.append(arena_bytes())
                return found

        noted = []
        net = Dense(256, 8)
        x = net.batch(4096)
        with mock.patch.object(step_module, "PlanningLoop", Noted):
            tfswap.optimize(tf.function(net.step), memory_limit="60%")(x)
        return [*noted, arena_bytes()]

    before, planned, after = run(program, 512)
    assert before < planned == after


def test_where_regions_are_too_small_the_refusal_says_so():
    def program():
        net = Dense(256, 2)
        x = net.batch(8192)
        try:
            tfswap.optimize(tf.function(lambda x: net.step(tf.concat([x, x], 0))), memory_limit="1GiB")(x)
        except tfswap.InfeasibleMemoryLimit as error:
            refused = [str(error), error.floor_bytes, error.limit_bytes]
        return refused

    found = run(
        program,
        28,
    )
    message, floor, limit = found
    assert limit == 1 << 30
    assert floor > 28 * MIB
    assert "CPU:0's allocator may have 29360128 bytes" in message
    assert "regions so far" in message


# --- shares -----------------------------------------------------------------------------------------------


def test_where_order_changes_nothing_the_whole_unoptimised_peak_is_enough():
    def program():
        settle()
        x = tf.ones([1024, 1024])
        step = tfswap.optimize(tf.function(lambda x: tf.reduce_sum(tf.sin(x @ x))), memory_limit="100%", tactics=())
        step(x)
        return [step.plan().planned_peak_bytes, step.report().baseline_peak_bytes]

    planned, baseline = run(program)
    assert planned <= baseline


def test_a_tiny_step_may_have_the_whole_of_its_unoptimised_peak():
    """The ops of a rewritten loop would take more than its limit has."""

    def program():
        w, x = tf.Variable(tf.ones([4, 4]) * 0.1), tf.ones([4, 4])

        def step(x):
            with tf.GradientTape() as tape:
                h = tf.while_loop(
                    lambda i, h: i < 3, lambda i, h: (i + 1, tf.sin(h @ w)), [0, x], maximum_iterations=3
                )[1]
                loss = tf.reduce_sum(h)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        step = tfswap.optimize(tf.function(step), memory_limit="100%")
        for _ in range(3):
            step(x)
        tf.config.experimental.reset_memory_stats("CPU:0")
        step(x)
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        return [step.plan().changes_nothing, peak, step.plan().limit_bytes]

    changes_nothing, peak, limit = run(program)
    assert changes_nothing
    assert peak <= limit


def test_a_loop_whose_iterations_run_side_by_side_is_not_left_alone():
    """Unordered they hold a batch each, as often as there are threads, which a prediction may not have."""

    def program():
        settle()
        import tfswap.compiler.unoptimised as unoptimised

        unoptimised.simulate_lowered = lambda *_, **__: [30_000_000]
        w = tf.Variable(tf.random.stateless_normal([512, 512], seed=(1, 1)) * 0.1)

        def iteration(i, x):
            h = x + tf.cast(i, tf.float32)
            for _ in range(3):
                h = tf.nn.relu(h @ w)
            return tf.reduce_sum(h)

        function = tf.function(
            lambda x: tf.map_fn(lambda i: iteration(i, x), tf.range(6), fn_output_signature=tf.float32)
        )
        x = tf.random.stateless_normal([4096, 512], seed=(1, 2))
        unordered = max(peak_of(function, x) for _ in range(3))
        step = tfswap.optimize(function, memory_limit="120%")
        peak = peak_of(step, x)
        return [unordered, step.plan().limit_bytes, peak, len(step.plan().order)]

    unordered, limit, peak, order = run(program)
    assert unordered > limit, "iterations did not run side by side: the program shows nothing"
    assert peak <= limit
    assert order


def test_a_share_stays_what_it_was_when_the_step_is_planned_again():
    def program():
        settle()
        net = Dense(256, 8)
        x = net.batch(2048)
        step = tfswap.optimize(tf.function(net.step), memory_limit="70%")
        step(x)
        limits, plan = [step.plan().limit_bytes], step.plan()
        _more = tf.zeros([2 << 20], tf.uint8)
        step(x)
        assert step.plan() is not plan
        limits.append(step.plan().limit_bytes)

        step = tfswap.optimize(tf.function(net.step), memory_limit="5%")
        refusals = []
        for _ in range(2):
            try:
                step(x)
            except tfswap.InfeasibleMemoryLimit as error:
                refusals.append(error.limit_bytes)
            _more = tf.zeros([4 << 20], tf.uint8)
        return [limits, refusals]

    limits, refusals = run(program)
    assert limits[0] == limits[1]
    assert refusals[0] == refusals[1]


# --- constants that TensorFlow computes when it makes the step -------------------------------------------------


class Autoencoder:
    """The seed of a mean over examples is broadcast to the batch: 24 MiB of constants. A table is summed up."""

    def __init__(self):
        self.weights = [
            tf.Variable(tf.random.stateless_normal([3072, 64], seed=(0, 0)) * 0.1),
            tf.Variable(tf.random.stateless_normal([64, 3072], seed=(1, 0)) * 0.1),
        ]

    def decoded(self, code):
        return code @ self.weights[1]

    def step(self, x):
        with tf.GradientTape() as tape:
            logits = self.decoded(tf.nn.relu(x @ self.weights[0]))
            lost = tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.nn.sigmoid(x), logits=logits)
            loss = tf.reduce_mean(tf.reduce_sum(lost, 1))
        for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            weight.assign_sub(0.01 * gradient)
        table = tf.sin(tf.range(3e6))
        return loss, tf.reduce_sum(table) * loss, tf.reduce_sum(tf.reshape(table, [3000, 1000]), 0)


class Branching(Autoencoder):
    """Constants of 24 MiB in a conditional's bodies, in a loop's, and in a loop over nothing but constants."""

    def decoded(self, code):
        logits = super().decoded(code)
        logits = tf.cond(code[0, 0] > 1e9, lambda: logits, lambda: logits * tf.sin(tf.fill([2048, 3072], 1.5)))
        logits = tf.while_loop(
            lambda i, h: i < 2,
            lambda i, h: (i + 1, h + tf.cos(tf.fill([2048, 3072], 0.5))),
            (0, logits),
            maximum_iterations=2,
        )[1]
        return (
            logits
            * tf.while_loop(
                lambda i, h: i < 3,
                lambda i, h: (i + 1, tf.sin(h)),
                (0, tf.fill([2048, 3072], 0.7)),
                maximum_iterations=3,
            )[1]
        )


def values(net, call, x):
    results = [[tensor.numpy().tobytes() for tensor in call(x)] for _ in range(2)]
    return results, [weight.numpy().tobytes() for weight in net.weights]


@pytest.mark.parametrize(("model", "without"), [(Autoencoder, memory_optimizer_off), (Branching, grappler_off)])
def test_making_the_step_stays_within_the_limit_where_large_constants_follow_from_others(model, without):
    def program():
        settle()
        x = tf.random.stateless_normal([2048, 3072], seed=(3, 3))
        net = model()
        step = tfswap.optimize(tf.function(net.step), memory_limit="70%")
        peaks = [peak_of(step, x), peak_of(step, x)]
        limit, changed = step.plan().limit_bytes, not step.plan().changes_nothing
        net = model()
        step = tfswap.optimize(tf.function(net.step), memory_limit="70%")
        found = values(net, step, x)
        net = model()
        with without():
            expected = values(net, tf.function(net.step), x)
        return [peaks, limit, changed, found == expected, messages]

    peaks, limit, changed, same, logged = run(program)
    assert changed
    assert max(peaks) <= limit
    assert same
    assert not logged


def test_a_step_is_left_alone_only_where_making_it_stays_within_the_limit():
    def program():
        settle()
        weight = tf.Variable(tf.ones([64, 64]))

        def function(x):
            total = tf.reduce_sum(x @ weight)
            return sum(tf.reduce_sum(tf.fill([5 << 20], float(i)) * total) for i in range(6))

        x = tf.ones([64, 64])
        step = tfswap.optimize(tf.function(function), memory_limit="120%")
        peaks = [peak_of(step, x) for _ in range(2)]
        return [peaks, step.plan().limit_bytes, step.report().baseline_peak_bytes]

    peaks, limit, baseline = run(program)
    assert max(peaks) <= limit
    assert limit > 1.1 * baseline


def test_a_step_whose_creation_passes_the_limit_is_reported():
    """Of what is small enough to be kept, and is held together with all that it is computed from."""

    def program():
        settle()
        weight = tf.Variable(tf.ones([1536, 64]))

        def function(x):
            mask = 1.0 - tf.linalg.band_part(tf.reshape(tf.range(1536.0**2), [1536, 1536]), -1, 0) / 1536.0**2
            return tf.reduce_sum(tf.nn.softmax(x @ mask) @ weight)

        step = tfswap.optimize(tf.function(function), memory_limit="100%")
        x = tf.ones([64, 1536])
        peaks = [peak_of(step, x) for _ in range(2)]
        return [peaks, step.plan().limit_bytes, messages]

    peaks, limit, logged = run(program)
    assert peaks[0] > limit >= peaks[1]
    assert len(logged) == 1
    assert "while TensorFlow made it" in logged[0]


# --- programs as they are written -----------------------------------------------------------------------------


def test_a_loop_keeps_the_limit_whatever_else_it_does():
    """Near the floor: new batches each time, results kept, eager code between, evaluation.

    Each size of batch is a function of its own, with constants of up to its batch's size.
    """

    def another_program():
        settle()
        net = Dense(256, 8)
        x = net.batch(2048)
        function = tf.function(net.step)
        limit = floor_of(function, x) + (3 << 19)
        step = tfswap.optimize(function, memory_limit=limit)
        evaluate = tfswap.optimize(
            tf.function(lambda x: tf.reduce_mean(tf.sin(x @ net.weights[0]))), memory_limit=limit
        )
        peaks = {}

        def note(program, *args):
            peaks[program] = max(peaks.get(program, 0), peak_of(step, *args) - limit)

        note("the same batch", x)
        history = []
        for _ in range(4):
            reset()
            history.append(step(x))
            peaks["results kept"] = max(peaks.get("results kept", 0), info()["peak"] - limit)
        for rows in (2048, 750, 2048, 750):
            del x
            x = net.batch(rows, seed=rows)
            note("batches of two sizes", x)
        x = net.batch(2048)
        kept = []
        for i in range(6):
            kept.append(tf.random.stateless_normal([750 * (i + 1)], seed=(1, i)))
            if i % 3 == 2:
                kept.pop(0)
            note("eager code between", x)
        _late = tf.Variable(tf.zeros([25_000]))
        note("a variable made late", x)
        for _ in range(2):
            peaks["evaluation"] = max(peaks.get("evaluation", 0), peak_of(evaluate, x) - limit)
            note("training again", x)
        array = x.numpy()
        del x
        for _ in range(2):
            note("arrays", array)
        return [peaks, messages]

    found, logged = run(another_program)
    assert {program: peak for program, peak in found.items() if peak > 0} == {}
    assert len(found) == 8
    assert not logged
