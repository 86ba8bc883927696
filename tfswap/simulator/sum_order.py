"""The orders in which sums add where TensorFlow runs a step. For AddN it is the input that it begins with, which
depends on the holders of its inputs when it runs, in each iteration. For sums that add terms as they are ready it is
the order of the kernels that add one term each.

The runs are those of simulator/propagator.py. A buffer is held by each edge with its value, by each list that keeps it,
and permanently by variables, arguments and results. Views and buffer forwarding are those of kernels/kernel_memory.py.

A loop whose number of iterations is not known, or large, runs a few; which branch is taken is by chance where integers
do not decide it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

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
from tfswap.simulator.iteration_table import IterationTable
from tfswap.simulator.lowered_graph import ARGUMENT, KERNEL, LOOP_CONDITION, MERGE, RESULT, SWITCH, Item, Scope
from tfswap.simulator.propagator import Buffer, Frame, Iteration, LoweredProgram, Propagator

MOST_RUNS = 25
FEW_RUNS = 9
"""Runs for one thread, where only the order of many readers of one node, and decisions, are by chance."""
MOST_ITEMS = 200_000
"""Fewer runs of large steps: at most this number of items in all, but each at least once."""
EITHER = 2
"""The first inputs, whose order makes no difference: a + b is b + a."""
MOST_TRIPS = 24
UNKNOWN_TRIPS = 12
INNER_TRIPS = 6
"""Iterations of a loop that are run: the most, the number where it is not known, and the number inside of another
loop.
"""
MOST_KNOWN_TRIPS = 4096
"""In a loop with more, the last iterations are assumed to be like those before."""


class _SumCounts:
    """How often a sum began with which input, by iteration of the loops around it; 0 for one of the first two."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], Counter[int]] = {}

    def add(self, iterations: tuple[int, ...], position: int) -> None:
        self.counts.setdefault(iterations, Counter())[position if position >= EITHER else 0] += 1

    def table(self, trips: Callable[[tuple[int, ...]], tuple[int, int | None]]) -> IterationTable:
        """The input that the sum begins with most often, by iteration.

        Args:
            trips: by iterations of the loops around the next loop: how many iterations of that were run, and how many
                it has; None where that is not known.
        """
        usual = _most(sum(self.counts.values(), Counter[int]()))
        depth = len(next(iter(self.counts)))

        def of(around: tuple[int, ...]) -> IterationTable:
            if len(around) == depth:
                each = self.counts.get(around)  # in a branch that is not taken it does not run
                return IterationTable.of(_most(each) if each else usual)
            ran, there_are = trips(around)
            begun = (numbers[len(around)] + 1 for numbers in self.counts if numbers[: len(around)] == around)
            asked_more = max(0, max(begun, default=0) - ran)  # a condition runs once more
            rows = [of((*around, i)) for i in range(max(1, ran + asked_more))]
            return IterationTable.stack(_with_all(rows, None if there_are is None else there_are + asked_more))

        return of(())


def _with_all(rows: list[IterationTable], trips: int | None) -> list[IterationTable]:
    """The rows of all `trips` iterations of a loop, from `rows` of those that were run: the first and the last ones."""
    half = len(rows) // 2
    if trips is None or trips * max(len(row.values) for row in rows) > MOST_KNOWN_TRIPS:
        return rows[: half + 1]
    return rows[:half] + [rows[half]] * max(0, trips - len(rows)) + rows[half:]


class SumOrders(NamedTuple):
    """The most likely orders in which sums add.

    Attributes:
        first: by the names of its part and its own, the input that an AddN begins with, by iteration of the loops
            around it. 0 stands for the first two inputs.
        ready: names of the kernels that add one term each, in the order in which they start, by the sum's name.
    """

    first: dict[tuple[str, str], IterationTable]
    ready: dict[str, tuple[str, ...]]


def simulate_sums(
    graph: Graph,
    device: DeviceModel,
    seconds: Callable[[Node], float],
    additions: Mapping[str, str],
) -> SumOrders:
    """The orders in which the sums of a step and of its bodies add.

    Args:
        graph: the step, in the order in which TensorFlow gets it, with equal nodes merged.
        seconds: the seconds of a node's kernel.
        additions: by the name of a kernel that adds one term to a sum, the sum.
    """
    step = _Step(graph, device, seconds)
    found: dict[tuple[str, str], _SumCounts] = {}
    orders: dict[str, Counter[tuple[str, ...]]] = {}
    runs, seed = step.most_runs, 0
    while seed < runs:
        run = _Run(step, random.Random(seed))
        run.run()
        runs = min(runs, max(1, MOST_ITEMS // max(1, len(run.ran))))
        for name, iterations, position in run.begun:
            found.setdefault(name, _SumCounts()).add(iterations, position)
        for name, order in _in_order(run, additions).items():
            orders.setdefault(name, Counter())[order] += 1
        seed += 1
    first = {name: counts.table(step.trips_around(name[0])) for name, counts in found.items()}
    return SumOrders(first, {name: min(counts, key=lambda o: (-counts[o], o)) for name, counts in orders.items()})


def _in_order(run: _Run, additions: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """By sum, the kernels that added its terms, in the order of a run."""
    orders: dict[str, tuple[str, ...]] = {}
    for name in run.started:
        if name in additions:
            orders[additions[name]] = (*orders.get(additions[name], ()), name)
    return orders


def _most(counts: Counter[int]) -> int:
    return max(counts, key=lambda k: (counts[k], -k))


class _Step(LoweredProgram):
    """A step whose sums are simulated."""

    def __init__(self, graph: Graph, device: DeviceModel, seconds: Callable[[Node], float]):
        super().__init__(graph, device, seconds)
        races = self.threads > 1 and not device.is_gpu
        self.most_runs = MOST_RUNS if races else FEW_RUNS if self.wide or self.lowered.decides else 1
        self.numbers = Numbers()
        self._scopes: dict[str, Scope] = {item.scope.name: item.scope for item in self.lowered.items}

    def trips_around(self, name: str) -> Callable[[tuple[int, ...]], tuple[int, int | None]]:
        """`trips_of` of the loops around a part, by the iterations of those further out."""
        loops = self._loops_around(self._scopes[name])
        return lambda around: self.trips_of(loops[len(around)], around)

    def _loops_around(self, scope: Scope) -> list[int]:
        return [] if scope.loop < 0 else [*self._loops_around(self.lowered.loops[scope.loop].scope), scope.loop]

    def trips_of(self, loop: int, iterations: Sequence[int]) -> tuple[int, int | None]:
        """How many iterations of a loop are run, and how many there are, in these iterations of the loops around."""
        node, scope, _ = self.lowered.loops[loop]
        integers = self.numbers.trips(scope, node, iterations)
        trips = None if integers is None else len(integers) - 1
        most = MOST_TRIPS if scope.loop < 0 else INNER_TRIPS
        return min(most, UNKNOWN_TRIPS if trips is None else trips), trips


class _Run(Propagator):
    """One run.

    Attributes:
        begun: of sums: part and name, iterations of the loops around, which input.
        started: names of the kernels of the step itself, in the order of their start.
    """

    def __init__(self, step: _Step, chance: random.Random):
        super().__init__(step, chance)
        self._sums = step
        self.begun: list[tuple[tuple[str, str], tuple[int, ...], int]] = []
        self.started: list[str] = []

    def trips(self, loop: int, iterations: tuple[int, ...]) -> int:
        return self._sums.trips_of(loop, iterations)[0]

    def compute(self, number: int, frame: Frame, iteration: Iteration) -> dict[int, Buffer]:
        """The outputs of an item that is not dead."""
        item = self.lowered.items[number]
        reads = [iteration.entries.get((number, position)) for position in range(len(item.inputs))]
        if item.kind == SWITCH:
            data, decides = reads
            assert data is not None and decides is not None
            if item.choice is None:  # a loop goes on at its second output
                return {decides.decision or 0: data}
            if decides.decision is None:
                taken = self._sums.numbers.branch(item.scope, item.choice, frame.numbers(iteration))
                branches = len(item.scope.graph.bodies[item.choice])
                decides.decision = self.chance.randrange(branches) if taken is None else taken
            return {decides.decision: data}
        if item.kind == LOOP_CONDITION:
            decision = Buffer()
            decision.decision = int(iteration.number < frame.trips)
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

    def _kernel(
        self, item: Item, node: Node, reads: list[Buffer | None], frame: Frame, iteration: Iteration
    ) -> dict[int, Buffer]:
        handle = reads[0] if reads else None
        if not item.scope.name:
            self.started.append(node.name)
        if not item.inputs:  # constants, and what TensorFlow has folded; handles
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
            self.begun.append((name, frame.numbers(iteration), next(alone, 0)))
        memory = node_memory(node, self._sums.device)
        for position in memory.retains:
            value = reads[position]
            if value is not None and handle is not None:
                value.pins += 1
                old, handle.variable = handle.variable, value
                if old is not None:
                    old.pins -= 1
        made: dict[int, Buffer] = {}
        alias = dict(memory.alias)
        forward = dict(memory.forward)
        for index in range(len(node.outputs)):
            source = alias.get(index)
            value = None if source is None else reads[source]
            if value is None:
                taken = (reads[p] for p in forward.get(index, ()))
                value = next((v for v in taken if v is not None and v.is_alone and v not in made.values()), None)
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
        pins = int(not variant and any(t.type.dtype == "variant" for t in node.inputs))  # what a list may hold too
        return {index: Buffer(pins, elements) for index in range(len(node.outputs))}
