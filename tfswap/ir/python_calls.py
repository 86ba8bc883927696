"""Python functions that a step calls (`tf.py_function`), and the tensors that they hold.

Such a function runs under a tape of its own, which holds its arguments and results until the gradient is computed. The
gradient is another call, whose function uses that tape (script_ops.py, `_EagerPyFuncGrad`).
"""

from __future__ import annotations

from tfswap.ir.graph import Node, Output

CALL = "EagerPyFunc"

TOKEN = "token"
"""The attribute of all ops that call Python with the key of the function in this process."""

ASKS = "_tfswap_asks"
"""The attribute of a call that computes a gradient with the token of the call whose tape it uses."""


def differentiated(node: Node) -> Node | None:
    """The call whose gradient a node computes; None for other nodes, and for functions that this process lacks."""
    token = node.attrs.get(ASKS)
    return None if token is None else next((c for c in node.controls if c.attrs.get(TOKEN) == token), None)


def held_until(node: Node) -> list[Output]:
    """The tensors that a tape holds until a node has run."""
    call = differentiated(node)
    return [] if call is None else [*call.inputs, *(call.out(i) for i in range(len(call.outputs)))]
