"""Plans with variables at home on the host: in stages, on disk where host memory has no room, and with their updates in
slices.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.compiler.alternatives import Alternatives
from tfswap.compiler.planners import Planners, lower
from tfswap.compiler.rewriting import Found, Rewriting
from tfswap.planner.planner import Planner


class StatePlans:
    """Searches the plans of one step with variables at home on the host, as far as these can be moved in the arena.

    Args:
        forms: those without variables at home that hold the least of their kind. The last one gets slices too.
    """

    def __init__(self, alternatives: Alternatives, planners: Planners, forms: Sequence[Rewriting]):
        self._alternatives = alternatives
        self._planners = planners
        stages = alternatives.at_home(planners.of, planners.variables, forms)
        self._at_home = [placed for stage in stages for placed in self._in_tiers(stage)]
        self._last = [placed for stage in stages[-1:] for placed in self._in_tiers(stage)]

    def _in_tiers(self, stage: Rewriting) -> list[Rewriting]:
        return self._alternatives.in_tiers(stage, self._planners.of, self._planners.host_tiers)

    def fastest(self, best: Found | None, limit_bytes: int) -> Found | None:
        """`best`, or a faster plan within the limit; one with updates in slices where there is no other.

        Planning slices takes long, so limits that can be kept without them have none.
        """
        if any(self._planners.least_bytes(rewriting.at_home) > limit_bytes for rewriting in self._at_home[:1]):
            return best  # the step begins with more in the arena, whatever leaves it
        for rewriting in self._at_home:
            if best is None or self._least_s(rewriting, limit_bytes) < best.candidate.timing.total_s:
                best = self._planners.fastest([rewriting], Planner.candidate, limit_bytes, best)
        return self._fastest_sliced(limit_bytes) if best is None else best

    def _least_s(self, rewriting: Rewriting, limit_bytes: int) -> float:
        """As `Planners.least_at_home_s`."""
        return self._planners.least_at_home_s(rewriting, self._alternatives.bytes_at_home(rewriting), limit_bytes)

    @property
    def last(self) -> list[Rewriting]:
        """Those that hold the least: all forms with all variables at home, and the last with the smallest slices."""
        return [*self._full, *self._sliced[-1:]]

    @property
    def _full(self) -> list[Rewriting]:
        """All forms with all variables at home."""
        return [r for r in self._at_home if r.at_home == self._at_home[-1].at_home]

    @property
    def all_at_home(self) -> tuple[str, ...]:
        """The handles of all variables that may be at home."""
        return self._at_home[-1].at_home if self._at_home else ()

    def lowest_full(self) -> Found | None:
        """The candidate with the lowest peak with all variables at home."""
        least: Found | None = None
        for variant, planner in self._planners.used(self.last):
            least = lower(least, variant, planner.lowest)
        return least

    def fastest_full(self, limit_bytes: int) -> Found | None:
        """The fastest plan within the limit with all variables at home, in slices where there is no other."""
        best = self._planners.fastest(self._full, Planner.candidate, limit_bytes)
        return best or self._fastest_sliced(limit_bytes)

    @property
    def _sliced(self) -> list[Rewriting]:
        """With updates in slices, from large slices to small ones; first with the most in host memory."""
        return [r for at_home in self._last for r in self._alternatives.in_slices(at_home)]

    def _fastest_sliced(self, limit_bytes: int) -> Found | None:
        """The plan with the largest slices that fits without evictions, or else with them: smaller ones take longer."""
        for candidate in (Planner.unmoved_candidate, Planner.candidate):
            for variant, planner in self._planners.used(self._sliced):
                if (found := candidate(planner, limit_bytes)) is not None:
                    return Found(variant, found)
        return None
