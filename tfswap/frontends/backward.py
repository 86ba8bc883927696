"""Does a graph train at all? A step without a backward pass has nothing that waits."""

from __future__ import annotations

from tfswap.errors import UnsupportedGraph
from tfswap.frontends.ref_variables import writes_reference
from tfswap.ir.graph import Graph
from tfswap.ir.ops import writes_variable

BACKWARD_MARKS = ("Grad", "Backprop")
"""Parts of the names of kernels that only a backward pass has."""


def require_backward(step: str, graph: Graph) -> None:
    """Raise UnsupportedGraph when nothing in the graph trains: no update and no gradient."""
    nodes = [n for g in (graph, *graph.all_bodies()) for n in g]
    if any(writes_variable(n.op) or writes_reference(n.op) for n in nodes):
        return
    if any(mark in n.op for n in nodes for mark in BACKWARD_MARKS):
        return
    raise UnsupportedGraph(
        f"{step!r} has no backward pass: it updates no variable and computes no gradient, so no tensor waits for "
        "one and there is nothing to swap. Name the function that trains, and fetch its update ops."
    )
