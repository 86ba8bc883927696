"""FunctionDef to IR: one function of a saved file's library, with its open dimensions bound.

No model is loaded, and no variable is created. TensorFlow infers the shapes anew, from the arguments' shapes and from
the types of resource arguments in the file.

Not handled: calls by nodes whose op is a function's name (TensorFlow 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tfswap.errors import InvalidModel, UnsupportedGraph
from tfswap.importers.bodies import import_with_bodies
from tfswap.importers.function import refuse_xla
from tfswap.importers.library import as_graph_def
from tfswap.importers.references import reachable
from tfswap.importers.shapes import Argument, HandleType, shape_of, variable_behind
from tfswap.ir.graph import KEEP, Graph, Variable
from tfswap.ir.types import Shape

if TYPE_CHECKING:
    from tensorflow.core.framework import function_pb2


def import_library_function(
    library: Mapping[str, Any],
    name: str,
    shapes: Mapping[str, Shape],
    handles: Mapping[str, HandleType] | None = None,
    values: Mapping[str, tuple[int, ...]] | None = None,
) -> Graph:
    """The IR of one library function, pruned to what runs.

    Args:
        library: the file's FunctionDefs by name.
        name: the function's name.
        shapes: shapes of arguments, by name. Other arguments have their shapes in the file.
        handles: the types of variables behind resource arguments that the file's function leaves out.
        values: known integer values of arguments, by name.

    Raises:
        UnsupportedGraph: the function is compiled by XLA, has TensorFlow 1 loop frames, or uses an op that this process
            does not know.
        InvalidModel: tfswap has already rewritten the function, or the graph does not fit the arguments.
    """
    fdef = library[name]
    refuse_compiled(name, fdef.attr, fdef.node_def, library)
    require_known_ops(fdef.node_def)
    graph_def, ends, calls = as_graph_def(fdef, library)
    arguments: dict[str, Argument] = {}
    variables: dict[str, Variable] = {}
    for index, argument in enumerate(fdef.signature.input_arg):
        found = [(d.dtype, d.shape) for d in argument.handle_data]
        if not found and handles and argument.name in handles:
            found = [handles[argument.name]]
        shape = shapes.get(argument.name, file_shape(fdef, argument.name))
        value = None if values is None else values.get(argument.name)
        arguments[argument.name] = made = Argument(argument.type, shape, found, value=value)
        kept = index in fdef.arg_attr and KEEP in fdef.arg_attr[index].attr
        if (variable := variable_behind(made, argument.name, kept)) is not None:
            variables[argument.name] = variable
    made = import_with_bodies(graph_def, arguments, *ends)
    made.calls = calls
    made.variables = variables
    return made


def file_shape(fdef: function_pb2.FunctionDef, argument: str) -> Shape:
    """The shape of an argument in the file; None where the file has none."""
    names = [a.name for a in fdef.signature.input_arg]
    index = names.index(argument)
    if index in fdef.arg_attr and "_output_shapes" in fdef.arg_attr[index].attr:
        protos = fdef.arg_attr[index].attr["_output_shapes"].list.shape
        return shape_of(protos[0]) if protos else None
    if "_input_shapes" in fdef.attr and index < len(fdef.attr["_input_shapes"].list.shape):
        return shape_of(fdef.attr["_input_shapes"].list.shape[index])
    return None


def refuse_compiled(name: str, attributes: Any, nodes: Iterable[Any], library: Mapping[str, Any]) -> None:
    """Raise UnsupportedGraph where XLA compiles the step, a part of it, or a function that it calls."""
    refuse_xla(name, attributes)
    nodes = list(nodes)
    for called in reachable(nodes, library):
        refuse_xla(called, library[called].attr)
    for node in nodes:
        refuse_xla(node.name, node.attr)


def require_known_ops(nodes: Iterable[Any]) -> None:
    """Refuse ops that this process does not know. Raises UnsupportedGraph, or InvalidModel for tfswap's own ops."""
    from tensorflow.python.framework import op_def_registry

    unknown = sorted({n.op for n in nodes if op_def_registry.get(n.op) is None})
    if not unknown:
        return
    if any(op.startswith("Tfswap>") for op in unknown):
        raise InvalidModel(
            "this step has been rewritten by tfswap already: start from the original model, or import tfswap.ops "
            "(tfswap.ops.codecs where it has encodings) to run this one"
        )
    raise UnsupportedGraph(
        f"the step uses ops that this TensorFlow does not know: {', '.join(unknown)}. Import the package that "
        "registers them, and optimize in the same process."
    )
