"""Runs kernels in slices of rows, so that none of them holds all of its tensors.

A tensor between two such kernels exists as its slices alone, which are tensors like others: they may be swapped, or
recomputed slice by slice. Kernels that are not sliced read a tensor that the slices fill, one after the other
(Tfswap>StoreRows), and slices read their rows of such kernels' results in place (Tfswap>Rows).

Kernels come slice by slice in the graph's order, as far as no kernel that is not sliced stands between.

The bits are those of the whole kernels (kernels/slice_lines.py), or close to them (kernels/close_lines.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from operator import floordiv
from typing import NamedTuple, cast

from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.slice_lines import slicing_of
from tfswap.kernels.slices import Kind, RowSlices, RowSums, Slicing, rows_of, slices_of
from tfswap.kernels.target import Target
from tfswap.kernels.temporaries import ceil_div
from tfswap.kernels.windows import Window, positions_together
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import add_integers, add_slice, restrict_like, without_colocation
from tfswap.plan.plan import Slices


@graph_pass(
    requires="kernels that may run in slices, and are in no body",
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


def _members(graph: Graph, device: DeviceModel, slices: Slices) -> dict[Node, RowSlices]:
    """The kernels that run in slices, in topological order."""
    found: dict[Node, RowSlices] = {}
    known = graph.small_constants
    for name in slices.kernels:
        slicing = slicing_of(graph[name], device, known, close=slices.close) if name in graph else None
        member = None if slicing is None else slices_of(graph[name], slicing, slices.rows, slices.of)
        if member is None:
            raise InvalidModel(
                f"this plan runs {name!r} in slices of {slices.rows} of {slices.of} rows, and this graph has no such "
                f"kernel that gives {'close values' if slices.close else 'the same bits'} so on this device. Plan "
                "again for this graph."
            )
        found[graph[name]] = member
    return {node: found[node] for node in graph.topological() if node in found}


_SHAPE_TYPES = ("Tshape", "Tidx", "Tmultiples", "Index")
"""Attributes with the type of an input that has a shape: of Reshape, BroadcastTo, Tile and Slice."""


_WINDOW = {"window": "sizes", "strides": "strides", "dilations": "dilations", "padding": "padding", "sizes": "positions"}
"""By attribute of `COLUMNS`, the field of a window."""


class _Part(NamedTuple):
    """Rows of a tensor in a buffer of their own, the first of them, and the one after the last."""

    begin: int
    end: int
    tensor: Output


class _InSlices(NamedTuple):
    """A tensor that exists as slices, and its type in rows."""

    kind: TensorType
    parts: list[_Part]


class _Slicer:
    """Cuts kernels into slices that begin at the same shares of their rows.

    Args:
        members: the kernels, in topological order.
    """

    def __init__(self, graph: Graph, slices: Slices, members: Mapping[Node, RowSlices]):
        self._graph = graph
        self._members = members
        self._rows, self._of = slices.rows, slices.of
        self._nodes = graph.topological()
        self._place = {node: place for place, node in enumerate(self._nodes)}
        self._stretch = self._stretches()
        self._slices: dict[Output, _InSlices] = {}  # by tensor made in slices
        self._ranges: dict[tuple[Output, int, int], Output] = {}
        self._reshaped: dict[tuple[Output, TensorType], Output] = {}
        self._shapes: dict[tuple[tuple[int, ...], str], Output] = {}
        self._wholes: dict[Output, Output] = {}
        self._made: dict[Node, list[Node]] = {}  # by member, the kernels in its place
        self._rank: dict[Node, tuple[int, int, int]] = {}
        self._now = (0, 0, 0)  # the rank of nodes that are added

    def cut(self) -> None:
        """Make the slices, and have all other nodes read what they fill."""
        others = [node for node in self._graph if node not in self._members]
        for node, member in self._members.items():
            self._made[node] = []
            make = {Kind.ROWS: self._make_rows, Kind.SUM: self._make_sum, Kind.ROW_SUMS: self._make_row_sums}
            make[member.slicing.kind](node, member)
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
            member = self._members.get(node)
            rows = set() if member is None else {node.inputs[p] for p in member.slicing.rows}
            befores = [level[c] + (c in self._members) for c in node.controls]
            for tensor in node.inputs:
                source = self._members.get(tensor.node)
                in_rows = source is not None and source.slicing.kind is Kind.ROWS and tensor in rows
                befores.append(level[tensor.node] + (source is not None and not in_rows))
            level[node] = max(befores, default=0)
            if member is not None:
                last[level[node]] = place
        return {node: last[level[node]] for node in self._members}

    def _own_rank(self, node: Node) -> tuple[int, int, int]:
        return self._place[node], 0, 0

    def _each_slice(self, node: Node) -> Iterator[tuple[int, int]]:
        """(begin, end) of each slice of a kernel, which nodes that are added belong to."""
        rows = self._members[node].rows
        for begin, end in pairwise((*range(0, self._of, rows), self._of)):
            self._now = self._stretch[node], ceil_div(end, self._rows), self._place[node]
            yield begin, end

    # --- slices of a kernel -------------------------------------------------------------------------------

    def _make_rows(self, node: Node, member: RowSlices) -> None:
        each = [rows_of(kind) // self._of for kind in member.outputs]
        for index, kind in enumerate(member.outputs):
            self._slices[node.out(index)] = _InSlices(kind, [])
        for begin, end in self._each_slice(node):
            kinds = [_of_rows(kind, rows * (end - begin)) for kind, rows in zip(member.outputs, each, strict=True)]
            slices = {
                p: self._range(node.inputs[p], kind, *(edge * (rows_of(kind) // self._of) for edge in (begin, end)))
                for p, kind in zip(member.slicing.rows, member.inputs, strict=True)
            }
            made = self._copy(node, member.slicing, slices, kinds, begin)
            for index, rows in enumerate(each):
                self._slices[node.out(index)].parts.append(_Part(begin * rows, end * rows, made.out(index)))

    def _make_sum(self, node: Node, member: RowSlices) -> None:
        """Add up the results of `unit` rows each, in order. They are computed as soon as slices have made these."""
        rows = rows_of(member.inputs[0])
        unit = member.slicing.unit or member.rows * rows // self._of
        total: Output | None = None
        done = 0
        for _, end in self._each_slice(node):
            made_rows = end * rows // self._of
            while done < made_rows and (done + unit <= made_rows or made_rows == rows):
                upto = min(done + unit, rows)
                slices = {
                    p: self._range(node.inputs[p], kind, done, upto)
                    for p, kind in zip(member.slicing.rows, member.inputs, strict=True)
                }
                if member.slicing.window is None:
                    term = self._copy(node, member.slicing, slices, node.outputs, done).out()
                    total = self._sum(node, total, term, done)
                else:
                    total = self._products(node, member.slicing.window, slices[0], slices[2], total)
                done = upto
        assert total is not None, "a tensor in slices has rows"
        self._wholes[node.out()] = self._shaped(total, node.outputs[0])
        self._made[node] += dict.fromkeys((total.node, self._wholes[node.out()].node))

    def _sum(self, node: Node, total: Output | None, term: Output, begin: int) -> Output:
        """The sum with one more term."""
        if total is None:
            return term
        made = self._add(node, "AddV2", (total, term), {"T": Dtype(term.type.dtype)}, (term.type,), begin)
        self._made[node].append(made)
        return made.out()

    def _products(
        self, node: Node, window: Window, images: Output, gradient: Output, total: Output | None
    ) -> Output:
        """A filter's gradient added to a sum: products of columns with the gradient, for some positions of the window
        each. One starts when the one before is added, so that no two of them are held.
        """
        dtype, (*_, made) = gradient.type.dtype, cast("tuple[int, ...]", gradient.type.shape)
        columns_kind = TensorType(dtype, (1, window.elements * cast("tuple[int, ...]", images.type.shape)[-1]))
        rows = (gradient.type.num_elements or 0) // made
        flat = self._shaped(gradient, TensorType(dtype, (rows, made)))
        largest_bytes = max(tensor.type.nbytes or 0 for tensor in (images, gradient, node.out()))
        step = positions_together(columns_kind.nbytes or 0, largest_bytes)
        for begin, end in pairwise((*range(0, rows, step), rows)):
            attrs: dict[str, object] = {"T": Dtype(dtype), "begin": begin, "rows": end - begin}
            attrs |= {name: getattr(window, field) for name, field in _WINDOW.items()}
            kind = _of_rows(columns_kind, end - begin)
            before = (*self._instead(node.controls), *([] if total is None else [total.node]))
            columns = self._add(node, custom_ops.COLUMNS, (images,), attrs, (kind,), begin, before)
            product = {"T": Dtype(dtype), "transpose_a": True, "transpose_b": False}
            factors = columns.out(), self._part(flat, begin, end)
            kind = TensorType(dtype, (*cast("tuple[int, ...]", kind.shape)[1:], made))
            result = self._add(node, "MatMul", factors, product, (kind,), begin)
            self._made[node] += columns, result
            total = self._sum(node, total, result.out(), begin)
        assert total is not None, "a gradient has rows"
        return total

    def _make_row_sums(self, node: Node, member: RowSlices) -> None:
        """Continue the sums of the slices before."""
        gradient, sums = member.inputs[0], cast("RowSums", member.slicing.sums)
        shape = cast("tuple[int, ...]", gradient.shape)
        each, rows = shape[0] // self._of, prod(shape[1:-1])
        dtype, count = Dtype(gradient.dtype), shape[0] * rows
        kind = TensorType(gradient.dtype, (sums.blocks, shape[-1]))
        before: tuple[Output, ...] = ()
        for begin, end in self._each_slice(node):
            inputs = (self._range(node.inputs[0], gradient, begin * each, end * each), *before)
            attrs: dict[str, object] = {"T": dtype, "N": len(before), "begin": begin * each * rows, "rows": count}
            attrs |= {"blocks": sums.blocks, "unrolled": sums.unrolled}
            controls = self._instead(node.controls)
            made = self._add(node, custom_ops.ADD_ROWS, inputs, attrs, (kind,), begin, controls)
            self._made[node].append(made)
            before = (made.out(),)
        attrs = {"T": dtype, "divisor": count if sums.mean else 1}
        total = self._add(node, custom_ops.ADD_BLOCKS, before, attrs, (TensorType(kind.dtype, shape[-1:]),), 0)
        self._wholes[node.out()] = self._shaped(total.out(), node.outputs[0])
        self._made[node] += dict.fromkeys((total, self._wholes[node.out()].node))

    def _copy(
        self, node: Node, slicing: Slicing, slices: Mapping[int, Output], kinds: Sequence[TensorType], begin: int
    ) -> Node:
        """A copy of a kernel that reads slices."""
        inputs = [slices.get(p) or self._whole(tensor) for p, tensor in enumerate(node.inputs)]
        attrs = without_colocation(node.attrs)
        if slicing.shape is not None:
            shape = cast("tuple[int, ...]", kinds[0].shape)
            if node.op == "Tile":
                read = cast("tuple[int, ...]", inputs[0].type.shape)
                shape = tuple(map(floordiv, shape, read))
            inputs[slicing.shape] = self._shape(node, shape)
            attrs = {**attrs, **{name: Dtype("int32") for name in _SHAPE_TYPES if name in attrs}}
        made = self._add(node, node.op, inputs, attrs, kinds, begin, self._instead(node.controls))
        self._made[node].append(made)
        return made

    # --- tensors ------------------------------------------------------------------------------------------

    def _range(self, tensor: Output, kind: TensorType, begin: int, end: int) -> Output:
        """The rows of a tensor from `begin` to `end`, which parts of slices fill if they are in several.

        Args:
            kind: its type in rows.
        """
        key = tensor, begin, end
        if key not in self._ranges:
            if tensor in self._slices:
                found = [
                    self._part(part.tensor, max(begin, part.begin) - part.begin, min(end, part.end) - part.begin)
                    for part in self._slices[tensor].parts
                    if part.begin < end and begin < part.end
                ]
                self._ranges[key] = self._filled(tensor.node, found)
            else:
                self._ranges[key] = self._part(self._shaped(self._whole(tensor), kind), begin, end)
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

    def _part(self, tensor: Output, begin: int, end: int) -> Output:
        """Some rows of a tensor, in its buffer."""
        if end - begin == rows_of(tensor.type):
            return tensor
        attrs = {"T": Dtype(tensor.type.dtype), "begin": begin, "rows": end - begin}
        kind = _of_rows(tensor.type, end - begin)
        return self._add(tensor.node, custom_ops.ROWS, (tensor,), attrs, (kind,), begin).out()

    def _shaped(self, tensor: Output, kind: TensorType) -> Output:
        """A tensor in another shape, in its buffer."""
        if tensor.type == kind:
            return tensor
        if (tensor, kind) not in self._reshaped:
            shape = self._shape(tensor.node, cast("tuple[int, ...]", kind.shape))
            attrs = {"T": Dtype(kind.dtype), "Tshape": Dtype("int32")}
            self._reshaped[tensor, kind] = self._add(tensor.node, "Reshape", (tensor, shape), attrs, (kind,), 0).out()
        return self._reshaped[tensor, kind]

    def _whole(self, tensor: Output) -> Output:
        """A tensor, which the slices fill where they make it."""
        if tensor in self._slices and tensor not in self._wholes:
            now, (kind, parts) = self._now, self._slices[tensor]
            filled: list[Output] = []
            for _, part in zip(self._each_slice(tensor.node), parts, strict=True):
                filled.append(self._store(tensor.node, part.tensor, filled[-1:], part.begin, rows_of(kind)))
            self._wholes[tensor] = self._shaped(filled[-1], tensor.type)
            restrict_like(self._graph, tensor, self._wholes[tensor])
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
