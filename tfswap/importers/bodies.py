"""What loops and conditionals run becomes a graph of its own, each with the sizes that its node gives it.

A function of the library can be run by several nodes, with arguments of other sizes: each node gets its own copy.

Not handled: a loop variable whose shape changes from one iteration to the next keeps the dimensions unknown that
change; what is computed from it has no size then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfswap.importers.graph_def import import_graph_def
from tfswap.importers.inline import has_calls, inline_calls
from tfswap.importers.library import as_graph_def
from tfswap.importers.shapes import Argument, Inferred, infer_shapes
from tfswap.ir.graph import Graph, Node, Opaque
from tfswap.ir.ops import control_flow

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2

Library = Mapping[str, Any]
"""FunctionDefs by name."""


def has_control_flow(graph_def: graph_pb2.GraphDef) -> bool:
    return any(control_flow(node.op) for node in graph_def.node)


def import_with_bodies(
    graph_def: graph_pb2.GraphDef,
    arguments: Mapping[str, Argument],
    feeds: Sequence[str],
    fetches: Sequence[str],
    targets: Sequence[str],
) -> Graph:
    """The IR of `graph_def`, pruned to what runs, with shapes as TensorFlow infers them, and with bodies.

    Args:
        arguments: what the feeds are given, by name.
        feeds, fetches, targets: as `import_graph_def`'s.

    Raises:
        UnsupportedGraph: the graph or a body has TensorFlow 1 loop frames.
        InvalidModel: the graph does not fit the arguments.
    """
    return _import(graph_def, arguments, feeds, fetches, targets)[0]


def _import(
    graph_def: graph_pb2.GraphDef,
    arguments: Mapping[str, Argument],
    feeds: Sequence[str],
    fetches: Sequence[str],
    targets: Sequence[str],
) -> tuple[Graph, Inferred]:
    library = {f.signature.name: f for f in graph_def.library.function}
    known: dict[str, Argument] = {}
    inferred = infer_shapes(graph_def, arguments)
    graph = import_graph_def(graph_def, feeds, fetches, targets)
    graph.prune()
    bodies: dict[str, tuple[Graph, ...]] = {}
    for node in [n for n in graph.topological() if control_flow(n.op)]:
        bodies[node.name], results = _bodies(node, inferred, library)
        more = {
            f"{node.name}:{i}": result
            for i, result in enumerate(results)
            if _says_more(result, inferred.argument(f"{node.name}:{i}"))
        }
        if more:
            # What a loop gives is known better from its body than from its node: for lists, what is in them.
            known |= more
            inferred = infer_shapes(graph_def, arguments, known)
    if known:
        graph = import_graph_def(graph_def, feeds, fetches, targets)
        graph.prune()
    graph.bodies = {graph[name]: made for name, made in bodies.items()}
    return graph, inferred


def _says_more(made: Argument, known: Argument) -> bool:
    if made.handles and not known.handles:
        return True
    if made.shape is None or known.shape is None:
        return made.shape is not None
    return any(a is not None and b is None for a, b in zip(made.shape, known.shape, strict=False))


def _bodies(node: Node, inferred: Inferred, library: Library) -> tuple[tuple[Graph, ...], list[Argument]]:
    """What a loop or a conditional runs, and what is known of what it gives."""
    kind = control_flow(node.op)
    assert kind is not None
    arguments = [inferred.argument(t.name) for t in node.inputs[kind.first_argument :]]
    names = _names(node, kind.functions)
    if kind.is_loop:
        return _loop(names, arguments, library)
    made = [_body(name, arguments, library) for name in names]
    results = made[0][1]
    for _, others in made[1:]:
        results = [_either(one, other) for one, other in zip(results, others, strict=True)]
    return tuple(graph for graph, _ in made), results


def _names(node: Node, attributes: Iterable[str]) -> list[str]:
    """Names of the functions that the node runs."""
    from tensorflow.core.framework import attr_value_pb2

    found = []
    for attribute in attributes:
        value = node.attrs[attribute]
        assert isinstance(value, Opaque)
        proto = attr_value_pb2.AttrValue.FromString(value.data)
        found += [f.name for f in proto.list.func] if proto.HasField("list") else [proto.func.name]
    return found


def _loop(
    names: Sequence[str], arguments: list[Argument], library: Library
) -> tuple[tuple[Graph, ...], list[Argument]]:
    """The condition and the body of a loop, with the sizes that its variables have in every iteration."""
    condition, body = names
    while True:
        made, results = _body(body, arguments, library)
        steady = [_either(before, after) for before, after in zip(arguments, results, strict=True)]
        if steady == arguments:
            return (_body(condition, arguments, library)[0], made), results
        arguments = steady


def _either(one: Argument, other: Argument) -> Argument:
    """What is known of a tensor that is the one or the other."""
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        shape = None
    else:
        shape = tuple(a if a == b else None for a, b in zip(one.shape, other.shape, strict=True))
    return Argument(one.dtype, shape, one.handles if one.handles == other.handles else [])


def _body(name: str, arguments: Sequence[Argument], library: Library) -> tuple[Graph, list[Argument]]:
    """The graph of a library function for these arguments, and what is known of its results."""
    fdef = library[name]
    graph_def, flat = as_graph_def(fdef, library)
    names = [a.name for a in fdef.signature.input_arg]
    fetches = [flat[fdef.ret[a.name]] for a in fdef.signature.output_arg]
    targets = [fdef.control_ret[c] for c in fdef.signature.control_output]
    if has_calls(graph_def):
        types = [a.type for a in fdef.signature.output_arg]
        graph_def, fetches, targets = inline_calls(graph_def, list(zip(fetches, types, strict=True)), targets)
    given = dict(zip(names, arguments, strict=True))
    graph, inferred = _import(graph_def, given, names, fetches, targets)
    graph.library = None  # what its loops and conditionals run are graphs too
    return graph, [inferred.argument(f.name) for f in graph.fetches]
