"""Tensors that exist as slices of rows, and the nodes that join, divide and shape them (slice_kernels.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, cast

from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.types import TensorType
from tfswap.kernels.slices import RowSlices, rows_of
from tfswap.kernels.temporaries import ceil_div
from tfswap.passes.nodes import add_integers, add_slice, restrict_like
from tfswap.plan.plan import Slices


class Part(NamedTuple):
    """Rows of a tensor in a buffer of their own, the first of them, and the one after the last."""

    begin: int
    end: int
    tensor: Output


class InSlices(NamedTuple):
    """A tensor that exists as slices, and its type in rows."""

    kind: TensorType
    parts: list[Part]


class SliceTensors:
    """The tensors of kernels in slices that begin at the same shares of their rows.

    Args:
        members: the kernels, in topological order.
        stretch: by member, the place of the last one of its stretch: members between which no tensor is whole.
    """

    def __init__(self, graph: Graph, slices: Slices, members: Mapping[Node, RowSlices], stretch: Mapping[Node, int]):
        self.graph = graph
        self.members = members
        self.rows, self.of = slices.rows, slices.of
        self.slices: dict[Output, InSlices] = {}  # by tensor made in slices
        self.wholes: dict[Output, Output] = {}
        self.made: dict[Node, list[Node]] = {}  # by member, the kernels in its place
        self.rank: dict[Node, tuple[int, int, int]] = {}
        self.place = {node: place for place, node in enumerate(graph.topological())}
        self._stretch = stretch
        self._ranges: dict[tuple[Output, int, int, int], Output] = {}
        self._reshaped: dict[tuple[Output, TensorType], Output] = {}
        self._shapes: dict[tuple[tuple[int, ...], str], Output] = {}
        self._now = (0, 0, 0)  # the rank of nodes that are added

    def each_slice(self, node: Node) -> Iterator[tuple[int, int]]:
        """(begin, end) of each slice of a kernel, which nodes that are added belong to."""
        rows = self.members[node].rows
        for begin, end in pairwise((*range(0, self.of, rows), self.of)):
            self._now = self._stretch[node], ceil_div(end, self.rows), self.place[node]
            yield begin, end

    def range_of(self, tensor: Output, kind: TensorType, begin: int, end: int) -> Output:
        """The rows of a tensor from `begin` to `end`, which parts of slices fill if they are in several. Each stretch
        has its own copy, so that none is held in between.

        Args:
            kind: its type in rows.
        """
        parts = self.slices[tensor].parts if tensor in self.slices else []
        parts = [part for part in parts if part.begin < end and begin < part.end]
        key = tensor, begin, end, self._now[0] if len(parts) > 1 else 0
        if key not in self._ranges:
            found = [
                self.part(part.tensor, max(begin, part.begin) - part.begin, min(end, part.end) - part.begin)
                for part in parts
            ]
            whole = None if parts else self.shaped(self.whole(tensor), kind)
            self._ranges[key] = self._filled(tensor.node, found) if whole is None else self.part(whole, begin, end)
        return self._ranges[key]

    def _filled(self, like: Node, slices: Sequence[Output]) -> Output:
        """A tensor of the rows of all of these; the only one."""
        if len(slices) == 1:
            return slices[0]
        rows = sum(rows_of(each.type) for each in slices)
        first, filled = 0, list[Output]()
        for each in slices:
            filled.append(self._store(like, each, filled[-1:], first, rows))
            first += rows_of(each.type)
        return filled[-1]

    def part(self, tensor: Output, begin: int, end: int) -> Output:
        """Some rows of a tensor, in its buffer."""
        if end - begin == rows_of(tensor.type):
            return tensor
        attrs = {"T": Dtype(tensor.type.dtype), "begin": begin, "rows": end - begin}
        kind = of_rows(tensor.type, end - begin)
        return self.add(tensor.node, custom_ops.ROWS, (tensor,), attrs, (kind,), begin).out()

    def shaped(self, tensor: Output, kind: TensorType) -> Output:
        """A tensor in another shape, in its buffer."""
        if tensor.type == kind:
            return tensor
        if (tensor, kind) not in self._reshaped:
            shape = self.shape(tensor.node, cast("tuple[int, ...]", kind.shape))
            attrs = {"T": Dtype(kind.dtype), "Tshape": Dtype("int32")}
            self._reshaped[tensor, kind] = self.add(tensor.node, "Reshape", (tensor, shape), attrs, (kind,), 0).out()
        return self._reshaped[tensor, kind]

    def whole(self, tensor: Output) -> Output:
        """A tensor, which the slices fill where they make it."""
        if tensor in self.slices and tensor not in self.wholes:
            now, (kind, parts) = self._now, self.slices[tensor]
            filled: list[Output] = []
            for _, part in zip(self.each_slice(tensor.node), parts, strict=True):
                filled.append(self._store(tensor.node, part.tensor, filled[-1:], part.begin, rows_of(kind)))
            self.wholes[tensor] = self.shaped(filled[-1], tensor.type)
            restrict_like(self.graph, tensor, self.wholes[tensor])
            self._now = now
        return self.wholes.get(tensor, tensor)

    def _store(self, like: Node, slice_: Output, before: Sequence[Output], begin: int, rows: int) -> Output:
        """A tensor of `rows` rows, of which a slice fills those from `begin` on."""
        attrs = {"T": Dtype(slice_.type.dtype), "N": len(before), "begin": begin, "rows": rows}
        kind = of_rows(slice_.type, rows)
        return self.add(like, custom_ops.STORE_ROWS, (slice_, *before), attrs, (kind,), begin).out()

    def shape(self, like: Node, shape: tuple[int, ...]) -> Output:
        """A constant vector."""
        key = shape, like.device
        if key not in self._shapes:
            made = add_integers(self.graph, f"tfswap/shape/{'x'.join(map(str, shape))}", shape, like.device)
            self.rank[made] = self._now
            self._shapes[key] = made.out()
        return self._shapes[key]

    # --- nodes --------------------------------------------------------------------------------------------

    def instead(self, nodes: Iterable[Node]) -> Iterable[Node]:
        """Nodes, and what is in the place of those that run in slices."""
        return dict.fromkeys(made for node in nodes for made in self.made.get(node, (node,)))

    def awaited(self, node: Node) -> Iterable[Node]:
        """What the present slice of a kernel waits for: of kernels of its stretch, the same slice."""
        stretch, number, _ = self._now
        ranks = ((each, self.rank.get(each, self._now)) for each in self.instead(node.controls))
        return (each for each, rank in ranks if rank[0] < stretch or rank[:2] == (stretch, number))

    def add(
        self,
        like: Node,
        op: str,
        inputs: Iterable[Output],
        attrs: Mapping[str, object],
        outputs: Sequence[TensorType],
        begin: int,
        controls: Iterable[Node] = (),
    ) -> Node:
        """Add a node of the present slice, named after the node that it is like."""
        made = add_slice(self.graph, like, op, inputs, attrs, outputs=outputs, begin=begin, controls=controls)
        self.rank[made] = self._now
        if op == like.op:
            for index in range(len(outputs)):
                restrict_like(self.graph, like.out(index), made.out(index))
        return made


def of_rows(kind: TensorType, rows: int) -> TensorType:
    return TensorType(kind.dtype, (rows, *cast("tuple[int, ...]", kind.shape)[1:]))
