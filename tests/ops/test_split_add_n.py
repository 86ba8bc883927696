"""Sums split by passes/prepare/split_add_n.py have the bits of TensorFlow's own kernel, for any terms."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfswap.exporters.graph_def import export_graph_def
from tfswap.importers.function import import_function
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.prepare.split_add_n import SMALLEST_BYTES, split_add_n

ELEMENTS = SMALLEST_BYTES // 2
"""Enough of the smallest type here."""


def addends(x, factors):
    """Tensors of all sizes of numbers, each made anew, so that it matters in which order they are added."""
    return [x * factor for factor in tf.unstack(factors)]


def sum_of(graph_def, x, factors):
    names = [n.name for n in graph_def.node if n.op == "Placeholder"]
    given = dict(zip(names, (x, factors), strict=True))
    [total] = tf.graph_util.import_graph_def(graph_def, input_map=given, return_elements=["sum:0"])
    return total


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.int32, tf.complex64])
@pytest.mark.parametrize("count", [10, 17, 36])
def test_bits(dtype, count):
    numbers = np.random.default_rng(count)
    x = tf.cast(numbers.normal(size=ELEMENTS) * 100, dtype)
    factors = tf.cast(10 ** numbers.uniform(-1, 1, size=count), dtype)
    added = tf.function(lambda x, factors: tf.add_n(addends(x, factors), name="sum"))
    concrete = added.get_concrete_function(x, factors)
    graph = import_function(concrete)
    assert split_add_n(graph, Target(DeviceModel())) == 1
    assert max(len(node.inputs) for node in graph if node.op == "AddN") <= 9
    graph_def = export_graph_def(graph)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        split = tf.function(lambda x, factors: sum_of(graph_def, x, factors))(x, factors)
        assert split.numpy().tobytes() == concrete(x, factors).numpy().tobytes()
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
