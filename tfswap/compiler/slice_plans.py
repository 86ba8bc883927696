"""The plans of one step with kernels in slices of rows."""

from __future__ import annotations

from tfswap.compiler.alternatives import Alternatives
from tfswap.compiler.planners import Planners
from tfswap.compiler.rewriting import Found, Rewriting
from tfswap.planner.planner import Planner


class SlicePlans:
    """Those plans, for each limit.

    Args:
        alternatives: the rewritings of the step.
        planners: the planners of its variants.
        allowed: whether there are any.
    """

    def __init__(self, alternatives: Alternatives, planners: Planners, *, allowed: bool):
        self._alternatives = alternatives
        self._planners = planners
        self._allowed = allowed

    @property
    def forms(self) -> list[Rewriting]:
        """The step with kernels in slices: whole chains, then single kernels."""
        return [*self._alternatives.in_chains, *self._alternatives.in_row_slices] if self._allowed else []

    def fastest(self, best: Found | None, limit_bytes: int) -> Found | None:
        """`best`, or a faster plan with chains in slices. Where there is none at all, the fastest with single kernels
        in slices: planning these takes long.
        """
        if not self._allowed:
            return best
        planners = self._planners
        chains = {form: planners.least_evicted_s(form, limit_bytes) for form in self._alternatives.in_chains}
        for candidate in (Planner.unmoved_candidate, Planner.candidate):
            for form in sorted(chains, key=chains.__getitem__):
                if best is None or chains[form] < best.candidate.timing.total_s:
                    best = planners.fastest([form], candidate, limit_bytes, best)
        return best or planners.fastest(self._alternatives.in_row_slices, Planner.candidate, limit_bytes)
