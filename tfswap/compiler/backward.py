"""Does a graph train at all? A step without a backward pass has nothing that waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfswap.analysis.phases import is_gradient
from tfswap.compiler.tf1_variables import writes_reference
from tfswap.errors import UnsupportedGraph
from tfswap.importers.opaque_calls import hidden_calls
from tfswap.ir.custom_ops import OUTSIDE
from tfswap.ir.graph import Graph
from tfswap.ir.op_traits import reads_variable, writes_variable
from tfswap.ir.views import origin


def is_training(op: str, name: str) -> bool:
    """Whether a node of this type and name is of a backward pass, or updates variables."""
    return writes_variable(op) or writes_reference(op) or is_gradient(op, name)


def trains(graph: Graph) -> bool:
    """Whether anything in the graph trains: an update, or a gradient, which may be one that is asked for outside."""
    if any(is_training(n.op, n.name) or n.op == OUTSIDE for g in (graph, *graph.all_bodies()) for n in g):
        return True
    return _returns_gradients(graph)


def _returns_gradients(graph: Graph) -> bool:
    """Whether a result is shaped as a variable that the step reads. A backward pass that is written by hand has no
    names that say it.
    """
    read = {n.outputs[0] for n in graph if reads_variable(n.op) and n.outputs and n.outputs[0].shape}
    return any(t.type in read and not reads_variable(origin(t).node.op) for t in graph.fetches)


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
        f"one and there is nothing to swap. {remedy} To serve a model in less memory, give portable=True."
    )
