"""Runs kernels in slices of rows, so that none of them holds all of its tensors.

A tensor between two such kernels exists as its slices alone, which are tensors like others: they may be swapped, or
recomputed slice by slice. Kernels that are not sliced read a tensor that the slices fill, one after the other
(Tfswap>StoreRows), and slices read their rows of such kernels' results in place (Tfswap>Rows).

Kernels come slice by slice in the graph's order, as far as no kernel that is not sliced stands between.

The bits are those of the whole kernels (kernels/slices.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import cast

from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.slices import Kind, Slicing, leading_rows, runs_in_slices, slicing_of
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import add_integers, add_slice, restrict_like, without_colocation
from tfswap.plan.plan import Slices


@graph_pass(
    requires="kernels that may run in slices with the same bits, and are in no body",
    ensures="these run in slices of rows, and no tensor between two of them exists as a whole",
)
def slice_kernels(graph: Graph, target: Target, sliced: Sequence[Slices]) -> int:
    """Run kernels of the graph in slices, in place; returns how many more nodes there are.

    Raises InvalidModel where a kernel can't run so here.
    """
    before = len(graph)
    for slices in sliced:
        _Slicer(graph, slices, _members(graph, target.device, slices)).cut()
    return len(graph) - before


def _members(graph: Graph, device: DeviceModel, slices: Slices) -> dict[Node, Slicing]:
    """The kernels that run in slices, in topological order."""
    found: dict[Node, Slicing] = {}
    for name in slices.kernels:
        slicing = slicing_of(graph[name], device) if name in graph else None
        if slicing is None or not runs_in_slices(graph[name], slicing, slices.rows, slices.of):
            raise InvalidModel(
                f"this plan runs {name!r} in slices of {slices.rows} of {slices.of} rows, and this graph has no such "
                "kernel that gives the same bits so on this device. Plan again for this graph."
            )
        found[graph[name]] = slicing
    return {node: found[node] for node in graph.topological() if node in found}


def _rows(kind: TensorType) -> int:
    return cast("tuple[int, ...]", kind.shape)[0]


class _Slicer:
    """Cuts kernels into slices that begin at the same shares of their rows.

    Args:
        members: the kernels, in topological order.
    """

    def __init__(self, graph: Graph, slices: Slices, members: Mapping[Node, Slicing]):
        self._graph = graph
        self._members = members
        self._of = slices.of
        self._ends = (*range(0, slices.of, slices.rows), slices.of)
        self._nodes = graph.topological()
        self._place = {node: place for place, node in enumerate(self._nodes)}
        self._stretch = self._stretches()
        self._slices: dict[Output, list[Output]] = {}  # by tensor made in slices
        self._views: dict[tuple[Output, int, int], Output] = {}
        self._shapes: dict[tuple[tuple[int, ...], str], Output] = {}
        self._wholes: dict[Output, Output] = {}
        self._made: dict[Node, list[Node]] = {}  # by member, the kernels in its place
        self._rank: dict[Node, tuple[int, int, int]] = {}
        self._now = (0, 0, 0)  # the rank of nodes that are added

    def cut(self) -> None:
        """Make the slices, and have all other nodes read what they fill."""
        others = [node for node in self._graph if node not in self._members]
        for node, slicing in self._members.items():
            self._made[node] = []
            make = {Kind.ROWS: self._make_rows, Kind.SUM: self._make_sum, Kind.ROW_SUMS: self._make_row_sums}
            make[slicing.kind](node, slicing)
        for node in others:
            if any(tensor.node in self._members for tensor in node.inputs):
                node.inputs = tuple(self._whole(tensor) for tensor in node.inputs)
            node.controls = tuple(self._instead(node.controls))
        self._graph.fetches = [self._whole(tensor) for tensor in self._graph.fetches]
        self._graph.targets = [*self._instead(self._graph.targets)]
        self._graph.arrange({node: self._rank.get(node) or self._own_rank(node) for node in self._graph})
        self._graph.prune()

    # --- the order --------------------------------------------------------------------------------------

    def _stretches(self) -> dict[Node, int]:
        """By member, the place of the last member of its stretch: members between which no tensor is whole."""
        level: dict[Node, int] = {}
        last: dict[int, int] = {}
        for place, node in enumerate(self._nodes):
            slicing = self._members.get(node)
            rows = set() if slicing is None else {node.inputs[p] for p in slicing.rows}
            befores = [level[c] + (c in self._members) for c in node.controls]
            for tensor in node.inputs:
                source = self._members.get(tensor.node)
                in_rows = source is not None and source.kind is Kind.ROWS and tensor in rows
                befores.append(level[tensor.node] + (source is not None and not in_rows))
            level[node] = max(befores, default=0)
            if slicing is not None:
                last[level[node]] = place
        return {node: last[level[node]] for node in self._members}

    def _own_rank(self, node: Node) -> tuple[int, int, int]:
        return self._place[node], 0, 0

    def _each_slice(self, node: Node) -> Iterator[tuple[int, int, int]]:
        """(number, begin, end) of each slice, which nodes that are added belong to."""
        for number, (begin, end) in enumerate(pairwise(self._ends)):
            self._now = self._stretch[node], number, self._place[node]
            yield number, begin, end

    # --- slices of a kernel -------------------------------------------------------------------------------

    def _make_rows(self, node: Node, slicing: Slicing) -> None:
        for index in range(len(node.outputs)):
            self._slices[node.out(index)] = []
        for number, begin, end in self._each_slice(node):
            kinds = [_of_rows(kind, _rows(kind) // self._of * (end - begin)) for kind in node.outputs]
            slices = {p: self._slice(node.inputs[p], number, begin, end) for p in slicing.rows}
            made = self._copy(node, slicing, slices, kinds, begin)
            for index in range(len(node.outputs)):
                self._slices[node.out(index)].append(made.out(index))

    def _make_sum(self, node: Node, slicing: Slicing) -> None:
        """Add up the results of `unit` rows each, in order. They are computed as soon as slices have made these."""
        rows = leading_rows(node, slicing)
        total: Output | None = None
        done = 0
        for _, _, end in self._each_slice(node):
            made_rows = end * rows // self._of
            while done < made_rows and (done + slicing.unit <= made_rows or made_rows == rows):
                upto = min(done + slicing.unit, rows)
                slices = {p: self._range(node.inputs[p], done, upto) for p in slicing.rows}
                made = self._copy(node, slicing, slices, node.outputs, done).out()
                if total is not None:
                    attrs = {"T": Dtype(made.type.dtype)}
                    made = self._add(node, "AddV2", (total, made), attrs, (made.type,), done).out()
                    self._made[node].append(made.node)
                total, done = made, upto
        assert total is not None, "a tensor in slices has rows"
        self._wholes[node.out()] = total

    def _make_row_sums(self, node: Node, slicing: Slicing) -> None:
        """Continue the sums of the slices before."""
        gradient = node.inputs[0]
        shape = cast("tuple[int, ...]", gradient.type.shape)
        each = prod(shape[:-1]) // self._of
        kind = TensorType(gradient.type.dtype, (slicing.blocks, shape[-1]))
        before: tuple[Output, ...] = ()
        for number, begin, end in self._each_slice(node):
            attrs = {
                "T": Dtype(kind.dtype),
                "N": len(before),
                "begin": begin * each,
                "rows": prod(shape[:-1]),
                "blocks": slicing.blocks,
            }
            inputs = (self._slice(gradient, number, begin, end), *before)
            controls = self._instead(node.controls)
            made = self._add(node, custom_ops.ADD_ROWS, inputs, attrs, (kind,), begin, controls)
            self._made[node].append(made)
            before = (made.out(),)
        attrs = {"T": Dtype(kind.dtype)}
        made = self._add(node, custom_ops.ADD_BLOCKS, before, attrs, node.outputs, 0)
        self._made[node].append(made)
        self._wholes[node.out()] = made.out()

    def _copy(
        self, node: Node, slicing: Slicing, slices: Mapping[int, Output], kinds: Sequence[TensorType], begin: int
    ) -> Node:
        """A copy of a kernel that reads slices."""
        inputs = [slices.get(p) or self._whole(tensor) for p, tensor in enumerate(node.inputs)]
        attrs = without_colocation(node.attrs)
        if slicing.shape is not None:
            shape = cast("tuple[int, ...]", kinds[0].shape)
            inputs[slicing.shape] = self._shape(node, shape)
            attrs = {**attrs, "Tshape": Dtype("int32")} if "Tshape" in attrs else attrs
        made = self._add(node, node.op, inputs, attrs, kinds, begin, self._instead(node.controls))
        self._made[node].append(made)
        return made

    # --- tensors ------------------------------------------------------------------------------------------

    def _slice(self, tensor: Output, number: int, begin: int, end: int) -> Output:
        """A slice of a tensor."""
        if tensor in self._slices:
            return self._slices[tensor][number]
        each = _rows(tensor.type) // self._of
        return self._part(self._whole(tensor), begin * each, (end - begin) * each)

    def _range(self, tensor: Output, begin: int, end: int) -> Output:
        """The rows of a tensor from `begin` to `end`, which parts of slices fill if they are in several."""
        if tensor not in self._slices:
            return self._part(self._whole(tensor), begin, end - begin)
        found: list[Output] = []
        filled = begin
        each = _rows(tensor.type) // self._of
        for number, (first, last) in enumerate(pairwise(each * edge for edge in self._ends)):
            if first < end and begin < last:
                found.append(self._part(self._slices[tensor][number], filled - first, min(end, last) - filled))
                filled = min(end, last)
        return self._filled(tensor.node, found)

    def _filled(self, like: Node, slices: Sequence[Output]) -> Output:
        """A tensor of the rows of all of these; the only one."""
        if len(slices) == 1:
            return slices[0]
        rows = sum(_rows(each.type) for each in slices)
        first, filled = 0, list[Output]()
        for each in slices:
            filled.append(self._store(like, each, filled[-1:], first, rows))
            first += _rows(each.type)
        return filled[-1]

    def _part(self, tensor: Output, begin: int, rows: int) -> Output:
        """Some rows of a tensor, in its buffer."""
        if rows == _rows(tensor.type):
            return tensor
        key = tensor, begin, rows
        if key not in self._views:
            attrs = {"T": Dtype(tensor.type.dtype), "begin": begin, "rows": rows}
            kind = _of_rows(tensor.type, rows)
            self._views[key] = self._add(tensor.node, custom_ops.ROWS, (tensor,), attrs, (kind,), begin).out()
        return self._views[key]

    def _whole(self, tensor: Output) -> Output:
        """A tensor, which the slices fill where they make it."""
        if tensor in self._slices and tensor not in self._wholes:
            now, rows = self._now, _rows(tensor.type)
            filled: list[Output] = []
            for number, begin, _ in self._each_slice(tensor.node):
                slice_, first = self._slices[tensor][number], begin * (rows // self._of)
                filled.append(self._store(tensor.node, slice_, filled[-1:], first, rows))
            self._wholes[tensor] = filled[-1]
            restrict_like(self._graph, tensor, filled[-1])
            self._now = now
        return self._wholes.get(tensor, tensor)

    def _store(self, like: Node, slice_: Output, before: Sequence[Output], begin: int, rows: int) -> Output:
        """A tensor of `rows` rows, of which a slice fills those from `begin` on."""
        attrs = {"T": Dtype(slice_.type.dtype), "N": len(before), "begin": begin, "rows": rows}
        kind = _of_rows(slice_.type, rows)
        return self._add(like, custom_ops.STORE_ROWS, (slice_, *before), attrs, (kind,), begin).out()

    def _shape(self, like: Node, shape: tuple[int, ...]) -> Output:
        """A constant vector."""
        key = shape, like.device
        if key not in self._shapes:
            made = add_integers(self._graph, f"tfswap/shape/{'x'.join(map(str, shape))}", shape, like.device)
            self._rank[made] = self._now
            self._shapes[key] = made.out()
        return self._shapes[key]

    # --- nodes --------------------------------------------------------------------------------------------

    def _instead(self, nodes: Iterable[Node]) -> Iterable[Node]:
        """Nodes, and what is in the place of those that run in slices."""
        return dict.fromkeys(made for node in nodes for made in self._made.get(node, (node,)))

    def _add(
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
        made = add_slice(self._graph, like, op, inputs, attrs, outputs=outputs, begin=begin, controls=controls)
        self._rank[made] = self._now
        if op == like.op:
            for index in range(len(outputs)):
                restrict_like(self._graph, like.out(index), made.out(index))
        return made


def _of_rows(kind: TensorType, rows: int) -> TensorType:
    return TensorType(kind.dtype, (rows, *cast("tuple[int, ...]", kind.shape)[1:]))
