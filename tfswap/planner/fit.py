"""Does a plan fit a graph? A plan can come from a file, and names kernels and tensors that must be there.

A plan that fits can be carried out without changing a value; what it peaks at is for the simulator to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.errors import InvalidModel
from tfswap.planner.plan import Absence, Plan

REMEDY = "Plan again for this graph."


def require_fit(plan: Plan, flow: Dataflow, pinned: Mapping[int, str]) -> None:
    """Raise InvalidModel, saying what is wrong, when `plan` can't be carried out on the step that `flow` is of.

    Args:
        pinned: values that must not travel, with the reason.
    """
    if plan.changes_nothing:
        return
    order = _require_order(plan, flow)
    tensors = {flow.values[v].tensor.name: v for v in range(len(flow.values))}
    by_value: dict[int, list[Absence]] = {}
    for absence in plan.absences:
        v = tensors.get(absence.tensor)
        if v is None:
            raise InvalidModel(f"this plan moves {absence.tensor!r}, which this graph does not have. {REMEDY}")
        if v in pinned or flow.values[v].producer == PERSISTENT:
            why = pinned.get(v, "there before the step")
            raise InvalidModel(f"this plan moves {absence.tensor!r}, which must stay ({why}). {REMEDY}")
        if absence.nbytes != flow.values[v].nbytes:
            raise InvalidModel(
                f"this plan takes {absence.tensor!r} to have {absence.nbytes} bytes, and it has "
                f"{flow.values[v].nbytes}. {REMEDY}"
            )
        by_value.setdefault(v, []).append(absence)
    uses: dict[int, list[int]] = {v: [] for v in by_value}
    for position, i in enumerate(order):
        for v in {*flow.reads[i], *(made for _, made in flow.makes[i])} & uses.keys():
            uses[v].append(position)
    for v, absences in by_value.items():
        _require_gaps(absences, uses[v])


def _require_order(plan: Plan, flow: Dataflow) -> list[int]:
    """The plan's order as node indices: each kernel once, after what it depends on."""
    kernels = {flow.nodes[i].name for i in range(len(flow.nodes)) if flow.is_kernel[i]}
    strange = next((name for name in plan.order if name not in kernels), None)
    if strange is not None:
        raise InvalidModel(
            f"this plan names the node {strange!r}, which this graph does not have: the plan is damaged, or the two "
            f"graphs are built alike and named otherwise (a second model in one process, say). {REMEDY}"
        )
    if len(plan.order) != len(kernels):
        missing = min(kernels.difference(plan.order))
        raise InvalidModel(f"this plan does not say when {missing!r} runs: its order is damaged. {REMEDY}")
    place = {flow.place[name]: position for position, name in enumerate(plan.order)}
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
    return [flow.place[name] for name in plan.order]


def _require_gaps(absences: list[Absence], uses: list[int]) -> None:
    """One copy out, after the tensor is made; then each stay between two uses that follow each other."""
    absences = sorted(absences, key=lambda a: a.use)
    gaps = set(pairwise(uses))
    for number, a in enumerate(absences):
        before = max((p for p in uses if p < a.release), default=-1)
        if (before, a.use) not in gaps:
            raise InvalidModel(
                f"this plan takes {a.tensor!r} away from kernel {a.release} to {a.use}, and it is used in between, not "
                f"used then, or away already. {REMEDY}"
            )
        gaps.remove((before, a.use))
        if (a.out is None) != (number > 0) or (a.out is not None and a.out < uses[0]):
            raise InvalidModel(
                f"this plan copies {a.tensor!r} out before it is made, or not once before its first stay. {REMEDY}"
            )
