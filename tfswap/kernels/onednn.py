"""Scratchpads of oneDNN's kernels, which replace Eigen's on a CPU (TF_ENABLE_ONEDNN_OPTS).

oneDNN sizes them by processor and version. Each is an upper bound from measurements, never exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfswap.kernels.temporaries import Facts, Measured, after_output, ceil_div

ONEDNN_SCRATCH_BYTES = 64 << 10
"""Bytes of a thread's scratchpad: a bound for convolutions and for small products."""

_CONVOLUTION_BYTES, _CONVOLUTION_THREAD_BYTES = 4096, 4120
"""Bytes that a convolution of any shape requested on CPUs with AVX-512: in all, and per thread in addition."""


def onednn(
    facts: Facts,
    temporaries: Sequence[int] = (),
    thread_bytes: int = ONEDNN_SCRATCH_BYTES,
    usual: Sequence[int] = (),
) -> Measured:
    """The output, these temporaries, and a scratchpad for each thread.

    Args:
        temporaries: sizes in bytes.
        thread_bytes: the bound of a thread's scratchpad.
        usual: sizes in bytes of the temporaries that were measured.
    """
    scratch = thread_bytes * facts.device.intra_op_threads
    events, exact = after_output([*temporaries, scratch], exact=False)
    return events, exact, after_output(usual)[0]


def onednn_convolution(facts: Facts) -> Measured:
    return onednn(facts, usual=[_CONVOLUTION_BYTES + _CONVOLUTION_THREAD_BYTES * facts.device.intra_op_threads])


class Product(NamedTuple):
    """`batch` products of float32 matrices, `rows` x `inner` by `inner` x `columns`.

    Attributes:
        transposed: whether each of the two operands is stored transposed.
    """

    batch: int
    rows: int
    inner: int
    columns: int
    transposed: tuple[bool, bool]


# Blocks of oneDNN's products, in elements (brgemm_matmul_utils.cpp).
_ROWS, _COLUMNS, _WIDE = 256, 64, 512
_INNER, _SINGLE_INNER = 512, 1024  # with blocks of both operands, of the second alone


def onednn_product_bytes(product: Product) -> int:
    """A bound of each thread's scratchpad in bytes, from measurements (brgemm_matmul_utils.cpp, init_scratchpad).

    A thread copies blocks of transposed operands, and of a wide second operand. A single product may also be split
    along the summed dimension, and then has blocks of partial sums.
    """
    rows, inner = min(_up_to_16(product.rows), _ROWS), _up_to_16(product.inner)
    first, second = product.transposed
    elements = rows * (min(inner, _INNER) + 16) if first else 0
    if second or product.columns >= _WIDE:
        elements += _COLUMNS * min(inner, _INNER if first else _SINGLE_INNER)
    if product.batch == 1 and product.inner >= _INNER:
        elements += rows * _COLUMNS
    return max(ONEDNN_SCRATCH_BYTES, 4 * elements + 1024)


def _up_to_16(number: int) -> int:
    return 16 * ceil_div(number, 16)
