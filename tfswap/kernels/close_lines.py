"""Which kernels may run in slices of rows where last bits may differ (`values="close"`), and by how much they may.

A slice computes a row as the whole kernel does, but may add its products in another order, since libraries choose
blocks and threads by a call's sizes. Sums over rows are those of slices, added up. So no rule depends on sizes, and
each holds for every library: Eigen, oneDNN, cuDNN. `kernels/slice_lines.py` has the kernels with the same bits.

Two orders of adding n terms differ by at most 2 (n - 1) u times the sum of the terms' magnitudes, where u is half the
distance of 1 to the next larger float (N. Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).

Not handled: averages over rows, which the whole kernel's table has; batch normalization as one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import cast

from tfswap.ir.graph import Node
from tfswap.kernels.einsum import terms_of
from tfswap.kernels.slices import Kind, Slicing
from tfswap.kernels.slices_call import Call, Line, Rule, rows_of_images, rows_of_inputs
from tfswap.kernels.temporaries import known_shape
from tfswap.kernels.windows import window_of


def _matmul(call: Call) -> Slicing | None:
    """Rows of the left operand, or of both where the product adds up their rows."""
    attrs = call.node.attrs
    if not attrs.get("transpose_a"):
        return Slicing((0,))
    if attrs.get("transpose_b") or call.node.op != "MatMul":
        return None
    return Slicing((0, 1), Kind.SUM, unit=0)


def _batch_matmul(call: Call) -> Slicing | None:
    """Products of equally many matrices."""
    left, right = call.input(0), call.input(1)
    return Slicing((0, 1), axes=len(left) - 2) if left[:-2] == right[:-2] and len(left) > 2 else None


def _einsum(call: Call) -> Slicing | None:
    """The first axis of the result, which tensors have as their first; a sum over the first axis of all of them."""
    terms, made = terms_of(cast("bytes", call.node.attrs["equation"]))
    if any(len(set(each)) < len(each) for each in terms):  # an ellipsis too
        return None
    if rows := _begin_with(made[:1], terms):
        return Slicing(rows)
    summed, every = terms[0][:1], tuple(range(len(terms)))
    if summed not in made and _begin_with(summed, terms) == every:
        return Slicing(every, Kind.SUM, unit=0)
    return None


def _begin_with(label: str, terms: Sequence[str]) -> tuple[int, ...]:
    """The positions of the terms that have a label, where it is the first of each of these."""
    if not label or any(label in each[1:] for each in terms):
        return ()
    return tuple(position for position, each in enumerate(terms) if each.startswith(label))


def _convolution(call: Call) -> Slicing | None:
    """Images, where no tensor is added whose rows are of images; rows of one image, and those around that they read."""
    if b"Add" in cast("Sequence[bytes]", call.node.attrs.get("fused_ops", ())):
        return None
    if call.output[0] > 1 or "Depthwise" in call.node.op:
        return Slicing((0,))
    window = window_of(call.node.attrs, call.input(0), call.input(1)[:-2], call.output)
    if not window.keeps_sizes and not window.is_apart:
        return None
    return Slicing((0,), axes=2, image=True, halo=window.halo)


def _image_gradient(call: Call) -> Slicing | None:
    """Images; rows of one image. It is computed as a convolution where each pixel has a position, since TensorFlow's
    kernel takes a buffer of columns, and oneDNN's does not.
    """
    window = window_of(call.node.attrs, call.output, call.input(1)[:-2], call.input(2))
    flipped = window.keeps_sizes and not call.device.onednn and call.output[-1] == call.input(1)[-2]
    if call.output[0] > 1:
        return Slicing((2,), shape=0, flipped=flipped)
    if not window.keeps_sizes and not window.is_apart:
        return None
    return Slicing((2,), axes=2, shape=0, image=True, halo=window.halo, flipped=flipped)


def _reduction(call: Call) -> Slicing | None:
    """Rows that are reduced by themselves; the sum of rows."""
    over, axes = call.integers(1), len(call.input(0))
    if over is None or not over:
        return None
    reduced = {axis % axes for axis in over}
    if 0 not in reduced:
        return Slicing((0,), axes=min(reduced) if max(over) < 0 else 1)
    # Sums of all axes but the last have the same bits (LINES).
    return Slicing((0,), Kind.SUM, unit=0) if call.node.op == "Sum" and len(reduced) != axes - 1 else None


def _bias_add_grad(call: Call) -> Slicing:
    return Slicing((0,), Kind.SUM, axes=len(call.input(0)) - 1, unit=0)


def _inner(call: Call) -> Slicing:
    """Each of the last axis."""
    return Slicing((0,), axes=len(call.input(0)) - 1)


def _filter_gradient(call: Call) -> Slicing | None:
    """Images; rows of one image. Products of columns, since TensorFlow's kernel takes a buffer for as many images as a
    cache holds, however few there are; oneDNN's takes none.
    """
    image = call.input(0)
    if (call.device.onednn and image[0] > 1) or call.output[-2] != image[-1]:
        return Slicing((0, 2), Kind.SUM, unit=0)
    window = window_of(call.node.attrs, image, call.output[:-2], call.input(2))
    if image[0] > 1:
        return Slicing((0, 2), Kind.SUM, unit=0, window=window)
    return Slicing((0, 2), Kind.SUM, axes=2, unit=0, window=window, image=True, halo=window.halo)


def _gradients_with_bias(call: Call) -> Slicing | None:
    """oneDNN's kernel of a filter's gradient and a bias'. Images."""
    return Slicing((0, 2), Kind.SUM, unit=0) if call.input(0)[0] > 1 else None


def _images_with_places(*rows: int) -> Rule:
    """Images by themselves: oneDNN's pooling, which keeps the positions of its maxima, in the images' order."""
    return lambda call: Slicing(rows) if call.output[0] > 1 else None


def _depthwise_filter_gradient(_: Call) -> Slicing:
    return Slicing((0, 2), Kind.SUM, unit=0)


_IMAGES = Line(_convolution)
_IMAGE_GRADIENT = Line(_image_gradient)
_FILTER_GRADIENT = Line(_filter_gradient)
_REDUCTION = Line(_reduction)

CLOSE_LINES: dict[str, Line] = {
    "AvgPool3D": Line(rows_of_images(0)),
    "AvgPool3DGrad": Line(rows_of_images(1, shape=0)),
    "BatchMatMulV2": Line(_batch_matmul),
    "BiasAddGrad": Line(_bias_add_grad),
    "Conv2D": _IMAGES,
    "Conv2DBackpropFilter": _FILTER_GRADIENT,
    "Conv2DBackpropInput": _IMAGE_GRADIENT,
    "Conv3D": _IMAGES,
    "Conv3DBackpropFilterV2": _FILTER_GRADIENT,
    "Conv3DBackpropInputV2": _IMAGE_GRADIENT,
    "DepthwiseConv2dNative": _IMAGES,
    "DepthwiseConv2dNativeBackpropFilter": Line(_depthwise_filter_gradient),
    "DepthwiseConv2dNativeBackpropInput": Line(rows_of_inputs(2, shape=0)),
    "Einsum": Line(_einsum),
    "LogSoftmax": Line(_inner),
    "MatMul": Line(_matmul),
    "Max": _REDUCTION,
    "MaxPool3D": Line(rows_of_images(0)),
    "MaxPool3DGrad": Line(rows_of_images(0, 1, 2)),
    "Mean": _REDUCTION,
    "Min": _REDUCTION,
    "Softmax": Line(_inner),
    "Sum": _REDUCTION,
    "_FusedConv2D": _IMAGES,
    "_FusedMatMul": Line(_matmul),
    "_MklNativeConv2DBackpropFilterWithBias": Line(_gradients_with_bias),
    "_MklNativeConv2DWithBias": _IMAGES,
    "_MklNativeMaxPool": Line(_images_with_places(0)),
    "_MklNativeMaxPool3D": Line(_images_with_places(0)),
    "_MklNativeMaxPool3DGrad": Line(_images_with_places(0, 1, 2, 3)),
    "_MklNativeMaxPoolGrad": Line(_images_with_places(0, 1, 2, 3)),
}
"""The ops whose kernels run in slices by other rules than those of `LINES`, or by none of these."""

_ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
"""Half the distance of 1 to the next larger number."""


def most_difference(node: Node) -> float:
    """The most by which two orders of a kernel's sums differ, as a share of the sum of the terms' magnitudes."""
    return 2 * (added_terms(node) - 1) * _ROUNDING.get(node.outputs[0].dtype, 0.0)


def added_terms(node: Node) -> int:
    """How many terms each element of a kernel's result adds up; 1 where none are added, or their number is unknown."""
    shapes: list[Sequence[int]] = [known_shape(tensor.type) or () for tensor in node.inputs]
    made = known_shape(node.outputs[0]) or ()
    if node.op in ("MatMul", "_FusedMatMul"):
        return shapes[0][0 if node.attrs.get("transpose_a") else 1]
    if node.op == "Einsum":
        return _summed_in_einsum(node, shapes)
    if node.op == "BatchMatMulV2":
        return shapes[0][-2 if node.attrs.get("adj_x") else -1]
    if "BackpropFilter" in node.op:
        return prod(shapes[2][:-1])
    if node.op.endswith(("BackpropInput", "BackpropInputV2")):
        return prod(shapes[1]) // shapes[1][-2]
    if "Conv" in node.op:
        return prod(shapes[1][:2] if "Depthwise" in node.op else shapes[1][:-1])
    if node.op in ("BiasAddGrad", "Mean", "Sum"):
        return prod(shapes[0]) // max(1, prod(made))
    return shapes[0][-1] if node.op in ("LogSoftmax", "Softmax") else 1


def _summed_in_einsum(node: Node, shapes: Sequence[Sequence[int]]) -> int:
    terms, made = terms_of(cast("bytes", node.attrs["equation"]))
    sizes: dict[str, int] = {}
    for labels, shape in zip(terms, shapes, strict=True):
        sizes.update(zip(labels, shape, strict=False))
    return prod(size for label, size in sizes.items() if label not in made)
