"""Searches the plans of one step: its variants, with a planner for each.

A step may be rewritten in several ways before its kernels are ordered (`variants.py`): each is a step of its own to the
planner. The fastest plan of all within a limit is the plan; the lowest of all names the floor.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence

from tfswap.analysis.body_encodings import is_inner
from tfswap.analysis.cost import Costs
from tfswap.compiler.alternatives import Alternatives
from tfswap.compiler.concurrency import concurrent_rewritings
from tfswap.compiler.options import Options
from tfswap.compiler.planners import Bounds, Planners, faster, lower
from tfswap.compiler.rewriting import Found, Rewriting
from tfswap.compiler.slice_plans import SlicePlans
from tfswap.compiler.state_plans import StatePlans
from tfswap.compiler.variants import Variants
from tfswap.ir.permits import CLOSE, SLICE, STATE
from tfswap.kernels.target import Target
from tfswap.native.load import load_if_built
from tfswap.plan.plan import Plan
from tfswap.plan.schedule import planned_choice
from tfswap.planner.bodies import Rung, least_around
from tfswap.planner.candidates import Candidate
from tfswap.planner.planner import Planner
from tfswap.planner.problem import Choice, smallest_bytes
from tfswap.simulator.arena_snapshot import ArenaSnapshot

OTHER_SHARE = 0.3
"""The share of rungs that a variant with encodings, or with evictions in bodies, gets, over those of the unchanged
step. It bounds the planning time of variants that gain nothing.
"""


class Search:
    """The plans of one step in the assumed arena.

    Args:
        variants: the step's variants.
        target: the device, and which ops the step may have.
        options: the user's options.
        costs: the cost model.
        snapshot: the arena before the step.

    Attributes:
        variants: the step's variants, each made at its first use.
        alternatives: the rewritings that are tried.
        planners: the planners of the variants.
    """

    def __init__(
        self,
        variants: Variants,
        target: Target,
        options: Options,
        costs: Costs,
        snapshot: ArenaSnapshot,
    ):
        load_if_built()  # which replays schedules
        self._options = options
        self._costs = costs
        self._target = target
        self._chooses = options.solver == "default" and target.own_ops
        self.variants = variants
        self.alternatives = Alternatives(self.variants, target.device, costs, close=options.values == CLOSE)
        self._rungs_found: dict[Rewriting, list[tuple[Rewriting, Rung]]] = {}
        self._rung_of: dict[Rewriting, Rung] = {}
        self._least: Found | None = None
        self.planners = Planners(self.variants, target, options, costs, self._bounds_of, snapshot)
        self._slices = SlicePlans(self.alternatives, self.planners, allowed=self._allows(SLICE))

    def assume_arena(self, snapshot: ArenaSnapshot, begin_bytes: int | None = None) -> None:
        """As `Planners.assume_arena`."""
        self.planners.assume_arena(snapshot, begin_bytes)
        self._least = None

    def assume_made(self, rewriting: Rewriting, snapshot: ArenaSnapshot) -> None:
        """As `Planners.assume_made`."""
        self.planners.assume_made(rewriting, snapshot)
        self._least = None

    def _bounds_of(self, rewriting: Rewriting) -> Bounds:
        is_first = rewriting in self._stages or self.alternatives.is_stage_at_home(rewriting)
        share = (1.0 if is_first else OTHER_SHARE) / len(self._stages)
        rung = self._rung_of.get(rewriting)
        if rung is None:
            return Bounds(share, least_bytes=self.planners.least_bytes(rewriting.at_home))
        return Bounds(share, self._least_s(rewriting, rung), self._least_bytes(rewriting, rung))

    @functools.cached_property
    def rewritings(self) -> list[Rewriting]:
        """The rewritings that a plan may use, the unchanged step first."""
        stages = self._moved_inside
        if not self._allows("encode"):
            return stages
        alternatives, planner_of, encoded = self.alternatives, self.planners.of, self._encoded
        found = [] if encoded is None else [encoded]
        found += alternatives.packed(planner_of, encoded or self.variants.base)
        found += alternatives.sparse(planner_of, found[-1] if found else self.variants.base)
        return [*stages, *found, *self._encoded_inside]

    @property
    def state(self) -> StatePlans | None:
        """The plans with variables at home on the host; None where they stay."""
        if not self._allows(STATE):
            return None
        return StatePlans(self.alternatives, self.planners, lambda: self._lowest_forms)

    @functools.cached_property
    def _lowest_forms(self) -> list[Rewriting]:
        """Those holding the least of their kind: with encodings, with the most moved in loops, both, in slices."""
        encoded = [] if self._encoded is None else [self._encoded]
        found = dict.fromkeys((*encoded, *self._last_stages, *self._encoded_inside, *self._slices.lowest))
        return [form for form in found if form != self.variants.base]

    def _allows(self, tactic: str) -> bool:
        return self._chooses and tactic in self._options.tactics

    @functools.cached_property
    def _encoded(self) -> Rewriting | None:
        """The step with all encodings that gain something; None where none does or none is allowed."""
        return self.alternatives.encoded(self.planners.of) if self._allows("encode") else None

    @functools.cached_property
    def _encoded_inside(self) -> list[Rewriting]:
        """With kernels in bodies that take encodings, and the most of loops' saved tensors swapped, or recomputed."""
        if self._encoded is None or len(self._stages) == 1:
            return []
        found = (self.alternatives.encoded_too(self._encoded, stage) for stage in self._last_stages)
        return [r for r in dict.fromkeys(found) if r is not None and r != self._encoded]

    @property
    def _last_stages(self) -> list[Rewriting]:
        """The stages with the most of loops' tensors swapped, and with the most recomputed."""
        return [[stage for stage in self._stages if not stage.recomputed][-1], self._stages[-1]]

    @functools.cached_property
    def _stages(self) -> list[Rewriting]:
        """Stages of swapping or recomputing tensors saved by loops, from none to all."""
        tactics = self._options.tactics
        if not self._chooses or not self.variants.accumulators:
            return [self.variants.base]
        smallest, swap = smallest_bytes(self.planners.live_peak_bytes), "swap" in tactics
        found = self.alternatives.stages(smallest) if swap else [self.variants.base]
        if "recompute" in tactics:
            found += self.alternatives.recomputed(smallest, self._costs, swap=swap)
        return found

    @functools.cached_property
    def _moved_inside(self) -> list[Rewriting]:
        """The stages, also with prefetched copies."""
        return [*self._stages, *self.alternatives.prefetched(self._stages)]

    @functools.cached_property
    def _grouped(self) -> list[Rewriting]:
        """With the kernels of bodies in concurrent groups, for limits with room for these."""
        if not (self._chooses and self.variants.plain.graph.bodies and self._target.runs_concurrently):
            return []
        return [stage._replace(grouped=True) for stage in self._moved_inside]

    @functools.cached_property
    def _inner_forms(self) -> dict[Rewriting, int]:
        """The variants in whose bodies tensors may be evicted, each with a lower bound of the live bytes around the
        bodies.

        The unchanged step, and the last stage; both without encodings in bodies and with them.
        """
        if not self._chooses or not self.variants.plain.graph.bodies:
            return {}
        forms = [self._stages[0], self._stages[-1]]
        if self._encoded is not None and any(map(is_inner, self._encoded.encoded)):
            forms += [self._encoded, *self._encoded_inside[-1:]]
        around = ((form, self.variants[form]) for form in dict.fromkeys(forms))
        found = ((form, least_around(one.graph, self.planners.of(one).problems[0])) for form, one in around)
        return {form: nbytes for form, nbytes in found if nbytes is not None}

    def _inner(self, limit_bytes: int) -> list[tuple[Rewriting, Rung]]:
        """Rewritings with evictions in bodies, where a limit may be met by them, and can't be met otherwise or not as
        fast. Those that add the least time come first.
        """
        found: list[tuple[Rewriting, Rung]] = []
        for form, around_bytes in self._inner_forms.items():
            variant = self.variants[form]
            if self.planners.resident_bytes(variant) + around_bytes <= limit_bytes:
                unmoved = self.planners.of(variant).unmoved_candidate(limit_bytes)
                if unmoved is None or unmoved.timing.total_s > self.planners.unmoved_s(form):
                    found += self._rungs(form)
        return sorted(found, key=lambda entry: self._least_s(*entry))

    def _rungs(self, rewriting: Rewriting) -> list[tuple[Rewriting, Rung]]:
        """Rewritings with evictions in a variant's bodies. They do not depend on the limit."""
        if rewriting not in self._rungs_found:
            options, problem = self._options, self.planners.of(self.variants[rewriting]).problems[0]
            rungs = self.variants.rungs(rewriting, problem, options.tactics, options.tiers)
            self._rungs_found[rewriting] = [(rewriting._replace(inside=rung.inside), rung) for rung in rungs]
            self._rung_of.update(self._rungs_found[rewriting])
        return self._rungs_found[rewriting]

    def _least_s(self, rewriting: Rewriting, rung: Rung) -> float:
        """A lower bound of the seconds of plans with these bodies."""
        return self.planners.unmoved_s(rewriting.outside) + rung.more_s

    def _least_bytes(self, rewriting: Rewriting, rung: Rung) -> int:
        """A lower bound of the peak of plans with these bodies."""
        form = rewriting.outside
        return self.planners.resident_bytes(self.variants[form]) + max(self._inner_forms[form], rung.least_bytes)

    def fastest(self, limit_bytes: int | None, near: bool = True) -> Found | None:
        """The fastest plan of all variants within the limit; the one without evictions for no limit; None if none fits.
        With `near`, faster plans are then searched near that one.
        """
        if limit_bytes is None:
            unmoved = self.planners.of(self.variants.plain).candidate(None)
            return None if unmoved is None else Found(self.variants.plain, unmoved)
        found = self._fastest(limit_bytes)
        return self.planners.improved(found, limit_bytes) if near and found is not None and self._chooses else found

    def _fastest(self, limit_bytes: int) -> Found | None:
        # Candidates without evictions are quickly judged for all variants, and often faster than those with some.
        forms = [*self._grouped, *self.rewritings]
        best = self.planners.fastest(forms, Planner.unmoved_candidate, limit_bytes)
        best = self._fastest_concurrent(best, limit_bytes)
        best = self.planners.fastest(self.rewritings, Planner.candidate, limit_bytes, best)
        if (state := self.state) is not None:
            best = state.fastest(best, limit_bytes)
        best = self._slices.fastest(best, limit_bytes)
        if best is not None and all(
            best.candidate.timing.total_s <= self.planners.unmoved_s(f) for f in self._inner_forms
        ):
            return best  # no eviction is needed
        if best is None and limit_bytes < self.lowest().candidate.peak_bytes:
            return None
        inner = [entry for entry in self._inner(limit_bytes) if self._least_bytes(*entry) <= limit_bytes]
        few = [entry for entry in inner if entry[1].stands_for_others]
        unmoved_fits = {form for form in self._inner_forms if self.planners.unmoved_bytes(form) <= limit_bytes}
        inner = [entry for entry in inner if entry[0].outside in unmoved_fits]
        for candidate, entries in ((Planner.unmoved_candidate, inner), (Planner.candidate, few)):
            for rewriting, rung in entries:
                if best is not None and best.candidate.timing.total_s <= self._least_s(rewriting, rung):
                    break
                variant = self.variants[rewriting]
                if self.planners.has_room(variant):
                    best = faster(best, variant, candidate, self.planners.of(variant), limit_bytes)
        return best

    def fitting(self, plan: Plan, limit_bytes: int) -> Found | None:
        """The fastest form of a plan's order and evictions within the limit; None if none fits.

        Args:
            plan: fits the step.
        """
        variant = self.variants[Rewriting.of(plan)]
        planner, choice = self.planners.of(variant), Choice(*planned_choice(variant.flow, plan))
        found = planner.judged(choice).fitting(limit_bytes)
        return None if found is None or not planner.tiers.fit(found.memory) else Found(variant, found)

    def _fastest_concurrent(self, best: Found | None, limit_bytes: int) -> Found | None:
        """`best`, or the step with kernels in the fastest groups that the limit has room for."""
        plain = self.variants.plain
        if not self._chooses or not self._target.runs_concurrently:
            return best
        order = self.variants.orders_of(plain.rewriting).ranked[0]
        live_bytes = self.planners.of(plain).problems[0].live_peak_bytes
        room_bytes = limit_bytes - self.planners.resident_bytes(plain)
        failed: list[list[int]] = []  # by variant without a plan in the limit, the bytes of each group
        for total_s, rewriting in concurrent_rewritings(self.variants, order, live_bytes, room_bytes):
            if best is not None and best.candidate.timing.total_s <= total_s:
                return best
            live = [schedule.live_bytes for schedule in self.variants.schedules(rewriting.concurrent)]
            if _holds_as_much(live, failed):
                continue
            held = [group.reserved + sum(group.sizes) for group in self.variants.groups(rewriting.concurrent)]
            if max(held) > room_bytes or _holds_as_much(held, failed):
                continue
            variant = self.variants[rewriting]
            found = self.planners.of(variant).unmoved_candidate(limit_bytes)
            if found is None:
                failed.append(held)
            elif self._is_above_floor(found):
                return faster(best, variant, Planner.unmoved_candidate, self.planners.of(variant), limit_bytes)
        return best

    def _is_above_floor(self, candidate: Candidate) -> bool:
        """Whether `lowest` has no higher peak. In an arena with holes, groups may have a lower one."""
        if self.planners.of(self.variants.plain).lowest_unmoved(candidate.peak_bytes + 1) is not None:
            return True  # an upper bound of `lowest`, which is found quickly
        return candidate.peak_bytes >= self.lowest().candidate.peak_bytes

    def lowest(self) -> Found:
        """The candidate of `fastest` with the lowest peak."""
        if self._least is None:
            self._least = self._lowest()
        return self._least

    def _lowest(self) -> Found:
        # The last variants of a kind evict most, and rule out most of the others.
        least: Found | None = None
        last = [] if (state := self.state) is None else state.last
        for variant, planner in [*self.planners.used([*self.rewritings, *last, *self._slices.forms])][::-1]:
            least = lower(least, variant, planner.lowest)
        assert least is not None, "the step as it is has a peak"
        inner = sorted(self._inner(least.candidate.peak_bytes - 1), key=lambda entry: self._least_bytes(*entry))
        for form in self._inner_forms:
            least = self._lower_inside(least, form, [entry for entry in inner if entry[0].outside == form])
        return least

    def _lower_inside(self, least: Found, form: Rewriting, inner: list[tuple[Rewriting, Rung]]) -> Found:
        """`least`, or a variant's candidate with a lower peak by evictions in its bodies.

        Args:
            inner: the rewritings, by their lower bounds.
        """
        # With little host memory, fewer swaps in bodies leave more of it for tensors around them.
        by_bytes_alone = self._options.tiers.host_bytes is None
        if by_bytes_alone and least.variant.rewriting == form and not least.peaks_in_body:
            return least
        unmoved_bytes = self.planners.unmoved_bytes(form) if inner else 0
        for least_bytes, rungs in itertools.groupby(inner, key=lambda entry: self._least_bytes(*entry)):
            if least_bytes >= least.candidate.peak_bytes:
                break
            before, any_stands_for_others = least, False
            for rewriting, rung in rungs:
                any_stands_for_others |= rung.stands_for_others
                if not rung.stands_for_others and unmoved_bytes >= least.candidate.peak_bytes:
                    continue
                variant = self.variants[rewriting]
                if self.planners.has_room(variant):
                    planner = self.planners.of(variant)
                    lowest = planner.lowest if rung.stands_for_others else planner.lowest_unmoved
                    least = lower(least, variant, lowest) or least
            # The next rungs hold more bytes in the bodies, and as many around them.
            if by_bytes_alone and least is before and any_stands_for_others:
                break
        return least


def _holds_as_much(held: Sequence[int], others: Sequence[Sequence[int]]) -> bool:
    """Whether groups that hold these bytes hold at least those of one of the `others`."""
    return any(all(map(operator.ge, held, other)) for other in others)
