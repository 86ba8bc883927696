"""Orders the bodies of a step: the planner chooses each order, and the pass puts it into the body."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tfswap.analysis.cost import Costs
from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.graph import Graph
from tfswap.kernels.target import Target
from tfswap.passes.tactics.order_bodies import order_bodies
from tfswap.planner.body_order import BodyOrder, order_body


def body_order_chooser(target: Target, *, grouped: bool = False) -> Callable[[Dataflow], BodyOrder]:
    """From the facts of a body to its order, for `target`.

    Args:
        grouped: whether kernels run in groups, and not in pairs.
    """
    return functools.partial(order_body, target=target, costs=Costs.of(target.device), grouped=grouped)


def choose_body_orders(graph: Graph, target: Target, *, grouped: bool = False) -> int:
    """Order the bodies of `graph`, in place, and theirs; returns how many there are.

    Args:
        grouped: as of `body_order_chooser`.
    """
    return order_bodies(graph, target, body_order_chooser(target, grouped=grouped))
