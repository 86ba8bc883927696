"""The swap ops: values, refusals, prefetched lists."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from processes import last_json, run_forked

tf = pytest.importorskip("tensorflow")

from swap_copies import MIB, STUCK_BYTES_PER_S, ends_by_itself, eventually, there_and_back  # noqa: E402

import tfswap.ops as ops  # noqa: E402 needs TensorFlow
from tfswap.native.load import load  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_copy_settings")


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

    def program():
        import tensorflow as tf

        import tfswap.ops

        model = tf.saved_model.load(str(tmp_path))
        y = model.step(tf.reshape(tf.range(12.0), [3, 4]))
        return [y.numpy().tolist(), tfswap.ops.stats().in_copies]

    run = run_forked(program)
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
