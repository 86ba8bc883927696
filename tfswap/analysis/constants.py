"""Which nodes are constants of the step: tensors of the graph, and what TensorFlow computes from them beforehand.

When TensorFlow makes the step's executor it computes every node that follows from constants alone, and then keeps what
is not too large (tensorflow/core/common_runtime/constant_folding.cc). Data inputs that are constants are enough,
whatever the node waits for.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import is_const, is_folded, is_known, is_view, reads_metadata_only
from tfswap.ir.types import TensorType

MAX_FOLDED_BYTES = 10 << 20
"""TensorFlow keeps no result larger than this."""
UNIFORM = frozenset({"Fill", "OnesLike", "ZerosLike"})
"""Ops that give one value everywhere."""
_SPREADS = {"BroadcastTo": 0, "Fill": 1, "Tile": 0}
"""Ops that give one value everywhere where the input of that position is one value."""
_FOLLOW = frozenset({"AddV2", "Cast", "Div", "DivNoNan", "Mul", "MulNoNan", "Neg", "RealDiv", "Square", "Sub"})
"""Ops that make no less of what is spread, and take next to no time: what gradients and losses do with it."""
LARGE_BYTES = 16 << 10
"""Of a constant. What is smaller is made in about the time that a kernel takes to start, and piles up to little."""


def folds(node: Node, constants: set[Node]) -> bool:
    """Whether TensorFlow computes the node once, and keeps the result."""
    return bool(node.inputs) and is_folded(node.op) and _reads_only(constants, node) and _is_kept(node)


def constant_nodes(graph: Graph, order: Sequence[Node]) -> set[Node]:
    """The constants of `graph`, whose nodes are given in topological order."""
    constants: set[Node] = set()
    for node in order:
        if is_const(node.op) or (node not in graph.bodies and folds(node, constants)):
            constants.add(node)
    return constants


def kept_constants(graph: Graph) -> list[Node]:
    """The constants that are there when the graph runs: not those that only others are computed from."""
    order = graph.topological()
    constants = constant_nodes(graph, order)
    read = {t.node for node in order if node not in constants for t in node.inputs}
    read.update(f.node for f in graph.fetches)
    return [node for node in order if node in constants and node in read]


def computed(graph: Graph) -> list[Node]:
    """What TensorFlow computes beforehand, kept or not, in topological order.

    An op that tfswap does not know may be one that TensorFlow computes.
    """
    constants: set[Node] = set()
    found: list[Node] = []
    for node in graph.topological():
        may_be = is_folded(node.op) or node in graph.bodies or not is_known(node.op)
        if is_const(node.op):
            constants.add(node)
        elif may_be and node.inputs and _reads_only(constants, node):
            constants.add(node)
            found.append(node)
    return found


def thrown_away(graph: Graph) -> list[Node]:
    """The first of what TensorFlow computes beforehand for nothing: it runs in each step all the same.

    Its results are too large to be kept, or it is a loop or a conditional, which runs here as it is planned. What is
    computed from these is left open: it is computed in the step once they are.
    """
    found: list[Node] = []
    in_step: set[Node] = set()
    for node in computed(graph):
        if any(t.node in in_step for t in node.inputs):
            in_step.add(node)
        elif node in graph.bodies or not _is_kept(node):
            in_step.add(node)
            found.append(node)
    return found


def large_spreads(graph: Graph) -> list[Node]:
    """What spreads one value over a large constant that TensorFlow keeps, as the gradient of a mean over examples.

    It is recomputed faster than it is read, and so is what follows from it. One from which other constants follow than
    by arithmetic is not computed: a sum may be all that is kept of it, a product may take long.
    """
    order = graph.topological()
    constants = constant_nodes(graph, order)
    spreads: dict[Node, frozenset[Node]] = {}  # of a large constant that follows from these and from what is small
    others: set[Node] = set()
    for node in order:
        if node not in constants or is_const(node.op):
            continue
        value = _SPREADS.get(node.op)
        if value is not None and _is_number(node.inputs[value].type):
            if _is_large(node.outputs[0]):
                spreads[node] = frozenset((node,))
            continue
        parts = [spreads.get(t.node) for t in node.inputs if _is_large(t.type)]
        from_these = frozenset(spread for part in parts for spread in part or ())
        if None not in parts and (is_view(node.op) or node.op in _FOLLOW):
            spreads[node] = from_these
        else:
            others |= from_these
    found = {spread for node in kept_constants(graph) for spread in spreads.get(node, ())} - others
    return [node for node in order if node in found]


def computed_bytes(graph: Graph) -> int:
    """The most that TensorFlow holds while it computes constants: all of them, and what they are computed from."""
    nodes = [*(node for node in graph if is_const(node.op)), *computed(graph)]
    own = sum(t.nbytes or 0 for node in nodes if not is_view(node.op) for t in node.outputs)
    return own + sum(map(computed_bytes, graph.all_bodies()))


def too_large_to_fold(graph: Graph, room_bytes: float) -> list[Node]:
    """What TensorFlow's optimizers hold more than that for, on the host, if they compute it beforehand.

    They compute what follows from constants and from shapes, node by node, and only then look how large it is. Where
    these are not computed, nothing that follows from them is. What is one value everywhere they note without computing
    it (constant_folding.cc, MaterializeConstantValuedNode).
    """
    known: set[Node] = set()
    found: list[Node] = []
    for node in graph.topological():
        if is_const(node.op) or reads_metadata_only(node.op) or (is_folded(node.op) and _reads_only(known, node)):
            read = (t.type for t in node.inputs if t.node in known)
            held = sum(kind.nbytes or 0 for kind in (*read, *node.outputs))
            if held > room_bytes and not (is_const(node.op) or is_view(node.op) or node.op in UNIFORM):
                found.append(node)
            else:
                known.add(node)
    return found


def largest_kernel_bytes(graph: Graph) -> int:
    """The most that one node of the step reads and makes, of those that are not computed beforehand."""
    order = graph.topological()
    beforehand = {*constant_nodes(graph, order), *computed(graph)}
    of_step = (node for node in order if node not in beforehand and not is_view(node.op))
    held = ([*node.outputs, *(tensor.type for tensor in node.inputs)] for node in of_step)
    return max((sum(kind.nbytes or 0 for kind in kinds) for kinds in held), default=0)


def _reads_only(constants: set[Node], node: Node) -> bool:
    return all(t.node in constants for t in node.inputs)


def _is_large(kind: TensorType) -> bool:
    return (kind.nbytes or 0) >= LARGE_BYTES


def _is_number(kind: TensorType) -> bool:
    """Whether it is one value, and says nothing of shapes."""
    return kind.num_elements == 1 and "float" in kind.dtype


def _is_kept(node: Node) -> bool:
    return all((t.nbytes or 0) <= MAX_FOLDED_BYTES for t in node.outputs)
