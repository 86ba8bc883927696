"""Parts of a step that compute alike on different devices, such as a strategy's replicas.

Nodes that compute alike have the same name in all parts. A plan names nodes. So the plan of one replica is also a plan
of another, but for the few nodes that only one of them has, such as the sum of all losses. What does not depend on the
arena is computed once for parts that have the same nodes, or that are the same but for their device (`shared_results`).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping

from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import control_flow, is_commutative, is_const
from tfswap.ir.python_calls import TOKEN
from tfswap.passes.device_carriers import unit
from tfswap.support.once import Once, Shared

OWN = frozenset((TOKEN, "seed", "seed2"))
"""Attributes that differ between nodes that compute alike, besides those whose names begin with "_"."""


def names_of_alike(graph: Graph, homes: Mapping[Node, str], planned: Collection[str]) -> dict[str, dict[Node, str]]:
    """By device, the names of the nodes of its part: each has the name of the first device's node that computes alike.

    Nodes compute alike if they have the same op and attributes, and their inputs are computed alike, in any order where
    that changes nothing: Grappler sorts the inputs of such an op by name. Of several such nodes on a device, the n-th
    has the name of the first device's n-th.

    What reads a node that is not alike is not alike either, and Grappler groups the factors of one replica's product
    otherwise than those of another's. So where most nodes are alike, those that are left take the names of nodes that
    are left on the first device and have the same op, attributes and types, in order.

    Args:
        homes: the device of each argument.
        planned: the units of the devices whose parts are planned.
    """
    kinds = _kinds(graph, homes)
    first: dict[tuple[int, int], str] = {}  # by kind and number among the nodes of that kind on a device
    known: dict[str, object] = {}  # by name, what the node itself is
    found: dict[str, dict[Node, str]] = {}
    for where in planned:
        numbered = _numbered(_part(graph, homes, where), kinds)
        names = found[where] = {node: first[key] for node, key in numbered.items() if key in first}
        left: defaultdict[object, deque[str]] = defaultdict(deque)
        taken = set(names.values())
        if 2 * len(names) > len(numbered):
            for name, itself in known.items():
                if name not in taken:
                    left[itself].append(name)
        for node, key in numbered.items():
            if node not in names:
                itself = _itself(graph, node)
                name = names[node] = first[key] = left[itself].popleft() if left[itself] else node.name
                known.setdefault(name, itself)
    return found


def shared_results(parts: Mapping[str, Graph]) -> dict[str, Shared]:
    """By device, where to keep results that hold for other parts too."""
    alike: defaultdict[object, Once] = defaultdict(Once)
    same: defaultdict[object, Once] = defaultdict(Once)
    return {
        where: Shared(alike[frozenset(_contents(part))], same[_whole_content(part)]) for where, part in parts.items()
    }


def device_names(made: Graph, part: Graph) -> dict[str, str]:
    """By name of a device in `made`, the device of the same node of a part that is the same but for that."""
    return {made[node.name].device: node.device for node in part}


def _whole_content(part: Graph) -> Hashable:
    """All of a part but for the names of its devices, which are numbered, and the places in the insertion order of
    nodes that only pass tensors to other devices: control edges give their order.
    """
    devices: dict[str, int] = {}
    nodes = [
        (
            node.name,
            node.op,
            tuple([(source.name, index) for source, index in node.inputs]),
            frozenset([each.name for each in node.controls]),
            tuple(sorted(node.attrs.items())),
            node.outputs,
            devices.setdefault(node.device, len(devices)),
            (node.measured, node.tape, part.small_constants.get(node)),
            tuple([_whole_content(body) for body in part.bodies.get(node, ())]),
        )
        for node in sorted(part, key=lambda node: node.name)
    ]
    passing = {node.name for node in part if _passes_on(node)}
    return (
        tuple(nodes),
        tuple([feed.name for feed in part.feeds]),
        tuple([tensor.name for tensor in part.fetches]),
        tuple([target.name for target in part.targets if target.name not in passing]),
        tuple([node.name for node in part if node.name not in passing]),
        tuple([name for name in part.executed if name not in passing]),
        tuple(sorted(part.calls.items())),
        tuple(sorted(part.names_in_bodies.items())),
    )


def _passes_on(node: Node) -> bool:
    """Whether a node stands for another device, or copies what that has sent."""
    if node.op == custom_ops.TO_DEVICE:
        return node.inputs[0].node.op == custom_ops.RECEIVE
    return node.op in (custom_ops.SEND, custom_ops.RECEIVE, custom_ops.SIGNAL)


def _contents(part: Graph) -> Iterator[object]:
    for node in part:
        inputs = tuple([(source.name, index) for source, index in node.inputs])
        is_ordered = node.op in (custom_ops.SEND, custom_ops.RECEIVE)
        controls = () if is_ordered else frozenset(each.name for each in node.controls)
        bodies = tuple([frozenset(_contents(body)) for body in part.bodies.get(node, ())])
        yield node.name, inputs, controls, bodies, _attributes(part, node)


def _numbered(nodes: Iterable[Node], kinds: Mapping[Node, int]) -> dict[Node, tuple[int, int]]:
    """The kind of each node, and its number among the nodes of that kind."""
    count: Counter[int] = Counter()
    found: dict[Node, tuple[int, int]] = {}
    for node in nodes:
        if node not in found:
            found[node] = kinds[node], count[kinds[node]]
            count[kinds[node]] += 1
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
        inputs = [(found[source], index) for source, index in node.inputs]
        if is_commutative(node.op):
            inputs.sort()
        found[node] = hash((tuple(inputs), numbers.get(node), _itself(graph, node)))
    return found


def _itself(graph: Graph, node: Node) -> tuple[object, ...]:
    """What a node is, whatever it reads."""
    bodies = tuple([_content(body) for body in graph.bodies.get(node, ())])
    return node.op, node.outputs, bodies, _attributes(graph, node)


def _content(body: Graph) -> int:
    kinds = _kinds(body, dict.fromkeys(body.feeds, ""))
    return hash(tuple([(kinds[tensor.node], tensor.index) for tensor in body.fetches]))


def _attributes(graph: Graph, node: Node) -> tuple[tuple[str, object], ...]:
    functions = kind.functions if node in graph.bodies and (kind := control_flow(node.op)) else ()
    different = OWN.union(functions)
    return tuple([(k, v) for k, v in sorted(node.attrs.items()) if k not in different and not k.startswith("_")])
