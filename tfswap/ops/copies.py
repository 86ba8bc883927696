"""The swap ops as Python functions, for measuring copies (`tfswap.profile`) and for graphs written by hand.

The passes do not call these functions: they write the nodes (tfswap.ir.custom_ops).
"""

from __future__ import annotations

from typing import Any

from tfswap.native.load import load

# Tensors are Any: TensorFlow's stubs have no precise type for symbolic and eager ones.


def swap_out(tensor: Any, name: str | None = None) -> Any:
    """Starts a copy of `tensor` into host memory; returns its handle, a scalar variant, immediately.

    The handle keeps the device tensor until `release`.

    Raises:
        tf.errors.ResourceExhaustedError: host memory is at its limit.
        tf.errors.InvalidArgumentError (eager), ValueError (graph): strings, resources and variants
            can't be swapped.
    """
    return load().ops.tfswap_swap_out(tensor=tensor, name=name)


def release(handle: Any, name: str | None = None) -> Any:
    """Waits for the copy to the host and frees the device tensor. Returns the op (None if eager)."""
    return load().ops.tfswap_release(handle=handle, name=name)


def swap_in(handle: Any, dtype: Any, shape: Any = None, name: str | None = None) -> tuple[Any, Any]:
    """Allocates the tensor again and starts the copy back; returns (tensor, ticket) immediately.

    The tensor holds no values until `await_copy`. `shape` serves shape inference only.
    """
    attrs = {} if shape is None else {"shape": shape}
    tensor, ticket = load().ops.tfswap_swap_in(handle=handle, T=dtype, name=name, **attrs)
    return tensor, ticket


def await_copy(tensor: Any, ticket: Any, name: str | None = None) -> Any:
    """Waits for the copy back; returns the tensor in the same buffer."""
    return load().ops.tfswap_await(tensor=tensor, ticket=ticket, name=name)
