"""Accumulators: the lists in which a loop saves what its backward loop reads.

An accumulator is a tensor list that starts empty, to which kernels push elements one by one, and from which kernels pop
them. Nothing else reads its elements. Optionals, in which a conditional saves the tensors of a branch (cond_v2.py), are
lists of one element: creating one is a push, reading it is a pop. Between push and pop, an accumulator passes through
loops, conditionals and other lists as a whole. An inner loop saves in a list of its body, which the outer loop pushes
and pops in turn. So a pushed tensor may be kept in any form that the pop can undo (passes/tactics/loop_swap.py).

All lists of a graph and of its bodies are divided into classes of lists that may be the same. A class is an accumulator
as a whole, or not.

Invariant: a pure function of the graph.

Not handled: optionals of several tensors; lists that are read at an index, stacked or added up.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.analysis.permits import permit_of
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import (
    control_flow,
    empties_list,
    passes_on,
    pops_list,
    pushes_list,
    reads_list_length,
    unwraps,
    wraps,
)
from tfswap.ir.permits import ANYTHING, Permit
from tfswap.ir.types import REFERENCES


class Place(NamedTuple):
    """A push or a pop.

    Attributes:
        graph: the graph of the node.
        node: the node that pushes or pops.
        position: the position of the element among the node's inputs (push) or outputs (pop).
    """

    graph: Graph
    node: Node
    position: int

    @property
    def pushed(self) -> Output:
        """The element that the node reads."""
        return self.node.inputs[self.position]

    @property
    def popped(self) -> Output:
        """The element that the node gives."""
        return self.node.out(self.position)

    @property
    def dtype(self) -> str:
        """The element's type, from the node's attributes."""
        attrs = self.node.attrs
        if "element_dtype" in attrs:
            return str(attrs["element_dtype"])
        (dtype,) = cast("tuple[object]", attrs["Toutput_types" if wraps(self.node.op) else "output_types"])
        return str(dtype)


@dataclass(frozen=True)
class Accumulator:
    """A list that is only pushed to and popped from.

    Attributes:
        name: the name of the node that creates it, in a body with the body's name as a prefix.
        dtype: the type of its elements.
        makers: the nodes that create it empty, each with its graph.
        pushes, pops: the nodes that push and pop.
        tensors: tensors of the top graph that are this list, or lists that contain it.
    """

    name: str
    dtype: str
    makers: tuple[tuple[Graph, Node], ...]
    pushes: tuple[Place, ...]
    pops: tuple[Place, ...]
    tensors: tuple[Output, ...]

    def nbytes(self, flow: Dataflow) -> int:
        """The peak of the bytes of its elements, by the facts of its graph."""
        if not self.tensors:  # it begins and ends inside of a body
            times = min(flow.times_of(graph) for graph, _ in self.makers)
            pushed = (flow.times_of(push.graph) * (push.pushed.type.nbytes or 0) for push in self.pushes)
            return round(sum(pushed) / times)
        kept = (flow.kept.get((t.node, t.index), ()) for t in self.tensors)
        return max((sum(_made_bytes(flow, v) for v in values) for values in kept), default=0)

    @property
    def permit(self) -> Permit:
        """The permit of its elements: tactics that all pushed tensors allow."""
        return functools.reduce(Permit.__and__, (permit_of(p.graph, p.pushed) for p in self.pushes), ANYTHING)


def _made_bytes(flow: Dataflow, v: int) -> int:
    value = flow.values[v]
    return 0 if value.producer == PERSISTENT else value.nbytes


def find_accumulators(graph: Graph) -> list[Accumulator]:
    """The accumulators of `graph` and of its bodies, whose elements can be copied."""
    return _Lists(graph).accumulators()


class _Lists:
    """The classes of lists of a graph and its bodies, by union-find over variant tensors."""

    def __init__(self, graph: Graph):
        self.top = graph
        self._parent: dict[Output, Output] = {}
        self._element: dict[Output, Output] = {}  # by class: the class of lists that are its elements
        self._spoiled: list[Output] = []  # lists that other nodes than pushes and pops read or create
        self._makers: list[tuple[str, Graph, Node]] = []
        self._pushes: list[tuple[Output, Place]] = []  # with the list
        self._pops: list[tuple[Output, Place]] = []
        self._spoiled += [t for t in (*graph.fetches, *(f.out() for f in graph.feeds)) if _is_variant(t)]
        self._visit(graph, "")

    def accumulators(self) -> list[Accumulator]:
        spoiled = {kind for tensor in self._spoiled for kind in self._nested(tensor)}
        makers: dict[Output, list[tuple[str, Graph, Node]]] = {}
        for name, graph, node in self._makers:
            makers.setdefault(self._find(node.out()), []).append((name, graph, node))
        pushes = self._by_class(self._pushes)
        pops = self._by_class(self._pops)
        holders = self._holders()
        found: list[Accumulator] = []
        for made, named in makers.items():
            if made in spoiled or made not in pushes or made not in pops:
                continue
            dtypes = {place.dtype for place in (*pushes[made], *pops[made])}
            dtypes |= {str(dtype) for _, _, node in named if (dtype := node.attrs.get("element_dtype")) is not None}
            if len(dtypes) != 1 or (dtype := dtypes.pop()) in REFERENCES:
                continue
            found.append(
                Accumulator(
                    min(name for name, _, _ in named),
                    dtype,
                    tuple((graph, node) for _, graph, node in named if empties_list(node.op)),
                    tuple(pushes[made]),
                    tuple(pops[made]),
                    tuple(holders.get(made, ())),
                )
            )
        return found

    def _by_class(self, places: Sequence[tuple[Output, Place]]) -> dict[Output, list[Place]]:
        result: dict[Output, list[Place]] = {}
        for tensor, place in places:
            result.setdefault(self._find(tensor), []).append(place)
        return result

    def _holders(self) -> dict[Output, list[Output]]:
        """By class, tensors of the top graph that are such lists, or lists that contain them."""
        result: dict[Output, list[Output]] = {}
        for node in self.top:
            for tensor in _variants(node.out(i) for i in range(len(node.outputs))):
                for kind in self._nested(tensor):
                    result.setdefault(kind, []).append(tensor)
        return result

    def _nested(self, tensor: Output) -> list[Output]:
        """The class of a list, that of its elements if these are lists, and so on."""
        kinds = [self._find(tensor)]
        while (inner := self._element.get(kinds[-1])) is not None and (kind := self._find(inner)) not in kinds:
            kinds.append(kind)
        return kinds

    # --- lists that may be the same --------------------------------------------------------------------------

    def _find(self, tensor: Output) -> Output:
        root = tensor
        while (above := self._parent.get(root, root)) != root:
            root = above
        while (above := self._parent.get(tensor, tensor)) != root:
            self._parent[tensor] = root
            tensor = above
        return root

    def _join(self, one: Output, other: Output) -> None:
        one, other = self._find(one), self._find(other)
        if one == other:
            return
        self._parent[other] = one
        kept = self._element.pop(other, None)
        if kept is not None:
            self._keep(one, kept)

    def _keep(self, holder: Output, element: Output) -> None:
        """Record that lists of the class of `holder` contain lists of the class of `element`."""
        holder = self._find(holder)
        before = self._element.setdefault(holder, element)
        self._join(before, element)

    def _join_each(self, ones: Sequence[Output], others: Sequence[Output]) -> None:
        for one, other in zip(ones, others, strict=True):
            if _is_variant(one) and _is_variant(other):
                self._join(one, other)

    def _visit(self, graph: Graph, path: str) -> None:
        for node in graph:
            variants = [*_variants(node.inputs), *_variants(node.out(i) for i in range(len(node.outputs)))]
            if node in graph.bodies:
                self._control_flow(node, graph.bodies[node])
                for number, body in enumerate(graph.bodies[node]):
                    self._visit(body, f"{path}{node.name}[{number}]/")
            elif not variants or node in graph.feeds:
                continue
            elif empties_list(node.op):
                self._makers.append((path + node.name, graph, node))
            elif pushes_list(node.op):
                self._join(node.inputs[0], node.out())
                self._push(node.out(), Place(graph, node, 1))
            elif pops_list(node.op):
                self._join(node.inputs[0], node.out(0))
                self._pop(node.out(0), Place(graph, node, 1))
            elif wraps(node.op) and len(node.inputs) == 1:
                self._makers.append((path + node.name, graph, node))
                self._push(node.out(), Place(graph, node, 0))
            elif unwraps(node.op) and len(node.outputs) == 1:
                self._pop(node.inputs[0], Place(graph, node, 0))
            elif passes_on(node.op):
                self._join_each(node.inputs, [node.out(i) for i in range(len(node.outputs))])
            elif not reads_list_length(node.op):
                self._spoiled += variants

    def _push(self, made: Output, place: Place) -> None:
        self._pushes.append((made, place))
        if _is_variant(place.pushed):
            self._keep(made, place.pushed)

    def _pop(self, source: Output, place: Place) -> None:
        self._pops.append((source, place))
        if _is_variant(place.popped):
            self._keep(source, place.popped)

    def _control_flow(self, node: Node, bodies: Sequence[Graph]) -> None:
        kind = control_flow(node.op)
        assert kind is not None
        given = node.inputs[kind.first_argument :]
        made = [node.out(i) for i in range(len(node.outputs))]
        if kind.is_loop:
            self._join_each(given, made)
        for body in bodies:
            self._join_each(given, [feed.out() for feed in body.feeds])
        for body in bodies[1:] if kind.is_loop else bodies:
            self._join_each(made, body.fetches)


def _is_variant(tensor: Output) -> bool:
    return tensor.type.dtype == "variant"


def _variants(tensors: Iterable[Output]) -> Iterator[Output]:
    return (t for t in tensors if _is_variant(t))
