"""Does a graph train at all? A step without a backward pass has nothing that waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfswap.errors import UnsupportedGraph
from tfswap.frontends.graph_variables import writes_reference
from tfswap.importers.hidden import hidden_calls
from tfswap.ir.graph import Graph
from tfswap.ir.ops import is_view, writes_variable
from tfswap.oplib.names import OUTSIDE

BACKWARD_MARKS = ("Grad", "Backprop")
"""Parts of the names of kernels that only a backward pass has."""


def is_training(op: str) -> bool:
    """Whether kernels of this type are of a backward pass, or update variables."""
    if is_view(op):  # StopGradient
        return False
    return writes_variable(op) or writes_reference(op) or any(mark in op for mark in BACKWARD_MARKS)


def trains(graph: Graph) -> bool:
    """Whether anything in the graph trains: an update, or a gradient, which may be one that is asked for outside."""
    return any(is_training(n.op) or n.op == OUTSIDE for g in (graph, *graph.all_bodies()) for n in g)


def require_backward(step: str, graph: Graph, others: Callable[[], Sequence[str]] | None = None) -> None:
    """Raise UnsupportedGraph when nothing in the graph trains.

    What runs functions out of sight may train there, and is refused for that.

    Args:
        others: where the graph is a function of a file, names of those functions that train.
    """
    if trains(graph) or any(hidden_calls(graph)):
        return
    if others is None:
        remedy = "Name the function that trains, or fetch its update ops too."
    elif names := others():
        remedy = f"Of the file's functions these train: {', '.join(map(repr, names))}."
    else:
        remedy = "None of the file's functions trains: save an object that holds one that does."
    raise UnsupportedGraph(
        f"{step!r} has no backward pass: it updates no variable and computes no gradient, so no tensor waits for "
        f"one and there is nothing to swap. {remedy}"
    )
