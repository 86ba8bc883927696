"""ConcreteFunction to IR, with open dimensions bound to the sizes of a call.

The graph is as traced. TensorFlow's optimizers run on it later (compiler/grappler.py).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from tfswap.errors import UnsupportedGraph
from tfswap.importers.bodies import import_with_bodies, inside
from tfswap.importers.graph_def import import_graph_def
from tfswap.importers.inline import has_calls, inline_calls
from tfswap.importers.list_elements import has_contents
from tfswap.importers.opaque_calls import functions_of
from tfswap.importers.references import called_functions
from tfswap.importers.shapes import Argument, handle_types, variable_behind
from tfswap.importers.size_bounds import decides_sizes, gives_shape_values
from tfswap.ir.graph import KEEP, Graph, Node, Variable
from tfswap.ir.op_traits import control_flow, has_small_extras
from tfswap.ir.types import TensorType
from tfswap.ir.unneeded import prune_traced
from tfswap.support.gc_pause import without_collector
from tfswap.support.reach import reach

# A node that carries this attribute is compiled by XLA, or can be clustered for it.
XLA_ATTRIBUTES = ("_XlaMustCompile", "_XlaCompile", "_xla_compile_id")


@without_collector
def import_function(
    concrete: Any, arguments: Sequence[Any] = (), known_types: Mapping[str, TensorType] | None = None
) -> Graph:
    """The IR of a ConcreteFunction's graph, pruned to what runs.

    Args:
        concrete: a `ConcreteFunction`.
        arguments: the flat tensor arguments of a call. Their shapes bind dimensions that the trace left open. May be
            empty where the trace knows every dimension.
        known_types: types of tensors ("node:0") whose sizes TensorFlow can't infer.

    Raises:
        UnsupportedGraph: the step is compiled by XLA, or has TensorFlow 1 loop frames.
    """
    func_graph = concrete.graph
    refuse_xla(func_graph.name, concrete.function_def.attr)
    graph_def = func_graph.as_graph_def(add_shapes=True)
    shapes = {
        t.op.name: tuple(a.shape.as_list())
        for t, a in zip(func_graph.inputs, arguments, strict=False)
        if t.dtype.name != "resource" and a.shape.rank is not None and not t.shape.is_fully_defined()
    }
    outputs = own_outputs(concrete)
    fetches = [t.name for t in outputs]
    # TensorFlow lists them in the order of a set of objects, which differs between processes.
    waited_for = {operation.name for operation in func_graph.control_outputs}
    targets = [node.name for node in graph_def.node if node.name in waited_for]
    inlined: Mapping[str, tuple[str, ...]] = {}
    if has_calls(graph_def):
        traced = {n.name: n.attr["_output_shapes"] for n in graph_def.node if "_output_shapes" in n.attr}
        enums = [t.dtype.as_datatype_enum for t in outputs]
        graph_def, fetches, targets, inlined = inline_calls(graph_def, list(zip(fetches, enums, strict=True)), targets)
        _restore_compiled(graph_def)
        for node in graph_def.node:
            if node.name in traced:  # no op has the shapes of set_shape
                node.attr["_output_shapes"].CopyFrom(traced[node.name])
    names = [t.op.name for t in func_graph.inputs]
    known = _arguments(func_graph, shapes, sparse_shapes(concrete))
    variables = _variables(func_graph, known)
    if known_types or inlined or shapes or any(control_flow(n.op) or decides_sizes(n.op) for n in graph_def.node):
        made = import_with_bodies(graph_def, known, names, fetches, targets, known_types)
        if declared := _declared_inside(made, func_graph):
            made = import_with_bodies(graph_def, known, names, fetches, targets, {**declared, **(known_types or {})})
        made.calls, made.variables = inlined, variables
        return made
    graph = import_graph_def(graph_def, names, fetches, targets)
    prune_traced(graph)
    given = any(gives_shape_values(node.op) or has_contents(node.op) for node in graph) or any(
        a.value is not None for a in known.values()
    )
    if given and any(map(_has_open_size, graph)):
        graph = import_with_bodies(graph_def, known, names, fetches, targets)
    graph.variables = variables
    return graph


def _declared_inside(graph: Graph, traced: Any) -> dict[str, TensorType]:
    """Sizes of tensors in bodies that only the trace knows, by names as of `import_with_bodies`: from `set_shape`, or
    from the Python object that a tensor comes from, as a queue.
    """
    found: dict[str, TensorType] = {}
    for node, bodies in graph.bodies.items():
        for k, (body, name) in enumerate(zip(bodies, functions_of(node), strict=True)):
            function = traced._functions.get(name)
            own = getattr(function, "graph", None)  # functions that come from a file have none
            if own is not None:
                known = {**_declared(body, own), **_declared_inside(body, own)}
                found |= {f"{inside(node.name, k)}{tensor}": kind for tensor, kind in known.items()}
    return found


def _declared(body: Graph, traced: Any) -> dict[str, TensorType]:
    """`_declared_inside` for a body's own tensors."""
    found: dict[str, TensorType] = {}
    every = (node.out(i) for node in body for i in range(len(node.outputs)))
    for tensor in (t for t in every if t.type.nbytes is None or t.type.bound):
        with contextlib.suppress(KeyError):  # a tensor of an inlined function
            shape = traced.get_tensor_by_name(tensor.name).shape
            if shape.is_fully_defined():
                found[tensor.name] = TensorType(tensor.type.dtype, tuple(shape.as_list()))
    return found


def sparse_shapes(concrete: Any) -> dict[str, tuple[int, ...]]:
    """The values of inputs that are the dense shapes of sparse tensors, by the inputs' names, from the trace's
    signature. Shapes with open dimensions are left out.
    """
    inputs = concrete.inputs[: len(concrete.inputs) - len(concrete._captured_inputs)]
    return dense_shapes(concrete.structured_input_signature, [tensor.op.name for tensor in inputs])


def dense_shapes(signature: Any, inputs: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """`sparse_shapes` for a signature's nested specs and the names of its flat inputs."""
    import tensorflow as tf

    given = tf.nest.flatten(signature)
    parts = [[p for p in tf.nest.flatten(s, expand_composites=True) if isinstance(p, tf.TypeSpec)] for s in given]
    ends = list(accumulate(map(len, parts)))
    if not ends or ends[-1] != len(inputs):
        return {}  # a variable that is passed twice is one input
    found: dict[str, tuple[int, ...]] = {}
    for spec, end in zip(given, ends, strict=True):
        if isinstance(spec, tf.SparseTensorSpec) and spec.shape.is_fully_defined():
            found[inputs[end - 1]] = tuple(d for d in spec.shape.as_list() if d is not None)
    return found


def _has_open_size(node: Node) -> bool:
    return not has_small_extras(node.op) and any(kind.nbytes is None for kind in node.outputs)


def own_outputs(concrete: Any) -> list[Any]:
    """The tensors that a ConcreteFunction returns. After differentiation, its graph has further outputs, which the
    backward function reads.
    """
    return concrete.graph.outputs[: len(concrete.function_def.signature.output_arg)]


def _restore_compiled(graph_def: Any) -> None:
    """Restore the definitions of functions that XLA compiles, in place: TensorFlow has registered them under their
    names.
    """
    from tensorflow.python.eager import context

    runtime = context.context()
    library = {f.signature.name: f for f in graph_def.library.function}
    compiled = [name for name, function in library.items() if compiled_by(function.attr)]

    def called(name: str) -> list[str]:
        return [f for node in library[name].node_def for f in called_functions(node)] if name in library else []

    for name in reach(compiled, called):  # `called` reads the definitions restored so far
        if runtime.has_function(name):
            if name not in library:  # it was inlined
                library[name] = graph_def.library.function.add()
            library[name].CopyFrom(runtime.get_function_def(name))


def compiled_by(attributes: Any) -> str | None:
    """The attribute of a node or function by which XLA compiles it; None where there is none."""
    found = (a for a in XLA_ATTRIBUTES if a in attributes and (attributes[a].b or attributes[a].s))
    return next(found, None)


def refuse_xla(name: str, attributes: Any) -> None:
    """Raise UnsupportedGraph where XLA compiles the node or function of this name."""
    attribute = compiled_by(attributes)
    if attribute is not None:
        raise UnsupportedGraph(
            f"{name!r} is compiled by XLA ({attribute}): XLA fuses the step and hides its tensors, so no "
            "graph rewrite can bound them. Remove jit_compile=True (in Keras: "
            "compile(..., jit_compile=False)) or turn off auto-clustering, and decorate it again, or save it anew."
        )


def _arguments(
    func_graph: Any, shapes: dict[str, tuple[int | None, ...]], values: dict[str, tuple[int, ...]]
) -> dict[str, Argument]:
    """The inputs of `func_graph` for `infer_shapes`, with these shapes and values, by name."""
    result = {}
    for tensor in func_graph.inputs:
        name = tensor.op.name
        shape = tensor.shape.as_list() if tensor.shape.rank is not None else None
        shape, value = shapes.get(name, shape), values.get(name)
        result[name] = Argument(tensor.dtype.as_datatype_enum, shape, handle_types(tensor), value=value)
    return result


def _variables(func_graph: Any, arguments: Mapping[str, Argument]) -> dict[str, Variable]:
    """The variables behind inputs, by the inputs' names. Those with the same name have that of the input."""
    alive = [variable for known in func_graph._weak_variables if (variable := known()) is not None]
    names = {id(variable.handle): variable.name.removesuffix(":0") for variable in alive}
    counts = Counter(names.values())
    captured = {placeholder.op.name: names.get(id(handle), "") for handle, placeholder in func_graph.captures}
    unique = {name: own for name, own in captured.items() if counts[own] == 1}
    found: dict[str, Variable] = {}
    for tensor in func_graph.inputs:
        name = tensor.op.name
        kept = KEEP in tensor.op.node_def.attr
        if (variable := variable_behind(arguments[name], unique.get(name, name), kept)) is not None:
            found[name] = variable
    return found
