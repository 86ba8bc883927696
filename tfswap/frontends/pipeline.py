"""The road from a graph to a rewritten graph that every front end takes: facts, plan, passes, verification."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Collection, Sequence

from tfswap import progress
from tfswap.analysis.bodies import UnboundedLoop, overlapping_bytes
from tfswap.analysis.cost import Costs, cores_used, unordered_seconds
from tfswap.analysis.dataflow import PERSISTENT, Dataflow, analyse_dataflow
from tfswap.analysis.device import DeviceModel
from tfswap.analysis.folding import computed_bytes, kept_constants, thrown_away
from tfswap.analysis.precision import (
    asked_precision,
)
from tfswap.collector import without_collector
from tfswap.errors import InfeasibleMemoryLimit, InvalidModel, UnsupportedGraph
from tfswap.frontends.backward import trains
from tfswap.frontends.grappler import MOST_NODES, as_executed
from tfswap.frontends.known import bound_of_loop, require_countable, require_functional, require_sight, require_sizes
from tfswap.frontends.options import Options
from tfswap.frontends.origin import Answer, Asked
from tfswap.frontends.plan_cache import PlanCache, StepPlans, Unoptimised
from tfswap.frontends.policy import allowed_everywhere, note_permits
from tfswap.frontends.process_names import contents
from tfswap.frontends.search import Search
from tfswap.frontends.variants import PLAIN, Found, Rewriting, Variant, Variants
from tfswap.ir.graph import Graph
from tfswap.ir.permits import ANYTHING
from tfswap.oplib.names import OUTSIDE
from tfswap.passes.beside import join_in_bodies
from tfswap.passes.collectives import apply_collective_order, apply_together, expand_together
from tfswap.passes.copied_views import apply_copied_views
from tfswap.passes.defer import apply_defer
from tfswap.passes.devices import apply_carriers
from tfswap.passes.free_constants import apply_free_constants
from tfswap.passes.hand_over import apply_hand_over
from tfswap.passes.join import apply_join, keep_apart, tell_shapes
from tfswap.passes.likes import apply_likes, apply_list_zeros
from tfswap.passes.limit_check import apply_limit
from tfswap.passes.order import apply_order
from tfswap.passes.ordered_sums import apply_ordered_sums
from tfswap.passes.outer_products import apply_outer_products
from tfswap.passes.pieces import apply_pieces
from tfswap.passes.pool_places import apply_pool_places, keep_unpaired
from tfswap.passes.settle import apply_settle
from tfswap.passes.share import apply_share
from tfswap.passes.shared_reads import apply_shared_reads
from tfswap.passes.split_sums import apply_split_sums
from tfswap.passes.split_views import apply_split_views
from tfswap.passes.swap import apply_swaps
from tfswap.passes.unroll import apply_unroll
from tfswap.passes.verify import require_stock, verify
from tfswap.planner.allocator import ALIGNMENT_BYTES, round_up
from tfswap.planner.baseline import Baseline, record_baseline, simulate_baseline, simulate_concurrent
from tfswap.planner.fit import require_accumulators, require_fit
from tfswap.planner.niches import choose_niches
from tfswap.planner.plan import Plan, fingerprint
from tfswap.planner.planner import MARGIN_BYTES, MARGIN_SHARE, TACTICS, Planner, promised
from tfswap.planner.record import record_planned
from tfswap.planner.requests import Requests, record_requests, requests_of_one
from tfswap.planner.reuse import largest_working_set
from tfswap.planner.schedule import build_schedule, planned_schedule
from tfswap.planner.simulate import NOTHING_KNOWN, Resident, judge_memory
from tfswap.report.report import Report, make_report
from tfswap.report.timeline import Timeline
from tfswap.sizes import format_bytes, parse_limit

log = logging.getLogger("tfswap")

BASELINE_SPREAD = 1.1
"""An unordered step's peak varies from run to run, by up to 8% where it was measured: only a limit above the
predicted peak by this much is left to chance."""

HELD_SPREAD = 1.3
"""The same where gradients are taken outside: what TensorFlow's tape holds besides is not all known. A transformer came
to 1.26 of what was predicted."""

RECALLED_NOTE = (
    "this plan was made before, for the same step and limit, and comes from the plan cache on disk. It was simulated "
    "again in the present arena, and its peak is the one there. TFSWAP_PLAN_CACHE=off plans again"
)


class Optimizer:
    """One graph on its way: its facts, its planner, and what was decided.

    Args:
        graph: the step, with every size bound.
        device: where it runs.
        resident: what is in the arena before the step.
        extra_margin_bytes: kept free besides, since a run has shown the need.
        locate: from a node's name to the user's own line that made it, where that is known.
        costs: what kernels and copies take; by default what the options' profile or the kind of device says.
        keeps_results: whether the caller gets tensors that it may keep, as from a function; a session copies them out.
        held: names of tensors that the unoptimised step holds until its end.
        beside_bytes: which others allocate while the step runs, unoptimised too, as a data pipeline does its batches.
        plan_cache: where plans that were made before are looked for, and new ones are kept.
    """

    @progress.task("reading the step")
    @without_collector
    def __init__(
        self,
        graph: Graph,
        device: DeviceModel,
        options: Options | None = None,
        *,
        resident: Resident = NOTHING_KNOWN,
        extra_margin_bytes: int = 0,
        locate: Callable[[str], str | None] = lambda _: None,
        costs: Costs | None = None,
        keeps_results: bool = False,
        held: Sequence[str] = (),
        beside_bytes: int = 0,
        plan_cache: PlanCache | None = None,
    ):
        self.options = (options or Options()).on(device)
        portable = self.options.portable
        self.graph = graph
        self.device = device
        self.extra_margin_bytes = extra_margin_bytes
        self._held = held
        self._beside_bytes = beside_bytes
        require_functional(graph, locate)
        require_sight(graph, locate)
        require_sizes(graph, locate)
        require_countable(graph, resident.total_bytes)
        self.fingerprint = fingerprint(graph, contents(graph))
        settled = graph.copy()
        note_permits(settled, self.options.keep, self.options.policy, locate)
        self._known: StepPlans | None = None
        if plan_cache is not None and costs is None:
            others = keeps_results, tuple(held)
            self._known = StepPlans(plan_cache, settled, self.fingerprint, device, self.options, others)
        self._recalled: set[tuple[object, ...]] = set()  # the actions of plans that were made before
        apply_ordered_sums(settled, device, held=held, portable=portable)
        in_body = apply_unroll(settled, device)
        self._unrolled = bool(in_body)
        self.locate: Callable[[str], str | None] = lambda name: locate(in_body.get(name, name))
        self._overlapping_bytes = overlapping_bytes(settled)
        apply_collective_order(settled)
        apply_together(settled)
        apply_free_constants(settled)
        apply_outer_products(settled, device)
        if not portable:
            apply_join(settled, device)
            apply_pool_places(settled, device)
            apply_settle(settled)
            apply_list_zeros(settled, device)
            apply_pieces(settled, device)
            apply_copied_views(settled, device)
        apply_shared_reads(settled)
        apply_split_views(settled)
        apply_likes(settled)
        apply_split_sums(settled, device)
        if not portable:
            apply_defer(settled, device)
        if keeps_results and not portable:
            apply_hand_over(settled)
        apply_share(settled)
        settled.prune()
        self.costs = costs or Costs.of(device, self.options.profile)
        self.search = Search(settled, self._facts, device, self.options, self.costs, resident)
        self._computed_bytes = _computed_for_nothing(graph.traced or graph, device)
        self._suppose_bytes(resident)
        self._first_resident = self._baseline_resident = resident
        self._first_bytes = self.resident_bytes
        self._baseline_known = False

    def renew_baseline(self) -> None:
        """Let the unoptimised peak be that in the arena as it is supposed to be now.

        What another process has found out is of an arena with the step's constants in it, and stays.
        """
        if not self._baseline_known:
            self._baseline_resident = self.search.resident_of(PLAIN)
            self.__dict__.pop("_alone", None)

    @property
    def baseline(self) -> Baseline:
        """What is predicted of the step as it runs without tfswap, with what others allocate beside it.

        It takes seconds: a limit in bytes does without.
        """
        alone = self._alone
        return alone._replace(peak_bytes=alone.peak_bytes + self._beside_bytes)

    @functools.cached_property
    def _alone(self) -> Baseline:
        """The same without what others allocate."""
        if self._known is None:
            return self._predicted()
        with self._known.predicting():
            renewed = self._baseline_resident is not self._first_resident
            found = None if renewed else self._recalled_baseline(self._known)
            if found is None:
                found = self._predicted()
                kept = Unoptimised(self._first_bytes, found.peak_bytes, found.seconds)
                self._known.keep_unoptimised(kept)
            return found

    def _recalled_baseline(self, known: StepPlans) -> Baseline | None:
        """What was found out before of the same step, in an arena with as much in it.

        It is a prediction for runs that differ by far more than what a little more or less there does.
        """
        found = known.unoptimised()
        if found is None or abs(found.there_bytes - self._first_bytes) > MARGIN_SHARE * found.peak_bytes:
            return None
        self._baseline_known = True
        return Baseline(found.peak_bytes, found.seconds)

    @progress.task("predicting the step as it is")
    def _predicted(self) -> Baseline:
        flow, cost_s, runs = self._unoptimised
        if len(self.graph) > MOST_NODES:
            del self._unoptimised  # as large as the step's own facts, and without Grappler soon made again
        costs, profile = self.costs, self.costs.profile
        peak = simulate_baseline(flow, cost_s, self.device, resident=self._baseline_resident)
        # With the margin that plans have, so that a share of it can be met where order changes nothing.
        peak = promised(peak)
        if profile is None or profile.unordered is None or profile.fingerprint != self.fingerprint:
            cores = [cores_used(node, costs.rates) if ran else 0.0 for node, ran in zip(flow.nodes, runs, strict=True)]
            return Baseline(peak, unordered_seconds(cost_s, cores, flow.own_deps, costs.rates))
        ordered_s = sum(s for s, k in zip(costs.of_step(self.flow), self.flow.is_kernel, strict=True) if k)
        return Baseline(peak, profile.unordered * ordered_s)

    @property
    def unchanged_bytes(self) -> int:
        """A peak that the step as it was traced is not likely to pass, without what others allocate.

        The predicted one leaves out what iterations of a loop hold that run concurrently, and those of a loop that it
        has unrolled overlap more on a busy machine.
        """
        spread = HELD_SPREAD if self._held else BASELINE_SPREAD
        peak_bytes = max(self._alone.peak_bytes, self._concurrent_bytes)
        return math.floor(peak_bytes * spread) + self._overlapping_bytes

    @functools.cached_property
    def _concurrent_bytes(self) -> int:
        """The peak of the unoptimised step where iterations of unrolled loops overlap most; 0 where it has none."""
        if not self._unrolled:
            return 0
        flow, cost_s, _ = self._unoptimised
        return simulate_concurrent(flow, cost_s, self.device, resident=self._baseline_resident)

    def suppose(self, resident: Resident) -> None:
        """Plan from now on for an arena with this content. The unoptimised peak stays what it was."""
        self.search.suppose(resident)
        self._suppose_bytes(resident)

    def suppose_made(self, plan: Plan, resident: Resident) -> None:
        """Plan from now on for an arena with this content: that of `suppose`, and what `plan` has made there."""
        self.search.suppose_made(Rewriting.of(plan), resident)
        self._suppose_bytes(resident)

    def _suppose_bytes(self, resident: Resident) -> None:
        self.resident_bytes = max(resident.total_bytes, self.flow.persistent_bytes)

    def has_made(self, plan: Plan) -> bool:
        """Whether it is known what the variant of `plan` makes in the arena."""
        return self.search.has_made(Rewriting.of(plan))

    @property
    def variants(self) -> Variants:
        """The step's variants."""
        return self.search.variants

    @property
    def settled(self) -> Graph:
        """The step with settled variables and ordered bodies, and what is done to it whatever is chosen."""
        return self.variants.plain.graph

    @property
    def flow(self) -> Dataflow:
        """The facts of `settled`."""
        return self.variants.plain.flow

    @property
    def planner(self) -> Planner:
        """The planner for `settled`, in the arena as it is supposed to be."""
        return self.search.planner_of(self.variants.plain)

    def _facts(self, graph: Graph) -> Dataflow:
        try:
            return analyse_dataflow(graph, self.device)
        except UnboundedLoop as error:
            raise UnsupportedGraph(f"{error} {bound_of_loop(error.loop, self.locate)}") from None

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
        """As `plan`; None in place of a refusal, which takes longer, since it names the floor."""
        limit_bytes = self._limit_bytes(limit)
        aim = None if limit_bytes is None else limit_bytes - self.extra_margin_bytes
        if not ordered and (aim is None or self.fits_unchanged(aim)):
            return self._freeze(limit_bytes, None)
        if self._known is None or limit_bytes is None:
            return self._planned(limit_bytes, aim)
        with self._known.planning(limit_bytes, ordered):
            plan = self._recall(limit_bytes, ordered)
            if plan is None:
                plan = self._planned(limit_bytes, aim)
                if plan is not None:
                    self._known.keep(plan, limit_bytes, ordered)
            return plan

    def _limit_bytes(self, limit: int | str | None) -> int | None:
        return None if limit is None else parse_limit(limit, lambda: self.baseline.peak_bytes)

    def _planned(self, limit_bytes: int | None, aim: int | None) -> Plan | None:
        """A plan for a limit that is made now, if there is one.

        Args:
            aim: what it may peak at.
        """
        found = self.search.fastest(aim)
        return None if found is None else self._freeze(limit_bytes, found)

    def recall(self, limit_bytes: int | None, *, ordered: bool = False) -> Plan | None:
        """The plan for a limit that was made before, if there is one that keeps it here; None otherwise, and where
        the step would be left as it is.
        """
        if self._known is None or limit_bytes is None:
            return None
        if not ordered and self.fits_unchanged(limit_bytes - self.extra_margin_bytes):
            return None
        return self._recall(limit_bytes, ordered)

    def _recall(self, limit_bytes: int, ordered: bool) -> Plan | None:
        assert self._known is not None, "asked for only where there is a cache"
        plan = self._known.plan(limit_bytes, ordered)
        if plan is None or plan.changes_nothing:
            return None
        try:
            found = self.judged(plan, limit_bytes)
        except InvalidModel as error:
            log.warning("tfswap: a plan in the plan cache does not fit its step, and is replaced: %s", error)
            return None
        if found is not None:
            self._recalled.add(plan.actions)
        return found

    def judged(self, plan: Plan, limit_bytes: int | None) -> Plan | None:
        """`plan`, made before, with the peak that it has here and now; None where that passes the limit.

        Raises InvalidModel as `require_fit`.
        """
        self.require_fit(plan)
        variant = self.variant_of(plan)
        resident = self.search.resident_of(variant.rewriting)
        memory = judge_memory(variant.flow, planned_schedule(variant.flow, plan), resident)
        peak = promised(memory.peak_bytes) + self.extra_margin_bytes
        if limit_bytes is not None and peak > limit_bytes:
            return None
        return dataclasses.replace(
            plan, limit_bytes=limit_bytes, planned_peak_bytes=peak, persistent_bytes=self.resident_bytes
        )

    @property
    def _holds_lists(self) -> bool:
        """Whether the unoptimised step holds lists that loops save in until its end."""
        return any(self.graph.tensor(name).type.dtype == "variant" for name in self._held)

    def fits_unchanged(self, aim_bytes: int) -> bool:
        """Whether the step as it was traced stays within `aim_bytes`, also while TensorFlow makes it."""
        if self._holds_lists:
            return False  # TensorFlow's tape makes zeros of them, as many bytes, and holds these too
        if aim_bytes < max(self.resident_bytes + self._computed_bytes, self.planner.live_peak_bytes):
            return False  # without an order no less is live
        return aim_bytes >= self.unchanged_bytes

    def unchanged(self, limit_bytes: int | None) -> Plan:
        """The plan that leaves the step as it was traced."""
        return self._freeze(limit_bytes, None)

    def lowest(self) -> Plan:
        """A plan that moves nothing outside of loops, of the variant that can be brought down to the least."""
        variant = self.search.lowest().variant
        candidate = self.search.planner_of(variant).candidate(None)
        assert candidate is not None, "without a limit the first candidate fits"
        return self._freeze(None, Found(variant, candidate))

    def analysis(self, limit: int | str | None) -> Plan:
        """As `plan`, but for a limit that can't be met a plan that changes nothing, and so passes it."""
        try:
            return self.plan(limit)
        except InfeasibleMemoryLimit as error:
            return self._freeze(error.limit_bytes, None)

    def adopt(self, plan: Plan, limit: int | str | None) -> Plan:
        """`plan`, made before, as it does here and now: with the peak that it has, under `limit` or its own for None.

        Raises InvalidModel as `require_fit`.
        """
        self.require_fit(plan)
        if plan.changes_nothing:
            peak = self.baseline.peak_bytes
        else:
            resident = self.search.resident_of(Rewriting.of(plan))
            peak = promised(self.peak_bytes(plan, resident)) + self.extra_margin_bytes
        return dataclasses.replace(
            plan,
            limit_bytes=plan.limit_bytes if limit is None else parse_limit(limit, lambda: self.baseline.peak_bytes),
            planned_peak_bytes=peak,
            persistent_bytes=self.resident_bytes,
        )

    @functools.cached_property
    @without_collector
    def _unoptimised(self) -> tuple[Dataflow, list[float], list[bool]]:
        """The step without tfswap, where variables adopt buffers and Grappler has its part.

        With its nodes' seconds, and which of them run.
        """
        graph = (self.graph.traced or self.graph).copy()
        graph.fetches += map(graph.tensor, self._held)
        # What a list holds that a function returns can't be told of what Grappler makes of it.
        if not self._holds_lists:
            graph = as_executed(graph, self.device)
        apply_unroll(graph, self.device, lowered=True)
        flow = analyse_dataflow(graph, self.device, lowered=self.costs.seconds)
        live = graph.live_nodes()
        runs = [kernel and node in live for node, kernel in zip(flow.nodes, flow.is_kernel, strict=True)]
        cost_s = [s if ran else 0.0 for s, ran in zip(self.costs.of_step(flow), runs, strict=True)]
        return flow, cost_s, runs

    def timeline(self, plan: Plan, resident: Resident) -> Timeline:
        """What is in the arena over the step, without and with `plan`.

        Args:
            resident: what is there before the planned step.
        """
        flow, cost_s, _ = self._unoptimised
        before = record_baseline(flow, cost_s, self.device, resident=self._baseline_resident)
        after = None
        if not plan.changes_nothing:
            planned = self.variant_of(plan).flow
            after = record_planned(
                planned,
                planned_schedule(planned, plan),
                self.costs.of_step(planned),
                self.costs.rates,
                resident=resident,
                disk=frozenset(planned.value_named[a.tensor] for a in plan.absences if a.disk),
            )
        return Timeline(before, after, self.baseline.seconds, self.baseline.peak_bytes, plan.planned_peak_bytes)

    def fetched_bytes(self) -> int:
        """What the step returns and nothing else holds."""
        values = (self.flow.values[v] for v in self.flow.fetched)
        return sum(round_up(value.nbytes) for value in values if value.producer != PERSISTENT)

    def niches(self, resident: Resident, beside: Sequence[int] = ()) -> list[int]:
        """The bytes of each small tensor that the step holds at once with others of its size, in an arena like this;
        none where the arena has less than the step needs at least, wherever that lies.

        Args:
            beside: bytes of each tensor that others make while the step runs, which have places too.
        """
        flow = self.flow
        least_bytes = self.search.planner_of(self.search.lowest().variant).live_floor_bytes
        if resident.limit_bytes is not None and least_bytes > resident.limit_bytes:
            return []
        return choose_niches(flow, build_schedule(self.planner.problems[0].order, ()), resident, beside)

    @progress.task("looking for the smallest limit")
    @without_collector
    def floor_bytes(self) -> int:
        return self.search.lowest().candidate.peak_bytes + self.extra_margin_bytes

    @property
    def unplaced_bytes(self) -> int:
        """What the floor may be too low by while its variant has not been made: where its constants will lie is not
        known then, and each may take what lies beside it too.
        """
        variant = self.search.lowest().variant
        if self.search.has_made(variant.rewriting):
            return 0
        parts = (variant.graph, *variant.graph.all_bodies())
        return max(MARGIN_BYTES, ALIGNMENT_BYTES * sum(len(kept_constants(part)) for part in parts))

    def infeasible(self, limit: int | str | None) -> InfeasibleMemoryLimit:
        """The refusal of a limit, with the floor."""
        limit_bytes = self._limit_bytes(limit)
        assert limit_bytes is not None, "without a limit the first candidate fits"
        floor = self.floor_bytes()
        host = self.options.host_limit_bytes
        disk = None if self.options.spill is None else self.options.spill.limit_bytes
        everywhere = allowed_everywhere(self.settled)
        anything_leaves = {"swap", "recompute"} <= everywhere.intersection(self.options.tactics)
        policy_forbids = everywhere < ANYTHING.tactics
        alone = anything_leaves and host is None and disk is None
        return InfeasibleMemoryLimit(
            f"memory_limit is {limit_bytes} bytes ({format_bytes(limit_bytes)}), and this step needs at least "
            f"{floor} ({format_bytes(floor)}): {format_bytes(self.resident_bytes)} are persistent "
            "(variables, arguments, constants, other tensors), the rest is what "
            + (
                "its largest kernels need at the same time"
                if anything_leaves
                else f"it holds at the same time with tactics={self.options.tactics}"
                + (" and policy" if policy_forbids else "")
            )
            + (f" with at most {format_bytes(host)} of host memory" if host is not None else "")
            + (f" and {format_bytes(disk)} on disk" if disk is not None else "")
            + f", most of all {self._largest_kernel(alone)}. Ask for memory_limit={floor} or more, "
            + ("" if set(TACTICS).issubset(self.options.tactics) else "allow all tactics, ")
            + ("let policy allow more, " if policy_forbids else "")
            + "or make the batch smaller.",
            floor_bytes=floor,
            limit_bytes=limit_bytes,
        )

    def _largest_kernel(self, alone: bool) -> str:
        """Which kernel the smallest limit is for, and its bytes.

        Args:
            alone: whether that limit is for what a kernel needs itself, and not for what waits beside it.
        """
        lowest = self.search.lowest()
        flow = lowest.variant.flow
        i = largest_working_set(flow)[0] if alone else lowest.candidate.largest_kernel()
        node, sizes = flow.nodes[i], flow.values
        takes = sum(sizes[v].nbytes for v in {*flow.reads[i], *flow.consumes.get(i, ())})
        gives = sum(sizes[v].nbytes for _, v in flow.makes[i])
        extra = flow.temporary_bytes(i)
        line = self.locate(node.name)
        if node.op == OUTSIDE:
            return f"what its caller makes of the {format_bytes(takes)} that it returns, until it asks for gradients"
        return (
            f"{node.op} {node.name!r}"
            + (f" ({line})" if line else "")
            + f", which reads {format_bytes(takes)}, makes {format_bytes(gives)}"
            + (f" and takes {format_bytes(extra)} of temporaries while it runs" if extra else "")
        )

    def _largest_working_set(self) -> tuple[str, int]:
        """The kernel that needs most at once, of the variant that can be brought down to the least, and its bytes."""
        flow = self.search.lowest().variant.flow
        kernel, nbytes = largest_working_set(flow)
        return ("", 0) if kernel < 0 else (flow.nodes[kernel].name, nbytes)

    def _freeze(self, limit_bytes: int | None, found: Found | None) -> Plan:
        if found is None:
            return Plan(
                self.fingerprint,
                limit_bytes,
                (),
                (),
                self.baseline.peak_bytes,
                self.resident_bytes,
                0,
                self.baseline.seconds,
                "none",
            )
        variant, candidate = found
        choice = candidate.choice
        order, absences = choice.named(variant.flow)
        return Plan(
            fingerprint=self.fingerprint,
            limit_bytes=limit_bytes,
            order=order,
            absences=absences,
            planned_peak_bytes=candidate.peak_bytes + self.extra_margin_bytes,
            persistent_bytes=self.resident_bytes,
            host_bytes=candidate.memory.host_peak_bytes,
            seconds=candidate.timing.total_s,
            solver=self.options.solver,
            beside=choice.beside,
            splits=choice.splits,
            disk_bytes=candidate.memory.disk_peak_bytes,
            **variant.rewriting._asdict(),
        )

    def peak_bytes(self, plan: Plan, resident: Resident) -> int:
        """The peak that `plan`, which fixes an order, has in an arena with this content."""
        flow = self.variant_of(plan).flow
        return judge_memory(flow, planned_schedule(flow, plan), resident).peak_bytes

    def requests(self, plan: Plan, resident: Resident) -> Requests:
        """What the step asks of the allocator with `plan`, where `resident` is there before."""
        flow = self.variant_of(plan).flow
        return record_requests(flow, planned_schedule(flow, plan), resident)

    def carry_limit(self, made: Graph, plan: Plan) -> None:
        """Let the gate of `made`, which carries out `plan`, look where it is loaded whether the limit is kept there."""
        if plan.limit_bytes is None:
            return
        flow = self.variant_of(plan).flow
        requests = requests_of_one(flow, planned_schedule(flow, plan))
        apply_limit(made, plan.limit_bytes, requests, device=self.device.kind)

    def variant_of(self, plan: Plan) -> Variant:
        """The variant that `plan` is of."""
        return self.variants[Rewriting.of(plan)]

    def written_variables(self) -> list[int]:
        """Which feeds, by position, are variables that the step writes. Other handles that a writer is given, such as
        the iterator or the table that a loop takes, are not.
        """
        return [p for p, feed in enumerate(self.graph.feeds) if self.flow.first_versions([feed.name])]

    def written_in_bodies(self) -> frozenset[str]:
        """The names of those feeds that are variables which bodies of loops and conditionals write."""
        flow = self.flow
        inner = {u.old for i in flow.runs for u in flow.updates[i]}
        return frozenset(feed.name for feed in self.graph.feeds if flow.first_versions([feed.name]) & inner)

    def copied_bytes(self, shared: Collection[str]) -> int:
        """The bytes of the variables behind these feeds, which an update copies where something else holds them."""
        return sum(round_up(self.flow.values[v].nbytes) for v in self.flow.first_versions(shared))

    def policy_answers(self) -> list[Answer]:
        """What the policy says of the step's tensors, where it does not allow everything."""
        if self.options.policy is None:
            return []
        asked = Asked(self.options.policy)
        note_permits(self.graph.copy(), (), asked, self.locate)
        return asked.kept

    def require_fit(self, plan: Plan) -> None:
        """Raise InvalidModel when `plan` is another graph's, is damaged, or needs what the options rule out."""
        if plan.fingerprint != self.fingerprint:
            raise InvalidModel(
                "this plan was made for another graph (its fingerprint differs): plan again for this one, or "
                "load the plan that was made for it"
            )
        host = self.options.host_limit_bytes
        parts = (plan, *plan.inside)
        if (plan.accumulators or any(p.absences for p in parts)) and "swap" not in self.options.tactics:
            raise InvalidModel('this plan swaps, and tactics leaves "swap" out: allow it, or plan again')
        again = plan.remade or any(len(p.order) > len(set(p.order)) for p in parts)
        if again and "recompute" not in self.options.tactics:
            raise InvalidModel('this plan recomputes, and tactics leaves "recompute" out: allow it, or plan again')
        own = plan.splits or plan.beside or plan.accumulators or plan.remade or plan.inside or plan.reduced
        if self.options.portable and own:
            raise InvalidModel(
                "this plan takes ops of tfswap's, and a portable model has none: plan again for a portable one"
            )
        if (plan.packed or (plan.encoded and not plan.reduced)) and "encode" not in self.options.tactics:
            raise InvalidModel('this plan encodes, and tactics leaves "encode" out: allow it, or plan again')
        for reduction in plan.reduced:
            node = reduction.tensor.rpartition(":")[0]
            if asked_precision(node, self.options.precision) != reduction.precision:
                raise InvalidModel(
                    f"this plan keeps {reduction.tensor!r} as {reduction.precision} for the backward pass, and "
                    f"precision does not ask for that: give precision={{{node!r}: {reduction.precision!r}}}, or plan "
                    "again"
                )
        if host is not None and plan.host_bytes > host:
            raise InvalidModel(
                f"this plan takes {format_bytes(plan.host_bytes)} of host memory, and host_memory_limit is "
                f"{format_bytes(host)}: allow it more, or plan again"
            )
        disk, spill = plan.disk_bytes, self.options.spill
        if spill is None and (disk or any(a.disk for a in plan.absences)):
            raise InvalidModel("this plan puts tensors on disk, and spill_dir is not given: give it, or plan again")
        if spill is not None and spill.limit_bytes is not None and disk > spill.limit_bytes:
            raise InvalidModel(
                f"this plan puts {format_bytes(disk)} on disk, and spill_limit is {format_bytes(spill.limit_bytes)}: "
                "allow it more, or plan again"
            )
        require_accumulators(plan, self.variants.accumulators)
        require_fit(plan, self.search.planner_of(self.variant_of(plan)).problems[0])

    @progress.task("rewriting")
    @without_collector
    def rewrite(self, plan: Plan, gate: int | None = None) -> Graph:
        """A new graph that carries out `plan`, behind a gate if one is given.

        Raises InvalidModel as `require_fit`.
        """
        self.require_fit(plan)
        if plan.changes_nothing:
            return self.graph
        variant = self.variant_of(plan)
        made = variant.graph.copy()
        chain = apply_swaps(made, variant.flow, plan, portable=self.options.portable)
        apply_order(made, chain, gate)
        expand_together(made)
        apply_carriers(made)
        join_in_bodies(made, self.device)
        if not self.options.portable:
            keep_unpaired(made, self.graph, self.device)
            keep_apart(made, self.device)
            tell_shapes(made)
        made.prune()
        verify(made)
        if self.options.portable:
            require_stock(made)
        return made

    def report(self, plan: Plan, resident: Resident | None = None) -> Report:
        """What was found and decided.

        Args:
            resident: what is in the arena before the step; by default what is supposed to be.
        """
        variant = self.variant_of(plan)
        there = self.search.resident_of(variant.rewriting) if resident is None else resident
        planner = self.search.planner_of(variant)
        made = make_report(
            variant.flow,
            planner,
            plan,
            self.variants.saved_bytes,
            self.variants.remade_s(variant.rewriting, self.costs),
            self.variants.permits,
            variant.encodings,
            variant.inner,
            variant.bodies,
            self.floor_bytes,
            lambda: self.baseline,
            trains(self.graph),
            self.locate,
            functools.cache(lambda: self.timeline(plan, there)),
            self._largest_working_set,
            there,
        )
        if plan.actions in self._recalled:
            made = dataclasses.replace(made, notes=(*made.notes, RECALLED_NOTE))
        return made


def _computed_for_nothing(graph: Graph, device: DeviceModel) -> int:
    """The most that TensorFlow takes to make the step as it was traced, where a rewritten one takes less; 0 elsewhere.

    On other devices than a CPU that is host memory.
    """
    if device.kind != "cpu" or not any(map(thrown_away, (graph, *graph.all_bodies()))):
        return 0
    return computed_bytes(graph)
