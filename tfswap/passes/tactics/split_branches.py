"""Cuts conditionals that update variables: updates that share large tensors get a conditional of their own.

A conditional is one kernel, which holds its arguments from its beginning to its end. One that updates all variables of
a model, as that of Keras' LossScaleOptimizer, holds all gradients. Here it is cut into parts: each holds the gradients
of its own updates, and the planner chooses where others are meanwhile. All parts have the same predicate, and take the
same branch. The last one has the rest: small updates, everything that acts otherwise, and the results.

What is computed from small tensors, or from variables that only the rest writes, is in each part that needs it.
The bits are the same: a part computes what its branch computes, and reads what that reads. Variables that the rest
writes are read by the parts before, so an update that comes after a write of the rest stays in the rest.

Not handled: loops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from tfswap.ir.custom_ops import RELOCATED
from tfswap.ir.graph import Graph, Node
from tfswap.ir.node_copies import add_copy
from tfswap.ir.op_traits import acts, control_flow, is_const, only_waits, reads_variable, writes_variable
from tfswap.ir.types import TensorType
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.device_bodies import attributes
from tfswap.support.reach import reach

_REST: Final = None
"""The key of what stays together in the last part."""

Key = Node | int | None
"""What parts do not share: a node, an argument by its number, or the rest."""


class _Effect(NamedTuple):
    """A node of a branch that acts, or all results of the branch.

    Attributes:
        node: None for the results.
        needed: the nodes that it needs, up to others that act.
        waits_for: those, which come before it.
    """

    node: Node | None
    needed: Sequence[Node]
    waits_for: Sequence[Node]


@graph_pass(
    requires="bodies without an order",
    ensures="a conditional holds the large tensors of one update, or of updates that share some",
)
def split_branches(graph: Graph, _: Target, most_bytes: int) -> int:
    """Cut conditionals of the graph and its bodies, in place; returns how many parts there are in addition.

    Args:
        most_bytes: larger tensors are held by one part only.
    """
    count = 0
    for part in (graph, *graph.all_bodies()):
        for node in list(part.bodies):
            kind = control_flow(node.op)
            if kind is not None and not kind.is_loop:
                count += _Conditional(part, node, most_bytes).split()
    return count


class _Conditional:
    """Cuts one conditional."""

    def __init__(self, graph: Graph, node: Node, most_bytes: int):
        self._graph = graph
        self._node = node
        self._most_bytes = most_bytes
        self._branches = graph.bodies[node]
        for branch in self._branches:
            branch.prune()
        self._effects = [_effects(branch) for branch in self._branches]
        self._argument = {feed: i for branch in self._branches for i, feed in enumerate(branch.feeds)}
        self._large = {effect.node for effects in self._effects for effect in effects if self._is_large_update(effect)}
        self._written = {p for node in self._large if node is not None for p in self._handles([node])}

    def split(self) -> int:
        """Cut it, in place; returns how many parts there are in addition."""
        groups = self._groups()
        if not groups or (len(groups) == 1 and not self._rest_is_large(groups)):
            return 0
        made = [self._add(members) for members in groups]
        self._keep({effect.node for effects in self._effects for effect in effects}.difference(*groups))
        self._node.controls = (*self._node.controls, *made)
        self._graph.bring_forward(len(self._graph) - len(made))
        return len(made)

    def _is_large_update(self, effect: _Effect) -> bool:
        """Whether an effect is a write of a variable that needs large tensors."""
        node = effect.node
        return node is not None and writes_variable(node.op) and any(map(self._is_large, effect.needed))

    def _is_large(self, node: Node) -> bool:
        return any(self._is_large_type(kind) for kind in node.outputs)

    def _is_cheap(self, node: Node) -> bool:
        """Whether a node computes its tensor from small ones, as a Fill does."""
        given = is_const(node.op) or node in self._argument or reads_variable(node.op)
        return not given and not any(self._is_large_type(tensor.type) for tensor in node.inputs)

    def _is_large_type(self, kind: TensorType) -> bool:
        return kind.dtype != "resource" and (kind.nbytes is None or kind.nbytes > self._most_bytes)

    def _handles(self, nodes: Iterable[Node]) -> set[int]:
        """The numbers of the arguments with the handles that nodes get."""
        sources = (t.node for node in nodes for t in node.inputs if t.type.dtype == "resource")
        return {self._argument[source] for source in sources if source in self._argument}

    def _keys(self, effect: _Effect) -> Iterator[Key]:
        """What no other part may have."""
        is_update = effect.node in self._large
        yield effect.node if is_update else _REST
        for node in effect.needed:
            if self._is_large(node) and not self._is_cheap(node):
                yield self._argument.get(node, node)
        yield from sorted(self._handles(effect.needed) & self._written)
        for before in effect.waits_for if is_update else ():
            yield before if before in self._large else _REST

    def _groups(self) -> list[list[Node]]:
        """The updates of each part but the last one."""
        owner: dict[Key, list[Key]] = {_REST: [_REST]}
        for effect in (effect for effects in self._effects for effect in effects):
            joined: list[Key] | None = None
            for key in self._keys(effect):
                others = owner.setdefault(key, [key])
                if joined is not None and others is not joined:
                    joined += others
                    owner.update(dict.fromkeys(others, joined))
                joined = owner[key]
        groups = {id(group): group for group in owner.values() if group is not owner[_REST]}.values()
        return [[key for key in group if isinstance(key, Node) and key in self._large] for group in groups]

    def _rest_is_large(self, groups: Sequence[Sequence[Node]]) -> bool:
        """Whether the last part holds large tensors too."""
        cut = {node for group in groups for node in group}
        left = (effect for effects in self._effects for effect in effects if effect.node not in cut)
        return any(self._is_large(node) for effect in left for node in effect.needed)

    def _needed(self, members: Collection[Node | None]) -> list[list[Node]]:
        """What these effects need, of each branch, in its order."""
        found: list[list[Node]] = []
        for branch, effects in zip(self._branches, self._effects, strict=True):
            needed = {node for effect in effects if effect.node in members for node in effect.needed}
            found.append([node for node in branch.topological() if node in needed])
        return found

    def _arguments(self, needed: Iterable[Iterable[Node]]) -> list[int]:
        """The numbers of the arguments that are among these nodes."""
        return sorted({self._argument[node] for nodes in needed for node in nodes if node in self._argument})

    def _add(self, members: Collection[Node]) -> Node:
        """Add a part with these updates."""
        node, needed = self._node, self._needed(members)
        arguments = self._arguments(needed)
        given = [node.inputs[1 + number] for number in arguments]
        attrs = {k: v for k, v in attributes(node, [t.type for t in given], ()).items() if k != RELOCATED}
        made = self._graph.add(
            node.op,
            self._graph.unique_name(f"tfswap/{node.name}/part"),
            (node.inputs[0], *given),
            controls=node.controls,
            attrs=attrs,
            device=node.device,
        )
        branches = zip(self._branches, needed, strict=True)
        self._graph.bodies[made] = tuple(_part_of(branch, nodes, arguments, members) for branch, nodes in branches)
        return made

    def _keep(self, members: Collection[Node | None]) -> None:
        """Leave these effects alone in the conditional."""
        node, needed = self._node, self._needed(members)
        arguments = self._arguments(needed)
        given = [node.inputs[1 + number] for number in arguments]
        node.attrs = attributes(node, [t.type for t in given], range(len(node.outputs)))
        node.inputs = (node.inputs[0], *given)
        for branch, nodes in zip(self._branches, needed, strict=True):
            kept = {*nodes}
            branch.feeds = [branch.feeds[number] for number in arguments]
            branch.targets = [each for each in nodes if each in members]
            for each in nodes:
                each.controls = tuple([c for c in each.controls if c in kept])
            branch.prune()


def _effects(branch: Graph) -> list[_Effect]:
    """What a branch does, in its order."""
    nodes = branch.topological()
    acting = {n for n in nodes if (acts(n.op) and not only_waits(n.op)) or n in branch.bodies}
    roots: list[tuple[Node | None, list[Node]]] = [(node, [node]) for node in nodes if node in acting]
    roots.append((None, [tensor.node for tensor in branch.fetches]))
    found: list[_Effect] = []
    for root, starts in roots:

        def sources(node: Node, root: Node | None = root) -> list[Node]:
            return [] if node in acting and node is not root else [*(t.node for t in node.inputs), *node.controls]

        reached = [*reach(starts, sources)]
        others = [node for node in reached if node in acting and node is not root]
        found.append(_Effect(root, [node for node in reached if node not in others], others))
    return found


def _part_of(branch: Graph, nodes: Sequence[Node], arguments: Sequence[int], members: Collection[Node]) -> Graph:
    """A graph of these nodes of a branch alone, with arguments by their numbers."""
    part = Graph()
    part.library, part.calls, part.executed = branch.library, branch.calls, branch.executed
    made: dict[Node, Node] = {}
    for node in nodes:
        inputs = [made[t.node].out(t.index) for t in node.inputs]
        controls = [made[c] for c in node.controls if c in made]
        made[node] = add_copy(part, node, node.name, inputs, controls=controls, source=branch)
    for number in arguments:
        feed = branch.feeds[number]
        part.feeds.append(made[feed] if feed in made else add_copy(part, feed, feed.name, (), source=branch))
    part.targets = [made[node] for node in nodes if node in members]
    return part
