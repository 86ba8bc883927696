"""Products with a weight at home on the host that read it in slices of rows, so that it never is on the device whole.

Rows of a weight are contiguous in its home, and two kinds of products need only some of them at a time:

- x W adds up products of columns of x and rows of W: Tfswap>AddProducts continues the sum with each slice, in the whole
  product's order (kernels/bounded_gradients.py).
- x W^T, as of the gradient of a dense layer's input, has a column for each row of W. Columns have the same bits where
  their order is the same (kernels/products.py).

Products of one weight share its slices. These are tensors like others: where memory has no room for all, each leaves
and is read again. The copies of what a step has written come after the write, and writes after all copies before it.

Invariant: a slice is cut where all that reads the weight is such products, and x and the result together are smaller
than it. Other weights stay whole, and so do those of oneDNN's kernels and of GPUs, for which the bits are not proven.

Not handled: weights that bodies of loops and conditionals read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import gcd, lcm
from typing import Final, NamedTuple, cast

from tfswap.ir import custom_ops
from tfswap.ir.graph import Dims, Dtype, Graph, Node, Output
from tfswap.ir.types import TensorType
from tfswap.kernels.bounded_gradients import products_of_rows
from tfswap.kernels.bounded_sums import Products
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.products import same_in_columns
from tfswap.kernels.slices import ELEMENTS
from tfswap.kernels.target import Target
from tfswap.kernels.temporaries import known_shape
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import add_integers, add_scalar, add_slice, followers, restrict_like, without_colocation

PRODUCT: Final = "MatMul"
"""The op of the products."""
FUSED: Final = "_FusedMatMul"
"""The same with what Grappler's remapper fuses with it."""
FUSIONS: Final = ((b"BiasAdd",), (b"BiasAdd", b"Relu"))
"""What is done after the sum, by kernels of its own then."""
AHEAD: Final = 2
"""The slices of a weight that may be there at one time."""


class SlicedWeight(NamedTuple):
    """A weight that is read in slices.

    Attributes:
        read: the node that copies all of it.
        products: the kernels that read it, with how each adds up; None where it adds up nothing.
        begins: the first rows of the slices, and the end of the last one.
    """

    read: Node
    products: Mapping[Node, Products | None]
    begins: tuple[int, ...]


@graph_pass(
    requires="variables at home on the host (keep_at_home), and updates in slices (slice_updates)",
    ensures="weights that are larger than a slice are read in slices, where products alone read them",
)
def slice_weights(graph: Graph, target: Target, most_bytes: int) -> int:
    """Read weights in slices of at most `most_bytes`, in place; returns how many slices there are."""
    since, found = len(graph), [*sliced_weights(graph, target.device, most_bytes)]
    for weight in found:
        _Slicer(graph, weight).cut()
    if found:
        graph.bring_forward(since)
        graph.prune()
    return sum(len(weight.begins) - 1 for weight in found)


def count_weight_slices(graph: Graph, device: DeviceModel, most_bytes: int) -> int:
    """The number of slices that `slice_weights` makes of a graph without updates in slices."""
    return sum(len(weight.begins) - 1 for weight in sliced_weights(graph, device, most_bytes))


def sliced_weights(graph: Graph, device: DeviceModel, most_bytes: int) -> Iterator[SlicedWeight]:
    """The weights of the graph, without those of its bodies, that can be read in slices."""
    if not device.has_own_kernels or device.onednn:
        return
    nodes = graph.topological()
    after, fetched = followers(nodes), {tensor.node for tensor in graph.fetches}
    for node in nodes:
        if node.op == custom_ops.READ_HOME and "rows" not in node.attrs and node not in fetched:
            readers = [each for each in after[node] if any(tensor.node is node for tensor in each.inputs)]
            if (weight := _sliced(node, readers, device, most_bytes)) is not None:
                yield weight


def _sliced(read: Node, readers: Sequence[Node], device: DeviceModel, most_bytes: int) -> SlicedWeight | None:
    kind, shape = read.outputs[0], known_shape(read.outputs[0])
    if not readers or shape is None or len(shape) != 2 or (kind.nbytes or 0) <= most_bytes or kind.dtype != "float32":
        return None
    if shape[1] < 2:  # a vector: another kernel adds up its products
        return None
    if not all(_reads_by_rows(node, read, kind) for node in readers):
        return None
    rows, width = shape
    sums: dict[Node, Products | None] = {}
    unit = ELEMENTS // gcd(ELEMENTS, width)
    for node in readers:
        sums[node] = None
        if not node.attrs.get("transpose_b"):
            left, _ = cast("tuple[int, int]", known_shape(node.inputs[0].type))
            if (found := products_of_rows(left, width, rows, device)) is None:
                return None
            sums[node] = found
            unit = lcm(unit, ELEMENTS // gcd(ELEMENTS, left), found.unit or 1)
    columns = [cast("tuple[int, int]", known_shape(n.inputs[0].type))[0] for n, found in sums.items() if found is None]

    def holds(begins: Sequence[int]) -> bool:
        counts = {end - begin for begin, end in pairwise(begins)}
        return all(same_in_columns(count, left, rows, width, device) for count in counts for left in columns)

    most_rows = max(unit, most_bytes // ((kind.nbytes or 0) // rows))
    found = next(filter(holds, _cuts(rows, most_rows, unit)), None)
    return None if found is None else SlicedWeight(read, sums, found)


def _cuts(rows: int, most_rows: int, unit: int) -> Iterator[tuple[int, ...]]:
    """The first rows of even slices, and the end: those of no more than `most_rows`, then larger and larger ones, since
    small products may add up in another order.
    """
    least = -(-rows // most_rows)
    for count in (*range(least, 2 * least), *range(least - 1, 1, -1)):
        step = -(-rows // (count * unit)) * unit
        if step < rows:
            yield (*range(0, rows, step), rows)


def _reads_by_rows(node: Node, read: Node, kind: TensorType) -> bool:
    """Whether a kernel is a product that needs rows of a weight at a time, and is smaller than the weight."""
    if node.op not in (PRODUCT, FUSED) or node.attrs.get("transpose_a") or node.inputs[1].node is not read:
        return False
    if any(tensor.node is read for position, tensor in enumerate(node.inputs) if position != 1):
        return False
    if node.op == FUSED and (node.attrs.get("transpose_b") or node.attrs.get("fused_ops") not in FUSIONS):
        return False
    if not known_shape(node.inputs[0].type) or not known_shape(node.outputs[0]):
        return False
    return (node.inputs[0].type.nbytes or 0) + (node.outputs[0].nbytes or 0) < (kind.nbytes or 0)


class _Slicer:
    """Has the products of a weight read it in slices."""

    def __init__(self, graph: Graph, weight: SlicedWeight):
        self._graph = graph
        self._weight = weight
        self._loads: list[Output] = []
        self._made: list[Node] = []  # the slices of the latest product

    def cut(self) -> None:
        """Make the slices."""
        for node, products in self._weight.products.items():
            self._made = []
            result = self._columns(node) if products is None else self._sum(node, products)
            restrict_like(self._graph, node.out(), result)
            self._graph.replace_uses(node.out(), result)
            self._graph.fetches = [result if tensor == node.out() else tensor for tensor in self._graph.fetches]
            self._wait_instead(node, [result.node])
        self._wait_instead(self._weight.read, [load.node for load in self._loads])

    def _slices(self) -> Iterator[tuple[Output, int, int]]:
        """The slices of the weight, each with its first row and its end. Those that are not there yet are made.

        One waits for the first product of the slice before the last: while it is copied, the last one is multiplied,
        and no others need to be there.
        """
        read, kind = self._weight.read, self._weight.read.outputs[0]
        for place, (begin, end) in enumerate(pairwise(self._weight.begins)):
            if place == len(self._loads):
                rows = (end - begin, *cast("tuple[int, ...]", kind.shape)[1:])
                attrs = {**read.attrs, "begin": begin, "rows": end - begin, "shape": Dims(rows)}
                controls = dict.fromkeys((*read.controls, *self._made[max(0, place - AHEAD) : place - AHEAD + 1]))
                load = self._add(read, read.op, read.inputs, attrs, (TensorType(kind.dtype, rows),), begin, [*controls])
                self._loads.append(load)
            yield self._loads[place], begin, end

    def _wait_instead(self, node: Node, others: Sequence[Node]) -> None:
        """Have what waits for a node wait for others."""
        for each in self._graph:
            if node in each.controls:
                waits = (w for c in each.controls for w in (others if c is node else (c,)))
                each.controls = tuple(dict.fromkeys(waits))
        self._graph.targets = list(
            dict.fromkeys(w for t in self._graph.targets for w in (others if t is node else (t,)))
        )

    def _sum(self, node: Node, products: Products) -> Output:
        """x W: the sum of the products of columns of x, which are rows of its transpose, and rows of W."""
        tensor, made = node.inputs[0], node.outputs[0]
        dtype, (width, depth) = Dtype(made.dtype), cast("tuple[int, int]", known_shape(tensor.type))
        columns = cast("tuple[int, int]", known_shape(made))[1]
        order = self._integers(node, (1, 0))
        attrs: dict[str, object] = {"T": dtype, "Tperm": Dtype("int32")}
        kind = TensorType(made.dtype, (depth, width))
        turned = self._add(node, "Transpose", (tensor, order), attrs, (kind,), 0, node.controls)
        unit, before = products.unit, tuple[Output, ...]()
        state = TensorType(made.dtype, (0 if unit else products.state_elements(width, columns),))
        attrs = {"T": dtype, "rows": products.rows, "chunk": products.chunk, "closed": bool(unit)}
        attrs |= {"shard": tuple(products.shard), "last_shard": tuple(products.last_shard)}
        attrs |= dict.fromkeys(("window", "strides", "dilations", "padding", "sizes"), ())
        for load, begin, end in self._slices():
            rows = {"T": dtype, "begin": begin, "rows": end - begin}
            part = self._add(
                node, custom_ops.ROWS, (turned,), rows, (TensorType(made.dtype, (end - begin, width)),), begin
            )
            inputs, attrs = (part, load, *before), {**attrs, "N": len(before), "begin": begin}
            total = self._add(node, custom_ops.ADD_PRODUCTS, inputs, attrs, (made, state), begin, node.controls)
            self._made.append(total.node)
            before = (total,) if unit else (total, total.node.out(1))
        return self._with_fused(node, before[0])

    def _with_fused(self, node: Node, total: Output) -> Output:
        """What a fused kernel does after its product."""
        kind, attrs = node.outputs[0], {"T": Dtype(node.outputs[0].dtype)}
        for op in cast("tuple[bytes, ...]", node.attrs.get("fused_ops", ())) if node.op == FUSED else ():
            if op == b"BiasAdd":
                format_ = {"data_format": b"NHWC"}
                total = self._add(node, "BiasAdd", (total, node.inputs[2]), {**attrs, **format_}, (kind,), 0)
            else:
                total = self._add(node, "Relu", (total,), attrs, (kind,), 0)
        return total

    def _columns(self, node: Node) -> Output:
        """x W^T: columns of it, for a slice of W each."""
        made, attrs = node.outputs[0], without_colocation(node.attrs)
        parts: list[Output] = []
        for load, begin, end in self._slices():
            kind = TensorType(made.dtype, (cast("tuple[int, int]", known_shape(made))[0], end - begin))
            parts.append(self._add(node, node.op, (node.inputs[0], load), attrs, (kind,), begin, node.controls))
            self._made.append(parts[-1].node)
        axis = self._axis(node)
        attrs = {"N": len(parts), "T": Dtype(made.dtype), "Tidx": Dtype("int32")}
        return self._add(node, "ConcatV2", (*parts, axis), attrs, (made,), 0)

    def _integers(self, like: Node, values: tuple[int, ...]) -> Output:
        return add_integers(self._graph, f"tfswap/{like.name}/order", values, like.device).out()

    def _axis(self, like: Node) -> Output:
        """The axis of columns."""
        made = add_scalar(self._graph, f"tfswap/{like.name}/axis", "int32", like.device, (1).to_bytes(4, "little"))
        self._graph.small_constants[made] = (1,)
        return made.out()

    def _add(
        self,
        like: Node,
        op: str,
        inputs: Sequence[Output],
        attrs: Mapping[str, object],
        outputs: Sequence[TensorType],
        begin: int,
        controls: Sequence[Node] = (),
    ) -> Output:
        made = add_slice(self._graph, like, op, inputs, attrs, outputs=outputs, begin=begin, controls=controls)
        if op == like.op:
            restrict_like(self._graph, like.out(), made.out())
        return made.out()
