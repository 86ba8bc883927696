"""Replaces names that contain a counter of the process, such as `while_body_107`, by names without one.

A step is then the same in every process. The names are those of functions, of Python functions (`tf.py_function`) and
of custom gradients. Nodes get their names in TensorFlow's function, where captures have no numbers either. Functions
that are no part of the graph, such as those that XLA compiles, keep their names, by which TensorFlow finds them. Where
graphs are compared, a hash of their content is used in place of these names (`contents`).

Invariant: graphs of the same step are equal in all processes, and `restore` gives back the process's own names, also in
names derived from them.

Not handled: arguments of functions other than bodies, which are named after the tensors that are passed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tfswap.importers.opaque_calls import functions_of, library_functions
from tfswap.importers.references import functions_in
from tfswap.ir.graph import Graph
from tfswap.ir.python_calls import TOKEN
from tfswap.passes.prepare.split_identity_n import CUSTOM_GRADIENT

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2

FUNCTION = "tfswap_function_%06d"
ARGUMENT = "tfswap_argument_%06d"
COLOCATED = b"loc:@"


class ProcessNames:
    """The names of one graph that are specific to this process."""

    def __init__(self, graph_def: graph_pb2.GraphDef, renamed: Mapping[str, str], bodies: Collection[str]):
        """
        Args:
            renamed: temporary names of nodes of the graph, by their names.
            bodies: names of the functions of loops and conditionals, whose arguments are passed by position.
        """
        self._functions = _numbered(FUNCTION, _functions_by_first_use(graph_def))
        self._nodes = renamed
        nodes = _all_nodes(graph_def)
        tokens = _numbered("pyfunc_%d", (node.attr[TOKEN].s.decode() for node in nodes if TOKEN in node.attr))
        self._tokens = tokens
        self._bodies = bodies

    def replace(self, graph_def: graph_pb2.GraphDef) -> None:
        """Replace them in place. Custom gradients and the arguments of bodies stay replaced: nothing looks them up."""
        for function in graph_def.library.function:
            if function.signature.name in self._bodies:
                _number_arguments(function)
        _number_gradients(graph_def)
        _rename(graph_def, self._functions.get, self._nodes, self._tokens)

    def restore(self, graph_def: graph_pb2.GraphDef) -> None:
        """Restore the names, in place, in a graph computed from the original one."""
        functions, nodes, tokens = (
            {new: old for old, new in names.items()} for names in (self._functions, self._nodes, self._tokens)
        )
        size = len(FUNCTION % 0)

        def find(name: str) -> str | None:  # names of derived functions begin with the function's name
            old = functions.get(name[:size])
            return None if old is None else old + name[size:]

        _rename(graph_def, find, nodes, tokens)

    def replaced(self, node: str) -> str:
        """A node's name after `replace`."""
        return self._nodes.get(node, node)


def names_everywhere(part: Graph) -> list[str]:
    """Names of the nodes of a step or a body that are the same in every process."""
    feeds = {feed: f"argument {n}" for n, feed in enumerate(part.feeds)}
    return [feeds.get(node, node.name) for node in part]


def contents(graph: Graph) -> dict[bytes, bytes]:
    """By name of a function that nodes run outside of the graph, or that such a function calls: a digest of its
    content, which is the same in every process.
    """
    parts = (graph, *graph.all_bodies())
    called = {name for part in parts for node in part if node not in part.bodies for name in functions_of(node)}
    library = library_functions(graph) if called else {}
    found: dict[str, str] = {}

    def content(name: str) -> str:
        if name not in found:
            function = type(library[name]).FromString(library[name].SerializeToString())
            function.signature.name = ""
            function.resource_arg_unique_id.clear()
            function.attr.pop("api_implements", None)
            _number_arguments(function)
            for number, node in enumerate(function.node_def):
                node.ClearField("experimental_debug_info")
                for attribute in (CUSTOM_GRADIENT, "_class"):
                    node.attr.pop(attribute, None)
                if TOKEN in node.attr:
                    node.attr[TOKEN].s = b"%d" % number
                for other in (each for value in node.attr.values() for each in functions_in(value)):
                    other.name = content(other.name) if other.name in library else other.name
            found[name] = hashlib.sha256(function.SerializeToString(deterministic=True)).hexdigest()
        return found[name]

    for name in called & library.keys():
        content(name)
    return {name.encode(): stands.encode() for name, stands in found.items()}


def _numbered(pattern: str, names: Iterable[str]) -> dict[str, str]:
    return {name: pattern % number for number, name in enumerate(dict.fromkeys(names))}


def _all_nodes(graph_def: graph_pb2.GraphDef) -> Iterator[Any]:
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def _functions_by_first_use(graph_def: graph_pb2.GraphDef) -> list[str]:
    """Names of the library's functions, in the order of their first use; unused ones last."""
    library = {function.signature.name: function for function in graph_def.library.function}
    found: dict[str, None] = {}
    waiting = [iter(graph_def.node)]
    while waiting:
        node = next(waiting[-1], None)
        if node is None:
            waiting.pop()
            continue
        values = (value for _, value in sorted(node.attr.items()))
        for name in (node.op, *(function.name for value in values for function in functions_in(value))):
            if name in library and name not in found:
                found[name] = None
                waiting.append(iter(library[name].node_def))
    return [*found, *(name for name in library if name not in found)]


def _number_gradients(graph_def: graph_pb2.GraphDef) -> None:
    """Name custom gradients by their order, in place. Gradients of a planned graph have been computed already, and
    passes only need to know whether a node has a custom gradient.
    """
    numbers: dict[bytes, int] = {}
    for node in _all_nodes(graph_def):
        if CUSTOM_GRADIENT in node.attr:
            name = node.attr[CUSTOM_GRADIENT]
            name.s = b"CustomGradient-%d" % numbers.setdefault(name.s, len(numbers))


def _number_arguments(function: Any) -> None:
    names = _numbered(ARGUMENT, (argument.name for argument in function.signature.input_arg))
    for argument in function.signature.input_arg:
        argument.name = names[argument.name]
    for node in function.node_def:
        node.input[:] = [_renamed_input(source, names) for source in node.input]
    for ends in (function.ret, function.control_ret):
        for result, source in list(ends.items()):  # a map that is written is not iterated
            ends[result] = _renamed_input(source, names)


def _rename(
    graph_def: graph_pb2.GraphDef,
    function: Callable[[str], str | None],
    nodes: Mapping[str, str],
    tokens: Mapping[str, str],
) -> None:
    """Give functions, nodes of the graph itself and Python functions other names, in place.

    Args:
        function: from a name to the new one; None where it stays.
    """
    for each in graph_def.library.function:
        each.signature.name = function(each.signature.name) or each.signature.name
    # TensorFlow sorts its library by name.
    ordered = sorted(graph_def.library.function, key=lambda each: each.signature.name)
    copies = [type(each).FromString(each.SerializeToString()) for each in ordered]
    del graph_def.library.function[:]
    graph_def.library.function.extend(copies)
    for gradient in graph_def.library.gradient:
        gradient.function_name = function(gradient.function_name) or gradient.function_name
        gradient.gradient_func = function(gradient.gradient_func) or gradient.gradient_func
    for node in _all_nodes(graph_def):
        node.op = function(node.op) or node.op
        for value in node.attr.values():
            for called in functions_in(value):
                called.name = function(called.name) or called.name
        if TOKEN in node.attr:
            token = node.attr[TOKEN].s.decode()
            node.attr[TOKEN].s = tokens.get(token, token).encode()
    for node in graph_def.node if nodes else ():
        node.name = nodes.get(node.name, node.name)
        node.input[:] = [_renamed_input(source, nodes) for source in node.input]
        if "_class" in node.attr:
            wishes = node.attr["_class"].list.s
            wishes[:] = [
                COLOCATED + nodes[name].encode() if (name := _colocated(wish)) in nodes else wish for wish in wishes
            ]


def _colocated(wish: bytes) -> str:
    return wish.removeprefix(COLOCATED).decode()


def _renamed_input(source: str, names: Mapping[str, str]) -> str:
    return re.sub(r"^(\^?)([^:]+)", lambda found: found[1] + names.get(found[2], found[2]), source)
