"""Refuses steps that do not train: without a backward pass, no tensor waits for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfswap.analysis.phases import is_gradient
from tfswap.compiler.tf1_variables import writes_reference
from tfswap.errors import UnsupportedGraph
from tfswap.importers.opaque_calls import opaque_calls
from tfswap.ir.custom_ops import OUTSIDE
from tfswap.ir.graph import Graph
from tfswap.ir.op_traits import reads_variable, writes_variable
from tfswap.ir.views import origin


def is_training(op: str, name: str) -> bool:
    """Whether a node of this type and name is of a backward pass, or updates variables."""
    return writes_variable(op) or writes_reference(op) or is_gradient(op, name)


def trains(graph: Graph) -> bool:
    """Whether the graph updates a variable or computes a gradient, or has its gradients taken outside."""
    if any(is_training(n.op, n.name) or n.op == OUTSIDE for g in (graph, *graph.all_bodies()) for n in g):
        return True
    return _returns_gradients(graph)


def _returns_gradients(graph: Graph) -> bool:
    """Whether a result has the shape of a variable that the step reads. The nodes of a backward pass written by hand
    have no names that identify them.
    """
    read = {n.outputs[0] for n in graph if reads_variable(n.op) and n.outputs and n.outputs[0].shape}
    return any(t.type in read and not reads_variable(origin(t).node.op) for t in graph.fetches)


def require_backward(step: str, graph: Graph, others: Callable[[], Sequence[str]] | None = None) -> None:
    """Raise UnsupportedGraph when the graph does not train.

    A graph with opaque calls, which may train, is refused elsewhere.

    Args:
        others: gives the names of a file's functions that train. None: the graph is not from a file.
    """
    if trains(graph) or any(opaque_calls(graph)):
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
