"""Joins the graphs that carry out the plans of a step's parts (device_parts.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.node_copies import add_copy
from tfswap.passes.device_parts import Parts
from tfswap.passes.nodes import add_gate, add_wait
from tfswap.passes.verify import verify


class Joined(NamedTuple):
    """A graph that carries out a plan for each device.

    Attributes:
        kernels: names of the kernels that have a place in a plan's order.
    """

    graph: Graph
    kernels: frozenset[str]


def join(
    parts: Parts,
    made: Mapping[str, Graph],
    orders: Mapping[str, Collection[str]] | None = None,
    gate: int | None = None,
) -> Joined:
    """One graph of a graph for each device, with the feeds and fetches of the whole step.

    Args:
        made: the graphs of the planned parts, by device. The other parts stay as they were cut.
        orders: the kernels in the order of each plan, by device.
        gate: of the first of the other parts; the next ones have the numbers after it. None: they have none.

    Raises VerificationError as `verify`.
    """
    others = {where: part.copy() for where, part in parts.graphs.items() if where not in made}
    if gate is not None:
        for number, (where, part) in enumerate(others.items()):
            part.targets.append(add_gate(part, gate + number, f"/device:{where}"))
    made = {**made, **others}
    work, places = _Join(parts, made), orders or {}
    verify(work.graph)
    kernels = [work.names[where][name] for where, names in places.items() for name in names if name in made[where]]
    return Joined(work.graph, frozenset(kernels))


class _Join:
    def __init__(self, parts: Parts, made: Mapping[str, Graph]):
        self.graph = graph = Graph()
        self._made: dict[Node, Node] = {}  # by node of a part; an argument of several parts is one node
        self.names: dict[str, dict[str, str]] = {}  # by device and name in its part
        ends = parts.sources.items()
        self._source_of = {made[where][name]: made[home][source] for (where, name), (home, source) in ends}
        feeds: dict[str, Node] = {}
        for where, part in made.items():
            of_part = set(part.feeds)
            names = self.names[where] = {}
            for node in part:
                name = parts.own_name(where, node)
                if node in of_part:
                    self._made[node] = feeds[name] = feeds.get(name) or self._copy(node, name, part, where)
                else:
                    self._made[node] = self._copy(node, name, part, where)
                names[node.name] = self._made[node].name
        self._feeds = set(feeds.values())
        for node, copy in self._made.items():
            sent = () if self._is_edge(node) or node not in self._source_of else self._source_of[node].inputs
            copy.inputs = tuple(map(self._tensor, (*node.inputs, *sent)))
            received = (tensor.node for tensor in node.inputs if self._is_edge(tensor.node))
            before = (each for earlier in (*node.controls, *received) for each in self._awaited(earlier))
            copy.controls = tuple(dict.fromkeys(before))
        gates = [node for node in graph if node.op == custom_ops.GATE]
        for gate in gates[1:]:
            add_wait(graph, gate, gates[0])  # where the step begins
        graph.library = parts.whole.library
        graph.feeds = [feeds[feed.name] for feed in parts.whole.feeds]
        graph.fetches = [self._tensor(made[where].fetches[i]) for where, i in parts.fetched]
        targets = (target for part in made.values() for target in part.targets)
        graph.targets = list(dict.fromkeys(each for target in targets for each in self._awaited(target)))
        graph.prune()

    def _copy(self, node: Node, name: str, part: Graph, where: str) -> Node:
        """A node of the joined graph for one of a part, without its inputs. Nodes of two parts may have one name."""
        made = add_copy(self.graph, node, name, (), device=node.device or f"/device:{where}", source=part)
        if node in self._source_of and not self._is_edge(node):
            made.op, made.attrs = "Identity", {"T": Dtype(node.outputs[0].dtype)}
        return made

    def _is_edge(self, node: Node) -> bool:
        """Whether an edge takes the place of a node: a Send, or a Receive, except one that only waits."""
        if node.op == custom_ops.RECEIVE:
            return self._source_of[node].inputs[0].node.op != custom_ops.SIGNAL
        return node.op == custom_ops.SEND

    def _tensor(self, tensor: Output) -> Output:
        """A tensor of a part in the joined graph: that which was sent, for a received one."""
        node = tensor.node
        if node in self._source_of and self._is_edge(node):
            return self._tensor(self._source_of[node].inputs[0])
        return Output(self._made[node], tensor.index)

    def _awaited(self, node: Node) -> Iterable[Node]:
        """The nodes that a node waits for in the joined graph where it waited for this one in its part. Arguments are
        there when the step begins.
        """
        if not self._is_edge(node):
            made = self._made[node]
            return () if made in self._feeds else (made,)
        before = (*(tensor.node for tensor in node.inputs), *node.controls)
        return [each for earlier in before for each in self._awaited(earlier)]
