"""Keeps rows on the first axis of tensors that several tensors are cut out of, or make up together.

Queries, keys and values that are projected together are transposed, so that the axis of the three comes first, and
unpacked; their gradients are packed and transposed back. In between the first axis is not that of rows, and a chain of
kernels in slices would end. Here they are unpacked first and transposed each, and transposed each and packed then. All
of it is copies: the values are the same.

Not handled: a transpose between other kernels, which would have to run along another axis than the first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.types import TensorType
from tfswap.kernels.target import Target
from tfswap.kernels.temporaries import known_shape
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import add_integers, restrict_like
from tfswap.plan.plan import Slices


class _Moved(NamedTuple):
    """A transpose that moves rows, next to a node that packs or unpacks.

    Attributes:
        node: what unpacks behind it, or the transpose itself, behind what packs.
        other: the other one of both.
        axis: that of pieces, where rows are on the first.
        order: the transpose of each piece.
    """

    node: Node
    other: Node
    axis: int
    order: tuple[int, ...]


@graph_pass(
    requires="kernels that may run in slices, and are in no body",
    ensures="pieces of which kernels in slices read or make rows are on an axis behind that of rows",
)
def keep_rows_first(graph: Graph, _: Target, sliced: Sequence[Slices] | None = None) -> int:
    """Exchange transposes with what packs and unpacks, in place; returns how many.

    Args:
        sliced: the kernels in slices: only where some of these run in slices then. None for all.
    """
    names = None if sliced is None else {name for slices in sliced for name in slices.kernels}
    moved = [found for node in graph if (found := _moved(graph, node)) is not None and _is_named(found, names)]
    now: dict[Output, Output] = {}
    for found in moved:
        if found.node.op == "Unpack":
            now |= _unpack_first(graph, found)
        else:
            _pack_last(graph, found)
    made = {tensor.node for tensor in now.values()}
    for node in graph if now else ():
        if node not in made:
            node.inputs = tuple(now.get(tensor, tensor) for tensor in node.inputs)
    graph.fetches = [now.get(tensor, tensor) for tensor in graph.fetches]
    graph.prune()
    return len(moved)


def _unpack_first(graph: Graph, found: _Moved) -> dict[Output, Output]:
    """Unpack what was transposed, and transpose the pieces; returns these by what they replace."""
    node, transpose = found.node, found.other
    (tensor, _), pieces = transpose.inputs, node.outputs
    shape = known_shape(tensor.type) or ()
    node.inputs, node.attrs = (tensor,), {**node.attrs, "axis": found.axis}
    node.controls = tuple(dict.fromkeys((*node.controls, *transpose.controls)))
    node.outputs = (TensorType(tensor.type.dtype, (*shape[: found.axis], *shape[found.axis + 1 :])),) * len(pieces)
    now = {node.out(piece): _transposed(graph, found, node.out(piece), piece) for piece in range(len(pieces))}
    for before, after in now.items():
        restrict_like(graph, before, after)
    graph.move_behind({node: [after.node for before, after in now.items() if after != before]})
    return now


def _pack_last(graph: Graph, found: _Moved) -> None:
    """Transpose the pieces, and have the transpose of what was packed pack them."""
    node, pack = found.node, found.other
    pieces = tuple(_transposed(graph, found, tensor, piece) for piece, tensor in enumerate(pack.inputs))
    graph.move_behind(
        {pack: [after.node for before, after in zip(pack.inputs, pieces, strict=True) if after != before]}
    )
    node.op, node.inputs, node.attrs = "Pack", pieces, {**pack.attrs, "axis": found.axis}
    node.controls = tuple(dict.fromkeys((*node.controls, *pack.controls)))


def _is_named(found: _Moved, names: Collection[str] | None) -> bool:
    """Whether any of the nodes in the place of these is one of `names`."""
    if names is None or found.node.name in names:
        return True
    count = len(found.node.outputs) if found.node.op == "Unpack" else len(found.other.inputs)
    return any(_name(found.node, piece) in names for piece in range(count))


def _moved(graph: Graph, node: Node) -> _Moved | None:
    """The transpose that moves rows at a node that unpacks, or behind one that packs."""
    source = node.inputs[0].node if node.inputs else None
    if source is None:
        return None
    transpose, pieces = (source, node) if node.op == "Unpack" else (node, source)
    shape = known_shape(transpose.outputs[0]) if transpose.op == "Transpose" else None
    if shape is None or pieces.op not in ("Pack", "Unpack"):
        return None
    order = graph.small_constants.get(transpose.inputs[1].node)
    axis = _axis(pieces, len(shape))
    if order is None or axis != 0 or order[0] == 0 or node.device != source.device:
        return None
    if pieces.op == "Unpack":
        cut = order[0]
        each = tuple(read - (read > cut) for read in order[1:])
        return _Moved(node, source, cut, each) if each[0] == 0 else None
    behind = order.index(0)
    each = tuple(read - 1 for read in order if read)
    return _Moved(node, source, behind, each) if each[0] == 0 and _readers(graph, source) == 1 else None


def _readers(graph: Graph, node: Node) -> int:
    fetched = sum(tensor.node is node for tensor in graph.fetches)
    return fetched + sum(tensor.node is node for other in graph for tensor in other.inputs)


def _axis(node: Node, rank: int) -> int:
    """The axis that pieces have in the larger tensor, of `rank` axes."""
    axis = node.attrs.get("axis", 0)
    assert isinstance(axis, int), "an axis is a number"
    return axis % rank


def _name(node: Node, piece: int) -> str:
    """The name of the transpose of a piece."""
    return f"tfswap/{node.name}/Transpose/{piece}"


def _transposed(graph: Graph, found: _Moved, tensor: Output, piece: int) -> Output:
    """A piece, transposed as it was together with the others."""
    if found.order == tuple(range(len(found.order))):
        return tensor
    shape, device = known_shape(tensor.type) or (), found.node.device
    order = add_integers(graph, graph.unique_name(f"{_name(found.node, piece)}/order"), found.order, device)
    kind = TensorType(tensor.type.dtype, tuple(shape[axis] for axis in found.order))
    attrs = {"T": Dtype(kind.dtype), "Tperm": Dtype("int32")}
    made = graph.add(
        "Transpose",
        graph.unique_name(_name(found.node, piece)),
        (tensor, order.out()),
        attrs=attrs,
        outputs=(kind,),
        device=device,
    )
    return made.out()
