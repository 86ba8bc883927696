"""How far a plan of a step can be from the best one: what `planner/certificate.py` needs to know of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfswap.analysis.dataflow import PERSISTENT
from tfswap.analysis.encodings import find_encodings
from tfswap.compiler.resident_margin import margin_of
from tfswap.compiler.rewriting import PLAIN, Variant
from tfswap.ir.op_traits import READ_VARIABLE, is_elementwise, writes_variable
from tfswap.ir.permits import SLICE
from tfswap.kernels.hardware import DISK, HOST, LENT
from tfswap.passes.tactics.state_homes import movable_variables
from tfswap.passes.tactics.update_groups import FILL, SUM_ROWS
from tfswap.plan.plan import Plan
from tfswap.planner.certificate import Bounds, Free, LeastCosts, LeastWork
from tfswap.planner.concurrent import least_bytes

if TYPE_CHECKING:
    from tfswap.compiler.compiler import Optimizer


def bounds_of(optimizer: Optimizer, plan: Plan) -> Bounds | None:
    """Bounds of all plans of a step, under the limit of `plan`, and as fast as it is.

    None where the step has loops or conditionals, or its kernels may run in slices, or the plan leaves it as it is.
    """
    optimizer.use(plan)
    search = optimizer.search
    variant = search.variants[search.variants.base]
    if plan.changes_nothing or variant.graph.bodies or SLICE in optimizer.options.tactics:
        return None
    planners = search.planners
    tiers = [HOST, *([DISK] if optimizer.options.spill else []), *([LENT] if planners.lent_bytes else [])]
    margin_bytes = margin_of(optimizer, plan.at_home)
    peak_bytes = plan.planned_peak_bytes - margin_bytes
    limit_bytes = peak_bytes if plan.limit_bytes is None else max(peak_bytes, plan.limit_bytes - margin_bytes)
    work = _work(optimizer, variant, limit_bytes)
    problem, tactics = planners.of(variant).problems[0], optimizer.options.tactics
    costs = LeastCosts(problem, tactics, work, tiers, _free(optimizer, variant))
    return Bounds(
        float(costs.least_seconds(limit_bytes, plan.seconds)),
        costs.least_bytes(plan.seconds, peak_bytes) + margin_bytes,
    )


def _work(optimizer: Optimizer, variant: Variant, limit_bytes: int) -> LeastWork:
    """The least seconds of the step's kernels: in groups where the limit has room for any (compiler/concurrency.py)."""
    flow, variants = variant.flow, optimizer.search.variants
    cost_s = variants.cost_s(variant)
    if not optimizer.target.runs_concurrently:
        return LeastWork.in_turn(flow, cost_s)
    groups = variants.group_members if variants.base == PLAIN else []
    room_bytes = limit_bytes - optimizer.search.planners.resident_bytes(variant)
    has_room = max(map(least_bytes, groups), default=0) <= room_bytes
    grouped = {i for group in groups for i in group.members} if has_room else set[int]()
    return LeastWork.side_by_side(flow, cost_s, optimizer.costs.rates, grouped)


def _free(optimizer: Optimizer, variant: Variant) -> Free:
    """What other forms of the step may have less of: tensors in a smaller form, variables at home on the host, and
    updates of these in slices.
    """
    flow = variant.flow
    readers = _readers_of_smaller(optimizer, variant)
    if optimizer.search.state is None:
        return Free(readers)
    movable = movable_variables(variant.graph)
    reads = (n for n in flow.nodes if n.op in READ_VARIABLE and n.inputs[0].node.name in movable)
    read = {v for node in reads if (v := flow.value_of.get((node, 0))) is not None}
    variables = flow.first_versions(movable) | {v for v in read if flow.values[v].producer == PERSISTENT}
    shapes = {(kind.dtype, kind.shape) for kind in movable.values()}
    in_slices = {
        i
        for i, node in enumerate(flow.nodes)
        if writes_variable(node.op)
        or (
            (is_elementwise(node.op) or node.op in (SUM_ROWS, FILL))
            and any((kind.dtype, kind.shape) in shapes for kind in node.outputs)
        )
    }
    made = {v for i in in_slices for _, v in flow.makes[i]}
    return Free(readers, made, variables, in_slices)


def _readers_of_smaller(optimizer: Optimizer, variant: Variant) -> dict[int, set[int]]:
    """By value, the kernels that may read it in a smaller form."""
    rewritings, flow = optimizer.search.rewritings, variant.flow
    encoded = {kernel for rewriting in rewritings for kernel in rewriting.encoded}
    encodings = [e for e in find_encodings(variant.graph, optimizer.device) if e.kernel.name in encoded]
    found = [(tensor, e.kernel.name) for e in encodings for tensor in (e.tensor, *e.dropped)]
    for packing in (packing for rewriting in rewritings for packing in rewriting.packed):
        tensor = variant.graph.tensor(packing.tensor)
        found += [(tensor, reader) for group in packing.readers for reader in group]
    readers: dict[int, set[int]] = {}
    for tensor, kernel in found:
        if (value := flow.value_of.get((tensor.node, tensor.index))) is not None:
            readers.setdefault(value, set()).add(flow.place[kernel])
    return readers
