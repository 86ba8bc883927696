"""In which order Eigen's contraction on a thread pool adds up a product of two matrices of float32 on a CPU.

All of it follows TensorContractionThreadPool.h, TensorCostModel.h, GeneralBlockPanelKernel.h and TensorFlow's
eigen_contraction_kernel.h: the threads of a product, the parts of the depth that threads compute by themselves, and the
blocks of the depth. oneDNN's `sgemm` computes the product of two blocks. Releases of TensorFlow for x86-64 are compiled
for AVX, without FMA.

The operands are matrices in memory, and the result is stored by rows.

Not handled: products with a side of one, which other kernels compute.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tfswap.kernels.device import DeviceModel
from tfswap.kernels.temporaries import ceil_div

# gebp_traits<float, float> for AVX
_MR: Final = 16
_NR: Final = 4
_PACKET: Final = 8
_PANEL_BYTES: Final = 4 * (_MR + _NR)  # kdiv
_TILE_BYTES: Final = 4 * _MR * _NR  # ksub
_MOST_DEPTH: Final = 320
_DEPTH_UNIT: Final = 8

# eigen_contraction_kernel.h, TensorContractionBlocking
_UNROLL_M: Final = 48
_UNROLL_N: Final = 24

MOST_DEPTH: Final = 384
"""The depth up to which oneDNN's `sgemm` adds up a block in sequence on AVX-512 (gemm_driver.cpp, get_k_padd)."""

_L2_BYTES: Final = 1_572_864  # GeneralBlockPanelKernel.h, actual_l2
_SMALL: Final = 48  # GeneralBlockPanelKernel.h: products of smaller sides are not cut

# TensorCostModel.h
_BYTE_CYCLES: Final = 11 / 64
_START_CYCLES: Final = 100_000
_THREAD_CYCLES: Final = 100_000
_PART_CYCLES: Final = 3_000  # TensorContractionThreadPool.h, numThreadsInnerDim
_LEAST_PART: Final = 12 * _PACKET


class Blocks(NamedTuple):
    """The sizes of the blocks of a product: those of the result, and that of the depth."""

    rows: int
    columns: int
    depth: int

    def thin(self, rows: int, columns: int) -> tuple[bool, bool]:
        """Whether the last block of rows has one row, that of columns one column: `sgemm` has a kernel for these."""
        return rows % self.rows == 1, columns % self.columns == 1


class Order(NamedTuple):
    """How a product adds up its depth: parts by themselves, each block after block.

    Attributes:
        part: the depth of each part; that of the product where there is one.
        block: the depth of the blocks of a part.
        last_block: that of the blocks of the last part.
        thin: whether a block has one row, and whether one has one column.
    """

    part: int
    block: int
    last_block: int
    thin: tuple[bool, bool]

    @property
    def sums(self) -> tuple[int, int, int]:
        """What the bits of a sum depend on."""
        return self.part, self.block, self.last_block


def product_order(rows: int, columns: int, depth: int, device: DeviceModel) -> Order | None:
    """The order of a product of a matrix of `rows` by `depth` and one of `depth` by `columns`; None where it is not
    known, since the sizes of the caches are not.
    """
    caches = Caches.of(device)
    if caches is None or min(rows, columns) < 2:
        return None
    m, n, most = columns, rows, device.intra_op_threads  # Eigen computes the transpose
    by_column = _by_columns(m, n, 2)
    threads = _threads(m, n, caches.blocks(rows, columns, depth, 2), most, by_column=by_column)
    parts = _threads_of_parts(m, n, depth, most)
    if not _adds_parts(m, n, depth, threads, parts, caches.l3):
        blocks = caches.blocks(rows, columns, depth, threads)
        return Order(depth, blocks.depth, blocks.depth, blocks.thin(rows, columns))
    part = min(depth, max(_LEAST_PART, _multiple(ceil_div(depth, parts), _DEPTH_UNIT)))
    count = ceil_div(depth, part)
    depths = part, depth - part * (count - 1)
    first, last = (caches.blocks(rows, columns, k, count, by_column=True) for k in depths)
    thin = (first.thin(rows, columns), last.thin(rows, columns))
    return Order(part, first.depth, last.depth, (thin[0][0] or thin[1][0], thin[0][1] or thin[1][1]))


def is_one_block(rows: int, columns: int, depth: int, device: DeviceModel) -> bool:
    """Whether each element of a product is the sum of its terms in sequence, each multiplied and added in one step."""
    order = product_order(rows, columns, depth, device)
    return order is not None and order.sums == (depth,) * 3 and depth <= MOST_DEPTH and not any(order.thin)


class Caches(NamedTuple):
    """Bytes of a processor's caches."""

    l1: int
    l2: int
    l3: int

    @classmethod
    def of(cls, device: DeviceModel) -> Caches | None:
        if device.l1_l2_bytes is None or device.l3_cache_bytes is None:
            return None
        return cls(*device.l1_l2_bytes, device.l3_cache_bytes)

    def blocks(self, rows: int, columns: int, depth: int, threads: int, *, by_column: bool | None = None) -> Blocks:
        """eigen_contraction_kernel.h, TensorContractionBlocking.

        Args:
            by_column: whether columns of the transpose are divided among threads. By default, as Eigen does.
        """
        m, n = columns, rows
        sized = self._for_threads if threads > 1 else self._for_one_thread
        if threads == 1 or (_by_columns(m, n, threads) if by_column is None else by_column):
            k, m_block, n_block = sized(m, n, depth, threads)
        else:
            k, n_block, m_block = sized(n, m, depth, threads)
        return Blocks(
            rows=min(n, _multiple(n_block, _UNROLL_N)),
            columns=min(m, _multiple(m_block * 3 // 2, _UNROLL_M)),
            depth=min(depth, _multiple(depth // ceil_div(depth, k), _DEPTH_UNIT)),
        )

    def _for_threads(self, m: int, n: int, depth: int, threads: int) -> tuple[int, int, int]:
        """GeneralBlockPanelKernel.h, evaluateProductBlockingSizesHeuristic: depth, m and n."""
        most = max(_DEPTH_UNIT, min((self.l1 - _TILE_BYTES) // _PANEL_BYTES, _MOST_DEPTH))
        if most < depth:
            depth = most - most % _DEPTH_UNIT
        in_cache = (self.l2 - self.l1) // (_NR * 4 * depth)
        per_thread = ceil_div(n, threads)
        n = max(_NR, in_cache - in_cache % _NR) if in_cache <= per_thread else min(n, _multiple(per_thread, _NR))
        if self.l3 > self.l2:
            in_cache = (self.l3 - self.l2) // (4 * depth * threads)
            per_thread = ceil_div(m, threads)
            m = in_cache - in_cache % _MR if _MR <= in_cache < per_thread else min(m, _multiple(per_thread, _MR))
        return depth, m, n

    def _for_one_thread(self, m: int, n: int, depth: int, _: int) -> tuple[int, int, int]:
        """The same function for one thread."""
        if max(m, n, depth) < _SMALL:
            return depth, m, n
        most = max(1, (self.l1 - _TILE_BYTES) // _PANEL_BYTES // _DEPTH_UNIT * _DEPTH_UNIT)
        k = _even(depth, most, most - 1, _DEPTH_UNIT) if depth > most else depth
        left = self.l1 - _TILE_BYTES - m * k * 4
        widest = left // (k * 4) if left >= _NR * 4 * k else 3 * _L2_BYTES // (4 * most * 4)
        widest = min(_L2_BYTES // (2 * k * 4), widest) // _NR * _NR
        if n > widest:
            return k, m, _even(n, widest, widest, _NR)
        return (k, self._rows_in_cache(m, n, k), n) if k == depth else (k, m, n)

    def _rows_in_cache(self, m: int, n: int, depth: int) -> int:
        cache, most = _L2_BYTES, m
        if depth * n * 4 <= 1024:
            cache = self.l1
        elif self.l3 and depth * n * 4 <= 32768:
            cache, most = self.l2, min(576, m)
        block = min(cache // (3 * depth * 4), most)
        if block > _MR:
            block -= block % _MR
        return _even(m, block, block, _MR) if block else m


def _even(size: int, most: int, less: int, unit: int) -> int:
    """The blocks of a size, which are at most `most`, so that the last one is not small."""
    return most if size % most == 0 else most - unit * ((less - size % most) // (unit * (size // most + 1)))


def _multiple(size: int, unit: int) -> int:
    return ceil_div(size, unit) * unit


def _by_columns(m: int, n: int, threads: int) -> bool:
    """TensorContractionThreadPool.h, shardByCol."""
    uneven = n // threads < 4 * _NR and n % (threads * _NR) and (m % (threads * _NR) == 0 or m // n >= 6)
    if m // threads >= _NR and (n // threads < _NR or uneven):
        return False
    return n // threads >= 16 * _NR or m <= n * 32


def _packet_cycles(few: int, many: int, depth: int) -> float:
    """TensorContractionThreadPool.h, computeBandwidth, without FMA."""
    return 4.0 if depth == 1 else 2.0 if few < _NR or many < _MR else 1.0


def _threads(m: int, n: int, blocks: Blocks, most: int, *, by_column: bool) -> int:
    """TensorContractionThreadPool.h, contractionCost; TensorCostModel.h, numThreads."""
    depth = blocks.depth
    cycles = depth * _packet_cycles(blocks.columns, blocks.rows, depth) / _PACKET + 4 * _BYTE_CYCLES
    cycles += 4 * _BYTE_CYCLES * depth / (m if by_column else n)
    return min(most, max(1, int((n * m * cycles - _START_CYCLES) / _THREAD_CYCLES + 0.9)))


def _threads_of_parts(m: int, n: int, depth: int, most: int) -> int:
    """TensorContractionThreadPool.h, numThreadsInnerDim."""
    cycles = depth * (_packet_cycles(n, m, depth) * m * n / _PACKET + (4 + 4 * n) * _BYTE_CYCLES)
    adding = m * n * (3 * _BYTE_CYCLES + 1 / _PACKET)
    found, least = 1, cycles
    for threads in range(2, most + 1, 2):
        cost = cycles / threads + _START_CYCLES + threads * (adding + _PART_CYCLES)
        if cost < least:
            found, least = threads, cost
    return found


def _adds_parts(m: int, n: int, depth: int, threads: int, parts: int, l3_bytes: int) -> bool:
    """TensorContractionThreadPool.h, shardByInnerDim."""
    each = depth // parts
    if parts < 2 or parts < threads or 4 * m * n > l3_bytes // parts or each < 2 * _NR:
        return False
    return max(m, n) // threads < _NR or (each > 8 * _NR and (min(m, n) < 2 * _NR or parts > threads))
