"""From a plan and the form of the step that it is for to the graph that carries it out."""

from __future__ import annotations

from tfswap.compiler.planned_form import PlannedForm
from tfswap.ir.graph import Graph
from tfswap.kernels.device import DeviceModel
from tfswap.passes.device_carriers import apply_carriers
from tfswap.passes.order import apply_order
from tfswap.passes.prepare.collective_order import expand_together
from tfswap.passes.prepare.onednn_fusion import keep_apart, tell_shapes
from tfswap.passes.prepare.pool_argmax import keep_unpaired
from tfswap.passes.tactics.pair_kernels import join_in_bodies
from tfswap.passes.tactics.swap import apply_swaps
from tfswap.passes.verify import require_stock, verify


def lower(form: PlannedForm, traced: Graph, device: DeviceModel, *, portable: bool, gate: int | None = None) -> Graph:
    """A new graph that carries out a plan.

    Args:
        form: the plan, and the form of the step that it is for.
        traced: the step as it was given.
        device: where it runs.
        portable: with TensorFlow's own ops alone.
        gate: the key of the gate that the step waits for, if any.
    """
    made = form.variant.graph.copy()
    chain = apply_swaps(made, form.variant.flow, form.plan, portable=portable)
    apply_order(made, chain, gate)
    expand_together(made)
    apply_carriers(made)
    join_in_bodies(made, device)
    if not portable:
        keep_unpaired(made, traced, device)
        keep_apart(made, device)
        tell_shapes(made)
    made.prune()
    verify(made)
    if portable:
        require_stock(made)
    return made
