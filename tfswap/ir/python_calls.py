"""Python functions that a step calls (`tf.py_function`), and what they hold.

Such a function runs under a tape of its own, which keeps what it was given and what it returned until its gradient
runs: another call, of a function that asks the tape (script_ops.py, `_EagerPyFuncGrad`).
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from tfswap.ir.graph import Node, Output

CALL = "EagerPyFunc"


def differentiated(node: Node) -> Node | None:
    """The call whose gradient a node computes; None for other nodes, and where its function is not of this process."""
    token = _asked_token(node) if node.op == CALL else None
    calls = (c for c in node.controls if c.op == CALL and _token(c) == token)
    return None if token is None else next(calls, None)


def _token(node: Node) -> str:
    """By which TensorFlow finds a call's function."""
    return _text(node.attrs.get("token"))


def _asked_token(node: Node) -> str | None:
    """The token of the function whose tape a gradient's function asks; None for a function that is no gradient."""
    registry: Any = importlib.import_module("tensorflow.python.ops.script_ops")
    function = registry._py_funcs.get(_token(node))
    if not getattr(function, "_is_grad_func", False):
        return None
    held = inspect.getclosurevars(inspect.unwrap(function._func)).nonlocals
    return _text(held["token"]) if "token" in held else None


def _text(token: object) -> str:
    return token.decode() if isinstance(token, bytes) else str(token)


def held_until(node: Node) -> list[Output]:
    """The tensors that are held until a node has run, besides those that it reads."""
    call = differentiated(node)
    return [] if call is None else [*call.inputs, *(call.out(i) for i in range(len(call.outputs)))]
