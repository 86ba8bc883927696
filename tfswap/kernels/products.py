"""How TensorFlow cuts a product of two matrices of float32 into blocks on a CPU.

Eigen's contraction on a thread pool (TensorContractionThreadPool.h) adds up the products of blocks of the depth, in
order, for each block of the result. oneDNN's `sgemm` computes the product of two blocks (eigen_contraction_kernel.h).
So products of parts of the depth, added in order, have the bits of the whole if the parts are blocks. Releases of
TensorFlow for x86-64 are compiled for AVX, without FMA.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tfswap.kernels.device import DeviceModel
from tfswap.kernels.temporaries import ceil_div

# GeneralBlockPanelKernel.h, gebp_traits<float, float> for AVX
_MR: Final = 16
_NR: Final = 4
_PANEL_BYTES: Final = 4 * (_MR + _NR)  # kdiv
_TILE_BYTES: Final = 4 * _MR * _NR  # ksub
_MOST_DEPTH: Final = 320
_DEPTH_UNIT: Final = 8

# eigen_contraction_kernel.h, TensorContractionBlocking
_UNROLL_M: Final = 48
_UNROLL_N: Final = 24

THREAD_WORK: Final = 2 << 20
"""The multiplications that are work for one thread. TensorContractionThreadPool.h counts 100,000 cycles for a thread,
and a cycle for 16 multiplications."""
WORK_DEPTH: Final = 256
"""The least depth of a block of a larger product, of which that work is counted."""
LEAST_SIDE: Final = 8
"""Products of fewer rows or columns may divide their depth, however much work they are."""


class Blocks(NamedTuple):
    """The sizes of the blocks of a product: those of the result, and that of the depth."""

    rows: int
    columns: int
    depth: int

    def thin(self, rows: int, columns: int) -> tuple[bool, bool]:
        """Whether the last block of rows has one row, that of columns one column: `sgemm` has a kernel for these."""
        return rows % self.rows == 1, columns % self.columns == 1


def least_rows(depth: int, columns: int, device: DeviceModel) -> int | None:
    """The rows from which on a product is computed by all threads, none of which has a part of the depth alone."""
    if columns < LEAST_SIDE:
        return None
    work = THREAD_WORK * (device.intra_op_threads + 1)
    return max(LEAST_SIDE, ceil_div(work, columns * min(depth, WORK_DEPTH)))


def product_blocks(rows: int, columns: int, depth: int, device: DeviceModel) -> Blocks | None:
    """The blocks of a product with work for all threads; None where they are unknown.

    They are known on x86-64 with two threads or more, if the sizes of its caches are.
    """
    if device.l1_l2_bytes is None or device.l3_cache_bytes is None or device.intra_op_threads < 2:
        return None
    # The result is stored by rows: Eigen computes its transpose.
    m, n = columns, rows
    if _by_columns(m, n, device.intra_op_threads):
        k, m_block, n_block = _cache_blocks(m, n, depth, device)
    else:
        k, n_block, m_block = _cache_blocks(n, m, depth, device)
    return Blocks(
        rows=min(n, _multiple(n_block, _UNROLL_N)),
        columns=min(m, _multiple(m_block * 3 // 2, _UNROLL_M)),
        depth=min(depth, _multiple(depth // ceil_div(depth, k), _DEPTH_UNIT)),
    )


def _by_columns(m: int, n: int, threads: int) -> bool:
    """TensorContractionThreadPool.h, shardByCol."""
    uneven = n // threads < 4 * _NR and n % (threads * _NR) and (m % (threads * _NR) == 0 or m // n >= 6)
    if m // threads >= _NR and (n // threads < _NR or uneven):
        return False
    return n // threads >= 16 * _NR or m <= n * 32


def _cache_blocks(m: int, n: int, depth: int, device: DeviceModel) -> tuple[int, int, int]:
    """GeneralBlockPanelKernel.h, evaluateProductBlockingSizesHeuristic, with several threads: depth, m and n."""
    assert device.l1_l2_bytes is not None and device.l3_cache_bytes is not None
    (l1, l2), l3, threads = device.l1_l2_bytes, device.l3_cache_bytes, device.intra_op_threads
    most = max(_DEPTH_UNIT, min((l1 - _TILE_BYTES) // _PANEL_BYTES, _MOST_DEPTH))
    if most < depth:
        depth = most - most % _DEPTH_UNIT
    in_cache = (l2 - l1) // (_NR * 4 * depth)
    per_thread = ceil_div(n, threads)
    n = max(_NR, in_cache - in_cache % _NR) if in_cache <= per_thread else min(n, _multiple(per_thread, _NR))
    if l3 > l2:
        in_cache = (l3 - l2) // (4 * depth * threads)
        per_thread = ceil_div(m, threads)
        m = in_cache - in_cache % _MR if _MR <= in_cache < per_thread else min(m, _multiple(per_thread, _MR))
    return depth, m, n


def _multiple(size: int, unit: int) -> int:
    return ceil_div(size, unit) * unit


def same_in_rows(slice_rows: int, rows: int, columns: int, depth: int, device: DeviceModel) -> bool:
    """Whether this number of rows of a product has the bits that they have in the whole one."""
    least = least_rows(depth, columns, device)
    whole, part = (product_blocks(count, columns, depth, device) for count in (rows, slice_rows))
    if least is None or whole is None or part is None or slice_rows < least:
        return False
    return (False, whole.thin(rows, columns)[1]) == part.thin(slice_rows, columns) and not whole.thin(rows, columns)[0]


def depth_of_slices(rows: int, columns: int, depth: int, device: DeviceModel) -> int | None:
    """The depth of slices whose products, added in order, have the bits of the whole; None where it is unknown."""
    whole = product_blocks(rows, columns, depth, device)
    if whole is None or columns < LEAST_SIDE:
        return None
    for part in (whole.depth, depth % whole.depth or whole.depth):
        least, blocks = least_rows(part, columns, device), product_blocks(rows, columns, part, device)
        if blocks is None or least is None or rows < least or blocks.depth != part:
            return None
        if blocks.thin(rows, columns) != whole.thin(rows, columns):
            return None
    return whole.depth
