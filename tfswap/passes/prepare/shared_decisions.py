"""Passes the predicates of conditionals to other graphs of a step: out of branches and loops, from one iteration to the
next, and into them.

A loop passes the predicate of its last iteration on, and gives each iteration that of the one before. At first, and
from a branch that was not taken, it is zero. What is passed is a scalar.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.ir.graph import Dims, Dtype, Graph, Node, Output
from tfswap.ir.op_traits import control_flow
from tfswap.passes.nodes import add_scalar
from tfswap.simulator.decisions import Decision, Path

FEED = "Placeholder"


class SharedDecisions:
    """The predicates of a step that are passed to other graphs of it."""

    def __init__(self, step: Graph):
        self._step = step
        self._given: dict[tuple[Node, Output], int] = {}  # arguments of a conditional, or of a loop in all iterations
        self._results: dict[tuple[Node, Output], int] = {}
        self._before: dict[Graph, int] = {}  # how many nodes there were

    def at(self, path: Path, decision: Decision) -> Output:
        """The predicate of `decision` in the graph at `path`, from which it is seen."""
        predicate, common = decision.predicate, decision.common
        graphs = self._graphs(predicate.path)
        if decision.previous:  # the body of the innermost loop around both
            common = 1 + max(k for k in range(common) if predicate.loops[k + 1] > predicate.loops[k])
        tensor = graphs[-1].tensor(predicate.tensor)
        for k in reversed(range(common, len(predicate.path))):
            name, number = predicate.path[k]
            node = graphs[k][name]
            tensor = node.out(self._result(graphs[k], node, number, tensor))
        if decision.previous:
            loop = graphs[common - 1][predicate.path[common - 1][0]]
            tensor = graphs[common].feeds[self._result(graphs[common - 1], loop, 1, tensor)].out()
        graphs = self._graphs(path)
        for k in range(common, len(path)):
            name, number = path[k]
            tensor = self._argument(graphs[k], graphs[k][name], number, tensor)
        return tensor

    def arrange(self) -> None:
        """Put new nodes where they are read in the insertion order, once all have been added."""
        for graph, before in self._before.items():
            graph.bring_forward(before)

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
                node.inputs = (*node.inputs, zero.out())
                _add_feeds(bodies, tensor)
            for i, body in enumerate(bodies[flow.is_loop :], start=flow.is_loop):
                self._before.setdefault(body, len(body))
                body.fetches.append(
                    tensor
                    if i == number
                    else add_scalar(body, f"tfswap/{node.name}/undecided", kind.dtype, node.device).out()
                )
            _add_output(node, tensor, "T" if flow.is_loop else "Tout")
        return self._results[node, tensor]

    def _argument(self, graph: Graph, node: Node, number: int, tensor: Output) -> Output:
        """A tensor as an argument of a body of `node`."""
        bodies = graph.bodies[node]
        flow = control_flow(node.op)
        assert flow is not None
        if (node, tensor) not in self._given:
            self._given[node, tensor] = len(bodies[0].feeds)
            for body in bodies:
                self._before.setdefault(body, len(body))
            _add_feeds(bodies, tensor)
            node.inputs = (*node.inputs, tensor)
            if flow.is_loop:
                bodies[1].fetches.append(bodies[1].feeds[-1].out())
                _add_output(node, tensor, "T")
            else:
                _add_items(node, {"Tin": Dtype(tensor.type.dtype)})
        return bodies[number].feeds[self._given[node, tensor]].out()


def _add_feeds(bodies: Sequence[Graph], tensor: Output) -> None:
    kind = tensor.type
    for body in bodies:
        name = body.unique_name(f"tfswap/{tensor.node.name}/decided")
        body.feeds.append(body.add(FEED, name, attrs={"dtype": Dtype(kind.dtype)}, outputs=(kind,)))


def _add_output(node: Node, tensor: Output, types: str) -> None:
    node.outputs = (*node.outputs, tensor.type)
    _add_items(node, {types: Dtype(tensor.type.dtype)})
    if node.attrs.get("output_shapes"):
        _add_items(node, {"output_shapes": Dims(())})


def _add_items(node: Node, more: dict[str, object]) -> None:
    def items(key: str) -> tuple[object, ...]:
        value = node.attrs.get(key, ())
        assert isinstance(value, tuple)
        return value  # pyright: ignore[reportUnknownVariableType] an attribute's type is known by its name alone

    node.attrs = {**node.attrs, **{key: (*items(key), value) for key, value in more.items()}}
