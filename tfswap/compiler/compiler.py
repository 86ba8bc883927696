"""Compiles a graph to a rewritten graph, for every front end: facts, plan, passes, verification."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from tfswap.analysis.cost import Costs
from tfswap.analysis.pipelines import fills_arena
from tfswap.compiler.known_plans import RECALLED_NOTE, KnownPlans
from tfswap.compiler.lower import lower, prepare_in_gate
from tfswap.compiler.options import Options
from tfswap.compiler.plan_cache import PlanCache, StepPlans
from tfswap.compiler.plan_check import require_allowed
from tfswap.compiler.policy import note_permits
from tfswap.compiler.preconditions import (
    require_countable,
    require_functional,
    require_sight,
    require_sizes,
)
from tfswap.compiler.prepared_step import PreparedStep
from tfswap.compiler.process_names import contents
from tfswap.compiler.recurrent_sizes import settle_recurrent
from tfswap.compiler.refusal import refuse
from tfswap.compiler.resident_margin import fastest, floor_bytes, margin_of
from tfswap.compiler.rewriting import Found, Rewriting
from tfswap.compiler.search import Search
from tfswap.compiler.similar_plan import found_like
from tfswap.compiler.step_forms import Formed, StepForm, StepForms
from tfswap.compiler.step_report import homes_of, report_of
from tfswap.compiler.unoptimised import UnoptimisedStep, discarded_constant_bytes
from tfswap.errors import InfeasibleMemoryLimit
from tfswap.ir.graph import Graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.prepare.unroll_loops import leaves_loops
from tfswap.plan.plan import Plan, fingerprint
from tfswap.planner.promise import promised
from tfswap.planner.validate import require_accumulators, require_fit
from tfswap.report.report import Report
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN, ArenaSnapshot
from tfswap.simulator.unordered import Baseline
from tfswap.support import progress
from tfswap.support.gc_pause import without_collector
from tfswap.support.once import Shared
from tfswap.support.sizes import parse_limit


class Optimizer(Formed):
    """The compiler of one graph: its facts, its planners and its plans.

    Args:
        graph: the step, with every size bound.
        device: the device that it runs on.
        snapshot: the arena before the step.
        extra_margin_bytes: left free in addition, since a run has shown the need.
        locate: from a node's name to the user's source line, where that is known.
        costs: the cost model; by default by the options' profile or the kind of device.
        keeps_results: whether the caller gets tensors that it may keep, as from a function; a session copies them out.
        held: names of tensors that the unoptimised step holds until its end.
        others_bytes: bytes that others allocate while the step runs, unoptimised too, as a data pipeline's batches.
        plan_cache: the cache to read earlier plans from, and to keep new ones in.
        shared: as of `Target`; None for a step that is one part.

    Attributes:
        example: a similar step that has been searched, from whose search plans may be taken (similar_plan.py).
        searched: the step whose search has given the latest plan: this one or `example`; None where neither has.
        margin_is_of_residents: whether `extra_margin_bytes` is for tensors in the arena (resident_margin.py).
    """

    example: Optimizer | None = None
    searched: Optimizer | None = None
    margin_is_of_residents = False

    @progress.task("reading the step")
    @without_collector
    def __init__(
        self,
        graph: Graph,
        device: DeviceModel,
        options: Options | None = None,
        *,
        snapshot: ArenaSnapshot = NOTHING_KNOWN,
        extra_margin_bytes: int = 0,
        locate: Callable[[str], str | None] = lambda _: None,
        costs: Costs | None = None,
        keeps_results: bool = False,
        held: Sequence[str] = (),
        others_bytes: int = 0,
        plan_cache: PlanCache | None = None,
        shared: Shared | None = None,
    ):
        self.options = (options or Options()).on(device)
        self.graph = graph
        self.device = device
        self.extra_margin_bytes = extra_margin_bytes
        require_functional(graph, locate)
        require_sight(graph, locate)
        settle_recurrent(graph, device)
        require_sizes(graph, locate)
        require_countable(graph, snapshot.total_bytes)
        self.fingerprint = fingerprint(graph, contents(graph))
        settled = graph.copy()
        note_permits(settled, self.options.keep, self.options.policy, locate)
        given = keeps_results, tuple(held), others_bytes > 0 or fills_arena(graph, device)
        stored: StepPlans | None = None
        if plan_cache is not None and costs is None:
            stored = StepPlans(plan_cache, settled, self.fingerprint, device, self.options, given)
        self._known = KnownPlans(stored, self.judged)
        self.target = Target(device, not self.options.portable, *given, shared or Shared.of_one())
        self.costs = costs or Costs.of(device, self.options.profile)
        later = settled.copy() if settled.bodies else settled  # for the form with all loops unrolled

        def formed(target: Target, there: ArenaSnapshot) -> StepForm:
            noted = later if target.unrolls else settled
            prepared = PreparedStep.of(graph, noted, target, self.options, self.costs, locate)
            return StepForm(target, prepared, Search(prepared.variants, target, self.options, self.costs, there))

        self.forms = StepForms(self.target, formed, snapshot, lambda: leaves_loops(later, self.target))
        self._computed_bytes = discarded_constant_bytes(graph.traced or graph, device)
        self._arena_bytes = snapshot.total_bytes
        self.unoptimised = UnoptimisedStep(
            graph,
            self.target,
            self.costs,
            self._ordered_seconds,
            fingerprint=self.fingerprint,
            others_bytes=others_bytes,
            known=stored,
            snapshot=snapshot,
            resident_bytes=self.resident_bytes,
            unrolled=self.prepared.facts.unrolled > 0,
            overlapping_bytes=self.prepared.facts.overlapping_bytes,
        )

    @property
    def baseline(self) -> Baseline:
        """As `UnoptimisedStep.baseline`. A limit in bytes does not need it."""
        return self.unoptimised.baseline

    def _ordered_seconds(self) -> float:
        """The total seconds of the step's kernels, run one after the other."""
        return sum(s for s, k in zip(self.costs.of_step(self.flow), self.flow.is_kernel, strict=True) if k)

    def assume_arena(self, snapshot: ArenaSnapshot, begin_bytes: int | None = None) -> None:
        """As `Planners.assume_arena`. The unoptimised peak stays the same, once the variables are known."""
        self.forms.assume_arena(snapshot, begin_bytes)
        self._arena_bytes = snapshot.total_bytes
        self.unoptimised.assume_variables(snapshot)

    def assume_made(self, plan: Plan, snapshot: ArenaSnapshot) -> None:
        """From now on plan for this arena, which has the constants of the function of `plan`."""
        self.use(plan)
        self.search.assume_made(Rewriting.of(plan), snapshot)
        self._arena_bytes = snapshot.total_bytes

    def has_made(self, plan: Plan) -> bool:
        """Whether the constants of `plan`'s variant in the arena are known."""
        self.use(plan)
        return self.search.planners.has_made(Rewriting.of(plan))

    @property
    def resident_bytes(self) -> int:
        """Bytes in the arena throughout the step: variables, arguments and constants, and tensors of others."""
        return max(self._arena_bytes, self.flow.persistent_bytes)

    def plan(self, limit: int | str | None, *, ordered: bool = False) -> Plan:
        """The plan for a limit. Raises InfeasibleMemoryLimit, with the floor, when there is none.

        Args:
            ordered: order the step also where the limit is well above the unoptimised peak.
        """
        plan = self.find(limit, ordered=ordered)
        if plan is None:
            raise self.infeasible(limit)
        return plan

    @progress.task("planning")
    @without_collector
    def find(self, limit: int | str | None, *, ordered: bool = False) -> Plan | None:
        """As `plan`; None in place of a refusal, which takes longer, since it computes the floor."""
        limit_bytes = self._limit_bytes(limit)
        aim = None if limit_bytes is None else limit_bytes - self.extra_margin_bytes
        self.searched = None
        self.forms.use(unrolled=False)
        if not ordered and (aim is None or self.fits_unchanged(aim)):
            return self.unchanged(limit_bytes)
        if not self._known or limit_bytes is None or self.search.planners.lent_bytes:
            return self._planned(limit_bytes, aim)
        return self._known.recall_or(limit_bytes, ordered, lambda: self._planned(limit_bytes, aim))

    def _limit_bytes(self, limit: int | str | None) -> int | None:
        return None if limit is None else parse_limit(limit, lambda: self.baseline.peak_bytes)

    def _planned(self, limit_bytes: int | None, aim: int | None) -> Plan | None:
        """A new plan for a limit, if there is one.

        Args:
            aim: the highest peak that it may have.
        """
        like = found_like(self.example, self, aim)
        self.searched = self.example if like else self
        found = like or fastest(self, limit_bytes)
        if found is None and self.forms.use_unrolled():
            found = fastest(self, limit_bytes)
        return None if found is None else self.plan_of(found, limit_bytes)

    def recall(self, limit_bytes: int | None, *, ordered: bool = False) -> Plan | None:
        """An earlier plan that keeps a limit here; None without one, and where the step would stay as it is."""
        if not self._known or limit_bytes is None or self.search.planners.lent_bytes:
            return None
        if not ordered and self.fits_unchanged(limit_bytes - self.extra_margin_bytes):
            return None
        return self._known.recall(limit_bytes, ordered)

    def judged(self, plan: Plan, limit_bytes: int | None) -> Plan | None:
        """An earlier `plan` with its peak in the present arena; None where that exceeds the limit.

        Raises InvalidModel as `require_fit`.
        """
        self.require_fit(plan)
        peak = self._peak_here(plan)
        return None if limit_bytes is not None and peak > limit_bytes else self._placed(plan, limit_bytes, peak)

    def fits_unchanged(self, aim_bytes: int) -> bool:
        """Whether the traced step stays within `aim_bytes`, also while TensorFlow instantiates it."""
        if self.unoptimised.holds_lists:
            return False  # TensorFlow's tape also holds zeros of as many bytes
        if aim_bytes < max(self.resident_bytes + self._computed_bytes, self.planner.live_peak_bytes):
            return False  # without an order at least as much is live
        return not self.unoptimised.may_pass(aim_bytes)

    def unchanged(self, limit_bytes: int | None) -> Plan:
        """The plan that leaves the step as it was traced."""
        plain = self.baseline
        return Plan.unchanged(self.fingerprint, limit_bytes, plain.peak_bytes, self.resident_bytes, plain.seconds)

    def lowest(self) -> Plan:
        """A plan without evictions outside of loops, of the variant with the lowest possible peak."""
        variant = self.search.lowest().variant
        candidate = self.search.planners.of(variant).candidate(None)
        assert candidate is not None, "without a limit the first candidate fits"
        return self.plan_of(Found(variant, candidate), None)

    def analysis(self, limit: int | str | None, ordered: bool = False) -> Plan:
        """As `plan`; for a limit that can't be met, the plan that changes nothing, whose peak exceeds it."""
        try:
            return self.plan(limit, ordered=ordered)
        except InfeasibleMemoryLimit as error:
            return self.unchanged(error.limit_bytes)

    def adopt(self, plan: Plan, limit: int | str | None) -> Plan:
        """An earlier `plan` with its peak in the present arena, under `limit`, or its own for None.

        Raises InvalidModel as `require_fit`.
        """
        self.require_fit(plan)
        peak = self.baseline.peak_bytes if plan.changes_nothing else self._peak_here(plan)
        return self._placed(plan, plan.limit_bytes if limit is None else self._limit_bytes(limit), peak)

    def _placed(self, plan: Plan, limit_bytes: int | None, peak_bytes: int) -> Plan:
        """`plan` with this peak, in the assumed arena."""
        there = self.search.planners.resident_bytes(self.variant_of(plan))
        return dataclasses.replace(plan, limit_bytes=limit_bytes, planned_peak_bytes=peak_bytes, persistent_bytes=there)

    def _peak_here(self, plan: Plan) -> int:
        """The peak to promise for `plan` in the assumed arena."""
        form, planners = self.form_of(plan), self.search.planners
        peak = promised(form.peak_bytes(planners.snapshot_of(form.variant.rewriting)))
        return max(peak, planners.least_bytes(plan.at_home)) + margin_of(self, plan.at_home)

    @progress.task("searching the smallest limit")
    @without_collector
    def floor_bytes(self) -> int:
        with self.at_floor() as nbytes:
            return nbytes

    def at_floor(self) -> contextlib.AbstractContextManager[int]:
        """Use the form with the lowest floor meanwhile; gives that."""
        return self.forms.with_least(lambda: floor_bytes(self))

    def infeasible(self, limit: int | str | None) -> InfeasibleMemoryLimit:
        """The refusal of a limit, with the floor."""
        limit_bytes = self._limit_bytes(limit)
        assert limit_bytes is not None, "without a limit the first candidate fits"
        with self.at_floor() as floor:
            return refuse(
                limit_bytes,
                floor,
                lowest=self.search.lowest(),
                homes=homes_of(self),
                planners=self.search.planners,
                options=self.options,
                locate=self.locate,
            )

    def plan_of(self, found: Found, limit_bytes: int | None) -> Plan:
        """A found candidate as a plan, made under a limit."""
        return found.plan(
            self.fingerprint,
            limit_bytes,
            persistent_bytes=self.search.planners.resident_bytes(found.variant),
            margin_bytes=margin_of(self, found.variant.rewriting.at_home),
            solver=self.options.solver,
        )

    def require_fit(self, plan: Plan) -> None:
        """Raise InvalidModel when `plan` is another graph's, is damaged, or uses tactics that the options rule out."""
        require_allowed(plan, self.fingerprint, self.options)
        self.use(plan)
        require_accumulators(plan, self.search.variants.accumulators)
        require_fit(plan, self.search.planners.of(self.variant_of(plan)).problems[0])

    @progress.task("rewriting")
    @without_collector
    def rewrite(self, plan: Plan, gate: int | None = None, *, checked_by_gate: bool = False) -> Graph:
        """A new graph that carries out `plan`, behind a gate if one is given.

        Raises InvalidModel as `require_fit`.

        Args:
            checked_by_gate: move variables home before the step, and have the gate check whether the limit is kept in
                the arena, where Python does not.
        """
        self.require_fit(plan)
        if plan.changes_nothing:
            return self.graph
        form = self.form_of(plan)
        made = lower(form, self.prepared.given, self.target, gate)
        self.prepared.move_to(self.graph, made)
        if checked_by_gate:
            prepare_in_gate(made, form, self.target, gate)
        return made

    def report(self, plan: Plan, snapshot: ArenaSnapshot | None = None) -> Report:
        """The report of a plan.

        Args:
            snapshot: the arena before the step; by default the assumed one.
        """
        self.use(plan)
        made, is_recalled = report_of(self, plan, snapshot), self._known.has_recalled(plan)
        return dataclasses.replace(made, notes=(*made.notes, RECALLED_NOTE)) if is_recalled else made
