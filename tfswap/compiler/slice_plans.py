"""The plans of one step with kernels in slices of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tfswap.compiler.alternatives import Alternatives
from tfswap.compiler.planners import Planners
from tfswap.compiler.rewriting import Found, Rewriting
from tfswap.planner.planner import Planner

LAUNCH_S = 5e-6
"""What each kernel that a form has more than the step costs, next to its modelled time: chains in slices are many small
kernels, and a launch takes longer than the analytic model has it on some machines.
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
        worth_s = math.inf if best is None else best.candidate.timing.total_s
        chains = {form: planners.least_evicted_s(form, limit_bytes) for form in self._promising(worth_s)}
        for candidate in (Planner.unmoved_candidate, Planner.candidate):
            for form in sorted(chains, key=chains.__getitem__):
                so_far_s = worth_s if found is None else found.candidate.timing.total_s
                if chains[form] + self._launches_s(form) < so_far_s:
                    found = planners.fastest([form], candidate, limit_bytes, found)
        if found is not None and found.candidate.timing.total_s + self._launches_s(found.variant.rewriting) < worth_s:
            return found
        return best or planners.fastest(self._alternatives.in_row_slices, Planner.candidate, limit_bytes)

    def _launches_s(self, form: Rewriting) -> float:
        """What the kernels that a form has more than the step cost in addition."""
        variants = self._planners.variants
        base, sliced = (sum(variants[each].flow.is_kernel) for each in (self._alternatives.base, form))
        return LAUNCH_S * (sliced - base)

    def _promising(self, worth_s: float) -> Iterator[Rewriting]:
        """Chains in more and more slices, as long as these take less time than `worth_s`, and hold less."""
        least_bytes = self._planners.unmoved_bytes(self._alternatives.base)
        for form in self._alternatives.in_chains:
            bounds = (self._planners.least_kernels_s, self._planners.unmoved_s)  # the first is found much faster
            if any(bound(form) + self._launches_s(form) >= worth_s for bound in bounds):
                return
            yield form
            if self._planners.unmoved_bytes(form) >= least_bytes:
                return
            least_bytes = self._planners.unmoved_bytes(form)
