"""Runs kernels in slices of rows, so that none of them holds all of its tensors.

A tensor between two such kernels exists as its slices alone, which are tensors like others: they may be swapped, or
recomputed slice by slice. Kernels that are not sliced read a tensor that the slices fill, one after the other
(Tfswap>StoreRows), and slices read their rows of such kernels' results in place (Tfswap>Rows).

Kernels come slice by slice in the graph's order, as far as no kernel that is not sliced stands between.

The bits are those of the whole kernels (kernels/slice_lines.py), or close to them (kernels/close_lines.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from math import prod
from operator import floordiv
from typing import cast

from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.op_traits import is_const, is_elementwise
from tfswap.ir.types import TensorType
from tfswap.kernels.bounded_sums import Patches, Products
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.slice_lines import slicing_of
from tfswap.kernels.slices import Kind, RowSlices, RowSums, Slicing, rows_of, slices_of
from tfswap.kernels.target import Target
from tfswap.kernels.windows import Window, positions_together
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import without_colocation
from tfswap.passes.tactics.slice_tensors import InSlices, Part, SliceTensors, of_rows
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
    _have_readers_wait(graph, {name for slices in sliced for name in slices.kernels})
    for slices in sliced:
        _Slicer(graph, slices, _members(graph, target.device, slices)).cut()
    return len(graph) - before


def _have_readers_wait(graph: Graph, kernels: Collection[str]) -> None:
    """Have the readers of a constant that waits for one of these kernels wait for it instead, in place, so that each
    slice waits for slices alone. TensorFlow's gradients and Grappler make constants with control inputs.
    """
    waits = {n: n.controls for n in graph if is_const(n.op) and any(c.name in kernels for c in n.controls)}
    for node in graph:
        read = [tensor.node for tensor in node.inputs if tensor.node in waits]
        if read:
            node.controls = tuple(dict.fromkeys((*node.controls, *(c for constant in read for c in waits[constant]))))
    for constant in waits:
        constant.controls = ()


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


_WINDOW = {
    "window": "sizes",
    "strides": "strides",
    "dilations": "dilations",
    "padding": "padding",
    "sizes": "positions",
}
"""By attribute of `COLUMNS`, the field of a window."""


def _stretches(graph: Graph, members: Mapping[Node, RowSlices]) -> dict[Node, int]:
    """By member, the place of the last member of its stretch: members between which no tensor is whole.

    Members that read no slices are in the stretch of the first that reads theirs: a mask of the last layer is not made
    with the first.
    """
    level: dict[Node, int] = {}
    last: dict[int, int] = {}
    first_reader: dict[Node, int] = {}
    order = graph.topological()
    for node in order:
        member = members.get(node)
        rows = set() if member is None else {node.inputs[p] for p in member.slicing.rows}
        befores = [level[c] + (c in members and (member is None or not _in_rows(members[c]))) for c in node.controls]
        for tensor in node.inputs:
            source = members.get(tensor.node)
            in_rows = source is not None and _in_rows(source) and tensor in rows
            befores.append(level[tensor.node] + (source is not None and not in_rows))
        level[node] = max(befores, default=0)
    for node in reversed(order):
        member = members.get(node)
        read = {tensor.node for tensor in node.inputs} | {*node.controls}
        if member is not None and read.isdisjoint(members):
            level[node] = max(level[node], first_reader.get(node, 0))
        for each in read:
            first_reader[each] = min(level[node], first_reader.get(each, level[node]))
    for place, node in enumerate(order):
        if node in members:
            last[level[node]] = place
    return {node: last[level[node]] for node in members}


def _in_rows(member: RowSlices) -> bool:
    """Whether the slices of a kernel are rows of its result."""
    return member.slicing.kind is Kind.ROWS


class _Slicer(SliceTensors):
    """Cuts kernels into slices.

    Args:
        members: the kernels, in topological order.
    """

    def __init__(self, graph: Graph, slices: Slices, members: Mapping[Node, RowSlices]):
        super().__init__(graph, slices, members, _stretches(graph, members))
        self._filters: dict[Node, Output] = {}  # by kernel, its flipped filter

    def cut(self) -> None:
        """Make the slices, and have all other nodes read what they fill."""
        others = [node for node in self.graph if node not in self.members]
        make = {
            Kind.ROWS: self._make_rows,
            Kind.SUM: self._make_sum,
            Kind.ROW_SUMS: self._make_row_sums,
            Kind.PRODUCTS: self._make_products,
            Kind.WHOLE: self._make_whole,
        }
        for node, member in self.members.items():
            self.made[node] = []
            make[member.slicing.kind](node, member)
        for node in others:
            if any(tensor.node in self.members for tensor in node.inputs):
                node.inputs = tuple(self.whole(tensor) for tensor in node.inputs)
            node.controls = tuple(self.instead(node.controls))
        self.graph.fetches = [self.whole(tensor) for tensor in self.graph.fetches]
        self.graph.targets = [*self.instead(self.graph.targets)]
        self.graph.arrange({node: self.rank.get(node) or (self.place[node], 0, 0) for node in self.graph})
        self.graph.prune()

    # --- slices of a kernel -------------------------------------------------------------------------------

    def _make_rows(self, node: Node, member: RowSlices) -> None:
        each = [rows_of(kind) // self.of for kind in member.outputs]
        for index, kind in enumerate(member.outputs):
            self.slices[node.out(index)] = InSlices(kind, [])
        for begin, end in self.each_slice(node):
            slices, before, after = self._reads(node, member, begin, end, self.of)
            kinds = [
                of_rows(kind, rows * (end - begin) + before + after)
                for kind, rows in zip(member.outputs, each, strict=True)
            ]
            made = self._copy(node, member.slicing, slices, kinds, begin)
            for index, (rows, kind) in enumerate(zip(each, kinds, strict=True)):
                result = self.shaped(made.out(index), kind)
                part = self.part(result, before, rows_of(kind) - after)
                self._made_too(node, result, part)
                self.slices[node.out(index)].parts.append(Part(begin * rows, end * rows, part))

    def _made_too(self, node: Node, *tensors: Output) -> None:
        """Count the nodes of these among those in the place of a kernel."""
        self.made[node] = [*dict.fromkeys((*self.made[node], *(tensor.node for tensor in tensors)))]

    def _reads(
        self, node: Node, member: RowSlices, begin: int, end: int, of: int
    ) -> tuple[dict[int, Output], int, int]:
        """What a slice reads, by input, and how many more rows of the first of them are before it and after it.

        Args:
            begin, end: the slice's rows, of `of`.
        """
        first = member.slicing.rows[:1]
        most = dict.fromkeys(first, member.slicing.halo)
        slices: dict[int, Output] = {}
        before = after = 0
        for p, kind in zip(member.slicing.rows, member.inputs, strict=True):
            rows = rows_of(kind)
            begin_row, end_row = begin * rows // of, end * rows // of
            halo = most.get(p, (0, 0))
            more = min(halo[0], begin_row), min(halo[1], rows - end_row)
            before, after = more if p in most else (before, after)
            slices[p] = self.range_of(node.inputs[p], kind, begin_row - more[0], end_row + more[1])
        return slices, before, after

    def _make_sum(self, node: Node, member: RowSlices) -> None:
        """Add up the results of `unit` rows each, in order. They are computed as soon as slices have made these."""
        rows = rows_of(member.inputs[0])
        unit = member.slicing.unit or member.rows * rows // self.of
        totals: tuple[Output, ...] = ()
        done = 0
        for _, end in self.each_slice(node):
            made_rows = end * rows // self.of
            while done < made_rows and (done + unit <= made_rows or made_rows == rows):
                upto = min(done + unit, rows)
                slices, before, _ = self._reads(node, member, done, upto, rows)
                if isinstance(products := member.slicing.bounded, Products):
                    first = done * products.rows // rows
                    total, _ = self._add_products(node, products, [*slices.values()], totals, first, closed=True)
                    totals = (total,)
                elif (window := member.slicing.window) is None:
                    term = self._copy(node, member.slicing, slices, node.outputs, done)
                    terms = [term.out(index) for index in range(len(node.outputs))]
                    totals = tuple(self._sum(node, totals[i : i + 1], each, done) for i, each in enumerate(terms))
                else:
                    if member.slicing.image:
                        window = window.in_rows(rows_of(slices[2].type), before)
                    totals = (self._products(node, window, self._images(member.slicing, slices[0]), slices[2], totals),)
                done = upto
        self._made_sums(node, *totals)

    def _sum(self, node: Node, total: Sequence[Output], term: Output, begin: int) -> Output:
        """The sum with one more term; the first term where there is no sum yet."""
        if not total:
            return term
        made = self.add(node, "AddV2", (*total, term), {"T": Dtype(term.type.dtype)}, (term.type,), begin)
        self.made[node].append(made)
        return made.out()

    def _products(
        self, node: Node, window: Window, images: Output, gradient: Output, total: tuple[Output, ...]
    ) -> Output:
        """A filter's gradient added to a sum: products of columns with the gradient, for some positions of the window
        each. One starts when the one before is added, so that no two of them are held.
        """
        dtype, (*_, made) = gradient.type.dtype, cast("tuple[int, ...]", gradient.type.shape)
        columns_kind = TensorType(dtype, (1, window.elements * cast("tuple[int, ...]", images.type.shape)[-1]))
        rows = (gradient.type.num_elements or 0) // made
        flat = self.shaped(gradient, TensorType(dtype, (rows, made)))
        largest_bytes = max(tensor.type.nbytes or 0 for tensor in (images, gradient, node.out()))
        step = positions_together(columns_kind.nbytes or 0, largest_bytes)
        for begin, end in pairwise((*range(0, rows, step), rows)):
            attrs: dict[str, object] = {"T": Dtype(dtype), "begin": begin, "rows": end - begin}
            attrs |= {name: getattr(window, field) for name, field in _WINDOW.items()}
            kind = of_rows(columns_kind, end - begin)
            before = (*self.awaited(node), *(each.node for each in total))
            columns = self.add(node, custom_ops.COLUMNS, (images,), attrs, (kind,), begin, before)
            product = {"T": Dtype(dtype), "transpose_a": True, "transpose_b": False}
            factors = columns.out(), self.part(flat, begin, end)
            kind = TensorType(dtype, (*cast("tuple[int, ...]", kind.shape)[1:], made))
            result = self.add(node, "MatMul", factors, product, (kind,), begin)
            self.made[node] += columns, result
            total = (self._sum(node, total, result.out(), begin),)
        return total[0]

    def _make_products(self, node: Node, member: RowSlices) -> None:
        """Continue the sums of products of the slices before."""
        products = cast("Products", member.slicing.bounded)
        before = tuple[Output, ...]()
        for begin, end in self.each_slice(node):
            slices, _, _ = self._reads(node, member, begin, end, self.of)
            first = begin * products.rows // self.of
            before = self._add_products(node, products, [*slices.values()], before, first, closed=False)
        self._made_sums(node, before[0])

    def _make_whole(self, node: Node, member: RowSlices) -> None:
        """Another kernel in the place of this one."""
        self._now = self._stretch[node], 1, self.place[node]
        bounded = member.slicing.bounded
        if isinstance(bounded, Patches):
            made = self._image_gradient(node, bounded, self.whole(node.inputs[2]), node.outputs[0], 0)
            self.made[node].append(made)
            self.wholes[node.out()] = made.out()
        else:
            tensors = [self.whole(node.inputs[p]) for p in (0, 2)]
            self._made_sums(node, self._add_products(node, cast("Products", bounded), tensors, (), 0, closed=True)[0])

    def _made_sums(self, node: Node, *totals: Output) -> None:
        """Have these be the results of a kernel."""
        for index, (total, kind) in enumerate(zip(totals, node.outputs, strict=True)):
            self.wholes[node.out(index)] = whole = self.shaped(total, kind)
            self.made[node] += dict.fromkeys((total.node, whole.node))

    def _add_products(
        self,
        node: Node,
        products: Products,
        tensors: Sequence[Output],
        before: tuple[Output, ...],
        begin: int,
        *,
        closed: bool,
    ) -> tuple[Output, Output]:
        """The sum and the state that the next slice continues.

        Args:
            tensors: images and gradients of the slice.
            begin: the first row of the slice.
            closed: whether nothing but the sum is kept between slices.
        """
        gradients = tensors[1].type
        made = cast("tuple[int, ...]", gradients.shape)[-1]
        width = (node.outputs[0].num_elements or 0) // made
        dtype = Dtype(gradients.dtype)
        attrs: dict[str, object] = {"T": dtype, "N": len(before), "begin": begin, "rows": products.rows}
        attrs |= {"shard": tuple(products.shard), "last_shard": tuple(products.last_shard), "chunk": products.chunk}
        attrs["closed"] = closed
        window = products.window
        attrs |= {name: () if window is None else getattr(window, field) for name, field in _WINDOW.items()}
        state = TensorType(gradients.dtype, (0 if closed else products.state_elements(width, made),))
        kinds = (TensorType(gradients.dtype, (width, made)), state)
        inputs = (*tensors, *before)
        added = self.add(node, custom_ops.ADD_PRODUCTS, inputs, attrs, kinds, begin, self.awaited(node))
        self.made[node].append(added)
        return added.out(0), added.out(1)

    def _image_gradient(self, node: Node, patches: Patches, gradient: Output, kind: TensorType, begin: int) -> Node:
        """An image's gradient with a part of its columns."""
        attrs: dict[str, object] = {"T": Dtype(kind.dtype), "chunk": patches.chunk}
        attrs |= {name: getattr(patches.window, field) for name, field in _WINDOW.items()}
        attrs["image"] = cast("tuple[int, ...]", kind.shape)[1:-1]
        inputs = self.whole(node.inputs[1]), gradient
        return self.add(node, custom_ops.IMAGE_GRADIENT, inputs, attrs, (kind,), begin, self.awaited(node))

    def _make_row_sums(self, node: Node, member: RowSlices) -> None:
        """Continue the sums of the slices before."""
        gradient, sums = member.inputs[0], cast("RowSums", member.slicing.sums)
        shape = cast("tuple[int, ...]", gradient.shape)
        each, rows = shape[0] // self.of, prod(shape[1:-1])
        dtype, count = Dtype(gradient.dtype), shape[0] * rows
        kind = TensorType(gradient.dtype, (sums.blocks, shape[-1]))
        before: tuple[Output, ...] = ()
        for begin, end in self.each_slice(node):
            inputs = (self.range_of(node.inputs[0], gradient, begin * each, end * each), *before)
            attrs: dict[str, object] = {"T": dtype, "N": len(before), "begin": begin * each * rows, "rows": count}
            attrs |= {"blocks": sums.blocks, "unrolled": sums.unrolled}
            controls = self.awaited(node)
            made = self.add(node, custom_ops.ADD_ROWS, inputs, attrs, (kind,), begin, controls)
            self.made[node].append(made)
            before = (made.out(),)
        attrs = {"T": dtype, "divisor": count if sums.mean else 1}
        total = self.add(node, custom_ops.ADD_BLOCKS, before, attrs, (TensorType(kind.dtype, shape[-1:]),), 0)
        self._made_sums(node, total.out())

    def _copy(
        self, node: Node, slicing: Slicing, slices: Mapping[int, Output], kinds: Sequence[TensorType], begin: int
    ) -> Node:
        """A copy of a kernel that reads slices."""
        if slicing.image:
            kinds = [_image(kind) for kind in kinds] if slicing.kind is Kind.ROWS else kinds
            slices = {p: self._images(slicing, tensor) for p, tensor in slices.items()}
        if isinstance(slicing.bounded, Patches):
            made = self._image_gradient(node, slicing.bounded, slices[2], kinds[0], begin)
            self.made[node].append(made)
            return made
        if slicing.flipped:
            return self._convolution(node, slices[2], kinds, begin)
        merged = len(node.outputs[0].shape or ()) - len(kinds[0].shape or ())
        inputs = [
            slices.get(p) or (self._merged(tensor, merged) if is_elementwise(node.op) else self.whole(tensor))
            for p, tensor in enumerate(node.inputs)
        ]
        attrs = without_colocation(node.attrs)
        if slicing.shape is not None:
            shape = cast("tuple[int, ...]", kinds[0].shape)
            if node.op == "Tile":
                read = cast("tuple[int, ...]", inputs[0].type.shape)
                shape = tuple(map(floordiv, shape, read))
            inputs[slicing.shape] = self.shape(node, shape)
            attrs = {**attrs, **{name: Dtype("int32") for name in _SHAPE_TYPES if name in attrs}}
        made = self.add(node, node.op, inputs, attrs, kinds, begin, self.awaited(node))
        self.made[node].append(made)
        return made

    def _merged(self, tensor: Output, axes: int) -> Output:
        """A tensor that each row reads, next to rows of which some more leading axes are merged into one."""
        whole = self.whole(tensor)
        shape = cast("tuple[int, ...]", whole.type.shape)
        ones = min(axes, next((axis for axis, size in enumerate(shape) if size > 1), len(shape)))
        return self.shaped(whole, TensorType(whole.type.dtype, shape[ones:])) if ones > 0 else whole

    def _images(self, slicing: Slicing, tensor: Output) -> Output:
        """A slice as kernels of images read it."""
        return self.shaped(tensor, _image(tensor.type)) if slicing.image else tensor

    def _convolution(self, node: Node, gradient: Output, kinds: Sequence[TensorType], begin: int) -> Node:
        """An image's gradient as a convolution of the result's gradient with the flipped filter."""
        attrs = {name: value for name, value in without_colocation(node.attrs).items() if name != "Tshape"}
        op = "Conv3D" if len(cast("tuple[int, ...]", gradient.type.shape)) == 5 else "Conv2D"
        inputs = gradient, self._flipped(node)
        made = self.add(node, op, inputs, attrs, kinds, begin, self.awaited(node))
        self.made[node].append(made)
        return made

    def _flipped(self, node: Node) -> Output:
        """The filter of a kernel, turned round, and its channels exchanged."""
        if node not in self._filters:
            kernel = self.whole(node.inputs[1])
            shape = cast("tuple[int, ...]", kernel.type.shape)
            axes = tuple(range(len(shape) - 2))
            dtype, int32 = Dtype(kernel.type.dtype), Dtype("int32")
            turned = self.add(
                node, "ReverseV2", (kernel, self.shape(node, axes)), {"T": dtype, "Tidx": int32}, (kernel.type,), 0
            )
            order = self.shape(node, (*axes, len(shape) - 1, len(shape) - 2))
            kind = TensorType(kernel.type.dtype, (*shape[:-2], shape[-1], shape[-2]))
            made = self.add(node, "Transpose", (turned.out(), order), {"T": dtype, "Tperm": int32}, (kind,), 0)
            self._filters[node] = made.out()
        return self._filters[node]


def _image(kind: TensorType) -> TensorType:
    """Rows of an image as an image."""
    return TensorType(kind.dtype, (1, *cast("tuple[int, ...]", kind.shape)))
