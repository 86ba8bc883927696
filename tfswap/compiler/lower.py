"""From a plan and the form of the step that it is for to the graph that carries it out: a table of passes."""

from __future__ import annotations

from typing import Any, NamedTuple

from tfswap.analysis.dataflow import Dataflow
from tfswap.compiler.planned_form import PlannedForm
from tfswap.ir.graph import Graph
from tfswap.kernels.target import Target
from tfswap.passes.contract import Pass, PlanRow, apply_plan_table
from tfswap.passes.device_carriers import carry_between_devices
from tfswap.passes.prepare.collective_order import expand_collectives
from tfswap.passes.prepare.onednn_fusion import hide_padded_shapes, keep_unfused
from tfswap.passes.prepare.pool_argmax import keep_gradients_unpaired
from tfswap.passes.tactics.limit_check import write_limit
from tfswap.passes.tactics.pair_kernels import join_groups
from tfswap.passes.tactics.state_homes import move_before
from tfswap.passes.tactics.swap import carry_out
from tfswap.passes.verify import require_stock, verify
from tfswap.plan.plan import Plan

ALWAYS_OPEN = 0
"""The number of a file's gates, which no process closes."""


class Lowering(NamedTuple):
    """Arguments of the passes of `LOWER`.

    Attributes:
        plan: the plan, which fixes an order.
        flow: the facts of the graph before these passes.
        target: of the graph.
        traced: the step as it was given.
        gate: the key of the gate that the step waits for, if any.
    """

    plan: Plan
    flow: Dataflow
    target: Target
    traced: Graph
    gate: int | None = None


def _always(apply: Pass[[]], reason: str) -> PlanRow[Lowering]:
    return PlanRow(apply, lambda _, __: (), reason)


def _with_own_ops(apply: Pass[...], reason: str, *more: str) -> PlanRow[Lowering]:
    """A pass for graphs that may have tfswap's own ops; it also gets these fields of Lowering."""

    def arguments(lowering: Lowering, _: Graph) -> tuple[Any, ...] | None:
        return tuple(getattr(lowering, name) for name in more) if lowering.target.own_ops else None

    return PlanRow(apply, arguments, reason)


LOWER: tuple[PlanRow[Lowering], ...] = (
    PlanRow(
        carry_out,
        lambda lowering, _: (lowering.flow, lowering.plan, lowering.gate),
        "the graph is the one that the plan names",
    ),
    _always(expand_collectives, "each member takes the place of its group's kernel in the order"),
    _always(carry_between_devices, "members of groups are on their devices again"),
    _always(join_groups, "bodies have their final kernels"),
    _with_own_ops(keep_gradients_unpaired, "copies stand between poolings and their gradients", "traced"),
    _with_own_ops(keep_unfused, "the order may have given the same control inputs to nodes that were planned as two"),
    _with_own_ops(hide_padded_shapes, "last, since readers then no longer have the shapes that other passes use"),
)


def lower(form: PlannedForm, traced: Graph, target: Target, gate: int | None = None) -> Graph:
    """A new graph that carries out a plan.

    Args:
        form: the plan, and the form of the step that it is for.
        traced: the step as it was given.
        gate: the key of the gate that the step waits for, if any.
    """
    made = form.variant.graph.copy()
    apply_plan_table(LOWER, made, target, Lowering(form.plan, form.variant.flow, target, traced, gate))
    made.prune()
    verify(made)
    if not target.own_ops:
        require_stock(made)
    return made


def prepare_in_gate(made: Graph, form: PlannedForm, target: Target, gate: int | None) -> None:
    """Have a lowered step do before it begins what Python does elsewhere, in place: move variables home, and check the
    limit. A file's step also checks with how much in the arena it begins: planning did not know that.
    """
    limit_bytes = form.plan.limit_bytes
    if form.plan.at_home:
        move_before(made, target, limit_bytes or 0 if gate == ALWAYS_OPEN else 0)
    if limit_bytes is not None:
        write_limit(made, target, limit_bytes, form.requests_of_one())
