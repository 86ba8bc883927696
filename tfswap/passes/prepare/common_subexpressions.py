"""Merges equal nodes, as TensorFlow does when it makes a step.

TensorFlow merges equal nodes (tensorflow/core/graph/optimizer_cse.cc) unless their control inputs differ. A planned
step's order consists of control edges, so this pass comes first. It saves memory and time: thousands of a graph's nodes
are equal axes and sizes. Merging also changes the holders of buffers, on which the order of TensorFlow's sums depends
(passes/prepare/ordered_sums.py). Nodes with the same control inputs are merged too.

Not handled: loops, conditionals, and tensor lists, which are not merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import is_commutative, is_const, is_pure
from tfswap.ir.permits import ANYTHING
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass


@graph_pass(
    requires="no order yet: its control edges distinguish equal nodes",
    ensures="equal nodes are one",
)
def merge_equal_nodes(graph: Graph, _: Target) -> int:
    """Point the readers of repeated nodes at the first of them, in place; returns how many nodes were repeats.

    Fetched nodes keep their names.
    """
    return len(_merge(graph, {*(f.node for f in graph.fetches), *graph.targets}))


def merge_all_equal_nodes(graph: Graph) -> dict[str, str]:
    """As `merge_equal_nodes`, but fetched nodes are merged too; returns the first node's name by the repeat's."""
    instead = _merge(graph, set(graph.targets))
    graph.fetches = [Output(instead.get(node, node), index) for node, index in graph.fetches]
    return {node.name: kept.name for node, kept in instead.items()}


def _merge(graph: Graph, named: Container[Node]) -> dict[Node, Node]:
    """Point the readers of repeats that are not `named` at the first; returns the first node by the repeat."""
    first: dict[object, Node] = {}
    instead: dict[Node, Node] = {}
    for node in graph.topological():
        if instead:
            node.inputs = tuple([Output(instead.get(source, source), index) for source, index in node.inputs])
            if node.controls:
                node.controls = tuple(dict.fromkeys([instead.get(c, c) for c in node.controls]))
        if _may_be_shared(node) and node not in graph.bodies:
            kept = first.setdefault(_key(node), node)
            if kept is not node and node not in named:
                instead[node] = kept
                for index in range(len(node.outputs)):
                    graph.restrict(kept.out(index), graph.permits.get(node.out(index), ANYTHING))
    return instead


def _may_be_shared(node: Node) -> bool:
    if not (node.inputs and is_pure(node.op)) and not (is_const(node.op) and "value" in node.attrs):
        return False
    return all(kind.dtype not in ("variant", "resource") for kind in node.outputs)


def _key(node: Node) -> object:
    """The key that equal nodes share."""
    inputs: object = frozenset(Counter(node.inputs).items()) if is_commutative(node.op) else node.inputs
    attrs = tuple(sorted(node.attrs.items(), key=_name))
    return node.op, node.device, inputs, frozenset(node.controls), attrs, node.outputs


def _name(item: tuple[str, object]) -> str:
    return item[0]
