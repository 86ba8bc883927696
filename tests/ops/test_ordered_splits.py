"""Splits whose outputs lie in their order: TensorFlow's own values, and one layout of the arena in all runs."""

from __future__ import annotations

from typing import Any

import pytest
from processes import on_arena

tf: Any = pytest.importorskip("tensorflow")

import tfswap.ops  # noqa: E402, F401 registers the kernels
from tfswap.importers.function import import_function  # noqa: E402
from tfswap.ir.custom_ops import KERNEL, OWN_KERNEL  # noqa: E402
from tfswap.kernels.device import DeviceModel  # noqa: E402
from tfswap.passes.contract import Target  # noqa: E402
from tfswap.passes.prepare.ordered_splits import order_split_outputs  # noqa: E402


def splitting(count: int, *, own: bool, sizes: bool) -> Any:
    """A function of a value, an axis and lengths, by tfswap's kernel or by TensorFlow's: Split, or SplitV of sizes."""
    from tensorflow.core.framework.attr_value_pb2 import AttrValue

    @tf.function(autograph=False)
    def made(value: Any, axis: Any, lengths: Any) -> Any:
        if sizes:
            given = tf.raw_ops.SplitV(value=value, size_splits=lengths, axis=axis, num_split=count)
        else:
            given = tf.raw_ops.Split(axis=axis, value=value, num_split=count)
        if own:
            given[0].op._set_attr(KERNEL, AttrValue(s=OWN_KERNEL.encode()))
        return given

    return made


def pieces(value: Any, sizes: Any, axis: int, *, own: bool) -> list[Any]:
    """Of a number of sizes by Split, of a list of them by SplitV; neither sizes nor shapes are known to the trace."""
    several = isinstance(sizes, list)
    made = splitting(len(sizes) if several else sizes, own=own, sizes=several)
    signature = tf.TensorSpec(None, value.dtype), tf.TensorSpec([], tf.int32), tf.TensorSpec([None], tf.int32)
    traced = made.get_concrete_function(*signature)
    with tf.device("CPU:0"):
        return traced(value, tf.constant(axis), tf.constant(sizes if several else [0]))


def numbered(shape: list[int], dtype: Any) -> Any:
    if dtype == tf.string:
        return tf.strings.as_string(numbered(shape, tf.int32))
    return tf.cast(tf.reshape(tf.range(tf.reduce_prod(shape)), shape), dtype)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.int64, tf.complex128, tf.bool, tf.string])
@pytest.mark.parametrize(
    ("shape", "sizes", "axis"),
    [
        ([300, 64], 4, 1),
        ([300, 64], 4, -1),
        ([7, 8, 5], 8, 1),
        ([5, 4], 4, 1),
        ([1, 4000], 4, 1),
        ([1, 3000, 7], [999, 1, 1500, 500], 1),
        ([64, 32], 4, 0),  # shares the buffer
        ([64, 3], 4, 0),
        ([0, 8], 4, 1),
        ([3, 0], 4, 1),
        ([300, 64], [1, 30, 0, 33], 1),
        ([300, 64], [1, 30, -1, 20], 1),
        ([9, 12, 2], [3, 4, 1, 2, 2], -2),
        ([12, 3], [3, 4, 1, 2, 2], 0),
        ([4096], [1024, 64, 1024, 1984], 0),  # a vector, which may be shared as well
        ([4096], [1024, 63, 1, 3008], 0),
        ([4096], 4, 0),
    ],
)
def test_pieces_are_tensorflows(dtype: Any, shape: list[int], sizes: Any, axis: int) -> None:
    value = numbered(shape, dtype)
    made, expected = (pieces(value, sizes, axis, own=own) for own in (True, False))
    assert len(made) == len(expected)
    for one, other in zip(made, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert one.numpy().tolist() == other.numpy().tolist()


@pytest.mark.parametrize(
    ("sizes", "axis"), [(4, 2), (4, -3), ([1, 2, 3, 4], 1), ([-1, 3, -1, 2], 1), ([-2, 3, 4, 3], 1)]
)
def test_what_tensorflow_refuses_is_refused_in_its_words(sizes: Any, axis: int) -> None:
    reported = []
    for own in (True, False):
        with pytest.raises(tf.errors.InvalidArgumentError) as refusal:
            pieces(tf.zeros([3, 8]), sizes, axis, own=own)
        reported.append(refusal.value.message.partition("[[")[0])
    assert reported[0] == reported[1]


def test_only_splits_of_several_outputs_on_a_cpu() -> None:
    @tf.function
    def step(x: Any) -> Any:
        def body(i: Any, x: Any) -> Any:
            return i + 1, tf.concat(tf.split(x, 4, 1)[::-1], 1)

        x = tf.while_loop(lambda i, _: i < 3, body, (0, x))[1]
        a, b, c = tf.split(x[:, :6], 3, 1)
        return x, a, b, c, *tf.split(x, [1, 2, 3, 2], 1)

    graph = import_function(step.get_concrete_function(tf.TensorSpec([8, 8])))
    assert order_split_outputs(graph.copy(), Target(DeviceModel(kind="gpu"))) == 0
    assert order_split_outputs(graph, Target(DeviceModel())) == 2


def test_outputs_lie_where_they_did_in_each_run() -> None:
    def program():
        import numpy as np
        import tensorflow as tf
        from test_ordered_splits import numbered, splitting

        value, axis = numbered([512, 2048], tf.float32), tf.constant(1)
        split = splitting(16, own=True, sizes=False)
        runs = [tuple(np.asarray(memoryview(t)).ctypes.data for t in split(value, axis, [0])) for _ in range(200)]
        return len(set(runs[1:]))

    found = on_arena(program)
    assert found == 1


def test_planned_steps_ask_for_it() -> None:
    def program():
        import tensorflow as tf

        import tfswap

        def step(x):
            a, b, c, d = tf.split(tf.tanh(x), 4, 1)
            return tf.reduce_sum(a * b + c * d)

        made = tfswap.optimize(tf.function(step), memory_limit="100%")
        made(x := tf.ones([64, 64]))
        (split,) = (n for n in made.get_concrete_function(x).graph.as_graph_def().node if n.op == "Split")
        return "_kernel" in split.attr

    assert on_arena(program)
