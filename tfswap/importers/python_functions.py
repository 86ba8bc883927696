"""Which Python functions that a graph calls (`tf.py_function`) are gradients, and of which calls."""

from __future__ import annotations

import importlib
import inspect
from typing import Any


def asked_token(token: bytes) -> bytes | None:
    """The token of the call whose tape a function asks; None for a function that is no gradient, or not known here.

    Args:
        token: by which TensorFlow finds the function.
    """
    registry: Any = importlib.import_module("tensorflow.python.ops.script_ops")
    function = registry._py_funcs.get(token.decode())
    if not getattr(function, "_is_grad_func", False):
        return None
    held = inspect.getclosurevars(inspect.unwrap(function._func)).nonlocals.get("token")
    return held.encode() if isinstance(held, str) else held
