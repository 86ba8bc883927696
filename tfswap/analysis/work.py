"""The work of one run of a kernel: operations of contractions, element-wise operations, bytes moved, cores used.

The table has a row for each op that does not just read its inputs and write its outputs once. It has no rates of
machines: cost.py computes seconds from the work.

Checked against measured kernels by `benchmarks/cost_model.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

from tfswap.ir.graph import Node
from tfswap.ir.op_traits import reads_metadata_only
from tfswap.ir.types import TensorType
from tfswap.kernels.columns import conv3d_columns
from tfswap.kernels.cudnn_algorithms import CHANNELS_FIRST
from tfswap.kernels.einsum import einsum_parts
from tfswap.kernels.hardware import Rates

Count = Callable[[Node], float]
"""From a node to a number of operations."""


class Work(NamedTuple):
    """The work of a type of op.

    Attributes:
        flops: gives the operations of its contraction. None: it is no contraction.
        efficiency: the share of the machine's rate of contractions that it reaches.
        steps: element-wise operations per element of its largest input or output, beyond those that memory traffic
            hides: 0 for most.
        passes: bytes moved, as a multiple of the bytes of its inputs and outputs.
        spread: the share of the machine's cores that it uses, at least one core: from the times of the kernels of four
            ordered steps (ResNet-50, VGG16, MobileNetV2, a transformer) with one thread and with two, or from the
            calling thread's share of a kernel's CPU time (`benchmarks/one_core.py`).
        alone: its CPU time on one core, divided by that when threads share it.
        gathers: whether it reads only as many bytes of its first input as its output has, as a look-up in a table.
        convolves: whether its contraction is a convolution, for which processors have a rate of its own.
    """

    flops: Count | None = None
    efficiency: float = 1.0
    steps: float = 0.0
    passes: float = 1.0
    spread: float = 1.0
    alone: float = 1.0
    gathers: bool = False
    convolves: bool = False


_convolving = partial(Work, convolves=True)


def elements(kind: TensorType) -> int:
    return kind.num_elements or 0


def _window(kind: TensorType, dims: int | None = None) -> int:
    """Elements of a filter under one output channel, or the product of its first dimensions."""
    shape = kind.shape or (1,)
    return math.prod(d or 1 for d in (shape[:-1] if dims is None else shape[:dims]))


def _matmul(node: Node) -> float:
    """2 m n k: the contracted dimension is the one that the transposition leaves."""
    left = node.inputs[0].type.shape
    transposed = node.attrs.get("transpose_a") or node.attrs.get("adj_x")
    if not left or len(left) < 2:
        return 0.0
    return 2.0 * elements(node.outputs[0]) * (left[-2 if transposed else -1] or 1)


def _packed_product(node: Node) -> float:
    """A product of two matrices, and the time of packing the right one."""
    return _matmul(node) + _packing(node)


PACKED_FLOPS = 40.0
TRANSPOSED_FLOPS = 60.0
CONFLICT_FLOPS = 480.0
"""Eigen packs the right matrix of a product: the time of an element, in operations of contractions. Of a transposed one
it reads elements that are a row apart. Where rows are a multiple of a page apart, these compete for the same lines of
the processor's caches; rows that are a multiple of a half of it, for half of the time. From 48 products of 8 to 512
rows with matrices of 0.25 to 151 MB: a few rows make a product with a transposed matrix up to ten times slower than one
with the matrix as it is."""
PAGE_BYTES = 4096


def _packing(node: Node) -> float:
    """The time of packing the right matrix, in operations of contractions."""
    right = node.inputs[1].type
    if not right.shape or not (node.attrs.get("transpose_b") or node.attrs.get("adj_y")):
        return PACKED_FLOPS * elements(right)
    row_bytes = (right.nbytes or 0) // max(1, elements(right)) * (right.shape[-1] or 1)
    competing = math.gcd(row_bytes, PAGE_BYTES) / PAGE_BYTES
    return (PACKED_FLOPS + TRANSPOSED_FLOPS + CONFLICT_FLOPS * competing) * elements(right)


def _convolution(node: Node) -> float:
    """Each output element takes a multiply-add per filter element of its channel."""
    return 2.0 * elements(node.outputs[0]) * _window(node.inputs[1].type)


PATCH_FLOPS = 32.0
"""The time of moving one element of the image's patches, in operations of contractions. A filter's gradient copies the
patches, an image's gradient adds them up in about half of that time. Each element is used once per channel, so kernels
with few channels are slow. From CPU times of kernels with 16 to 512 channels."""


def _pixels(node: Node) -> int:
    """Elements of one channel of the incoming gradient of a convolution's gradient."""
    shape = node.inputs[2].type.shape or (1,)
    channels_first = node.attrs.get("data_format") in CHANNELS_FIRST
    return math.prod(d or 1 for d in ((shape[0], *shape[2:]) if channels_first else shape[:-1]))


def _filter_gradient(node: Node) -> float:
    """The multiply-adds of the forward convolution (the gradient's elements times the window), and the patches."""
    return (2.0 * _third_input(node) + PATCH_FLOPS * _pixels(node)) * _window(node.outputs[0])


PACKING_FLOPS = 160.0
"""Conv2DBackpropInput multiplies image by image, and packs the whole filter for each: the time of packing one element,
in operations of contractions (VGG16 and ResNet-50 within a factor of 1.7)."""


def _input_gradient(node: Node) -> float:
    kernel, images = node.inputs[1].type, (node.inputs[2].type.shape or (1,))[0] or 1
    adding = PATCH_FLOPS / 2 * _pixels(node)
    return (2.0 * _third_input(node) + adding) * _window(kernel) + PACKING_FLOPS * images * elements(kernel)


def _added_products(node: Node) -> float:
    """Tfswap>AddProducts: patches, and their products with the gradients."""
    (width, made), gradients = (d or 1 for d in node.outputs[0].shape or (1, 1)), elements(node.inputs[1].type)
    return width * (2.0 * gradients + PATCH_FLOPS * gradients / made)


def _bounded_image_gradient(node: Node) -> float:
    """Tfswap>ImageGradient: each product packs the whole filter."""
    kernel, gradients = node.inputs[0].type, node.inputs[1].type
    positions = elements(gradients) / ((kernel.shape or (1,))[-1] or 1)
    products = positions / cast("int", node.attrs["chunk"])
    work = (2.0 * elements(gradients) + PATCH_FLOPS / 2 * positions) * _window(kernel)
    return work + PACKING_FLOPS * products * elements(kernel)


def _gradients(window: int | None, others: Work) -> Callable[[Node, Rates], Work]:
    """The work of a convolution's gradient, whose filter is input `window`, or the output.

    Args:
        others: the work of TensorFlow's own kernels, which copy patches. Those of cuDNN and oneDNN do not.
    """

    def flops(node: Node) -> float:
        return 2.0 * _third_input(node) * _window(node.outputs[0] if window is None else node.inputs[window].type)

    blocked = _convolving(flops)
    return lambda _, rates: blocked if rates.cudnn or rates.onednn else others


FILTER_COLUMN_FLOPS, COLUMN_FLOPS = 40.0, 30.0
"""The time per element of a volume's patches in a column buffer, in operations of contractions, for a filter's gradient
and an image's. From CPU times of 34 kernels with 4 to 128 channels in an arena; those of 100,000 pixels use both cores.
"""
EIGEN_FILTER_FLOPS, STRIDED_FILTER_FLOPS, STRIDED_FLOPS = 250.0, 750.0, 620.0
"""The same per element of the gradient's patches without a column buffer: for a filter's gradient, and for both
gradients of a strided convolution, where Eigen inserts zeros. From CPU times of 12 kernels with 16 to 64 channels,
within a factor of 1.3."""


def _volume_gradient(node: Node, rates: Rates, *, one_by_one: bool) -> Work:
    """The work of a 3-D convolution's gradient: the filter's, or, with `one_by_one`, the image's."""
    read, made = node.inputs[int(one_by_one)].type, node.outputs[0]
    volume, kernel = (made, read) if one_by_one else (read, made)
    gradient, window = (tuple(d or 1 for d in kind.shape or (1,) * 5) for kind in (node.inputs[2].type, kernel))
    cache = int(rates.l3_cache_bytes) // 4
    has_columns = conv3d_columns(gradient, window, elements(volume), cache, one_by_one=one_by_one)
    strides = node.attrs.get("strides")
    zeros = math.prod(cast("tuple[int, ...]", strides)) if isinstance(strides, tuple) else 1
    if rates.cudnn:
        patches = 0.0
    elif has_columns:
        patches = (COLUMN_FLOPS if one_by_one else FILTER_COLUMN_FLOPS) * _window(kernel)
    else:
        strided, dense = (STRIDED_FLOPS, 0.0) if one_by_one else (STRIDED_FILTER_FLOPS, EIGEN_FILTER_FLOPS)
        patches = (strided * zeros if zeros > 1 else dense) * math.prod(window[:3]) * window[4]

    def flops(node: Node) -> float:
        return 2.0 * _third_input(node) * _window(kernel) + patches * _pixels(node)

    return _convolving(flops)


def _depthwise(maps: Count, window: int | None) -> Count:
    """A multiply-add for each element of the maps and of the filter's window. The filter is input `window`, or the
    output.
    """

    def flops(node: Node) -> float:
        kind = node.outputs[0] if window is None else node.inputs[window].type
        return 2.0 * maps(node) * _window(kind, 2)

    return flops


def _output(node: Node) -> float:
    return float(elements(node.outputs[0]))


def _third_input(node: Node) -> float:
    return float(elements(node.inputs[2].type))


LARGE_PRODUCT_FLOPS = 64e6
"""Eigen spreads a batch of products over cores where each takes more operations: one of 256 x 256 x 256 ran on one
core, one of 128 x 384 x 1536 on 1.5 of two."""
_MATMUL = Work(_matmul)
_SMALL_PRODUCTS = Work(_matmul, 0.55, spread=0.0, alone=0.5)
_LARGE_PRODUCTS = Work(_matmul, 0.8, spread=0.77)
_ONEDNN_PRODUCTS = Work(_matmul, 0.85, spread=0.8)
"""oneDNN spreads all products over cores. From nine shapes, with one thread and with two."""


def _product(node: Node, rates: Rates) -> Work:
    """The work of a product of two matrices. Products of 3 to 34 million operations, as in an LSTM of 128 to 256 units,
    took 0.89 to 1.89 times as long on one thread as on two (sixteen shapes, median 1.09), larger ones of up to 4,300
    million 1.56 times."""
    return _packed(_of_product(_matmul(node), rates), rates)


def _packed(work: Work, rates: Rates) -> Work:
    """The work of a product, with that of packing where it counts."""
    return work._replace(flops=_packed_product) if rates.packs and not rates.cudnn else work


def _of_product(flops: float, rates: Rates) -> Work:
    small = not (rates.onednn or rates.cudnn) and flops <= LARGE_PRODUCT_FLOPS
    return _SMALL_PRODUCTS if small else _MATMUL


def _products(node: Node, rates: Rates) -> Work:
    """The work of a batch of products of matrices."""
    matrices = math.prod(d or 1 for d in (node.outputs[0].shape or ())[:-2])
    return _of_products(_matmul(node), matrices, rates)


def _of_products(flops: float, matrices: int, rates: Rates) -> Work:
    if rates.onednn:
        return _ONEDNN_PRODUCTS
    return _LARGE_PRODUCTS if flops > matrices * LARGE_PRODUCT_FLOPS else _SMALL_PRODUCTS


TRANSPOSED_STEPS = 5
"""The time of transposing an element, in element-wise operations."""
FILLED_STEPS = 12
"""The time of writing an element of a slice's gradient among zeros, in element-wise operations."""


def _einsum(node: Node, rates: Rates) -> Work:
    """A product of matrices, or a batch of them, with transpositions before and after.

    A product with a vector is bound by memory. TensorFlow spreads a batch of these over the cores
    (batch_matmul_op_impl.h).
    """
    parts = einsum_parts(node.attrs.get("equation"), [t.type for t in node.inputs])
    if parts is None:
        return _STREAM
    product, copied = parts
    largest = max(map(elements, (*node.outputs, *(t.type for t in node.inputs))))
    steps = TRANSPOSED_STEPS * copied / max(largest, 1)
    if product is None or min(product.rows, product.inner, product.columns) == 1:
        return Work(steps=steps)
    flops = 2.0 * product.batch * product.rows * product.inner * product.columns
    work = _of_product(flops, rates) if product.batch == 1 else _of_products(flops, product.batch, rates)

    def computed(_: Node) -> float:
        return flops

    return work._replace(flops=computed, steps=steps, alone=1.0)


def _slice_gradient(node: Node, _: Rates) -> Work:
    """Zeros, and the gradient of the slice among them."""
    filled, of = elements(node.inputs[-1].type), elements(node.outputs[0])
    return Work(steps=FILLED_STEPS * filled / max(filled, of, 1))


_STREAM = Work()
_NOTHING = Work(passes=0.0)
# What is not here streams through memory once. Efficiencies and steps are those of TensorFlow's own CPU kernels on
# one core, at CPU_CORE_FLOPS_PER_S and CPU_CORE_STEPS_PER_S.
_WORK: dict[str, Work | Callable[[Node, Rates], Work]] = {
    "_FusedConv2D": _convolving(_convolution, spread=0.86),
    "_FusedMatMul": lambda node, rates: _packed(_MATMUL, rates),
    "_MklNativeConv2DBackpropFilterWithBias": _gradients(None, _convolving(_filter_gradient, 0.8, spread=0.8)),
    "_MklNativeConv2DWithBias": _convolving(_convolution, spread=0.86),
    "_MklNativeFusedConv2D": _convolving(_convolution, spread=0.86),
    "_MklNativePadWithConv2D": _convolving(_convolution, spread=0.86),
    "_MklNativePadWithFusedConv2D": _convolving(_convolution, spread=0.86),
    "_MklNativeMaxPool3DGrad": Work(steps=3),
    "_MklNativeMaxPoolGrad": Work(steps=3),
    "ArgMax": Work(steps=2.5),
    "ArgMin": Work(steps=2.5),
    "AssignAddVariableOp": Work(passes=3),  # the variable, read and written
    "AssignSubVariableOp": Work(passes=3),
    "AvgPool": Work(spread=0.0),
    "AvgPool3DGrad": Work(steps=7.5, spread=0.0),
    "BatchMatMul": _products,
    "BatchMatMulV2": _products,
    "BatchMatMulV3": _products,
    "Conv2D": _convolving(_convolution, spread=0.86),
    "Tfswap>AddProducts": _convolving(_added_products, 0.8, spread=0.8),
    "Tfswap>ImageGradient": _convolving(_bounded_image_gradient, spread=0.87),
    "Conv2DBackpropFilter": _gradients(None, _convolving(_filter_gradient, 0.8, spread=0.8)),
    "Conv2DBackpropInput": _gradients(1, _convolving(_input_gradient, spread=0.87)),
    "Conv3D": _convolving(_convolution),
    "Conv3DBackpropFilterV2": partial(_volume_gradient, one_by_one=False),
    "Conv3DBackpropInputV2": partial(_volume_gradient, one_by_one=True),
    "Cumsum": Work(steps=21),
    "DepthwiseConv2dNative": Work(_depthwise(_output, 1), 0.16),
    "DepthwiseConv2dNativeBackpropFilter": Work(_depthwise(_third_input, None), 0.14),
    "DepthwiseConv2dNativeBackpropInput": Work(_depthwise(_third_input, 1), 0.12),
    "Einsum": _einsum,
    "Erfc": Work(steps=3.5),
    "Expm1": Work(steps=4),
    "FloorMod": Work(steps=4),
    "FusedBatchNorm": Work(steps=5),
    "FusedBatchNormGrad": Work(steps=5),
    "FusedBatchNormGradV2": Work(steps=5),
    "FusedBatchNormGradV3": Work(steps=5),
    "FusedBatchNormV2": Work(steps=5),
    "FusedBatchNormV3": Work(steps=5),
    "Gather": Work(steps=2, gathers=True),
    "GatherNd": Work(steps=2, gathers=True),
    "GatherV2": Work(steps=2, gathers=True),
    "LRN": Work(steps=8),
    "LRNGrad": Work(steps=8),
    "Log": Work(steps=5.5),
    "Log1p": Work(steps=5.5),
    "LogSoftmax": Work(steps=3),
    "MatMul": _product,
    "MaxPool3D": Work(steps=4),
    "MaxPool3DGrad": Work(steps=35, spread=0.0),
    "MaxPoolGrad": Work(steps=12),
    "Mean": Work(steps=1.5),
    "Pow": Work(steps=22),
    "RandomStandardNormal": Work(steps=24),
    "RandomUniform": Work(steps=9),
    "ReadVariableOp": _NOTHING,  # the variable's own buffer
    "ResizeBilinear": Work(steps=0.5, spread=0.0),
    "ResizeBilinearGrad": Work(steps=3, spread=0.0),
    "ResizeNearestNeighbor": Work(steps=5),
    "ResizeNearestNeighborGrad": Work(spread=0.0),
    "ResourceApplyAdam": Work(passes=7),  # the variable and two slots, read and written
    "ResourceApplyGradientDescent": Work(passes=3),
    "ResourceApplyKerasMomentum": Work(passes=5),
    "ResourceApplyMomentum": Work(passes=5),
    "ScatterNd": Work(steps=9, spread=0.0),
    "SelectV2": Work(steps=2),
    "Softmax": Work(steps=3.5),
    "SoftmaxCrossEntropyWithLogits": Work(steps=7),
    "Softplus": Work(steps=6),
    "SpaceToDepth": Work(spread=0.0),
    "SparseSoftmaxCrossEntropyWithLogits": Work(steps=9),
    "StatelessRandomNormal": Work(steps=24),
    "StatelessRandomNormalV2": Work(steps=24),
    "StatelessRandomUniform": Work(steps=9),
    "StatelessRandomUniformV2": Work(steps=9),
    "StatelessTruncatedNormal": Work(steps=46),
    "StatelessTruncatedNormalV2": Work(steps=46),
    "StridedSliceGrad": _slice_gradient,
    "Sum": Work(steps=1.2),
    "TensorListGetItem": _NOTHING,  # lists pass on what they keep
    "TensorListPopBack": _NOTHING,
    "TensorListPushBack": _NOTHING,
    "TensorListSetItem": _NOTHING,
    "TensorScatterAdd": Work(steps=10, spread=0.0),
    "TopKV2": Work(steps=9),
    "Transpose": Work(steps=TRANSPOSED_STEPS),
    "TruncatedNormal": Work(steps=46),
    "UnsortedSegmentSum": Work(steps=9),
    "Where": Work(steps=25, spread=0.0),
    # tfswap's codecs; those of pooling as with windows of 2 x 2 and 3 x 3 that do not overlap much.
    "Tfswap>DecodeFloats": Work(steps=1.3),
    "Tfswap>DecodeGroups": Work(steps=1.5),
    "Tfswap>DecodeMask": Work(steps=1),
    "Tfswap>EncodeFloats": Work(steps=1.7),
    "Tfswap>EncodeGroups": Work(steps=9),
    "Tfswap>EncodeMask": Work(steps=0.9),
    "Tfswap>EncodeMaxPool": Work(steps=1.2),
    "Tfswap>EncodeSparse": Work(steps=1.7),
    "Tfswap>MaxPoolGradFromPositions": Work(steps=2.5),
}


def work_of(node: Node, rates: Rates) -> Work:
    work = _NOTHING if reads_metadata_only(node.op) else _WORK.get(node.op, _STREAM)
    return work if isinstance(work, Work) else work(node, rates)
