"""The variables that a step of a session may write: read and assigned by runs of hidden nodes (`hidden_nodes.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfswap.compiler.tf1_variables import REFERENCE_VARIABLES
from tfswap.frontends.unmodified.hidden_nodes import hidden_nodes
from tfswap.frontends.unmodified.rescue import same_bits
from tfswap.ir.op_traits import calls_functions, is_random, makes_handle, writes_variable

RunNodes = Callable[[Sequence[Any], Sequence[Any], dict[Any, Any]], list[Any]]
"""Runs targets, with fetches and feeds (by reference of their tensors), in the session; the fetched values."""


class SessionVariables:
    """The variables that some operations may write.

    Args:
        ops: the operations.
        run: runs nodes.
    """

    def __init__(self, ops: Sequence[Any], run: RunNodes):
        self._run = run
        self._nodes = hidden_nodes(ops[0].graph)
        self._written = sorted({variable for op in ops for variable in _written(op)}, key=lambda op: op.name)

    def values(self) -> list[Any]:
        """Copies of their values in host memory; None for one without a value."""
        if not self._written:
            return []
        found = self._run([], [each.has_value for each in self._accesses], {})
        wanted = [each.value for each, has_value in zip(self._accesses, found, strict=True) if has_value]
        # A session gives arrays that share the variables' own buffers.
        values = iter([np.array(value) for value in self._run([], wanted, {})] if wanted else [])
        return [next(values) if has_value else None for has_value in found]

    def put_back(self, kept: Sequence[Any]) -> None:
        """Assign these values where the variables have others; not for None."""
        for access, now, value in zip(self._accesses, self.values(), kept, strict=True):
            if value is not None and not same_bits(value, now):
                self._run([access.assign], [], {access.assigned.ref(): value})

    def own_buffers(self) -> None:
        """Give each resource variable a buffer of its own: a session shares that of a constant initial value, and the
        first update would request another.
        """
        from tensorflow.python.ops import gen_array_ops
        from tensorflow.python.ops import gen_resource_variable_ops as variables

        for variable in self._written:
            if variable.type in REFERENCE_VARIABLES:
                continue
            with self._nodes.added():
                value = variables.read_variable_op(variable.outputs[0], variable.get_attr("dtype"))
                copy = variables.assign_variable_op(variable.outputs[0], gen_array_ops.deep_copy(value))
            self._run([copy], [], {})

    @functools.cached_property
    def _accesses(self) -> list[Access]:
        with self._nodes.added():
            return [_access(variable) for variable in self._written]


class Access(NamedTuple):
    """Nodes that access a variable.

    Attributes:
        has_value, value: tensors.
        assigned: a placeholder for a new value.
        assign: the operation that assigns it.
    """

    has_value: Any
    value: Any
    assigned: Any
    assign: Any


def _access(variable: Any) -> Access:
    """New nodes for a variable's operation."""
    import tensorflow as tf
    from tensorflow.python.ops import gen_resource_variable_ops as resources
    from tensorflow.python.ops import gen_state_ops as references

    (handle,), kind = variable.outputs, variable.get_attr("dtype")
    assigned = tf.compat.v1.placeholder(kind)
    if variable.type in REFERENCE_VARIABLES:
        assign = references.assign(handle, assigned, validate_shape=False).op
        return Access(references.is_variable_initialized(handle), handle, assigned, assign)
    has_value, value = resources.var_is_initialized_op(handle), resources.read_variable_op(handle, kind)
    return Access(has_value, value, assigned, resources.assign_variable_op(handle, assigned))


def _written(op: Any) -> list[Any]:
    """The variables among an operation's inputs that it may write, as operations."""
    may_write = calls_functions(op.type) or writes_variable(op.type) or is_random(op.type)
    by_reference = op.type != "IsVariableInitialized" and any(argument.is_ref for argument in op.op_def.input_arg)
    sources = [tensor.op for tensor in op.inputs]
    handles = [each for each in sources if may_write and makes_handle(each.type)]
    return handles + [each for each in sources if by_reference and each.type in REFERENCE_VARIABLES]
