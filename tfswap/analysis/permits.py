"""What a user allows to be done to tensors that stand for others, and to values.

A graph says it of tensors that a user can name (`Graph.permits`). Their views, their encodings, what is decoded of
these, and what comes back from the host are the same tensor to the user.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfswap.ir.custom_ops import SWAP_IN
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import decodes, encodes
from tfswap.ir.permits import ANYTHING, Permit
from tfswap.ir.views import origin


def permit_of(graph: Graph, tensor: Output) -> Permit:
    """What may be done to a tensor of `graph`."""
    while tensor not in graph.permits and (other := _stands_for(tensor)) is not None:
        tensor = other
    return graph.permits.get(tensor, ANYTHING)


def _stands_for(tensor: Output) -> Output | None:
    """Of which other tensor it is another form, if it is."""
    viewed, op = origin(tensor), tensor.node.op
    if viewed != tensor:
        return viewed
    return tensor.node.inputs[0] if encodes(op) or decodes(op) or op == SWAP_IN else None


def permits_of_values(graph: Graph, value_of: Mapping[tuple[Node, int], int]) -> dict[int, Permit]:
    """By value, what may be done to it: what all tensors that hold it allow. Those that allow anything are left out."""
    found: dict[int, Permit] = {}
    for (node, index), v in value_of.items() if graph.permits else ():
        permit = permit_of(graph, node.out(index))
        if permit is not ANYTHING:
            found[v] = found.get(v, ANYTHING) & permit
    return found
