"""Copies of the swap ops: throttle, failure and cancellation.

No test compares with an absolute time: a copy that must not end yet is throttled to take hours, and the test lifts the
throttle when it is done; else pytest's timeout ends it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from processes import last_json, run_forked

tf = pytest.importorskip("tensorflow")

from swap_copies import MIB, STUCK_BYTES_PER_S, cancelled, ends_by_itself, eventually  # noqa: E402

import tfswap.ops as ops  # noqa: E402 needs TensorFlow

pytestmark = pytest.mark.usefixtures("fresh_copy_settings")


@pytest.mark.parametrize("threads", [1, 3])
def test_the_throttle_is_a_serial_link(threads):
    size = 3 * MIB
    bandwidth, latency_us = 500e6, 2000.0
    xs = [tf.random.normal([size // 4]) for _ in range(3)]
    ops.configure(copy_threads=threads, bandwidth_bytes_per_s=bandwidth, latency_us=latency_us)
    start = time.monotonic()
    handles = [ops.swap_out(x) for x in xs]
    for handle in handles:
        ops.release(handle)
    taken = time.monotonic() - start
    assert taken >= 3 * (size / bandwidth + latency_us * 1e-6)
    assert ops.stats().release_stall_s > 0
    for handle, x in zip(handles, xs, strict=True):
        tensor, ticket = ops.swap_in(handle, x.dtype)
        assert np.array_equal(ops.await_copy(tensor, ticket), x)


def test_without_copy_threads_who_swaps_makes_the_copy():
    x, bandwidth = tf.random.normal([MIB]), 200e6
    ops.configure(copy_threads=0, bandwidth_bytes_per_s=bandwidth)
    start = time.monotonic()
    handle = ops.swap_out(x)
    assert time.monotonic() - start >= 4 * MIB / bandwidth
    ops.release(handle)
    assert ops.stats().release_stall_s == 0
    tensor, ticket = ops.swap_in(handle, x.dtype)
    assert np.array_equal(ops.await_copy(tensor, ticket), x)


def test_copies_under_way_end_when_their_threads_are_taken_away():
    xs = [tf.random.normal([MIB]) for _ in range(6)]
    ops.configure(copy_threads=2, bandwidth_bytes_per_s=400e6)
    handles = [ops.swap_out(x) for x in xs[:3]]
    ops.configure(copy_threads=0)
    handles += [ops.swap_out(x) for x in xs[3:]]
    for handle, x in zip(handles, xs, strict=True):
        ops.release(handle)
        tensor, ticket = ops.swap_in(handle, x.dtype)
        assert np.array_equal(ops.await_copy(tensor, ticket), x)
    assert ops.configuration().copy_threads == 0


def test_each_device_has_a_link_of_its_own():
    def program():
        import time

        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        import tfswap.ops as ops

        def shares_of_the_time(*devices):
            ops.reset_stats()
            start, handles = time.monotonic(), []
            for device in devices:
                with tf.device(device):
                    handles.append(ops.swap_out(x[device]))
            for handle in handles:
                ops.release(handle)
            return ops.stats().out_busy_s / (time.monotonic() - start)

        x = {}
        for device in ("CPU:0", "CPU:1"):
            with tf.device(device):
                x[device] = tf.zeros([2**18])
        ops.configure(bandwidth_bytes_per_s=2**20 / 0.4)
        assert shares_of_the_time("CPU:0", "CPU:0") <= 1.0
        # A process that a busy machine sets aside needs longer than its copies do.
        assert any(shares_of_the_time("CPU:0", "CPU:1") > 1.1 for _ in range(20))

    run_forked(program)


def waits_in_release(x):
    handle = ops.swap_out(x)
    return handle, ops.release(handle)


def waits_in_await(x):
    handle = ops.swap_out(x)
    tensor, ticket = ops.swap_in(handle, x.dtype)
    return handle, ops.await_copy(tensor, ticket).op


@ends_by_itself
@pytest.mark.parametrize("wait", [waits_in_release, waits_in_await])
def test_a_step_that_fails_does_not_wait_for_its_copies(wait):
    @tf.function
    def step(x, divisor):
        handle, waiting = wait(x)
        with tf.control_dependencies([handle]):
            failing = 1 // divisor
        with tf.control_dependencies([waiting]):
            return failing + 1

    x = tf.random.normal([MIB])
    assert step(x, tf.constant(1)).numpy() == 2
    ops.configure(bandwidth_bytes_per_s=STUCK_BYTES_PER_S)
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"[Dd]ivision by zero"):
            step(x, tf.constant(0))
    # The copies still run, and own what they touch.
    assert ops.stats().pool_in_use_bytes > 0
    ops.configure(bandwidth_bytes_per_s=None)
    assert eventually(lambda: ops.stats().pool_in_use_bytes == 0)
    assert step(x, tf.constant(1)).numpy() == 2


def cancel_one(wait, x, settle_s: float) -> None:
    """Runs a step that waits for a copy without end, cancels it, and sees that it ends so."""

    @tf.function
    def step(x):
        _, waiting = wait(x)
        with tf.control_dependencies([waiting]):
            return tf.constant(1)

    ops.configure(bandwidth_bytes_per_s=STUCK_BYTES_PER_S)
    cancelled(step, x, lambda: ops.stats().pool_in_use_bytes > 0, settle_s)


@ends_by_itself
@pytest.mark.parametrize("wait", [waits_in_release, waits_in_await])
def test_a_cancelled_step_ends(wait):
    cancel_one(wait, tf.random.normal([MIB]), settle_s=0.05)


@contextlib.contextmanager
def busy_machine():
    """More processes that compute than there are processors, as long as the body runs."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * os.cpu_count() + 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@ends_by_itself
@pytest.mark.parametrize("wait", [waits_in_release, waits_in_await])
def test_cancelled_steps_leave_nothing_behind_on_a_busy_machine(wait):
    """The throttle is lifted at any moment of a copy, by a thread that gets little time itself."""
    with busy_machine():
        for size in range(20):
            # Copies of one chunk and of several, which are under way, waiting for the link, or not begun.
            cancel_one(wait, tf.random.normal([(1 + size % 4) * MIB // 3]), settle_s=0)
            ops.configure(bandwidth_bytes_per_s=None)
            assert eventually(lambda: ops.stats().pool_in_use_bytes == 0)


@ends_by_itself
def test_copies_that_end_while_the_step_is_cancelled():
    """Both ends of the race between a copy and a cancellation, many times."""

    @tf.function
    def step(x, divisor):
        waiting = [wait(x)[1] for wait in (waits_in_release, waits_in_await) for _ in range(4)]
        failing = 1 // divisor
        with tf.control_dependencies(waiting):
            return failing + 1

    x = tf.random.normal([50_000])
    for i in range(200):
        ops.configure(latency_us=float(i))
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(x, tf.constant(0))
    ops.configure(latency_us=0.0)
    assert step(x, tf.constant(1)).numpy() == 2
    assert eventually(lambda: ops.stats().pool_in_use_bytes == 0)


def test_one_inter_op_thread_is_enough():
    """Waiting ops hold no thread, so that a step can't block itself, however busy the others are."""

    def program():
        import numpy as np
        import tensorflow as tf

        import tfswap.ops as ops

        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)
        ops.configure(bandwidth_bytes_per_s=300e6)

        @tf.function
        def step(x):
            backs, products = [], []
            for i in range(8):
                y = x + float(i)
                handle = ops.swap_out(y)
                with tf.control_dependencies([ops.release(handle)]):
                    tensor, ticket = ops.swap_in(handle, y.dtype)
                backs.append(ops.await_copy(tensor, ticket))
                products.append(tf.linalg.matmul(y, y))
            return backs, products

        x = tf.random.normal([600, 600])
        backs, _ = step(x)
        same = all(np.array_equal(back, x + float(i)) for i, back in enumerate(backs))
        return [same, ops.stats().in_copies]

    seen = last_json(run_forked(program))
    assert seen == [True, 8]


def test_a_tensor_in_lent_memory_comes_back_and_goes_to_the_host_where_that_was_dropped():
    from tfswap.device.lent_block import LentBlock
    from tfswap.native.load import load

    x, block = tf.random.normal([1024]), LentBlock("CPU:0", 8192)
    number = block.number

    def there_and_back(place: int) -> tuple[int, bool]:
        before = ops.stats()
        handle = load().ops.tfswap_swap_out(tensor=x, lent_block=number, lent_place=place)
        ops.release(handle)
        same = np.array_equal(ops.await_copy(*ops.swap_in(handle, x.dtype)), x)
        after = ops.stats()
        assert after.lent_in_bytes - before.lent_in_bytes == after.lent_out_bytes - before.lent_out_bytes
        assert after.out_bytes + after.lent_out_bytes == before.out_bytes + before.lent_out_bytes + 4096
        return after.lent_out_bytes - before.lent_out_bytes, same

    assert [there_and_back(place) for place in (0, 4096, 4352)] == [(4096, True), (4096, True), (0, True)]
    held = load().ops.tfswap_swap_out(tensor=x, lent_block=number, lent_place=2048)
    ops.release(held)
    assert [there_and_back(place) for place in (0, 2048, 4096)] == [(0, True)] * 3  # no two in one place
    assert np.array_equal(ops.await_copy(*ops.swap_in(held, x.dtype)), x)
    del held
    assert there_and_back(2048) == (4096, True)
    del block
    assert there_and_back(0) == (0, True)
