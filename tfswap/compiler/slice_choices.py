"""Chooses which kernels run in slices of rows, and how large these are. A function of graph and device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from math import ceil

from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import is_elementwise
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.slice_lines import slicing_of
from tfswap.kernels.slices import (
    ELEMENTS,
    Kind,
    Slicing,
    most_common_rows,
    possible_rows,
    reads_in_place,
    row_tensors,
    slices_of,
)
from tfswap.kernels.target import Target
from tfswap.passes.tactics.rows_first import keep_rows_first
from tfswap.plan.plan import Slices

MOST_ADDED = 1.25
"""A slice may have this share of the rows that it needs, where rows in a multiple of a power of two are aligned."""
MOST_SLICES = 16_000
"""More slices of kernels than this take long to plan, and their plans are no better."""
ENOUGH = 0.8
"""The share of the bytes of kernels that can run in slices at all, from which on more and smaller rows are better."""


def rows_first(graph: Graph, target: Target) -> Graph:
    """A copy of a step in which its kernels in slices are chosen."""
    made = graph.copy()
    keep_rows_first(made, target)
    return made


class SliceChoices:
    """Kernels in slices, chosen several times of one graph, which must not change.

    Args:
        close: also with other last bits.
    """

    def __init__(self, graph: Graph, device: DeviceModel, *, close: bool):
        self._close = close
        constants = graph.small_constants
        slicings = ((node, slicing_of(node, device, constants, close=close)) for node in graph.topological())
        found = {node: slicing for node, slicing in slicings if slicing is not None}
        self._possible = {node: slicing for node, slicing in found.items() if slicing.kind is not Kind.WHOLE}
        once = tuple(node.name for node in found if node not in self._possible)
        self._bounded = (Slices(once, 1, 1, close),) if once else ()
        self._sizes = {
            node: max(kind.nbytes or 0 for kind in row_tensors(node, slicing))
            for node, slicing in self._possible.items()
        }

    def choose(self, shares: Iterable[int], *, chains: bool) -> list[tuple[Slices, ...]]:
        """Kernels in slices, from large slices of few kernels to small ones of many.

        Kernels whose tensors have other numbers of rows than the largest ones run in slices of their own.

        Args:
            shares: into how many slices kernels with the largest tensor are cut. Kernels run in slices where one of
                their tensors is larger than half a slice of that.
            chains: with all kernels of the same chains, which then run slice by slice from end to end.
        """
        possible, sizes, bounded = self._possible, self._sizes, self._bounded
        largest = max(sizes.values(), default=0)
        chain_of = _chains(possible) if chains else {node: node for node in possible}
        chosen: dict[tuple[Slices, ...], None] = {} if chains else {bounded: None}
        for share in shares:
            heavy = {chain_of[node] for node, nbytes in sizes.items() if nbytes > largest // (2 * share)}
            cut = {node: slicing for node, slicing in possible.items() if chain_of[node] in heavy}
            counts = {node: share if chains else ceil(sizes[node] * share / largest) for node in cut}
            groups = (group._replace(close=self._close) for group in self._groups(cut, counts))
            chosen[(*groups, *bounded)] = None
        return [groups for groups in chosen if groups and sum(map(_count_slices, groups)) <= MOST_SLICES]

    @cached_property
    def _fitting(self) -> dict[int, frozenset[Node]]:
        """By number of rows that a kernel may be taken to have, the kernels that run in slices of them."""
        alike: dict[tuple[Slicing, tuple[TensorType, ...]], list[Node]] = {}
        for node, slicing in self._possible.items():
            alike.setdefault((slicing, tuple(row_tensors(node, slicing))), []).append(node)
        kinds = [(nodes, slicing, most_common_rows(nodes[0], slicing)) for (slicing, _), nodes in alike.items()]
        found: dict[int, frozenset[Node]] = {}
        for of in {of for nodes, slicing, _ in kinds for of in possible_rows(nodes[0], slicing)}:
            fits = (nodes for nodes, s, most in kinds if most % of == 0 and slices_of(nodes[0], s, 1, of) is not None)
            found[of] = frozenset(node for nodes in fits for node in nodes)
        return found

    def _groups(self, heavy: Mapping[Node, Slicing], counts: Mapping[Node, int]) -> Iterator[Slices]:
        """Kernels whose rows have a number in common, in slices.

        Args:
            counts: by kernel, into how many slices its largest tensor is cut.
        """
        while heavy:
            of = self._common_rows(heavy, counts)
            if not of:
                return
            fitting = {node: slicing for node, slicing in heavy.items() if node in self._fitting[of]}
            if not fitting:
                return
            rows = _rows_of_slice(of, max(2, *(counts[node] for node in fitting)))
            if rows < of and (names := _members(fitting, rows, of)):
                yield Slices(names, rows, of)
            heavy = {node: slicing for node, slicing in heavy.items() if node not in fitting}

    def _common_rows(self, heavy: Mapping[Node, Slicing], counts: Mapping[Node, int]) -> int:
        """The most rows that the kernels with most of the bytes have in common. Where slices can be small enough for
        several numbers, the one with the most bytes, so that chains are not broken.
        """
        candidates = {of for node, slicing in heavy.items() for of in possible_rows(node, slicing)}
        covered = {of: sum(self._sizes[node] for node in heavy if node in self._fitting[of]) for of in candidates}
        enough = ENOUGH * max(covered.values(), default=0)
        possible = [of for of, nbytes in covered.items() if nbytes >= enough]
        small = [of for of in possible if of >= max(counts[node] for node in heavy)]
        return max(small, key=lambda of: (covered[of], of)) if small else max(possible, default=0)


def _chains(possible: Mapping[Node, Slicing]) -> dict[Node, Node]:
    """By kernel, the first one of its chain: kernels that make rows that others of them read by rows."""
    from networkx.utils import UnionFind

    joined: UnionFind[Node] = UnionFind(possible)
    for node, slicing in possible.items():
        for position in slicing.rows:
            source = node.inputs[position].node
            if source in possible and possible[source].kind is Kind.ROWS:
                joined.union(source, node)
    return {node: joined[node] for node in possible}


def _count_slices(slices: Slices) -> int:
    return len(slices.kernels) * ceil(slices.of / slices.rows)


def _rows_of_slice(of: int, share: int) -> int:
    """The rows of each of `share` slices, or a little more."""
    rows = -(-of // share)
    unit = ELEMENTS
    while -(-rows // unit) * unit > MOST_ADDED * rows:
        unit //= 2
    return -(-rows // unit) * unit


def _members(heavy: Mapping[Node, Slicing], rows: int, of: int) -> tuple[str, ...]:
    """The names of those kernels that can run in these slices."""
    made: dict[Output, int] = {}
    found: dict[Node, Slicing] = {}
    for node, slicing in heavy.items():
        slices = slices_of(node, slicing, rows, of)
        if slices is not None and reads_in_place(node, slices, of, made):
            found[node] = slicing
            if slicing.kind is Kind.ROWS:
                made.update((node.out(index), slices.rows) for index in range(len(node.outputs)))
    read = {node.inputs[position].node for node, slicing in found.items() for position in slicing.rows}
    return tuple(node.name for node, slicing in found.items() if not _writes_in_place(node, slicing, made, read))


def _writes_in_place(node: Node, slicing: Slicing, made: Collection[Output], read: Collection[Node]) -> bool:
    """Whether a kernel reads and makes whole tensors, and can have one buffer for both, which slices of it can't."""
    alone = node not in read and not any(node.inputs[position] in made for position in slicing.rows)
    return alone and slicing.kind is Kind.ROWS and is_elementwise(node.op)
