"""Which nodes are constants of the step: tensors of the graph, and what TensorFlow computes from them beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.ir.graph import Graph, Node
from tfswap.ir.ops import is_const, is_folded

MAX_FOLDED_BYTES = 10 << 20
"""TensorFlow folds no constant larger than this."""


def folds(node: Node, constants: set[Node]) -> bool:
    """Whether TensorFlow computes the node once, when it makes the step's executor, and keeps the result.

    Follows tensorflow/core/common_runtime/constant_folding.cc: data inputs that are constants are enough,
    whatever the node waits for.
    """
    return (
        bool(node.inputs)
        and is_folded(node.op)
        and all(t.node in constants for t in node.inputs)
        and all((t.nbytes or 0) <= MAX_FOLDED_BYTES for t in node.outputs)
    )


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
