"""Schedules of tfswap's planner, and of checkpoints, for published graphs: recomputation alone, on one thread."""

from __future__ import annotations

from collections.abc import Sequence

from instances.graphs import UNIT_BYTES, Instance
from tfswap.analysis.cost import Costs
from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import Rates
from tfswap.kernels.target import Target
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.ordering import rank_orders
from tfswap.planner.planner import Planner
from tfswap.planner.problem import Choice
from tfswap.planner.solvers import published
from tfswap.planner.step_orders import StepOrders

ONE_THREAD = DeviceModel()
BISECTIONS = 6


class _OneOrder(StepOrders):
    """One order, in place of those that tfswap would try."""

    def __init__(self, flow: Dataflow, cost_s: Sequence[float], rates: Rates, order: Sequence[int]):
        super().__init__(flow, cost_s, rates)
        self.ranked = [list(order)]
        self.lower = []


def ladders(instance: Instance, budget: int) -> list[int] | None:
    """The fastest schedule of the default solvers in the given order that keeps a budget; None where there is none."""
    return _fastest(instance, [_planner(instance)], budget)


def search(instance: Instance, budget: int) -> list[int] | None:
    """As `ladders`, by the search over reruns."""
    return _fastest(instance, [_planner(instance, "search")], budget)


def own_orders(instance: Instance, budget: int) -> list[int] | None:
    """As `search`, in each of the orders that tfswap makes of the given one."""
    orders = rank_orders(instance.flow(), instance.cost_s)
    return _fastest(instance, [_planner(instance, "search", order) for order in orders], budget)


def lowest(instance: Instance) -> int:
    """The lowest budget that the search is found to meet in the given order, by bisection."""
    met, unmet = -(-_planner(instance).live_floor_bytes // UNIT_BYTES), instance.floor - 1
    for _ in range(BISECTIONS):
        middle = (met + unmet) // 2
        order = search(instance, middle) if unmet < middle < met else None
        met, unmet = (met, middle) if order is None else (instance.peak_of(order), unmet)
    return met


def checkpoints(instance: Instance, budget: int) -> list[int] | None:
    """The schedule of checkpoints every sqrt(n) layers that keeps a budget, in the given order."""
    problem = _planner(instance).problems[0]
    choice = published.sqrt(problem, LiveTarget(budget * UNIT_BYTES))
    return None if choice is None else [instance.order[i] for i in choice.order]


def _planner(instance: Instance, solver: str = "default", order: Sequence[int] | None = None) -> Planner:
    flow, costs, cost_s = instance.flow(), Costs.of(ONE_THREAD), instance.cost_s
    orders = _OneOrder(flow, cost_s, costs.rates, range(len(cost_s)) if order is None else order)
    target = Target(ONE_THREAD)
    return Planner(flow, target, tactics=("recompute",), solver=solver, costs=costs, cost_s=cost_s, orders=orders)


def _fastest(instance: Instance, planners: Sequence[Planner], budget: int) -> list[int] | None:
    """The fastest choice of all ladders for this very target."""
    choices: list[Choice] = []
    for planner in planners:
        problem = planner.problems[0]
        if problem.live_peak_bytes <= budget * UNIT_BYTES:
            choices.append(Choice(problem.order, []))
            continue
        found = (ladder.choice(budget * UNIT_BYTES) for ladder in planner.ladders)
        choices += (choice for choice in found if choice is not None)
    orders = [[instance.order[i] for i in choice.order] for choice in choices]
    return min(orders, key=instance.extra_time, default=None)
