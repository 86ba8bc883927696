"""Which kernels may run in slices of rows with the bits of the whole kernel.

A row is what is at one place of a tensor's first axis, or of several leading axes. A line of `LINES` says what a slice
of an op's kernel reads, and from which sizes on the bits are the same, for the families of kernels for which that is
proven; other kernels stay whole. `tests/runtime/test_kernels_in_slices.py` compares the bits of each line on the CPU
that it runs on.

The reasons, in TensorFlow 2.21's sources:

- Element by element: kernels compute in packets (`ELEMENTS`).
- Products add up the products of blocks of the depth (kernels/products.py), unless the depth is divided among threads.
  That is so where the work is too little for all threads (TensorContractionThreadPool.h, numThreads and
  shardByInnerDim). A product that adds up rows has the bits of the whole in slices of one block each, added in order.
- A convolution is such a product of all images. Its gradient with respect to the image is a product for each image,
  which all threads compute where there is one image alone, or enough work (conv_grad_input_ops.h).
- A convolution's gradient with respect to the filter adds the products of shards of images, one after the other
  (conv_grad_filter_ops.cc). So slices of one shard each, added in the same order, give the same sum. Larger ones do
  not.
- The bias gradient adds rows one after the other, in a block for each thread (redux_functor.h).

Not handled: kernels of GPUs; products of other types than float32, and those of oneDNN; sums over a part of a row, and
Softmax, whose kernels divide rows among threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from math import gcd, prod
from typing import Final, NamedTuple

from tfswap.ir.graph import Node, Output
from tfswap.ir.types import TensorType
from tfswap.kernels.convolutions import adds_in_parallel, images_of_shard
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.products import depth_of_slices, same_in_rows
from tfswap.kernels.temporaries import TENSOR_ALIGN_BYTES as _ALIGN_BYTES
from tfswap.kernels.temporaries import known_shape

ELEMENTS: Final = 64
"""A slice has a multiple of this many elements. Kernels compute several elements in one packet, and what is left over
one by one, with other last bits for some functions (Eigen's TensorExecutor.h): a multiple leaves nothing over. It also
aligns slices of each type."""
SUM_WORK: Final = 1 << 18
"""The elements of a thread's block from which on the bias gradient's blocks are summed one by one."""


class Kind(Enum):
    """How the results of slices make up the result of the whole kernel."""

    ROWS = auto()
    """They are rows of it."""
    SUM = auto()
    """It is their sum, added up in order."""
    ROW_SUMS = auto()
    """Each continues the sums of the slices before (Tfswap>AddRows)."""


def _any_number(_: int) -> bool:
    return True


def _several(count: int) -> bool:
    return count > 1


class Slicing(NamedTuple):
    """How a kernel runs in slices.

    Attributes:
        rows: the positions of the inputs of which a slice reads its own rows. It reads all of the others.
        axes: the number of leading axes of these, and of the output, that may be merged into one axis of rows.
        packets: whether a slice has a multiple of ELEMENTS elements.
        unit: of Kind.SUM, the rows of each kernel, whatever slices have. Rows are those of the first sliced input.
        holds: whether slices of a number of rows of the output have the bits.
        shape: the position of the input that has the output's shape.
        blocks: of Kind.ROW_SUMS, the number of sums.
    """

    rows: tuple[int, ...]
    kind: Kind = Kind.ROWS
    axes: int = 1
    packets: bool = False
    unit: int = 1
    holds: Callable[[int], bool] = _any_number
    shape: int | None = None
    blocks: int = 1


Rule = Callable[[Node, DeviceModel], "Slicing | None"]


class Line(NamedTuple):
    """An op's line: its rule, and whether that is proven for the kernels of oneDNN, which replace those of Eigen."""

    rule: Rule
    onednn: bool = False


def rows_of_packets(shape: Sequence[int]) -> int:
    """The least number of rows of a tensor of this shape that have a multiple of ELEMENTS elements."""
    return ELEMENTS // gcd(ELEMENTS, prod(shape[1:]))


def _elementwise(node: Node, _: DeviceModel) -> Slicing | None:
    """cwise_ops_common.h, relu_op.h: inputs with the output's rows, and those that each row reads."""
    shape = known_shape(node.outputs[0]) or ()
    rows: list[int] = []
    axes = len(shape)
    for position, tensor in enumerate(node.inputs):
        read = known_shape(tensor.type)
        if read is None:
            return None
        if len(read) < len(shape):
            axes = min(axes, len(shape) - len(read))
        elif read[:1] == shape[:1]:
            rows.append(position)
            axes = min(axes, _equal_axes(read, shape))
        elif read[0] == 1:
            axes = 1
        else:
            return None
    return Slicing(tuple(rows), axes=axes, packets=True)


def _equal_axes(read: Sequence[int], made: Sequence[int]) -> int:
    """The number of leading axes in which two shapes are equal."""
    return next((axis for axis, sizes in enumerate(zip(read, made, strict=True)) if len({*sizes}) > 1), len(made))


def _rows_of(*rows: int, shape: int | None = None) -> Rule:
    """Each row of the output is computed from the same rows of these inputs, by itself."""
    return lambda node, _: Slicing(rows, shape=shape)


def _only_adds_bias(node: Node) -> bool:
    """Whether a fused kernel does no more after its product than to add a bias, and to compare with zero."""
    return node.attrs.get("fused_ops", ()) in ((), (b"BiasAdd",), (b"BiasAdd", b"Relu"))


def _matmul(node: Node, device: DeviceModel) -> Slicing | None:
    """matmul_op_impl.h: rows of the left operand, or of both where the product adds up their rows."""
    left, result = known_shape(node.inputs[0].type), known_shape(node.outputs[0])
    if left is None or result is None or not _only_adds_bias(node):
        return None
    if not node.attrs.get("transpose_a"):
        return _product_rows((0,), result, left[1], 1, device)
    if node.attrs.get("transpose_b") or node.op != "MatMul":
        return None
    unit = depth_of_slices(result[0], result[1], left[0], device)
    return None if unit is None else Slicing((0, 1), Kind.SUM, unit=unit)


def _product_rows(
    rows: tuple[int, ...], result: tuple[int, ...], depth: int, each: int, device: DeviceModel
) -> Slicing | None:
    """Rows of a product.

    Args:
        each: how many of its rows are a row of the tensor.
    """
    columns, whole = result[-1], prod(result[:-1])

    def holds(count: int) -> bool:
        return same_in_rows(count * each, whole, columns, depth, device)

    return Slicing(rows, holds=holds) if same_in_rows(whole, whole, columns, depth, device) else None


def _conv2d(node: Node, device: DeviceModel) -> Slicing | None:
    """conv_ops_impl.h, SpatialConvolution: a product of all images' patches."""
    image, kernel, result = (known_shape(t) for t in (node.inputs[0].type, node.inputs[1].type, node.outputs[0]))
    if image is None or kernel is None or result is None or not _only_adds_bias(node) or image[3] != kernel[2]:
        return None
    return _product_rows((0,), result, prod(kernel[:3]), result[1] * result[2], device)


def _conv2d_backprop_input(node: Node, device: DeviceModel) -> Slicing | None:
    kernel, gradient = known_shape(node.inputs[1].type), known_shape(node.inputs[2].type)
    if kernel is None or gradient is None:
        return None
    parallel = adds_in_parallel(kernel, gradient, node.outputs[0], device)
    return Slicing((2,), holds=_any_number if parallel else _several, shape=0)


def _conv2d_backprop_filter(node: Node, _: DeviceModel) -> Slicing | None:
    kernel, gradient = known_shape(node.outputs[0]), known_shape(node.inputs[2].type)
    if kernel is None or gradient is None:
        return None
    return Slicing((0, 2), Kind.SUM, unit=images_of_shard(kernel, gradient, node.outputs[0]))


def _bias_add_grad(node: Node, device: DeviceModel) -> Slicing | None:
    """redux_functor.h, ReduceOuterDimensions: wide rows are added up in one block."""
    shape = known_shape(node.inputs[0].type)
    if shape is None:
        return None
    blocks = 1 if shape[-1] > 32 * device.intra_op_threads else device.intra_op_threads
    enough = blocks == 1 or prod(shape) // blocks >= SUM_WORK
    return Slicing((0,), Kind.ROW_SUMS, axes=len(shape) - 1, blocks=blocks) if enough else None


def _cross_entropy(node: Node, _: DeviceModel) -> Slicing | None:
    """xent_op.h: rows of logits and labels; the exponentials of all rows are computed in packets."""
    return Slicing((0, 1), packets=True)


def _bias_add(node: Node, _: DeviceModel) -> Slicing | None:
    return Slicing((0,), axes=len(node.outputs[0].shape or ()) - 1)


def _reshape(node: Node, _: DeviceModel) -> Slicing | None:
    return Slicing((0,), axes=max(len(kind.shape or ()) for kind in (node.inputs[0].type, node.outputs[0])), shape=1)


def _keeps_first_axis(node: Node, _: DeviceModel) -> Slicing | None:
    """ExpandDims, Squeeze: views with the same first axis."""
    read, made = known_shape(node.inputs[0].type), known_shape(node.outputs[0])
    return Slicing((0,)) if read and made and read[0] == made[0] > 1 else None


_ELEMENTWISE = Line(_elementwise, onednn=True)

LINES: dict[str, Line] = {
    "Abs": _ELEMENTWISE,
    "Add": _ELEMENTWISE,
    "AddV2": _ELEMENTWISE,
    "Cast": _ELEMENTWISE,
    "Elu": _ELEMENTWISE,
    "EluGrad": _ELEMENTWISE,
    "Erf": _ELEMENTWISE,
    "Exp": _ELEMENTWISE,
    "LeakyRelu": _ELEMENTWISE,
    "LeakyReluGrad": _ELEMENTWISE,
    "Log": _ELEMENTWISE,
    "Maximum": _ELEMENTWISE,
    "Minimum": _ELEMENTWISE,
    "Mul": _ELEMENTWISE,
    "Neg": _ELEMENTWISE,
    "RealDiv": _ELEMENTWISE,
    "Relu": _ELEMENTWISE,
    "Relu6": _ELEMENTWISE,
    "Relu6Grad": _ELEMENTWISE,
    "ReluGrad": _ELEMENTWISE,
    "Rsqrt": _ELEMENTWISE,
    "Sigmoid": _ELEMENTWISE,
    "SigmoidGrad": _ELEMENTWISE,
    "Softplus": _ELEMENTWISE,
    "Sqrt": _ELEMENTWISE,
    "Square": _ELEMENTWISE,
    "SquaredDifference": _ELEMENTWISE,
    "Sub": _ELEMENTWISE,
    "Tanh": _ELEMENTWISE,
    "TanhGrad": _ELEMENTWISE,
    "AvgPool": Line(_rows_of(0)),
    "AvgPoolGrad": Line(_rows_of(1, shape=0)),
    "BiasAdd": Line(_bias_add),
    "BiasAddGrad": Line(_bias_add_grad),
    "Conv2D": Line(_conv2d),
    "_FusedConv2D": Line(_conv2d),
    "Conv2DBackpropFilter": Line(_conv2d_backprop_filter),
    "Conv2DBackpropInput": Line(_conv2d_backprop_input),
    "ExpandDims": Line(_keeps_first_axis, onednn=True),
    "MatMul": Line(_matmul),
    "_FusedMatMul": Line(_matmul),
    "MaxPool": Line(_rows_of(0)),
    "MaxPoolGrad": Line(_rows_of(0, 1, 2)),
    "Reshape": Line(_reshape, onednn=True),
    "SparseSoftmaxCrossEntropyWithLogits": Line(_cross_entropy, onednn=True),
    "Squeeze": Line(_keeps_first_axis, onednn=True),
}
"""The ops whose kernels may run in slices."""

_SUPPORTED = ("float32", "float64", "int32", "int64", "bool", "uint8")


def slicing_of(node: Node, device: DeviceModel) -> Slicing | None:
    """How a kernel may run in slices with the same bits; None where it may not, or where that is not proven.

    Every size of what it reads and makes is known then, and neither is empty.
    """
    line = LINES.get(node.op)
    if line is None or not device.has_own_kernels or (device.onednn and not line.onednn):
        return None
    tensors = (*(tensor.type for tensor in node.inputs), *node.outputs)
    if any(kind.bound or kind.dtype not in _SUPPORTED or not kind.num_elements for kind in tensors):
        return None
    if line.rule not in _ANY_TYPE and any(kind.dtype == "float64" for kind in tensors):
        return None
    if node.attrs.get("data_format", b"NHWC") != b"NHWC" or node.attrs.get("padding") == b"EXPLICIT":
        return None
    found = line.rule(node, device)
    if found is None or not found.rows or any(not node.inputs[p].type.shape for p in found.rows):
        return None
    return found if found.kind is not Kind.ROWS or all(kind.shape for kind in node.outputs) else None


_ANY_TYPE = (_elementwise, _reshape, _keeps_first_axis)
"""The rules that hold for each type of numbers."""


def in_rows(kind: TensorType, of: int, axes: int) -> TensorType | None:
    """A tensor with a multiple of `of` rows: with as few of its `axes` leading axes merged into one as that takes."""
    shape, rows = known_shape(kind) or (), 1
    for merged, size in enumerate(shape[:axes], 1):
        rows *= size
        if rows and rows % of == 0:
            return TensorType(kind.dtype, (rows, *shape[merged:]))
    return None


class RowSlices(NamedTuple):
    """The slices of a kernel.

    Attributes:
        slicing: how it runs in them.
        rows: how many of each `Slices.of` rows each slice has, but for the last.
        inputs: the types of the inputs of which slices read rows, in rows, as `in_rows` has them.
        outputs: those of the outputs; of sums, none.
    """

    slicing: Slicing
    rows: int
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]


def slices_of(node: Node, slicing: Slicing, rows: int, of: int) -> RowSlices | None:
    """The slices of a kernel, where others have slices of `rows` of each `of` rows. They have as many, or the least
    multiple by a power of two that the bits need. None where there is none.
    """
    inputs = [in_rows(node.inputs[p].type, of, slicing.axes) for p in slicing.rows]
    outputs = [in_rows(kind, of, slicing.axes) for kind in node.outputs] if slicing.kind is Kind.ROWS else []
    known = [kind for kind in (*inputs, *outputs) if kind is not None]
    if len(known) < len(inputs) + len(outputs):
        return None
    while rows < of:
        found = RowSlices(slicing, rows, tuple(known[: len(inputs)]), tuple(known[len(inputs) :]))
        if _holds(found, of):
            return found
        rows *= 2
    return None


def _holds(slices: RowSlices, of: int) -> bool:
    """Whether the bits are those of the whole."""
    slicing, rows, inputs, outputs = slices
    if slicing.kind is Kind.SUM:
        return slicing.unit < rows_of(inputs[0])
    counts = (rows, of % rows or rows)
    elements = max(kind.num_elements or 0 for kind in (*inputs, *outputs)) // of
    if slicing.packets and rows * elements % ELEMENTS:
        return False
    return not outputs or all(slicing.holds(count * (rows_of(outputs[0]) // of)) for count in counts)


def rows_of(kind: TensorType) -> int:
    """The size of a tensor's first axis."""
    return (known_shape(kind) or (0,))[0]


def reads_in_place(node: Node, slices: RowSlices, of: int, made: Mapping[Output, int]) -> bool:
    """Whether what slices of a kernel read in place begins where kernels need it: slices of a tensor, units of a sum.

    Args:
        made: the rows of the slices that tensors exist as, each slice in a buffer of its own.
    """
    for position, kind in zip(slices.slicing.rows, slices.inputs, strict=True):
        row_bytes = (kind.nbytes or 0) // rows_of(kind)
        each = slices.rows * rows_of(kind) // of
        if slices.slicing.kind is Kind.SUM and (gcd(slices.slicing.unit, each) * row_bytes) % _ALIGN_BYTES:
            return False
        if slices.rows < made.get(node.inputs[position], of) and each * row_bytes % _ALIGN_BYTES:
            return False
    return True
