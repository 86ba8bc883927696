"""The orders in which sums add when TensorFlow runs a step. For AddN it is the input that it begins with, which depends
on the holders of its inputs when it runs, in each iteration. For sums that add each term when it is ready it is the
order of the kernels that add one term each.

The runs are those of simulator/propagator.py. A buffer is held by each edge with its value, by each list that keeps it,
and permanently by variables, arguments and results. Views and buffer forwarding are those of kernels/kernel_memory.py.

A loop of unknown or large number of iterations runs a few. If integers do not decide a branch, or when a loop ends,
different runs take different branches (simulator/open_loops.py).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import (
    depends_on_owners,
    passes_on,
    pops_list,
    pushes_list,
    reads_variable,
    unwraps,
    uses_tensor_list,
    wraps,
    writes_variable,
)
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.kernel_memory import node_memory
from tfswap.simulator.body_integers import Numbers
from tfswap.simulator.decisions import Decision, Outcome, Predicate, decisions_seen, predicate_of
from tfswap.simulator.lowered_graph import ARGUMENT, KERNEL, LOOP_CONDITION, MERGE, RESULT, SWITCH, Item, Scope, callee
from tfswap.simulator.open_loops import UNKNOWN_TRIPS, OpenLoops
from tfswap.simulator.propagator import Buffer, Frame, Iteration, LoweredProgram, Propagator
from tfswap.simulator.sum_samples import FirstTerm, SumSamples

MOST_RUNS = 25
FEW_RUNS = 9
"""Runs for one thread, where only the order of many readers of one node, and decisions, are random."""
MOST_ITEMS = 200_000
"""The most items of all runs together: large steps have fewer runs, at least one."""
MOST_TRIPS = 24
INNER_TRIPS = 6
"""The most iterations of a loop that are run, outside and inside of another loop."""
OUTCOMES = 32
"""Runs of a step whose values decide branches: all outcomes of the first five decisions of two branches."""


MOST_SEEN = 64
"""Predicates that the order of one sum may depend on."""


class SumOrders(NamedTuple):
    """The most likely orders in which sums add.

    Attributes:
        first: by the names of its part and its own, the input that an AddN begins with.
        ready: names of the kernels that add one term each, in the order in which they start, by the sum's name.
    """

    first: dict[tuple[str, str], FirstTerm]
    ready: dict[str, tuple[str, ...]]


def simulate_sums(
    graph: Graph,
    device: DeviceModel,
    seconds: Callable[[Node], float],
    additions: Mapping[str, str],
    by_decision: bool = True,
) -> SumOrders:
    """The orders in which the sums of a step and of its bodies add.

    Args:
        graph: the step, in TensorFlow's order of nodes, with equal nodes merged.
        seconds: the seconds of a node's kernel.
        additions: by the name of a kernel that adds one term to a sum, the sum.
        by_decision: whether the first term may depend on which branches were taken.
    """
    step = _Step(graph, device, seconds)
    found: dict[tuple[str, str], SumSamples] = {}
    orders: dict[str, Counter[tuple[str, ...]]] = {}
    runs, seed, items = step.most_runs, 0, 0
    is_straight = not (step.lowered.loops or step.lowered.decides)
    while seed < runs:
        run = _Run(step, seed)
        run.run()
        if run.decides:
            runs = max(runs, OUTCOMES)
        items += len(run.ran)
        for name, iterations, position, decided in run.begun:
            found.setdefault(name, SumSamples(step.races)).add(iterations, position, run.outcome)
            step.decided_before[name] = max(step.decided_before.get(name, 0), decided)
        for name, order in _in_order(run, additions).items():
            orders.setdefault(name, Counter())[order] += 1
        seed += 1
        if items + items // seed > MOST_ITEMS:
            break
        if is_straight and all(
            leads_by(counts) > runs - seed for counts in (*orders.values(), *(s.positions for s in found.values()))
        ):
            break  # the other runs change nothing
    first = {
        name: samples.first(step.trips_around(name[0]), partial(step.seen, name) if by_decision else tuple)
        for name, samples in found.items()
    }
    return SumOrders(first, {name: min(counts, key=lambda o: (-counts[o], o)) for name, counts in orders.items()})


def leads_by(counts: Counter[Any]) -> int:
    """By how many the most frequent of these leads over the next one."""
    (_, most), (_, next_most) = [*counts.most_common(2), (None, 0)][:2]
    return most - next_most


def _in_order(run: _Run, additions: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """By sum, the kernels that added its terms, in the order of a run."""
    orders: dict[str, tuple[str, ...]] = {}
    for name in run.started:
        if name in additions:
            orders[additions[name]] = (*orders.get(additions[name], ()), name)
    return orders


class _Forwarding(NamedTuple):
    """Of a kernel: the inputs that a variable keeps, and by output its alias, and the inputs that it may reuse."""

    retains: Sequence[int]
    alias: dict[int, int]
    forward: dict[int, tuple[int, ...]]


class _Step(LoweredProgram):
    """A step whose sums are simulated."""

    def __init__(self, graph: Graph, device: DeviceModel, seconds: Callable[[Node], float]):
        super().__init__(graph, device, seconds)
        self.races = self.threads > 1 and not device.is_asynchronous
        self.most_runs = MOST_RUNS if self.races else FEW_RUNS if self.wide or self.lowered.decides else 1
        self.numbers = Numbers()
        self._scopes: dict[str, Scope] = {item.scope.name: item.scope for item in self.lowered.items}
        self._predicates: dict[tuple[str, str], Predicate | None] = {}
        self._decided_in: dict[Predicate, Scope] = {}
        self._needed: dict[Node, set[Node]] = {}
        self.open_loops = OpenLoops(self.lowered.loops)
        self.decided_before: dict[tuple[str, str], int] = {}
        self._memories: dict[Node, _Forwarding] = {}

    def forwarding(self, node: Node) -> _Forwarding:
        """What a kernel does with its inputs' buffers."""
        found = self._memories.get(node)
        if found is None:
            memory = node_memory(node, self.device)
            found = _Forwarding(memory.retains, dict(memory.alias), dict(memory.forward))
            self._memories[node] = found
        return found

    def predicate(self, scope: Scope, conditional: Node) -> Predicate | None:
        """The predicate of a conditional of `scope`."""
        key = scope.name, conditional.name
        if key not in self._predicates:
            predicate = self._predicates[key] = predicate_of(scope, conditional)
            if predicate is not None:
                self._decided_in.setdefault(predicate, scope)
        return self._predicates[key]

    def end(self, loop: int) -> Predicate | None:
        """Whether an iteration of a loop is the last; None where all runs have as many."""
        predicate = self.open_loops.end(loop)
        if predicate is not None:
            node, scope, _ = self.lowered.loops[loop]
            self._decided_in.setdefault(predicate, callee(scope, node, 1, loop))
        return predicate

    def seen(self, name: tuple[str, str]) -> list[Decision]:
        """The decisions that a sum may depend on: the latest before it."""
        scope, decided = self._scopes[name[0]], self.decided_before[name]
        latest = dict(list(self._decided_in.items())[max(0, decided - MOST_SEEN) : decided])
        return decisions_seen(scope, scope.graph[name[1]], latest, self._needed_by)

    def _needed_by(self, graph: Graph, node: Node) -> set[Node]:
        if node not in self._needed:
            self._needed[node] = graph.needed([node])
        return self._needed[node]

    def trips_around(self, name: str) -> Callable[[tuple[int, ...]], tuple[int, int | None]]:
        """`trips_of` of the loops around a part, by the iterations of those further out."""
        loops = self._loops_around(self._scopes[name])
        return lambda around: self.trips_of(loops[len(around)], around)

    def _loops_around(self, scope: Scope) -> list[int]:
        return [] if scope.loop < 0 else [*self._loops_around(self.lowered.loops[scope.loop].scope), scope.loop]

    def trips_of(self, loop: int, iterations: Sequence[int]) -> tuple[int, int | None]:
        """The number of a loop's iterations that are run, and their number, in these iterations of the loops around."""
        node, scope, _ = self.lowered.loops[loop]
        integers = self.numbers.trips(scope, node, iterations)
        trips = None if integers is None else len(integers) - 1
        most = MOST_TRIPS if scope.loop < 0 else INNER_TRIPS
        return min(most, UNKNOWN_TRIPS if trips is None else trips), trips


class _Run(Propagator):
    """One run.

    Attributes:
        begun: for sums: part and name, iterations of the loops around, the first input, and the number of predicates
            decided before.
        started: names of the kernels of the step itself, in the order of their start.
        outcome: the branches that were taken.
        decides: whether the step's values decided on some of them.
    """

    def __init__(self, step: _Step, number: int):
        super().__init__(step, random.Random(number))
        self._sums = step
        self._number, self._outcomes, self._first_outcomes = number, number, OUTCOMES
        self.outcome = Outcome()
        self.decides = False
        self._open: set[int] = set()
        self.begun: list[tuple[tuple[str, str], tuple[int, ...], int, int]] = []
        self.started: list[str] = []

    def trips(self, loop: int, iterations: tuple[int, ...]) -> int:
        most, trips = self._sums.trips_of(loop, iterations)
        if trips is not None or self._sums.end(loop) is None:
            return most
        self.decides = True
        self._open.add(loop)
        return min(most, self._sums.open_loops.trips(loop, self._number))

    def compute(self, number: int, frame: Frame, iteration: Iteration) -> dict[int, Buffer]:
        """The outputs of an item that is not dead."""
        item = self.lowered.items[number]
        reads = [iteration.entries.get((number, position)) for position in range(len(item.inputs))]
        if item.kind == SWITCH:
            data, decides = reads
            assert data is not None and decides is not None
            if item.choice is None:  # a loop goes on at its second output
                return {decides.decision or 0: data}
            return {self._branch(item.scope, item.choice, decides, frame.numbers(iteration)): data}
        if item.kind == LOOP_CONDITION:
            decision = Buffer()
            decision.decision = int(iteration.number < frame.trips)
            self._end(item.loop, frame.numbers(iteration), not decision.decision)
            return {0: decision}
        if item.kind == ARGUMENT:
            return {0: Buffer(pins=1)}
        if item.kind == RESULT:
            for value in reads:
                if value is not None:
                    value.pins += 1
            return {}
        if item.kind == MERGE:
            return {0: next(value for value in reads if value is not None)}
        if item.kind != KERNEL:
            return {0: reads[0]} if reads and reads[0] is not None else {}
        assert item.node is not None
        return self._kernel(item, item.node, reads, frame, iteration)

    def _branch(self, scope: Scope, conditional: Node, decides: Buffer, iterations: tuple[int, ...]) -> int:
        """The branch that is taken. The runs together have all outcomes of the first decisions."""
        branches = len(scope.graph.bodies[conditional])
        predicate = self._sums.predicate(scope, conditional)
        if decides.decision is None:
            decides.decision = self._sums.numbers.branch(scope, conditional, iterations)
        if decides.decision is None:
            self.decides = True
            if self._first_outcomes >= branches:
                self._first_outcomes //= branches
                self._outcomes, decides.decision = divmod(self._outcomes, branches)
            else:
                decides.decision = self.chance.randrange(branches)
        taken = min(decides.decision, branches - 1)
        if predicate is not None:
            self.outcome.add(predicate, iterations, taken)
        return taken

    def _end(self, loop: int, iterations: tuple[int, ...], is_last: bool) -> None:
        """A condition decides whether the iteration before was the last."""
        predicate = self._sums.end(loop) if loop in self._open else None
        if predicate is not None:
            *around, number = iterations
            self.outcome.expect(predicate)
            if number:
                self.outcome.add(predicate, (*around, number - 1), 0 if is_last else 1)

    def _kernel(
        self, item: Item, node: Node, reads: list[Buffer | None], frame: Frame, iteration: Iteration
    ) -> dict[int, Buffer]:
        handle = reads[0] if reads else None
        if not item.scope.name:
            self.started.append(node.name)
        if not item.inputs:  # constants, folded nodes, handles
            return {index: Buffer(pins=1) for index in range(len(node.outputs))}
        if handle is not None and reads_variable(node.op) and not writes_variable(node.op) and len(reads) == 1:
            if handle.variable is None:
                handle.variable = Buffer(pins=1)
            return {0: handle.variable}
        if wraps(node.op):
            return {0: Buffer(elements=[value for value in reads if value is not None])}
        if unwraps(node.op) and handle is not None and len(handle.elements) == len(node.outputs):
            return dict(enumerate(handle.elements))
        if uses_tensor_list(node.op):
            return self._list(node, reads)
        if depends_on_owners(node.op) and len(reads) > 1:
            name = item.scope.name, node.name
            alone = (p for p, value in enumerate(reads) if value is not None and value.is_alone)
            self.begun.append((name, frame.numbers(iteration), next(alone, 0), len(self.outcome)))
        retains, alias, forward = self._sums.forwarding(node)
        for position in retains:
            value = reads[position]
            if value is not None and handle is not None:
                value.pins += 1
                old, handle.variable = handle.variable, value
                if old is not None:
                    old.pins -= 1
        made: dict[int, Buffer] = {}
        for index in range(len(node.outputs)):
            source = alias.get(index)
            value = None if source is None else reads[source]
            if value is None:
                taken = (reads[p] for p in forward.get(index, ()))
                value = next((v for v in taken if v is not None and v.is_alone and v not in made.values()), None)
                if value is not None:
                    value.decision = None
            made[index] = Buffer() if value is None else value
        return made

    def _list(self, node: Node, reads: list[Buffer | None]) -> dict[int, Buffer]:
        held = reads[0]
        if pushes_list(node.op) and held is not None and reads[1] is not None:
            made = held if held.is_alone else Buffer(elements=held.elements)
            made.elements.append(reads[1])
            reads[1].references += 1
            return {0: made}
        if pops_list(node.op) and held is not None:
            element = held.elements[-1] if held.elements else Buffer(pins=1)
            if held.is_alone:
                made = held
                if held.elements:
                    held.elements.pop()
                    element.references -= 1
            else:
                made = Buffer(elements=held.elements[:-1])
            return {0: made, 1: element}
        variant = any(kind.dtype == "variant" for kind in node.outputs)
        for value in reads[1:] if variant else ():
            if value is not None:
                value.pins += 1  # the list keeps it
        if passes_on(node.op):
            return {index: value for index, value in enumerate(reads) if value is not None}
        elements = [e for value in reads if value is not None for e in value.elements] if variant else []
        pins = int(not variant and any(t.type.dtype == "variant" for t in node.inputs))  # a list may hold it too
        return {index: Buffer(pins, elements) for index in range(len(node.outputs))}
