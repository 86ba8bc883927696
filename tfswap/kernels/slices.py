"""How kernels run in slices of rows. A row is what is at one place of a tensor's first axis, or of its leading axes.

`slice_lines.py` has the ops whose kernels may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from itertools import accumulate
from math import gcd, prod
from operator import mul
from typing import Final, NamedTuple

from tfswap.ir.graph import Node, Output
from tfswap.ir.types import TensorType
from tfswap.kernels.bounded_sums import Patches, Products
from tfswap.kernels.temporaries import TENSOR_ALIGN_BYTES as _ALIGN_BYTES
from tfswap.kernels.temporaries import known_shape
from tfswap.kernels.windows import Window

ELEMENTS: Final = 64
"""A slice has a multiple of this many elements. Kernels compute several elements in one packet, and what is left over
one by one, with other last bits for some functions (Eigen's TensorExecutor.h): a multiple leaves nothing over. It also
aligns slices of each type."""


class Kind(Enum):
    """How the results of slices make up the result of the whole kernel."""

    ROWS = auto()
    """They are rows of it."""
    SUM = auto()
    """It is their sum, added up in order."""
    ROW_SUMS = auto()
    """Each continues the sums of the slices before (Tfswap>AddRows)."""
    PRODUCTS = auto()
    """The same of a sum of products (Tfswap>AddProducts)."""
    WHOLE = auto()
    """There is one, of all rows: it is another kernel, which needs less memory."""


class RowSums(NamedTuple):
    """How a kernel adds up rows.

    Attributes:
        blocks: the number of sums, which are added up at the end.
        unrolled: whether the rows of each four belong to four sums, as in Eigen's reduction of packets; else each sum
            is of equally many rows in sequence.
        mean: whether the sum is divided by the number of rows.
    """

    blocks: int = 1
    unrolled: bool = False
    mean: bool = False


def any_number(_: int) -> bool:
    """Whether slices of a number of rows have the bits: of any."""
    return True


class Slicing(NamedTuple):
    """How a kernel runs in slices.

    Attributes:
        rows: the positions of the inputs of which a slice reads its own rows. It reads all of the others.
        axes: the number of leading axes of these, and of the output, that may be merged into one axis of rows.
        multiple: a slice has a multiple of this many elements; the last one has what is left.
        unit: of Kind.SUM, the rows of each kernel, whatever slices have; 0 for those of a slice. Rows are those of the
            first sliced input.
        holds: whether slices of a number of rows of the output have the bits.
        shape: the position of the input that has the output's shape.
        sums: of Kind.ROW_SUMS, how rows are added up.
        window: of a filter's gradient, if it is computed as products of columns.
        image: whether rows are those of one image: slices are images too.
        halo: how many more rows of the first sliced input a slice reads, before its own and after them. It computes as
            many more rows, which are left out.
        flipped: whether an image's gradient is computed as a convolution with the flipped filter.
        bounded: a gradient that is computed with a part of its columns at a time.
    """

    rows: tuple[int, ...]
    kind: Kind = Kind.ROWS
    axes: int = 1
    multiple: int = 1
    unit: int = 1
    holds: Callable[[int], bool] = any_number
    shape: int | None = None
    sums: RowSums | None = None
    window: Window | None = None
    image: bool = False
    halo: tuple[int, int] = (0, 0)
    flipped: bool = False
    bounded: Products | Patches | None = None


def rows_of_packets(shape: Sequence[int]) -> int:
    """The least number of rows of a tensor of this shape that have a multiple of ELEMENTS elements."""
    return ELEMENTS // gcd(ELEMENTS, prod(shape[1:]))


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


def row_tensors(node: Node, slicing: Slicing) -> list[TensorType]:
    """The types of what slices of a kernel read and make by rows."""
    made = node.outputs if slicing.kind is Kind.ROWS else ()
    if slicing.kind is Kind.WHOLE:
        return []
    return [*(node.inputs[position].type for position in slicing.rows), *made]


def possible_rows(node: Node, slicing: Slicing) -> set[int]:
    """The numbers of rows, more than one, that the tensors of a kernel in slices may be taken to have."""
    shapes = (kind.shape or () for kind in row_tensors(node, slicing))
    counts = (count for shape in shapes for count in accumulate((size or 0 for size in shape[: slicing.axes]), mul))
    return {count for count in counts if count > 1}


def most_common_rows(node: Node, slicing: Slicing) -> int:
    """A multiple of each number of rows that all tensors of a kernel in slices may be taken to have."""
    shapes = (kind.shape or () for kind in row_tensors(node, slicing))
    return gcd(*(prod(size or 0 for size in shape[: slicing.axes]) for shape in shapes))


def slices_of(node: Node, slicing: Slicing, rows: int, of: int) -> RowSlices | None:
    """The slices of a kernel, where others have slices of `rows` of each `of` rows. They have as many, or the least
    multiple by a power of two that the bits need. None where there is none.
    """
    if slicing.kind is Kind.WHOLE:
        return RowSlices(slicing, rows, (), ())
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
    if rows * elements % slicing.multiple:
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
    tensors = () if slices.slicing.halo == (0, 0) else (*slices.inputs, *slices.outputs)
    return not any((kind.nbytes or 0) // rows_of(kind) % _ALIGN_BYTES for kind in tensors)
