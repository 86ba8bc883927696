"""Accesses to variables, in a graph and its bodies; and loops that get a variable's value.

A body that reads a variable at home on the host would read it there in each iteration, which is slow on a GPU. Where
the bodies of a loop only read the variable, the loop gets its value in place of the handle, as an argument: a read
before the loop, once. Conditionals keep the handle: they run a branch once, and values would all be on the device
before it, as the averages of all weights that a branch assigns.

Not handled: bodies that write the variable, or give its handle to anything else, keep the handle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from tfswap.ir.graph import Dims, Dtype, Graph, Node, Output
from tfswap.ir.op_traits import (
    READ_VARIABLE,
    SHARE_READS,
    VARIABLE_SHAPE,
    adopts_value,
    control_flow,
    gather_of_read,
    turns_on_copy_on_read,
    writes_variable,
)
from tfswap.ir.types import TensorType

_READS = frozenset((READ_VARIABLE, SHARE_READS, VARIABLE_SHAPE))
"""Accesses that change no variable, other than gathers."""


class Use(NamedTuple):
    """A node that takes the handle of a variable, in the graph or in a body.

    Attributes:
        handle: the argument of that graph.
        position: the input.
    """

    graph: Graph
    node: Node
    handle: Node
    position: int

    @property
    def whole(self) -> TensorType | None:
        """The type of the variable, where this access shows it."""
        node = self.node
        if node.op == READ_VARIABLE:
            return node.outputs[0]
        if not writes_variable(node.op) or turns_on_copy_on_read(node.op) or node in self.graph.bodies:
            return None
        given = [tensor.type for tensor in node.inputs if tensor.type.dtype != "resource"]
        return max(given, key=lambda kind: kind.nbytes or 0, default=None)


def uses_of(graph: Graph) -> dict[Node, list[Use]]:
    """The uses of each argument that is a handle, in the graph and its bodies."""
    found: dict[Node, list[Use]] = {f: [] for f in graph.feeds if f.outputs and f.outputs[0].dtype == "resource"}
    _collect(graph, {feed: feed for feed in found}, found)
    return found


def _collect(graph: Graph, origins: Mapping[Node, Node], found: Mapping[Node, list[Use]]) -> None:
    known = {node.out(): origin for node, origin in origins.items()}
    for node in graph.topological():
        given = [known.get(tensor) for tensor in node.inputs]
        if not any(given):
            continue
        for position, origin in enumerate(given):
            if origin is not None:
                found[origin].append(Use(graph, node, node.inputs[position].node, position))
        kind = control_flow(node.op)
        if kind is None or node not in graph.bodies:
            continue
        for body in graph.bodies[node]:
            inside = {f: o for f, o in zip(body.feeds, given[kind.first_argument :], strict=True) if o is not None}
            _collect(body, inside, found)
        if kind.is_loop:
            known.update(
                {node.out(i): o for i, o in enumerate(given) if o is not None and _is_invariant(graph, node, i)}
            )


def _is_invariant(graph: Graph, loop: Node, number: int) -> bool:
    """Whether the loop gives a variable of its own as it has got it, to itself and to its readers."""
    body = graph.bodies[loop][1]
    return [i for i, tensor in enumerate(body.fetches) if tensor.node is body.feeds[number]] == [number]


def read_invariants_before(graph: Graph) -> None:
    """Have the readers of handles that loops give as they have got them read the loops' inputs, after the loops."""
    for node in [node for node in graph if node in graph.bodies]:
        kind = control_flow(node.op)
        for number, held in enumerate(node.outputs if kind is not None and kind.is_loop else ()):
            if held.dtype == "resource" and _is_invariant(graph, node, number):
                for reader in [each for each in graph if node.out(number) in each.inputs]:
                    graph.add_control(reader, node)
                graph.replace_uses(node.out(number), node.inputs[number])
        for body in graph.bodies[node]:
            read_invariants_before(body)


def works_at_home(use: Use) -> bool:
    """Whether a node accesses a variable in a way that it may while the variable is in host memory."""
    graph, node = use.graph, use.node
    if node in graph.bodies:
        return not _is_passed_on(use)
    if node.op in _READS or turns_on_copy_on_read(node.op):
        return True
    return writes_variable(node.op) and not adopts_value(node.op)


def _is_passed_on(use: Use) -> bool:
    """Whether a loop or a conditional gives the handle to others than its bodies."""
    kind = control_flow(use.node.op)
    assert kind is not None
    number = use.position - kind.first_argument
    if number < 0:
        return True
    bodies = use.graph.bodies[use.node]
    if not kind.is_loop:
        return any(t.node is body.feeds[number] for body in bodies for t in body.fetches)
    return not _is_invariant(use.graph, use.node, number) or use.node.out(number) in use.graph.fetches


def pass_values(graph: Graph, kinds: Mapping[Node, TensorType]) -> None:
    """Pass the values of these variables to the loops of `graph` whose bodies only read them."""
    for handle, uses in uses_of(graph).items():
        kind = kinds.get(handle)
        if kind is None:
            continue
        for use in uses:
            if use.graph is graph and _is_loop(use) and _is_only_read(use):
                read = graph.add(
                    READ_VARIABLE,
                    graph.unique_name(f"tfswap/{use.node.name}/read"),
                    (handle.out(),),
                    controls=use.node.controls,
                    attrs={"dtype": Dtype(kind.dtype)},
                    outputs=(kind,),
                    device=use.node.device,
                )
                _pass(graph, use.node, use.position, read.out())


def _is_loop(use: Use) -> bool:
    kind = control_flow(use.node.op)
    return kind is not None and kind.is_loop and use.node in use.graph.bodies


def _inner_uses(graph: Graph, node: Node, position: int) -> list[Use]:
    """The uses of an input in the bodies of a node."""
    kind = control_flow(node.op)
    assert kind is not None
    found: list[Use] = []
    for body in graph.bodies[node]:
        handle = body.feeds[position - kind.first_argument]
        _collect(body, {handle: handle}, {handle: found})
    return found


def _is_only_read(use: Use) -> bool:
    """Whether the bodies of a node only read the variable behind this input."""
    for inner in _inner_uses(use.graph, use.node, use.position):
        if inner.node in inner.graph.bodies or inner.node.op in _READS:
            continue
        if gather_of_read(inner.node.op) is None or inner.node.attrs.get("batch_dims"):
            return False
    return True


def _pass(graph: Graph, node: Node, position: int, value: Output) -> None:
    """Give `node` a value in place of the handle at this input, in place."""
    kind = control_flow(node.op)
    assert kind is not None
    number, given = position - kind.first_argument, value.type
    graph.replace_input(node, position, value)
    _set_item(node, "T" if kind.is_loop else "Tin", number, Dtype(given.dtype))
    if kind.is_loop:
        node.outputs = (*node.outputs[:number], given, *node.outputs[number + 1 :])
        if node.attrs.get("output_shapes"):
            _set_item(node, "output_shapes", number, None if given.shape is None else Dims(given.shape))
    for body in graph.bodies[node]:
        feed = body.feeds[number]
        feed.outputs, feed.attrs = (given,), {**feed.attrs, "dtype": Dtype(given.dtype)}
        for inner in [n for n in body if any(t.node is feed for t in n.inputs)]:
            _take_value(body, inner, feed)
        body.prune()


def _take_value(body: Graph, node: Node, feed: Node) -> None:
    """Have the node of a body take the value that `feed` now is in place of the handle, in place."""
    if node in body.bodies:
        for position in [i for i, tensor in enumerate(node.inputs) if tensor.node is feed]:
            _pass(body, node, position, feed.out())
    elif (gather := gather_of_read(node.op)) is not None:
        node.op = gather
        node.attrs = {"Tparams": Dtype(feed.outputs[0].dtype), "Tindices": node.attrs["Tindices"]}
    elif node.op == VARIABLE_SHAPE:
        node.op, node.attrs = "Shape", {"T": Dtype(feed.outputs[0].dtype), "out_type": node.attrs["out_type"]}
    elif node.op in (READ_VARIABLE, SHARE_READS):
        body.replace_uses(node.out(), feed.out())
        body.fetches = [feed.out() if tensor.node is node else tensor for tensor in body.fetches]
        body.targets = [target for target in body.targets if target is not node]
        for other in body:
            if node in other.controls:
                other.controls = tuple(dict.fromkeys((*(c for c in other.controls if c is not node), *node.controls)))


def _set_item(node: Node, name: str, number: int, value: object) -> None:
    """Replace an item of a list-valued attribute, in place."""
    items = cast("Sequence[object]", node.attrs[name])
    node.attrs = {**node.attrs, name: (*items[:number], value, *items[number + 1 :])}
