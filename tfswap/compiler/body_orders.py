"""Orders the bodies of a step: the planner chooses each order, and the pass puts it into the body."""

from __future__ import annotations

import functools

from tfswap.analysis.cost import Costs
from tfswap.ir.graph import Graph
from tfswap.kernels.device import DeviceModel
from tfswap.passes.tactics.order_bodies import apply_bodies
from tfswap.planner.body_order import order_body


def order_bodies(
    graph: Graph, device: DeviceModel, *, portable: bool = False, grouped: bool = False
) -> list[list[str]]:
    """Order the bodies of `graph`, in place, and theirs; returns each one's order, as `Graph.all_bodies` has them.

    Args:
        portable: with TensorFlow's own ops alone.
        grouped: whether kernels run in groups, and not in pairs.
    """
    costs = Costs.of(device)
    choose = functools.partial(order_body, device=device, costs=costs, portable=portable, grouped=grouped)
    return apply_bodies(graph, device, choose, portable=portable)
