"""The swap ops: values, refusals, device and host memory, throttle, failure and cancellation.

What needs its own allocator or threads runs in a process of its own. No test compares with
an absolute time: a copy that must not end yet is throttled to take hours, and the test lifts the
throttle when it is done; else pytest's timeout ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import numpy as np
import pytest
from processes import last_json, on_arena, run_forked

tf = pytest.importorskip("tensorflow")

import tfswap.ops as ops  # noqa: E402 needs TensorFlow
from tfswap.errors import TfswapError  # noqa: E402
from tfswap.native.load import load  # noqa: E402

MIB = 2**20

# A step that never ends keeps Python's signal handlers from running; a thread ends the process.
ends_by_itself = pytest.mark.timeout(300, method="thread")

# At this rate a copy of one chunk takes more than half an hour: for a test, for ever.
STUCK_BYTES_PER_S = 1000.0


@pytest.fixture(autouse=True)
def _fresh_settings():
    ops.reset_stats()
    yield
    ops.configure(host_memory_limit=None, copy_threads=1, bandwidth_bytes_per_s=None, latency_us=0.0)
    assert eventually(lambda: ops.stats().pool_in_use_bytes == 0), "a test leaked host memory"


def eventually(condition, timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def there_and_back(x, shape=None):
    handle = ops.swap_out(x)
    with tf.control_dependencies([ops.release(handle)]):
        tensor, ticket = ops.swap_in(handle, x.dtype, shape)
    return ops.await_copy(tensor, ticket)


# ---------------------------------------------------------------------------------------------------
# Values


def any_bits(dtype, shape) -> np.ndarray:
    """An array whose bytes are arbitrary where the type allows it: NaN payloads, denormals, all."""
    numpy_type = np.dtype(dtype.as_numpy_dtype)
    random = np.random.default_rng(5)
    if dtype == tf.bool:
        return random.integers(0, 2, shape).astype(bool)
    if dtype == tf.dtypes.experimental.int4:  # four bits in each byte
        return random.integers(0, 8, shape).astype(numpy_type)
    count = int(np.prod(shape))
    data = random.integers(0, 256, count * numpy_type.itemsize, dtype=np.uint8).tobytes()
    return np.frombuffer(data, numpy_type).reshape(shape)


DTYPES = [
    tf.bfloat16,
    tf.bool,
    tf.complex128,
    tf.complex64,
    tf.dtypes.experimental.float8_e4m3fn,
    tf.dtypes.experimental.int4,
    tf.float16,
    tf.float32,
    tf.float64,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.int8,
    tf.uint16,
    tf.uint32,
    tf.uint64,
    tf.uint8,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_every_bit_comes_back(dtype):
    step = tf.function(there_and_back, input_signature=[tf.TensorSpec(None, dtype)])
    for shape in [(), (1,), (7,), (0,), (3, 0, 5), (33, 65), (2, 3, 5, 7), (3 * MIB // 2 + 1,)]:
        x = any_bits(dtype, shape)
        ops.reset_stats()
        y = step(tf.constant(x, dtype)).numpy()
        assert y.dtype == x.dtype
        assert y.shape == x.shape
        assert y.tobytes() == x.tobytes()
        # It really travelled.
        assert ops.stats().out_bytes == ops.stats().in_bytes == x.nbytes


def test_signalling_nans_keep_their_payload():
    bits = np.array([0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0x80000000, 0x00000001], np.uint32)
    y = tf.function(there_and_back)(tf.constant(bits.view(np.float32)))
    assert y.numpy().view(np.uint32).tolist() == bits.tolist()


def test_each_swap_in_makes_its_own_tensor():
    @tf.function
    def step(x):
        handle = ops.swap_out(x)
        ops.release(handle)
        tickets = [ops.swap_in(handle, x.dtype) for _ in range(3)]
        first, second, third = (ops.await_copy(tensor, ticket) for tensor, ticket in tickets)
        # Works in place, if it may: the others must not change.
        return first + 1, second, third

    x = tf.random.normal([513, 1025])
    first, second, third = step(x)
    assert np.array_equal(first, x + 1)
    assert np.array_equal(second, x)
    assert np.array_equal(third, x)
    stats = ops.stats()
    assert (stats.out_copies, stats.in_copies) == (1, 3)


@ends_by_itself
def test_swap_in_without_release_waits_for_the_copy_out():
    # 24 MiB: many chunks, so that a copy back that does not wait reads bytes not yet written.
    x = tf.random.normal([6, MIB])
    expected = x.numpy().tobytes()

    @tf.function
    def step(x):
        tensor, ticket = ops.swap_in(ops.swap_out(x), x.dtype)
        return ops.await_copy(tensor, ticket)

    ops.configure(bandwidth_bytes_per_s=STUCK_BYTES_PER_S)
    results = []
    thread = threading.Thread(target=lambda: results.append(step(x)))
    thread.start()
    assert eventually(lambda: ops.stats().pool_in_use_bytes > 0)
    time.sleep(0.1)
    assert not results
    ops.configure(bandwidth_bytes_per_s=None)
    thread.join()
    assert results[0].numpy().tobytes() == expected


def test_works_on_what_later_ops_overwrite():
    """The handle's reference keeps a later op from reusing the buffer that is being copied."""

    @tf.function
    def step(x):
        y = x * 2
        handle = ops.swap_out(y)
        z = tf.nn.relu(y)  # in place, were it y's only reader
        released = ops.release(handle)
        with tf.control_dependencies([z, released]):
            tensor, ticket = ops.swap_in(handle, y.dtype)
        return z, ops.await_copy(tensor, ticket)

    ops.configure(latency_us=20_000.0)
    x = tf.random.normal([700, 700])
    z, y = step(x)
    assert np.array_equal(y, x * 2)
    assert np.array_equal(z, tf.nn.relu(x * 2))


def test_the_optimizers_leave_the_ops_alone():
    @tf.function
    def step():
        x = tf.ones([100, 100])  # a constant, and two equal swaps of it: nothing to fold or merge
        a = there_and_back(x)
        b = there_and_back(x)
        ops.release(ops.swap_out(x))  # it has no readers
        return a + b

    assert np.array_equal(step(), np.full([100, 100], 2, np.float32))
    assert (ops.stats().out_copies, ops.stats().in_copies) == (3, 2)


def test_shapes_are_inferred():
    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        handle = ops.swap_out(x)
        tensor, ticket = ops.swap_in(handle, x.dtype)
        assert tensor.shape.as_list() == [None, 3]
        assert ticket.shape.as_list() == []
        narrowed, _ = ops.swap_in(handle, x.dtype, shape=[5, None])
        assert narrowed.shape.as_list() == [5, 3]
        with pytest.raises(ValueError, match="must be equal"):
            ops.swap_in(handle, x.dtype, shape=[None, 4])
        result = ops.await_copy(tensor, ticket)
        assert result.shape.as_list() == [None, 3]
        return result

    assert step(tf.ones([2, 3])).shape == (2, 3)

    @tf.function(input_signature=[tf.TensorSpec(None)])
    def unknown(x):
        result = there_and_back(x)
        assert result.shape.rank is None
        return result

    assert unknown(tf.ones([2, 3])).shape == (2, 3)


def test_a_saved_model_with_the_ops_runs_elsewhere(tmp_path):
    module = tf.Module()
    module.step = tf.function(there_and_back, input_signature=[tf.TensorSpec([None, 4])])
    tf.saved_model.save(module, str(tmp_path))
    run = run_forked(f"""
        import json
        import tensorflow as tf
        import tfswap.ops
        model = tf.saved_model.load({str(tmp_path)!r})
        y = model.step(tf.reshape(tf.range(12.0), [3, 4]))
        print(json.dumps([y.numpy().tolist(), tfswap.ops.stats().in_copies]))
    """)
    assert last_json(run) == [np.arange(12.0).reshape(3, 4).tolist(), 1]


# ---------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize("dtype", [tf.string, tf.variant, tf.resource], ids=lambda dtype: dtype.name)
def test_types_that_are_not_plain_bytes_are_refused(dtype):
    with tf.Graph().as_default():
        x = tf.raw_ops.Placeholder(dtype=dtype)
        with pytest.raises(ValueError, match=f"tfswap can't swap tensors of type {dtype.name}"):
            ops.swap_out(x)
    if dtype == tf.string:
        with pytest.raises(tf.errors.InvalidArgumentError, match="can't swap tensors of type string"):
            ops.swap_out(tf.constant("a"))


def test_the_wrong_type_is_refused():
    handle = ops.swap_out(tf.ones([2]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"T=int32, but its handle holds.* float"):
        ops.swap_in(handle, tf.int32)


def test_a_tensor_that_is_not_the_tickets_is_refused():
    handle = ops.swap_out(tf.ones([100]))
    tensor, ticket = ops.swap_in(handle, tf.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not the one of its ticket"):
        ops.await_copy(tensor + 0, ticket)
    ops.await_copy(tensor, ticket)


def test_other_variants_are_refused():
    shape = tf.constant([], tf.int32)
    other = tf.raw_ops.TensorListReserve(element_shape=shape, num_elements=1, element_dtype=tf.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be the scalar that SwapOut returned"):
        ops.release(other)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be the scalar that SwapIn returned"):
        ops.await_copy(tf.ones([1]), ops.swap_out(tf.ones([1])))
    for held in (other, ops.swap_out(tf.ones([1])), tf.raw_ops.TensorListFromTensor(tensor=[1.0], element_shape=shape)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be a list of what SwapOut returned"):
            load().ops.tfswap_prefetch(list=held)


# ---------------------------------------------------------------------------------------------------
# Prefetched from a list


def handles_of(*tensors):
    """A list of what stands for them on the host."""
    found = tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=tf.variant)
    for tensor in tensors:
        handle = ops.swap_out(tensor)
        ops.release(handle)
        found = tf.raw_ops.TensorListPushBack(input_handle=found, tensor=handle)
    return found


def pop(handles):
    return tf.raw_ops.TensorListPopBack(input_handle=handles, element_shape=-1, element_dtype=tf.variant)


def test_the_last_element_of_a_list_is_on_its_way_before_it_is_popped():
    x, y = tf.random.normal([257, 1025]), tf.random.normal([3])
    handles = handles_of(x, y)
    for wanted in (y, x):
        before = ops.stats().in_copies
        handles = load().ops.tfswap_prefetch(list=load().ops.tfswap_prefetch(list=handles))
        assert eventually(lambda before=before: ops.stats().in_copies == before + 1)
        handles, handle = pop(handles)
        first, second = (ops.await_copy(*ops.swap_in(handle, tf.float32)) for _ in range(2))
        assert np.array_equal(first, wanted)
        assert np.array_equal(second, wanted)
        assert ops.stats().in_copies == before + 2  # the second one has a tensor of its own
    assert tf.raw_ops.TensorListLength(input_handle=load().ops.tfswap_prefetch(list=handles)) == 0


def test_an_empty_element_is_prefetched():
    _, handle = pop(load().ops.tfswap_prefetch(list=handles_of(tf.zeros([0, 4]))))
    assert ops.await_copy(*ops.swap_in(handle, tf.float32)).shape == (0, 4)


# ---------------------------------------------------------------------------------------------------
# Device memory, on a capped BFC arena as GPUs have it

ARENA_PRELUDE = """
import json
import tensorflow as tf
import tfswap.ops as ops
MIB = 2**20

def memory(what):
    return tf.config.experimental.get_memory_info("CPU:0")[what]

# Makes the arena one free region, as a GPU's is from the start.
tf.zeros([56, MIB])
"""


def run_in_arena(code: str):
    return on_arena(ARENA_PRELUDE + textwrap.dedent(code), 256)


def test_release_gives_the_buffer_back_and_swap_in_takes_it():
    seen = run_in_arena("""
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
        print(json.dumps([t - before for t in (swapping, released, coming, back, end)]))
    """)
    size = 64 * MIB
    assert seen == [0, -size, 0, 0, -size]


def test_what_is_prefetched_goes_with_its_list_or_to_who_reads_it():
    seen = run_in_arena("""
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
        print(json.dumps([t - before for t in (released, coming, back, read, kept, under_way, end)]))
    """)
    size, small = 64 * MIB, MIB
    wanted = [-size, 0, 0, -size, 0, 0, -size]
    assert all(abs(found - expected) < small for found, expected in zip(seen, wanted, strict=True)), seen


def test_a_step_fits_only_because_it_swaps():
    """Seven 48 MiB tensors do not fit into 256 MiB at the same time. Swapped, at most four are there."""
    seen = run_in_arena("""
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
        print(json.dumps([value, peak, unswapped]))
    """)
    value, peak, unswapped = seen
    layers = [1.0]
    for _ in range(6):
        layers.append(np.sin(layers[-1]))
    assert value == pytest.approx(sum(layers), rel=1e-5)
    assert unswapped == "out of memory"
    assert peak < 4.1 * 48 * MIB


def test_the_peak_repeats_to_the_byte():
    """The copy threads leave no reference behind that would keep an op from working in place."""
    seen = run_in_arena("""
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
        print(json.dumps(sorted(peaks)))
    """)
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


# ---------------------------------------------------------------------------------------------------
# Throttle, failure, cancellation


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
    run_forked(
        """
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
"""
    )


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
    from tensorflow.python.eager import cancellation

    @tf.function
    def step(x):
        _, waiting = wait(x)
        with tf.control_dependencies([waiting]):
            return tf.constant(1)

    manager = cancellation.CancellationManager()
    cancelable = manager.get_cancelable_function(step.get_concrete_function(x))
    ops.configure(bandwidth_bytes_per_s=STUCK_BYTES_PER_S)
    errors = []

    def run():
        try:
            cancelable(x)
        except tf.errors.CancelledError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert eventually(lambda: ops.stats().pool_in_use_bytes > 0)
    time.sleep(settle_s)
    assert not errors
    manager.start_cancel()
    thread.join()
    assert len(errors) == 1


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
    seen = last_json(
        run_forked("""
        import json
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
        print(json.dumps([same, ops.stats().in_copies]))
    """)
    )
    assert seen == [True, 8]
