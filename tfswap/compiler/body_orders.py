"""Orders the bodies of a step: the planner chooses each order, and the pass puts it into the body."""

from __future__ import annotations

import functools

from tfswap.analysis.cost import Costs
from tfswap.ir.graph import Graph
from tfswap.passes.contract import Target
from tfswap.passes.tactics.order_bodies import order_bodies
from tfswap.planner.body_order import order_body


def choose_body_orders(graph: Graph, target: Target, *, grouped: bool = False) -> int:
    """Order the bodies of `graph`, in place, and theirs; returns how many there are.

    Args:
        grouped: whether kernels run in groups, and not in pairs.
    """
    device = target.device
    choose = functools.partial(
        order_body, device=device, costs=Costs.of(device), portable=target.portable, grouped=grouped
    )
    return order_bodies(graph, target, choose)
