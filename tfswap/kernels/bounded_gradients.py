"""Gradients of convolutions and of weights with the same bits in less memory, on a CPU.

TensorFlow's kernels lay out the patches of a shard of images, or of one volume, as columns of a matrix
(conv_grad_filter_ops.cc, conv_grad_input_ops.h, conv_grad_ops_3d.cc). Two ops need only a part of these:

- Tfswap>AddProducts adds up a filter's or a weight's gradient block of rows after block, in the order of Eigen's
  contraction (contraction_order.py): blocks in parts, parts in shards, shards in sequence. It may be given the rows of
  some images at a time, and keeps sums of parts and a block that is not complete in between.
- Tfswap>ImageGradient multiplies some positions at a time with the filter, and adds their patches to the image, in
  the order of positions.

Both have their products computed by TensorFlow's kernel of MatMul, of so few rows that each of these is one block.

Not handled: products of one row or column, but for a vector with a matrix; oneDNN's kernels; gradients of several
volumes' images, which Eigen's own kernel of products computes; types other than float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Final, cast

from tfswap.kernels.bounded_sums import Patches, Products, Shard, slots_of
from tfswap.kernels.columns import conv3d_columns
from tfswap.kernels.contraction_order import MOST_DEPTH, Caches, is_one_block, product_order
from tfswap.kernels.convolutions import adds_in_parallel, images_of_shard
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.slices_call import Call
from tfswap.kernels.temporaries import ceil_div
from tfswap.kernels.windows import COLUMNS_BYTES, window_of

_LEAST_VECTOR: Final = 128
_WIDE_BYTES: Final = 32_000
_VECTOR_ROWS: Final = 64
UNIT: Final = 16
"""Products have a multiple of this many rows."""


def products_of_rows(width: int, made: int, rows: int, device: DeviceModel) -> Products | None:
    """The sum of the products of two matrices' rows; None where its order is not known.

    Args:
        width, made: the columns of both.
    """
    if made == 1:
        return _vector_product(width, rows, device)
    return _products(width, made, rows, rows, device)


def _vector_product(width: int, rows: int, device: DeviceModel) -> Products | None:
    """The product of a matrix with a vector: GeneralMatrixVector.h, with columns in blocks. Blocks of the result have
    several rows (matmul_op_impl.h, SingleBatchParallelMatMulKernel).
    """
    if Caches.of(device) is None or rows < _LEAST_VECTOR or width < 2 or width % _VECTOR_ROWS == 1:
        return None
    block = 16 if width * 4 < _WIDE_BYTES else 4
    shard = Shard(rows, rows, block, block)
    return Products(rows, shard, shard, width)


def filter_gradient(call: Call) -> Products | None:
    """The gradient of a convolution's filter, where its columns are larger than those of a bounded one."""
    image, kernel, gradient = call.input(0), call.output, call.input(2)
    if kernel[-2] != image[-1] or any(size > 1 for size in _dilations(call)):
        return None
    images, pixels, width = gradient[0], prod(gradient[1:-1]), prod(kernel[:-1])
    each = _images_together(call, images, pixels, width)
    if each is None or each * pixels * width * 4 <= COLUMNS_BYTES:
        return None
    found = _products(width, kernel[-1], images * pixels, min(each, images) * pixels, call.device)
    window = window_of(call.node.attrs, image, kernel[:-2], gradient)
    return None if found is None else found._replace(window=window)


def _dilations(call: Call) -> Sequence[int]:
    return cast("Sequence[int]", call.node.attrs.get("dilations", ()))


def _images_together(call: Call, images: int, pixels: int, width: int) -> int | None:
    """The images of a shard; None where the kernel has no columns."""
    kernel, gradient, made = call.output, call.input(2), call.node.outputs[0]
    if len(kernel) == 4:
        return images_of_shard(kernel, gradient, made)
    if call.device.l3_cache_bytes is None:
        return None
    cache = call.device.l3_cache_bytes // 4
    columns = conv3d_columns(gradient, kernel, prod(call.input(0)), cache, one_by_one=False)
    return columns // (pixels * width) or None


def _products(width: int, made: int, rows: int, shard_rows: int, device: DeviceModel) -> Products | None:
    shards: list[Shard] = []
    for count in (shard_rows, rows - (ceil_div(rows, shard_rows) - 1) * shard_rows):
        order = product_order(width, made, count, device)
        if order is None or any(order.thin) or max(order.block, order.last_block) > MOST_DEPTH:
            return None
        shards.append(Shard(count, *order.sums))
    depths = shards[0].depths | shards[1].depths
    slots = slots_of(rows, *shards)

    def fits(chunk: int) -> bool:
        sizes = {chunk, width % chunk or chunk}
        return all(is_one_block(size, made, depth, device) for size in sizes for depth in depths)

    chunk = _chunk(width, 4 * (max(depths) + (1 + slots) * made), fits)
    return None if chunk is None else Products(rows, shards[0], shards[1], chunk)


def _chunk(size: int, row_bytes: int, fits: Callable[[int], bool]) -> int | None:
    """The largest part of a size that fits, and takes no more than COLUMNS_BYTES if there is one that does."""
    most = min(size, max(UNIT, COLUMNS_BYTES // row_bytes // UNIT * UNIT))
    counts = range(ceil_div(size, most), ceil_div(size, UNIT) + 1)
    chunks = dict.fromkeys(min(size, ceil_div(ceil_div(size, count), UNIT) * UNIT) for count in counts)
    return next((chunk for chunk in chunks if fits(chunk)), None)


def image_gradient(call: Call) -> Patches | None:
    """The gradient of a convolution's images, where its columns are larger than those of a bounded one."""
    kernel, gradient = call.input(1), call.input(2)
    if kernel[-2] != call.output[-1] or any(size > 1 for size in _dilations(call)):
        return None
    pixels, width, made = prod(gradient[1:-1]), prod(kernel[:-1]), kernel[-1]
    columns = _columns_of_images(call, pixels, width)
    if columns * 4 <= COLUMNS_BYTES:
        return None
    by_all = gradient[0] == 1 or adds_in_parallel(kernel, gradient, call.node.outputs[0], call.device)
    whole = product_order(pixels, width, made, call.device)
    if by_all and (whole is None or any(whole.thin) or whole.part < made):
        return None

    def fits(chunk: int) -> bool:
        orders = (product_order(size, width, made, call.device) for size in {chunk, pixels % chunk or chunk})
        return all(each is not None and each.sums == sums and not any(each.thin) for each in orders)

    # Where a thread computes an image by itself, `sgemm` is not given blocks (conv_grad_input_ops.h).
    sums = whole.sums if by_all and whole is not None else (made,) * 3
    chunk = _chunk(pixels, 4 * (width + made), fits) if max(sums[1:]) <= MOST_DEPTH else None
    return None if chunk is None else Patches(window_of(call.node.attrs, call.output, kernel[:-2], gradient), chunk)


def _columns_of_images(call: Call, pixels: int, width: int) -> int:
    """The elements of the columns of TensorFlow's kernel; 0 where its products are not known."""
    kernel, gradient, made = call.input(1), call.input(2), call.node.outputs[0]
    if len(kernel) == 5:
        return conv3d_columns(gradient, kernel, prod(call.output), 0, one_by_one=True) if gradient[0] == 1 else 0
    by_all = gradient[0] == 1 or adds_in_parallel(kernel, gradient, made, call.device)
    return pixels * width * (1 if by_all else images_of_shard(kernel, gradient, made))
