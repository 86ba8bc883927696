"""One kernel at a time, whole and in slices of random sizes: the lines of kernels/slice_lines.py."""

from __future__ import annotations

import math
import os

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_library

import tfswap.ops
from tfswap.exporters.graph_def import export_graph_def
from tfswap.importers.function import import_function
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.slice_lines import LINES, slicing_of
from tfswap.kernels.slices import Kind, reads_in_place, slices_of
from tfswap.kernels.target import Target
from tfswap.passes.prepare.onednn_fusion import fuse_onednn
from tfswap.passes.prepare.pool_argmax import keep_pool_argmax
from tfswap.passes.tactics.slice_kernels import slice_kernels
from tfswap.plan.plan import Slices

R = tf.raw_ops
POOL = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}


FUSED = {"epsilon": 0.0, "leakyrelu_alpha": 0.2}
FUSED_CONVOLUTION = FUSED | {
    "num_args": 1,
    "padding": "SAME",
    "fused_ops": ["BiasAdd", "Relu"],
    "host_args": [],
    "explicit_paddings": [],
    "data_format": "NHWC",
    "filter_format": "HWIO",
    "dilations": [1, 1, 1, 1],
    "use_cudnn_on_gpu": True,
}
FUSED_PRODUCT = FUSED | {"fused_ops": ["BiasAdd"], "transpose_a": False}


def _internal(op, **arguments):
    """Calls an op of TensorFlow's own, for which it has no Python function."""
    return op_def_library.apply_op(op, name="fused", **arguments)


class Cases:
    """Random calls of ops, each as a function and its arguments.

    Args:
        seed: of the sizes and numbers.
    """

    def __init__(self, seed):
        self._numbers = np.random.default_rng(seed)

    def size(self, low, high):
        """A size between both, small ones as often as large ones."""
        return int(np.exp(self._numbers.uniform(np.log(low), np.log(high + 1))))

    def choice(self, *options):
        return options[self._numbers.integers(len(options))]

    def tensor(self, *shape, dtype="float32"):
        return tf.cast(self._numbers.normal(size=shape) * 10 ** self._numbers.uniform(-1, 1), dtype)

    def convolution(self, large=False):
        """Sizes of an image, a filter and strides."""
        if large:
            return [self.size(3, 5), 100, self.size(90, 120), 64], [3, 3, 64, self.size(48, 64)], 1
        images, height, width = self.size(3, 12), self.size(8, 100), self.size(8, 100)
        channels, made, kernel = self.size(1, 96), self.size(8, 96), self.choice(1, 3, 5)
        return [images, height, width, channels], [kernel, kernel, channels, made], self.choice(1, 2)

    def gradient(self, op):
        """A convolution's gradient, with columns that slices take in parts: of few channels or many, in two dimensions
        or three.
        """
        axes = 3 if "3D" in op else 2
        kernel = [self.choice(1, 2, 3) for _ in range(axes)]
        stride, padding = 1 if axes == 3 else self.choice(1, 1, 2), self.choice("SAME", "VALID")
        image = [self.size(5, 60 if axes == 2 else 16) for _ in range(axes)]
        images = self.choice(1, self.size(2, 10)) if axes == 2 else 1
        read, made = self.size(1, 96), self.size(2, 128)
        if op.startswith("Conv3DBackpropFilter"):  # TensorFlow has columns where volumes are large for the last cache
            image, kernel, read, made = [self.size(32, 40), 34, 34], [kernel[0], 1, 1], 64, self.size(64, 72)
        attrs = {"strides": [1, *[stride] * axes, 1], "padding": padding}
        least = [1 if padding == "SAME" else k for k in kernel]
        sizes = [(size - k) // stride + 1 for size, k in zip(image, least, strict=True)]
        shape, window, grad = [images, *image, read], [*kernel, read, made], self.tensor(images, *sizes, made)
        if "Filter" in op:
            call = lambda x, g: getattr(R, op)(input=x, filter_sizes=window, out_backprop=g, **attrs)  # noqa: E731
            return call, [tf.nn.relu(self.tensor(*shape)), grad]
        call = lambda w, g: getattr(R, op)(input_sizes=shape, filter=w, out_backprop=g, **attrs)  # noqa: E731
        return call, [self.tensor(*window), grad]

    def filtered(self, op):
        if op != "Conv2D" and self.choice(False, True):
            return self.gradient(op)
        image, kernel, stride = self.convolution(large=op == "Conv2DBackpropFilter" or self.choice(False, True))
        attrs = {"strides": [1, stride, stride, 1], "padding": "SAME"}
        made = [image[0], -(-image[1] // stride), -(-image[2] // stride), kernel[3]]
        if op == "Conv2D":
            return lambda x, w: R.Conv2D(input=x, filter=w, **attrs), [self.tensor(*image), self.tensor(*kernel)]
        if op == "Conv2DBackpropInput":
            backward = lambda w, g: R.Conv2DBackpropInput(input_sizes=image, filter=w, out_backprop=g, **attrs)  # noqa: E731
            return backward, [self.tensor(*kernel), self.tensor(*made)]
        backward = lambda x, g: R.Conv2DBackpropFilter(input=x, filter_sizes=kernel, out_backprop=g, **attrs)  # noqa: E731
        return backward, [self.tensor(*image), self.tensor(*made)]

    def pooled(self, op):
        shape = [self.size(2, 12), 2 * self.size(2, 20), 2 * self.size(2, 20), self.size(1, 40)]
        image = self.tensor(*shape)
        if op in ("MaxPool", "AvgPool"):
            return lambda x: getattr(R, op)(**{"input" if op == "MaxPool" else "value": x}, **POOL), [image]
        pooled = R.MaxPool(input=image, **POOL)
        gradient = self.tensor(*pooled.shape)
        if op == "AvgPoolGrad":
            return lambda g: R.AvgPoolGrad(orig_input_shape=shape, grad=g, **POOL), [gradient]
        return lambda x, y, g: R.MaxPoolGrad(orig_input=x, orig_output=y, grad=g, **POOL), [image, pooled, gradient]

    def matmul(self, op):
        rows, depth, columns = self.size(16, 4096), self.size(4, 4096), self.size(8, 4096)
        while rows * depth * columns > 1 << 31:
            rows, depth, columns = (-(-size // 2) for size in (rows, depth, columns))
        if op == "MatMul" and self.choice(False, True):
            if self.choice(False, True):
                columns = self.choice(1, self.size(2, 16))
            added = lambda x, y: R.MatMul(a=x, b=y, transpose_a=True)  # noqa: E731
            return added, [self.tensor(16 * depth, rows), self.tensor(16 * depth, columns)]
        b, a = self.choice(False, True), self.tensor(rows, depth)
        w = self.tensor(*((columns, depth) if b else (depth, columns)))
        if op == "MatMul":
            return lambda x, y: R.MatMul(a=x, b=y, transpose_b=b), [a, w]
        bias = self.tensor(columns)
        attrs = {"transpose_b": b, **FUSED_PRODUCT}
        return lambda x, y, z: _internal(op, a=x, b=y, args=[z], **attrs), [a, w, bias]

    def elementwise(self, op):
        dtype = "int32" if op in ("Abs", "AddV2", "Sub", "Mul") and self.choice(False, True) else "float32"
        shape = [self.size(2, 300), *(self.size(1, 40) for _ in range(self.choice(0, 1, 2)))]
        shape = self.choice([], [1]) + shape
        x, y = self.tensor(*shape, dtype=dtype), self.tensor(*shape, dtype=dtype)
        if op in ("Log", "Log1p", "Rsqrt", "Sqrt", "RealDiv", "Reciprocal"):
            x, y = tf.abs(x) + 0.1, tf.abs(y) + 0.1
        if op == "Cast":
            return lambda x: R.Cast(x=x, DstT=tf.float64), [x]
        if op in ("Add", "AddV2", "Maximum", "Minimum", "Mul", "RealDiv", "SquaredDifference", "Sub"):
            read = [y, tf.reduce_max(y, axis=0), tf.reduce_max(y, axis=-1, keepdims=True), y[:1]]
            y = self.choice(*read, *([y[:, :1]] if len(shape) > 1 else []))
            return lambda x, y: getattr(R, op)(x=x, y=y), [x, y]
        if op == "AddN":
            return lambda x, y: R.AddN(inputs=[x, y, x]), [x, y]
        if op in ("SigmoidGrad", "TanhGrad"):
            return lambda x, y: getattr(R, op)(y=x, dy=y), [x, y]
        if op in ("Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"):
            return lambda x, y: getattr(R, op)(x=tf.round(x), y=tf.round(y)), [x, y]
        if op == "LogicalNot":
            return lambda x: R.LogicalNot(x=x > 0), [x]
        if op.startswith("Logical"):
            return lambda x, y: getattr(R, op)(x=x > 0, y=y > 0), [x, y]
        if op == "SelectV2":
            y = self.choice(y, tf.reduce_max(y), y[:1])
            return lambda x, y: R.SelectV2(condition=x > 0, t=y, e=x), [x, y]
        if op == "_UnaryOpsComposition":
            names = self.choice(["Sigmoid", "Square"], ["Tanh", "Exp", "Relu"])
            return lambda x: _internal(op, x=x, op_names=names), [x]
        if op in ("RsqrtGrad", "SqrtGrad"):
            return lambda x, y: getattr(R, op)(y=x, dy=y), [x, y]
        if op.endswith("Grad"):
            other = "outputs" if op == "EluGrad" else "features"
            return lambda x, y: getattr(R, op)(gradients=x, **{other: y}), [x, y]
        named = "features" if op in ("Elu", "LeakyRelu", "Relu", "Relu6", "Softplus") else "x"
        return lambda x: getattr(R, op)(**{named: x}), [x]

    def of(self, op):
        """A call of an op."""
        if op.startswith("Conv"):
            return self.gradient(op) if "3D" in op else self.filtered(op)
        if "Pool" in op:
            return self.pooled(op)
        if op in ("MatMul", "_FusedMatMul"):
            return self.matmul(op)
        rows, width = self.size(8, 400), self.size(2, 3000)
        if op == "SparseSoftmaxCrossEntropyWithLogits":
            labels = tf.cast(self._numbers.integers(0, width, rows), tf.int64)
            return lambda x, y: tuple(getattr(R, op)(features=x, labels=y)), [self.tensor(rows, width), labels]
        if op in ("BatchMatMulV2", "Gather", "GatherV2", "Softmax"):
            return self.attention(op, rows, width)
        if op in ("BiasAdd", "BiasAddGrad"):
            image = self.tensor(self.size(4, 12), 96, 96, self.size(1, 96))
            if op == "BiasAdd":
                return lambda x, b: R.BiasAdd(value=x, bias=b), [image, self.tensor(image.shape[-1])]
            return lambda x: R.BiasAddGrad(out_backprop=x), [image]
        if op == "_FusedConv2D":
            image, kernel, stride = self.convolution(large=self.choice(False, True))
            attrs = {"strides": [1, stride, stride, 1], **FUSED_CONVOLUTION}
            fused = lambda x, w, b: _internal(op, input=x, filter=w, args=[b], **attrs)  # noqa: E731
            return fused, [self.tensor(*image), self.tensor(*kernel), self.tensor(kernel[3])]
        if op in ("Max", "Mean", "Min", "Sum"):
            shape = [self.size(2, 40) for _ in range(self.choice(1, 2, 3))] + [self.size(2, 300)]
            axes, keep = (
                self.choice([*range(len(shape) - 1)] if op in ("Mean", "Sum") else [-1], [-1]),
                self.choice(False, True),
            )
            return lambda x: getattr(R, op)(input=x, axis=axes, keep_dims=keep), [self.tensor(*shape)]
        views = self.copies(rows, width) | {
            "Reshape": lambda x: R.Reshape(tensor=x, shape=[2 * rows, width]),
            "ExpandDims": lambda x: R.ExpandDims(input=x, axis=1),
            "Squeeze": lambda x: R.Squeeze(input=x, axis=[1]),
        }
        if op in ("ConcatV2", "Slice", "Tile") and self.choice(False, True):
            return self.copies_of_image(rows, width)[op], [self.tensor(1, 1 if op == "Tile" else rows, 16, width)]
        if op in views:
            if op in ("BroadcastTo", "Tile"):
                return views[op], [self.tensor(self.choice(1, rows), 1, width)]
            return views[op], [self.tensor(rows, 1 if op == "Squeeze" else 2, width)]
        if op.startswith("Resize"):
            attrs = {"align_corners": self.choice(False, True)}
            if op.endswith("Grad"):
                return lambda x: R.ResizeNearestNeighborGrad(grads=x, size=[9, 7], **attrs), [self.tensor(8, 18, 14, 5)]
            return lambda x: R.ResizeNearestNeighbor(images=x, size=[18, 14], **attrs), [self.tensor(8, 9, 7, 16)]
        return self.elementwise(op)

    def attention(self, op, rows, width):
        """A call of an op of attention, or of an embedding."""
        if op == "Softmax":
            return lambda x: R.Softmax(logits=x), [self.tensor(rows, self.choice(3, 4), 8 * self.size(1, 100))]
        if op == "BatchMatMulV2":
            batch, adjoint = [self.size(2, 12), self.size(1, 6)], self.choice(False, True)
            rows, depth, columns = (self.size(1, 200) for _ in range(3))
            left = self.tensor(*batch, rows, depth)
            right = self.tensor(*self.choice([], batch), *((columns, depth) if adjoint else (depth, columns)))
            return lambda x, y: R.BatchMatMulV2(x=x, y=y, adj_y=adjoint), [left, right]
        indices, axis = self._numbers.integers(0, 9, [rows, 3]), {"axis": 0} if op == "GatherV2" else {}
        table = self.tensor(9, width)
        return lambda x, i: getattr(R, op)(params=x, indices=i, **axis), [table, tf.constant(indices)]

    def copies(self, rows, width):
        """By op that copies rows, a call with a tensor of `rows` rows of 2 by `width`, or with one row."""
        return {
            "BroadcastTo": lambda x: R.BroadcastTo(input=x, shape=[rows, 2, width]),
            "ConcatV2": lambda x: R.ConcatV2(values=[x, x[..., ::-1]], axis=self.choice(1, -1)),
            "Pad": lambda x: R.Pad(input=x, paddings=[[0, 0], [1, 0], [0, 3]]),
            "Slice": lambda x: R.Slice(input=x, begin=[0, 1, 1], size=[rows, 1, width - 1]),
            "Pack": lambda x: R.Pack(values=[x, x + 1], axis=self.choice(1, -1)),
            "Unpack": lambda x: tuple(R.Unpack(value=x, num=x.shape[1], axis=self.choice(1, -2))),
            "Split": lambda x: tuple(R.Split(axis=self.choice(1, -2), value=x, num_split=2)),
            "Tile": lambda x: R.Tile(input=x, multiples=[rows // x.shape[0], 3, 1]),
            "Transpose": lambda x: R.Transpose(x=x, perm=[0, 2, 1]),
        }

    def copies_of_image(self, rows, width):
        """By op, a call with one image of `rows` rows, or of one."""
        return {
            "ConcatV2": lambda x: R.ConcatV2(values=[x, x[..., ::-1]], axis=3),
            "Slice": lambda x: R.Slice(input=x, begin=[0, 0, 0, 1], size=[1, rows, 16, width - 1]),
            "Tile": lambda x: R.Tile(input=x, multiples=[1, rows, 3, 1]),
        }


def this_device(threads):
    """This CPU, with a number of threads for one kernel."""
    onednn = os.environ["TF_ENABLE_ONEDNN_OPTS"] == "1"
    l3_cache_bytes, l1_l2_bytes = tfswap.ops.l3_cache_bytes(), tfswap.ops.l1_l2_bytes()
    return DeviceModel("cpu", onednn, threads, l3_cache_bytes=l3_cache_bytes, l1_l2_bytes=l1_l2_bytes)


MOST_CALLS = 10
"""Random calls for each that is to be compared: many are too small for slices."""


def differing(seed, tries, threads):
    """By op, how many slicings of random calls were compared, and what those with other bits were.

    Args:
        seed: of the calls.
        tries: how many are compared for each op.
        threads: TensorFlow's threads for one kernel.
    """
    cases, device = Cases(seed), this_device(threads)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    found = {}
    for op, line in LINES.items():
        if device.onednn and not line.onednn:
            continue
        compared, wrong = 0, []
        for _ in range(MOST_CALLS * tries):
            if compared == tries:
                break
            call, arguments = cases.of(op)
            same = _compare(op, call, arguments, device, cases)
            compared += same is not None
            if same is not None and not same[0]:
                wrong.append(same[1])
        found[op] = compared, wrong
    return found


def _compare(op, call, arguments, device, cases):
    """Whether a call has the same bits in slices, and a description of it; None where it can't run so."""
    made = in_slices(op, call, arguments, device, cases)
    if made is None:
        return None
    whole, parts, _, described = made
    return all(a.tobytes() == b.tobytes() for a, b in zip(whole, parts, strict=True)), described


def in_slices(op, call, arguments, device, cases, *, close=False):
    """The results of a call whole and in slices, its kernel, and a description of it; None where it can't run so."""
    concrete = tf.function(call).get_concrete_function(*arguments)
    graph = import_function(concrete)
    if op.startswith("_MklNative"):
        fuse_onednn(graph, Target(device))
        keep_pool_argmax(graph, Target(device))
    node = next(node for node in graph if node.op == op)
    slicing = slicing_of(node, device, graph.small_constants, close=close)
    if slicing is None:
        return None
    shape = node.inputs[slicing.rows[0]].type.shape if slicing.rows else node.outputs[0].shape
    of = math.prod(shape[: cases.choice(*range(1, slicing.axes + 1))])
    if slicing.image:
        kinds = [*(node.inputs[position].type for position in slicing.rows), *node.outputs]
        of = math.gcd(of, *(kind.shape[1] for kind in kinds if slicing.kind is Kind.ROWS))
    possible = []
    for rows in range(1, of):
        slices = slices_of(node, slicing, rows, of)
        if slices is not None and slices.rows == rows and reads_in_place(node, slices, of, {}):
            possible.append(rows)
    if slicing.kind is Kind.WHOLE:
        of, possible = 1, [1]
    if not possible:
        return None
    rows = cases.choice(*possible)
    slice_kernels(graph, Target(device), [Slices((node.name,), rows, of, close)])
    graph_def = export_graph_def(graph)
    results = [tensor.name for tensor in graph.fetches]
    names = [feed.name for feed in graph.feeds]

    def sliced(*given):
        return tf.graph_util.import_graph_def(graph_def, dict(zip(names, given, strict=True)), results)

    whole, parts = (tf.nest.flatten(run(*arguments)) for run in (concrete, tf.function(sliced)))
    described = f"{rows} of {of} rows of {[tuple(a.shape) for a in arguments]}"
    return [each.numpy() for each in whole], [each.numpy() for each in parts], node, described
