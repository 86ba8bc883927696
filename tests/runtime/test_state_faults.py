"""Faults and load with variables at home on the host: failed steps, threads, forks, kills, memory that is used up."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import resource
import signal
import threading
from pathlib import Path

import pytest
import tensorflow as tf
from gpu_compare import relu_loss, weights
from processes import Forked, on_arena
from step_peaks import measuring
from swap_copies import MIB, eventually

import tfswap
import tfswap.ops as ops
from tfswap.exporters.function import memory_optimizer_off
from tfswap.ir.permits import TACTICS

WIDTH, LAYERS = 256, 8
STATE_BYTES = 2 * LAYERS * 4 * WIDTH * WIDTH
LIMIT = int(0.4 * STATE_BYTES)


class Net:
    """Weights with a slot each. A number that is none in `bad` fails the step in the middle of its updates."""

    @tfswap.scope()
    def __init__(self, width=WIDTH):
        self.weights = weights(*[[width, width]] * LAYERS)
        self.slots = [tf.Variable(tf.zeros_like(weight)) for weight in self.weights]
        self.state = [*self.weights, *self.slots]

    def train(self, x, bad):
        with tf.GradientTape() as tape:
            loss = relu_loss(self.weights, x)
        gradients = tape.gradient(loss, self.weights)
        for number, (weight, slot, gradient) in enumerate(zip(self.weights, self.slots, gradients, strict=True)):
            if number == LAYERS // 2:
                gradient += tf.debugging.check_numerics(bad, "it fails")
            slot.assign(0.9 * slot + gradient)
            weight.assign_sub(0.1 * slot)
        return loss

    def values(self):
        return [v.numpy().tobytes() for v in self.state]


def batch(width=WIDTH):
    return tf.random.stateless_normal([32, width], (1, 2))


def optimized(net, limit=LIMIT, **options):
    return tfswap.optimize(tf.function(net.train), memory_limit=limit, tactics=TACTICS, **options)


def test_a_step_that_fails_leaves_each_variable_with_old_or_new_bytes() -> None:
    def program():
        net, twin = Net(), Net()
        plain, x, good, bad = tf.function(twin.train), batch(), tf.constant(0.0), tf.constant(float("nan"))
        expected = [twin.values()]
        for _ in range(2):
            with memory_optimizer_off():
                plain(x, good)
            expected.append(twin.values())
        del twin, plain
        gc.collect()
        step = optimized(net)
        step(x, good)
        first, held = net.values() == expected[1], ops.stats().pool_in_use_bytes
        seen, peaks = [], []
        for _ in range(3):
            old = [tf.constant(v.numpy().copy()) for v in net.state]
            with contextlib.suppress(tf.errors.InvalidArgumentError):
                step(x, bad)
            pairs = zip(net.values(), expected[1], expected[2], strict=True)
            seen.append([[value == before, value == after] for value, before, after in pairs])
            for variable, value in zip(net.state, old, strict=True):
                variable.assign(value)
            del old
        free = eventually(lambda: ops.stats().pool_in_use_bytes <= held)
        step(x, good)
        same = net.values() == expected[2]
        with measuring(peaks):
            step(x, good)
        old_or_new = all(any(each) for each in itertools.chain(*seen))
        failed = all(any(before and not after for before, after in each) for each in seen)
        home = len(step.plan().at_home)
        return [first, old_or_new, failed, free, same, max(peaks) <= LIMIT, home > 0, step.plans]

    assert on_arena(program) == [True] * 7 + [1]


def test_two_threads_and_a_function_around_the_step() -> None:
    """They take turns."""

    def program(threads):
        net, x, good = Net(), batch(), tf.constant(0.0)
        step = optimized(net) if threads else tf.function(net.train)
        around, peaks = tf.function(lambda: step(x, good)), []
        step(x, good)

        def run():
            for number in range(4):
                around() if number % 2 else step(x, good)

        with measuring(peaks):
            running = [threading.Thread(target=run) for _ in range(threads)]
            for each in running:
                each.start()
            for each in running:
                each.join()
        for _ in range(0 if threads else 8):
            step(x, good)
        return [[value.hex() for value in net.values()], threads == 0 or max(peaks) <= LIMIT]

    def with_threads():
        return program(2)

    def plain():
        return program(0)

    (values, kept), (expected, _) = on_arena(with_threads), on_arena(plain)
    assert values == expected and kept


def test_a_fork_keeps_the_parents_variables() -> None:
    def program():
        net, twin, x, good = Net(), Net(), batch(), tf.constant(0.0)
        plain = tf.function(twin.train)
        for _ in range(3):
            plain(x, good)
        expected = twin.values()
        del twin, plain
        gc.collect()
        step = optimized(net)
        step(x, good)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            del step, net  # as at its end
            gc.collect()
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for _ in range(2):
            step(x, good)
        return [ended, net.values() == expected]

    assert on_arena(program) == [0, True]


def test_a_process_that_is_killed_leaves_no_file(tmp_path) -> None:
    folder, output = tmp_path / "spilled", tmp_path / "output"
    folder.mkdir()
    output.mkdir()

    def forever():
        step, x, good = optimized(Net(), spill_dir=str(folder)), batch(), tf.constant(0.0)
        step(x, good)
        print("runs", flush=True)
        while True:
            step(x, good)

    arena = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "512", "TMPDIR": str(folder)}
    program = Forked(forever, arena, output)
    try:
        assert eventually(lambda: program.out.read_text() == "runs\n" or program.process.exitcode is not None)
        assert program.process.exitcode is None, program.err.read_text()
    finally:
        program.process.kill()
        program.process.join()
    assert list(folder.iterdir()) == []


def test_host_memory_that_is_used_up_is_reported_and_changes_nothing() -> None:
    def program():
        net, x, good = Net(), batch(), tf.constant(0.0)
        before, reported = net.values(), []
        try:
            optimized(net, host_memory_limit=MIB)(x, good)
        except tfswap.InfeasibleMemoryLimit as error:
            reported.append(str(error))
        kept = net.values() == before
        optimized(net)(x, good)
        try:
            with tfswap.scope():
                ops.configure(host_memory_limit=STATE_BYTES + MIB)
                many = [tf.Variable(tf.ones([WIDTH, WIDTH])) for _ in range(1024)]  # 256 MiB
                del many
        except tf.errors.ResourceExhaustedError as error:
            reported.append(str(error))
        return [reported, kept, net.values() != before]

    reported, kept, trained = on_arena(program)
    assert len(reported) == 2 and all("host memory" in each for each in reported), reported
    assert kept and trained


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def flat(steps, times):
    """Bytes in use after each of several runs of as many steps."""
    net, good = Net(64), tf.constant(0.0)
    step, x, found = optimized(net, limit=int(0.6 * STATE_BYTES / 16)), batch(64), []
    for _ in range(times):
        for _ in range(steps):
            step(x, good)
        in_use = tf.config.experimental.get_memory_info("CPU:0")["current"]
        found.append([in_use, ops.stats().pool_in_use_bytes, ops.stats().pool_reserved_bytes, resident_bytes()])
    return {"found": found, "home": len(step.plan().at_home)}


def check_flat(found):
    *pools, resident = zip(*found["found"], strict=True)
    assert found["home"]
    assert all(len(set(each[1:])) == 1 for each in pools), pools
    # What leaks grows each time; a thread that starts late takes its stack and its share of the heap once.
    assert min(more - less for less, more in itertools.pairwise(resident)) < MIB // 2, resident


def test_many_steps_take_no_more_than_few() -> None:
    check_flat(on_arena(lambda: flat(200, 4)))


@pytest.mark.slow
def test_ten_thousand_steps_take_no_more_than_few() -> None:
    check_flat(on_arena(lambda: flat(2500, 4)))
