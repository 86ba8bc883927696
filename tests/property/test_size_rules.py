"""The size of an op's result from its inputs, against TensorFlow's results."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest

tf: Any = pytest.importorskip("tensorflow")

from tfswap.importers.function import import_function  # noqa: E402
from tfswap.runtime.output_sizes import size_rule  # noqa: E402 needs TensorFlow

GIVEN = tf.zeros([30, 7, 40])

# A tensor of `n`, a number that only the call knows, and of `x`, which is as large as GIVEN.
PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "range": lambda x, n: tf.range(n),
    "range down": lambda x, n: tf.range(900 * n, -3, -7),
    "range of floats": lambda x, n: tf.range(0.0, tf.cast(n, tf.float32) * 90.1, 0.3),
    "range of wide numbers": lambda x, n: tf.range(2**60, 2**60 + tf.cast(n, tf.int64) * 900, 900, tf.int64),
    "range of halves": lambda x, n: tf.range(
        tf.cast(1, tf.float16), tf.cast(819 * n, tf.float16), tf.cast(1, tf.float16)
    ),
    "range of tenths": lambda x, n: tf.range(0.0, 0.3 * tf.cast(n, tf.float32), 0.1),
    "fill": lambda x, n: tf.fill([n, 300], 1.0),
    "broadcast": lambda x, n: tf.broadcast_to(x[0, 0], [n, 40]),
    "reshape": lambda x, n: tf.reshape(x, [-1, 2 * n]),
    "reshape whole": lambda x, n: tf.reshape(x, [2 * n, 4200 // n]),
    "tile": lambda x, n: tf.tile(x, [1, n, 2]),
    "slice": lambda x, n: tf.slice(x, [n, 0, 1], [-1, 3, n]),
    "scatter": lambda x, n: tf.scatter_nd([[0], [1]], x[:2], [n + 2, 7, 40]),
    "segments": lambda x, n: tf.math.segment_mean(x, tf.range(30) * n // 7),
    "segments of nothing": lambda x, n: tf.math.segment_sum(x[:0], tf.range(n)[:0]),
    "segments of some": lambda x, n: tf.sparse.segment_sum(x, [3, 3, 9], tf.range(3) * n),
    "stitch": lambda x, n: tf.dynamic_stitch([tf.range(n)[::-1], [n + 3, 2]], [x[:n, 0], x[:2, 0]]),
    "stitch of tables": lambda x, n: tf.raw_ops.ParallelDynamicStitch(
        indices=[tf.reshape(tf.range(2 * n), [n, 2]), tf.zeros([0, 2], tf.int32)],
        data=[tf.zeros([n, 2, 40]), tf.zeros([0, 2, 40])],
    ),
    "random": lambda x, n: tf.raw_ops.RandomUniform(shape=[n, 300], dtype=tf.float32),
    "random without state": lambda x, n: tf.raw_ops.StatelessRandomNormal(shape=[n, 300], seed=[1, 2]),
    "first": lambda x, n: x[:n],
    "from behind": lambda x, n: x[::-1, -n:],
    "beyond": lambda x, n: x[: 90 * n, :, n:],
    "an axis more and one less": lambda x, n: x[:n, tf.newaxis, 3],
    "ellipsis": lambda x, n: x[n:, ..., :n],
    "ellipsis and back": lambda x, n: x[..., tf.newaxis, n : -1 - n],
    "stride": lambda x, n: x[1::n, :, n],
    "stride back": lambda x, n: x[n::-2],
    "nothing": lambda x, n: x[n : n - 5],
}


def sizes(program: Callable[..., Any], *given: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the rule gives for what `program` makes, and what TensorFlow makes of it."""
    specs = [tf.TensorSpec([None] * t.shape.rank, t.dtype) for t in given]
    made = tf.compat.v1.wrap_function(program, specs)
    tensor = import_function(made).fetches[0]
    while tensor.node.op == "Identity":
        tensor = tensor.node.inputs[0]
    rule = size_rule(tensor)
    assert rule is not None
    wanted = [*rule.needed, tensor] if rule.of is None else [rule.of, *rule.needed, tensor]
    found = made.prune(made.inputs, [made.graph.get_tensor_by_name(t.name) for t in wanted])(*given)
    *needed, whole = found if rule.of is None else (tf.shape(found[0], tf.int64), *found[1:])
    return tuple(int(axis) for axis in rule.shape(*needed)), tuple(whole.shape)


@pytest.mark.parametrize("n", [1, 6, 10])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_size_is_that_of_tensorflow_s_own_result(name: str, n: int) -> None:
    reported, made = sizes(PROGRAMS[name], GIVEN, tf.constant(n))
    assert reported == made


@pytest.mark.parametrize("seed", range(40))
def test_slices_of_all_kinds_are_as_large_as_tensorflow_makes_them(seed: int) -> None:
    draw = random.Random(seed)
    ends = [tf.constant([draw.randint(-9, 9) for _ in range(3)]) for _ in range(2)]
    strides = tf.constant([draw.choice((-3, -2, -1, 1, 2, 3)) for _ in range(3)])
    masks = {f"{name}_mask": draw.randrange(8) for name in ("begin", "end", "new_axis")}
    masks["ellipsis_mask"] = draw.choice((0, 1, 2, 4))

    def sliced(x: Any, begin: Any, end: Any, strides: Any) -> Any:
        begin, end, strides = (tf.ensure_shape(each, [3]) for each in (begin, end, strides))
        return tf.raw_ops.StridedSlice(input=x, begin=begin, end=end, strides=strides, **masks)

    reported, made = sizes(sliced, tf.zeros([9, 8, 7, 5]), *ends, strides)
    assert reported == made


@pytest.mark.parametrize("rows", [[3, 0, 1], [0, 0], []])
@pytest.mark.parametrize("shape", [None, [None, 5], [4, None]])
def test_ragged_rows_are_padded_to_the_longest_or_as_asked(rows: list[int], shape: Any) -> None:
    def padded(values: Any, splits: Any) -> Any:
        ragged = tf.RaggedTensor.from_row_splits(tf.ensure_shape(values, [None, 2]), splits, validate=False)
        return ragged.to_tensor(shape=None if shape is None else [*shape, None])

    reported, made = sizes(padded, tf.zeros([sum(rows), 2]), tf.constant([0, *accumulate(rows)], tf.int64))
    assert reported == made


def test_rows_in_rows_are_padded_each_to_its_longest() -> None:
    def padded(values: Any, inner: Any, outer: Any) -> Any:
        values = tf.ensure_shape(values, [None])
        return tf.RaggedTensor.from_nested_row_splits(values, [outer, inner], validate=False).to_tensor()

    inner, outer = (tf.constant(splits, tf.int64) for splits in ([0, 2, 2, 3, 4, 5, 6], [0, 2, 2, 6]))
    assert sizes(padded, tf.zeros([6]), inner, outer) == ((3, 4, 2), (3, 4, 2))


def test_ranges_one_after_another_are_as_long_as_all_of_them() -> None:
    def ranges(limits: Any) -> Any:
        return tf.ragged.range(0, limits, 3).flat_values

    reported, made = sizes(ranges, tf.constant([7, 0, 30, -4, 1]))
    assert reported == made
