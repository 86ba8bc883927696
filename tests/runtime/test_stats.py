"""`train_step.stats()`: the swaps of a function's latest step alone."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

import gc
import re
import threading
import time

import tensorflow as tf
from nets import LIMIT, Net, batch, recurrent, recurrent_cell
from processes import on_arena
from swap_copies import STUCK_BYTES_PER_S, eventually

import tfswap
import tfswap.ops as ops


def optimized(function, memory_limit=LIMIT):
    return tfswap.optimize(tf.function(function), memory_limit=memory_limit, tactics=("swap",))


def figures(step):
    stats = step.stats()
    return stats.out_bytes, stats.in_bytes


def planned(step):
    evictions = step.plan().evictions
    return sum(a.nbytes for a in evictions if a.out is not None), sum(a.nbytes for a in evictions)


def run(code):
    return on_arena(code)


def test_each_function_counts_its_own_latest_step():
    def program():
        big, small = optimized(Net(9).step), optimized(Net(5).step)
        for step in (big, small, big, big, small):
            step(batch())
            assert figures(step) == planned(step) != (0, 0), (figures(step), planned(step))
        assert planned(big) != planned(small)
        assert figures(big) == planned(big)  # the other one's step has changed nothing

        ops.reset_stats()
        big(batch())
        small(batch())
        total = ops.stats()
        assert total.out_bytes == planned(big)[0] + planned(small)[0]
        stats, others = big.stats(), small.stats()
        parts = (total.out_busy_s + total.in_busy_s, total.release_stall_s + total.await_stall_s + total.inline_copy_s)
        sums = (stats.copying_s + others.copying_s, stats.stalled_s + others.stalled_s)
        assert all(abs(a - b) < 1e-9 for a, b in zip(parts, sums, strict=True)), (parts, sums)
        assert 0 < stats.pool_peak_bytes <= big.plan().host_bytes
        assert stats.pool_peak_bytes + others.pool_peak_bytes >= total.pool_peak_bytes
        assert 0 <= stats.overlap <= 1
        assert stats.device_peak_bytes == tf.config.experimental.get_memory_info("CPU:0")["peak"]
        return 0

    run(program)


def test_a_step_that_waits_says_so():
    def program():
        step = optimized(Net().step)
        step(batch())
        ops.configure(bandwidth_bytes_per_s=10e6)
        start = time.monotonic()
        step(batch())
        took = time.monotonic() - start
        slow = step.stats()
        assert slow.copying_s >= sum(planned(step)) / 10e6
        # A thread that the machine is slow to wake counts as waiting, so a step may wait longer than its copies took.
        # How much of them kernels hide depends on what else the machine does.
        assert 0 < slow.stalled_s <= took, (slow, took)
        assert slow.overlap == max(0.0, 1 - slow.stalled_s / slow.copying_s)
        ops.configure(bandwidth_bytes_per_s=None)
        step(batch())
        assert step.stats().copying_s < slow.copying_s, (step.stats(), slow)  # of that step alone
        return 0

    run(program)


def test_what_swaps_nothing_says_so():
    def program():
        left_alone = optimized(Net().step, memory_limit="200%")
        left_alone(batch())
        nothing = tfswap.ops.StepStats(device_peaks=left_alone.stats().device_peaks)
        assert left_alone.stats() == nothing and nothing.device_peak_bytes > 0 and nothing.overlap == 1.0
        try:
            optimized(Net().step).stats()
            raise AssertionError
        except tfswap.TfswapError as error:
            assert "has not been planned yet" in str(error)
        return 0

    run(program)


def test_a_step_that_fails_counts_as_far_as_it_came():
    def program():
        net = Net()

        def checked(x, bad):
            with tf.GradientTape() as tape:
                loss = net.loss(x)
            gradients = tape.gradient(loss, net.weights)
            with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(bad), ["as asked"])]):
                gradients = [tf.identity(g) for g in gradients]
            for weight, gradient in zip(net.weights, gradients, strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        step = optimized(checked)
        good, bad = tf.constant(False), tf.constant(True)
        step(batch(), good)
        whole = planned(step)
        assert figures(step) == whole
        try:
            step(batch(), bad)
            raise AssertionError
        except tf.errors.InvalidArgumentError:
            pass
        assert ops.stats().pool_in_use_bytes == 0
        out, in_ = figures(step)
        assert out <= whole[0] and in_ <= whole[1]
        step(batch(), good)
        assert figures(step) == whole
        return 0

    run(program)


def test_later_copies_of_a_lost_step_are_not_counted():
    def program():
        from tfswap.native.load import load

        step = optimized(Net().step)
        step(batch())
        ops.configure(bandwidth_bytes_per_s=STUCK_BYTES_PER_S)
        load().ops.tfswap_swap_out(
            tensor=tf.zeros([2**20]), owner=step._program.owner
        )  # the handle is gone, the copy is not
        left = ops.stats().pool_in_use_bytes
        next_step = threading.Thread(target=step, args=(batch(),))
        next_step.start()
        assert eventually(lambda: ops.stats().pool_in_use_bytes > left)  # it has begun
        ops.configure(bandwidth_bytes_per_s=None)
        next_step.join()
        assert figures(step) == planned(step), (figures(step), planned(step))
        return 0

    run(program)


def test_steps_inside_another_function_and_in_loops_are_counted():
    def program():
        step = optimized(Net().step)

        @tf.function
        def outer(x):
            for _ in range(3):
                step(x)

        outer(batch())
        assert figures(step) == planned(step) != (0, 0)

        loop = optimized(recurrent(recurrent_cell(), 0.1), "60%")
        ops.reset_stats()
        loop(batch())
        assert loop.plan().accumulators
        stats, total = loop.stats(), ops.stats()
        assert (stats.out_bytes, stats.in_bytes) == (total.out_bytes, total.in_bytes)
        assert stats.out_bytes > 0
        return 0

    run(program)


def test_functions_come_and_go_in_any_number():
    def program():
        from tfswap.ops import runtime

        for _ in range(3):
            step = optimized(Net(5).step)
            step(batch())
            owner = step._program.owner
            assert runtime.step_stats(owner).out_bytes > 0
            del step
            gc.collect()
            assert runtime.step_stats(owner).out_bytes == 0
            assert ops.stats().pool_reserved_bytes == 0  # the last one's memory went with it
        return 0

    run(program)


def test_figures_as_prometheus_reads_them():
    stats = ops.StepStats(out_bytes=5, stalled_s=0.25, device_peaks={"GPU:0": 7, "GPU:1": None})
    lines = stats.prometheus(step='a "step"').splitlines()
    assert lines[:2] == ["# TYPE tfswap_step_out_bytes gauge", 'tfswap_step_out_bytes{step="a \\"step\\""} 5']
    assert 'tfswap_step_stalled_seconds{step="a \\"step\\""} 0.25' in lines
    assert [line for line in lines if "device" in line] == [
        "# TYPE tfswap_step_device_peak_bytes gauge",
        'tfswap_step_device_peak_bytes{step="a \\"step\\"",device="GPU:0"} 7',
    ]
    of_process = ops.stats().prometheus()
    pattern = r"(# TYPE tfswap_[a-z_]+ (counter|gauge)|tfswap_[a-z_]+ [0-9.e+-]+)\n"
    assert re.fullmatch(f"({pattern})+", of_process)
    assert "# TYPE tfswap_out_busy_seconds_total counter\n" in of_process
    assert "# TYPE tfswap_pool_in_use_bytes gauge\n" in of_process
