"""Gives loops and conditionals more variables, arguments and results."""

from __future__ import annotations

from typing import cast

from tfswap.ir.graph import Dims, Dtype, Graph, Node, Output
from tfswap.ir.types import TensorType

FEED = "Placeholder"


def add_feed(graph: Graph, stem: str, kind: TensorType) -> Node:
    """A node for an argument. The caller adds it to the feeds."""
    return graph.add(FEED, graph.unique_name(stem), attrs={"dtype": Dtype(kind.dtype)}, outputs=(kind,))


def add_argument(graph: Graph, node: Node, stem: str, tensor: Output) -> int:
    """Pass `tensor` to all bodies of `node`, in place; returns the number of the argument.

    In a loop it is a loop variable, whose next value the caller adds to the results of the body.
    """
    bodies = graph.bodies[node]
    for body in bodies:
        body.feeds.append(add_feed(body, stem, tensor.type))
    node.inputs = (*node.inputs, tensor)
    return len(bodies[0].feeds) - 1


def add_result(node: Node, kind: TensorType, types: str) -> None:
    """Give `node` a result, in place, which the caller adds to the results of its bodies.

    Args:
        types: the attribute with the types of its results.
    """
    node.outputs = (*node.outputs, kind)
    add_item(node, types, Dtype(kind.dtype))
    if node.attrs.get("output_shapes"):
        add_item(node, "output_shapes", None if kind.shape is None else Dims(kind.shape))


def add_item(node: Node, name: str, value: object) -> None:
    """Append `value` to a list-valued attribute, in place."""
    node.attrs = {**node.attrs, name: (*cast("tuple[object, ...]", node.attrs.get(name, ())), value)}
