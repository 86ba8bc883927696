"""Plans with variables at home on the host: in stages, on disk where host memory has no room, and with their updates in
slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfswap.compiler.alternatives import Alternatives
from tfswap.compiler.planners import Planners, lower
from tfswap.compiler.rewriting import Found, Rewriting
from tfswap.planner.planner import Planner

NEARLY_ALL_KERNELS = 10_000
"""The most kernels of steps that are planned with nearly all variables at home where there are other plans. In larger
steps planning would take longer than tracing."""


class StatePlans:
    """Searches the plans of one step with variables at home on the host, as far as these can be moved in the arena.

    Args:
        forms: finds those without variables at home that hold the least of their kind. The last one gets slices too,
            and so does the last one whose kernels are whole: neither always holds less.
    """

    def __init__(self, alternatives: Alternatives, planners: Planners, forms: Callable[[], Sequence[Rewriting]]):
        self._alternatives = alternatives
        self._planners = planners
        stages = alternatives.at_home(planners.of, planners.variables, forms)
        self._at_home = [placed for stage in stages for placed in self._in_tiers(stage)]
        whole = [stage for stage in stages if not stage.sliced][-1:]
        self._last = [placed for stage in dict.fromkeys((*whole, *stages[-1:])) for placed in self._in_tiers(stage)]

    def _in_tiers(self, stage: Rewriting) -> list[Rewriting]:
        return self._alternatives.in_tiers(stage, self._planners.of, self._planners.host_tiers)

    def fastest(self, best: Found | None, limit_bytes: int) -> Found | None:
        """`best`, or a faster plan within the limit; one with kernels or updates in slices where there is no other.

        Planning slices takes long, so limits that can be kept without them have none.
        """
        if any(self._planners.least_bytes(rewriting.at_home) > limit_bytes for rewriting in self._at_home[:1]):
            return best  # the step begins with more in the arena, whatever leaves it
        at_home = self._with_room(self._at_home)
        for rewriting in at_home:
            if not rewriting.sliced:
                best = self._faster(rewriting, limit_bytes, best)
        if self._limits_host if best is None else self._is_small:
            for rewriting in self._nearly_all:
                best = self._faster(rewriting, limit_bytes, best)
        if best is None:
            best = self._planners.fastest([r for r in at_home if r.sliced], Planner.candidate, limit_bytes)
        return self._fastest_sliced(limit_bytes) if best is None else best

    @property
    def _nearly_all(self) -> list[Rewriting]:
        """With nearly all variables at home. Where host memory has no room for all, only these may have a plan."""
        if not self._last:
            return []
        found = self._alternatives.nearly_all_at_home(self._planners.of, self._planners.variables)
        return self._with_room([placed for stage in found for placed in self._in_tiers(stage)])

    @property
    def _limits_host(self) -> bool:
        return self._planners.host_tiers.host_bytes is not None

    @property
    def _is_small(self) -> bool:
        problem = self._planners.of(self._planners.variants.plain).problems[0]
        return len(problem.order) <= NEARLY_ALL_KERNELS

    def _faster(self, rewriting: Rewriting, limit_bytes: int, best: Found | None) -> Found | None:
        """`best`, or a faster plan within the limit."""
        if best is not None and self._least_s(rewriting, limit_bytes) >= best.candidate.timing.total_s:
            return best
        return self._planners.fastest([rewriting], Planner.candidate, limit_bytes, best)

    def _least_s(self, rewriting: Rewriting, limit_bytes: int) -> float:
        """As `Planners.least_at_home_s`."""
        return self._planners.least_at_home_s(rewriting, self._alternatives.bytes_at_home(rewriting), limit_bytes)

    @property
    def last(self) -> list[Rewriting]:
        """Those that hold the least: all forms with all variables at home, and the last ones with the smallest slices;
        with nearly all of them, where host memory may have no room for all.
        """
        few = self._nearly_all[-1:] if self._limits_host else []
        smallest = {bool(rewriting.sliced): rewriting for rewriting in self._sliced}
        return [*few, *self._full, *smallest.values()]

    @property
    def _full(self) -> list[Rewriting]:
        """All forms with all variables at home."""
        return self._with_room([r for r in self._at_home if r.at_home == self._at_home[-1].at_home])

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
        return [r for at_home in self._with_room(self._last) for r in self._alternatives.in_slices(at_home)]

    def _with_room(self, rewritings: Sequence[Rewriting]) -> list[Rewriting]:
        """Those whose variables have room in host memory. It is known before their graphs are made."""
        room_bytes, bytes_of = self._planners.host_tiers.host_bytes, self._alternatives.bytes_at_home
        if room_bytes is None:
            return list(rewritings)
        return [r for r in rewritings if bytes_of(r) - bytes_of(r._replace(at_home=r.on_disk)) <= room_bytes]

    def _fastest_sliced(self, limit_bytes: int) -> Found | None:
        """The plan with the largest slices that fits without evictions, or else with them: smaller ones take longer."""
        for candidate in (Planner.unmoved_candidate, Planner.candidate):
            for variant, planner in self._planners.used(self._sliced):
                if (found := candidate(planner, limit_bytes)) is not None:
                    return Found(variant, found)
        return None
