"""Takes the plan of a step from the search of a similar one, such as another replica's, which names most nodes alike.

The search of the similar step has judged candidates for many limits. So its plan for as much room as this step has is
soon found. It is carried over: kernels that only the other step has are left out, with the evictions of their tensors;
those that only this step has are added. Then it is checked and simulated as any other.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING

from tfswap.analysis.dataflow import Dataflow
from tfswap.compiler.rewriting import Found
from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.plan.plan import Eviction, Plan
from tfswap.planner.validate import buffer_uses, require_accumulators

if TYPE_CHECKING:
    from tfswap.compiler.compiler import Optimizer

Place = tuple[int, int]
"""A position in the other step's order, and a number that orders kernels of this step alone around the one there."""


def found_like(example: Optimizer | None, step: Optimizer, limit_bytes: int | None) -> Found | None:
    """The fastest plan of a similar step, with the room that this one has, for this one; None where that does not fit.

    Args:
        example: the similar step, which has been searched.
    """
    if limit_bytes is None or example is None or not _are_alike(example, step):
        return None
    there_bytes = limit_bytes - step.resident_bytes + example.resident_bytes
    found = example.search.fastest(there_bytes)
    return None if found is None else fitting(example.plan_of(found, there_bytes), step, limit_bytes)


def _are_alike(example: Optimizer, step: Optimizer) -> bool:
    """Whether two steps have most nodes in common, and as much memory of other devices."""
    names, others = step.flow.place.keys(), example.flow.place.keys()
    same_lent = example.search.planners.lent_bytes == step.search.planners.lent_bytes
    return same_lent and 2 * len(names & others) > max(len(names), len(others))


def fitting(plan: Plan, step: Optimizer, limit_bytes: int) -> Found | None:
    """A similar step's plan for this one, within the limit; None where this one needs another plan."""
    try:
        variant = step.variant_of(plan)
        require_accumulators(plan, step.search.variants.accumulators)
        carried = carried_over(plan, variant.flow, step.fingerprint)
        step.require_fit(carried)
    except InvalidModel:
        return None
    return step.search.fitting(carried, limit_bytes)


def carried_over(plan: Plan, flow: Dataflow, fingerprint: str) -> Plan:
    """`plan` for the step with these facts, without its concurrent kernels and chunk splits.

    An eviction is for the time between two uses of its tensor that has the most of the time there.
    """
    placed = _placed(plan, flow)
    places = [place for place, _ in placed]

    def here(position: int) -> int:
        return min(bisect_left(places, (position, 0)), len(places) - 1)

    evicted = [(flow.value_named.get(each.tensor), each) for each in plan.evictions]
    known = [(v, each) for v, each in evicted if v is not None and flow.values[v].nbytes == each.nbytes]
    uses = buffer_uses(flow, [flow.place[name] for _, name in placed], [v for v, _ in known])
    evictions: list[Eviction] = []
    for value, each in known:
        release, end = here(each.release), here(each.use)
        gaps = [(buffer[0], *gap) for buffer in uses[value] for gap in pairwise(buffer)]
        if gaps:
            made, before, use = max(gaps, key=lambda gap: min(gap[2], end) - max(gap[1], release))
            back = min(max(here(each.back), before + 1), use)
            release = min(release, back) if release >= max(before, made + 1) else before + 1
            out = None if each.out is None else min(max(here(each.out), made), release - 1)
            evictions.append(dataclasses.replace(each, out=out, release=release, back=back, use=use))
    return dataclasses.replace(
        plan,
        fingerprint=fingerprint,
        order=tuple(name for _, name in placed),
        evictions=tuple(evictions),
        paired=(),
        splits=(),
    )


def _placed(plan: Plan, flow: Dataflow) -> list[tuple[Place, str]]:
    """The kernels of this step in the order of `plan`, each with its place.

    Kernels that only this step has run as late as they can: a Receive that comes early holds up all that follows. A
    Send runs as early as it can, since another device waits for it. A kernel that needs more here than in the other
    step runs later than there: each device sends and receives in an order of its own.
    """
    kernels = {node.name for node, is_kernel in zip(flow.nodes, flow.is_kernel, strict=True) if is_kernel}
    place: dict[str, Place] = {}
    again: list[tuple[Place, str]] = []  # kernels that are recomputed
    for position, name in enumerate(plan.order):
        if name in place:
            again.append(((position, 0), name))
        elif name in kernels:
            place[name] = position, 0
    missing_names = kernels - place.keys()
    missing = {i for i, node in enumerate(flow.nodes) if node.name in missing_names}
    count = 0
    ready: list[Place] = []  # by node: the place of the last kernel that it needs, itself included
    for i, node in enumerate(flow.nodes):
        needed = max((ready[d] for d in flow.own_deps[i]), default=(-1, 0))
        if i in missing or place.get(node.name, needed) < needed:
            count += 1
            place[node.name] = needed[0], count
        ready.append(place.get(node.name, needed))
    waited: dict[int, Place] = {}  # by node: the place of the first kernel that needs it, itself not included
    for i in reversed(range(len(flow.nodes))):
        node = flow.nodes[i]
        if i in missing and i in waited and waited[i][1] <= 0 and node.op != custom_ops.SEND:
            count += 1
            place[node.name] = waited[i][0], -count
        at = place.get(node.name) or waited.get(i)
        if at is not None:
            waited |= {d: min(waited.get(d, at), at) for d in flow.own_deps[i]}
    return sorted([*again, *((at, name) for name, at in place.items())])
