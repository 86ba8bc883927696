"""From a plan and the form of the step that it is for to the graph that carries it out."""

from __future__ import annotations

from tfswap.analysis.device import DeviceModel
from tfswap.frontends.planned_form import PlannedForm
from tfswap.ir.graph import Graph
from tfswap.passes.beside import join_in_bodies
from tfswap.passes.collectives import expand_together
from tfswap.passes.devices import apply_carriers
from tfswap.passes.join import keep_apart, tell_shapes
from tfswap.passes.order import apply_order
from tfswap.passes.pool_places import keep_unpaired
from tfswap.passes.swap import apply_swaps
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
