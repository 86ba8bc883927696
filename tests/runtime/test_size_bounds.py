"""Bounds of sizes that depend on values: they hold for all values, and are no larger than needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

tf: Any = pytest.importorskip("tensorflow")

from tfswap.importers.function import import_function  # noqa: E402 needs TensorFlow

ROWS = 6


def numbers(*shape: int, below: int = 4) -> Any:
    return lambda draws: draws.integers(0, below, shape).astype("int32")


def floats(*shape: int) -> Any:
    return lambda draws: draws.integers(0, 4, shape).astype("float32")


def boxes(draws: Any) -> Any:
    corners = draws.uniform(0, 1, (ROWS, 2))
    return np.concatenate([corners, corners + draws.choice([0.01, 1.0])], 1).astype("float32")


def sparse(values: Any) -> Any:
    return tf.sparse.from_dense(values)


def of_splits(values: Any, count: Any) -> Any:
    splits = tf.stack([0, tf.minimum(count[0], ROWS), ROWS])
    return tf.raw_ops.RaggedBincount(
        splits=tf.cast(splits, tf.int64),
        values=values,
        size=tf.minimum(tf.reduce_max(values) + 1, 3),
        weights=tf.zeros([0]),
    )


def of_overlaps(boxes: Any, scores: Any, count: Any) -> Any:
    overlaps = tf.matmul(boxes, boxes, transpose_b=True)
    return tf.image.non_max_suppression_overlaps(overlaps, scores, tf.minimum(count[0], 4), 1.5)


def of_rows(x: Any) -> Any:
    return tf.raw_ops.UniqueWithCountsV2(x=x, axis=[0])


def suppressed(op: str, **options: Any) -> Any:
    def function(boxes: Any, scores: Any, count: Any) -> Any:
        given = {"iou_threshold": 0.5, "score_threshold": 0.5, "max_output_size": tf.minimum(count[0], 4), **options}
        return getattr(tf.raw_ops, op)(boxes=boxes, scores=scores, **given)

    return function


BOXES = (boxes, floats(ROWS), numbers(1, below=9))
SETS = (numbers(2, 3, below=40), numbers(2, 3, below=40))
CASES = {
    "bincount of a vector": (lambda x: tf.math.bincount(x, maxlength=3), numbers(ROWS)),
    "bincount of a matrix": (lambda x: tf.math.bincount(x, maxlength=3, axis=-1), numbers(ROWS, 5)),
    "bincount with at least some": (lambda x: tf.math.bincount(x, minlength=2, maxlength=3), numbers(ROWS)),
    "histogram": (lambda x: tf.histogram_fixed_width(x, [0.0, 4.0], nbins=4), floats(ROWS)),
    "bincount of ragged rows": (of_splits, numbers(ROWS), numbers(1, below=9)),
    "some of the largest": (lambda x, k: tf.math.top_k(x, tf.minimum(k[0], 3)), floats(ROWS, 5), numbers(1, below=6)),
    "boxes": (suppressed("NonMaxSuppressionV3"), *BOXES),
    "padded boxes": (suppressed("NonMaxSuppressionV4", pad_to_max_output_size=True), *BOXES),
    "boxes that may be padded": (suppressed("NonMaxSuppressionV4"), *BOXES),
    "boxes with soft scores": (suppressed("NonMaxSuppressionV5", soft_nms_sigma=0.5), *BOXES),
    "boxes by overlaps": (of_overlaps, *BOXES),
    "distinct numbers": (lambda x: tf.unique_with_counts(x), numbers(ROWS, below=40)),
    "distinct rows": (of_rows, numbers(ROWS, 2, below=40)),
    "numbers that are not there": (lambda x, y: tf.sets.difference(x, y).values, *SETS),
    "numbers in both": (lambda x, y: tf.sets.intersection(x, y), *SETS),
    "numbers in one": (lambda x, y: tf.sets.union(x, y), *SETS),
    "sparse sets": (lambda x, y: tf.sets.union(sparse(x), sparse(y)), *SETS),
    "a sparse set": (lambda x, y: tf.sets.intersection(x, sparse(y)), *SETS),
    "differences": (lambda x, y: tf.raw_ops.ListDiff(x=x, y=y), numbers(ROWS), numbers(2)),
    "rows of a mask": (lambda x: tf.boolean_mask(x, x[:, 0] > 1.0), floats(ROWS, 2)),
    "sparse sums": (lambda x, y: tf.sparse.add(sparse(x), sparse(y)), floats(3, 3), floats(3, 3)),
    "sparse maxima": (lambda x, y: tf.sparse.maximum(sparse(x), sparse(y)), floats(3, 3), floats(3, 3)),
    "sparse slices": (lambda x: tf.sparse.slice(sparse(x), [0, 1], [3, 2]), floats(3, 3)),
    "sparse parts": (lambda x: tf.sparse.split(sp_input=sparse(x), num_split=3, axis=1), floats(3, 3)),
    "decoded classes": (lambda x: tf.nn.ctc_greedy_decoder(x, [4, 4])[0], floats(4, 2, 5)),
}


def flat(results: Any) -> list[Any]:
    return tf.nest.flatten(results, expand_composites=True)


LOOSE = {
    "numbers in both",
    "a sparse set",
    "sparse sets",
    "sparse sums",
    "sparse maxima",
    "sparse slices",
    "sparse parts",
}
"""Those whose bound no drawn values reach."""


@pytest.mark.parametrize("case", CASES)
def test_no_result_is_larger_than_its_bound(case):
    function, *inputs = CASES[case]
    draws = np.random.default_rng(1)
    made = tf.function(lambda *given: flat(function(*given)))
    concrete = made.get_concrete_function(*(tf.TensorSpec(x.shape, x.dtype) for x in (of(draws) for of in inputs)))
    bounds = [fetch.type.shape for fetch in import_function(concrete).fetches]
    assert all(bound is not None and None not in bound for bound in bounds), bounds
    largest = [(0,) * len(bound) for bound in bounds]
    for _ in range(200):
        found = [tuple(tensor.shape) for tensor in concrete(*(tf.constant(of(draws)) for of in inputs))]
        for shape, bound in zip(found, bounds, strict=True):
            assert len(shape) == len(bound)
            assert all(dim <= most for dim, most in zip(shape, bound, strict=True)), (found, bounds)
        largest = [tuple(map(max, before, now)) for before, now in zip(largest, found, strict=True)]
    if case not in LOOSE:
        assert largest == bounds
