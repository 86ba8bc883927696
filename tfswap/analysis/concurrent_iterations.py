"""A bound of the memory that concurrent iterations of lowered loops hold."""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import control_flow, is_const, is_view

MOST_CONCURRENT = 10
"""TensorFlow's default of the most concurrent iterations of a loop."""


def overlapping_bytes(graph: Graph) -> int:
    """The most bytes that iterations of lowered loops hold while another iteration of the same loop runs.

    TensorFlow runs iterations concurrently that do not depend on each other, as far as there are threads.
    """
    return sum(_overlapping_bytes(node, bodies) for node, bodies in graph.bodies.items())


def _overlapping_bytes(node: Node, bodies: Sequence[Graph]) -> int:
    kind = control_flow(node.op)
    assert kind is not None
    if not kind.is_loop:
        return max(map(overlapping_bytes, bodies), default=0)
    most = node.attrs.get("parallel_iterations", MOST_CONCURRENT)
    others = most - 1 if isinstance(most, int) else MOST_CONCURRENT - 1
    feeds = set(bodies[1].feeds)
    made = (n for n in bodies[1] if n not in feeds and not is_view(n.op) and not is_const(n.op))
    each = sum(kind.nbytes or 0 for n in made for kind in n.outputs)
    return others * each + (others + 1) * overlapping_bytes(bodies[1])
