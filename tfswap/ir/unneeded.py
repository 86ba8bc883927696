"""Loops, conditionals and random draws that nothing needs. TensorFlow's executor runs them and what they read.

TensorFlow keeps ops with a state, and Switch and Merge, to which it lowers loops and conditionals (RemoveDeadNodes,
common_runtime/function_utils.cc). The gradient of a conditional by an input that is no variable is an example. Only
Grappler drops them. A planned step does not run them. They hold buffers in an unplanned one, where the number of
holders decides the bits of sums (passes/prepare/ordered_sums.py).
"""

from __future__ import annotations

from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.node_copies import add_copy
from tfswap.ir.op_traits import control_flow, is_random


def prune_traced(graph: Graph) -> None:
    """Prune a traced graph, in place.

    It keeps the names of the inputs of pruned nodes, which TensorFlow's graph passes still see, and the graph that
    TensorFlow's executor gets.
    """
    kept = {node for node in graph if _runs_unneeded(node)}  # few graphs have any
    if kept and not kept <= graph.live_nodes():
        graph.unpruned = graph.copy()
        prune_as_lowered(graph.unpruned)
    graph.read_in_vain = frozenset(tensor.name for node in graph.prune() for tensor in node.inputs)


def prune_as_lowered(graph: Graph) -> None:
    """Drop the nodes that TensorFlow's executor does not run, in place."""
    graph.prune(filter(_runs_unneeded, graph))


def restore_lowered(graph: Graph) -> None:
    """Add the nodes of `graph.unpruned` that were pruned, in their places of the insertion order."""
    if graph.unpruned is None:
        return
    place = {node.name: rank for rank, node in enumerate(graph.unpruned)}
    ranks: dict[Node, int] = {}
    rank = 0
    for node in graph:
        rank = ranks[node] = place.get(node.name, rank)
    for node in graph.unpruned.topological():
        if node.name not in graph:
            inputs = (Output(graph[source.name], index) for source, index in node.inputs)
            controls = (graph[source.name] for source in node.controls)
            added = add_copy(graph, node, node.name, inputs, controls=controls)
            ranks[added] = place[node.name]
    graph.arrange(ranks)


def _runs_unneeded(node: Node) -> bool:
    return control_flow(node.op) is not None or is_random(node.op)
