"""Slices and the like whose values decide whether they share a buffer: here they are always copied, and limits hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from processes import on_arena
from step_peaks import measuring

tf: Any = pytest.importorskip("tensorflow")

import tfswap.ops  # noqa: E402, F401 registers the kernels
from tfswap.importers.function import import_function  # noqa: E402
from tfswap.ir.custom_ops import KERNEL, OWN_KERNEL  # noqa: E402
from tfswap.ir.op_traits import may_share_by_value  # noqa: E402
from tfswap.kernels.device import DeviceModel  # noqa: E402
from tfswap.passes.contract import Target  # noqa: E402
from tfswap.passes.prepare.copied_views import copy_undecided_views  # noqa: E402

CPU = DeviceModel("cpu", onednn=False)


def test_where_a_slice_begins_does_not_change_the_peak() -> None:
    def program():
        import tensorflow as tf

        import tfswap

        weights = [tf.Variable(tf.random.stateless_normal([256, 256], (1, n)) * 0.05) for n in range(3)]
        x = tf.random.stateless_normal([256, 256], (2, 2))

        def train(begin, x):
            with tf.GradientTape() as tape:
                h, loss = x, 0.0
                for n in range(6):
                    h = tf.tanh(h @ weights[n % 3])
                    flat = tf.reshape(tf.stop_gradient(h) * 2.0, [-1])
                    part = tf.ensure_shape(flat[begin : begin + 1024], [1024])
                    loss += tf.reduce_sum(tf.reduce_mean(h) * tf.sin(part))
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        def run(step):
            for n, weight in enumerate(weights):
                weight.assign(tf.random.stateless_normal([256, 256], (1, n)) * 0.05)
            values, peaks = [], []
            for begin in (3, 16, 5, 160):  # in float32, 16 are 64 bytes
                with measuring(peaks):
                    values.append(float(step(tf.constant(begin), x)))
            return values, peaks

        reference = run(tf.function(train))[0]
        step = tfswap.optimize(tf.function(train), memory_limit="60%")
        values, peaks = run(step)
        report = step.report()
        return [values == reference, peaks, report.planned_peak_bytes, report.memory_limit_bytes, report.unmodelled]

    results = on_arena(program)
    same, peaks, planned, limit, unmodelled = results
    assert same
    assert set(peaks) == {planned}
    assert planned <= limit
    assert not unmodelled


@pytest.mark.parametrize(
    "made",
    [
        lambda x, n: tf.slice(x, [n, 0], [16, 32]),
        lambda x, n: tf.strided_slice(x, [0, 0], [64, 32], tf.stack([n // 16, 1])),
        lambda x, n: x[n],
        lambda x, n: tf.tile(x, [n // 16, 1]),
        lambda x, n: tf.broadcast_to(x, tf.stack([n // 16, 64, 32])),
        lambda x, n: tf.unstack(tf.ensure_shape(tf.boolean_mask(x, x[:, 0] >= 0), [None, 32]), axis=1)[3],
        lambda x, n: (
            tf.sparse.fill_empty_rows(
                tf.SparseTensor(tf.cast(tf.reshape(tf.range(n), [-1, 1]), tf.int64), tf.range(n), [16]), 0
            )[0].values
        ),
    ],
)
def test_values_are_tensorflows_and_buffers_their_own(made: Callable[[Any, Any], Any]) -> None:
    from tensorflow.core.framework.attr_value_pb2 import AttrValue

    x = tf.reshape(tf.range(64.0 * 32), [64, 32])

    @tf.function(autograph=False)
    def traced(x: Any, n: Any) -> Any:
        result = made(x, n)
        for op in tf.compat.v1.get_default_graph().get_operations():
            if may_share_by_value(op.type):
                op._set_attr(KERNEL, AttrValue(s=OWN_KERNEL.encode()))
        return result

    for n in (16, 32):
        if n == 32 and "fill_empty" in str(made.__code__.co_names):
            continue  # it has 16 rows
        given = traced(x, tf.constant(n))
        assert given.numpy().tobytes() == made(x, tf.constant(n)).numpy().tobytes()


def labelled(function: Any, *signature: Any) -> list[str]:
    graph = import_function(tf.function(function).get_concrete_function(*signature))
    copy_undecided_views(graph, Target(CPU))
    return sorted(node.op for part in (graph, *graph.all_bodies()) for node in part if KERNEL in node.attrs)


def test_what_shapes_and_constants_decide_stays_tensorflows() -> None:
    x, n = tf.TensorSpec([64, 32]), tf.TensorSpec([], tf.int32)
    assert labelled(lambda x: (x[3:5], tf.transpose(x), x[tf.shape(x)[1] :], tf.tile(x, [1, 1])), x) == []
    assert labelled(lambda x, n: tf.reshape(x, [-1])[n : n + 5], x, n) == ["StridedSlice"]
    assert labelled(lambda x, n: tf.cond(n > 1, lambda: tf.reshape(x, [-1])[n], lambda: 0.0), x, n) == ["StridedSlice"]
