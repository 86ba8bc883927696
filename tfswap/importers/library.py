"""Functions of a library (FunctionDefs) as GraphDefs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tfswap.importers.inline import has_calls, inline_calls
from tfswap.importers.references import called_functions, reachable
from tfswap.ir.op_traits import calls_functions, is_const, is_view, only_waits

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2


def fill_defaults(nodes: Iterable[Any]) -> None:
    """Give each node, in place, the attributes with default values that files leave out."""
    from tensorflow.python.framework import op_def_registry

    for node in nodes:
        definition = op_def_registry.get(node.op)
        if definition is None:
            continue  # the call of a function
        for attribute in definition.attr:
            if attribute.HasField("default_value") and attribute.name not in node.attr:
                node.attr[attribute.name].CopyFrom(attribute.default_value)


def drop_lost_colocations(nodes: Collection[Any]) -> None:
    """Remove requests for colocation with nodes that are not among `nodes`, in place. TensorFlow refuses them.

    Where such a node has a device, TensorFlow has given it to the nodes that are colocated with it.
    """
    there = {f"loc:@{node.name}".encode() for node in nodes}
    for node in nodes:
        if "_class" not in node.attr:
            continue
        wishes = node.attr["_class"].list.s
        kept = [wish for wish in wishes if wish in there]
        if kept:
            wishes[:] = kept
        else:
            del node.attr["_class"]


Ends = tuple[Sequence[str], Sequence[str], Sequence[str]]
"""Names of feeds, fetches and targets, as of `import_graph_def`."""


def as_graph_def(
    fdef: Any, library: Mapping[str, Any]
) -> tuple[graph_pb2.GraphDef, Ends, Mapping[str, tuple[str, ...]]]:
    """A function with inlined calls, as a GraphDef with its library; its feeds, fetches and targets; `Graph.calls`."""
    import tensorflow as tf
    from tensorflow.core.framework import graph_pb2
    from tensorflow.python.framework.function_def_to_graph import function_def_to_graph_def

    functions = graph_pb2.GraphDef()
    functions.library.function.extend(library[n] for n in reachable(fdef.node_def, library))
    with tf.Graph().as_default():
        tf.graph_util.import_graph_def(functions, name="")
        graph_def, flat = function_def_to_graph_def(fdef)
    fill_defaults(graph_def.node)
    graph_def.library.CopyFrom(functions.library)
    feeds = [a.name for a in fdef.signature.input_arg]
    fetches = [flat[fdef.ret[a.name]] for a in fdef.signature.output_arg]
    targets = [fdef.control_ret[c] for c in fdef.signature.control_output]
    if has_calls(graph_def):
        types = [a.type for a in fdef.signature.output_arg]
        inlined = inline_calls(graph_def, list(zip(fetches, types, strict=True)), targets)
        return inlined.graph_def, (feeds, inlined.fetches, inlined.targets), inlined.calls
    return graph_def, (feeds, fetches, targets), {}


class Passed(NamedTuple):
    """A function that only calls another one.

    Attributes:
        called: the other function.
        arguments: for each argument of the other function, the position of the caller's argument.
        results: for each result of the caller, the position of the other function's result. None: it is another tensor.
    """

    called: Any
    arguments: tuple[int, ...]
    results: tuple[int | None, ...]


def through_call(fdef: Any, find: Callable[[str], Any]) -> Passed | None:
    """The only function that `fdef` calls, where it does nothing else and passes all its arguments; None otherwise.

    Args:
        find: gives a function by its name, or None.
    """
    nodes = {node.name: node for node in fdef.node_def}
    calls = [node for node in fdef.node_def if calls_functions(node.op)]
    rest = (node for node in fdef.node_def if not calls_functions(node.op))
    if len(calls) != 1 or not all(is_view(node.op) or is_const(node.op) or only_waits(node.op) for node in rest):
        return None
    called = [function for name in called_functions(calls[0]) if (function := find(name)) is not None]
    place = {argument.name: position for position, argument in enumerate(fdef.signature.input_arg)}
    given = [place.get(source.partition(":")[0], -1) for source in calls[0].input if not source.startswith("^")]
    if len(called) != 1 or sorted(given) != sorted(place.values()):
        return None
    results: list[int | None] = []
    for result in fdef.signature.output_arg:
        node, _, index = fdef.ret[result.name].partition(":")
        while node in nodes and nodes[node].op == "Identity":
            node, _, index = nodes[node].input[0].partition(":")
        results.append(int(index.rpartition(":")[2]) if node == calls[0].name else None)
    return Passed(called[0], tuple(given), tuple(results))
