"""IR to FunctionDef: a rewritten step as a library function, and the call that runs it untouched.

A file can't say how TensorFlow is to be configured when its functions run, but a call node can, for the function
that it calls. So the step becomes a function of its own that is never inlined, and what used to be the step calls
it with Grappler off: what was planned is what runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfswap.exporters.graph_def import export_graph_def
from tfswap.ir.graph import Graph, Output

if TYPE_CHECKING:
    from tensorflow.core.framework import function_pb2, node_def_pb2

CALL = "tfswap_step"
"""Name of the call node, and of its control output."""


def export_library_function(graph: Graph, name: str, outputs: Sequence[str]) -> function_pb2.FunctionDef:
    """`graph` as a library function, with its feeds as arguments and its fetches as results, in order.

    Args:
        name: the function's.
        outputs: names of its results.

    Raises:
        OpLibraryError: tfswap's ops, which `graph` may have, can't be built or loaded.
    """
    from tensorflow.core.framework import function_pb2

    from tfswap.oplib.load import load

    load()

    made = function_pb2.FunctionDef()
    made.signature.name = name
    made.signature.is_stateful = True
    made.attr["_noinline"].b = True
    feeds = {node.name for node in graph.feeds}
    for node in graph.feeds:
        made.signature.input_arg.add(name=node.name, type=_enum(node.outputs[0].dtype))
    graph_def = export_graph_def(graph)
    flat = _OutputNames()
    for proto in graph_def.node:
        if proto.name in feeds:
            continue
        node = made.node_def.add()
        node.CopyFrom(proto)
        del node.input[:]
        node.input.extend(_reference(i, graph, feeds, flat) for i in proto.input)
    for result, fetch in zip(outputs, graph.fetches, strict=True):
        made.signature.output_arg.add(name=result, type=_enum(fetch.type.dtype))
        made.ret[result] = _reference(fetch.name, graph, feeds, flat)
    for node in graph.targets:
        if node.name not in feeds:
            made.signature.control_output.append(node.name)
            made.control_ret[node.name] = node.name
    return made


def wrap_function(original: function_pb2.FunctionDef, inner: function_pb2.FunctionDef) -> function_pb2.FunctionDef:
    """`original` with a body that calls `inner`: the same signature, arguments and results."""
    made = type(original)()
    made.CopyFrom(original)
    del made.node_def[:]
    made.ret.clear()
    made.control_ret.clear()
    del made.signature.control_output[:]
    name = CALL
    while any(a.name == name for a in original.signature.input_arg):
        name += "_"
    call = call_node(name, inner, [a.name for a in original.signature.input_arg])
    call.attr["_output_shapes"].list.shape.extend(_result_shapes(original))
    made.node_def.add().CopyFrom(call)
    for i, result in enumerate(original.signature.output_arg):
        made.ret[result.name] = f"{name}:output:{i}"
    made.signature.control_output.append(name)
    made.control_ret[name] = name
    made.signature.is_stateful = True
    return made


def call_node(name: str, inner: function_pb2.FunctionDef, inputs: Iterable[str]) -> node_def_pb2.NodeDef:
    """A node that calls `inner` and keeps Grappler off it."""
    from tensorflow.core.framework import node_def_pb2
    from tensorflow.core.protobuf import config_pb2

    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    made = node_def_pb2.NodeDef(name=name, op="StatefulPartitionedCall", input=list(inputs))
    made.attr["Tin"].list.SetInParent()
    made.attr["Tin"].list.type.extend(a.type for a in inner.signature.input_arg)
    made.attr["Tout"].list.SetInParent()
    made.attr["Tout"].list.type.extend(a.type for a in inner.signature.output_arg)
    made.attr["f"].func.name = inner.signature.name
    made.attr["config"].s = b""
    made.attr["config_proto"].s = config.SerializeToString(deterministic=True)
    made.attr["executor_type"].s = b""
    made.attr["_noinline"].b = True
    return made


def _result_shapes(fdef: function_pb2.FunctionDef) -> list[Any]:
    """The traced shapes of a function's results, unknown where the file does not have them."""
    from tensorflow.core.framework import tensor_shape_pb2

    nodes = {n.name: n for n in fdef.node_def}
    flat = _OutputNames()
    shapes = []
    for argument in fdef.signature.output_arg:
        name, _, rest = fdef.ret[argument.name].partition(":")
        shape = tensor_shape_pb2.TensorShapeProto(unknown_rank=True)
        node = nodes.get(name)
        if node is not None and rest:
            known = node.attr["_output_shapes"].list.shape if "_output_shapes" in node.attr else ()
            index = flat.of(node.op, node.attr).index(rest)
            if index < len(known):
                shape = known[index]
        shapes.append(shape)
    return shapes


def _reference(name: str, graph: Graph, feeds: set[str], flat: _OutputNames) -> str:
    """A GraphDef's input ("node:1", "^node") as a FunctionDef writes it ("node:output:1", "^node")."""
    if name.startswith("^"):
        return name
    source, _, index = name.partition(":")
    if source in feeds:
        return source
    return f"{source}:{flat.of_output(Output(graph[source], int(index or 0)))}"


class _OutputNames:
    """What a FunctionDef calls the outputs of a node: "argument:position" for each, in flat order."""

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


def _enum(dtype: str) -> int:
    from tensorflow.python.framework import dtypes

    return dtypes.as_dtype(dtype).as_datatype_enum
