"""Conditions of loops that the body can compute too: on its results, to know whether an iteration is the last one."""

from __future__ import annotations

from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import calls_functions, is_pure
from tfswap.ir.types import TensorType

SMALL_BYTES = 256
"""The most bytes of a tensor that is read or computed. Larger ones cost time, or memory near the peak."""


def repeatable_condition(condition: Graph) -> list[Node] | None:
    """The nodes that compute a loop's condition, arguments included, in topological order.

    None where a second run would cost much, have an effect or give another value.
    """
    decides = condition.fetches[0]
    if decides.type.dtype != "bool" or decides.type.shape != ():
        return None
    needed = condition.needed([decides.node])
    nodes = [node for node in condition.topological() if node in needed]
    feeds = set(condition.feeds)
    return nodes if all(_is_small(node) and (node in feeds or _is_repeatable(node)) for node in nodes) else None


def next_arguments(condition: Graph, body: Graph) -> dict[Node, Node]:
    """By argument that the condition reads, the node of the body that gives its next value."""
    needed = condition.needed([condition.fetches[0].node])
    results = zip(condition.feeds, body.fetches, strict=True)
    return {feed: result.node for feed, result in results if feed in needed}


def _is_repeatable(node: Node) -> bool:
    return is_pure(node.op) and not calls_functions(node.op)


def _is_small(node: Node) -> bool:
    return all(map(_has_few_bytes, node.outputs))


def _has_few_bytes(kind: TensorType) -> bool:
    return kind.nbytes is not None and 0 < kind.nbytes <= SMALL_BYTES
