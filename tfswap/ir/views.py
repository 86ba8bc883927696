"""The tensor that another one is an alias or a view of."""

from __future__ import annotations

from tfswap.ir.graph import Output
from tfswap.ir.op_traits import is_view, passes_on


def passed_on(tensor: Output) -> Output:
    """The tensor that `tensor` is, past ops that pass it on unchanged (Identity)."""
    while passes_on(tensor.node.op):
        tensor = tensor.node.inputs[tensor.index]
    return tensor


def origin(tensor: Output) -> Output:
    """The tensor whose buffer `tensor` has, past all views."""
    while is_view(tensor.node.op) and tensor.node.inputs:
        tensor = tensor.node.inputs[tensor.index if tensor.index < len(tensor.node.inputs) else 0]
    return tensor
