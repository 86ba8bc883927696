"""A step whose gradients are taken outside: one graph to plan, and two to run.

`fix_sides` fixes, for any plan, which nodes are before and after the caller's part (`Tfswap>Outside`): all effects of
the forward pass are before it, all effects of the backward pass after it. The plan chooses the side of the other
kernels, which compute from the forward pass's tensors alone. `cut` makes two graphs of the one that carries out a plan.
Requires: the order is one chain, with the caller's part in it. Ensures: each kernel is in one of the two functions,
after the same kernels as before. A tensor of the forward function that the backward function reads is passed in a
carrier (csrc/core/outside_ops.cc), so that it is freed when its last reader has run. Nodes without cost are in both:
constants, arguments, views.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from tfswap.analysis.constants import constant_nodes
from tfswap.ir.custom_ops import CARRY, DELIVER, OUTSIDE
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.op_traits import is_pure, is_view, passes_on
from tfswap.kernels.target import Target
from tfswap.passes.body_values import add_feed
from tfswap.passes.contract import graph_pass
from tfswap.passes.device_carriers import unit
from tfswap.passes.nodes import VARIANT, add_gate, add_wait


def outside_of(graph: Graph) -> Node:
    """The node of the caller's part, in a graph of one device."""
    (node,) = outsides_of(graph)
    return node


def outsides_of(graph: Graph) -> list[Node]:
    """The nodes of the caller's part, one on each device."""
    return [node for node in graph if node.op == OUTSIDE]


@graph_pass(
    requires="a node that stands for the caller's part",
    ensures="all effects of the forward pass are before the caller's part, those of the backward pass after it",
)
def fix_sides(graph: Graph, _: Target, results: int, is_backward: Callable[[Node], bool]) -> int:
    """Fix the nodes before and after the caller's part, in place; returns how many nodes have a side.

    Variables are read before it, unless the backward pass itself reads them: the caller may write them.

    Args:
        results: how many of the fetches, the first ones, are the forward pass's.
        is_backward: whether a node is of the backward pass.
    """
    outside = outside_of(graph)
    done = graph.needed([outside])
    feeds = set(graph.feeds)
    acts = [node for node in graph if not (node in feeds or node is outside or is_pure(node.op))]
    for node in acts:
        if is_backward(node) and node not in done:
            graph.add_control(node, outside)
    later = _behind(graph, outside)
    for node in acts:
        if node not in later:
            graph.add_control(outside, node)
    for fetch in graph.fetches[:results]:
        if fetch.node not in feeds:
            graph.add_control(outside, fetch.node)
    return len(acts)


def _behind(graph: Graph, first: Node) -> set[Node]:
    """The nodes that read or wait for `first`, directly or not."""
    found = {first}
    for node in graph.topological():
        if not found.isdisjoint((*(t.node for t in node.inputs), *node.controls)):
            found.add(node)
    return found


def cut(graph: Graph, results: int, kernels: Collection[str], gate: int) -> tuple[Graph, Graph]:
    """The forward and the backward function of a step.

    The first has the step's feeds; its fetches are the first `results` of the step's, and then the carriers. The feeds
    of the second are the carriers, the gradients that the caller gives, and the step's feeds that it needs, in this
    order; its fetches are the rest of the step's, without the gradients that the caller gave.

    Args:
        kernels: names of the kernels that have a place in the order.
        gate: of the backward function; the forward function has the step's. On further devices the gates have the
            numbers after it.
    """
    forward, backward = graph.copy(), graph.copy()
    before = {node.name for node in graph.needed(outsides_of(graph))} - {node.name for node in outsides_of(graph)}
    half = _BackwardFunction(backward, before, frozenset(kernels), gate)
    carried = half.finish(results)
    last = [
        forward.add(
            "NoOp",
            forward.unique_name("tfswap/forward"),
            controls=dict.fromkeys(n for n in (*(t.node for t in outside.inputs), *outside.controls)),
            device=outside.device,
        )
        for outside in outsides_of(forward)
    ]
    carriers = [_carry(forward, forward.tensor(name)) for name in carried]
    forward.fetches = [*forward.fetches[:results], *carriers]
    forward.targets = [*(t for t in forward.targets if t.name in before), *last]
    forward.prune()
    return forward, backward


def _carry(graph: Graph, tensor: Output) -> Output:
    return graph.add(
        CARRY,
        graph.unique_name(f"tfswap/{tensor.node.name}_{tensor.index}/carry"),
        (tensor,),
        attrs={"T": Dtype(tensor.type.dtype)},
        outputs=(VARIANT,),
        device=tensor.node.device,
    ).out()


class _BackwardFunction:
    """The backward function, made in place from a copy of the whole graph."""

    def __init__(self, graph: Graph, before: Collection[str], kernels: Collection[str], gate: int):
        self.graph = graph
        self.before = before
        self.kernels = kernels
        self.outsides = outsides_of(graph)
        devices = [node.device for node in self.outsides]
        self.gates = {unit(each): add_gate(graph, gate + i, each) for i, each in enumerate(devices)}
        self.feeds = set(graph.feeds)
        self.constants = constant_nodes(graph, graph.topological()) - {n for n in graph if n.name in kernels}
        self.carriers: dict[str, Node] = {}
        self.delivered: dict[Output, Output] = {}
        self.renewed: set[Node] = set()
        given = [tensor for tensor in graph.fetches if tensor.node in self.outsides]
        self.gradients = {t: add_feed(graph, f"tfswap/gradient_{i}", t.type) for i, t in enumerate(given)}
        for node in self.constants:
            node.controls = ()

    def finish(self, results: int) -> list[str]:
        """Makes it a graph of its own; returns the names of the tensors from the forward function, in order."""
        graph, outsides = self.graph, {*self.outsides}
        others = {*self.feeds, *outsides, *self.gates.values(), *(each for each in self.gradients.values())}
        own = [n for n in graph if n.name not in self.before and n not in others]
        for node in own:
            waits = not outsides.isdisjoint((*node.controls, *(t.node for t in node.inputs)))
            node.inputs = tuple(self.here(t) for t in node.inputs)
            node.controls = tuple(c for c in node.controls if c not in outsides and c.name not in self.before)
            if waits:
                graph.add_control(node, self.gates[unit(node.device)])
        gates = [*self.gates.values()]
        for gate in gates[1:]:
            add_wait(graph, gate, gates[0])  # where the function begins
        graph.fetches = [self.here(t) for t in graph.fetches[results:] if t.node not in outsides]
        graph.targets = [t for t in graph.targets if t.name not in self.before and t not in outsides] + gates
        needed = graph.live_nodes()
        used = [feed for feed in graph.feeds if feed in needed]
        graph.feeds = [*self.carriers.values(), *self.gradients.values(), *used]
        graph.prune()
        return list(self.carriers)

    def here(self, tensor: Output) -> Output:
        """`tensor` in the backward function."""
        node = tensor.node
        if tensor in self.gradients:
            return self.gradients[tensor].out()
        if node in self.feeds or node in self.constants or node.name not in self.before:
            return tensor
        if tensor in self.delivered:
            return self.delivered[tensor]
        if not is_view(node.op) or self._has_place(node):
            self.delivered[tensor] = self._deliver(tensor)
        elif passes_on(node.op):
            self.delivered[tensor] = self.here(node.inputs[tensor.index])
        else:
            if node not in self.renewed:
                self.renewed.add(node)
                node.inputs = tuple(self.here(t) for t in node.inputs)
            self.delivered[tensor] = tensor
        return self.delivered[tensor]

    def _has_place(self, node: Node) -> bool:
        """Whether a node runs at one place of the order: once, before the caller's part."""
        return node.name in self.kernels or bool(node.controls)

    def _deliver(self, tensor: Output) -> Output:
        stem = f"tfswap/{tensor.node.name}_{tensor.index}"
        carrier = add_feed(self.graph, f"{stem}/carrier", VARIANT)
        self.carriers[tensor.name] = carrier
        return self.graph.add(
            DELIVER,
            self.graph.unique_name(f"{stem}/deliver"),
            (carrier.out(),),
            controls=(self.gates[unit(tensor.node.device)],),
            attrs={"T": Dtype(tensor.type.dtype)},
            outputs=(tensor.type,),
            device=tensor.node.device,
        ).out()
