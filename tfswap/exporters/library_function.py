"""IR to FunctionDef: a rewritten step as a library function, and the call that runs it untouched.

A file has no configuration for its functions, but a call node has one for the function that it calls. So the step
becomes a function of its own that is never inlined, and the original function calls it with Grappler off: the planned
graph is the one that runs. A session optimizes the functions of its graph before, whatever calls them; it leaves alone
those that are marked as a data pipeline's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tfswap.exporters.function_def import BodyFunctions, OutputNames, function_def, grappler_off_config
from tfswap.ir.graph import Graph
from tfswap.kernels.target import Target

if TYPE_CHECKING:
    from tensorflow.core.framework import function_pb2, node_def_pb2

CALL = "tfswap_step"
"""Name of the call node, and of its control output."""


NOT_OPTIMIZED = "_tf_data_function"
"""An attribute of functions that Grappler leaves alone where it optimizes a session's graph with its library
(meta_optimizer.cc): data pipelines have a Grappler of their own.
"""


def export_library_function(
    graph: Graph, name: str, outputs: Sequence[str], target: Target
) -> tuple[function_pb2.FunctionDef, list[function_pb2.FunctionDef]]:
    """`graph` as a library function, with its feeds as arguments and its fetches as results, in order.

    Args:
        name: the function's.
        outputs: names of its results.
        target: what the graph is for; it decides whether loops and conditionals run tfswap's kernels.

    Returns:
        The function, and the functions that its loops and conditionals run.

    Raises:
        OpLibraryError: tfswap's ops, which `graph` may have, can't be built or loaded.
    """
    from tfswap.native.load import load_for

    load_for(node for part in (graph, *graph.all_bodies()) for node in part)
    bodies = BodyFunctions(own_kernels=target.own_ops)
    made = function_def(graph, name, outputs, bodies)
    made.signature.is_stateful = True
    made.attr["_noinline"].b = True
    functions = [made, *bodies.made.values()]
    for each in functions:
        each.attr[NOT_OPTIMIZED].b = True
    return functions[0], functions[1:]


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

    made = node_def_pb2.NodeDef(name=name, op="StatefulPartitionedCall", input=list(inputs))
    made.attr["Tin"].list.SetInParent()
    made.attr["Tin"].list.type.extend(a.type for a in inner.signature.input_arg)
    made.attr["Tout"].list.SetInParent()
    made.attr["Tout"].list.type.extend(a.type for a in inner.signature.output_arg)
    made.attr["f"].func.name = inner.signature.name
    made.attr["config"].s = b""
    made.attr["config_proto"].s = grappler_off_config().SerializeToString(deterministic=True)
    made.attr["executor_type"].s = b""
    made.attr["_noinline"].b = True
    return made


def _result_shapes(fdef: function_pb2.FunctionDef) -> list[Any]:
    """The traced shapes of a function's results, unknown where the file does not have them."""
    from tensorflow.core.framework import tensor_shape_pb2

    nodes = {n.name: n for n in fdef.node_def}
    flat = OutputNames()
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
