"""The ops of gradients in bounded memory: AddProducts and ImageGradient, against sums in the order that they have."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import tfswap.ops  # noqa: E402, F401 needs TensorFlow
from tfswap.native.load import load  # noqa: E402

RNG = np.random.default_rng(5)
MATRIX = {name: [] for name in ("window", "strides", "dilations", "padding", "sizes")}
WINDOW = {"window": [3, 2], "strides": [2, 1], "dilations": [1, 1], "padding": [1, 0], "sizes": [4, 5]}
ROWS = 90


@pytest.fixture
def ops():
    return load().ops


def numbers(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return tf.raw_ops.MatMul(a=a, b=b, transpose_a=True).numpy()


@pytest.mark.parametrize("chunk", [24, 7])
@pytest.mark.parametrize("cuts", [(0, ROWS), (0, 1, 33, 64, ROWS)])
@pytest.mark.parametrize("made", [16, 5])
def test_rows_are_added_up_in_blocks_parts_and_shards(ops, chunk: int, cuts: tuple[int, ...], made: int) -> None:
    a, b = numbers(ROWS, 24), numbers(ROWS, made)
    whole = np.zeros((24, made), np.float32)
    for begin, end in ((0, 60), (60, ROWS)):  # shards
        parts = [(begin, begin + 32), (begin + 32, end)] if end - begin > 32 else [(begin, end)]
        sums = [
            sum((product(a[i : min(i + 20, to)], b[i : min(i + 20, to)]) for i in range(at, to, 20)), np.float32(0))
            for at, to in parts
        ]
        whole += sum(sums[1:], sums[0])
    before: list = []
    attrs = {"rows": ROWS, "shard": [60, 32, 20, 20], "last_shard": [30, 30, 20, 20], "chunk": chunk, **MATRIX}
    for at, to in pairwise(cuts):
        before = ops.tfswap_add_products(
            images=a[at:to], gradients=b[at:to], before=list(before), begin=at, closed=len(cuts) == 2, **attrs
        )
    assert np.array_equal(before[0], whole)


def test_a_filters_gradient_is_that_of_its_patches(ops) -> None:
    images, gradients = numbers(2, 8, 6, 16), numbers(2, 4, 5, 8)
    columns = ops.tfswap_columns(images=images, begin=0, rows=40, **WINDOW)
    order = [40, 40, 40, 40]
    made, state = ops.tfswap_add_products(
        images=images, gradients=gradients, before=[], begin=0, rows=40, shard=order, last_shard=order, chunk=50,
        closed=True, **WINDOW
    )  # fmt: skip
    assert np.array_equal(made, product(columns.numpy(), gradients.reshape(-1, 8))) and state.shape == (0,)


@pytest.mark.parametrize("chunk", [16, 5, 1000])
def test_an_images_gradient_adds_up_patches(ops, chunk: int) -> None:
    kernel, gradients = numbers(3, 2, 16, 8), numbers(2, 4, 5, 8)
    made = ops.tfswap_image_gradient(filter=kernel, gradients=gradients, image=[8, 6], chunk=chunk, **WINDOW)
    patches = (gradients.reshape(-1, 8) @ kernel.reshape(-1, 8).T).reshape(2, 4, 5, 3, 2, 16)
    padded = np.zeros((2, 10, 6, 16), np.float32)
    for i, j in np.ndindex(4, 5):
        padded[:, 2 * i : 2 * i + 3, j : j + 2] += patches[:, i, j]
    np.testing.assert_allclose(made, padded[:, 1:9], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"begin": 1}, "for rows from 1 on of 90"),
        ({"shard": [60, 32, 20]}, "that is no order of a sum"),
        ({"shard": [60, 70, 20, 20]}, "that is no order of a sum"),
        ({"last_shard": [20, 20, 20, 20]}, "shards that are not all of its rows"),
        ({"begin": 0, "gradients": numbers(50, 16), "images": numbers(50, 24)}, "where sums are not complete"),
        ({"before": [numbers(24, 15)]}, "continues a tensor of shape"),
    ],
)
def test_what_does_not_fit_is_refused(ops, changes: dict, message: str) -> None:
    attrs = {"rows": ROWS, "shard": [60, 32, 20, 20], "last_shard": [30, 30, 20, 20], "chunk": 24, **MATRIX}
    given = {"images": numbers(ROWS, 24), "gradients": numbers(ROWS, 16), "before": [], "begin": 0, "closed": True}
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        ops.tfswap_add_products(**{**attrs, **given, **changes})
    with pytest.raises(tf.errors.InvalidArgumentError, match="is given a filter of shape"):
        ops.tfswap_image_gradient(
            filter=numbers(3, 2, 4, 8), gradients=numbers(2, 4, 5, 7), image=[8, 6], chunk=1, **WINDOW
        )
