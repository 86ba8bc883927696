"""Names that are the same for nodes that compute alike on different devices, such as those of a strategy's replicas.

A plan names nodes. With these names the plan of one replica is also a plan of another, but for the few nodes that only
one of them has, such as the sum of all losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import control_flow, is_const
from tfswap.ir.python_calls import TOKEN
from tfswap.passes.device_carriers import unit

OWN = frozenset((TOKEN, "seed", "seed2"))
"""Attributes that differ between nodes that compute alike, besides those whose names begin with "_"."""


def names_of_alike(graph: Graph, homes: Mapping[Node, str], planned: Collection[str]) -> dict[str, dict[Node, str]]:
    """By device, the names of the nodes of its part: each has the name of the first device's node that computes alike.

    Nodes compute alike if they have the same op and attributes, and their inputs are computed alike. Of several such
    nodes on a device, the n-th has the name of the first device's n-th.

    Args:
        homes: the device of each argument.
        planned: the units of the devices whose parts are planned.
    """
    kinds = _kinds(graph, homes)
    first: dict[tuple[int, int], str] = {}  # by kind and number among the nodes of that kind on a device
    found: dict[str, dict[Node, str]] = {}
    for where in planned:
        count: Counter[int] = Counter()
        names = found[where] = {}
        for node in _part(graph, homes, where):
            if node not in names:
                kind = kinds[node]
                names[node] = first.setdefault((kind, count[kind]), node.name)
                count[kind] += 1
    return found


def _part(graph: Graph, homes: Mapping[Node, str], where: str) -> Iterator[Node]:
    """The nodes of a device in topological order, each after the constants and arguments that it reads."""
    for node in graph.topological():
        if node not in homes and not is_const(node.op) and unit(node.device) == where:
            for source in (tensor.node for tensor in node.inputs):
                if is_const(source.op) or homes.get(source) == where:
                    yield source
            yield node


def _kinds(graph: Graph, homes: Mapping[Node, str]) -> dict[Node, int]:
    """By node, a hash of what it computes. Arguments of one type on a device differ by their number."""
    found: dict[Node, int] = {}
    count: Counter[tuple[object, ...]] = Counter()
    numbers: dict[Node, int] = {}
    for feed in graph.feeds:
        same = (homes[feed], feed.outputs, _attributes(graph, feed))
        numbers[feed] = count[same]
        count[same] += 1
    for node in graph.topological():
        inputs = tuple([(found[source], index) for source, index in node.inputs])
        bodies = tuple([_content(body) for body in graph.bodies.get(node, ())])
        found[node] = hash((node.op, inputs, node.outputs, numbers.get(node), bodies, _attributes(graph, node)))
    return found


def _content(body: Graph) -> int:
    kinds = _kinds(body, dict.fromkeys(body.feeds, ""))
    return hash(tuple([(kinds[tensor.node], tensor.index) for tensor in body.fetches]))


def _attributes(graph: Graph, node: Node) -> tuple[tuple[str, object], ...]:
    functions = kind.functions if node in graph.bodies and (kind := control_flow(node.op)) else ()
    different = OWN.union(functions)
    return tuple([(k, v) for k, v in sorted(node.attrs.items()) if k not in different and not k.startswith("_")])
