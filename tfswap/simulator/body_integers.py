"""The known integers of a step and of its bodies, by iteration. They decide iterations and branches."""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.analysis.integer_values import Integers, Known, Loop, Values, as_feeds
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import control_flow
from tfswap.simulator.lowered_graph import Scope


class Numbers:
    """The known integers of one step."""

    def __init__(self) -> None:
        self._order: dict[int, tuple[Integers, list[Node]]] = {}
        self._known: dict[tuple[str, tuple[int, ...]], Known] = {}
        self._trips: dict[tuple[str, str, tuple[int, ...]], list[list[Values | None]] | None] = {}
        self._most_trips: dict[tuple[str, str, tuple[int, ...]], int | None] = {}

    def known(self, scope: Scope, iterations: Sequence[int]) -> Known:
        """The integers of a scope, in these iterations of the loops around it, with the final values of its loops."""
        key = scope.name, tuple(iterations)
        if key not in self._known:
            graph = scope.graph
            if id(graph) not in self._order:
                order = graph.topological()
                loops = [node for node in order if (flow := control_flow(node.op)) is not None and flow.is_loop]
                self._order[id(graph)] = Integers(graph, order), loops
            integers, loops = self._order[id(graph)]
            given = self._given(scope, iterations)
            known = integers.follow(given)
            for loop in loops:
                trips = self._trips[scope.name, loop.name, tuple(iterations)] = _trips(graph, loop, known)
                if trips is not None:
                    given |= {(loop, i): values for i, values in enumerate(trips[-1]) if values is not None}
                    known = integers.follow(given)
            self._known[key] = known
        return self._known[key]

    def _given(self, scope: Scope, iterations: Sequence[int]) -> dict[tuple[Node, int], Values]:
        if scope.node is None or scope.outer is None:
            return {}
        flow = control_flow(scope.node.op)
        assert flow is not None
        if flow.is_loop:
            trips = self.trips(scope.outer, scope.node, iterations[:-1])
            if trips is None:
                return {}
            return as_feeds(scope.graph, trips[min(iterations[-1], len(trips) - 1)])
        known = self.known(scope.outer, iterations)
        return as_feeds(scope.graph, [known.get((t.node, t.index)) for t in scope.node.inputs[flow.first_argument :]])

    def trips(self, scope: Scope, node: Node, iterations: Sequence[int]) -> list[list[Values | None]] | None:
        """The integers of a loop's variables before each iteration and after the last."""
        self.known(scope, iterations)
        return self._trips[scope.name, node.name, tuple(iterations)]

    def most_trips(self, scope: Scope, node: Node, iterations: Sequence[int]) -> int | None:
        """The most iterations of a loop whose number depends on the step's values; None where nothing bounds them."""
        key = scope.name, node.name, tuple(iterations)
        if key not in self._most_trips:
            found, _ = _run(scope.graph, node, self.known(scope, iterations), bound=True)
            self._most_trips[key] = None if found is None else len(found) - 1
        return self._most_trips[key]

    def branch(self, scope: Scope, node: Node, iterations: Sequence[int]) -> int | None:
        """The branch that a conditional of `scope` takes; None if integers do not decide it."""
        decides = self.known(scope, iterations).get((node.inputs[0].node, node.inputs[0].index))
        if decides is None or len(decides) != 1:
            return None
        flow = control_flow(node.op)
        assert flow is not None
        if len(flow.functions) == 2:
            return 0 if decides[0] else 1
        branches = len(scope.graph.bodies[node])
        return decides[0] if 0 <= decides[0] < branches else branches - 1


def _trips(graph: Graph, loop: Node, known: Known) -> list[list[Values | None]] | None:
    found, certain = _run(graph, loop, known, bound=False)
    return found if certain else None


def _run(graph: Graph, loop: Node, known: Known, *, bound: bool) -> tuple[list[list[Values | None]] | None, bool]:
    condition, body = graph.bodies[loop]
    test, change = (Integers(g, g.topological(), roots=g.fetches) for g in (condition, body))
    given = [known.get((t.node, t.index)) for t in loop.inputs]
    return Loop(condition, body, test, change).run(given, bound=bound)
