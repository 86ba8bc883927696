"""Slices of products of two matrices of float32 on a CPU: which have the bits of the whole.

A product adds up its depth in an order that depends on its sizes (kernels/contraction_order.py). Rows and columns of it
have the same bits where that order is the same.
"""

from __future__ import annotations

from typing import Final

from tfswap.kernels.contraction_order import Blocks, Caches, Order, product_order
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.temporaries import ceil_div

THREAD_WORK: Final = 2 << 20
"""The multiplications that are work for one thread. TensorContractionThreadPool.h counts 100,000 cycles for a thread,
and a cycle for 16 multiplications."""
WORK_DEPTH: Final = 256
"""The least depth of a block of a larger product, of which that work is counted."""
ADDED_TOGETHER: Final = 4
"""The parts of the depth that are added together."""
PACKET: Final = 8
"""The floats of a packet of AVX."""
LEAST_SIDE: Final = 8
"""Products of fewer rows or columns may divide their depth, however much work they are."""


def same_in_rows(slice_rows: int, rows: int, columns: int, depth: int, device: DeviceModel) -> bool:
    """Whether this number of rows of a product of two matrices in memory has the bits that they have in the whole."""
    if depth == 1:
        return True
    whole, part = (product_order(count, columns, depth, device) for count in (rows, slice_rows))
    if whole is None or part is None or whole.thin[0] or part.thin[0]:
        return False
    return whole == part and _sums_alike(whole, depth, rows * columns, slice_rows * columns)


def same_in_columns(slice_columns: int, rows: int, columns: int, depth: int, device: DeviceModel) -> bool:
    """Whether this number of columns of such a product has the bits that they have in the whole."""
    if depth == 1:
        return True
    whole, part = (product_order(rows, count, depth, device) for count in (columns, slice_columns))
    if whole is None or part is None or whole.thin[1] or part.thin[1]:
        return False
    return whole == part and _sums_alike(whole, depth, rows * columns, rows * slice_columns)


def _sums_alike(order: Order, depth: int, *elements: int) -> bool:
    """Whether products of these numbers of elements add up their parts alike. Four parts are added in pairs in packets,
    and in sequence in the elements that are left over (TensorContractionThreadPool.h, addAllToBuffer).
    """
    return ceil_div(depth, order.part) < ADDED_TOGETHER or all(count % PACKET == 0 for count in elements)


def same_patches(slice_rows: int, rows: int, columns: int, depth: int, device: DeviceModel) -> bool:
    """The same of a product of patches, which Eigen reads from images: its threads are not known exactly."""
    least = _least_rows(depth, columns, device)
    whole, part = (_blocks(count, columns, depth, device) for count in (rows, slice_rows))
    if least is None or whole is None or part is None or slice_rows < least:
        return False
    return (False, whole.thin(rows, columns)[1]) == part.thin(slice_rows, columns) and not whole.thin(rows, columns)[0]


def _least_rows(depth: int, columns: int, device: DeviceModel) -> int | None:
    """The rows from which on a product is computed by all threads, none of which has a part of the depth alone."""
    if columns < LEAST_SIDE:
        return None
    work = THREAD_WORK * (device.intra_op_threads + 1)
    return max(LEAST_SIDE, ceil_div(work, columns * min(depth, WORK_DEPTH)))


def _blocks(rows: int, columns: int, depth: int, device: DeviceModel) -> Blocks | None:
    """The blocks of a product with work for all threads; None where they are unknown."""
    caches = Caches.of(device)
    if caches is None or device.intra_op_threads < 2:
        return None
    return caches.blocks(rows, columns, depth, device.intra_op_threads)
