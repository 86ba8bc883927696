"""Chooses which kernels run in slices of rows, and how large these are. A function of graph and device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.slices import ELEMENTS, Kind, Slicing, reads_in_place, runs_in_slices, slicing_of
from tfswap.plan.plan import Slices

MOST_ADDED = 1.25
"""A slice may have this share of the rows that it needs, where rows in a multiple of a power of two are aligned."""


def choose_slices(graph: Graph, device: DeviceModel, shares: Iterable[int]) -> list[Slices]:
    """Kernels in slices, from large slices of few kernels to small ones of many.

    Args:
        shares: into how many slices kernels with the largest tensor are cut. Kernels run in slices where one of their
            tensors is larger than half a slice of that.
    """
    possible = {node: found for node in graph.topological() if (found := slicing_of(node, device)) is not None}
    sizes = {node: [kind.nbytes or 0 for kind in _sliced(node, found)] for node, found in possible.items()}
    largest = max((max(each) for each in sizes.values()), default=0)
    chosen: dict[Slices, None] = {}
    for share in shares:
        heavy = {node: possible[node] for node, each in sizes.items() if max(each) > largest // (2 * share)}
        of = _common_rows(heavy)
        rows = _rows_of_slice(of, share)
        if rows < of and (names := _members(heavy, rows, of)):
            chosen[Slices(names, rows, of)] = None
    return list(chosen)


def _sliced(node: Node, slicing: Slicing) -> list[TensorType]:
    """The types of what slices of a kernel read and make by rows."""
    made = node.outputs if slicing.kind is Kind.ROWS else ()
    return [*(node.inputs[position].type for position in slicing.rows), *made]


def _common_rows(heavy: dict[Node, Slicing]) -> int:
    """The number of rows that tensors with the most bytes have."""
    found: Counter[int] = Counter()
    for node, slicing in heavy.items():
        for kind in _sliced(node, slicing):
            found[(kind.shape or (0,))[0] or 0] += kind.nbytes or 0
    return min(found, key=lambda rows: (-found[rows], rows), default=0)


def _rows_of_slice(of: int, share: int) -> int:
    """The rows of each of `share` slices, or a little more."""
    rows = -(-of // share)
    unit = ELEMENTS
    while -(-rows // unit) * unit > MOST_ADDED * rows:
        unit //= 2
    return -(-rows // unit) * unit


def _members(heavy: dict[Node, Slicing], rows: int, of: int) -> tuple[str, ...]:
    """The names of those kernels that can run in these slices."""
    made: set[Output] = set()
    names: list[str] = []
    for node, slicing in heavy.items():
        if runs_in_slices(node, slicing, rows, of) and reads_in_place(node, slicing, rows, of, made):
            names.append(node.name)
            if slicing.kind is Kind.ROWS:
                made.update(node.out(index) for index in range(len(node.outputs)))
    return tuple(names)
