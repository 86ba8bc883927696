"""Finds tensors that a backward loop can recompute, so that the loop need not save them.

A loop saves an element per iteration for its backward loop, whose iterations come in reverse order. An element need not
be saved if kernels compute it from other saved elements of that iteration, from constants, and from loop invariants
(arguments, and variables that the loop reads and does not write). An iteration of the backward loop has all of these,
and can recompute the element. For example, additive attention saves O(T H) elements at each of T steps, and needs only
the query of O(H) (Meng et al. 2017, section on attention, where the user requests it by hand).

Invariant: a pure function of the graph. Only deterministic kernels without effects are recomputed, so values have the
same bits.

Not handled: inner loops, which are in other bodies than their backward loops; tensors that conditionals save; tensors
computed from loop state that is not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tfswap.analysis.accumulators import Accumulator, Place
from tfswap.analysis.variables import resources_used
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import (
    READ_VARIABLE,
    control_flow,
    is_const,
    may_run_again,
    passes_on,
    reads_list_length,
    reads_variable,
)
from tfswap.ir.sums import differs_by_iteration
from tfswap.ir.views import passed_on


class Saved(NamedTuple):
    """An accumulator that one loop fills and another one empties, an element per iteration."""

    name: str
    push: Place
    pop: Place


@dataclass(frozen=True, eq=False)
class Passage:
    """A loop, and its backward loop.

    Attributes:
        graph: the graph with both loops.
        loop, back: the loop, and its backward loop.
        saved: the accumulators that pass from one to the other.
    """

    graph: Graph
    loop: Node
    back: Node
    saved: tuple[Saved, ...]

    @property
    def forward(self) -> Graph:
        """The loop's body."""
        return self.graph.bodies[self.loop][1]

    @property
    def backward(self) -> Graph:
        """The backward loop's body."""
        return self.graph.bodies[self.back][1]

    def invariant(self, feed: Node) -> int | None:
        """The position of the loop's argument `feed`, if it is a loop invariant; None otherwise."""
        position = self.forward.feeds.index(feed)
        return position if passed_on(self.forward.fetches[position]) == feed.out() else None

    def reads_invariant(self, node: Node) -> bool:
        """Whether a node of the forward body reads a variable that no iteration writes."""
        if node.op != READ_VARIABLE:
            return False
        handle = passed_on(node.inputs[0])
        if handle.node not in self.forward.feeds or self.invariant(handle.node) is None:
            return False
        for user in self.forward:
            given = [i for i, t in enumerate(user.inputs) if passed_on(t) == handle]
            if not given or passes_on(user.op):
                continue
            if user in self.forward.bodies:
                if not set(given).isdisjoint(resources_used(user, self.forward.bodies[user]).written):
                    return False
            elif not reads_variable(user.op):
                return False
        return True

    def recomputed(self, tensor: Output, kept: Collection[Output]) -> list[Node] | None:
        """The kernels that recompute a tensor of the forward body in the backward loop, in order; None where it can't
        be recomputed.

        Args:
            kept: tensors that are saved.
        """
        kernels: list[Node] = []
        seen: set[Node] = set()
        pending = [(passed_on(tensor), False)]
        while pending:
            current, is_ready = pending.pop()
            node = current.node
            if is_ready:
                kernels.append(node)
                continue
            if current in kept or node in seen:
                continue
            if node in self.forward.feeds:
                if self.invariant(node) is None:
                    return None
                continue
            if self.reads_invariant(node):
                continue
            if differs_by_iteration(node) or not (is_const(node.op) or may_run_again(node.op)):
                return None  # iterations of the backward loop count from the last
            seen.add(node)
            pending.append((current, True))
            pending += ((passed_on(t), False) for t in node.inputs)
        return kernels


def find_passages(graph: Graph, accumulators: Iterable[Accumulator]) -> list[Passage]:
    """The pairs of loops of `graph` and of its bodies between which accumulators pass."""
    parts = (graph, *graph.all_bodies())
    runners = {
        bodies[1]: (where, node)
        for where in parts
        for node, bodies in where.bodies.items()
        if (kind := control_flow(node.op)) is not None and kind.is_loop
    }
    takers: dict[Output, set[Node]] = {}  # readers of lists as a whole, without pushes and pops
    for node in (node for part in parts for node in part if control_flow(node.op) or reads_list_length(node.op)):
        for tensor in node.inputs:
            if tensor.type.dtype == "variant":
                takers.setdefault(passed_on(tensor), set()).add(node)
    found: dict[tuple[Graph, Node, Node], list[Saved]] = {}
    for a in accumulators:
        if len(a.makers) != 1 or len(a.pushes) != 1 or len(a.pops) != 1:
            continue
        (where, maker), (push,), (pop,) = a.makers[0], a.pushes, a.pops
        forward, backward = runners.get(push.graph), runners.get(pop.graph)
        if forward is None or backward is None or not forward[0] is backward[0] is where:
            continue
        loop, back = forward[1], backward[1]
        filled, emptied = _changed(push, push.node.out()), _changed(pop, pop.node.out(0))
        if filled is None or emptied is None:
            continue
        empty, full = passed_on(loop.inputs[filled]), loop.out(filled)
        lists = (empty, full, push.graph.feeds[filled].out(), push.node.out(), pop.graph.feeds[emptied].out())
        seen = set[Node]().union(*(takers.get(one, ()) for one in lists))
        if empty == maker.out() and passed_on(back.inputs[emptied]) == full and seen == {loop, back}:
            found.setdefault((where, loop, back), []).append(Saved(a.name, push, pop))
    return [Passage(where, loop, back, tuple(saved)) for (where, loop, back), saved in found.items()]


def _changed(place: Place, result: Output) -> int | None:
    """The position of the body's argument that is the list which `place` changes into `result`; None where none is."""
    body, given = place.graph, passed_on(place.node.inputs[0]).node
    position = body.feeds.index(given) if given in body.feeds else None
    return position if position is not None and passed_on(body.fetches[position]) == result else None


def choose_recomputed(passage: Passage, worth: Callable[[Saved, list[Node]], bool]) -> dict[str, list[Node]]:
    """The names of accumulators that need not be saved, each with the kernels that recompute its elements.

    Args:
        worth: whether running these kernels in each iteration is better than saving.
    """
    place = {node: i for i, node in enumerate(passage.forward.topological())}
    made = {s.name: passed_on(s.push.pushed) for s in passage.saved}
    chosen: dict[str, list[Node]] = {}
    for s in sorted(passage.saved, key=lambda s: (place[made[s.name].node], made[s.name].index, s.name)):
        kernels = passage.recomputed(made[s.name], {t for name, t in made.items() if name not in (s.name, *chosen)})
        if kernels is not None and worth(s, kernels):
            chosen[s.name] = kernels
    return chosen
