"""Which kernels may run in slices of rows (kernels/slices.py) with the bits of the whole kernel.

A line of `LINES` says what a slice of an op's kernel reads, and from which sizes on the bits are the same, for the
families of kernels for which that is proven; other kernels stay whole. `tests/runtime/test_kernels_in_slices.py`
compares the bits of each line on the CPU that it runs on.

The reasons, in TensorFlow 2.21's sources:

- Element by element: kernels compute in packets (`ELEMENTS`).
- Products add up the products of blocks of the depth, in an order that depends on their sizes
  (kernels/contraction_order.py). A product that adds up rows is computed block by block, in that order
  (kernels/bounded_gradients.py).
- A convolution is such a product of all images. Its gradient with respect to the image is a product for each image,
  which all threads compute where there is one image alone, or enough work (conv_grad_input_ops.h).
- A convolution's gradient with respect to the filter adds the products of shards of images, one after the other
  (conv_grad_filter_ops.cc). Each is such a product too. Slices of one shard each, added in the same order, give the
  same sum as well. Larger ones do not.
- The bias gradient adds rows one after the other, in a block for each thread (redux_functor.h).
- Sums and means of all axes but the last add rows to four sums in turn, where a packet of columns has its own, and one
  after the other otherwise (TensorReduction.h, InnerMostDimPreserver).

Not handled: kernels of GPUs; products of other types than float32, and those of oneDNN; sums over a part of a row, and
Softmax, whose kernels divide rows among threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import lcm, prod
from typing import Final, NamedTuple

from tfswap.ir.graph import Node
from tfswap.kernels.bounded_gradients import filter_gradient, image_gradient, products_of_rows
from tfswap.kernels.close_lines import CLOSE_LINES
from tfswap.kernels.convolutions import adds_in_parallel, images_of_shard
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.products import same_in_rows, same_patches
from tfswap.kernels.slices import ELEMENTS, Kind, RowSums, Slicing, any_number, possible_rows, row_tensors, slices_of
from tfswap.kernels.slices_call import Call, Line, rows_of_images, rows_of_inputs

SUM_WORK: Final = 1 << 18
"""The elements of a thread's block from which on the bias gradient's blocks are summed one by one."""
UNROLLED_ROWS: Final = 16
"""The rows from which on a sum of rows has four sums (TensorReduction.h)."""
PACKET: Final = 8
"""The floats of a packet of AVX."""
OUTER_COST: Final = 128 * 128
"""The multiplications from which on all threads compute a product of a batch together (matmul_op_impl.h)."""


def _elementwise(call: Call) -> Slicing | None:
    """cwise_ops_common.h, relu_op.h: inputs with the output's rows, and those that each row reads."""
    shape = call.output
    reads = [call.input(position) for position in range(len(call.node.inputs))]
    if shape[:1] == (1,) and any(len(read) == len(shape) and read[:2] == (1, 1) != shape[:2] for read in reads):
        of_image = tuple(position for position, read in enumerate(reads) if read[:2] == shape[:2])
        whole = [read for position, read in enumerate(reads) if position not in of_image]
        if any(len(read) == len(shape) and read[1] != 1 for read in whole):
            return None
        return Slicing(of_image, axes=2, multiple=ELEMENTS, image=True) if of_image else None
    rows: list[int] = []
    axes = len(shape)
    for position, read in enumerate(reads):
        if len(read) < len(shape):
            axes = min(axes, len(shape) - len(read))
        elif read[:1] == shape[:1]:
            rows.append(position)
            axes = min(axes, _equal_axes(read, shape))
        elif read[0] == 1:
            axes = min(axes, next((axis for axis, size in enumerate(read) if size > 1), len(read)))
        else:
            return None
    return Slicing(tuple(rows), axes=axes, multiple=ELEMENTS) if rows else None


def _equal_axes(read: Sequence[int], made: Sequence[int]) -> int:
    """The number of leading axes in which two shapes are equal."""
    return next((axis for axis, sizes in enumerate(zip(read, made, strict=True)) if len({*sizes}) > 1), len(made))


def _only_adds_bias(node: Node) -> bool:
    """Whether a fused kernel does no more after its product than to add a bias, and to compare with zero."""
    return node.attrs.get("fused_ops", ()) in ((), (b"BiasAdd",), (b"BiasAdd", b"Relu"))


def _matmul(call: Call) -> Slicing | None:
    """matmul_op_impl.h: rows of the left operand, or of both where the product adds up their rows."""
    node, (rows, columns), left = call.node, call.output, call.input(0)
    if not _only_adds_bias(node):
        return None
    if not node.attrs.get("transpose_a"):
        return _product_rows(call, rows, columns, left[1], 1, same_in_rows)
    if node.attrs.get("transpose_b") or node.op != "MatMul":
        return None
    found = products_of_rows(rows, columns, left[0], call.device)
    if found is None:
        return None
    unit = found.unit
    return Slicing((0, 1), Kind.SUM if unit else Kind.PRODUCTS, unit=unit, bounded=found)


def _product_rows(
    call: Call, rows: int, columns: int, depth: int, each: int, same: Callable[[int, int, int, int, DeviceModel], bool]
) -> Slicing | None:
    """Rows of a product, of which `each` are a row of the tensor.

    Args:
        same: of products.py: whether a number of rows has the bits of the whole.
    """
    device = call.device

    def holds(count: int) -> bool:
        return same(count * each, rows, columns, depth, device)

    return Slicing((0,), holds=holds) if holds(rows // each) else None


def _conv2d(call: Call) -> Slicing | None:
    """conv_ops_impl.h, SpatialConvolution: a product of all images' patches."""
    image, kernel, result = call.input(0), call.input(1), call.output
    if not _only_adds_bias(call.node) or image[3] != kernel[2]:
        return None
    return _product_rows(call, prod(result[:-1]), result[-1], prod(kernel[:3]), result[1] * result[2], same_patches)


def _image_gradient(call: Call) -> Slicing | None:
    """conv_grad_input_ops.h, conv_grad_ops_3d.cc: images by themselves; one image with a part of its columns."""
    kernel, gradient = call.input(1), call.input(2)
    if (found := image_gradient(call)) is not None:
        return Slicing((2,), bounded=found) if gradient[0] > 1 else Slicing((), Kind.WHOLE, bounded=found)
    if len(kernel) != 4:
        return None
    parallel = adds_in_parallel(kernel, gradient, call.node.outputs[0], call.device)

    def holds(images: int) -> bool:
        return parallel or images > 1

    return Slicing((2,), holds=holds, shape=0)


def _filter_gradient(call: Call) -> Slicing | None:
    """conv_grad_filter_ops.cc, conv_grad_ops_3d.cc: a sum over images, if the images are larger than what is added."""
    image, kernel, gradient = call.input(0), call.output, call.input(2)
    read, made = prod(image) + prod(gradient), prod(kernel)
    found = filter_gradient(call)
    if found is None:
        unit = images_of_shard(kernel, gradient, call.node.outputs[0])
        return Slicing((0, 2), Kind.SUM, unit=unit) if len(kernel) == 4 and 2 * made < read else None
    pixels, state = prod(gradient[1:-1]), found.state_elements(prod(kernel[:-1]), kernel[-1])
    unit = found.shard.rows // pixels
    # What a slice holds in addition to the sum, as a sum of shards, and as one that is continued anywhere.
    by_shards, anywhere = read * unit // gradient[0], state + read // gradient[0]
    if 2 * min(by_shards, anywhere) > read:
        return Slicing((), Kind.WHOLE, bounded=found)
    if by_shards <= anywhere:
        return Slicing((0, 2), Kind.SUM, unit=unit, bounded=found)
    return Slicing((0, 2), Kind.PRODUCTS, bounded=found)


def _bias_add_grad(call: Call) -> Slicing | None:
    """redux_functor.h, ReduceOuterDimensions: wide rows are added up in one block."""
    shape, threads = call.input(0), call.device.intra_op_threads
    blocks = 1 if shape[-1] > 32 * threads else threads
    enough = blocks == 1 or prod(shape) // blocks >= SUM_WORK
    return Slicing((0,), Kind.ROW_SUMS, axes=len(shape) - 1, sums=RowSums(blocks)) if enough else None


def _outer_sum(call: Call) -> Slicing | None:
    """reduction_ops_common.h: all axes but the last, on a processor for which Eigen's packets are known."""
    shape, over = call.input(0), call.integers(1)
    leading = set(range(len(shape) - 1))
    if over is None or {axis % len(shape) for axis in over} != leading or not leading or shape[-1] < 2:
        return None
    if call.node.outputs[0].dtype != "float32" or call.device.l1_l2_bytes is None:
        return None
    rows, mean = prod(shape[:-1]), call.node.op == "Mean"
    unrolled = rows >= UNROLLED_ROWS and shape[-1] >= PACKET
    sums = RowSums(4 + rows % 4, True, mean) if unrolled else RowSums(mean=mean)
    return Slicing((0,), Kind.ROW_SUMS, axes=len(shape) - 1, sums=sums)


def _reduction(call: Call) -> Slicing | None:
    """Rows that are reduced by themselves, as far as there are several; sums and means of all axes but the last."""
    over, axes = call.integers(1), len(call.input(0))
    if over is None or not over:
        return None
    reduced = {axis % axes for axis in over}
    if reduced != set(range(min(reduced), axes)) or 0 in reduced:
        return _outer_sum(call) if call.node.op in ("Mean", "Sum") else None
    return Slicing((0,), axes=min(reduced) if max(over) < 0 else 1, holds=_several)


def _several(rows: int) -> bool:
    """Axes of one are dropped, and a single row is reduced as a vector is, in parts (reduction_ops_common.cc)."""
    return rows > 1


def _softmax(call: Call) -> Slicing | None:
    """softmax_op_functor.h: rows of whole packets. The reciprocals of the sums are computed in packets too."""
    shape = call.output
    if shape[-1] % PACKET:
        return None
    return Slicing((0,), axes=len(shape) - 1, multiple=lcm(ELEMENTS, PACKET * shape[-1]))


def _batch_matmul(call: Call) -> Slicing | None:
    """matmul_op_impl.h: a product after the other, each computed by all threads, or by one if they are small."""
    (*batch, rows, depth), right = call.input(0), call.input(1)
    if prod(batch) < 2 or prod(right[:-2]) not in (1, prod(batch)) or (len(right) > 2 and [*right[:-2]] != batch):
        return None
    sides = rows, depth, call.output[-1]
    parallel = min(sides) > 1 and prod(sides) > OUTER_COST
    leading = (0, 1) if len(right) > 2 else (0,)
    return Slicing(leading, axes=len(batch), holds=any_number if parallel else _several)


def _cross_entropy(_: Call) -> Slicing | None:
    """xent_op.h: rows of logits and labels; the exponentials of all rows are computed in packets."""
    return Slicing((0, 1), multiple=ELEMENTS)


def _bias_add(call: Call) -> Slicing | None:
    return Slicing((0,), axes=len(call.output) - 1)


def _reshape(call: Call) -> Slicing | None:
    return Slicing((0,), axes=max(len(call.input(0)), len(call.output)), shape=1)


def _keeps_first_axis(call: Call) -> Slicing | None:
    """ExpandDims, Squeeze: views with the same first axis."""
    return Slicing((0,)) if call.input(0)[:1] == call.output[:1] > (1,) else None


def _concat(call: Call) -> Slicing | None:
    """concat_op.cc: along another axis than the first."""
    count = len(call.node.inputs) - 1
    axes = _axes_before(call, count)
    if axes == 1 and call.output[0] == 1 and (call.integers(count) or (0,))[0] > 1:
        return Slicing(tuple(range(count)), axes=2, image=True)
    return Slicing(tuple(range(count)), axes=axes) if axes else None


def _split(call: Call) -> Slicing | None:
    """split_op.cc: along another axis than the first."""
    axes = _axes_before(call, 0)
    return Slicing((1,), axes=axes) if axes else None


def _axes_before(call: Call, position: int) -> int:
    """How many axes may be merged before the one that an input names, from the last one backwards if there are more
    than one.
    """
    axis = call.integers(position)
    if axis is None:
        return 0
    before = axis[0] % len(call.output)
    return before if axis[0] < 0 else min(before, 1)


def _gather(call: Call) -> Slicing | None:
    """gather_functor.h: rows of the indices."""
    axis = call.integers(2) if len(call.node.inputs) > 2 else (0,)
    if axis != (0,) or call.node.attrs.get("batch_dims") or not call.input(1):
        return None
    return Slicing((1,), axes=len(call.input(1)))


def _slice(call: Call) -> Slicing | None:
    """slice_op.cc: of all rows. The new sizes are int32, as places are then."""
    int32 = call.node.inputs[1].type.dtype == "int32"
    image = len(call.output) > 2 and call.output[0] == 1
    whole = 2 if image else 1
    if not int32 or call.input(0)[:whole] != call.output[:whole]:
        return None
    return Slicing((0,), axes=whole, shape=2, image=image)


def _pad(call: Call) -> Slicing | None:
    """pad_op.cc: each row."""
    return Slicing((0,)) if call.input(0)[0] == call.output[0] else None


def _transpose(call: Call) -> Slicing | None:
    """transpose_op.cc: the axes behind the first."""
    order = call.integers(1)
    return Slicing((0,)) if order is not None and order[:1] == (0,) else None


def _pack(call: Call) -> Slicing | None:
    """pack_op.cc: along another axis than the first."""
    return Slicing(tuple(range(len(call.node.inputs)))) if call.axis(len(call.output)) else None


def _unpack(call: Call) -> Slicing | None:
    """unpack_op.cc: along another axis than the first."""
    return Slicing((0,)) if call.axis(len(call.input(0))) else None


def _repeat(call: Call) -> Slicing | None:
    """tile_ops.cc, broadcast_to_op.cc: rows that are all the same, or each of one row."""
    read, made = call.input(0), call.output
    if len(read) == len(made) > 1 and read[:2] == (1, 1) and made[0] == 1:
        return Slicing((), axes=2, shape=1, image=True)
    if len(read) < len(made) or read[:1] == (1,):
        return Slicing((), shape=1)
    return Slicing((0,), axes=_equal_axes(read, made), shape=1) if read[0] == made[0] else None


_ELEMENTWISE = Line(_elementwise, onednn=True, any_type=True)
_COPY = {"onednn": True, "any_type": True}

LINES: dict[str, Line] = {
    "Abs": _ELEMENTWISE,
    "Add": _ELEMENTWISE,
    "AddN": _ELEMENTWISE,
    "AddV2": _ELEMENTWISE,
    "Cast": _ELEMENTWISE,
    "Elu": _ELEMENTWISE,
    "EluGrad": _ELEMENTWISE,
    "Equal": _ELEMENTWISE,
    "Erf": _ELEMENTWISE,
    "Erfc": _ELEMENTWISE,
    "Exp": _ELEMENTWISE,
    "Expm1": _ELEMENTWISE,
    "Floor": _ELEMENTWISE,
    "Greater": _ELEMENTWISE,
    "GreaterEqual": _ELEMENTWISE,
    "LeakyRelu": _ELEMENTWISE,
    "LeakyReluGrad": _ELEMENTWISE,
    "Less": _ELEMENTWISE,
    "LessEqual": _ELEMENTWISE,
    "Log": _ELEMENTWISE,
    "Log1p": _ELEMENTWISE,
    "LogicalAnd": _ELEMENTWISE,
    "LogicalNot": _ELEMENTWISE,
    "LogicalOr": _ELEMENTWISE,
    "Maximum": _ELEMENTWISE,
    "Minimum": _ELEMENTWISE,
    "Mul": _ELEMENTWISE,
    "Neg": _ELEMENTWISE,
    "NotEqual": _ELEMENTWISE,
    "RealDiv": _ELEMENTWISE,
    "Reciprocal": _ELEMENTWISE,
    "Relu": _ELEMENTWISE,
    "Relu6": _ELEMENTWISE,
    "Relu6Grad": _ELEMENTWISE,
    "ReluGrad": _ELEMENTWISE,
    "Rsqrt": _ELEMENTWISE,
    "RsqrtGrad": _ELEMENTWISE,
    "SelectV2": _ELEMENTWISE,
    "Sigmoid": _ELEMENTWISE,
    "SigmoidGrad": _ELEMENTWISE,
    "Sign": _ELEMENTWISE,
    "Softplus": _ELEMENTWISE,
    "SoftplusGrad": _ELEMENTWISE,
    "Sqrt": _ELEMENTWISE,
    "SqrtGrad": _ELEMENTWISE,
    "Square": _ELEMENTWISE,
    "SquaredDifference": _ELEMENTWISE,
    "Sub": _ELEMENTWISE,
    "Tanh": _ELEMENTWISE,
    "TanhGrad": _ELEMENTWISE,
    "_UnaryOpsComposition": _ELEMENTWISE,
    "AvgPool": Line(rows_of_images(0)),
    "AvgPoolGrad": Line(rows_of_images(1, shape=0)),
    "BatchMatMulV2": Line(_batch_matmul),
    "BiasAdd": Line(_bias_add),
    "BiasAddGrad": Line(_bias_add_grad),
    "BroadcastTo": Line(_repeat, **_COPY),
    "ConcatV2": Line(_concat, **_COPY),
    "Conv2D": Line(_conv2d),
    "_FusedConv2D": Line(_conv2d),
    "Conv2DBackpropFilter": Line(_filter_gradient),
    "Conv2DBackpropInput": Line(_image_gradient),
    "Conv3DBackpropFilterV2": Line(_filter_gradient),
    "Conv3DBackpropInputV2": Line(_image_gradient),
    "ExpandDims": Line(_keeps_first_axis, **_COPY),
    "Gather": Line(_gather, **_COPY),
    "GatherV2": Line(_gather, **_COPY),
    "MatMul": Line(_matmul),
    "_FusedMatMul": Line(_matmul),
    "Max": Line(_reduction, onednn=True),
    "MaxPool": Line(rows_of_images(0)),
    "MaxPoolGrad": Line(rows_of_images(0, 1, 2)),
    "Mean": Line(_reduction, onednn=True),
    "Min": Line(_reduction, onednn=True),
    "Pack": Line(_pack, **_COPY),
    "Pad": Line(_pad, **_COPY),
    "Reshape": Line(_reshape, **_COPY),
    "ResizeNearestNeighbor": Line(rows_of_inputs(0), onednn=True),
    "ResizeNearestNeighborGrad": Line(rows_of_inputs(0), onednn=True),
    "Slice": Line(_slice, **_COPY),
    "Softmax": Line(_softmax),
    "SparseSoftmaxCrossEntropyWithLogits": Line(_cross_entropy, onednn=True),
    "Split": Line(_split, **_COPY),
    "Squeeze": Line(_keeps_first_axis, **_COPY),
    "Sum": Line(_reduction, onednn=True),
    "Tile": Line(_repeat, **_COPY),
    "Transpose": Line(_transpose, **_COPY),
    "Unpack": Line(_unpack, **_COPY),
}
"""The ops whose kernels may run in slices."""

_SUPPORTED = ("float32", "float64", "int32", "int64", "bool", "uint8")


def slicing_of(
    node: Node, device: DeviceModel, constants: Mapping[Node, tuple[int, ...]], *, close: bool = False
) -> Slicing | None:
    """How a kernel may run in slices with the same bits; None where it may not, or where that is not proven.

    Every size of what it reads and makes is known then, and neither is empty.

    Args:
        constants: the values of small constants, as `Graph.small_constants` has them.
        close: also with other last bits.
    """
    found = _slicing(node, device, constants, CLOSE_LINES.get(node.op), exact=False) if close else None
    found = found or _slicing(node, device, constants, LINES.get(node.op), exact=not close)
    return found._replace(multiple=1) if close and found is not None else found


class Sliceable(NamedTuple):
    """What slices of a kernel would free.

    Attributes:
        close: whether last bits may differ then.
        nbytes: of what it reads and makes by rows. Each of n slices holds an n-th of it.
    """

    close: bool
    nbytes: int


def sliceable(node: Node, device: DeviceModel, constants: Mapping[Node, tuple[int, ...]]) -> Sliceable | None:
    """What slices of a kernel would free; None where it may not run in slices."""
    for close in (False, True):
        slicing = slicing_of(node, device, constants, close=close)
        if slicing is not None and any(slices_of(node, slicing, 1, of) for of in possible_rows(node, slicing)):
            return Sliceable(close, sum(kind.nbytes or 0 for kind in row_tensors(node, slicing)))
    return None


def _slicing(
    node: Node, device: DeviceModel, constants: Mapping[Node, tuple[int, ...]], line: Line | None, *, exact: bool
) -> Slicing | None:
    if line is None or not device.has_own_kernels or (exact and device.onednn and not line.onednn):
        return None
    tensors = (*(tensor.type for tensor in node.inputs), *node.outputs)
    if any(kind.bound or kind.dtype not in _SUPPORTED or not kind.num_elements for kind in tensors):
        return None
    if exact and not line.any_type and any(kind.dtype == "float64" for kind in tensors):
        return None
    if node.attrs.get("data_format", b"NHWC") not in (b"NHWC", b"NDHWC") or node.attrs.get("padding") == b"EXPLICIT":
        return None
    found = line.rule(Call(node, device, constants))
    if found is None or any(not node.inputs[p].type.shape for p in found.rows):
        return None
    return found if found.kind is not Kind.ROWS or all(kind.shape for kind in node.outputs) else None
