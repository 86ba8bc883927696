"""Merges equal nodes, as TensorFlow does when it makes a step.

TensorFlow merges equal nodes (tensorflow/core/graph/optimizer_cse.cc) unless their control inputs differ. A planned
step's order consists of control edges, so this pass comes first. It saves memory and time: thousands of a graph's nodes
are equal axes and sizes. Merging also changes the holders of buffers, on which the order of TensorFlow's sums depends
(passes/prepare/ordered_sums.py). Nodes with the same control inputs are merged too.

Not handled: loops, conditionals, and tensor lists, which are not merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable

from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import is_commutative, is_const, is_pure
from tfswap.ir.permits import ANYTHING
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.simulator.lowered_graph import lower
from tfswap.simulator.visiting_order import visited_in_order


@graph_pass(
    requires="no order yet: its control edges distinguish equal nodes",
    ensures="equal nodes are one",
)
def merge_equal_nodes(graph: Graph, _: Target) -> int:
    """Point the readers of repeated nodes at the first of them, in place; returns how many nodes were repeats.

    Fetched nodes keep their names.
    """
    first: dict[object, Node] = {}
    named = {*(f.node for f in graph.fetches), *graph.targets}
    return len(_merge(graph, graph.topological(), named, lambda node: first.setdefault(_key(node), node)))


def merge_as_executed(step: Graph) -> dict[tuple[str, str], tuple[str, str]]:
    """Merge the nodes of a step and of its bodies that TensorFlow merges when it makes the step, in place.

    TensorFlow lowers loops and conditionals first. Of the nodes that differ in control inputs only, it merges those
    that equal the first of them. A body's nodes without inputs wait for the body, so a constant of the step, or of
    another body, that comes first keeps equal constants of a body apart.

    Returns: by part and name of a repeat, those of the node in its place.
    """
    parts = {"": step, **step.named_bodies()}
    # Without bodies nearly all equal nodes have equal control inputs, and the order makes no difference.
    rank = {node: i for i, node in enumerate(visited_in_order(lower(step)))} if step.bodies else {}
    first_part: dict[object, str] = {}
    for part, name in rank:
        node = parts[part][name]
        if not node.inputs:
            first_part.setdefault(_kind(node), part)
    twins: dict[tuple[str, str], tuple[str, str]] = {}
    for part, graph in parts.items():
        order = sorted(graph.topological(), key=lambda node, part=part: rank.get((part, node.name), len(rank)))
        first: dict[object, Node] = {}

        def kept_for(node: Node, part: str = part, first: dict[object, Node] = first) -> Node:
            kind = _kind(node)
            if not node.inputs and first_part.get(kind, part) != part:
                return node
            kept = first.setdefault(kind, node)
            return kept if set(kept.controls) == set(node.controls) else node

        instead = _merge(graph, order, set(graph.targets), kept_for)
        graph.fetches = [Output(instead.get(node, node), index) for node, index in graph.fetches]
        twins |= {(part, node.name): (part, kept.name) for node, kept in instead.items()}
    return twins


def _merge(
    graph: Graph, order: Iterable[Node], named: Container[Node], kept_for: Callable[[Node], Node]
) -> dict[Node, Node]:
    """Point the readers of repeats that are not `named` at the nodes that are kept; returns these by the repeat."""
    instead: dict[Node, Node] = {}
    for node in order:
        if instead:
            node.inputs = tuple([Output(instead.get(source, source), index) for source, index in node.inputs])
            if node.controls:
                node.controls = tuple(dict.fromkeys([instead.get(c, c) for c in node.controls]))
        if _may_be_shared(node) and node not in graph.bodies:
            kept = kept_for(node)
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
    """What equal nodes have in common."""
    return _kind(node), frozenset(node.controls)


def _kind(node: Node) -> object:
    """What nodes have in common that differ in name and control inputs only."""
    inputs: object = frozenset(Counter(node.inputs).items()) if is_commutative(node.op) else node.inputs
    attrs = tuple(sorted(node.attrs.items(), key=_name))
    return node.op, node.device, inputs, attrs, node.outputs


def _name(item: tuple[str, object]) -> str:
    return item[0]
