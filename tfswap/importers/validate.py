"""Checks graphs from files against the definitions of their ops, before any other module reads them.

Ensures: each node has the attributes that its op requires, of the right kinds. It reads existing tensors, as many as
its op takes. It runs existing functions, whose numbers of arguments and results fit. A malformed file gives one error
that names the node, and the importers need no checks of their own.

Checked: attributes, inputs, control edges, results, cycles, called functions, and the bodies of loops and conditionals.
Not checked: shapes and element types, which TensorFlow checks when it builds the graph; ops that this process does not
know.
"""

from __future__ import annotations

import functools
import graphlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tfswap.errors import InvalidModel
from tfswap.importers.references import functions_in, reachable
from tfswap.ir.op_traits import control_flow, is_loop_frame

KINDS = {
    "string": "s",
    "int": "i",
    "float": "f",
    "bool": "b",
    "type": "type",
    "shape": "shape",
    "tensor": "tensor",
    "func": "func",
}
"""The field of an AttrValue, or of its list, for each kind of attribute."""
MAX_OUTPUTS = 1 << 20
"""More outputs than any node has. A larger number means damage, and would take long to iterate over."""


class _Argument(NamedTuple):
    """An input or output of an op: its name, the attributes that give its number of tensors or list of types, and the
    number of tensors without them.
    """

    name: str
    number: str
    types: str
    usual: int

    def count(self, attributes: Mapping[str, Any]) -> int:
        attribute = self.number or self.types
        if attribute not in attributes:  # looked up, it would be made
            return self.usual
        return attributes[attribute].i if self.number else len(attributes[attribute].list.type)


class _Definition(NamedTuple):
    """What an op requires of its nodes."""

    attributes: tuple[tuple[str, str, bool], ...]
    """Name, kind, and whether it is required."""
    inputs: tuple[_Argument, ...]
    outputs: tuple[_Argument, ...]


@functools.cache
def _definition(op: str) -> _Definition | None:
    """None for an op that this process does not know."""
    from tensorflow.python.framework import op_def_registry

    found = op_def_registry.get(op)
    if found is None:
        return None
    attributes = tuple((a.name, a.type, not a.HasField("default_value")) for a in found.attr)

    usual = {a.name: a.default_value.i or len(a.default_value.list.type) for a in found.attr}

    def arguments(protos: Iterable[Any]) -> tuple[_Argument, ...]:
        named = ((a.name, a.number_attr, a.type_list_attr) for a in protos)
        return tuple(_Argument(n, number, types, usual.get(number or types, 1)) for n, number, types in named)

    return _Definition(attributes, arguments(found.input_arg), arguments(found.output_arg))


def validate_functions(what: str, library: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check functions of a library, and all functions that they run. Raises InvalidModel, which names `what`."""
    roots = list(names)
    nodes = [node for name in roots for node in library[name].node_def]
    for name in sorted({*roots, *reachable(nodes, library)}):
        where = f"{what} is damaged: its function {name!r}"
        _Part(where, library[name].node_def, library).check_function(library[name])


def validate_graph(what: str, nodes: Sequence[Any], library: Mapping[str, Any]) -> None:
    """Check a graph, and all functions that it runs. Raises InvalidModel, which names `what`."""
    _Part(f"{what} is damaged: it", nodes, library).check_graph()
    validate_functions(what, library, reachable(nodes, library))


class _Part:
    """The nodes of one graph or function.

    Args:
        where: the beginning of messages.
    """

    def __init__(self, where: str, nodes: Sequence[Any], library: Mapping[str, Any]):
        self._where = where
        self._nodes = {node.name: node for node in nodes}
        self._library = library
        self._outputs: dict[str, dict[str, int] | None] = {}
        if len(self._nodes) < len(nodes) or "" in self._nodes:
            names = [node.name for node in nodes]
            self._fail(f"has more than one node called {next(n for n in names if not n or names.count(n) > 1)!r}")
        for node in nodes:
            self._check_attributes(node)

    def check_function(self, fdef: Any) -> None:
        arguments = [a.name for a in fdef.signature.input_arg]
        if len(set(arguments)) < len(arguments) or not self._nodes.keys().isdisjoint(arguments):
            self._fail("has an argument with a name that is taken")
        for argument in (*fdef.signature.input_arg, *fdef.signature.output_arg):
            if not is_type(argument.type):
                self._fail(f"has {argument.name!r} of an unknown element type ({argument.type})")
        if any(index >= len(arguments) for index in fdef.arg_attr):
            self._fail("describes arguments that it does not have")
        given = set(arguments)
        self._check_edges(lambda name: self._is_tensor(name, given), given)
        for output in fdef.signature.output_arg:
            if not self._is_tensor(fdef.ret.get(output.name, ""), given):
                self._fail(f"returns {fdef.ret.get(output.name, '')!r} as {output.name!r}, which does not exist")
        for output in fdef.signature.control_output:
            if fdef.control_ret.get(output, "") not in self._nodes:
                self._fail(f"waits for {output!r}, which does not exist")

    def check_graph(self) -> None:
        self._check_edges(self._is_numbered_tensor, ())

    def _check_edges(self, is_tensor: Callable[[str], bool], given: Collection[str]) -> None:
        """Check that inputs and control edges come from existing nodes, that there are as many as the op takes, and
        that there is no cycle.
        """
        sources: dict[str, list[str]] = {}
        for node in self._nodes.values():
            data = [name for name in node.input if not name.startswith("^")]
            controls = [name[1:] for name in node.input if name.startswith("^")]
            for name in data:
                if not is_tensor(name):
                    self._fail(f"has the node {node.name!r}, which reads {name!r}, which does not exist")
            for name in controls:
                if name not in self._nodes and name not in given:
                    self._fail(f"has the node {node.name!r}, which waits for {name!r}, which does not exist")
            definition = _defined(node)
            if definition is not None:
                takes = sum(argument.count(node.attr) for argument in definition.inputs)
                if len(data) != takes:
                    self._fail(f"has the {node.op} node {node.name!r} with {len(data)} inputs, and it takes {takes}")
            if not is_loop_frame(node.op):
                named = (*(name.partition(":")[0] for name in data), *controls)
                sources[node.name] = [name for name in named if name in self._nodes]
        try:
            graphlib.TopologicalSorter(sources).prepare()
        except graphlib.CycleError as error:
            self._fail(f"has the node {error.args[1][0]!r}, which waits for itself")

    def _check_attributes(self, node: Any) -> None:
        for key, value in node.attr.items():
            for called in functions_in(value):
                if called.name and called.name not in self._library and _definition(called.name) is None:
                    self._fail(f"has the node {node.name!r}, which runs {called.name!r} ({key}), which does not exist")
        definition = _defined(node)
        for name, kind, required in definition.attributes if definition is not None else ():
            if name in node.attr:
                if not _is_of_kind(node.attr[name], kind):
                    self._fail(f"has the {node.op} node {node.name!r}, whose attribute {name!r} is no {kind}")
            elif required:
                self._fail(f"has the {node.op} node {node.name!r} without its attribute {name!r}")
        if definition is None:
            return
        for argument in (*definition.inputs, *definition.outputs):
            if not 0 <= argument.count(node.attr) <= MAX_OUTPUTS:
                self._fail(f"has the {node.op} node {node.name!r} with a number of tensors that none has")
        self._check_bodies(node)

    def _check_bodies(self, node: Any) -> None:
        """Check the numbers of arguments and results of the functions of a loop or conditional."""
        flow = control_flow(node.op)
        if flow is None:
            return
        for attribute in flow.functions:
            for called in functions_in(node.attr[attribute]):
                body = self._library.get(called.name)
                if body is None:
                    self._fail(f"has the {node.op} node {node.name!r} without a function {attribute!r} to run")
                    return
                takes = len(node.attr["T" if flow.is_loop else "Tin"].list.type)
                gives = 1 if attribute == "cond" else len(node.attr["T" if flow.is_loop else "Tout"].list.type)
                found = len(body.signature.input_arg), len(body.signature.output_arg)
                if found != (takes, gives):
                    self._fail(
                        f"has the {node.op} node {node.name!r}, which runs {called.name!r} with {takes} arguments for "
                        f"{gives} results; it takes {found[0]} and returns {found[1]}"
                    )

    def _outputs_of(self, name: str) -> dict[str, int] | None:
        """The number of tensors of each output of a node; None where its op is unknown, or is a function's name."""
        if name not in self._outputs:
            node = self._nodes[name]
            definition = _defined(node)
            self._outputs[name] = definition and {a.name: a.count(node.attr) for a in definition.outputs}
        return self._outputs[name]

    def _is_tensor(self, name: str, given: Collection[str]) -> bool:
        """Whether a name in a function ("argument" or "node:output:0") is a tensor."""
        if name in given:
            return True
        node, _, rest = name.partition(":")
        output, _, index = rest.partition(":")
        if node not in self._nodes or not _is_index(index or "0"):
            return False
        outputs = self._outputs_of(node)
        return outputs is None or int(index or 0) < outputs.get(output, 0)

    def _is_numbered_tensor(self, name: str) -> bool:
        """Whether a name in a graph ("node" or "node:0") is a tensor."""
        node, _, index = name.partition(":")
        if node not in self._nodes or not _is_index(index or "0"):
            return False
        outputs = self._outputs_of(node)
        return outputs is None or int(index or 0) < sum(outputs.values())

    def _fail(self, what: str) -> None:
        raise InvalidModel(f"{self._where} {what}. Save it again.")


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _is_of_kind(value: Any, kind: str) -> bool:
    if not kind.startswith("list("):
        return value.WhichOneof("value") == KINDS.get(kind) and (kind != "type" or is_type(value.type))
    # An empty list has no field, another one has one kind of entries.
    if value.WhichOneof("value") != "list":
        return False
    kept = KINDS.get(kind[len("list(") : -1])
    return all(field.name == kept for field, _ in value.list.ListFields()) and all(map(is_type, value.list.type))


def _defined(node: Any) -> _Definition | None:
    """The definition of a node's op; None where it is unknown, or where an attribute is a placeholder for callers."""
    open_to_callers = any(value.WhichOneof("value") == "placeholder" for value in node.attr.values())
    return None if open_to_callers else _definition(node.op)


@functools.cache
def is_type(number: int) -> bool:
    """Whether TensorFlow knows an element type by this number; references are among them."""
    from tensorflow.python.framework import dtypes

    try:
        dtypes.as_dtype(number)
    except (TypeError, ValueError):
        return False
    return number != 0
