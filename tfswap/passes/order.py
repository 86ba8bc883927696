"""Puts an order into the graph: control edges that leave the executor one way to run the chain.

Requires: the chain agrees with the graph's own dependencies. Ensures: each node of the chain starts after the
one before it has ended. An edge is added only where no data or control edge says the same already.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.ir.graph import Graph, Node


def apply_order(graph: Graph, chain: Sequence[Node]) -> int:
    """Chain the nodes, in place, and make the last one a target; returns the number of edges added."""
    added = 0
    for before, node in zip(chain, chain[1:], strict=False):
        if not any(t.node is before for t in node.inputs):
            added += graph.add_control(node, before)
    if chain and chain[-1] not in graph.targets:
        graph.targets.append(chain[-1])
    return added
