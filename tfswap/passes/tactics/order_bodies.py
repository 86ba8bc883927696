"""Gives every body of a loop or a conditional an order of its own, so that what it asks of the allocator is known.

Ensures: the kernels of each body form one chain, as those of the step do (passes/order.py); variables that a body
assigns keep their buffers. Kernels that would leave cores idle alone are next to each other, and the body says which
(`Graph.beside`).
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

from tfswap.analysis.cost import Costs
from tfswap.analysis.dataflow import analyse_body
from tfswap.ir.graph import Graph
from tfswap.kernels.device import DeviceModel
from tfswap.passes.nodes import add_gate
from tfswap.passes.order import apply_order
from tfswap.passes.prepare.assign_in_place import apply_settle
from tfswap.passes.prepare.common_subexpressions import apply_share
from tfswap.passes.prepare.defer_constants import apply_defer
from tfswap.passes.prepare.split_identity_n import apply_split_views
from tfswap.planner.groups import find_groups
from tfswap.planner.ordering import choose_order
from tfswap.planner.pairing import brought_together, gains, runs_beside, side_by_side
from tfswap.planner.problem import Choice


def apply_bodies(
    graph: Graph, device: DeviceModel, *, portable: bool = False, grouped: bool = False
) -> list[list[str]]:
    """Order the bodies of `graph`, in place, and theirs; returns each one's order, as `Graph.all_bodies` has them.

    Args:
        portable: with TensorFlow's own ops alone.
        grouped: whether kernels run in groups, and not in pairs.
    """
    chains: list[list[str]] = []
    costs = Costs.of(device)
    for body in graph.all_bodies():
        apply_split_views(body)
        if not portable:
            apply_settle(body)
            apply_defer(body, device, body=True)
        apply_share(body)
        body.prune()
        # How often an inner loop runs can depend on the outer one: here its order is asked for, not its bound.
        flow = analyse_body(body, device)
        cost_s = costs.of_step(flow)
        order = choose_order(flow, cost_s)
        unnamed = dataclasses.replace(flow, fetched=frozenset())  # results are known by their places
        if runs_beside(device) and not portable:
            order = brought_together(unnamed, order, cost_s, costs.rates, whole=flow, looped=True)
            if grouped:
                order, groups = find_groups(unnamed, order, cost_s, costs.rates)
            else:
                gain = gains(flow, cost_s, costs.rates, looped=True)
                at = side_by_side(unnamed, Choice(order, []), cost_s, gain, looped=True)
                groups = [[order[p - 1], order[p]] for p in at]
            pairs = (pair for group in groups for pair in pairwise(group))
            body.beside = {flow.nodes[first]: flow.nodes[second] for first, second in pairs}
        chain = [flow.nodes[i] for i in order]
        if body.bodies and not portable:  # a gate, always open, makes them with this body's own kernels
            chain.insert(0, add_gate(body, 0))
        apply_order(body, chain)
        chains.append([node.name for node in chain])
    return chains
