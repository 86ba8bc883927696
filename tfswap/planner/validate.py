"""Checks that a plan fits a graph. A plan can come from a file, and the kernels and tensors that it names must exist.

A plan that fits can be carried out without changing a value. Its peak is computed by the simulator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable
from itertools import pairwise

from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.errors import InvalidModel
from tfswap.ir.permits import ANYTHING, Permit
from tfswap.plan.plan import Eviction, Inside, Plan
from tfswap.plan.schedule import IN, LEAD, RERUN, RUN, planned_schedule
from tfswap.planner.pairing import overlaps
from tfswap.planner.problem import Problem

REMEDY = "Plan again for this graph."


def require_accumulators(plan: Plan, accumulators: Container[str]) -> None:
    """Raise InvalidModel when `plan` swaps lists inside of loops that are none of these, or prefetches unswapped
    ones.
    """
    for name in plan.prefetched:
        if name not in plan.accumulators:
            raise InvalidModel(f"this plan prefetches what loops save in {name!r}, and does not swap it. {REMEDY}")
    for name in plan.accumulators:
        if name not in accumulators:
            raise InvalidModel(
                f"this plan swaps what loops save in {name!r}, and that is no list of this graph that loops only push "
                f"to and pop from. {REMEDY}"
            )


def require_allowed(permit: Permit, tactic: str, does: str) -> None:
    """Raise InvalidModel when a plan `does` something that the user's permits do not allow."""
    if not permit.allows(tactic):
        raise InvalidModel(f"this plan {does}, which must not be ({permit.why}). {REMEDY}")


def require_fit(plan: Plan | Inside, problem: Problem) -> None:
    """Raise InvalidModel, saying what is wrong, when `plan` can't be carried out on the step that `problem` is of."""
    if plan.changes_nothing:
        return
    flow, pinned = problem.flow, problem.refusals
    order = _require_order(plan, problem)
    by_value: dict[int, list[Eviction]] = {}
    for eviction in plan.evictions:
        v = flow.value_named.get(eviction.tensor)
        if v is None:
            raise InvalidModel(f"this plan moves {eviction.tensor!r}, which this graph does not have. {REMEDY}")
        if v in pinned or flow.values[v].producer == PERSISTENT:
            why = pinned.get(v, "there before the step")
            raise InvalidModel(f"this plan moves {eviction.tensor!r}, which must stay ({why}). {REMEDY}")
        require_allowed(flow.permits.get(v, ANYTHING), "swap", f"swaps {eviction.tensor!r}")
        if eviction.nbytes != flow.values[v].nbytes:
            raise InvalidModel(
                f"this plan is for {eviction.tensor!r} of {eviction.nbytes} bytes, and in this graph it has "
                f"{flow.values[v].nbytes}. {REMEDY}"
            )
        by_value.setdefault(v, []).append(eviction)
    uses = buffer_uses(flow, order, by_value)
    for v, evictions in by_value.items():
        _require_gaps(evictions, uses[v])
    _require_pairs(plan, problem, order)
    _require_splits(plan, problem.flow)


def buffer_uses(flow: Dataflow, order: Iterable[int], values: Iterable[int]) -> dict[int, list[list[int]]]:
    """By value, the positions in the order at which each buffer of it is made and read."""
    uses: dict[int, list[list[int]]] = {v: [] for v in values}
    for position, i in enumerate(order):
        for v in set(flow.reads[i]) & uses.keys():
            uses[v][-1].append(position)
        for _, v in flow.makes[i]:
            if v in uses:
                uses[v].append([position])
    return uses


def _require_order(plan: Plan | Inside, problem: Problem) -> list[int]:
    """The plan's order as node indices: each kernel after those it depends on, and recomputed only where it may be."""
    flow = problem.flow
    kernels = {flow.nodes[i].name for i in range(len(flow.nodes)) if flow.is_kernel[i]}
    unknown = next((name for name in plan.order if name not in kernels), None)
    if unknown is not None:
        raise InvalidModel(
            f"this plan names the node {unknown!r}, which this graph does not have: the plan is damaged, or the two "
            f"graphs are built alike and named otherwise (a second model in one process, say). {REMEDY}"
        )
    missing = min(kernels.difference(plan.order), default=None)
    if missing is not None:
        raise InvalidModel(f"this plan has no place for {missing!r}: its order is damaged. {REMEDY}")
    order = [flow.place[name] for name in plan.order]
    place: dict[int, int] = {}
    ended: set[int] = set()  # versions of variables that have been written over
    for position, i in enumerate(order):
        for _, v in flow.makes[i] if i in place else ():
            does = f"makes {flow.values[v].tensor.name!r} again"
            require_allowed(flow.permits.get(v, ANYTHING), "recompute", does)
        if i in place and not problem.repeatable[i]:
            raise InvalidModel(f"this plan runs {flow.nodes[i].name!r} twice, which is not safe. {REMEDY}")
        if i in place and not ended.isdisjoint(flow.reads[i]):
            raise InvalidModel(
                f"this plan runs {flow.nodes[i].name!r} again after a variable that it reads was written. {REMEDY}"
            )
        place.setdefault(i, position)
        ended.update(update.old for update in flow.updates[i])
    ready: list[int] = []  # by node: the place of the last kernel that it needs, itself included
    for i, node in enumerate(flow.nodes):
        latest = max(flow.own_deps[i], key=lambda d: ready[d], default=None)
        needed = -1 if latest is None else ready[latest]
        if flow.is_kernel[i] and needed >= place[i]:
            raise InvalidModel(
                f"this plan runs {node.name!r} before {plan.order[needed]!r}, which it depends on: its order is "
                f"damaged. {REMEDY}"
            )
        ready.append(place.get(i, needed))
    return order


def _require_pairs(plan: Plan | Inside, problem: Problem, order: list[int]) -> None:
    """Concurrent kernels are adjacent, neither needs the other, and neither is oneDNN's."""
    if plan.paired and problem.rates.onednn:
        raise InvalidModel(f"this plan runs kernels side by side, which oneDNN's can't. {REMEDY}")
    can_overlap = overlaps(problem.flow, order, plan.evictions)
    for position in plan.paired:
        if not can_overlap(position):
            raise InvalidModel(
                f"this plan runs {plan.order[position]!r} concurrently with {plan.order[position - 1]!r}, and these "
                f"two can't overlap there. {REMEDY}"
            )


def _require_splits(plan: Plan | Inside, flow: Dataflow) -> None:
    """A split is for one step, which makes a tensor, and for at most as many bytes as kernels request."""
    steps = planned_schedule(flow, dataclasses.replace(plan, splits=()))
    temporaries = (amount for events in flow.events for kind, amount in events if kind == "temp")
    most_bytes = max((*(value.nbytes for value in flow.values), *temporaries), default=0)
    for split in plan.splits:
        around = [step.kind for step in steps[max(0, split.step - 1) : split.step + 1]]
        if split.step >= len(steps) or around[-1] not in (RUN, RERUN, IN) or LEAD in around:
            raise InvalidModel(
                f"this plan splits a chunk for step {split.step}, which is none of its {len(steps)} steps, or no step "
                f"that makes one tensor. {REMEDY}"
            )
        if split.nbytes > most_bytes:
            raise InvalidModel(
                f"this plan splits a chunk for {split.nbytes} bytes, and no request of this step is for more than "
                f"{most_bytes}. {REMEDY}"
            )


def _require_gaps(evictions: list[Eviction], buffers: list[list[int]]) -> None:
    """Each gap is between two successive uses of one buffer, and the buffer's first gap copies it out."""
    gaps = {gap for uses in buffers for gap in pairwise(uses)}
    copied: set[int] = set()  # buffers, by where they are made
    for a in sorted(evictions, key=lambda a: a.use):
        uses = next((b for b in reversed(buffers) if b[0] < a.release), buffers[0])
        before = max((p for p in uses if p < a.back), default=-1)
        if (before, a.use) not in gaps:
            raise InvalidModel(
                f"this plan evicts {a.tensor!r} from kernel {a.release} to {a.use}, and it is used in between, not "
                f"used there, or evicted already. {REMEDY}"
            )
        gaps.remove((before, a.use))
        if (a.out is None) != (uses[0] in copied) or (a.out is not None and a.out < uses[0]):
            raise InvalidModel(
                f"this plan copies {a.tensor!r} out before it is made, or not once before it is first evicted. {REMEDY}"
            )
        copied.add(uses[0])
