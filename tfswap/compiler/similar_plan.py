"""Carries the plan of one step over to a similar one, such as another replica's, which names most nodes alike.

Kernels that only the other step has are left out, with the evictions of their tensors; those that only this step has
are added. The plan is then checked and simulated as any other.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from typing import TYPE_CHECKING

from tfswap.analysis.dataflow import Dataflow
from tfswap.compiler.rewriting import Found
from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.plan.plan import Eviction, Plan
from tfswap.planner.validate import require_accumulators

if TYPE_CHECKING:
    from tfswap.compiler.compiler import Optimizer

MORE_ROOM = 1.05
"""A step that has more than this multiple of a similar step's room is planned by itself."""

Place = tuple[int, int]
"""A position in the other step's order, and a number that orders kernels of this step alone around the one there."""


def found_like(example: Plan | None, step: Optimizer, limit_bytes: int | None) -> Found | None:
    """The plan of a similar step for this one, within the limit; None where this one needs another plan, or has more
    room.
    """
    if limit_bytes is None or example is None or example.changes_nothing or example.limit_bytes is None:
        return None
    if example.lent_bytes > step.search.planners.lent_bytes:
        return None
    try:
        variant = step.variant_of(example)
        room_bytes = limit_bytes - step.search.planners.resident_bytes(variant)  # counted as the example's
        if room_bytes > MORE_ROOM * (example.limit_bytes - example.persistent_bytes):
            return None
        require_accumulators(example, step.search.variants.accumulators)
        plan = carried_over(example, variant.flow, step.fingerprint)
        step.require_fit(plan)
    except InvalidModel:
        return None
    return step.search.fitting(plan, limit_bytes)


def carried_over(plan: Plan, flow: Dataflow, fingerprint: str) -> Plan:
    """`plan` for the step with these facts, without its concurrent kernels and chunk splits."""
    placed = _placed(plan, flow)
    places = [place for place, _ in placed]

    def here(position: int) -> int:
        return min(bisect_left(places, (position, 0)), len(places) - 1)

    evictions: list[Eviction] = []
    for eviction in plan.evictions:
        value = flow.value_named.get(eviction.tensor)
        if value is None or flow.values[value].nbytes != eviction.nbytes:
            continue
        out = None if eviction.out is None else here(eviction.out)
        moved = here(eviction.release), here(eviction.back), here(eviction.use)
        evictions.append(Eviction(eviction.tensor, eviction.nbytes, out, *moved, eviction.disk, eviction.lent))
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
    Send runs as early as it can, since another device waits for it.
    """
    kernels = {node.name for node, is_kernel in zip(flow.nodes, flow.is_kernel, strict=True) if is_kernel}
    found = [((position, 0), name) for position, name in enumerate(plan.order) if name in kernels]
    place: dict[str, Place] = {}
    for at, name in found:
        place.setdefault(name, at)
    missing_names = kernels - place.keys()
    missing = {i for i, node in enumerate(flow.nodes) if node.name in missing_names}
    count = 0
    ready: list[Place] = []  # by node: the place of the last kernel that it needs, itself included
    for i, node in enumerate(flow.nodes):
        needed = max((ready[d] for d in flow.own_deps[i]), default=(-1, 0))
        if i in missing:
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
    return sorted([*found, *((place[flow.nodes[i].name], flow.nodes[i].name) for i in missing)])
