"""Collectives in one order on every worker: that in which they were traced.

A collective ends when all members of its group have begun it. A worker that begins another one first, since its arena
is another one and with it its plan, waits for ever. The traced program is the same for all, and so is the order in it.

Ensures: each collective waits for the one that was traced before it on its device, of whatever group.
"""

from __future__ import annotations

from tfswap.ir.graph import Graph, Node
from tfswap.ir.ops import group_key_input, is_collective
from tfswap.ir.views import origin


def apply_collective_order(graph: Graph) -> int:
    """Add the control edges that this takes, in `graph` and its bodies, in place; returns how many."""
    return sum(_in_order(part) for part in (graph, *graph.all_bodies()))


def _in_order(graph: Graph) -> int:
    added = 0
    latest: dict[str, Node] = {}
    for node in traced_order(graph):
        before = latest.get(node.device)
        if before is not None and before not in node.controls and node not in graph.needed([before]):
            added += graph.add_control(node, before)
        latest[node.device] = node
    return added


def traced_order(graph: Graph) -> list[Node]:
    """The collectives of a graph, in the order of the calls that made them.

    TensorFlow takes a key for each, in that order, and where a call is given its keys they are inputs of the function,
    whose order no rewriting of the graph changes. Other graphs' nodes are in the order in which they were made.
    """
    found = [node for node in graph.topological() if is_collective(node.op)]
    place = {feed: i for i, feed in enumerate(graph.feeds)}
    keys = [
        max((place.get(origin(t).node, -1) for t in node.inputs if t.type.dtype == "int32"), default=-1)
        for node in found
    ]
    if -1 in keys:
        return [node for node in graph if is_collective(node.op)]
    return [node for _, node in sorted(zip(keys, found, strict=True), key=lambda entry: entry[0])]


def spans_workers(graph: Graph) -> bool:
    """Whether a collective's group has more members than the graph has devices for them."""
    parts = (graph, *graph.all_bodies())
    found = [(part, node) for part in parts for node in part if is_collective(node.op)]
    devices = {node.device for _, node in found}
    return any((_group_size(part, node) or len(devices) + 1) > len(devices) for part, node in found)


def _group_size(graph: Graph, node: Node) -> int | None:
    position = group_key_input(node.op)
    if position is None:
        size = node.attrs.get("group_size")
        return size if isinstance(size, int) else None
    known = graph.small_constants.get(origin(node.inputs[position - 1]).node)
    return known[0] if known else None
