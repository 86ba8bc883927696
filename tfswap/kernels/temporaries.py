"""The temporaries of the kernels that take any: their sizes, and their order among the outputs.

Each function follows one source file of TensorFlow 2.21 and gives (events, exact): events as in
`kernels.KernelMemory.events`; exact is False where the answer bounds from above what timing or unknown values
decide. Of oneDNN's kernels there is a third, what they asked for where they were measured. Shapes must be
known; a kernel whose shapes are not is taken as one without temporaries, not exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod
from typing import NamedTuple

from tfswap.ir.types import ELEMENT_BYTES, HALVES, TensorType
from tfswap.kernels.columns import conv3d_columns, most_columns
from tfswap.kernels.device import DeviceModel

Event = tuple[str, int]
Events = tuple[Sequence[Event], bool]
Measured = tuple[Sequence[Event], bool, Sequence[Event]]

OUT0: Event = ("out", 0)


class Facts(NamedTuple):
    """All that a rule may look at: the arguments of `kernels.kernel_memory`."""

    attrs: Mapping[str, object]
    inputs: Sequence[TensorType]
    outputs: Sequence[TensorType]
    device: DeviceModel
    values: Mapping[int, tuple[int, ...]]


def known_shape(kind: TensorType) -> tuple[int, ...] | None:
    """The shape with every dimension known, or None."""
    shape = kind.shape
    if shape is None or None in shape:
        return None
    return shape  # type: ignore[return-value]


def _certain_shape(kind: TensorType) -> tuple[int, ...] | None:
    """The shape that the tensor certainly has, or None: bounds that are equal don't make a view."""
    return None if kind.bound else known_shape(kind)


def _element_bytes(kind: TensorType) -> int:
    return ELEMENT_BYTES.get(kind.dtype, 0)


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _temporaries_after_output(sizes: Sequence[int], exact: bool = True) -> Events:
    return (OUT0, *(("temp", size) for size in sizes)), exact


_UNKNOWN: Events = ((OUT0,), False)

ONEDNN_SCRATCH_BYTES = 64 << 10
"""A thread's scratchpad in oneDNN's kernels: a bound for convolutions, and for small products."""
_CONVOLUTION_BYTES, _CONVOLUTION_THREAD_BYTES = 4096, 4120
"""What each convolution asked for on CPUs with AVX-512, of any shape: so much, and so much for a thread."""


def onednn(
    facts: Facts,
    temporaries: Sequence[int] = (),
    thread_bytes: int = ONEDNN_SCRATCH_BYTES,
    usual: Sequence[int] = (),
) -> Measured:
    """oneDNN's kernels lay out their own scratchpads, by CPU and version: bounded, never exact.

    Args:
        usual: the temporaries that they had where they were measured.
    """
    scratch = thread_bytes * facts.device.intra_op_threads
    events, exact = _temporaries_after_output([*temporaries, scratch], exact=False)
    return events, exact, _temporaries_after_output(usual)[0]


def _onednn_convolution(facts: Facts) -> Measured:
    return onednn(facts, usual=[_CONVOLUTION_BYTES + _CONVOLUTION_THREAD_BYTES * facts.device.intra_op_threads])


class Product(NamedTuple):
    """`batch` products of matrices, of `rows` by `inner` and `inner` by `columns`, float32.

    Attributes:
        turned: of each of the two, whether it lies in memory transposed.
    """

    batch: int
    rows: int
    inner: int
    columns: int
    turned: tuple[bool, bool]


_ROWS, _COLUMNS, _WIDE = 256, 64, 512
_INNER, _LONE_INNER = 512, 1024  # with blocks of both matrices, of the second alone


def onednn_product_bytes(product: Product) -> int:
    """A bound of what each thread has as scratch, from measurements (brgemm_matmul_utils.cpp, init_scratchpad).

    A thread copies blocks of matrices that lie transposed, and of a wide second one. A lone product may be split along
    what is summed over as well, and then has blocks of partial sums.
    """
    rows, inner = min(_up_to_16(product.rows), _ROWS), _up_to_16(product.inner)
    first, second = product.turned
    elements = rows * (min(inner, _INNER) + 16) if first else 0
    if second or product.columns >= _WIDE:
        elements += _COLUMNS * min(inner, _INNER if first else _LONE_INNER)
    if product.batch == 1 and product.inner >= _INNER:
        elements += rows * _COLUMNS
    return max(ONEDNN_SCRATCH_BYTES, 4 * elements + 1024)


def _up_to_16(number: int) -> int:
    return 16 * _ceil_div(number, 16)


# --- convolutions --------------------------------------------------------------------------------------

_WORKING_SET_BYTES = 30 << 20  # conv_grad_*_ops: the L3 cache that image shards are sized for
_THREAD_WORK_BYTES = 256 << 10  # conv_grad_input_ops.h: the L2 cache; less work a thread is done in shards


def _image_products(filter_shape: tuple[int, ...], gradient_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(pixels of an output image, elements under one filter, output channels)."""
    return gradient_shape[1] * gradient_shape[2], prod(filter_shape[:3]), filter_shape[3]


def conv2d(facts: Facts) -> Events | Measured:
    """conv_ops*.h: Eigen's spatial convolution, whose packing is outside the arena."""
    image, kernel = facts.inputs[0], facts.inputs[1]
    if image.shape and kernel.shape and image.shape[-1] != kernel.shape[2]:  # groups: split, and put together
        copies = [kind.nbytes or 0 for kind in (image, kernel, facts.outputs[0])]
        return _temporaries_after_output(copies, exact=not facts.device.onednn)
    return _onednn_convolution(facts) if facts.device.onednn else ((OUT0,), True)


def conv3d(facts: Facts) -> Events | Measured:
    """conv_ops_3d.cc: Eigen's cuboid convolution, whose packing is outside the arena."""
    return _onednn_convolution(facts) if facts.device.onednn else ((OUT0,), True)


def _is_onednn_gradient(facts: Facts) -> bool:
    """Whether oneDNN has the gradient's kernel: not where padding is explicit (mkl_layout_pass.cc)."""
    explicit = facts.attrs.get("padding") == b"EXPLICIT"
    return facts.device.onednn and facts.outputs[0].dtype in facts.device.onednn_dtypes and not explicit


def conv2d_backprop_input(facts: Facts) -> Events | Measured:
    """conv_grad_input_ops.h, Conv2DCustomBackpropInputOp: a column buffer for a shard of images."""
    kernel, gradient = known_shape(facts.inputs[1]), known_shape(facts.inputs[2])
    if kernel is None or gradient is None:
        return _UNKNOWN
    if _is_onednn_gradient(facts):
        return onednn(facts)
    size = _element_bytes(facts.outputs[0])
    pixels, window, channels = _image_products(kernel, gradient)
    work = pixels * channels + window * channels + pixels * window
    parallel = gradient[0] == 1 or work // facts.device.intra_op_threads >= _THREAD_WORK_BYTES // size
    shard = 1 if parallel else _ceil_div(_WORKING_SET_BYTES // size, work)
    return _temporaries_after_output([shard * pixels * window * size], exact=not facts.device.onednn)


def conv2d_backprop_filter(facts: Facts) -> Events | Measured:
    """conv_grad_filter_ops.cc, Conv2DCustomBackpropFilterOp: the same, sized for the cache alone."""
    kernel, gradient = known_shape(facts.outputs[0]), known_shape(facts.inputs[2])
    if kernel is None or gradient is None:
        return _UNKNOWN
    if _is_onednn_gradient(facts):
        return onednn(facts)
    size = _element_bytes(facts.outputs[0])
    pixels, window, channels = _image_products(kernel, gradient)
    work = pixels * window + pixels * channels + window * channels
    shard = _ceil_div(_WORKING_SET_BYTES // size, work)
    return _temporaries_after_output([shard * pixels * window * size], exact=not facts.device.onednn)


def joint_gradients(facts: Facts) -> Events:
    """mkl_conv_grad_filter_ops.cc: the gradient of the bias is allocated behind the filter's."""
    return (OUT0, ("out", 1), *onednn(facts)[0][1:]), False


def conv3d_backprop_input(facts: Facts) -> Events | Measured:
    """conv_grad_ops_3d.cc, Conv3DCustomBackpropInputOp: a column buffer for a shard of images."""
    return _conv3d_backprop(facts, facts.outputs[0], facts.inputs[1], one_by_one=True)


def conv3d_backprop_filter(facts: Facts) -> Events | Measured:
    """conv_grad_ops_3d.cc, Conv3DCustomBackpropFilterOp: the same; of half precision, Eigen's without a buffer."""
    if not _is_onednn_gradient(facts) and facts.outputs[0].dtype not in ("float32", "float64"):
        return (OUT0,), True
    return _conv3d_backprop(facts, facts.inputs[0], facts.outputs[0], one_by_one=False)


def _conv3d_backprop(facts: Facts, volume: TensorType, kernel: TensorType, one_by_one: bool) -> Events | Measured:
    if _is_onednn_gradient(facts):
        return onednn(facts)
    gradient, window = known_shape(facts.inputs[2]), known_shape(kernel)
    if gradient is None or window is None or volume.num_elements is None:
        return _UNKNOWN
    size = _element_bytes(facts.outputs[0])
    cache = facts.device.l3_cache_bytes
    columns = conv3d_columns(gradient, window, volume.num_elements, (cache or 1) // size, one_by_one=one_by_one)
    if cache is None and columns and not (one_by_one and gradient[0] == 1):
        # However many images a cache holds, they are of no use above this.
        most = most_columns(gradient, window, volume.num_elements)
        return _temporaries_after_output([most // columns * columns * size], exact=False)
    return _temporaries_after_output([columns * size] if columns else [])


_PACKET_BYTES = 32  # the wheels are built for AVX


def _depthwise_padded(kernel: tuple[int, ...], size: int) -> int:
    """Bytes of a filter (or an input patch) whose channels are padded to whole packets."""
    packet = max(1, _PACKET_BYTES // size)
    return kernel[0] * kernel[1] * _ceil_div(kernel[2] * kernel[3], packet) * packet * size


def _depthwise_shards(facts: Facts) -> int:
    return max(1, facts.device.intra_op_threads)


def depthwise(facts: Facts) -> Events:
    """depthwise_conv_op.cc: a padded filter, if channels do not fill packets; a patch for each shard."""
    kernel = known_shape(facts.inputs[1])
    if kernel is None:
        return _UNKNOWN
    if facts.device.kind == "gpu":
        return (OUT0,), False
    size = _element_bytes(facts.outputs[0])
    padded = _depthwise_padded(kernel, size)
    filters = 1 if padded != prod(kernel) * size else 0
    return _temporaries_after_output([padded] * (filters + _depthwise_shards(facts)), exact=False)


def depthwise_backprop_input(facts: Facts) -> Events:
    """depthwise_conv_grad_op.cc: as forward, and a row of input channels for each shard."""
    kernel = known_shape(facts.inputs[1])
    if kernel is None:
        return _UNKNOWN
    if facts.device.kind == "gpu":
        return (OUT0,), False
    size = _element_bytes(facts.outputs[0])
    padded = _depthwise_padded(kernel, size)
    filters = 1 if padded != prod(kernel) * size else 0
    row = padded // (kernel[0] * kernel[1])
    sizes = [padded] * filters + [padded, row] * _depthwise_shards(facts)
    return _temporaries_after_output(sizes, exact=False)


def depthwise_backprop_filter(facts: Facts) -> Events:
    """depthwise_conv_grad_op.cc: one partial filter gradient for each image, then as forward."""
    kernel, image = known_shape(facts.outputs[0]), known_shape(facts.inputs[0])
    if kernel is None or image is None:
        return _UNKNOWN
    padded = _depthwise_padded(kernel, _element_bytes(facts.outputs[0]))
    return _temporaries_after_output([image[0] * padded, *[padded] * _depthwise_shards(facts)], exact=False)


# --- pooling -------------------------------------------------------------------------------------------


def max_pool(facts: Facts) -> Events | Measured:
    """maxpooling_op.cc takes nothing; oneDNN remembers where each maximum was, a byte each."""
    if facts.device.kind == "cpu" and facts.device.onednn:
        places = facts.outputs[0].num_elements or 0
        return onednn(facts, [places], usual=[places])
    return (OUT0,), facts.device.kind == "cpu"


def max_pool_with_places(facts: Facts) -> Measured:
    """mkl_maxpooling_op.cc: the places are its second output (passes/prepare/pool_argmax.py)."""
    (out, *scratch), exact, usual = onednn(facts)
    return (out, ("out", 1), *scratch), exact, (*usual, ("out", 1))


def max_pool_grad_from_places(facts: Facts) -> Measured:
    """mkl_maxpooling_op.cc: nothing is pooled again."""
    return onednn(facts)


def max_pool_grad(facts: Facts) -> Events:
    """maxpooling_op.cc, MaxPoolingGradOp: pools again, to find each maximum's 64-bit position."""
    pooled = facts.inputs[1]
    if pooled.nbytes is None:
        return _UNKNOWN
    if facts.device.kind == "gpu":
        return (OUT0,), False
    positions = (pooled.num_elements or 0) * 8
    return (("temp", pooled.nbytes), ("temp", positions), OUT0), not facts.device.onednn


# --- reductions ----------------------------------------------------------------------------------------


def _runs(shape: tuple[int, ...], reduced: Sequence[bool]) -> int:
    """Alternating runs of reduced and kept dimensions; a dimension of 1 joins the run before it."""
    runs = 0
    last: bool | None = None
    for dim, flag in zip(shape, reduced, strict=True):
        if dim == 1 or flag == last:
            continue
        runs, last = runs + 1, flag
    return runs


def _possible_reductions(facts: Facts) -> list[tuple[bool, ...]]:
    """Which dimensions may have been reduced, given what is known."""
    shape = known_shape(facts.inputs[0])
    result = known_shape(facts.outputs[0])
    if shape is None or result is None:
        return []
    rank = len(shape)
    axes = facts.values.get(1)
    if axes is not None:
        chosen: set[int] = {axis % rank for axis in axes} if rank else set()
        return [tuple(i in chosen for i in range(rank))]
    if len(result) == rank:
        return [tuple(a != b for a, b in zip(shape, result, strict=True))]
    options: list[tuple[bool, ...]] = []
    for kept in combinations(range(rank), len(result)):
        if tuple(shape[i] for i in kept) == result:
            options.append(tuple(i not in kept for i in range(rank)))
    return options


def reduction(facts: Facts) -> Events:
    """reduction_ops_common.h: more than three runs of dimensions are transposed to two first."""
    options = _possible_reductions(facts)
    shape = known_shape(facts.inputs[0])
    if not options or shape is None:
        return _UNKNOWN
    answers = {_runs(shape, option) > 3 for option in options}
    if facts.device.kind == "gpu":
        return (OUT0,), False
    if True in answers:
        return _temporaries_after_output([facts.inputs[0].nbytes or 0], exact=len(answers) == 1)
    return (OUT0,), True


def _partial_rows(facts: Facts, kind: TensorType) -> int:
    """redux_functor.h, ReduceOuterDimensions: bytes of partial sums; wide rows have none."""
    shape = known_shape(kind) or ()
    threads = facts.device.intra_op_threads
    inner = shape[-1] if shape else 0
    outer = prod(shape[:-1])
    if inner > threads * 32 or inner * outer == 0 or outer == 1:
        return 0
    blocks = min(outer, _ceil_div(outer * inner, _ceil_div(2000, inner)), threads)
    return blocks * inner * (8 if kind.dtype == "float64" else 4)  # 16-bit floats are summed in float32


def bias_add_grad(facts: Facts) -> Events:
    """bias_op.cc: narrow rows are summed in one partial row for each thread."""
    gradient = facts.inputs[0]
    if known_shape(gradient) is None:
        return (OUT0,), False
    if facts.attrs.get("data_format") == b"NCHW":
        return (OUT0,), False
    rows = _partial_rows(facts, gradient)
    if gradient.dtype == "bfloat16":  # summed as it is
        rows //= 2
    return _temporaries_after_output([rows] if rows else [])


def fused_batch_norm_grad(facts: Facts) -> Events:
    """fused_batch_norm_op.cc: a row or two of coefficients, and partial sums three times or twice.

    What is computed of 16-bit floats is in float32, and as large as twice the input.
    """
    outs = tuple(("out", index) for index in range(len(facts.outputs)))
    channels = facts.inputs[2].nbytes
    if channels is not None and facts.device.onednn:
        return (*outs, *[("temp", channels)] * 3), False
    if channels is None or facts.device.kind == "gpu":
        return outs, False
    training = bool(facts.attrs.get("is_training", True))
    coefficients = 1 if training else 2
    events: list[Event] = [*outs, *[("temp", channels)] * coefficients]
    if facts.outputs[0].dtype in HALVES:  # the centred input, in float32
        events.append(("temp", 4 * (facts.inputs[1].num_elements or 0)))
    first = len(events) - len(outs)
    rows = _partial_rows(facts, facts.inputs[1])
    if rows:
        for index in range(3 if training else 2):
            events += [("temp", rows), ("free", first + index)]
    return events, facts.attrs.get("data_format") != b"NCHW"


# --- contractions --------------------------------------------------------------------------------------


def matmul(facts: Facts) -> Events | Measured:
    """matmul_op_impl.h: 16-bit floats are widened to float32, both inputs and the result."""
    if facts.device.kind == "gpu":
        return _UNKNOWN
    if facts.outputs[0].dtype in HALVES:
        counts = [kind.num_elements for kind in (facts.inputs[0], facts.inputs[1], facts.outputs[0])]
        if None in counts:
            return _UNKNOWN
        widened = [4 * count for count in counts if count is not None]
        return _temporaries_after_output(widened, exact=not facts.device.onednn)
    return onednn(facts) if facts.device.onednn else ((OUT0,), True)


def batch_matmul(facts: Facts) -> Events | Measured:
    """As `matmul`, with oneDNN's scratch by shape (mkl_batch_matmul_op.cc). `MatMul` took none where measured."""
    given, made = known_shape(facts.inputs[0]), known_shape(facts.outputs[0])
    replaced = facts.device.kind == "cpu" and facts.device.onednn and facts.outputs[0].dtype not in HALVES
    if not replaced or given is None or made is None:
        return matmul(facts)
    first, second = bool(facts.attrs.get("adj_x")), bool(facts.attrs.get("adj_y"))
    product = Product(prod(made[:-2]), made[-2], given[-2 if first else -1], made[-1], (first, second))
    return onednn(facts, thread_bytes=onednn_product_bytes(product))


# --- images, sparse tensors and counts ------------------------------------------------------------------


def rgb_to_hsv(facts: Facts) -> Events:
    """colorspace_op.cc: the range of each pixel's colours."""
    pixels = (facts.outputs[0].num_elements or 0) // 3
    return _temporaries_after_output([pixels * _element_bytes(facts.outputs[0])])


def adjust_contrast(facts: Facts) -> Events:
    """adjust_contrast_op.cc: the mean of each image's channels."""
    shape = known_shape(facts.inputs[0])
    if shape is None:
        return _UNKNOWN
    return _temporaries_after_output([4 * prod(shape[:-3]) * shape[-1]], exact=facts.device.kind == "cpu")


def _weights(source: int, result: int) -> tuple[int, int]:
    """scale_and_translate_op.cc: where each pixel's sources begin, and their weights, at most all there are."""
    return 4 * result, 4 * source * result


def scale_and_translate(facts: Facts) -> Events:
    """scale_and_translate_op.cc: weights for rows and for columns, and the image with one of them resized."""
    image, result = known_shape(facts.inputs[0]), known_shape(facts.outputs[0])
    if image is None or result is None:
        return _UNKNOWN
    between = 4 * image[0] * result[1] * image[2] * image[3]
    sizes = [*_weights(image[1], result[1]), *_weights(image[2], result[2]), between]
    return _temporaries_after_output(sizes, exact=False)


def scale_and_translate_grad(facts: Facts) -> Events:
    """scale_and_translate_op.cc: the same backwards, from weights that are turned around."""
    gradient, image = known_shape(facts.inputs[0]), known_shape(facts.outputs[0])
    if gradient is None or image is None:
        return _UNKNOWN
    sizes = [size for i in (1, 2) for size in (*_weights(image[i], gradient[i]), *_weights(gradient[i], image[i]))]
    return _temporaries_after_output([*sizes, 4 * image[0] * image[1] * gradient[2] * image[3]], exact=False)


def sparse_copied(facts: Facts) -> Events:
    """sparse_reduce_op.cc, sparse_softmax_op.cc: indices and values are copied, to be sorted; and a number."""
    indices, values = facts.inputs[0].nbytes, facts.inputs[1].nbytes
    if indices is None or values is None:
        return _UNKNOWN
    size = _element_bytes(facts.outputs[0])
    return (("temp", indices), ("temp", values), OUT0, ("temp", size)), True


def sparse_to_dense(facts: Facts) -> Events:
    """sparse_to_dense_op.cc: the indices as a matrix of int64, a copy where they are not one."""
    indices = facts.inputs[0]
    if indices.dtype == "int64" and len(indices.shape or ()) == 2:
        return (OUT0,), True
    return _temporaries_after_output([8 * (indices.num_elements or 0)])


def sparse_filled_grad(facts: Facts) -> Events:
    """fill_empty_rows_functor.h: which values have been seen."""
    return (OUT0, ("out", 1), ("temp", facts.inputs[1].num_elements or 0)), facts.inputs[1].num_elements is not None


def sparse_dense(facts: Facts) -> Events:
    """sparse_dense_binary_op_shared.cc: the dense side's values at the indices."""
    values = facts.inputs[1].nbytes
    return _UNKNOWN if values is None else _temporaries_after_output([values])


def sparse_concat(facts: Facts) -> Events:
    """sparse_concat_op.cc: each input is copied, indices and values, before all are put together."""
    count = len(facts.inputs) // 3
    pairs = [(facts.inputs[i].nbytes, facts.inputs[count + i].nbytes) for i in range(count)]
    copies = [("temp", size or 0) for pair in pairs for size in pair]
    return (("out", 2), *copies, OUT0, ("out", 1)), all(None not in pair for pair in pairs)


def histogram(facts: Facts) -> Events:
    """histogram_op.cc: the bin of each value."""
    count = facts.inputs[0].num_elements
    return _UNKNOWN if count is None else _temporaries_after_output([4 * count])


def _summed_in_float32(facts: Facts, order: Sequence[Event], count: int | None) -> Events:
    """The outputs, and so many float32, where they are 16-bit floats."""
    if facts.outputs[0].dtype not in HALVES:
        return order, True
    return (*order, ("temp", 4 * (count or 0))), count is not None


def sparse_segment(facts: Facts) -> Events:
    """segment_reduction_ops_impl.h, SparseSegmentReductionOpBase: a row."""
    shape = known_shape(facts.inputs[0])
    return _summed_in_float32(facts, (OUT0,), None if shape is None else prod(shape[1:]))


def sparse_segment_grad(facts: Facts) -> Events:
    """The same, SparseSegmentGradOpBase: all of the output; the second version gives its rows' numbers first."""
    order = (OUT0,) if len(facts.outputs) == 1 else (("out", 1), OUT0)
    return _summed_in_float32(facts, order, facts.outputs[0].num_elements)


def resize_grad(facts: Facts) -> Events:
    """resize_bilinear_op.cc: all of the output."""
    return _summed_in_float32(facts, (OUT0,), facts.outputs[0].num_elements)


def dense_bincount(facts: Facts) -> Events:
    """bincount_op.cc: whether none is negative, and the bins of each thread and of the caller; rows have neither."""
    if len(facts.inputs[0].shape or ()) != 1:
        return (OUT0,), True
    return bincount(facts)


def bincount(facts: Facts) -> Events:
    """As `dense_bincount` of one row."""
    bins = facts.outputs[0].num_elements
    if bins is None or facts.device.kind == "gpu":
        return _UNKNOWN
    size = 1 if facts.attrs.get("binary_output") else _element_bytes(facts.outputs[0])
    return _temporaries_after_output([1, (facts.device.intra_op_threads + 1) * bins * size])


def multinomial(facts: Facts) -> Events:
    """multinomial_op.cc: each thread has, again and again, a row of sums of probabilities."""
    logits = known_shape(facts.inputs[0])
    if logits is None:
        return _UNKNOWN
    return _temporaries_after_output([8 * logits[1]] * facts.device.intra_op_threads, exact=False)


def quantize(facts: Facts) -> Events:
    """quantize_and_dequantize_op.cc: the range, for each slice along an axis, where it is not given."""
    shape, axis = known_shape(facts.inputs[0]), facts.attrs.get("axis", -1)
    if facts.attrs.get("range_given"):
        return (OUT0,), True
    if shape is None or not isinstance(axis, int):
        return _UNKNOWN
    slices = shape[axis] if axis >= 0 else 1
    return _temporaries_after_output([slices * _element_bytes(facts.outputs[0])] * 2)


# --- losses and layout --------------------------------------------------------------------------


def softmax_cross_entropy(facts: Facts) -> Events:
    """xent_op.cc, sparse_xent_op.cc: a number for each example as scratch."""
    loss = facts.outputs[0].nbytes
    if loss is None:
        return (OUT0, ("out", 1)), False
    return (("temp", loss), OUT0, ("out", 1)), True


def mirror_pad_grad(facts: Facts) -> Events:
    """mirror_pad_op.cc: folds a copy of the gradient."""
    size = facts.inputs[0].nbytes
    return _UNKNOWN if size is None else ((("temp", size), OUT0), True)


def unravel_index(facts: Facts) -> Events:
    """unravel_index_op.cc: the strides of the dimensions, twice."""
    dims = facts.inputs[1].nbytes
    return _UNKNOWN if dims is None else ((("temp", dims), ("temp", dims), OUT0), True)


# --- views along the first dimension ---------------------------------------------------------------------

TENSOR_ALIGN_BYTES = 64  # EIGEN_MAX_ALIGN_BYTES of the wheels: a slice may be shared if it starts so


def _inner_bytes(kind: TensorType) -> int | None:
    shape = _certain_shape(kind)
    return None if shape is None else prod(shape[1:]) * _element_bytes(kind)


def is_first_dim_view(facts: Facts) -> tuple[bool, bool]:
    """slice_op.cc, strided_slice_op.cc: whole rows of the first dimension, aligned, are shared.

    Gives (is a view, exact). A stride over the first dimension is told from a range only by the values of
    the begin, end and strides inputs, or by taking more than half of the rows. One that goes backwards copies, and
    so does any other stride than 1.
    """
    source, result = _certain_shape(facts.inputs[0]), _certain_shape(facts.outputs[0])
    if source is None or result is None:
        return False, False
    strides = facts.values.get(3)
    if strides is not None and not set(strides) <= {1}:
        return False, True
    if prod(source) == prod(result):  # all of it: handed on, aligned or not
        return True, strides is not None or len(facts.inputs) == 3
    if not source or prod(source) == 0:
        return False, True
    inner = _inner_bytes(facts.inputs[0]) or 0
    rows = prod(result) * _element_bytes(facts.outputs[0]) // inner if inner else 0
    kept = _without_ones(result)
    if kept not in (_without_ones((rows, *source[1:])), _without_ones(source[1:])):
        return False, True
    if len(source) == 1:
        begin = facts.values.get(1)
        if begin is None:
            return False, False
        size = _element_bytes(facts.inputs[0])
        start = begin[0] % source[0]
        return start * size % TENSOR_ALIGN_BYTES == 0 == rows * size % TENSOR_ALIGN_BYTES, True
    if inner % TENSOR_ALIGN_BYTES:
        return False, True
    return True, rows == 1 or 2 * rows > source[0] or strides is not None


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(dim for dim in shape if dim != 1)


def is_split_view(facts: Facts) -> tuple[bool, bool]:
    """split_op.cc, split_v_op.cc: aligned pieces along the first dimension are shared."""
    source = facts.inputs[0] if facts.inputs[0].shape else facts.inputs[1]  # Split takes its axis first
    shape, piece = _certain_shape(source), _certain_shape(facts.outputs[0])
    if not shape or piece is None:
        return False, False
    if len(facts.outputs) == 1:
        return True, True
    along_first = piece[0] != shape[0] and shape[1:] == piece[1:]
    if len(shape) == 1 and source is facts.inputs[0]:  # SplitV of a vector
        pieces = [_certain_shape(out) for out in facts.outputs]
        if None in pieces:
            return False, False
        return all(p and p[0] * _element_bytes(source) % TENSOR_ALIGN_BYTES == 0 for p in pieces), True
    return along_first and (_inner_bytes(source) or 0) % TENSOR_ALIGN_BYTES == 0, True


def is_unpack_view(facts: Facts) -> tuple[bool, bool]:
    """unpack_op.cc: aligned rows of the first dimension are shared, and a single row along any."""
    shape = _certain_shape(facts.inputs[0])
    if not shape:
        return False, False
    if len(facts.outputs) == 1:
        return True, True
    axis = facts.attrs.get("axis", 0)
    along_first = isinstance(axis, int) and axis % len(shape) == 0
    return along_first and (_inner_bytes(facts.inputs[0]) or 0) % TENSOR_ALIGN_BYTES == 0, True


def is_transpose_view(facts: Facts) -> tuple[bool, bool]:
    """transpose_op.cc: a permutation that leaves the dimensions over 1 in their order shares the buffer."""
    source, result = _certain_shape(facts.inputs[0]), _certain_shape(facts.outputs[0])
    if source is None or result is None:
        return False, False
    permutation = facts.values.get(1)
    if permutation is not None:
        moved = [axis for axis in permutation if source[axis] != 1]
        return moved == sorted(moved), True
    if len(_without_ones(source)) <= 1:
        return True, True
    if _without_ones(source) != _without_ones(result):
        return False, True
    certain = len(set(_without_ones(source))) == len(_without_ones(source))  # each stays where it was
    return certain, certain


def is_same_shape_view(facts: Facts) -> tuple[bool, bool]:
    """tile_ops.cc, broadcast_to_op.cc: nothing to repeat hands the input on."""
    source, result = _certain_shape(facts.inputs[0]), _certain_shape(facts.outputs[0])
    return (source == result is not None), source is not None and result is not None


def is_same_dtype_view(facts: Facts) -> tuple[bool, bool]:
    """cast_op.cc: a cast to the same type hands the input on."""
    return facts.inputs[0].dtype == facts.outputs[0].dtype, True
