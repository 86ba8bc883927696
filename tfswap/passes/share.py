"""What is there twice, or computed twice, is made once.

Gradients ask anew for what the forward pass has, or each other: masks, one-hot rows, zeros of a shape, sums of a batch.
TensorFlow runs such nodes once (tensorflow/core/grappler/optimizers/common_subgraph_elimination.cc) in a step that
tfswap leaves alone, so that the prediction of its peak has to. Values are not touched. Nodes that wait for others by
control inputs are shared where they wait for the same.

Constants are shared in every step, when TensorFlow makes it (tensorflow/core/graph/optimizer_cse.cc), and take their
bytes once: thousands of a graph's nodes are axes and sizes that are the same.

Not handled: inputs of commutative ops in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfswap.analysis.folding import constant_nodes
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.ops import is_pure


def apply_share(graph: Graph) -> int:
    """Point the readers of repeated pure nodes at the first of them, in place; returns how many nodes were repeats."""
    return _share(graph, graph.topological(), lambda node: is_pure(node.op) and node not in graph.bodies)


def apply_share_constants(graph: Graph) -> int:
    """As `apply_share`, for constants and what is computed from constants alone.

    What is fetched keeps its name, and a list that is empty at first stays one of its own.
    """
    named = {*(f.node for f in graph.fetches), *graph.targets}
    order = graph.topological()
    constants = constant_nodes(graph, order) - named

    def may_share(node: Node) -> bool:
        known = bool(node.inputs) or "value" in node.attrs
        return known and node in constants and all(kind.nbytes for kind in node.outputs)

    return _share(graph, order, may_share)


def _share(graph: Graph, order: Sequence[Node], may_share: Callable[[Node], bool]) -> int:
    first: dict[object, Node] = {}
    instead: dict[Node, Node] = {}
    for node in order:
        if instead:
            node.inputs = tuple([Output(instead.get(source, source), index) for source, index in node.inputs])
            if node.controls:
                node.controls = tuple(dict.fromkeys([instead.get(c, c) for c in node.controls]))
        if may_share(node):
            attrs = tuple(sorted([(k, v) for k, v in node.attrs.items() if not k.startswith("_")], key=_name))
            key = node.op, node.device, node.inputs, frozenset(node.controls), attrs, node.outputs
            kept = first.setdefault(key, node)
            if kept is not node:
                instead[node] = kept
    graph.fetches = [Output(instead.get(source, source), index) for source, index in graph.fetches]
    graph.targets = list(dict.fromkeys([instead.get(node, node) for node in graph.targets]))
    return len(instead)


def _name(item: tuple[str, object]) -> str:
    return item[0]
