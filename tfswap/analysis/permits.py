"""The permits of values, and of tensors that are forms of other tensors.

`Graph.permits` has the permits of tensors that a user can name. They also hold for a tensor's views, its encodings, its
decoded copy, and its copy from the host.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfswap.ir.custom_ops import SWAP_IN
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import decodes, encodes
from tfswap.ir.permits import ANYTHING, Permit
from tfswap.ir.views import origin


def permit_of(graph: Graph, tensor: Output) -> Permit:
    """The permit of a tensor of `graph`."""
    while tensor not in graph.permits and (other := _stands_for(tensor)) is not None:
        tensor = other
    return graph.permits.get(tensor, ANYTHING)


def _stands_for(tensor: Output) -> Output | None:
    """The tensor that this one is a view, an encoding, a decoded copy or a copy from the host of; None for others."""
    viewed, op = origin(tensor), tensor.node.op
    if viewed != tensor:
        return viewed
    return tensor.node.inputs[0] if encodes(op) or decodes(op) or op == SWAP_IN else None


def permits_of_values(graph: Graph, value_of: Mapping[tuple[Node, int], int]) -> dict[int, Permit]:
    """The permits of values: tactics that all tensors of the value allow. Values without restrictions are left out."""
    found: dict[int, Permit] = {}
    for (node, index), v in value_of.items() if graph.permits else ():
        permit = permit_of(graph, node.out(index))
        if permit is not ANYTHING:
            found[v] = found.get(v, ANYTHING) & permit
    return found
