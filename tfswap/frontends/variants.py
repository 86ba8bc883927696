"""The forms of one step that a plan chooses among: the same values from graphs that differ.

Some tactics change which kernels there are, and not only when they run. Each choice of them makes another graph, with
facts and ladders of its own, and the plan is the fastest of all that fit. Which variants there are does not depend on
the limit: so more limit never gives a slower plan, here as on a ladder.

What loops save is swapped in stages of a quarter of its bytes, the largest accumulators first. Kernels take encodings
wherever that gains anything, or none does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import NamedTuple

from tfswap.analysis.accumulators import Accumulator, find_accumulators
from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.analysis.encodings import Encoding
from tfswap.errors import InvalidModel
from tfswap.frontends.marks import marked_to_keep
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.ops import is_view
from tfswap.oplib import names
from tfswap.passes.encode import apply_encodings
from tfswap.passes.loop_swap import apply_loop_swap
from tfswap.planner.ordering import PEAK_TIE
from tfswap.planner.planner import Candidate, Planner
from tfswap.planner.problem import Problem

STAGES = 4
"""In so many steps what loops save is swapped, each taking as much of the bytes."""
MOST_VARIANTS = 1 + STAGES + 1
"""Of a step: as it is, with what loops save swapped, and with encodings."""
LONG_WAIT = 8.0
"""A tensor that waits for no longer than so many times what encoding it takes gains nothing worth a kernel."""
PROBES = 4
"""At so many targets of live bytes the step with encodings is compared with the step as it is."""


class Rewriting(NamedTuple):
    """What is done to a step's graph before its kernels are ordered.

    Attributes:
        accumulators: names of the accumulators whose elements are swapped inside their loops.
        encoded: names of the kernels that take an encoding in place of a tensor.
    """

    accumulators: tuple[str, ...] = ()
    encoded: tuple[str, ...] = ()


PLAIN = Rewriting()


class Variant(NamedTuple):
    """One form of the step.

    Attributes:
        graph: the step so, with settled variables and ordered bodies.
        flow: its facts.
        encodings: those in the graph.
    """

    rewriting: Rewriting
    graph: Graph
    flow: Dataflow
    encodings: tuple[Encoding, ...] = ()


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
        encodings: from such a graph to what may be encoded in it.
    """

    def __init__(
        self,
        graph: Graph,
        chains: list[list[str]],
        facts: Callable[[Graph], Dataflow],
        encodings: Callable[[Graph], list[Encoding]],
    ):
        self._encodings = encodings
        self.plain = Variant(PLAIN, graph, facts(graph))
        self._chains = chains
        self._facts = facts
        self._made = {PLAIN: self.plain}

    def __getitem__(self, rewriting: Rewriting) -> Variant:
        if rewriting not in self._made:
            graph = self.plain.graph.copy()
            apply_loop_swap(graph, self._chains, rewriting.accumulators)
            encodings = self._encode(graph, rewriting.encoded)
            self._made[rewriting] = Variant(rewriting, graph, self._facts(graph), encodings)
        return self._made[rewriting]

    def _encode(self, graph: Graph, kernels: Collection[str]) -> tuple[Encoding, ...]:
        """Let the kernels of these names take encodings. Raises InvalidModel where one can't."""
        if not kernels:
            return ()
        found = tuple(e for e in self._encodings(graph) if e.kernel.name in kernels)
        strange = min(set(kernels).difference(e.kernel.name for e in found), default=None)
        if strange is not None:
            raise InvalidModel(
                f"this plan gives an encoding to {strange!r}, which this graph does not have, or which can't take one "
                "here with the same bits. Plan again for this graph."
            )
        apply_encodings(graph, found)
        graph.prune()
        return found

    def encoded(self, planner_of: Callable[[Variant], Planner]) -> Rewriting | None:
        """The step with every encoding that gains something; None where none does."""
        plain = planner_of(self.plain)
        chosen = _worth_encoding(plain.problems[0], self._encodings(self.plain.graph))
        if not chosen:
            return None
        rewriting = Rewriting(encoded=chosen)
        return rewriting if _gains(planner_of(self[rewriting]), plain) else None

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


def _worth_encoding(problem: Problem, encodings: Collection[Encoding]) -> tuple[str, ...]:
    """Names of the kernels that gain by their encodings: a tensor waits long for them, or they need less memory.

    Args:
        problem: the step as it is, in the order that is planned first.
    """
    flow, uses = problem.flow, problem.uses
    place = {kernel: position for position, kernel in enumerate(problem.order)}
    chosen: list[str] = []
    for e in encodings:
        v = flow.value_of.get((e.tensor.node, e.tensor.index))
        if v is None or v in problem.keep or flow.values[v].nbytes < problem.smallest_bytes:
            continue
        if e.codec.encode == names.ENCODE_MASK:
            if flow.values[v].producer == PERSISTENT or v in flow.fetched:
                continue  # it stays all the same
            at = place[flow.place[e.kernel.name]]
            waits = (uses.starts[b] - uses.starts[a + 1] for a, b in pairwise(uses.positions[v]) if b <= at)
            if max(waits, default=0.0) < LONG_WAIT * flow.values[v].nbytes / problem.rates.memory_bytes_per_s:
                continue
        chosen.append(e.kernel.name)
    return tuple(chosen)


def _gains(encoded: Planner, plain: Planner) -> bool:
    """Whether plans of a step with encodings may be better: it gets by with less, or is faster with as much.

    Where a tensor stays for another kernel, its mask alone gives nothing: then plans are not looked for twice.
    """
    targets = plain.targets
    if min(encoded.targets) * PEAK_TIE < min(targets):
        return True
    probed = targets[:: max(1, len(targets) // PROBES)]
    return any(encoded.seconds_at(target) < plain.seconds_at(target) for target in probed)
