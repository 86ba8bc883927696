"""The codec ops: to the bit what numpy and TensorFlow's own gradient kernels give, over random tensors.

oneDNN's kernels give other bits, and its max-pooling gradient aborts on a bfloat16: this file runs without them, in a
process that test_codecs_alone.py starts.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow import slow

tf = pytest.importorskip("tensorflow")
if os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "0":
    pytest.skip("needs TF_ENABLE_ONEDNN_OPTS=0", allow_module_level=True)

from codec_values import FLOATS, LENGTHS, SEEDS, as_function, bits, name_of, random_tensors, special_values  # noqa: E402

import tfswap.ops as ops  # noqa: E402 needs TensorFlow
import tfswap.ops.codecs as codecs  # noqa: E402
from tfswap.ir import custom_ops  # noqa: E402
from tfswap.native.load import load_codecs  # noqa: E402

# ---------------------------------------------------------------------------------------------------
# Masks


PREDICATES = {
    "positive": lambda x: x > 0,
    "relu6": lambda x: (x > 0) & (x < 6),
}


@pytest.mark.parametrize("predicate", PREDICATES)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@random_tensors
@given(length=LENGTHS, seed=SEEDS)
def test_masks_are_numpys_packed_bits(dtype, predicate, length, seed):
    x = special_values(dtype, seed, length)
    if dtype in (tf.float32, tf.float64, tf.bfloat16):  # numpy's threads keep denormals
        x[np.abs(x.astype(np.float64)) < np.finfo(np.float32 if dtype != tf.float64 else np.float64).tiny] = 0
    mask = codecs.encode_mask(x, predicate)
    with np.errstate(invalid="ignore"):
        expected = PREDICATES[predicate](x)
    assert bits(mask) == np.packbits(expected, bitorder="little").tobytes()
    assert np.array_equal(codecs.decode_mask(mask, [length]), expected)


@random_tensors
@given(shape=st.lists(st.integers(0, 9), max_size=4), seed=SEEDS)
def test_bools_are_packed_and_come_back(shape, seed):
    x = np.random.default_rng(seed).random(shape) < 0.5
    mask = codecs.encode_mask(x, "true")
    assert bits(mask) == np.packbits(x, bitorder="little").tobytes()
    back = codecs.decode_mask(mask, tf.constant(shape, tf.int64))
    assert back.shape == x.shape
    assert np.array_equal(back, x)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@random_tensors
@given(shape=st.lists(st.integers(0, 9), max_size=4), seed=SEEDS)
def test_masks_come_back_as_what_tensorflow_casts_from_bools(dtype, shape, seed):
    x = np.random.default_rng(seed).random(shape) < 0.5
    numbers = tf.cast(x, dtype)
    mask = codecs.encode_mask(numbers, "positive")
    assert bits(mask) == np.packbits(x, bitorder="little").tobytes()
    back = codecs.decode_mask(mask, x.shape, dtype)
    assert back.dtype == dtype
    assert back.shape == x.shape
    assert bits(back) == bits(numbers)


def relu(x, g):
    return tf.raw_ops.ReluGrad(gradients=g, features=x), codecs.multiply_by_mask(g, codecs.encode_mask(x, "positive"))


def relu6(x, g):
    return tf.raw_ops.Relu6Grad(gradients=g, features=x), codecs.multiply_by_mask(g, codecs.encode_mask(x, "relu6"))


def leaky_relu(x, g):
    mask = codecs.encode_mask(x, "positive")
    return (
        tf.raw_ops.LeakyReluGrad(gradients=g, features=x, alpha=0.3),
        codecs.leaky_relu_grad_from_mask(g, mask, alpha=0.3),
    )


def dropout(x, g):
    keep = x > 0
    mask = codecs.encode_mask(keep, "true")
    return tf.where(keep, g, tf.zeros([], g.dtype)), codecs.select_by_mask(mask, g, tf.zeros([], g.dtype), tf.shape(g))


def select(x, g):
    keep = x > 0
    return tf.where(keep, x, g), codecs.select_by_mask(codecs.encode_mask(keep, "true"), x, g, tf.shape(g))


BOTH = {function.__name__: as_function(function) for function in (relu, relu6, leaky_relu, dropout, select)}


@pytest.mark.parametrize("gradient", BOTH)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@random_tensors
@given(length=LENGTHS, seed=SEEDS)
def test_gradients_from_masks_are_tensorflows(dtype, gradient, length, seed):
    x = special_values(dtype, seed, length)
    g = special_values(dtype, seed + 1, length)
    expected, actual = BOTH[gradient](tf.constant(x), tf.constant(g))
    assert actual.dtype == expected.dtype
    # TensorFlow's vector code drops the sign of a bfloat16 NaN, and keeps it in the values that are left over.
    any_nan = dtype == tf.bfloat16
    assert bits(actual, any_nan) == bits(expected, any_nan)


def test_masks_of_another_tensor_are_refused():
    mask = codecs.encode_mask(tf.ones([17]), "positive")
    with pytest.raises(tf.errors.InvalidArgumentError, match="has 3 bytes; a tensor of its shape"):
        codecs.multiply_by_mask(tf.ones([16]), mask)
    with pytest.raises(tf.errors.InvalidArgumentError, match="has 3 bytes"):
        codecs.decode_mask(mask, [25])
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be \\[17\\], or one value"):
        codecs.select_by_mask(mask, tf.ones([2]), tf.zeros([17]), [17])
    with pytest.raises(tf.errors.InvalidArgumentError, match="bool needs 'true'"):
        codecs.encode_mask(tf.ones([3]), "true")
    with pytest.raises(tf.errors.InvalidArgumentError, match="bool needs 'true'"):
        codecs.encode_mask(tf.constant([True]), "positive")


# ---------------------------------------------------------------------------------------------------
# Max pooling


@st.composite
def poolings(draw):
    window = [draw(st.integers(1, 5)), draw(st.integers(1, 5))]
    if draw(st.integers(0, 19)) == 0:
        window = [16, 16]
    strides = [draw(st.integers(1, 4)), draw(st.integers(1, 4))]
    padding = draw(st.sampled_from(["SAME", "VALID", "EXPLICIT"]))
    explicit = []
    if padding == "EXPLICIT":
        before_after = [draw(st.integers(0, size - 1)) for size in window for _ in range(2)]
        explicit = [0, 0, *before_after, 0, 0]
    rows, cols = (draw(st.integers(1 if padding == "SAME" else size, size + 9)) for size in window)
    shape = [draw(st.integers(0, 3)), rows, cols, draw(st.sampled_from([1, 2, 3, 8, 64, 65, 131]))]
    return shape, [1, *window, 1], [1, *strides, 1], padding, explicit


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@random_tensors
@given(pooling=poolings(), seed=SEEDS, kind=st.sampled_from(["special", "ties", "flat"]))
def test_max_pool_gradients_are_tensorflows(dtype, pooling, seed, kind):
    shape, ksize, strides, padding, explicit = pooling
    window = {"ksize": ksize, "strides": strides, "padding": padding, "explicit_paddings": explicit}
    x = special_values(dtype, seed, shape)
    if kind != "special":
        x = np.random.default_rng(seed).integers(0, 3 if kind == "ties" else 1, shape).astype(x.dtype)

    @tf.function
    def both(x, g):
        pooled = tf.raw_ops.MaxPool(input=x, **window)
        expected = tf.raw_ops.MaxPoolGrad(orig_input=x, orig_output=pooled, grad=g, **window)
        positions = codecs.encode_max_pool(x, **window)
        actual = codecs.max_pool_grad_from_positions(g, positions, tf.shape(x, tf.int64), **window)
        return expected, actual, positions

    pooled_shape = tf.raw_ops.MaxPool(input=tf.zeros(shape), **window).shape
    g = special_values(dtype, seed + 1, pooled_shape.as_list())
    expected, actual, positions = both(tf.constant(x), tf.constant(g))
    assert actual.shape == expected.shape
    # Which of two NaNs a sum is depends on how a compiler orders its operands.
    assert bits(actual, any_nan=True) == bits(expected, any_nan=True)
    pixels = int(np.prod(pooled_shape[:3]))
    small = ksize[1] * ksize[2] <= 16
    assert positions.shape == [pixels * (-(-shape[3] // 2) if small else shape[3])]


def test_wrong_windows_are_refused():
    x = tf.ones([1, 4, 4, 2])
    for ksize, padding, explicit, match in [
        ([1, 17, 16, 1], "SAME", [], "more than 256 positions"),
        ([1, 2, 2, 2], "SAME", [], "ksize and strides must be"),
        ([1, 2, 2, 1], "EXPLICIT", [0, 0, 2, 0, 0, 0, 0, 0], "less than the window"),
    ]:
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=match):
            codecs.encode_max_pool(x, ksize, [1, 1, 1, 1], padding, explicit)
    window = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    positions = codecs.encode_max_pool(x, **window)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"are pooled to \[1,2,2,2\]"):
        codecs.max_pool_grad_from_positions(tf.ones([1, 2, 3, 2]), positions, [1, 4, 4, 2], **window)
    with pytest.raises(tf.errors.InvalidArgumentError, match="has 4 bytes; a tensor of its shape"):
        codecs.max_pool_grad_from_positions(tf.ones([2, 2, 2, 2]), positions, [2, 4, 4, 2], **window)


def flipped(encoded: np.ndarray, bit: int) -> np.ndarray:
    changed = encoded.copy()
    changed[bit // 8] ^= 1 << bit % 8
    return changed


@pytest.mark.parametrize("size", [3, 5])
def test_positions_outside_of_their_windows_are_refused(size):
    shape = [1, 7, 7, 4]
    window = {"ksize": [1, size, size, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    positions = np.asarray(codecs.encode_max_pool(x, **window))
    corners = range(-(size // 2), 7, 2)  # where windows begin, in the padding too
    pixel_bytes = len(positions) // 16
    seen = 0
    for bit in range(8 * len(positions)):
        changed = flipped(positions, bit)
        pixel = bit // 8 // pixel_bytes
        packed = changed[pixel * pixel_bytes :][:pixel_bytes]
        codes = packed if size == 5 else np.stack([packed & 15, packed >> 4], 1).reshape(-1)
        codes = codes.astype(int)
        rows, cols = corners[pixel // 4] + codes // size, corners[pixel % 4] + codes % size
        fits = codes < size * size
        fits &= (rows >= 0) & (rows < 7) & (cols >= 0) & (cols < 7)

        def decode(changed=changed):
            return codecs.max_pool_grad_from_positions(tf.ones([1, 4, 4, 4]), changed, shape, **window)

        if fits.all():
            decode()
            continue
        seen += 1
        with pytest.raises(tf.errors.InvalidArgumentError, match="has positions outside of their windows"):
            decode()
    assert 0 < seen < 8 * len(positions)


def test_an_error_names_what_was_encoded():
    @tf.function
    def step(x, g):
        with tf.name_scope("encoded"):
            mask = codecs.encode_mask(x, "positive")
        return codecs.multiply_by_mask(g, mask)

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\(encoded/Tfswap>EncodeMask\) has 3 bytes"):
        step(tf.ones([17]), tf.ones([8]))


# ---------------------------------------------------------------------------------------------------
# Integers


def test_integers_come_back_from_every_type():
    random = np.random.default_rng(3)
    for dtype in (np.int16, np.int32, np.int64, np.uint16, np.uint32, np.uint64):
        for encoded in (np.uint8, np.uint16, np.uint32):
            limits, room = np.iinfo(dtype), np.iinfo(encoded).max
            for minimum in {int(limits.min), 0, 7, min(int(limits.max) - room, 2**62)}:
                if minimum < limits.min:
                    continue
                highest = min(minimum + int(room), int(limits.max))
                x = random.integers(minimum, highest, (3, 4001), dtype, endpoint=True)
                x[0, 0], x[-1, -1] = minimum, highest
                codes = codecs.encode_integers(x, minimum, encoded)
                assert codes.dtype == encoded
                assert codes.shape == x.shape
                back = codecs.decode_integers(codes, minimum, dtype)
                assert back.dtype == dtype
                assert np.array_equal(back, x)


@pytest.mark.parametrize("wrong", [-4, 253, 2**40, -(2**63)])
def test_an_integer_out_of_range_fails_the_step(wrong):
    x = np.arange(10_000, dtype=np.int64) % 256 - 3
    assert np.array_equal(codecs.decode_integers(codecs.encode_integers(x, -3, tf.uint8), -3, tf.int64), x)
    x[5001] = wrong
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"value {wrong} .the 5001-th. is outside"):
        codecs.encode_integers(x, -3, tf.uint8)


# ---------------------------------------------------------------------------------------------------
# Sparse rows


def sparse_values(dtype: Any, seed: int, shape: Any, share: float) -> np.ndarray:
    """Any bits at all in a share of the places, and zeros."""
    random = np.random.default_rng(seed)
    kind = np.dtype(dtype.as_numpy_dtype)
    count = int(np.prod(shape))
    data = np.frombuffer(random.bytes(count * kind.itemsize), kind).copy()
    data[:3] = [-0.0, np.nan, 0.0][:count]
    data[random.random(count) >= share] = 0
    return data.reshape(shape)


def sparse_there_and_back(x, capacity):
    encoded, spill = codecs.encode_sparse(x, capacity)
    return codecs.decode_sparse(encoded, spill, tf.shape(x), capacity, x.dtype), encoded


def sparse_bytes(count: int, capacity: int, value_bytes: int) -> int:
    """Per row of 256 a 4-byte start, and one more, in multiples of 16; then values and their columns."""
    starts = -(-4 * (-(-count // 256) + 1) // 16) * 16
    return starts + min(capacity, count) * (value_bytes + 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@random_tensors
@given(
    shape=st.lists(st.integers(0, 40), max_size=3),
    capacity=st.integers(0, 3000),
    share=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=SEEDS,
)
def test_sparse_rows_keep_every_bit(dtype, shape, capacity, share, seed):
    x = sparse_values(dtype, seed, shape, share)
    ops.reset_stats()
    back, encoded = sparse_there_and_back(tf.constant(x), capacity)
    assert back.shape == x.shape
    assert bits(back) == bits(x)
    assert encoded.shape == [sparse_bytes(x.size, capacity, x.itemsize)]
    # What is over the capacity goes to the host, all of it and nothing else.
    words = x.reshape(-1).view(f"uint{8 * x.itemsize}")
    spilled = max(np.count_nonzero(words) - capacity, 0)
    assert ops.stats().spilled_bytes == spilled * (x.itemsize + 1)
    assert ops.stats().pool_in_use_bytes == 0


def test_sparse_rows_over_many_threads():
    x = sparse_values(tf.float32, 1, [1_000_003], 0.5)
    for capacity in (600_000, 300_000):
        back, _ = sparse_there_and_back(tf.constant(x), capacity)
        assert bits(back) == bits(x)


def test_a_spill_lives_as_long_as_its_handle_and_decodes_again():
    x = sparse_values(tf.float32, 2, [10_000], 1.0)
    encoded, spill = codecs.encode_sparse(x, 100)
    assert ops.stats().pool_in_use_bytes >= 9000 * 5
    for _ in range(2):
        assert bits(codecs.decode_sparse(encoded, spill, [100, 100], 100, tf.float32)) == bits(x)
    del spill
    assert ops.stats().pool_in_use_bytes == 0


def test_a_spill_keeps_to_the_host_limit():
    ops.configure(host_memory_limit=0)
    try:
        x = tf.ones([10_000])
        back, _ = sparse_there_and_back(x, 10_000)
        assert np.array_equal(back, x)
        with pytest.raises(tf.errors.ResourceExhaustedError, match="host_memory_limit="):
            codecs.encode_sparse(x, 9_000)
    finally:
        ops.configure(host_memory_limit=None)


def test_sparse_rows_of_another_tensor_are_refused():
    encoded, spill = codecs.encode_sparse(tf.ones([1000]), 500)
    _, other = codecs.encode_sparse(tf.ones([1000]), 1000)
    with pytest.raises(tf.errors.InvalidArgumentError, match="of one EncodeSparse of that type and shape"):
        codecs.decode_sparse(encoded, other, [1000], 500, tf.float32)
    _, narrow = codecs.encode_sparse(tf.ones([1000], tf.float16), 500)  # its host memory would be read past its end
    with pytest.raises(tf.errors.InvalidArgumentError, match="of one EncodeSparse of that type and shape"):
        codecs.decode_sparse(encoded, narrow, [1000], 500, tf.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="bytes; a tensor of its shape"):
        codecs.decode_sparse(encoded, spill, [1000], 400, tf.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be the scalar that EncodeSparse returned"):
        codecs.decode_sparse(encoded, ops.swap_out(tf.ones([1])), [1000], 500, tf.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="capacity must be a number of values"):
        codecs.encode_sparse(tf.ones([3]), -1)


@pytest.mark.parametrize("capacity", [700, 300])
def test_sparse_rows_that_have_changed_are_refused(capacity):
    """All columns are there: a change to where a row begins, or to a column, breaks their order."""
    x = tf.ones([600])
    encoded, spill = codecs.encode_sparse(x, capacity)
    encoded = np.asarray(encoded)
    starts, columns = 8 * 4 * 4, 8 * (16 + 4 * min(capacity, 600))

    def refused(changed):
        with pytest.raises(tf.errors.InvalidArgumentError, match="or their bytes have changed since"):
            codecs.decode_sparse(changed, spill, [600], capacity, tf.float32)

    assert len(encoded) == sparse_bytes(600, capacity, 4)
    for bit in (*range(starts), *range(columns, 8 * len(encoded), 41)):
        refused(flipped(encoded, bit))
    zeroed = encoded.copy()
    zeroed[16:20] = 0  # the first value
    refused(zeroed)
    assert np.array_equal(codecs.decode_sparse(encoded, spill, [600], capacity, tf.float32), x)


# ---------------------------------------------------------------------------------------------------
# Large tensors

FREE_BYTES = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(FREE_BYTES < 8 << 30, reason="needs 8 GiB of memory")
def test_tensors_of_more_than_two_gibibytes():
    zeros = 1 << 29
    values = np.zeros(zeros + 7, np.float32)
    values[zeros:] = [0.0, 3.0, -2.0, np.nan, np.inf, -0.0, 0.5]
    x = tf.constant(values)
    masked = np.array([0.0, 3.0, -0.0, np.nan, np.inf, -0.0, 0.5], np.float32)

    mask = codecs.encode_mask(x, "positive")
    assert np.flatnonzero(mask).tolist() == [zeros // 8]
    assert int(mask[-1]) == 0b1010010
    for work, end in (
        (lambda: codecs.multiply_by_mask(x, mask), masked),
        (lambda: codecs.decode_floats(codecs.encode_floats(x, "gist_float8"), x.shape, "gist_float8", x.dtype), None),
        (lambda: sparse_there_and_back(x, 100)[0], None),
    ):
        back = work().numpy()
        assert bits(back[zeros:], any_nan=True) == bits(values[zeros:] if end is None else end, any_nan=True)
        assert not back[:zeros].any()
        del back  # one at a time


@pytest.mark.parametrize("architecture", [b"sm_80", *slow(b"sm_90")])
def test_the_gpu_kernels_compile(architecture):
    """With the compiler that a user's machine has, TensorFlow's NVRTC; needs no GPU."""
    message = ctypes.create_string_buffer(10_000)
    compiled = load_codecs().c.tfswap_compile_gpu_pieces(architecture, message, len(message))
    if b"not installed" in message.value:
        assert b"tensorflow[and-cuda]" in message.value
        pytest.skip("needs libnvrtc")
    assert compiled > 50, message.value.decode()


def test_shapes_are_inferred():
    @tf.function(input_signature=[tf.TensorSpec([None, 4, 6, 3]), tf.TensorSpec([2, 4, 6, 3])])
    def step(unknown, known):
        window = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
        assert codecs.encode_mask(unknown, "positive").shape.as_list() == [None]
        mask = codecs.encode_mask(known, "positive")
        assert mask.shape == [18]
        assert codecs.decode_mask(mask, known.shape).shape == known.shape
        assert codecs.multiply_by_mask(known, mask).shape == known.shape
        assert codecs.encode_max_pool(unknown, **window).shape.as_list() == [None]
        positions = codecs.encode_max_pool(known, **window)
        assert positions.shape == [2 * 2 * 3 * 2]
        encoded, spill = codecs.encode_sparse(known, 50)
        assert encoded.shape == [sparse_bytes(144, 50, 4)]
        assert spill.shape == []
        assert codecs.encode_sparse(unknown, 50)[0].shape.as_list() == [None]
        assert codecs.decode_sparse(encoded, spill, known.shape, 50, tf.float32).shape == known.shape
        assert codecs.encode_floats(known, "gist_float10").shape == [192]
        assert codecs.encode_groups(known, 0, 4, 16).shape == [9 * (8 + 8)]
        pooled = tf.nn.max_pool2d(known, 2, 2, "SAME")
        assert codecs.max_pool_grad_from_positions(pooled, positions, known.shape, **window).shape == known.shape

    step(tf.ones([1, 4, 6, 3]), tf.ones([2, 4, 6, 3]))


def test_the_names_are_those_registered():
    from tensorflow.python.framework import op_def_registry

    for name in custom_ops.CODECS | custom_ops.FROM_ENCODED:
        op_def = op_def_registry.get(name)
        assert op_def is not None
        assert op_def.is_stateful == (name in custom_ops.CODECS)
