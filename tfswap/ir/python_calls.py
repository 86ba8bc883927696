"""Python functions that a step calls (`tf.py_function`), and the tensors that they hold.

Such a function runs under a tape of its own, which holds its arguments and results until the gradient is computed. The
gradient is another call, whose function uses that tape (script_ops.py, `_EagerPyFuncGrad`).
"""

from __future__ import annotations

from tfswap.ir.graph import Node, Output

CALL = "EagerPyFunc"

TOKEN = "token"
"""The attribute of all ops that call Python with the key of the function in this process."""


def differentiated(node: Node) -> Node | None:
    """The call whose gradient a node computes; None for other nodes, and for functions that this process lacks."""
    if node.tape is None:
        return None
    return next((call for call in node.controls if call.attrs.get(TOKEN) == node.tape), None)


def held_until(node: Node) -> list[Output]:
    """The tensors that a tape holds until a node has run."""
    call = differentiated(node)
    return [] if call is None else [*call.inputs, *(call.out(i) for i in range(len(call.outputs)))]
