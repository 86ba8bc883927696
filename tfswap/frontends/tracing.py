"""What TensorFlow knows of a call of a `tf.function`: its arguments, shapes, and whether a tape watches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tfswap.runtime.captures import with_placeholders
from tfswap.runtime.open_function import has_size
from tfswap.runtime.separate_passes import tape_tensor

HANDLE_TYPES = (20, 21)
"""DT_RESOURCE and DT_VARIANT, as types.proto numbers them: what they refer to is part of their type."""
FIRST_ORDER = 1
"""gradients_util.POSSIBLE_GRADIENT_TYPES_FIRST_ORDER: one tape watches, and it is not persistent."""


def bind_call(function: Any, concrete: Any, args: Any, kwargs: Any) -> Any:
    """The arguments of a call by the names of the trace's parameters, as inspect.BoundArguments."""
    from tensorflow.python.eager.polymorphic_function import function_type_utils

    full = function_type_utils.canonicalize_function_inputs(
        args, kwargs, function.function_type, function._default_values
    )
    return concrete.function_type.bind(*full.args, **full.kwargs)


@functools.cache
def _internals() -> tuple[Any, Any, Any]:
    """TensorFlow's internals that `plain_key` uses, imported once."""
    from tensorflow.python.framework import ops
    from tensorflow.python.saved_model import save_context

    return ops.EagerTensor, ops.get_default_graph, save_context.in_save_context


@functools.cache
def _watchers() -> tuple[Any, Any, Any]:
    """TensorFlow's internals that `runs_plainly` uses, imported once."""
    from tensorflow.python.eager import cancellation, context, record

    return context.context, record.could_possibly_record, cancellation.context


def runs_plainly() -> bool:
    """Whether a call runs eagerly, with neither a tape nor a cancellation manager."""
    context, could_record, cancellation = _watchers()
    return context().executing_eagerly() and not could_record() and cancellation() is None


def plain_key(args: Any, kwargs: Any) -> Any:
    """A key of the trace that a call runs: its arguments' types and shapes. None where the choice depends on more.

    TensorFlow chooses the trace by the arguments and by a context (function_context.py). The context is always the same
    where a call runs plainly, outside of a distribution strategy and not while a model is saved. So one look-up finds
    the trace, and the arguments need no binding, which would take longer than the rest of a call.
    """
    eager_tensor, default_graph, in_save_context = _internals()
    if kwargs or not runs_plainly() or default_graph()._distribution_strategy_stack:
        return None
    key: list[Any] = []
    for value in args:
        if type(value) is not eager_tensor:
            return None
        dtype = value._datatype_enum()
        if dtype in HANDLE_TYPES:
            return None
        key += (dtype, value._shape_tuple())
    return None if in_save_context() else tuple(key)


def is_plain(concrete: Any, args: Any, inputs: Sequence[Any]) -> bool:
    """Whether a trace depends on nothing but its arguments, and takes them as they are."""
    return (
        len(args) == len(inputs)
        and all(a is i for a, i in zip(args, inputs, strict=True))
        and not concrete.graph.function_captures.by_ref_internal
    )


def stand_ins(function: Any, concrete: Any, args: Any, kwargs: Any) -> list[Any]:
    """Tensors without values for the arguments of a trace, of the shapes that these arguments or specs have."""
    from tensorflow.core.function import trace_type

    traced = concrete.inputs[: len(concrete.inputs) - len(concrete._captured_inputs)]
    if all(map(has_size, traced)) or not (args or kwargs):
        return traced
    specs = trace_type.InternalTracingContext(is_legacy_signature=True)
    # Bound without a cast, which would leave every size as open as in the input signature.
    full = function.function_type.bind(*args, **kwargs)
    full.apply_defaults()
    bound = concrete.function_type.bind(*full.args, **full.kwargs).arguments
    parameters = concrete.function_type.parameters.values()
    # In the order of FunctionType.unpack_inputs: what is keyword-only comes last, by name.
    ordered = sorted(parameters, key=lambda p: p.name if p.kind is p.KEYWORD_ONLY else "")
    flat = [t for p in ordered for t in trace_type.from_value(bound[p.name], specs).flatten()]
    if len(flat) != len(traced):
        return traced
    return [t if has_size(t) else sized_like(t, given.shape) for t, given in zip(traced, flat, strict=True)]


def sized_like(tensor: Any, shape: Any) -> Any:
    """A tensor without a value in the place of a trace's argument, of this shape where that is open."""
    import tensorflow as tf

    with tf.Graph().as_default():
        return tf.compat.v1.placeholder(tensor.dtype, tensor.shape.merge_with(shape), tensor.op.name)


def watched(concrete: Any, inputs: Sequence[Any]) -> int | None:
    """What gradients a tape may ask for of this call; None for none. Follows ConcreteFunction._call_flat."""
    from tensorflow.python.eager import record
    from tensorflow.python.ops import gradients_util, resource_variable_ops

    if not record.could_possibly_record():
        return None
    for variable in concrete.graph.variables:
        resource_variable_ops.variable_accessed(variable)
    arguments = [tape_tensor(each) for each in (*inputs, *with_placeholders(concrete))]
    return gradients_util.PossibleTapeGradientTypes(arguments) or None


def name_of(function: Any) -> str:
    """A `tf.function`'s name in messages: its Python function's, or its type's where that has none, as
    `functools.partial`.
    """
    python_function = function.python_function
    return getattr(python_function, "__name__", type(python_function).__name__)
