"""Volumes with channels first on emulated GPUs: the CPU's kernels have them with channels last."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")


def test_volumes_with_channels_first_give_the_cpus_values(on_gpus):
    def program(gpus):
        import numpy as np
        import tensorflow as tf

        def values(device, first):
            raw, strides = tf.raw_ops, [1, 1, 2, 1, 1] if first else [1, 2, 1, 1, 1]
            given = {"data_format": "NCDHW" if first else "NDHWC", "padding": "SAME", "strides": strides}
            with tf.device(device):
                at = tf.transpose(x, [0, 4, 1, 2, 3]) if first else tf.identity(x)
                y = raw.Conv3D(input=at, filter=k, **given)
                y = raw.BiasAdd(value=y, bias=b, data_format="NCHW" if first else "NHWC")
                made = [
                    raw.Conv3DBackpropInputV2(input_sizes=tf.shape(at), filter=k, out_backprop=y, **given),
                    y,
                    raw.MaxPool3D(input=y, ksize=strides, **given),
                    raw.AvgPool3D(input=y, ksize=strides, **given),
                ]
                made = [tf.transpose(each, [0, 2, 3, 4, 1]) if first else each for each in made]
                made += [raw.Conv3DBackpropFilterV2(input=at, filter_sizes=k.shape, out_backprop=y, **given)]
            return [each.numpy() for each in made]

        draws = np.random.default_rng(0)
        x, k, b = (draws.normal(size=size).astype("f") for size in ([2, 6, 5, 4, 3], [3, 3, 3, 3, 5], [5]))
        pairs = zip(values("GPU:0", True), values("CPU:0", False), strict=True)
        return [[bool((one == other).all()) for one, other in pairs], gpus.report()]

    found = on_gpus(program)
    assert found == [[True] * 5, ""]
