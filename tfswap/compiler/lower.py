"""From a plan and the form of the step that it is for to the graph that carries it out: a table of passes."""

from __future__ import annotations

from tfswap.compiler.planned_form import PlannedForm
from tfswap.ir.graph import Graph
from tfswap.passes.contract import Row, Target, always, apply_table, own_ops
from tfswap.passes.device_carriers import carry_between_devices
from tfswap.passes.prepare.collective_order import expand_collectives
from tfswap.passes.prepare.onednn_fusion import hide_padded_shapes, keep_unfused
from tfswap.passes.prepare.pool_argmax import keep_gradients_unpaired
from tfswap.passes.tactics.pair_kernels import join_groups
from tfswap.passes.tactics.swap import carry_out
from tfswap.passes.verify import require_stock, verify

ORDERED = (
    Row(expand_collectives, always, "each member takes the place of its group's kernel in the order"),
    Row(carry_between_devices, always, "members of groups are on their devices again"),
    Row(join_groups, always, "bodies have their final kernels"),
)
"""Applied once the step has its order."""

FINISH = (
    Row(keep_unfused, own_ops, "the order may have given the same control inputs to nodes that were planned as two"),
    Row(hide_padded_shapes, own_ops, "last, since readers no longer see the shapes that other passes go by"),
)


def lower(form: PlannedForm, traced: Graph, target: Target, gate: int | None = None) -> Graph:
    """A new graph that carries out a plan.

    Args:
        form: the plan, and the form of the step that it is for.
        traced: the step as it was given.
        gate: the key of the gate that the step waits for, if any.
    """
    made = form.variant.graph.copy()
    carry_out(made, target, form.variant.flow, form.plan, gate)
    apply_table(ORDERED, made, target)
    if target.own_ops:
        keep_gradients_unpaired(made, target, traced)
    apply_table(FINISH, made, target)
    made.prune()
    verify(made)
    if target.portable:
        require_stock(made)
    return made
