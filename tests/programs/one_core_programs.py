"""Kernels of pairs that stay on one core, each compared with the same kernel on all threads."""

from __future__ import annotations

from typing import Any

STRIDES: dict[str, Any] = {"strides": [1, 1, 1, 1], "padding": b"SAME", "data_format": b"NHWC"}
IMAGES = (([4, 16, 16, 128], [3, 3, 128, 96]), ([16, 16, 16, 64], [3, 3, 64, 64]), ([8, 32, 32, 16], [1, 1, 16, 32]))
PRODUCTS = ((512, 4096, 512), (2048, 1024, 256), (256, 2304, 64), (33, 5000, 77), (16, 4096, 64), (1024, 64, 64))
"""Rows, inner dimension, columns. Long inner dimensions are computed slice by slice."""


def serialized(op: str, inputs: int, **attributes: Any) -> bytes:
    """A node of floats."""
    import tensorflow as tf
    from tensorflow.core.framework import node_def_pb2

    made = node_def_pb2.NodeDef(name=op, op=op, input=[f"input{i}" for i in range(inputs)])
    made.attr["T"].type = tf.float32.as_datatype_enum
    for name, value in attributes.items():
        if isinstance(value, bytes):
            made.attr[name].s = value
        else:
            made.attr[name].list.i.extend(value)
    return made.SerializeToString()


def differing() -> list[str]:
    """Kernels whose results in a pair, in one of the first calls, are not those of TensorFlow's op.

    A pair's first calls try each way: on one core, and on all threads.
    """
    import tensorflow as tf

    from tfswap.native.load import load

    found: list[str] = []

    def compare(kernel: bytes, inputs: list[Any], expected: Any, case: Any) -> None:
        other = tf.ones([64, 64])
        for _ in range(4):
            made, _ = load().ops.tfswap_pair(
                inputs=[*inputs, other],
                Tout=[tf.float32] * 2,
                kernels=[kernel, serialized("Tanh", 1)],
                allocations=1,
            )
            if not bool(tf.reduce_all(made == expected)):
                found.append(f"{kernel[:24]!r} {case}")

    for number, (image, filters) in enumerate(IMAGES):
        x, w = (tf.random.stateless_normal(shape, (number, 1)) for shape in (image, filters))
        made = tf.nn.conv2d(x, w, 1, "SAME")
        dy = tf.random.stateless_normal(made.shape, (number, 2))
        of_filter = tf.raw_ops.Conv2DBackpropFilter(
            input=x, filter_sizes=filters, out_backprop=dy, strides=[1] * 4, padding="SAME"
        )
        of_image = tf.raw_ops.Conv2DBackpropInput(
            input_sizes=image, filter=w, out_backprop=dy, strides=[1] * 4, padding="SAME"
        )
        compare(serialized("Conv2D", 2, **STRIDES), [x, w], made, image)
        compare(serialized("Conv2DBackpropFilter", 3, **STRIDES), [x, tf.constant(filters), dy], of_filter, image)
        compare(serialized("Conv2DBackpropInput", 3, **STRIDES), [tf.constant(image), w, dy], of_image, image)
        bias = tf.raw_ops.BiasAddGrad(out_backprop=dy)
        compare(serialized("BiasAddGrad", 1, data_format=b"NHWC"), [dy], bias, image)
    for rows, inner, columns in PRODUCTS:
        a = tf.random.stateless_normal([rows, inner], (rows, 1))
        b = tf.random.stateless_normal([inner, columns], (rows, 2))
        compare(serialized("MatMul", 2), [a, b], a @ b, (rows, inner, columns))
    return found
