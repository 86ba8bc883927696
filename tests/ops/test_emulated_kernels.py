"""Kernels of emulated GPUs that the CPU does not have: volumes with channels first, fused convolutions in float16."""

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


def test_convolutions_in_16_bits_that_grappler_fuses_run(on_gpus):
    """The CPU's kernel of _FusedConv2D refuses float16."""

    def program(_):
        import numpy as np
        import tensorflow as tf

        draws = np.random.default_rng(1)
        x, kernel, bias = (draws.normal(size=shape).astype("f") for shape in ([2, 6, 8, 3], [3, 3, 3, 4], [4]))

        @tf.function
        def fused(images, kernel, bias):
            return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(images, kernel, 1, "SAME"), bias))

        def found_in(dtype):
            with tf.device("GPU:0"):
                y = fused(*(tf.cast(each, dtype) for each in (x, kernel, bias)))
            return y.dtype.name, tf.cast(y, tf.float32).numpy()

        with tf.device("CPU:0"):
            expected = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME") + bias).numpy()
        name, found = found_in("float16")
        assert name == "float16"
        return float(abs(found - expected).max() / abs(expected).max())

    assert 0 < on_gpus(program) < 2**-9


def test_convolutions_of_no_images_with_channels_first(on_gpus):
    def program(gpus):
        import tensorflow as tf

        x, kernel = tf.zeros([0, 3, 9, 8]), tf.ones([3, 3, 3, 5])
        with tf.GradientTape() as tape, tf.device("GPU:0"):
            tape.watch([x, kernel])
            y = tf.nn.conv2d(x, kernel, 1, "SAME", data_format="NCHW")
        return [each.shape.as_list() for each in (y, *tape.gradient(y, [x, kernel]))]

    assert on_gpus(program) == [[0, 5, 9, 8], [0, 3, 9, 8], [3, 3, 3, 5]]
