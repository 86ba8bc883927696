"""Plans a step: from its facts and a byte limit to a plan.

The ladder: a solver makes plans for a series of ever lower targets of live bytes, which do not depend on
the limit; each is judged by the allocator's simulation; of all that fit, the plan is the fastest.

Invariant: the candidates, their peaks and their order (by time, then by place) do not depend on the limit, and the plan
is the first that fits. So a higher limit never gives a slower plan, a lower limit never a higher peak, and at the floor
there is a plan. Candidates are left out only where that can't change the plan: one derived from another is no faster,
one with more live bytes than the limit peaks above it, and a rung that counts as above the limit (ladder.py) is never
chosen for it. On a GPU a candidate's time depends on the limit, and only the first of these holds: a higher limit never
gives a slower plan. A search near the plan (plan_search.py) may gain more for a lower limit than for a higher one.

How an arena fragments is close to chance: two plans of the same live bytes can peak a quarter apart. So there are
several ladders, one for each way to place the copies and, for steps of few and large kernels, for each order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from functools import cached_property

from tfswap.analysis.cost import Costs
from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.graph import Node
from tfswap.ir.permits import TENSOR_TACTICS
from tfswap.kernels.target import Target
from tfswap.plan.schedule import build_schedule, tiers_of
from tfswap.planner.candidates import Candidate, Draft, Judged
from tfswap.planner.convolution_room import has_convolutions
from tfswap.planner.home_copies import with_home_copies
from tfswap.planner.host_tiers import ANYTHING, Tiers
from tfswap.planner.ladder import MAX_RUNGS, MIN_SWEEPS, Climb, Ladder
from tfswap.planner.pairing import gains, side_by_side
from tfswap.planner.plan_search import NearPlans
from tfswap.planner.problem import NEVER, Choice, Problem, Solver, make_problem
from tfswap.planner.promise import promised
from tfswap.planner.solver_table import BOTH, EVICT, MOVES, RESTARTS, SEARCHES, SOLVERS, SWAP
from tfswap.planner.solvers import cheapest_eviction
from tfswap.planner.step_orders import StepOrders, kernels_run
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN, ArenaSnapshot, bytes_before
from tfswap.simulator.memory import Judge
from tfswap.simulator.native_timing import StepTimes
from tfswap.simulator.timing import Timing
from tfswap.simulator.working_set import largest_working_set
from tfswap.support import progress

KERNELS_SWEPT = 200_000
"""About how many kernels all rungs of a group of solvers visit in total. It bounds the planning time of large
graphs.
"""
SEARCHED_RUNGS = 16
"""The most rungs of the search over reruns, which takes longer for a target than one pass, and of the ladder on a
searched order.
"""
TWO_SOLVERS = 50_000
"""The most kernels of steps for which two solvers run. Of those that both swap and recompute, the first rarely
has the lowest floor. On larger steps planning would take longer than tracing.
"""


def _climbs_of(solvers: Sequence[Solver], kernels: int, share: float, orders: int) -> list[Climb]:
    """How solvers' ladders share the time for planning a step of `kernels` kernels; `share` as of `Planner`."""
    sweeps = max(MIN_SWEEPS, int(share * KERNELS_SWEPT) // kernels)
    count = max(1 + (kernels <= TWO_SOLVERS), sweeps // MIN_SWEEPS)
    groups = [solvers[:count]]
    if solvers is BOTH and sweeps > MIN_SWEEPS:
        # Where more than swapping is allowed, the plans that swapping alone finds are tried too.
        groups = [EVICT[:count], SWAP[:count]]
    return [Climb.of(group, sweeps, int(share * MAX_RUNGS), orders) for group in groups]


class Planner:
    """Plans for one step on one device; remembers the rungs that it has judged.

    Args:
        flow: the step's facts.
        target: the device, and the ops that the graph may have.
        snapshot: the arena before the step: variables, arguments and all else.
        tactics: those that may be used besides an order, of TENSOR_TACTICS. Encodings are already in the flow.
        tiers: the memory for swapped tensors.
        solver: one of SOLVERS.
        costs: the cost model; by default the analytic one of this kind of device.
        cost_s: seconds per node; by default computed with `costs`.
        share: this planner's share of the rungs that fit into the planning time.
        least_s, least_bytes: known lower bounds of any plan's seconds and bytes.
        orders: of the step, or of the same step without evictions in bodies; by default of these facts and costs.

    Attributes:
        near: the searches near candidates.
    """

    def __init__(
        self,
        flow: Dataflow,
        target: Target,
        *,
        snapshot: ArenaSnapshot = NOTHING_KNOWN,
        tiers: Tiers = ANYTHING,
        tactics: Collection[str] = TENSOR_TACTICS,
        solver: str = "default",
        costs: Costs | None = None,
        cost_s: list[float] | None = None,
        share: float = 1.0,
        least_s: float = 0.0,
        least_bytes: int = 0,
        orders: StepOrders | None = None,
    ):
        self._judged: dict[tuple[object, ...], Judged] = {}  # by the choice and its lower bound of seconds
        self.near = NearPlans(self)
        self._least_s, self.least_bytes = least_s, least_bytes
        self.flow = flow
        self.target = target
        device = target.device
        self.snapshot = snapshot
        # Where cuDNN's workspace is limited, each convolution's request includes it.
        self.takes_workspaces = device.uses_cudnn and device.workspace_bytes is None and has_convolutions(flow)
        self.judge = Judge(flow, snapshot)
        # Where the requests of the step, or of others during it, are not known one by one, chunks larger than their
        # requests have no other bound.
        self._exact_chunks = (flow.holes_are_unknown or target.shares_arena) and target.own_ops
        self.tiers = dataclasses.replace(tiers, inner_bytes=flow.inner_host_bytes)
        self.costs = costs or Costs.of(device)
        self.rates = self.costs.rates
        self.cost_s = cost_s or self.costs.of_step(flow)
        self.arrivals = self.costs.arrivals_in(flow)
        self._times = StepTimes(flow, self.cost_s, self.rates, self.arrivals)
        self._gain = gains(flow, self.cost_s, self.rates)
        self._orders = orders or StepOrders(flow, self.cost_s, self.rates)
        self._moves = frozenset(tactics) & MOVES
        self._solver, self._share = solver, share

    @cached_property
    def _climbs(self) -> list[Climb]:
        ranked = self._orders.ranked
        # In an unknown arena it can't be known which plan fragments least: one order is enough.
        most_orders = len(ranked) if self.snapshot.chunks else 1
        return _climbs_of(
            SOLVERS[self._solver][self._moves], kernels_run(self.flow, ranked[0]), self._share, most_orders
        )

    @cached_property
    def problems(self) -> list[Problem]:
        """The step in each of the orders that are tried."""
        orders, count = self._orders, max(climb.orders for climb in self._climbs)
        concurrent = self.target.runs_concurrently
        tried = [*orders.together(count), *orders.with_room] if concurrent else orders.ranked[:count]
        tried = [*tried, *orders.lower]  # the last of all
        return [
            make_problem(
                self.flow,
                order,
                self.rates,
                self.cost_s,
                snapshot=self.snapshot,
                tiers=self.tiers,
                arrivals=self.arrivals,
            )
            for order in tried
        ]

    @cached_property
    def unmoved(self) -> list[Judged]:
        """Each of `problems` without evictions."""
        return [self.judged(Choice(problem.order, [])) for problem in self.problems]

    @cached_property
    def ladders(self) -> list[Ladder]:
        """Those of each solver and order, those of restarts, as far as there is time, and that of the search."""
        pairs = list(zip(self.problems, self.unmoved, strict=True))
        ladders = [
            Ladder(self, p, unmoved, s, climb.rungs)
            for climb in self._climbs
            for p, unmoved in pairs[: climb.orders]
            for s in climb.solvers
        ]
        if self._solver != "default":
            return ladders
        restarts, first = RESTARTS.get(self._moves, ()), self._climbs[0]
        ladders += [Ladder(self, *pairs[0], cheapest_eviction.solver(p), first.rungs) for p in restarts[: first.spare]]
        kernels = kernels_run(self.flow, pairs[0][0].order)
        searched = kernels <= TWO_SOLVERS if "swap" not in self._moves else first.spare > len(restarts)
        if self._orders.lower and first.solvers:
            ladders.append(Ladder(self, *pairs[-1], first.solvers[0], min(first.rungs, SEARCHED_RUNGS)))
        if searched and self._moves in SEARCHES:
            ladders.append(Ladder(self, *pairs[0], SEARCHES[self._moves], min(first.rungs, SEARCHED_RUNGS)))
        return ladders

    def live_bytes_outside(self, bodies: Collection[Node]) -> int:
        """The peak of live bytes with nothing evicted, while none of these nodes runs, which have bodies."""
        nodes = self.flow.nodes
        return min(
            max((int(n) for i, n in zip(p.order, p.live_bytes, strict=True) if nodes[i] not in bodies), default=0)
            for p in self.problems
        )

    @cached_property
    def _floor_bytes(self) -> int:
        """A lower bound of the peak of any plan, whose search is long where few or none fit: with what is in the arena
        throughout, the working set of the largest kernel, which runs in every plan.
        """
        return max(
            self.least_bytes, promised(bytes_before(self.flow, self.snapshot) + largest_working_set(self.flow)[1])
        )

    @property
    def live_peak_bytes(self) -> int:
        """The peak of live bytes with nothing evicted."""
        return min(problem.live_peak_bytes for problem in self.problems)

    def candidate(self, limit_bytes: int | None, best: Candidate | None = None) -> Candidate | None:
        """The fastest of all rungs within the limit, the one without evictions for no limit; None if none fits.

        Args:
            best: another planner's; returned where nothing is faster.
        """
        if limit_bytes is None:
            return self.unmoved[0].fitting(NEVER)
        best = self.unmoved_candidate(limit_bytes, best)
        if self._floor_bytes > limit_bytes:
            return best
        # Evictions take time: where an order is no faster than the best, no rung on it is.
        ladders = [ladder for ladder in self.ladders if best is None or ladder.unmoved_s < best.timing.total_s]
        rungs = [rung for ladder in progress.over("solving", ladders) for rung in ladder.rungs_within(limit_bytes)]
        for rung in sorted(rungs, key=lambda rung: rung.judged.seconds):
            if best is not None and rung.judged.seconds >= best.timing.total_s:
                break
            if rung.target > limit_bytes and not rung.judged.may_fit(limit_bytes):
                continue
            found = rung.fitting(limit_bytes)
            if found is None or not self.tiers.fit(found.memory):
                continue
            if best is None or found.timing.total_s < best.timing.total_s:
                best = found
        return best

    def unmoved_candidate(self, limit_bytes: int, best: Candidate | None = None) -> Candidate | None:
        """As `candidate`, among the orders without evictions, for which no solver is needed."""
        if self._floor_bytes > limit_bytes:
            return best
        for problem, judged in zip(self.problems, self.unmoved, strict=True):
            # An allocator never needs fewer bytes than are live.
            if problem.live_peak_bytes > limit_bytes:
                continue
            if best is not None and best.timing.total_s <= judged.seconds:
                continue
            found = judged.fitting(limit_bytes)
            if found is None or not self._has_room_for_homes(found):
                continue
            if best is None or found.timing.total_s < best.timing.total_s:
                best = found
        return best

    def _has_room_for_homes(self, candidate: Candidate) -> bool:
        """Whether host memory has room for the new values of variables at home, of a candidate without evictions."""
        flow = self.flow
        return not (flow.home_changes or flow.passing_bytes) or self.tiers.fit(candidate.memory)

    def drafted(self, live_bytes: int) -> Draft | None:
        """The fastest choice with at most `live_bytes` live, chunks aside; None where none does."""
        fitting = (
            unmoved.draft
            for problem, unmoved in zip(self.problems, self.unmoved, strict=True)
            if problem.live_peak_bytes <= live_bytes
        )
        best = min(fitting, key=lambda draft: draft.timing.total_s, default=None)
        if best is not None:
            return best
        for ladder in self.ladders:
            below = (rung for rung, target in enumerate(ladder.targets) if target <= live_bytes)
            judged = next((found for rung in below if (found := ladder.judged(rung)) is not None), None)
            if judged is not None and (best is None or judged.draft.timing.total_s < best.timing.total_s):
                best = judged.draft
        return best

    @cached_property
    def live_floor_bytes(self) -> int:
        """The lowest peak of live bytes of any choice, chunks aside."""
        return min((self.live_peak_bytes, *(target for ladder in self.ladders for target in ladder.targets)))

    def lowest_unmoved(self, below_bytes: float = NEVER) -> Candidate | None:
        """The order without evictions that has the lowest peak, if that is below `below_bytes`."""
        best: Candidate | None = None
        for judged in self.unmoved:
            found = judged.lowest(below_bytes)
            if found is not None and self._has_room_for_homes(found):
                best, below_bytes = found, found.peak_bytes
        return best

    def lowest(self, below_bytes: float = NEVER) -> Candidate | None:
        """The rung with the lowest peak, if that is below `below_bytes`."""
        best: Candidate | None = None
        if self._floor_bytes >= below_bytes:
            return None
        # Most rungs count as above the peak of the lowest ones, and are not solved.
        for is_lowest in (True, False):
            within_bytes = 0 if is_lowest else below_bytes - 1
            rungs = [
                rung for ladder in progress.over("solving", self.ladders) for rung in ladder.rungs_within(within_bytes)
            ]
            for rung in sorted(rungs, key=lambda rung: rung.target):
                found = rung.lowest(below_bytes)
                if found is not None and self.tiers.fit(found.memory):
                    best, below_bytes = found, found.peak_bytes
        return self.lowest_unmoved(below_bytes) or best

    def draft(self, choice: Choice, least_s: float = 0.0) -> Draft:
        """The quickly computed part of a choice's judgement: its time, with concurrent kernels wherever these save
        time.

        Args:
            least_s: a known lower bound of its seconds.
        """
        if self.target.runs_concurrently:
            choice = choice._replace(paired=side_by_side(self.flow, choice, self.cost_s, self._gain))
        return Draft(choice, self.timing(choice).no_less_than(max(self._least_s, least_s)))

    def judged(self, choice: Choice, least_s: float = 0.0) -> Judged:
        """The judgement of a choice, shared by all rungs with the same choice, as neighbouring rungs often have.

        Args:
            least_s: as of `draft`.
        """
        key = (tuple(choice.order), tuple(choice.intervals), tuple(choice.paired), tuple(choice.splits), least_s)
        if key not in self._judged:
            placed = with_home_copies(self.flow, choice, self.cost_s, self.rates, self.snapshot, self.tiers)
            least, *roomier = (made._replace(exact_chunks=self._exact_chunks) for made in placed)
            self._judged[key] = Judged(self, least, least_s, [Judged(self, made, least_s) for made in roomier])
        return self._judged[key]

    def timing(self, choice: Choice) -> Timing:
        return self._times.timing(build_schedule(*choice), tiers_of(choice.intervals))
