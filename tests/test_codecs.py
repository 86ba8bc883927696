"""The codec ops: to the bit what numpy and TensorFlow's own gradient kernels give, over random tensors.

Random values favour what goes wrong: NaN and infinities, zeros of both signs, denormals, equal neighbours,
lengths around whole bytes. TensorFlow's kernels run in the same `tf.function`, on the same threads, since
those flush denormals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

tf = pytest.importorskip("tensorflow")

import tfswap.ops as ops  # noqa: E402 needs TensorFlow

FLOATS = [tf.bfloat16, tf.float16, tf.float32, tf.float64]

# Each example traces nothing new: functions below are made once and take any shape.
random_tensors = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

LENGTHS = st.one_of(st.integers(0, 40), st.integers(1000, 1100), st.just(200_003))
SEEDS = st.integers(0, 2**32 - 1)


def name_of(dtype: Any) -> str:
    return dtype.name


def special_values(dtype: Any, seed: int, shape: Any) -> np.ndarray:
    """Normal numbers, a third of them replaced by special ones."""
    random = np.random.default_rng(seed)
    kind = dtype.as_numpy_dtype
    x = random.standard_normal(shape) * 4
    tiny = 1e-310 if dtype == tf.float64 else 1e-40 if dtype != tf.float16 else 1e-7
    specials = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, tiny, -tiny, 6.0, 1.0, -1.0, 5.999]
    chosen = random.choice(specials, shape)
    with np.errstate(over="ignore"):
        return np.where(random.random(shape) < 1 / 3, chosen, x).astype(kind)


def bits(x: Any, any_nan: bool = False) -> bytes:
    """All bits; where `any_nan`, of a NaN only that it is one."""
    array = np.array(x)
    if any_nan:
        array[np.isnan(array)] = np.nan
    return array.tobytes()


def as_function(function: Any) -> Any:
    """Run by the executor on its own threads, with shapes open, so that it is traced once per type."""
    return tf.function(function, reduce_retracing=True)


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
    mask = ops.encode_mask(x, predicate)
    with np.errstate(invalid="ignore"):
        expected = PREDICATES[predicate](x)
    assert bits(mask) == np.packbits(expected, bitorder="little").tobytes()
    assert np.array_equal(ops.decode_mask(mask, [length]), expected)


@random_tensors
@given(shape=st.lists(st.integers(0, 9), max_size=4), seed=SEEDS)
def test_bools_are_packed_and_come_back(shape, seed):
    x = np.random.default_rng(seed).random(shape) < 0.5
    mask = ops.encode_mask(x, "true")
    assert bits(mask) == np.packbits(x, bitorder="little").tobytes()
    back = ops.decode_mask(mask, tf.constant(shape, tf.int64))
    assert back.shape == x.shape
    assert np.array_equal(back, x)


def relu(x, g):
    return tf.raw_ops.ReluGrad(gradients=g, features=x), ops.multiply_by_mask(g, ops.encode_mask(x, "positive"))


def relu6(x, g):
    return tf.raw_ops.Relu6Grad(gradients=g, features=x), ops.multiply_by_mask(g, ops.encode_mask(x, "relu6"))


def leaky_relu(x, g):
    mask = ops.encode_mask(x, "positive")
    return (
        tf.raw_ops.LeakyReluGrad(gradients=g, features=x, alpha=0.3),
        ops.leaky_relu_grad_from_mask(g, mask, alpha=0.3),
    )


def dropout(x, g):
    keep = x > 0
    mask = ops.encode_mask(keep, "true")
    return tf.where(keep, g, tf.zeros([], g.dtype)), ops.select_by_mask(mask, g, tf.zeros([], g.dtype), tf.shape(g))


def select(x, g):
    keep = x > 0
    return tf.where(keep, x, g), ops.select_by_mask(ops.encode_mask(keep, "true"), x, g, tf.shape(g))


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
    mask = ops.encode_mask(tf.ones([17]), "positive")
    with pytest.raises(tf.errors.InvalidArgumentError, match="has 3 bytes where a tensor of its shape"):
        ops.multiply_by_mask(tf.ones([16]), mask)
    with pytest.raises(tf.errors.InvalidArgumentError, match="has 3 bytes"):
        ops.decode_mask(mask, [25])
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be \\[17\\], or one value"):
        ops.select_by_mask(mask, tf.ones([2]), tf.zeros([17]), [17])
    with pytest.raises(tf.errors.InvalidArgumentError, match="'true' is for bool"):
        ops.encode_mask(tf.ones([3]), "true")
    with pytest.raises(tf.errors.InvalidArgumentError, match="'true' is for bool"):
        ops.encode_mask(tf.constant([True]), "positive")


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
        positions = ops.encode_max_pool(x, **window)
        actual = ops.max_pool_grad_from_positions(g, positions, tf.shape(x, tf.int64), **window)
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
            ops.encode_max_pool(x, ksize, [1, 1, 1, 1], padding, explicit)
    window = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    positions = ops.encode_max_pool(x, **window)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"are pooled to \[1,2,2,2\]"):
        ops.max_pool_grad_from_positions(tf.ones([1, 2, 3, 2]), positions, [1, 4, 4, 2], **window)
    with pytest.raises(tf.errors.InvalidArgumentError, match="has 4 bytes where"):
        ops.max_pool_grad_from_positions(tf.ones([2, 2, 2, 2]), positions, [2, 4, 4, 2], **window)


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
                codes = ops.encode_integers(x, minimum, encoded)
                assert codes.dtype == encoded
                assert codes.shape == x.shape
                back = ops.decode_integers(codes, minimum, dtype)
                assert back.dtype == dtype
                assert np.array_equal(back, x)


@pytest.mark.parametrize("wrong", [-4, 253, 2**40, -(2**63)])
def test_an_integer_out_of_range_fails_the_step(wrong):
    x = np.arange(10_000, dtype=np.int64) % 256 - 3
    assert np.array_equal(ops.decode_integers(ops.encode_integers(x, -3, tf.uint8), -3, tf.int64), x)
    x[5001] = wrong
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"value {wrong} .the 5001-th. is outside"):
        ops.encode_integers(x, -3, tf.uint8)


def test_shapes_are_inferred():
    @tf.function(input_signature=[tf.TensorSpec([None, 4, 6, 3]), tf.TensorSpec([2, 4, 6, 3])])
    def step(unknown, known):
        window = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
        assert ops.encode_mask(unknown, "positive").shape.as_list() == [None]
        mask = ops.encode_mask(known, "positive")
        assert mask.shape == [18]
        assert ops.decode_mask(mask, known.shape).shape == known.shape
        assert ops.multiply_by_mask(known, mask).shape == known.shape
        assert ops.encode_max_pool(unknown, **window).shape.as_list() == [None]
        positions = ops.encode_max_pool(known, **window)
        assert positions.shape == [2 * 2 * 3 * 2]
        pooled = tf.nn.max_pool2d(known, 2, 2, "SAME")
        assert ops.max_pool_grad_from_positions(pooled, positions, known.shape, **window).shape == known.shape

    step(tf.ones([1, 4, 6, 3]), tf.ones([2, 4, 6, 3]))
