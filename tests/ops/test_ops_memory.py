"""Memory of the swap ops: the device's, in an arena of its own, and the host's."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from processes import on_arena

tf = pytest.importorskip("tensorflow")

from swap_copies import MIB, eventually, there_and_back  # noqa: E402

import tfswap.ops as ops  # noqa: E402 needs TensorFlow
from tfswap.errors import TfswapError  # noqa: E402
from tfswap.native.load import load  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_copy_settings")


# ---------------------------------------------------------------------------------------------------
# Device memory, on a capped BFC arena as GPUs have it


def memory(what):
    return tf.config.experimental.get_memory_info("CPU:0")[what]


def run_in_arena(program):
    """The result of `program` in an arena that is one free region, as a GPU's is from the start."""

    def settled():
        tf.zeros([56, MIB])
        return program()

    return on_arena(settled, 256)


def test_release_gives_the_buffer_back_and_swap_in_takes_it():
    def program():
        x = tf.fill([16, MIB], 1.5)
        before = memory("current")
        handle = ops.swap_out(x)
        del x
        swapping = memory("current")
        ops.release(handle)
        released = memory("current")
        tensor, ticket = ops.swap_in(handle, tf.float32)
        coming = memory("current")
        y = ops.await_copy(tensor, ticket)
        del tensor, ticket
        back = memory("current")
        del handle, y
        end = memory("current")
        return [t - before for t in (swapping, released, coming, back, end)]

    seen = run_in_arena(program)
    size = 64 * MIB
    assert seen == [0, -size, 0, 0, -size]


def test_what_is_prefetched_goes_with_its_list_or_to_who_reads_it():
    def program():
        from tfswap.native.load import load

        x = tf.fill([16, MIB], 1.5)
        before = memory("current")
        handle = ops.swap_out(x)
        ops.release(handle)
        del x
        handles = tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=tf.variant)
        handles = tf.raw_ops.TensorListPushBack(input_handle=handles, tensor=handle)
        released = memory("current")
        load().ops.tfswap_prefetch(list=handles)
        coming = memory("current")
        tensor, ticket = ops.swap_in(handle, tf.float32)
        y = ops.await_copy(tensor, ticket)
        del tensor, ticket
        back = memory("current")
        del y
        read = memory("current")
        load().ops.tfswap_prefetch(list=handles)
        del handles
        kept = memory("current")
        ops.await_copy(*ops.swap_in(handle, tf.float32))
        ops.configure(bandwidth_bytes_per_s=1000.0)  # a copy is under way for ever, and no kernel waits for it
        handles = tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=tf.variant)
        handles = load().ops.tfswap_prefetch(list=tf.raw_ops.TensorListPushBack(input_handle=handles, tensor=handle))
        del handle, handles
        under_way = memory("current")
        ops.configure(bandwidth_bytes_per_s=None)
        while ops.stats().pool_in_use_bytes:
            pass
        end = memory("current")
        return [t - before for t in (released, coming, back, read, kept, under_way, end)]

    seen = run_in_arena(program)
    size, small = 64 * MIB, MIB
    wanted = [-size, 0, 0, -size, 0, 0, -size]
    assert all(abs(found - expected) < small for found, expected in zip(seen, wanted, strict=True)), seen


def test_a_step_fits_only_because_it_swaps():
    """Seven 48 MiB tensors do not fit into 256 MiB at the same time. Swapped, at most four are there."""

    def program():
        def step(first, swap):
            x = tf.range(first, first + 12.0 * MIB)
            kept, released = [], tf.no_op()
            for _ in range(6):
                kept.append(ops.swap_out(x) if swap else x)
                with tf.control_dependencies([released]):
                    y = tf.sin(x)  # which no optimizer simplifies
                with tf.control_dependencies([y]):
                    released = ops.release(kept[-1]) if swap else tf.no_op()
                x = y
            total = x
            for value in reversed(kept):
                if swap:
                    with tf.control_dependencies([total, released]):
                        value = ops.await_copy(*ops.swap_in(value, tf.float32))
                total = total + value
            return total[0]

        first = tf.constant(1.0)
        swapped = tf.function(lambda first: step(first, True))
        swapped(first)
        tf.config.experimental.reset_memory_stats("CPU:0")
        value = float(swapped(first))
        peak = memory("peak")
        try:
            tf.function(lambda first: step(first, False))(first)
            unswapped = "fits"
        except tf.errors.ResourceExhaustedError:
            unswapped = "out of memory"
        return [value, peak, unswapped]

    seen = run_in_arena(program)
    value, peak, unswapped = seen
    layers = [1.0]
    for _ in range(6):
        layers.append(np.sin(layers[-1]))
    assert value == pytest.approx(sum(layers), rel=1e-5)
    assert unswapped == "out of memory"
    assert peak < 4.1 * 48 * MIB


def test_the_peak_repeats_to_the_byte():
    """The copy threads leave no reference behind that would keep an op from working in place."""

    def program():
        @tf.function
        def step(x):
            x = x * 2.0
            handle = ops.swap_out(x)
            with tf.control_dependencies([ops.release(handle)]):
                tensor, ticket = ops.swap_in(handle, tf.float32)
            y = ops.await_copy(tensor, ticket)
            return tf.reduce_sum(tf.nn.relu(tf.exp(y)))  # both in place

        x = tf.ones([2048])
        step(x)
        peaks = set()
        for _ in range(300):
            tf.config.experimental.reset_memory_stats("CPU:0")
            before = memory("current")
            step(x)
            peaks.add(memory("peak") - before)
        return sorted(peaks)

    seen = run_in_arena(program)
    # One tensor at a time and the scalar: the swapped one is gone before the new one is made, and handles
    # and tickets are not in the arena.
    assert seen == [8192 + 256]


# ---------------------------------------------------------------------------------------------------
# Host memory


def test_host_memory_is_reused_from_step_to_step():
    @tf.function
    def step(x):
        return there_and_back(x) + there_and_back(tf.transpose(x))

    x = tf.random.normal([1200, 1200])
    step(x)
    reserved = ops.stats().pool_reserved_bytes
    for _ in range(100):
        step(x)
        assert ops.stats().pool_in_use_bytes == 0
    stats = ops.stats()
    assert stats.pool_reserved_bytes == reserved
    assert stats.out_copies == stats.in_copies == 202
    assert 0 < stats.pool_peak_bytes <= 2 * x.dtype.size * 1200 * 1200


def test_the_host_limit_is_an_error_that_can_be_survived():
    x = tf.random.normal([4, MIB])

    @tf.function
    def step(x):
        first = ops.swap_out(x, name="small_enough")
        with tf.control_dependencies([first]):
            second = ops.swap_out(tf.concat([x, x], 0), name="too_large")
        ops.release(first)
        ops.release(second)
        tensor, ticket = ops.swap_in(second, x.dtype)
        return ops.await_copy(tensor, ticket)

    ops.configure(host_memory_limit=40 * MIB)
    for _ in range(3):
        with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
            step(x)
        message = str(caught.value)
        for part in (
            "'too_large'",
            f"requests {32 * MIB} bytes",
            f"{16 * MIB} bytes are in use",
            f"limit of {40 * MIB}",
            "host_memory_limit=",
        ):
            assert part in message
        assert eventually(lambda: ops.stats().pool_in_use_bytes == 0)
        assert ops.stats().pool_reserved_bytes <= 40 * MIB

    assert np.array_equal(there_and_back(x), x)
    ops.configure(host_memory_limit=None)
    assert np.array_equal(step(x), tf.concat([x, x], 0))


def test_reserve():
    ops.configure(host_memory_limit=0)  # gives back what earlier tests left
    assert ops.stats().pool_reserved_bytes == 0
    ops.configure(host_memory_limit=100 * MIB)
    with pytest.raises(MemoryError, match="host_memory_limit=104857600"):
        ops.reserve(101 * MIB)
    ops.reserve(90 * MIB)
    assert ops.stats().pool_reserved_bytes == 90 * MIB
    ops.reserve(50 * MIB)
    assert ops.stats().pool_reserved_bytes == 90 * MIB
    # One piece as large as the reservation finds room in it.
    handle = ops.swap_out(tf.zeros([90 * MIB // 4]))
    assert ops.stats().pool_reserved_bytes == 90 * MIB
    ops.release(handle)


def test_settings():
    assert ops.configuration() == ops.Configuration(None, 1, None, 0.0)
    set_to = ops.configure(host_memory_limit=5, copy_threads=3, bandwidth_bytes_per_s=1e9, latency_us=7.0)
    assert set_to == ops.configuration() == ops.Configuration(5, 3, 1e9, 7.0)
    assert ops.configure(latency_us=8.0) == dataclasses.replace(set_to, latency_us=8.0)
    wrongs: list[dict[str, Any]] = [
        {"host_memory_limit": -1},
        {"host_memory_limit": "abc"},
        {"host_memory_limit": False},
        {"copy_threads": -1},
        {"copy_threads": "3"},
        {"bandwidth_bytes_per_s": 0},
        {"bandwidth_bytes_per_s": float("nan")},
        {"disk_bandwidth_bytes_per_s": "fast"},
        {"latency_us": -1},
        {"disk_latency_us": None},
        {"disk_compression": 1},
    ]
    for wrong in wrongs:
        with pytest.raises(TfswapError, match=next(iter(wrong))):
            ops.configure(**wrong)
    assert ops.configuration().copy_threads == 3
    assert ops.configure(host_memory_limit="6GiB").host_memory_limit == 6 << 30
    assert ops.configure(host_memory_limit=0).host_memory_limit == 0


def test_a_tensorflow_without_zstd_compresses_nothing(monkeypatch):
    monkeypatch.setattr(load().c, "tfswap_set_disk_compression", lambda wanted: not wanted)
    with pytest.raises(TfswapError, match="exports no zstd"):
        ops.configure(disk_compression=True)
    assert not ops.configure(latency_us=1.0).disk_compression


def test_a_handle_that_is_never_released_leaks_nothing():
    handle = ops.swap_out(tf.ones([MIB]))
    assert ops.stats().pool_in_use_bytes == 4 * MIB
    del handle
    assert eventually(lambda: ops.stats().pool_in_use_bytes == 0)
