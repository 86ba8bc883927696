"""Python functions that a step calls (`tf.py_function`), and the tensors that they hold.

Such a function runs under a tape of its own, which holds its arguments and results until the gradient is computed. The
gradient is another call, whose function uses that tape (script_ops.py, `_EagerPyFuncGrad`).
"""

from __future__ import annotations

from tfswap.ir.graph import Graph, Node, Output
from tfswap.support.reach import reach

CALL = "EagerPyFunc"

TOKEN = "token"
"""The attribute of all ops that call Python with the key of the function in this process."""


def connect_gradients(graph: Graph) -> None:
    """Have each call that computes a gradient wait for the call whose gradient it is, in place.

    It runs after that call in any case, but without this edge where a path by way of other nodes orders the two.
    """
    tokens = {node.attrs.get(TOKEN) for node in graph if node.op == CALL}
    for node in graph:
        if node.tape is not None and node.tape in tokens and differentiated(node) is None:
            before = reach([node], lambda n: [*n.controls, *(tensor.node for tensor in n.inputs)])
            call = next((n for n in before if n.attrs.get(TOKEN) == node.tape), None)
            if call is not None:
                graph.add_control(node, call)


def differentiated(node: Node) -> Node | None:
    """The call whose gradient a node computes; None for other nodes, and for functions that this process lacks.

    Requires: `connect_gradients`.
    """
    if node.tape is None:
        return None
    return next((call for call in node.controls if call.attrs.get(TOKEN) == node.tape), None)


def held_until(node: Node) -> list[Output]:
    """The tensors that a tape holds until a node has run."""
    call = differentiated(node)
    return [] if call is None else [*call.inputs, *(call.out(i) for i in range(len(call.outputs)))]
