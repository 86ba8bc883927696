"""Python functions that a step calls (`tf.py_function`), and what they hold.

Such a function runs under a tape of its own, which keeps what it was given and what it returned until its gradient
runs: another call, of a function that asks the tape (script_ops.py, `_EagerPyFuncGrad`).
"""

from __future__ import annotations

from tfswap.ir.graph import Node, Output

CALL = "EagerPyFunc"

TOKEN = "token"
"""Attribute of all ops that call Python: by which the process finds the function."""

ASKS = "_tfswap_asks"
"""Attribute of a call that computes a gradient: the token of the call whose tape it asks."""


def differentiated(node: Node) -> Node | None:
    """The call whose gradient a node computes; None for other nodes, and where its function is not of this process."""
    token = node.attrs.get(ASKS)
    return None if token is None else next((c for c in node.controls if c.attrs.get(TOKEN) == token), None)


def held_until(node: Node) -> list[Output]:
    """The tensors that are held until a node has run, besides those that it reads."""
    call = differentiated(node)
    return [] if call is None else [*call.inputs, *(call.out(i) for i in range(len(call.outputs)))]
