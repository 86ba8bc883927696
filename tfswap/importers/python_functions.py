"""Finds the calls whose gradients Python functions of a graph compute (`tf.py_function`)."""

from __future__ import annotations

import importlib
import inspect
from typing import Any


def token_of_tape(token: bytes) -> bytes | None:
    """The token of the call whose tape a function uses; None for functions that are no gradients, or are unknown.

    Args:
        token: TensorFlow's key of the function.
    """
    registry: Any = importlib.import_module("tensorflow.python.ops.script_ops")
    function = registry._py_funcs.get(token.decode())
    if not getattr(function, "_is_grad_func", False):
        return None
    held = inspect.getclosurevars(inspect.unwrap(function._func)).nonlocals.get("token")
    return held.encode() if isinstance(held, str) else held
