"""Puts an order into the graph: control edges with which the executor can run the chain in one order only.

Requires: the chain agrees with the graph's own dependencies. Ensures: each node of the chain starts after the
one before it has ended, and no node with effects runs before the gate. An edge is added only where no data or control
edge implies it, or where it keeps oneDNN from fusing kernels with others between them, which would make a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import acts, is_joined
from tfswap.passes.device_carriers import sharing
from tfswap.passes.nodes import add_gate


def chain_nodes(graph: Graph, chain: Sequence[Node], gate: int | None = None) -> int:
    """Chain the nodes, in place, and make the last one a target; returns the number of edges added.

    Args:
        gate: put this gate before the chain, and before all other nodes with effects.
    """
    added = 0
    if gate is not None:
        others = [node for node in graph if acts(node.op)]
        first, *further = sharing(graph) or ("",)
        chain = [add_gate(graph, gate, first), *chain]
        # One on each device, which sees the functions of that device's kernels.
        gates = [add_gate(graph, gate + i, device) for i, device in enumerate(further, 1)]
        for each in gates:
            graph.add_control(chain[0], each)
        placed = {*chain, *gates}
        added += sum(graph.add_control(node, chain[0]) for node in others if node not in placed)
    for before, node in pairwise(chain):
        if is_joined(node.op) or not any(t.node is before for t in node.inputs):
            added += graph.add_control(node, before)
    if chain and chain[-1] not in graph.targets:
        graph.targets.append(chain[-1])
    return added
