"""How many iterations a loop has in each run of a simulation, where the step's values decide it.

Among the runs there is one that ends a loop after each of its first iterations, and some have more. A backward loop has
as many iterations as its loop. Loops in bodies, whose backward loops are in other bodies, have the same number in one
run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tfswap.analysis.loop_conditions import next_arguments
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import control_flow
from tfswap.ir.views import origin
from tfswap.simulator.decisions import Predicate, end_of
from tfswap.simulator.lowered_graph import LoweredLoop, callee

UNKNOWN_TRIPS = 12
TRIPS = (UNKNOWN_TRIPS, 1, 2, 3, 4, 0, 5, 6, 7, UNKNOWN_TRIPS, UNKNOWN_TRIPS)
"""Iterations by run. There are 11, a prime, so that each meets all outcomes of conditionals and of other loops."""


class OpenLoops:
    """The loops of a lowered step, for runs in which values decide how many iterations they have.

    Attributes:
        ends: by loop, whether an iteration is the last; None if no body can compute it.
    """

    def __init__(self, loops: Sequence[LoweredLoop]):
        self._groups = _groups(loops)
        self.ends = [end_of(callee(scope, node, 1, loop)) for loop, (node, scope, _) in enumerate(loops)]
        fixed = {group for group, end in zip(self._groups, self.ends, strict=True) if end is None}
        numbers = {group: 1 + i % (len(TRIPS) - 1) for i, group in enumerate(dict.fromkeys(self._groups))}
        # By loop, the stride in TRIPS from one run to the next; 0 where all runs have as many.
        self._strides = [0 if group in fixed else numbers[group] for group in self._groups]

    def end(self, loop: int) -> Predicate | None:
        """Whether an iteration is the last of the loop; None where all runs have as many."""
        return self.ends[loop] if self._strides[loop] else None

    def trips(self, loop: int, run: int) -> int:
        """The number of iterations in this run."""
        return TRIPS[run * self._strides[loop] % len(TRIPS)]


def _groups(loops: Sequence[LoweredLoop]) -> list[Hashable]:
    """By loop, a key that the loops with the same number of iterations share."""
    return [_counted(scope.graph, node) if scope.node is None else scope.loop >= 0 for node, scope, _ in loops]


def _counted(graph: Graph, loop: Node) -> Node:
    """The loop whose results decide how often `loop` runs, as of a backward loop its loop; else `loop` itself."""
    condition, body = graph.bodies[loop]
    read = next_arguments(condition, body)
    for feed, tensor in zip(condition.feeds, loop.inputs, strict=True):
        source = origin(tensor).node
        flow = control_flow(source.op)
        if feed in read and flow is not None and flow.is_loop:
            return _counted(graph, source)
    return loop
