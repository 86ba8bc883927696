"""Passes decisions to other graphs of a step: out of branches and loops, from one iteration to the next, and into them.

A decision is the predicate of a conditional, or whether an iteration is the last of its loop. The body computes the
latter by a copy of the loop's condition, which reads the body's results.

A decision is passed as a scalar. A loop returns that of its last iteration, and passes that of each iteration to the
next. It is zero in the first iteration, and as the result of a branch that was not taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.analysis.loop_conditions import repeatable_condition
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.node_copies import add_copy
from tfswap.ir.op_traits import control_flow
from tfswap.ir.types import TensorType
from tfswap.passes.body_values import add_argument, add_item, add_result
from tfswap.passes.nodes import add_scalar, without_colocation
from tfswap.simulator.decisions import Decision, Path, Predicate


class SharedDecisions:
    """The decisions of a step that are passed to other graphs of it."""

    def __init__(self, step: Graph):
        self._step = step
        self._given: dict[tuple[Node, Output], int] = {}  # arguments of a conditional, or of a loop in all iterations
        self._results: dict[tuple[Node, Output], int] = {}
        self._ends: dict[Graph, Output] = {}  # by body of a loop
        self._before: dict[Graph, int] = {}  # how many nodes there were

    def at(self, decision: Decision) -> Output:
        """The value of `decision` in the graph from which it is seen."""
        predicate, common = decision.predicate, decision.common
        graphs = self._graphs(predicate.path)
        if decision.previous:  # the body of the innermost loop around both
            common = 1 + max(k for k in range(common) if predicate.loops[k + 1] > predicate.loops[k])
        tensor = self._end(graphs, predicate) if predicate.tensor is None else graphs[-1].tensor(predicate.tensor)
        for k in reversed(range(common, len(predicate.path))):
            name, number = predicate.path[k]
            node = graphs[k][name]
            tensor = node.out(self._result(graphs[k], node, number, tensor))
        if decision.previous:
            loop = graphs[common - 1][predicate.path[common - 1][0]]
            tensor = graphs[common].feeds[self._result(graphs[common - 1], loop, 1, tensor)].out()
        graphs = self._graphs(decision.path)
        for k in range(common, len(decision.path)):
            name, number = decision.path[k]
            tensor = self._argument(graphs[k], graphs[k][name], number, tensor)
        return tensor

    def arrange(self) -> None:
        """Put new nodes where they are read in the insertion order, once all have been added."""
        for graph, before in self._before.items():
            graph.bring_forward(before)

    def _end(self, graphs: Sequence[Graph], predicate: Predicate) -> Output:
        """Whether an iteration is the last of its loop, in the body."""
        body = graphs[-1]
        if body not in self._ends:
            loop = graphs[-2][predicate.path[-1][0]]
            self._ends[body] = add_end(loop, *graphs[-2].bodies[loop])
        return self._ends[body]

    def _graphs(self, path: Path) -> list[Graph]:
        graphs = [self._step]
        for name, number in path:
            graphs.append(graphs[-1].bodies[graphs[-1][name]][number])
        for graph in graphs:
            self._before.setdefault(graph, len(graph))
        return graphs

    def _result(self, graph: Graph, node: Node, number: int, tensor: Output) -> int:
        """The place of a tensor of a body among the results of its node; of a loop, among its variables as well."""
        if (node, tensor) not in self._results:
            self._results[node, tensor] = len(node.outputs)
            bodies, kind = graph.bodies[node], tensor.type
            flow = control_flow(node.op)
            assert flow is not None
            if flow.is_loop:
                zero = add_scalar(graph, f"tfswap/{node.name}/undecided", kind.dtype, node.device)
                add_argument(graph, node, _stem(tensor), zero.out())
            for i, body in enumerate(bodies[flow.is_loop :], start=flow.is_loop):
                self._before.setdefault(body, len(body))
                body.fetches.append(
                    tensor
                    if i == number
                    else add_scalar(body, f"tfswap/{node.name}/undecided", kind.dtype, node.device).out()
                )
            add_result(node, kind, "T" if flow.is_loop else "Tout")
        return self._results[node, tensor]

    def _argument(self, graph: Graph, node: Node, number: int, tensor: Output) -> Output:
        """A tensor as an argument of a body of `node`."""
        bodies = graph.bodies[node]
        flow = control_flow(node.op)
        assert flow is not None
        if (node, tensor) not in self._given:
            for body in bodies:
                self._before.setdefault(body, len(body))
            self._given[node, tensor] = add_argument(graph, node, _stem(tensor), tensor)
            if flow.is_loop:
                bodies[1].fetches.append(bodies[1].feeds[-1].out())
                add_result(node, tensor.type, "T")
            else:
                add_item(node, "Tin", Dtype(tensor.type.dtype))
        return bodies[number].feeds[self._given[node, tensor]].out()


def add_end(loop: Node, condition: Graph, body: Graph) -> Output:
    """Add to the `body` of a loop whether an iteration is the last: whether the condition is false for its results."""
    nodes = repeatable_condition(condition)
    assert nodes is not None
    now = dict(zip(condition.feeds, body.fetches, strict=True))

    def result(tensor: Output) -> Output:
        return now[tensor.node] if tensor.node in condition.feeds else now[tensor.node].node.out(tensor.index)

    for node in nodes:
        if node in condition.feeds:
            continue
        name = f"tfswap/{loop.name}/{node.name}"
        device = node.device or loop.device
        made = add_copy(body, node, name, map(result, node.inputs), device=device, source=condition)
        made.attrs = without_colocation(node.attrs)
        now[node] = made.out()
    more = result(condition.fetches[0])
    name = body.unique_name(f"tfswap/{loop.name}/last")
    return body.add("LogicalNot", name, (more,), outputs=(TensorType("bool", ()),), device=loop.device).out()


def _stem(tensor: Output) -> str:
    return f"tfswap/{tensor.node.name}/decided"
