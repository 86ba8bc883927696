"""Constants that are there twice, or computed twice from constants, are made once.

TensorFlow shares them when it makes a step (tensorflow/core/graph/optimizer_cse.cc), so that they take their bytes
once: thousands of a graph's nodes are axes and sizes that are the same. Values are not touched. Nodes that wait for
others by control inputs are shared where they wait for the same.

Not handled: inputs of commutative ops in another order.
"""

from __future__ import annotations

from tfswap.analysis.folding import constant_nodes
from tfswap.ir.graph import Graph, Node, Output


def apply_share(graph: Graph) -> int:
    """Point the readers of repeated constants at the first of them, in place; returns how many nodes were repeats.

    What is fetched keeps its name, and a list that is empty at first stays one of its own.
    """
    order = graph.topological()
    constants = constant_nodes(graph, order) - {*(f.node for f in graph.fetches), *graph.targets}
    first: dict[object, Node] = {}
    instead: dict[Node, Node] = {}
    for node in order:
        if instead:
            node.inputs = tuple([Output(instead.get(source, source), index) for source, index in node.inputs])
            if node.controls:
                node.controls = tuple(dict.fromkeys([instead.get(c, c) for c in node.controls]))
        known = bool(node.inputs) or "value" in node.attrs
        if known and node in constants and all(kind.nbytes for kind in node.outputs):
            attrs = tuple(sorted([(k, v) for k, v in node.attrs.items() if not k.startswith("_")], key=_name))
            key = node.op, node.device, node.inputs, frozenset(node.controls), attrs, node.outputs
            kept = first.setdefault(key, node)
            if kept is not node:
                instead[node] = kept
    return len(instead)


def _name(item: tuple[str, object]) -> str:
    return item[0]
