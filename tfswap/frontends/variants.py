"""The forms of one step that a plan chooses among: the same values from graphs that differ.

Some tactics change which kernels there are, and not only when they run. Each choice of them makes another graph, with
facts and ladders of its own, and the plan is the fastest of all that fit. Which variants there are does not depend on
the limit: so more limit never gives a slower plan, here as on a ladder.

What loops save is swapped in stages of a quarter of its bytes, the largest accumulators first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from tfswap.analysis.accumulators import Accumulator, find_accumulators
from tfswap.analysis.dataflow import Dataflow
from tfswap.frontends.marks import marked_to_keep
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.ops import is_view
from tfswap.passes.loop_swap import apply_loop_swap
from tfswap.planner.planner import Candidate

STAGES = 4
"""In so many steps what loops save is swapped, each taking as much of the bytes."""


class Rewriting(NamedTuple):
    """What is done to a step's graph before its kernels are ordered.

    Attributes:
        accumulators: names of the accumulators whose elements are swapped inside their loops.
    """

    accumulators: tuple[str, ...] = ()


PLAIN = Rewriting()


class Variant(NamedTuple):
    """One form of the step.

    Attributes:
        graph: the step so, with settled variables and ordered bodies.
        flow: its facts.
    """

    rewriting: Rewriting
    graph: Graph
    flow: Dataflow


class Found(NamedTuple):
    """A candidate, and the variant that it is of."""

    variant: Variant
    candidate: Candidate


class Variants:
    """The variants of one step, each made when it is first asked for.

    Args:
        graph: the step, with settled variables and ordered bodies.
        chains: the order of each body's kernels, as `apply_bodies` gave it.
        facts: from such a graph to its facts.
    """

    def __init__(self, graph: Graph, chains: list[list[str]], facts: Callable[[Graph], Dataflow]):
        self.plain = Variant(PLAIN, graph, facts(graph))
        self._chains = chains
        self._facts = facts
        self._made = {PLAIN: self.plain}

    def __getitem__(self, rewriting: Rewriting) -> Variant:
        if rewriting not in self._made:
            graph = self.plain.graph.copy()
            apply_loop_swap(graph, self._chains, rewriting.accumulators)
            self._made[rewriting] = Variant(rewriting, graph, self._facts(graph))
        return self._made[rewriting]

    @functools.cached_property
    def accumulators(self) -> dict[str, Accumulator]:
        """All accumulators of the step that may be swapped, by name."""
        marked = _marked(self.plain.graph)
        found = find_accumulators(self.plain.graph)
        return {a.name: a for a in found if not any(_origin(push.pushed) in marked for push in a.pushes)}

    def stages(self, smallest_bytes: int) -> list[Rewriting]:
        """What may be chosen among, from nothing to the most.

        Args:
            smallest_bytes: an accumulator that keeps less costs more than it frees.
        """
        sizes = {name: a.nbytes(self.plain.flow) for name, a in self.accumulators.items()}
        largest = sorted((n for n in sizes if sizes[n] >= smallest_bytes), key=lambda n: (-sizes[n], n))
        total, done, taken = sum(sizes[n] for n in largest), 0, 0
        found = [PLAIN]
        for stage in range(1, STAGES + 1):
            while done < len(largest) and taken * STAGES < total * stage:
                taken += sizes[largest[done]]
                done += 1
            found.append(Rewriting(tuple(sorted(largest[:done]))))
        return list(dict.fromkeys(found))


def _marked(graph: Graph) -> set[Output]:
    """What the tensors of bodies that the user marked to stay are views of."""
    return {_origin(body.tensor(name)) for body in graph.all_bodies() for name in marked_to_keep(body)}


def _origin(tensor: Output) -> Output:
    node: Node = tensor.node
    while is_view(node.op) and node.inputs:
        tensor = node.inputs[tensor.index if tensor.index < len(node.inputs) else 0]
        node = tensor.node
    return tensor
