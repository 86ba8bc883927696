"""The plans of one step with kernels in slices of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tfswap.compiler.alternatives import Alternatives
from tfswap.compiler.planners import Planners
from tfswap.compiler.rewriting import Found, Rewriting
from tfswap.planner.planner import Planner

WORTH = 0.98
"""The share of another plan's time that one with chains in slices may take at most. Slices are many small kernels, and
their launch is a larger part of the step on a machine that computes faster than the analytic model has it.
"""


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

    @property
    def lowest(self) -> list[Rewriting]:
        """The step with single kernels in slices."""
        return self._alternatives.in_row_slices if self._allowed else []

    def fastest(self, best: Found | None, limit_bytes: int) -> Found | None:
        """`best`, or a faster plan with chains in slices. Where there is none at all, the fastest with single kernels
        in slices: planning these takes long.
        """
        if not self._allowed:
            return best
        planners, found = self._planners, None
        worth_s = math.inf if best is None else WORTH * best.candidate.timing.total_s
        chains = {form: planners.least_evicted_s(form, limit_bytes) for form in self._promising(worth_s)}
        for candidate in (Planner.unmoved_candidate, Planner.candidate):
            for form in sorted(chains, key=chains.__getitem__):
                if chains[form] < (worth_s if found is None else found.candidate.timing.total_s):
                    found = planners.fastest([form], candidate, limit_bytes, found)
        if found is not None and found.candidate.timing.total_s < worth_s:
            return found
        return best or planners.fastest(self._alternatives.in_row_slices, Planner.candidate, limit_bytes)

    def _promising(self, worth_s: float) -> Iterator[Rewriting]:
        """Chains in more and more slices, as long as these take less time than `worth_s`, and hold less."""
        least_bytes = self._planners.unmoved_bytes(self._alternatives.base)
        for form in self._alternatives.in_chains:
            if self._planners.unmoved_s(form) >= worth_s:
                return
            yield form
            if self._planners.unmoved_bytes(form) >= least_bytes:
                return
            least_bytes = self._planners.unmoved_bytes(form)
