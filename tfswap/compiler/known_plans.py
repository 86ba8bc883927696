"""Earlier plans of one step, also of other processes: recalled where they keep their limit in the present arena."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tfswap.compiler.plan_cache import StepPlans
from tfswap.errors import InvalidModel
from tfswap.plan.plan import Plan

log = logging.getLogger("tfswap")

RECALLED_NOTE = (
    "this plan was made before, for the same step and limit, and comes from the plan cache on disk. It was simulated "
    "again in the present arena, and its peak is the one there. TFSWAP_PLAN_CACHE=off plans again"
)


class KnownPlans:
    """The plan cache's plans of one step.

    Args:
        stored: the cache's plans; None where there is no cache.
        judged: gives a plan with its peak in the present arena, or None where the peak exceeds the limit. Raises
            InvalidModel for a plan of another step.
    """

    def __init__(self, stored: StepPlans | None, judged: Callable[[Plan, int], Plan | None]):
        self._stored = stored
        self._judged = judged
        self._recalled: set[tuple[object, ...]] = set()  # the actions of recalled plans

    def __bool__(self) -> bool:
        return self._stored is not None

    def has_recalled(self, plan: Plan) -> bool:
        """Whether the plan was recalled."""
        return plan.actions in self._recalled

    def recall(self, limit_bytes: int, ordered: bool) -> Plan | None:
        """An earlier plan for a limit that keeps it in the present arena; None where there is none."""
        plan = None if self._stored is None else self._stored.plan(limit_bytes, ordered)
        if plan is None or plan.changes_nothing:
            return None
        try:
            found = self._judged(plan, limit_bytes)
        except InvalidModel as error:
            log.warning("tfswap: a plan in the plan cache does not fit its step, and is replaced: %s", error)
            return None
        if found is not None:
            self._recalled.add(plan.actions)
        return found

    def recall_or(self, limit_bytes: int, ordered: bool, make: Callable[[], Plan | None]) -> Plan | None:
        """As `recall`; where there is no such plan, a new one by `make`, which is stored. One process at a time makes
        it.
        """
        assert self._stored is not None, "called only where there is a cache"
        with self._stored.planning(limit_bytes, ordered):
            plan = self.recall(limit_bytes, ordered)
            if plan is None:
                plan = make()
                if plan is not None:
                    self._stored.keep(plan, limit_bytes, ordered)
            return plan
