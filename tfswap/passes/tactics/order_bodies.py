"""Gives every body of a loop or a conditional an order, so that its requests are known.

Ensures: the kernels of each body form one chain, as those of the step do (passes/order.py); variables that a body
assigns keep their buffers. Kernels that would leave cores idle are adjacent pairs, which the body lists
(`Graph.paired`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from tfswap.analysis.analyse import analyse_body
from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.graph import Graph
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import add_gate
from tfswap.passes.order import chain_nodes
from tfswap.passes.prepare.assign_in_place import assign_in_place
from tfswap.passes.prepare.common_subexpressions import merge_equal_nodes
from tfswap.passes.prepare.defer_constants import defer_constants
from tfswap.passes.prepare.split_identity_n import split_identity_n

Chosen = tuple[Sequence[int], Sequence[Sequence[int]]]
"""The order of a body's kernels, and the groups of those that run concurrently."""


@graph_pass(
    requires="bodies without an order",
    ensures="the kernels of each body form one chain (`Graph.order`), and groups in it are marked (`Graph.paired`)",
)
def order_bodies(graph: Graph, target: Target, choose: Callable[[Dataflow], Chosen]) -> int:
    """Order the bodies of `graph`, in place, and theirs; returns how many there are.

    Args:
        choose: gives the order of a body with such facts (planner/body_order.py).
    """
    count = 0
    for body in graph.all_bodies():
        split_identity_n(body, target)
        if target.own_ops:
            assign_in_place(body, target)
            defer_constants(body, target, body=True)
        merge_equal_nodes(body, target)
        body.prune()
        # An inner loop's number of iterations can depend on the outer one: only its order is needed here, not a bound.
        flow = analyse_body(body, target.device)
        order, groups = choose(flow)
        pairs = (pair for group in groups for pair in pairwise(group))
        body.paired = {flow.nodes[first]: flow.nodes[second] for first, second in pairs}
        chain = [flow.nodes[i] for i in order]
        if body.bodies and target.own_ops:  # a gate, always open, makes them with this body's own kernels
            chain.insert(0, add_gate(body, 0))
        chain_nodes(body, chain)
        body.order = tuple(node.name for node in chain)
        count += 1
    return count
