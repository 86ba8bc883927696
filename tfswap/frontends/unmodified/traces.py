"""What a trace of an unmodified program does, by the types and names of its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfswap.analysis.phases import is_gradient
from tfswap.ir.custom_ops import DRAWS
from tfswap.ir.op_traits import is_random, reads_metadata_only, reads_variable, writes_variable
from tfswap.kernels.alignment import round_up
from tfswap.native.forks import with_children
from tfswap.runtime.shapes import Shapes, shapes_of

REPEATABLE = frozenset(
    {
        "Assert",
        "EagerPyFunc",
        "If",
        "PartitionedCall",
        "Placeholder",
        "Print",
        "PrintV2",
        "PyFunc",
        "StatefulPartitionedCall",
        "VarHandleOp",
        "VarIsInitializedOp",
        "While",
    }
)
"""Stateful ops that may run twice: they call functions, whose ops are judged by themselves, or have no state."""


def computes_gradients(concrete: Any) -> bool:
    """Whether a trace computes gradients, by itself or in functions that it calls."""
    return any(is_gradient(op, name) for op, name in _nodes(concrete))


def computed_bytes(concrete: Any) -> int | None:
    """The bytes of all tensors that a trace computes together; None where it calls functions, or sizes are open."""
    if any(True for _ in _nodes_called(concrete)):
        return None
    tensors = [t for op in concrete.graph.get_operations() if op.type != "Placeholder" for t in op.outputs]
    if not all(tensor.shape.is_fully_defined() for tensor in tensors):
        return None
    return sum(round_up(tensor.shape.num_elements() * tensor.dtype.size) for tensor in tensors)


def effects(concrete: Any) -> tuple[bool, list[int] | None]:
    """What a trace changes: whether random ops keep state in their kernels, and the places of inputs that are variables
    which it may write. The places are None where it has other effects.
    """
    types = {op for op, _ in _nodes(concrete)}
    draws, inputs = not types.isdisjoint(DRAWS), concrete.graph.inputs
    variables = [place for place, tensor in enumerate(inputs) if variable_type(tensor) is not None]
    others = any(tensor.dtype.name == "resource" and place not in variables for place, tensor in enumerate(inputs))
    if others or any(map(has_other_effects, types)):
        return draws, None
    if any(_may_write(op) for op, _ in _nodes_called(concrete)):
        return draws, variables
    written = {id(tensor) for op in concrete.graph.get_operations() if _may_write(op.type) for tensor in op.inputs}
    return draws, [place for place in variables if id(inputs[place]) in written]


def variable_type(tensor: Any) -> Any:
    """The type of the variable that a handle refers to; None for another tensor, or another resource."""
    import tensorflow as tf
    from tensorflow.python.framework import dtypes
    from tensorflow.python.ops.handle_data_util import get_resource_handle_data

    if tensor.dtype != dtypes.resource:
        return None
    data = get_resource_handle_data(tensor) if tf.is_symbolic_tensor(tensor) else tensor._handle_data
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    return dtypes.as_dtype(data.shape_and_type[0].dtype)


def only_shapes(concrete: Any) -> Shapes | None:
    """The shapes of the arguments of all calls of a trace; None where it leaves some open."""
    inputs = concrete.graph.inputs
    shapes = shapes_of(inputs[: len(inputs) - len(concrete.captured_inputs)])
    return None if any(shape is None or None in shape for shape in shapes) else shapes


def _nodes(concrete: Any) -> Iterator[tuple[str, str]]:
    """Type and name of each node of a trace, and of the functions that it calls."""
    yield from ((op.type, op.name) for op in concrete.graph.get_operations())
    yield from _nodes_called(concrete)


def _nodes_called(concrete: Any) -> Iterator[tuple[str, str]]:
    own = concrete._inference_function
    for function in with_children(own):
        definition = None if function is own else getattr(function, "cached_definition", None)
        yield from () if definition is None else ((node.op, node.name) for node in definition.node_def)


def _may_write(op: str) -> bool:
    """Whether an op writes variables among its inputs: a random op writes its generator's."""
    return writes_variable(op) or is_random(op)


def has_other_effects(op: str) -> bool:
    """Whether an op changes more than variables and the state of random ops."""
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(op)
    if definition is None or not definition.is_stateful:
        return False
    known = op in REPEATABLE or op in DRAWS
    return not (known or is_random(op) or reads_variable(op) or writes_variable(op) or reads_metadata_only(op))
