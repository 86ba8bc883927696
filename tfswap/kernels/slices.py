"""Which kernels may run in slices of rows with the bits of the whole kernel.

A row is what is at one place of a tensor's first axis. A line of `LINES` says what a slice of an op's kernel reads, and
from which sizes on the bits are the same, for the families of kernels for which that is proven; other kernels stay
whole. `tests/runtime/test_kernels_in_slices.py` compares the bits of each line on the CPU that it runs on.

The reasons, in TensorFlow 2.21's sources:

- Element by element: kernels compute in packets (`ELEMENTS`).
- Products add up the products of blocks of the depth, whose size depends on the depth alone, unless the depth is
  divided among threads. That is so where the work is too little for all threads (TensorContractionThreadPool.h,
  numThreads and shardByInnerDim). `_least_rows` has the rows from which on it suffices.
- A convolution is such a product of all images. Its gradient with respect to the image is a product for each image,
  which all threads compute where there is one image alone, or enough work (conv_grad_input_ops.h).
- A convolution's gradient with respect to the filter adds the products of shards of images, one after the other
  (conv_grad_filter_ops.cc). So slices of one shard each, added in the same order, give the same sum. Larger ones do
  not.
- The bias gradient adds rows one after the other, in a block for each thread (redux_functor.h).

Not handled: kernels of GPUs; products of other types than float32, and those of oneDNN; sums over a part of a row, and
Softmax, whose kernels divide rows among threads; products that add up rows (the gradient of a dense weight).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from enum import Enum, auto
from math import gcd, prod
from typing import Final, NamedTuple

from tfswap.ir.graph import Node, Output
from tfswap.ir.types import TensorType
from tfswap.kernels.convolutions import adds_in_parallel, images_of_shard
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.temporaries import TENSOR_ALIGN_BYTES as _ALIGN_BYTES
from tfswap.kernels.temporaries import ceil_div, known_shape

ELEMENTS: Final = 64
"""A slice has a multiple of this many elements. Kernels compute several elements in one packet, and what is left over
one by one, with other last bits for some functions (Eigen's TensorExecutor.h): a multiple leaves nothing over. It also
aligns slices of each type."""
THREAD_WORK: Final = 2 << 20
"""The multiplications that are work for one thread. TensorContractionThreadPool.h counts 100,000 cycles for a thread,
and a cycle for 16 multiplications."""
DEPTH_BLOCK: Final = 256
"""The least depth of a block of a larger product, of which that work is counted."""
LEAST_SIDE: Final = 8
"""Products of fewer rows or columns may divide their depth, however much work they are."""
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


class Slicing(NamedTuple):
    """How a kernel runs in slices.

    Attributes:
        rows: the positions of the inputs of which a slice reads its own rows. It reads all of the others.
        unit: slices have a multiple of this number of rows. Of Kind.SUM each kernel has just as many, whatever slices
            have. Rows are those of the output, of sums those of the first sliced input.
        least: the least rows of a slice.
        shape: the position of the input that has the output's shape.
        blocks: of Kind.ROW_SUMS, the number of sums.
    """

    rows: tuple[int, ...]
    kind: Kind = Kind.ROWS
    unit: int = 1
    least: int = 1
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


def _packets(kind: TensorType) -> int:
    return rows_of_packets(known_shape(kind) or (0, 0))


def _elementwise(node: Node, _: DeviceModel) -> Slicing | None:
    """cwise_ops_common.h, relu_op.h: inputs with the output's rows, and those that each row reads."""
    shape = known_shape(node.outputs[0]) or (0,)
    rows: list[int] = []
    for position, tensor in enumerate(node.inputs):
        read = known_shape(tensor.type)
        if read is None:
            return None
        if len(read) == len(shape) and read[0] == shape[0]:
            rows.append(position)
        elif len(read) == len(shape) and read[0] != 1:
            return None
    return Slicing(tuple(rows), unit=_packets(node.outputs[0]))


def _rows_of(*rows: int, shape: int | None = None) -> Rule:
    """Each row of the output is computed from the same rows of these inputs, by itself."""
    return lambda node, _: Slicing(rows, shape=shape)


def _least_rows(depth: int, columns: int, device: DeviceModel) -> int | None:
    """The rows from which on a product is computed by all threads, none of which has a part of the depth alone."""
    if columns < LEAST_SIDE:
        return None
    work = THREAD_WORK * (device.intra_op_threads + 1)
    return max(LEAST_SIDE, ceil_div(work, columns * min(depth, DEPTH_BLOCK)))


def _only_adds_bias(node: Node) -> bool:
    """Whether a fused kernel does no more after its product than to add a bias, and to compare with zero."""
    return node.attrs.get("fused_ops", ()) in ((), (b"BiasAdd",), (b"BiasAdd", b"Relu"))


def _matmul(node: Node, device: DeviceModel) -> Slicing | None:
    """matmul_op_impl.h: rows of the left operand."""
    left, result = known_shape(node.inputs[0].type), known_shape(node.outputs[0])
    if node.attrs.get("transpose_a") or left is None or result is None or not _only_adds_bias(node):
        return None
    least = _least_rows(left[1], result[1], device)
    return None if least is None else Slicing((0,), least=least)


def _conv2d(node: Node, device: DeviceModel) -> Slicing | None:
    """conv_ops_impl.h, SpatialConvolution: a product of all images' patches."""
    image, kernel, result = (known_shape(t) for t in (node.inputs[0].type, node.inputs[1].type, node.outputs[0]))
    if image is None or kernel is None or result is None or not _only_adds_bias(node):
        return None
    least = _least_rows(prod(kernel[:3]), kernel[3], device)
    if least is None or image[3] != kernel[2]:
        return None
    return Slicing((0,), least=ceil_div(least, result[1] * result[2]))


def _conv2d_backprop_input(node: Node, device: DeviceModel) -> Slicing | None:
    kernel, gradient = known_shape(node.inputs[1].type), known_shape(node.inputs[2].type)
    if kernel is None or gradient is None:
        return None
    parallel = adds_in_parallel(kernel, gradient, node.outputs[0], device)
    return Slicing((2,), least=1 if parallel else 2, shape=0)


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
    return Slicing((0,), Kind.ROW_SUMS, blocks=blocks) if enough else None


def _cross_entropy(node: Node, _: DeviceModel) -> Slicing | None:
    """xent_op.h: rows of logits and labels; the exponentials of all rows are computed in packets."""
    return Slicing((0, 1), unit=_packets(node.inputs[0].type))


def _reshape(node: Node, _: DeviceModel) -> Slicing | None:
    return Slicing((0,), shape=1)


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
    "BiasAdd": Line(_rows_of(0)),
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


def leading_rows(node: Node, slicing: Slicing) -> int:
    """The number of rows that `Slicing` counts."""
    kind = node.outputs[0] if slicing.kind is Kind.ROWS else node.inputs[slicing.rows[0]].type
    return (known_shape(kind) or (0,))[0]


def runs_in_slices(node: Node, slicing: Slicing, rows: int, of: int) -> bool:
    """Whether a kernel can run in slices of `rows` of each `of` rows: all tensors of which slices read or make rows
    have a multiple of `of` rows, and slices have as many as the bits need.
    """
    sliced = [node.inputs[p].type for p in slicing.rows]
    sliced += node.outputs if slicing.kind is Kind.ROWS else ()
    counts = [(known_shape(kind) or (0,))[0] for kind in sliced]
    if any(count == 0 or count % of for count in counts):
        return False
    if slicing.kind is Kind.SUM:
        return slicing.unit < leading_rows(node, slicing)
    each = leading_rows(node, slicing) // of
    last = of % rows or rows
    return rows * each % slicing.unit == 0 and last * each >= slicing.least


def reads_in_place(node: Node, slicing: Slicing, rows: int, of: int, made: Container[Output]) -> bool:
    """Whether what slices of a kernel read in place begins where kernels need it: slices of a tensor, units of a sum.

    Args:
        made: the tensors that exist as slices, each in a buffer of its own.
    """
    for tensor in (node.inputs[position] for position in slicing.rows):
        count = (known_shape(tensor.type) or (0,))[0]
        row_bytes = (tensor.type.nbytes or 0) // count
        each = rows * count // of
        if slicing.kind is Kind.SUM and (gcd(slicing.unit, each) * row_bytes) % _ALIGN_BYTES:
            return False
        if tensor not in made and each * row_bytes % _ALIGN_BYTES:
            return False
    return True
