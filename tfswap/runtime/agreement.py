"""Plans a step of several workers: all refuse if one does, and all carry out one plan if it fits each arena."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from tfswap.errors import InfeasibleMemoryLimit
from tfswap.plan.plan import Plan
from tfswap.runtime import messages
from tfswap.runtime.step_part import StepParts
from tfswap.runtime.workers import Meeting, digest, highest, meeting

log = logging.getLogger("tfswap")


class Plannable(Protocol):
    """A step of one worker."""

    name: str
    parts: StepParts

    def plan_now(self, inputs: Sequence[Any], *, given: Sequence[Plan] | None = None) -> None: ...
    def unplan(self) -> None: ...


def plan_with_others(step: Plannable, inputs: Sequence[Any], *, alone: bool) -> None:
    """Plan the step, in agreement with other workers that plan it too.

    Args:
        alone: whether no other worker takes part.
    """
    refusal: InfeasibleMemoryLimit | None = None
    try:
        step.plan_now(inputs)
    except InfeasibleMemoryLimit as error:
        refusal = error.with_traceback(None)  # its frames hold the arguments
    others = None if alone else meeting([optimizer.graph for optimizer in step.parts.optimizers])
    if others is not None:
        floor = highest(others.exchange(None if refusal is None else refusal.floor_bytes))
        if floor is not None and refusal is None:
            step.unplan()
            rank, floor_bytes = floor
            raise InfeasibleMemoryLimit(
                messages.refused_by_another(step.name, rank, floor_bytes),
                floor_bytes=floor_bytes,
                limit_bytes=max((limit or 0 for limit in step.parts.limits), default=0),
            )
    if refusal is not None:
        try:
            raise refusal
        finally:
            refusal = None  # its traceback has this frame
    if others is not None and len({*others.exchange(digest(step.parts.plans))}) > 1:
        _adopt_first(step, others, inputs)


def _adopt_first(step: Plannable, others: Meeting, inputs: Sequence[Any]) -> None:
    """Carry out the first worker's plan, if every worker can."""
    adopted: list[Plan] = []
    fingerprints = others.exchange([plan.fingerprint for plan in step.parts.plans])
    if all(each == fingerprints[0] for each in fingerprints):
        theirs = [others.hand_out(plan) for plan in step.parts.plans]
        each = zip(step.parts.optimizers, theirs, step.parts.limits, strict=True)
        adopted = [optimizer.adopt(plan, limit) for optimizer, plan, limit in each]
    fits = bool(adopted) and all(plan.keeps_limit for plan in adopted)
    if not all(others.exchange(fits)):
        log.info("tfswap: %s: the workers' plans differ: no plan of one fits the arenas of all", step.name)
    elif others.rank > 0:
        step.plan_now(inputs, given=adopted)
        if not step.parts.keep_limits:
            step.plan_now(inputs)
