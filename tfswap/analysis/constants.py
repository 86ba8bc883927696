"""Finds the constants of a step: constant nodes, and nodes that TensorFlow folds.

When TensorFlow creates the step's executor, it computes every node whose data inputs are constants, and keeps the
results that are not too large (tensorflow/core/common_runtime/constant_folding.cc). Control inputs do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import is_const, is_folded, is_known, is_view, reads_metadata_only
from tfswap.ir.types import TensorType

MAX_FOLDED_BYTES = 10 << 20
"""The largest result that TensorFlow keeps."""
KEPT_BYTES = 100 << 10
"""Grappler keeps folded constants of up to this size (constant_folding.cc, kMaxConstantSize)."""
UNIFORM = frozenset({"Fill", "OnesLike", "ZerosLike"})
"""Ops whose result has the same value in all elements."""
_SPREADS = {"BroadcastTo": 0, "Fill": 1, "Tile": 0}
"""Ops that spread a scalar over a tensor, with the position of the scalar."""
_FOLLOW = frozenset({"AddV2", "Cast", "Div", "DivNoNan", "Mul", "MulNoNan", "Neg", "RealDiv", "Square", "Sub"})
"""Cheap element-wise ops, as in gradients and losses, whose results are as large as a spread input."""
LARGE_BYTES = 16 << 10
"""The size of a large constant. A smaller one is recomputed in about the time of a kernel's launch, and frees
little."""


def folds(node: Node, constants: set[Node]) -> bool:
    """Whether TensorFlow folds the node, and keeps the result."""
    return bool(node.inputs) and is_folded(node.op) and _reads_only(constants, node) and _is_kept(node)


def constant_nodes(graph: Graph, order: Sequence[Node]) -> set[Node]:
    """The constants of `graph`, whose nodes are given in topological order."""
    constants: set[Node] = set()
    for node in order:
        if is_const(node.op) or (node not in graph.bodies and folds(node, constants)):
            constants.add(node)
    return constants


def kept_constants(graph: Graph) -> list[Node]:
    """The constants that are in memory when the graph runs: those that other nodes than folded ones read."""
    order = graph.topological()
    constants = constant_nodes(graph, order)
    read = {t.node for node in order if node not in constants for t in node.inputs}
    read.update(f.node for f in graph.fetches)
    return [node for node in order if node in constants and node in read]


def computed(graph: Graph) -> list[Node]:
    """The nodes that TensorFlow may compute before the step, kept or not, in topological order. Unknown ops count as
    such nodes.
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
    """The first nodes that TensorFlow would compute before the step in vain, since they run in each step.

    Their results are too large to be kept, or they are loops or conditionals, which run as planned here. Nodes computed
    from these are left out: they run in the step because these do.
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
    """Nodes that spread a scalar over a large constant that TensorFlow keeps, as the gradient of a mean over examples.

    Recomputing such a constant, and cheap arithmetic on it, takes less time than reading it. A node is left out if
    other ops read its result as a constant: only a small sum of it may be kept, or a product may take long.
    """
    order = graph.topological()
    constants = constant_nodes(graph, order)
    spreads: dict[Node, frozenset[Node]] = {}  # by large constant: the spreading nodes that it is computed from
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
    """The most bytes that TensorFlow holds while it folds: all constants and folded nodes together."""
    nodes = [*(node for node in graph if is_const(node.op)), *computed(graph)]
    own = sum(t.nbytes or 0 for node in nodes if not is_view(node.op) for t in node.outputs)
    return own + sum(map(computed_bytes, graph.all_bodies()))


def too_large_to_fold(graph: Graph, room_bytes: float) -> list[Node]:
    """Nodes for which Grappler's constant folding would hold more than `room_bytes` on the host.

    It computes nodes whose inputs are constants or shapes, and checks the size of the result afterwards. If these nodes
    are not folded, no node computed from them is. Nodes with the same value in all elements are not computed
    (constant_folding.cc, MaterializeConstantValuedNode).
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


def folding_room(graph: Graph) -> int:
    """The bytes of the arena that Grappler may take to fold a node while a limit is on it.

    Every limit has room for the step's largest kernel. The limit itself is not used: the step's last bits, and the
    graph whose floor is reported, would depend on it.
    """
    return max(largest_kernel_bytes(graph), KEPT_BYTES)


def folded_bytes(graph: Graph) -> int:
    """The most bytes that Grappler holds to fold a node whose size it knows, in `folding_room`.

    It folds none that is large and larger than its inputs (constant_folding.cc, IsFoldableUncached).
    """
    known: set[Node] = set()
    room_bytes, most_bytes = folding_room(graph), 0
    for node in graph.topological():
        if is_const(node.op) or reads_metadata_only(node.op):
            known.add(node)
        elif is_folded(node.op) and _reads_only(known, node):
            read, made = (sum(t.nbytes or 0 for t in types) for types in ([t.type for t in node.inputs], node.outputs))
            if is_view(node.op) or node.op in UNIFORM:
                known.add(node)
            elif made <= max(read, KEPT_BYTES) and read + made <= room_bytes:
                known.add(node)
                most_bytes = max(most_bytes, read + made)
    return most_bytes


def largest_kernel_bytes(graph: Graph) -> int:
    """The largest sum of inputs and outputs of a node of the step, in bytes, without folded nodes."""
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
    """Whether it is a float scalar. Integers may be shapes."""
    return kind.num_elements == 1 and "float" in kind.dtype


def _is_kept(node: Node) -> bool:
    return all((t.nbytes or 0) <= MAX_FOLDED_BYTES for t in node.outputs)
