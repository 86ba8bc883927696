"""Writes into a rewritten graph what host memory it takes and may take, for whoever runs it.

Requires: a graph that swaps, or none of this is of use. Ensures: one of its SwapOut nodes tells, and no other: the
kernel that is made of it reserves and claims (csrc/core/swap_kernels.cc).
"""

from __future__ import annotations

from tfswap.ir.graph import Graph
from tfswap.oplib.names import SWAP_OUT


def apply_claim(graph: Graph, owner: int, host_bytes: int, limit_bytes: int | None) -> bool:
    """Let the first SwapOut, of bodies too, reserve the step's host memory, in place; returns whether there is one.

    Args:
        owner: of the limit. Steps that share it have the same.
        host_bytes: that the plan takes.
        limit_bytes: that it may take; None for no limit.
    """
    for node in (node for part in (graph, *graph.all_bodies()) for node in part):
        if node.op == SWAP_OUT:
            limit = -1 if limit_bytes is None else limit_bytes
            node.attrs = {**node.attrs, "owner": owner, "step_bytes": host_bytes, "step_limit": limit}
            return True
    return False
