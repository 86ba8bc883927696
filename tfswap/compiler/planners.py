"""A planner for each variant of a step, in the assumed arena."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from tfswap.analysis.cost import Costs, spread_over
from tfswap.analysis.lossless_forms import most_spilled_bytes
from tfswap.compiler.options import Options
from tfswap.compiler.rewriting import Found, Rewriting, Variant
from tfswap.compiler.variants import Variants
from tfswap.kernels.target import Target
from tfswap.passes.tactics.state_homes import bytes_at_home
from tfswap.plan.schedule import build_schedule
from tfswap.planner.candidates import Candidate
from tfswap.planner.host_tiers import Tiers
from tfswap.planner.planner import Planner
from tfswap.planner.promise import promised
from tfswap.simulator.arena_snapshot import ArenaSnapshot, bytes_before
from tfswap.simulator.memory import simulate_memory


class Bounds(NamedTuple):
    """Bounds for a variant before it is planned.

    Attributes:
        share: the number of its rungs that are simulated, as a share of those of the unchanged step.
        least_s, least_bytes: lower bounds of the time and the peak of its plans.
    """

    share: float
    least_s: float = 0.0
    least_bytes: int = 0


class Planners:
    """The planners of a step's variants, each made on first use.

    Attributes:
        variants: the step's variants.
        target: what the plans are for.
        lent_bytes: memory that another device lends for swapped tensors.
        begin_bytes: the most bytes in the arena before variables leave it, in the call that plans the step first. No
            peak of that call is lower. 0 in later calls, and where that arena is unknown.
    """

    def __init__(
        self,
        variants: Variants,
        target: Target,
        options: Options,
        costs: Costs,
        bounds_of: Callable[[Rewriting], Bounds],
        snapshot: ArenaSnapshot,
    ):
        self.variants = variants
        self.target = target
        self._options = options
        self._costs = costs
        self._bounds_of = bounds_of
        self.lent_bytes = self.begin_bytes = 0
        self.assume_arena(snapshot)

    def assume_arena(self, snapshot: ArenaSnapshot, begin_bytes: int | None = None) -> None:
        """Plan from now on for an arena with this content.

        Args:
            begin_bytes: the attribute of that name; by default it stays.
        """
        self._snapshot = snapshot
        self.begin_bytes = self.begin_bytes if begin_bytes is None else begin_bytes
        self._made: dict[Rewriting, ArenaSnapshot] = {}  # by rewriting without plans of bodies, which add no constants
        self._moved: dict[tuple[str, ...], ArenaSnapshot] = {}  # by variables at home on the host
        self._planners: dict[Rewriting, Planner] = {}

    def assume_costs(self, costs: Costs) -> None:
        """Plan from now on with these costs."""
        if costs != self._costs:
            self._costs = costs
            self._planners = {}

    def assume_lent(self, nbytes: int) -> None:
        """Plan from now on with this much memory of another device."""
        if nbytes != self.lent_bytes:
            self.lent_bytes = nbytes
            self._planners = {}

    def least_bytes(self, at_home: Collection[str]) -> int:
        """A lower bound of the peak that plans with these variables at home promise."""
        return promised(self.begin_bytes) if at_home and self.begin_bytes else 0

    def assume_made(self, rewriting: Rewriting, snapshot: ArenaSnapshot) -> None:
        """Plan from now on for an arena with this content: that of `assume_arena`, and the variant's constants.

        Each variant has constants of its own. After it has allocated them, it is planned with these, and with those of
        no other variant.
        """
        made = rewriting.outside
        self._made[made] = snapshot
        for planned in [r for r in self._planners if r.outside == made]:
            del self._planners[planned]

    def has_made(self, rewriting: Rewriting) -> bool:
        """Whether the arena with a variant's constants is known."""
        return rewriting.outside in self._made

    def snapshot_of(self, rewriting: Rewriting) -> ArenaSnapshot:
        """The arena before a variant runs."""
        made = self._made.get(rewriting.outside)
        if made is not None:
            return made
        at_home = rewriting.at_home
        if at_home not in self._moved:
            self._moved[at_home] = self._snapshot.with_at_home(at_home)
        return self._moved[at_home]

    @property
    def host_tiers(self) -> Tiers:
        """The host memory and disk for variables at home on the host, and for swapped tensors."""
        return self._options.tiers

    @property
    def variables(self) -> frozenset[str]:
        """The handles of the variables that can be moved out of the arena."""
        return frozenset(variable.feed for variable in self._snapshot.variables)

    def resident_bytes(self, variant: Variant) -> int:
        """Bytes in the arena before a variant runs, as its plans are judged there."""
        return bytes_before(variant.flow, self.snapshot_of(variant.rewriting))

    def of(self, variant: Variant) -> Planner:
        """The planner for a variant."""
        rewriting = variant.rewriting
        if rewriting not in self._planners:
            bounds = self._bounds_of(rewriting)
            self._planners[rewriting] = Planner(
                variant.flow,
                self.target,
                snapshot=self.snapshot_of(rewriting),
                tiers=self.tiers_of(variant),
                tactics=self._options.tactics,
                solver=self._options.solver,
                costs=self._costs,
                cost_s=self.variants.cost_s(variant),
                share=bounds.share,
                least_s=bounds.least_s,
                least_bytes=bounds.least_bytes,
                orders=self.variants.orders_of(rewriting),
            )
        return self._planners[rewriting]

    def used(self, rewritings: Iterable[Rewriting]) -> Iterator[tuple[Variant, Planner]]:
        """Each of these variants that may be chosen, with its planner, made one at a time."""
        for rewriting in rewritings:
            variant = self.variants[rewriting]
            if self.has_room(variant):
                yield variant, self.of(variant)

    def fastest(
        self,
        rewritings: Iterable[Rewriting],
        candidate: Callable[[Planner, int, Candidate | None], Candidate | None],
        limit_bytes: int,
        best: Found | None = None,
    ) -> Found | None:
        """`best`, or the fastest candidate of these variants within the limit, as of `faster`."""
        for variant, planner in self.used(rewritings):
            best = faster(best, variant, candidate, planner, limit_bytes)
        return best

    def improved(self, found: Found, limit_bytes: int) -> Found:
        """`found`, or a faster plan within the limit that a search near it finds, or one for another limit has found.

        So a limit that is asked for after a lower one gets no slower plan.
        """
        planner = self.of(found.variant)
        best = found._replace(candidate=planner.near.improved(found.candidate, limit_bytes))
        for rewriting, other in self._planners.items():
            for candidate in other.near.found:
                if candidate.peak_bytes <= limit_bytes and candidate.timing.total_s < best.candidate.timing.total_s:
                    best = Found(self.variants[rewriting], candidate)
        return best

    @functools.cached_property
    def live_peak_bytes(self) -> int:
        """Bytes of the live tensors at the peak of the step's best order, with nothing moved."""
        plain = self.variants.plain
        order = self.variants.orders_of(plain.rewriting).ranked[0]
        return simulate_memory(plain.flow, build_schedule(order, ()), live=True).peak_bytes

    def unmoved_s(self, form: Rewriting) -> float:
        """A lower bound of the seconds of a variant's plans."""
        return min(judged.seconds for judged in self.of(self.variants[form]).unmoved)

    def least_kernels_s(self, form: Rewriting) -> float:
        """A lower bound of `unmoved_s` for which no order is needed: each kernel's work on all cores."""
        variant, rates = self.variants[form], self._costs.rates
        flow, cost_s = variant.flow, self.variants.cost_s(variant)
        kernels = (i for i, is_kernel in enumerate(flow.is_kernel) if is_kernel)
        return sum(cost_s[i] * min(1.0, spread_over(flow.nodes[i], rates) / rates.cores) for i in kernels)

    def least_evicted_s(self, form: Rewriting, limit_bytes: int) -> float:
        """About the least seconds of a variant's plans within the limit: those of its kernels, and of one copy of each
        byte above the limit.
        """
        rates = self._costs.rates
        evicted_bytes = max(0, self.unmoved_bytes(form) - limit_bytes)
        return self.unmoved_s(form) + evicted_bytes / max(rates.in_bytes_per_s, rates.out_bytes_per_s)

    def least_at_home_s(self, rewriting: Rewriting, nbytes: int, limit_bytes: int) -> float:
        """About the least seconds of plans with variables at home: those of a plan with them in the arena and as much
        more room, or of one copy of each, which overlaps with kernels as far as these are not delayed.

        Args:
            nbytes: of these variables.
        """
        planner = self.of(self.variants[rewriting._replace(at_home=(), on_disk=())])
        roomy = planner.candidate(limit_bytes + nbytes)
        rates = self._costs.rates
        copies_s = nbytes / max(rates.in_bytes_per_s, rates.out_bytes_per_s)
        return math.inf if roomy is None else max(copies_s, roomy.timing.total_s + rates.copy_share * copies_s)

    def unmoved_bytes(self, form: Rewriting) -> int:
        """A lower bound of the peaks of plans with evictions in bodies only."""
        variant = self.variants[form]
        return self.of(variant).live_bytes_outside(variant.graph.bodies)

    def tiers_of(self, variant: Variant) -> Tiers:
        """The host memory and disk for swapped tensors, without the bytes that sparse rows may spill, and without those
        of variables at home on the host.
        """
        tiers = dataclasses.replace(self._options.tiers, lent_bytes=self.lent_bytes)
        if tiers.host_bytes is None:
            return tiers
        packed = variant.rewriting.packed
        spilled_bytes = sum(most_spilled_bytes(p, variant.graph.tensor(p.tensor).type) for p in packed)
        graph, disk = variant.graph, tiers.disk_bytes
        return dataclasses.replace(
            tiers,
            host_bytes=tiers.host_bytes - spilled_bytes - bytes_at_home(graph),
            disk_bytes=None if disk is None else disk - bytes_at_home(graph, disk=True),
        )

    def has_room(self, variant: Variant) -> bool:
        """Whether host memory and disk have room for variables, the spill of sparse rows, and swaps in bodies."""
        tiers = self.tiers_of(variant)
        if tiers.host_bytes is None:
            return True
        everywhere = None if tiers.disk_bytes is None else tiers.host_bytes + tiers.disk_bytes
        has_room_for_homes = tiers.host_bytes >= 0 and (tiers.disk_bytes is None or tiers.disk_bytes >= 0)
        return has_room_for_homes and (everywhere is None or variant.flow.inner_host_bytes <= everywhere)


def lower(least: Found | None, variant: Variant, lowest: Callable[[float], Candidate | None]) -> Found | None:
    """`least`, or a variant's candidate with a lower peak.

    Args:
        lowest: gives the lowest candidate with a peak below its argument.
    """
    found = lowest(math.inf if least is None else least.candidate.peak_bytes)
    return least if found is None else Found(variant, found)


def faster(
    best: Found | None,
    variant: Variant,
    candidate: Callable[[Planner, int, Candidate | None], Candidate | None],
    planner: Planner,
    limit_bytes: int,
) -> Found | None:
    """`best`, or a faster candidate of a planner within the limit.

    Args:
        candidate: the planner's method that gives it.
    """
    faster_than = None if best is None else best.candidate
    found = candidate(planner, limit_bytes, faster_than)
    return best if found is None or found is faster_than else Found(variant, found)
