"""The ops of kernels in slices: StoreRows, AddRows, AddBlocks and Columns."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import tfswap.ops  # noqa: E402, F401 needs TensorFlow
from tfswap.native.load import load  # noqa: E402

ROWS = np.random.default_rng(1).normal(size=(10, 3, 7)).astype(np.float32)


@pytest.fixture
def ops():
    return load().ops


@pytest.mark.parametrize("dtype", [tf.float32, tf.bool, tf.int64])
def test_slices_fill_a_tensor(ops, dtype) -> None:
    whole = tf.cast(ROWS, dtype)

    @tf.function
    def filled(x):
        first = ops.tfswap_store_rows(slice=x[:4], before=[], begin=0, rows=10)
        second = ops.tfswap_store_rows(slice=x[4:9], before=[first], begin=4, rows=10)
        return first, ops.tfswap_store_rows(slice=x[9:], before=[second], begin=9, rows=10)

    first, last = filled(whole)  # the first is kept, so that it is copied, and not written over
    assert np.array_equal(last, whole) and np.array_equal(first[:4], whole[:4])
    assert filled.get_concrete_function(whole).structured_outputs[1].shape == (10, 3, 7)


def test_sums_of_rows_are_those_of_each_block_in_order(ops) -> None:
    flat = ROWS.reshape(-1, 7)
    sums = np.zeros((4, 7), np.float32)
    for row, numbers in enumerate(flat):
        sums[row // 8] += numbers
    first = ops.tfswap_add_rows(slice=ROWS[:4], before=[], begin=0, rows=30, blocks=4)
    second = ops.tfswap_add_rows(slice=ROWS[4:], before=[first], begin=12, rows=30, blocks=4)
    assert np.array_equal(second, sums)
    assert np.array_equal(ops.tfswap_add_blocks(sums=second), sums[0] + sums[1] + sums[2] + sums[3])


def test_sums_of_rows_in_turn_are_those_of_reductions(ops) -> None:
    numbers = np.random.default_rng(2).normal(size=(8, 3, 21)).astype(np.float32).reshape(-1, 21)[:23]
    parts = zip((0, 5, 12), (5, 12, 23), strict=True)
    sums: list = []
    for begin, end in parts:
        sums = [
            ops.tfswap_add_rows(slice=numbers[begin:end], before=sums, begin=begin, rows=23, blocks=7, unrolled=True)
        ]
    assert np.array_equal(ops.tfswap_add_blocks(sums=sums[0]), tf.reduce_sum(numbers, 0))
    assert np.array_equal(ops.tfswap_add_blocks(sums=sums[0], divisor=23), tf.reduce_mean(numbers, 0))
    with pytest.raises(tf.errors.InvalidArgumentError, match="adds up 23 rows, unrolled, in 4 sums"):
        ops.tfswap_add_rows(slice=numbers[:5], before=[], begin=0, rows=23, blocks=4, unrolled=True)


@pytest.mark.parametrize(("begin", "rows"), [(7, 10), (11, 12), (2**62, 2**62)])
def test_other_rows_are_refused(ops, begin: int, rows: int) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="is given a slice of shape"):
        ops.tfswap_store_rows(slice=ROWS[:4], before=[], begin=begin, rows=rows)
    with pytest.raises(tf.errors.InvalidArgumentError, match="is given 12 rows"):
        ops.tfswap_add_rows(slice=ROWS[:4], before=[], begin=begin, rows=rows, blocks=1)


def test_another_shape_before_is_refused(ops) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="continues a tensor of shape"):
        ops.tfswap_store_rows(slice=ROWS[:4], before=[ROWS[:9]], begin=0, rows=10)
    with pytest.raises(tf.errors.InvalidArgumentError, match="continues a tensor of shape"):
        ops.tfswap_add_rows(slice=ROWS, before=[ROWS[0]], begin=0, rows=30, blocks=2)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(("strides", "dilations"), [(1, 1), (2, 1), (1, 2)])
def test_columns_are_patches(ops, axes: int, strides: int, dilations: int) -> None:
    sizes, window = (7, 6, 5)[:axes], (3, 2, 3)[:axes]
    images = np.random.default_rng(3).normal(size=(2, *sizes, 4)).astype(np.float32)
    positions = tuple(-(-size // strides) for size in sizes)
    padding = tuple((k - 1) * dilations // 2 for k in window)
    padded = np.pad(images, ((0, 0), *((before, 9) for before in padding), (0, 0)))
    whole = np.stack(
        [
            padded[(image, *(slice(at * strides, at * strides + k * dilations, dilations) for at, k in under))].ravel()
            for image in range(2)
            for under in (tuple(zip(place, window, strict=True)) for place in np.ndindex(positions))
        ]
    )
    attrs = {"window": window, "strides": [strides] * axes, "dilations": [dilations] * axes, "padding": padding}
    begin, rows = 2, len(whole) - 3
    made = ops.tfswap_columns(images=images, sizes=positions, begin=begin, rows=rows, **attrs)
    assert np.array_equal(made, whole[begin : begin + rows])
    with pytest.raises(tf.errors.InvalidArgumentError, match="positions from 4 on"):
        ops.tfswap_columns(images=images, sizes=positions, begin=4, rows=rows, **attrs)
    for wrong in ({"padding": [-1] * axes}, {"padding": [2**40] * axes}, {"padding": [0] * 4}):
        with pytest.raises(tf.errors.InvalidArgumentError, match="has an attribute 'padding'"):
            ops.tfswap_columns(images=images, sizes=positions, begin=0, rows=1, **{**attrs, **wrong})
    if axes == 3:
        with pytest.raises(tf.errors.OpError):
            ops.tfswap_columns(images=images, sizes=positions, begin=0, rows=1, **{**attrs, "window": [2**30] * 3})
