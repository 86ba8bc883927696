"""The order of one body of a loop or a conditional, and which of its kernels run concurrently."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from tfswap.analysis.cost import Costs
from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.target import Target
from tfswap.planner.groups import find_groups
from tfswap.planner.ordering import choose_order
from tfswap.planner.pairing import brought_together, gains, side_by_side
from tfswap.planner.problem import Choice


class BodyOrder(NamedTuple):
    """Kernels of a body, as numbers of its facts.

    Attributes:
        kernels: in the order in which they run.
        groups: of kernels that run concurrently, each in this order.
    """

    kernels: Sequence[int]
    groups: Sequence[Sequence[int]] = ()


def order_body(flow: Dataflow, target: Target, costs: Costs, *, grouped: bool = False) -> BodyOrder:
    """The order of the body with these facts.

    Args:
        grouped: whether kernels run in groups (planner/groups.py), and not in pairs.
    """
    cost_s = costs.of_step(flow)
    order = choose_order(flow, cost_s)
    if not target.runs_concurrently:
        return BodyOrder(order)
    unnamed = dataclasses.replace(flow, fetched=frozenset())  # results are identified by position
    order = brought_together(unnamed, order, cost_s, costs.rates, whole=flow, looped=True)
    if grouped:
        return BodyOrder(*find_groups(unnamed, order, cost_s, costs.rates))
    gain = gains(flow, cost_s, costs.rates, looped=True)
    at = side_by_side(unnamed, Choice(order, []), cost_s, gain, looped=True)
    return BodyOrder(order, [[order[p - 1], order[p]] for p in at])
