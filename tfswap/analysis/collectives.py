"""Collectives: the order in which they were traced, and which of them are members of one group.

A collective ends when all members of its group have begun it. TensorFlow matches members by counting them per group and
device, and so does this module. A conditional or a loop with collectives inside counts as one: replicas reduce sparse
gradients in a conditional on each device (`CollectiveReplicaLauncher.all_reduce_indexed_slices`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from tfswap.errors import UnsupportedGraph
from tfswap.ir.devices import within_worker
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import control_flow, group_key_input, is_collective
from tfswap.ir.views import origin


def has_collectives(graph: Graph, node: Node) -> bool:
    """Whether a node is a collective, or runs some in its bodies."""
    return is_collective(node.op) or any(
        has_collectives(body, each) for body in graph.bodies.get(node, ()) for each in body
    )


def traced_order(graph: Graph) -> list[Node]:
    """The nodes of a graph that are or run collectives, in the order of the calls that made them.

    TensorFlow makes a key for each collective, in that order. Keys are captured inputs of the function, whose order no
    rewriting of the graph changes. Without such keys, the nodes are in the order of their creation.
    """
    found = [node for node in graph.topological() if has_collectives(graph, node)]
    place = {feed: i for i, feed in enumerate(graph.feeds)}
    keys = [max((place.get(each, -1) for each in _keys(graph, node)), default=-1) for node in found]
    if -1 in keys:
        return [node for node in graph if has_collectives(graph, node)]
    return [node for _, node in sorted(zip(keys, found, strict=True), key=lambda entry: entry[0])]


def _keys(graph: Graph, node: Node) -> Iterator[Node]:
    """Nodes of `graph` among which are the keys of a node's collectives: all that give them integers."""
    if is_collective(node.op):
        yield from (origin(t).node for t in node.inputs if t.type.dtype == "int32")
    kind = control_flow(node.op)
    for body in graph.bodies.get(node, ()):
        assert kind is not None
        given = dict(zip(body.feeds, node.inputs[kind.first_argument :], strict=True))
        yield from (
            origin(given[key]).node
            for each in body
            if has_collectives(body, each)
            for key in _keys(body, each)
            if key in given
        )


def matching(graph: Graph) -> list[list[Node]]:
    """Of a graph whose collectives are on several devices, the members of each group, by device in the traced order.

    Raises UnsupportedGraph where it is not known which members match.
    """
    rounds: dict[tuple[Hashable, int], list[Node]] = {}
    begun: dict[tuple[Hashable, str], int] = {}
    found = traced_order(graph)
    if len({within_worker(node.device) for node in found}) < 2:
        return []
    for node in found:
        group = _group(graph, node)
        if group is None:
            raise UnsupportedGraph(
                f"{node.name!r} ({node.op}) is or runs one of the collectives of several devices, and its group is not "
                "known before the step runs, so it is unknown which of them must run at the same time. Use those of "
                "tf.distribute, or optimize a function that runs on one device."
            )
        device = within_worker(node.device)
        number = begun[group, device] = begun.get((group, device), 0) + 1
        rounds.setdefault((group, number), []).append(node)
    return list(rounds.values())


def _group(graph: Graph, node: Node) -> Hashable:
    """The key of a collective's group, None where it is not known; of a node that runs several, the keys of all."""
    if not is_collective(node.op):
        return tuple(tuple(_group(body, each) for each in traced_order(body)) for body in graph.bodies[node])
    position = group_key_input(node.op)
    if position is None:
        key = node.attrs.get("group_key")
        return key if isinstance(key, int) else None
    known = graph.small_constants.get(origin(node.inputs[position]).node)
    return known[0] if known else None


def group_size(graph: Graph, node: Node) -> int | None:
    """The number of members of a collective's group; None where it is not known."""
    position = group_key_input(node.op)
    if position is None:
        size = node.attrs.get("group_size")
        return size if isinstance(size, int) else None
    known = graph.small_constants.get(origin(node.inputs[position - 1]).node)
    return known[0] if known else None


def spans_workers(graphs: Sequence[Graph]) -> bool:
    """Whether a collective's group has more members than these graphs of one step have devices for them."""
    parts = [part for graph in graphs for part in (graph, *graph.all_bodies())]
    found = [(part, node) for part in parts for node in part if is_collective(node.op)]
    devices = {within_worker(node.device) for _, node in found}
    return any((group_size(part, node) or len(devices) + 1) > len(devices) for part, node in found)
