"""Faults and load: a fork, a system without memory, cancelled and concurrent steps, many steps."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

import gc
import resource
import signal
import threading

import tensorflow as tf
from folders import PYTHONPATH
from nets import Net, batch, bits, unoptimised
from processes import run_forked
from swap_copies import MIB, STUCK_BYTES_PER_S, cancelled, eventually

import tfswap
import tfswap.ops as ops
from tfswap.native.load import load
from tfswap.planner.host_tiers import STAGING_BYTES

ROWS = 2048
HOST = STAGING_BYTES + 2 * MIB


def optimized(net, **options):
    return tfswap.optimize(tf.function(net.step), memory_limit="60%", tactics=("swap",), **options)


def swap_out(tensor, owner=0, disk=False):
    return load().ops.tfswap_swap_out(tensor=tensor, owner=owner, disk=disk)


def back(handle, dtype=tf.float32):
    return ops.await_copy(*ops.swap_in(handle, dtype))


@pytest.mark.timeout(300, method="thread")
def test_a_forked_child_gets_an_error_and_its_parent_goes_on(tmp_path):
    def program():
        twin, net = Net(8), Net(8)
        losses = [bits(unoptimised(tf.function(twin.step), batch(ROWS, n))) for n in range(3)]
        step = optimized(net, host_memory_limit=HOST, spill_dir=str(tmp_path))
        assert bits(step(batch(ROWS, 0))) == losses[0] and step.stats().disk_out_bytes > 0
        tensor = tf.zeros([MIB])
        links = (f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd"))
        (spilled,) = (link for link in links if os.path.lexists(link) and str(tmp_path) in os.readlink(link))
        blocks = os.stat(spilled).st_blocks
        assert blocks > 0
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            try:
                swap_out(tensor)
            except tfswap.TfswapError as error:
                reported = str(error)
            del step  # as at its end, which is not the file's
            gc.collect()
            try:
                ops.register(7, None, str(tmp_path))
            except OSError as error:
                reported += str(error)
            refusals = (
                "it was forked from one in which TensorFlow had started",
                "was forked when tfswap's copies had begun",
            )
            os._exit(0 if all(refusal in reported for refusal in refusals) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.stat(spilled).st_blocks == blocks, (os.stat(spilled), blocks)
        for n in (1, 2):
            assert bits(step(batch(ROWS, n))) == losses[n]

    run_forked(program)


def test_a_fork_before_the_first_copy_trains():
    def program():
        child = os.fork()
        net, twin = Net(4), Net(4)
        step = optimized(net)
        same = bits(step(batch(ROWS))) == bits(unoptimised(tf.function(twin.step), batch(ROWS)))
        swapped = step.stats().out_bytes > 0
        if child == 0:
            os._exit(0 if same and swapped else 1)
        assert same and swapped
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    run_forked(program)


def test_a_system_without_memory_is_reported_and_a_disk_helps(tmp_path):
    def program():
        tensor = tf.random.stateless_normal([16 * MIB], seed=(1, 2))  # 64 MiB
        copied = tensor + 0.0
        del copied
        ops.register(7, None, str(tmp_path))
        back(swap_out(tf.zeros([MIB])))  # there are threads
        ops.configure(host_memory_limit=8 * MIB)  # gives back what is held and unused
        ops.configure(host_memory_limit=None)

        def address_space():
            return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + 32 * MIB, resource.RLIM_INFINITY))
        try:
            reported = reserved = ""
            try:
                swap_out(tensor)
            except tf.errors.ResourceExhaustedError as error:
                reported = error.message
            try:
                ops.reserve(64 * MIB)
            except MemoryError as error:
                reserved = str(error)
            handle = swap_out(tensor, owner=7)
            ops.release(handle)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, unlimited)
        assert "the system gave no more. Free memory on this machine, store a part on disk" in reported, reported
        assert "the system has no more" in reserved and "spill_dir=" in reserved, reserved
        assert ops.stats().disk_out_bytes == 64 * MIB, ops.stats()
        assert bits(back(handle)) == bits(tensor)
        del handle
        handle = swap_out(tensor)  # there is memory again
        ops.release(handle)
        assert bits(back(handle)) == bits(tensor)
        del handle
        ops.unregister(7)
        assert (ops.stats().pool_in_use_bytes, ops.stats().disk_in_use_bytes) == (0, 0)

    run_forked(program)


@pytest.mark.timeout(300, method="thread")
def test_a_step_that_is_cancelled_on_its_way_to_disk_leaves_nothing(tmp_path):
    def program():
        ops.register(7, None, str(tmp_path))
        x = tf.random.stateless_normal([MIB], seed=(1, 2))

        @tf.function
        def step(x):
            handle = swap_out(x, owner=7, disk=True)
            with tf.control_dependencies([ops.release(handle)]):
                return back(handle)

        assert bits(step(x)) == bits(x)
        for settle_s in (0.0, 0.01, 0.05, 0.0, 0.0):
            ops.configure(disk_bandwidth_bytes_per_s=STUCK_BYTES_PER_S)
            cancelled(step, x, lambda: ops.stats().disk_in_use_bytes > 0, settle_s)
            ops.configure(disk_bandwidth_bytes_per_s=None)
            assert eventually(lambda: ops.stats().disk_in_use_bytes == 0)
            assert bits(step(x)) == bits(x)
        ops.unregister(7)
        assert ops.stats().disk_reserved_bytes == 0

    run_forked(program)


def test_two_threads_and_two_functions_share_the_pool(tmp_path):
    def program():
        steps_each = 12
        losses = []
        for seed in range(2):
            twin = Net(6, seed=seed)
            losses.append([bits(unoptimised(tf.function(twin.step), batch(ROWS, n))) for n in range(steps_each)])
        spilling = optimized(Net(6, seed=0), host_memory_limit=HOST, spill_dir=str(tmp_path))
        steps = [spilling, optimized(Net(6, seed=1), host_memory_limit="64MiB")]
        found = [[], []]

        def train(which):
            for n in range(steps_each):
                found[which].append(bits(steps[which](batch(ROWS, n))))

        threads = [threading.Thread(target=train, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == losses
        assert steps[0].stats().disk_out_bytes > 0 == steps[1].stats().disk_out_bytes < steps[1].stats().out_bytes
        assert ops.stats().pool_in_use_bytes <= STAGING_BYTES + 4096
        assert ops.stats().pool_reserved_bytes <= HOST + 64 * MIB

    run_forked(program)


def test_many_steps_take_no_more_than_few(tmp_path):
    def program():
        step = optimized(Net(4), host_memory_limit=STAGING_BYTES + MIB // 16, spill_dir=str(tmp_path))
        x = batch(128)

        def after(steps):
            for _ in range(steps):
                step(x)
            stats = ops.stats()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            return (stats.pool_in_use_bytes, stats.pool_reserved_bytes, stats.disk_reserved_bytes), resident

        pools, resident = zip(*(after(steps) for steps in (200, 250, 250, 250)), strict=True)
        assert step.stats().disk_out_bytes > 0 and step.stats().out_bytes > 0
        assert len(set(pools)) == 1, pools
        # What leaks grows each time; a thread that starts late takes its stack and its share of the heap once.
        assert min(more - less for less, more in itertools.pairwise(resident)) < MIB // 2, resident

    run_forked(program)


def test_a_bit_that_is_flipped_on_disk_is_reported_and_gives_no_wrong_values(tmp_path):
    def program():
        ops.register(7, None, str(tmp_path))
        weight = tf.Variable(tf.zeros([MIB]))
        x = tf.random.stateless_normal([MIB], seed=(1, 2))
        links = (f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd"))
        (spilled,) = (link for link in links if os.path.lexists(link) and str(tmp_path) in os.readlink(link))
        bit = None

        def flip():
            if bit is not None:
                file = os.open(spilled, os.O_RDWR)
                byte = os.pread(file, 1, bit // 8)[0]
                os.pwrite(file, bytes([byte ^ 1 << bit % 8]), bit // 8)
                os.close(file)
            return 0

        @tf.function
        def step(x):
            handle = swap_out(x, owner=7, disk=True)
            with tf.control_dependencies([ops.release(handle)]):
                flipped = tf.py_function(flip, [], tf.int32)
            with tf.control_dependencies([flipped]):
                weight.assign(back(handle))

        step(x)
        assert bits(weight) == bits(x)
        for compressed, bit in (  # noqa: B007 (`flip` reads it)
            (False, 0),
            (False, 8 * MIB + 5),
            (False, 32 * MIB - 1),
            (True, 0),
            (True, 8 * MIB + 5),
        ):
            ops.configure(disk_compression=compressed)
            weight.assign(tf.ones([MIB]))
            try:
                step(x)
                raise AssertionError("wrong values")
            except tf.errors.OpError as error:
                assert "is not what was written there: the disk" in error.message, error.message
                assert "give another spill_dir=" in error.message
                assert "Await" in error.message, error.message  # the node, which a plan names after the tensor
            assert bits(weight) == bits(tf.ones([MIB]))
        bit = None
        step(x)
        assert bits(weight) == bits(x)
        assert ops.stats().disk_written_bytes < ops.stats().disk_out_bytes
        ops.unregister(7)
        assert (ops.stats().disk_reserved_bytes, ops.stats().pool_in_use_bytes) == (0, 0)

    run_forked(program)


def test_a_step_that_fails_in_the_middle_for_any_reason_leaves_nothing(tmp_path):
    def program():
        import numpy as np

        def made(net):
            def step(x, rows):
                with tf.GradientTape() as tape:
                    loss = (
                        tf.debugging.check_numerics(net.loss(x), "the loss") + tf.reduce_sum(tf.gather(x, rows)) * 0.0
                    )
                for weight, gradient in zip(net.weights, tape.gradient(loss, net.weights), strict=True):
                    weight.assign_sub(0.1 * tf.debugging.check_numerics(gradient, "a gradient"))
                return loss

            return step

        net, twin = Net(8), Net(8)
        step = tfswap.optimize(
            tf.function(made(net)),
            memory_limit="60%",
            tactics=("swap",),
            host_memory_limit=HOST,
            spill_dir=str(tmp_path),
        )
        reference = tf.function(made(twin))
        good = tf.constant([1, 2])
        step(batch(ROWS), good)
        unoptimised(reference, batch(ROWS), good)
        held = ops.stats().pool_in_use_bytes

        def works(n):
            assert (ops.stats().disk_in_use_bytes, ops.stats().pool_in_use_bytes) == (0, held)
            assert bits(net.weights) == bits(twin.weights)
            assert bits(step(batch(ROWS, n), good)) == bits(unoptimised(reference, batch(ROWS, n), good))
            assert step.stats().disk_out_bytes > 0 and step.stats().out_bytes > 0

        works(1)
        nan = batch(ROWS).numpy()
        nan[5, 7] = np.nan
        for n, arguments in enumerate([(tf.constant(nan), good), (batch(ROWS), tf.constant([ROWS, 1]))] * 2):
            try:
                step(*arguments)
                raise AssertionError("it did not fail")
            except tf.errors.InvalidArgumentError:
                pass
            works(2 + n)
        assert step.plans == 1

    run_forked(program)


def test_a_step_that_the_user_interrupts_leaves_nothing(tmp_path):
    def program():
        net, twin = Net(8), Net(8)
        reference = tf.function(twin.step)
        step = optimized(net, host_memory_limit=HOST, spill_dir=str(tmp_path))
        step(batch(ROWS))
        unoptimised(reference, batch(ROWS))
        held = ops.stats().pool_in_use_bytes
        signal.signal(signal.SIGINT, signal.default_int_handler)
        main = threading.main_thread().ident
        for n in range(3):
            ops.configure(disk_bandwidth_bytes_per_s=1e6)

            def interrupt():
                assert eventually(lambda: ops.stats().disk_in_use_bytes > 0)
                signal.pthread_kill(main, signal.SIGINT)
                ops.configure(disk_bandwidth_bytes_per_s=None)

            other = threading.Thread(target=interrupt)
            other.start()
            try:
                step(batch(ROWS, n))
                raise AssertionError("it was not interrupted")
            except KeyboardInterrupt:
                pass
            other.join()
            assert eventually(lambda: (ops.stats().disk_in_use_bytes, ops.stats().pool_in_use_bytes) == (0, held))
            unoptimised(reference, batch(ROWS, n))  # TensorFlow ends what it has begun
            assert bits(net.weights) == bits(twin.weights)
            assert bits(step(batch(ROWS, 9))) == bits(unoptimised(reference, batch(ROWS, 9)))
        assert step.plans == 1

    run_forked(program)


def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def refused(net, folder):
    before = bits(net.weights)
    try:
        optimized(net, host_memory_limit=HOST, spill_dir=folder)(batch(ROWS))
        raise AssertionError("no error was raised")
    except tfswap.TfswapError as error:
        assert bits(net.weights) == before and ops.stats().pool_in_use_bytes == 0
        return str(error)


def on_tmpfs(folder):
    net, twin = Net(8), Net(8)
    reference = tf.function(twin.step)
    full = refused(net, folder)
    assert "No space left on device" in full and "Make room there" in full, full
    mount("-o", "remount,size=64m", "tmpfs", folder)
    step = optimized(net, host_memory_limit=HOST, spill_dir=folder)
    assert bits(step(batch(ROWS))) == bits(unoptimised(reference, batch(ROWS)))
    assert step.stats().disk_out_bytes > 0

    # The folder is not there any more: the file is, and has no name.
    subprocess.run(["umount", "-l", folder], check=True)
    os.rmdir(folder)
    assert bits(step(batch(ROWS, 1))) == bits(unoptimised(reference, batch(ROWS, 1)))
    assert bits(net.weights) == bits(twin.weights)
    del step
    gc.collect()
    assert (ops.stats().disk_reserved_bytes, ops.stats().pool_in_use_bytes) == (0, 0)
    assert "No such file or directory" in refused(Net(8), folder)

    other = folder + "2"
    os.mkdir(other)
    mount("-t", "tmpfs", "-o", "ro", "tmpfs", other)
    reported = refused(Net(8), other)
    assert "Read-only file system" in reported and "may write to" in reported, reported


def test_a_disk_that_is_full_removed_or_read_only(tmp_path):
    """A small tmpfs, in name spaces of its own: where the system allows them."""
    folder = tmp_path / "disk"
    folder.mkdir()
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mounted = f"mount -t tmpfs -o size=1m tmpfs {folder}"
    try:
        subprocess.run([*enter, mounted], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system allows no file systems of one's own")
    run = f"{mounted} && exec {sys.executable} -c 'import test_faults; test_faults.on_tmpfs(\"{folder}\")'"
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run([*enter, run], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
