"""Keeps the state of a step's random ops when the step is planned again.

Ensures: each op whose kernel keeps a generator's state runs the kernel that shares the state between all plans of the
same trace (csrc/core/random_ops.cc). A number identifies the op among all ops of that trace, in bodies too.

Not handled: GPUs, where the random numbers of each plan start from the seed; steps that run as they were traced.
"""

from __future__ import annotations

from tfswap.ir.custom_ops import DRAWS, KERNEL, OWN_KERNEL, STATE_OWNER, STATE_PLACE
from tfswap.ir.graph import Graph
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass


@graph_pass(
    ensures="random ops continue the sequences of an earlier plan of the same trace",
)
def share_random_state(graph: Graph, target: Target, owner: int, trace: str) -> int:
    """Mark the random ops of `graph`, in place; returns how many there are.

    Args:
        owner: the number of the states' owner, with which they end.
        trace: identifies the trace among the owner's.
    """
    marked = 0
    for node in graph:
        place = f"{trace}/{node.name}"
        if node.op in DRAWS:
            shared = {KERNEL: OWN_KERNEL.encode(), STATE_OWNER: owner, STATE_PLACE: place.encode()}
            node.attrs = {**node.attrs, **shared}
            marked += 1
        for i, body in enumerate(graph.bodies.get(node, ())):
            marked += share_random_state.apply(body, target, owner, f"{place}/{i}")
    return marked
