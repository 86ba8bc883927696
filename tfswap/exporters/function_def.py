"""IR to FunctionDef: a graph as a library function, and the bodies of its loops and conditionals as further ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfswap.exporters.graph_def import encode_nodes, enum_of
from tfswap.importers.inline import LOWERING
from tfswap.importers.references import functions_in
from tfswap.ir.custom_ops import KERNEL, OWN_KERNEL
from tfswap.ir.graph import Graph, Node, Opaque, Output
from tfswap.ir.op_traits import control_flow
from tfswap.ir.types import TensorType
from tfswap.kernels.host_memory import HOST_INPUTS, HOST_OUTPUTS

if TYPE_CHECKING:
    from tensorflow.core.framework import function_pb2
    from tensorflow.core.protobuf import config_pb2


class BodyFunctions:
    """The bodies of loops and conditionals, as functions whose names identify their content.

    A loop or conditional whose bodies are in the IR runs as one kernel: bodies have an order of their own, and their
    requests are that kernel's. The kernel is tfswap's: in TensorFlow's a branch does not know which iteration of a loop
    it is in, on which its sums may depend.

    Args:
        own_kernels: whether loops and conditionals run tfswap's kernels, not TensorFlow's.

    Attributes:
        made: the functions, by name.
    """

    def __init__(self, *, own_kernels: bool = True) -> None:
        self._own_kernels = own_kernels
        self.made: dict[str, function_pb2.FunctionDef] = {}

    def attributes(self, node: Node, bodies: Sequence[Graph]) -> dict[str, Any]:
        """The attributes by which `node` runs `bodies`."""
        from tensorflow.core.framework import attr_value_pb2

        kind = control_flow(node.op)
        assert kind is not None
        waiting = list(bodies)
        result = {LOWERING: attr_value_pb2.AttrValue(b=False)}
        for name, positions in ({} if kind.is_loop else _on_host(node)).items():
            result[name] = attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(i=positions))
        if self._own_kernels:
            result[KERNEL] = attr_value_pb2.AttrValue(s=OWN_KERNEL.encode())
        for attribute in kind.functions:
            opaque = node.attrs[attribute]
            assert isinstance(opaque, Opaque)
            value = attr_value_pb2.AttrValue.FromString(opaque.data)
            for function in functions_in(value):
                function.name = self._add(waiting.pop(0), function.name)
                function.attr.clear()
            result[attribute] = value
        return result

    def _add(self, body: Graph, name: str) -> str:
        made = function_def(body, "", [f"output_{i}" for i in range(len(body.fetches))], self)
        digest = hashlib.sha256(made.SerializeToString(deterministic=True)).hexdigest()[:16]
        made.signature.name = f"{name}_tfswap_{digest}"
        self.made[made.signature.name] = made
        return made.signature.name


def _on_host(node: Node) -> dict[str, list[int]]:
    """By attribute, the positions of a conditional's inputs and outputs that are in host memory on a GPU.

    Functions take and return int32 there. Of loops TensorFlow knows that itself (memory_types.cc, IsFunctionCallOp).
    """

    def positions(kinds: Sequence[TensorType]) -> list[int]:
        return [position for position, kind in enumerate(kinds) if kind.dtype == "int32"]

    found = {HOST_INPUTS: positions([t.type for t in node.inputs]), HOST_OUTPUTS: positions(node.outputs)}
    return {name: each for name, each in found.items() if each}


def grappler_off_config() -> config_pb2.ConfigProto:
    """The configuration of calls of functions that must run as planned."""
    from tensorflow.core.protobuf import config_pb2

    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


def function_def(graph: Graph, name: str, outputs: Sequence[str], bodies: BodyFunctions) -> function_pb2.FunctionDef:
    """`graph` as a function, with its feeds as arguments and its fetches as results, in order.

    Args:
        outputs: names of its results.
        bodies: gets the bodies of the graph's loops and conditionals.
    """
    from tensorflow.core.framework import function_pb2

    made = function_pb2.FunctionDef()
    made.signature.name = name
    feeds = {node.name for node in graph.feeds}
    for node in graph.feeds:
        made.signature.input_arg.add(name=node.name, type=enum_of(node.outputs[0].dtype))
    flat = OutputNames()
    for proto in encode_nodes(graph, bodies.attributes):
        if proto.name in feeds:
            continue
        references = [_reference(i, graph, feeds, flat) for i in proto.input]
        node = made.node_def.add()
        node.CopyFrom(proto)
        del node.input[:]
        node.input.extend(references)
    for result, fetch in zip(outputs, graph.fetches, strict=True):
        made.signature.output_arg.add(name=result, type=enum_of(fetch.type.dtype))
        made.ret[result] = _reference(fetch.name, graph, feeds, flat)
    for node in graph.targets:
        if node.name not in feeds:
            made.signature.control_output.append(node.name)
            made.control_ret[node.name] = node.name
    return made


def _reference(name: str, graph: Graph, feeds: set[str], flat: OutputNames) -> str:
    """A GraphDef's input ("node:1", "^node") as a FunctionDef writes it ("node:output:1", "^node")."""
    if name.startswith("^"):
        return name
    source, _, index = name.partition(":")
    if source in feeds:
        return source
    return f"{source}:{flat.of_output(Output(graph[source], int(index or 0)))}"


class OutputNames:
    """A FunctionDef's names of a node's outputs: "argument:position" for each, in flat order."""

    def __init__(self) -> None:
        from tensorflow.python.framework import op_def_registry

        self._registry = op_def_registry

    def of_output(self, tensor: Output) -> str:
        attrs: Mapping[str, Any] = tensor.node.attrs
        return self._names(tensor.node.op, lambda a: attrs[a], lambda a: len(attrs[a]))[tensor.index]

    def of(self, op: str, attrs: Any) -> list[str]:
        """The same from a NodeDef's attributes."""
        return self._names(op, lambda a: attrs[a].i, lambda a: len(attrs[a].list.type))

    def _names(self, op: str, number: Any, length: Any) -> list[str]:
        result = []
        for argument in self._registry.get(op).output_arg:
            count = 1
            if argument.number_attr:
                count = number(argument.number_attr)
            elif argument.type_list_attr:
                count = length(argument.type_list_attr)
            result += [f"{argument.name}:{i}" for i in range(count)]
        return result
