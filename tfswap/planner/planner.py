"""From facts and a byte limit to a plan.

The ladder: a solver is asked for plans at a series of ever lower targets of live bytes, which do not depend on
the limit; each is judged by the allocator's simulation; of all that fit, the plan is the fastest.

Invariant: which candidates there are does not depend on the limit, nor do their peaks, nor their order: by time, and
of those that take as long by place. The plan is the first that fits. So a higher limit never gives a slower plan, a
lower limit never a higher peak, and at the floor there is a plan. What is left out to save time can't change that: a
candidate's time is no less than that of what it is made from, so that what comes after a plan that fits is known to be
no faster; and what holds more live bytes than the limit is known to peak above it. On a GPU a candidate's time depends
on the limit, and only the first of these holds.

How an arena fragments is close to chance: two plans of the same live bytes can peak a quarter apart. So there are
several ladders, one for each way to place the copies and, for steps of few and large kernels, for each order.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tfswap.analysis.cost import Costs
from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.graph import Node
from tfswap.ir.permits import TACTICS
from tfswap.kernels.device import DeviceModel
from tfswap.plan.plan import Split
from tfswap.plan.schedule import KERNELS, build_schedule, on_disk
from tfswap.planner.chunk_splits import LEAST_SHARES, choose_ends, choose_splits
from tfswap.planner.convolution_room import Computed, Need, computed, has_convolutions, needs
from tfswap.planner.host_tiers import ANYTHING, Tiers
from tfswap.planner.ordering import rank_orders
from tfswap.planner.pairing import (
    brought_together,
    ever_fewer,
    gains,
    kept_pairs,
    orders_with_room,
    runs_pairs,
    side_by_side,
    without_last,
)
from tfswap.planner.problem import NEVER, Choice, Problem, Solver, make_problem
from tfswap.planner.solvers import belady, cheapest_eviction, meng, milp, published
from tfswap.simulator.simulate import (
    NOTHING_KNOWN,
    ArenaSnapshot,
    Judge,
    Memory,
    Timing,
    memory_within,
    simulate_time,
)
from tfswap.support import progress

SWAP: tuple[Solver, ...] = (belady.solve, belady.solve_tight)
RECOMPUTE: tuple[Solver, ...] = (cheapest_eviction.solver(cheapest_eviction.Prices(copy=NEVER)),)
EVICT: tuple[Solver, ...] = (
    cheapest_eviction.solver(cheapest_eviction.Prices(copy=0.5)),
    cheapest_eviction.solver(cheapest_eviction.Prices(copy=0.1)),
    cheapest_eviction.solver(cheapest_eviction.Prices(copy=2.0)),
    *RECOMPUTE,
)
BOTH: tuple[Solver, ...] = (*EVICT, *SWAP)
SOLVERS: dict[str, dict[frozenset[str], tuple[Solver, ...]]] = {
    "default": {
        frozenset(): (),
        frozenset({"swap"}): SWAP,
        frozenset({"recompute"}): RECOMPUTE,
        frozenset({"swap", "recompute"}): BOTH,
    },
    "meng": dict.fromkeys((frozenset({"swap"}), frozenset({"swap", "recompute"})), (meng.solve,)),
    "vdnn_all": dict.fromkeys((frozenset({"swap"}), frozenset({"swap", "recompute"})), (published.vdnn_all,)),
    "vdnn_conv": dict.fromkeys((frozenset({"swap"}), frozenset({"swap", "recompute"})), (published.vdnn_conv,)),
    "sqrt": dict.fromkeys((frozenset({"recompute"}), frozenset({"swap", "recompute"})), (published.sqrt,)),
    "superneurons": dict.fromkeys(
        (frozenset({"recompute"}), frozenset({"swap", "recompute"})), (published.superneurons,)
    ),
    "exact": {frozenset({"swap", "recompute"}): (milp.solve,)},
}
"""By name and tactics. The default ones are climbed together: the fastest plan that fits wins. The exact one is for
steps of some dozen kernels."""
RESTARTS: dict[frozenset[str], tuple[cheapest_eviction.Prices, ...]] = {
    frozenset({"recompute"}): (
        cheapest_eviction.Prices(copy=NEVER, distance=1.0),
        cheapest_eviction.Prices(copy=NEVER, distance=0.25),
        *(cheapest_eviction.Prices(copy=NEVER, draw=draw) for draw in range(1, 7)),
    ),
    frozenset({"swap", "recompute"}): (
        cheapest_eviction.Prices(copy=4.0, distance=1.0),
        cheapest_eviction.Prices(copy=0.5, distance=1.0),
        cheapest_eviction.Prices(copy=0.25, distance=0.25),
        cheapest_eviction.Prices(copy=2.0, distance=0.25),
        cheapest_eviction.Prices(copy=0.5, draw=1),
        cheapest_eviction.Prices(copy=2.0, distance=1.0, draw=2),
        cheapest_eviction.Prices(copy=0.1, draw=3),
        cheapest_eviction.Prices(copy=4.0, distance=0.25, draw=4),
        cheapest_eviction.Prices(copy=0.25, distance=1.0, draw=5),
        cheapest_eviction.Prices(copy=1.0, draw=6),
        cheapest_eviction.Prices(copy=0.5, distance=0.25, draw=7),
        cheapest_eviction.Prices(copy=8.0, draw=8),
    ),
}
"""What the default solvers are joined by on steps so small that there is time left."""
KERNELS_SWEPT = 200_000
"""Kernels that all rungs of a group of solvers go past together, about: what bounds the time that planning takes on
large graphs."""
REQUESTS_OF_A_KERNEL = 3
"""At most, outside of loops."""
MIN_SWEEPS, MAX_RUNGS = 16, 64
TWO_SOLVERS = 50_000
"""Kernels, at most, of steps for which two solvers are asked and orders with room are searched. Of solvers that both
swap and recompute, the first rarely has the lowest floor. On larger steps planning would take longer than tracing."""
BISECTIONS = 8
PAIR_TRIES = 8
PAIR_LEVELS = 6
"""Of a choice so many are judged with some of its kernels side by side, between all and those that raise no peak: where
a limit leaves room for some, the step takes no longer than it must."""
ENDS_SHARE = 0.75
"""Of what the arena may grow to: a plan with tensors at the ends of chunks promises no lower peak, and so is not asked
for where the limit is less."""
MARGIN_SHARE, MARGIN_BYTES = 0.001, 1024
"""Of the planned peak, kept free, and at least so much: steps of a loop find the arena's chunks elsewhere, and what
they return is still held in the next step."""


def promised(peak_bytes: int) -> int:
    """The peak that a plan promises whose simulated one is `peak_bytes`."""
    return peak_bytes + max(int(peak_bytes * MARGIN_SHARE), MARGIN_BYTES)


def _simulated(limit_bytes: float) -> float:
    """As `simulated_limit`, also of no limit."""
    return NEVER if limit_bytes == NEVER else simulated_limit(int(limit_bytes))


def simulated_limit(limit_bytes: int) -> int:
    """The highest simulated peak of a plan that keeps this limit."""
    most = min(limit_bytes - MARGIN_BYTES, int(limit_bytes / (1 + MARGIN_SHARE)) + 1)
    return most if promised(most) <= limit_bytes else most - 1


@dataclass(frozen=True)
class Draft:
    """One rung of a ladder, timed.

    Attributes:
        choice: the kernels in order, and what is swapped when.
        timing: of the step so; no less than that of the order with nothing moved.
    """

    choice: Choice
    timing: Timing


@dataclass(frozen=True)
class Candidate:
    """One rung of the ladder, judged.

    Attributes:
        choice: the kernels in order, and what is swapped when.
        timing: of the step; where cuDNN computes its convolutions and there is a limit, with what is left for them.
        peak_bytes: the peak that the plan promises: the simulated one and the margin.
        computed: how cuDNN computes its convolutions then.
    """

    choice: Choice
    memory: Memory
    timing: Timing
    peak_bytes: int
    computed: Computed | None = None

    def largest_kernel(self) -> int:
        """The kernel that the peak is for: the one that runs, or is to run next, where it is."""
        steps = build_schedule(*self.choice)[self.memory.peak_step :]
        return next(subject for kind, subject in steps if kind in KERNELS)


class _Climb(NamedTuple):
    """How many ladders some solvers climb, of how many rungs, in the time that there is for them.

    Attributes:
        orders: each solver climbs a ladder for so many orders.
        rungs: of each ladder.
        spare: ladders that there is time left for.
    """

    solvers: Sequence[Solver]
    orders: int
    rungs: int
    spare: int

    @classmethod
    def of(cls, solvers: Sequence[Solver], sweeps: int, most_rungs: int, most_orders: int) -> _Climb:
        """Of so many sweeps over the step."""
        asked = max(1, len(solvers))
        rungs = max(MIN_SWEEPS, min(most_rungs, sweeps // asked))
        orders = min(most_orders, max(1, sweeps // (asked * rungs)))
        return cls(solvers, orders, rungs, max(0, sweeps // rungs - len(solvers) * orders))


class Planner:
    """Plans for one step on one device; remembers the rungs that it has judged.

    Args:
        flow: the step's facts.
        device: where it runs.
        snapshot: what is in the arena before the step: variables, arguments and whatever else.
        tactics: what may be used besides an order, of TACTICS. What is encoded has been settled when there is a flow.
        tiers: what there is for swapped tensors.
        solver: one of SOLVERS.
        costs: what kernels and copies take; by default what the analytic model says of this kind of device.
        share: of the rungs that fit into the time for planning, how many this planner may have.
        portable: plan with TensorFlow's own ops alone: no kernels side by side, and no chunks of a request's own size.
        least_s, least_bytes: what no plan takes less than, as is known from what the step is made from.
        orders: what `rank_orders` gives for these facts and costs, where that is known.
        outside: the planner of the same step with nothing moved inside of its bodies: the orders are that one's.
    """

    def __init__(
        self,
        flow: Dataflow,
        device: DeviceModel,
        *,
        snapshot: ArenaSnapshot = NOTHING_KNOWN,
        tiers: Tiers = ANYTHING,
        tactics: Collection[str] = TACTICS,
        solver: str = "default",
        costs: Costs | None = None,
        share: float = 1.0,
        portable: bool = False,
        least_s: float = 0.0,
        least_bytes: int = 0,
        orders: Sequence[list[int]] = (),
        outside: Planner | None = None,
    ):
        self._judged: dict[tuple[object, ...], Judged] = {}  # by what was chosen, and the least that it takes
        self._least_s, self.least_bytes = least_s, least_bytes
        self.flow = flow
        self.device = device
        self.snapshot = snapshot
        self.portable = portable
        # oneDNN's graph pass does not see into a node that runs two kernels, and its kernels share among cores anyway.
        self._runs_pairs = runs_pairs(device) and not portable
        # Where cuDNN's workspace is limited, that counts as part of each convolution.
        self.takes_workspaces = device.kind == "gpu" and device.workspace_bytes is None and has_convolutions(flow)
        self.judge = Judge(flow, snapshot)
        # Where the step decides what is asked for, chunks that are larger than that have no other bound.
        self._exact_chunks = flow.is_undecided and not portable
        self.tiers = dataclasses.replace(tiers, inner_bytes=flow.inner_host_bytes)
        self.costs = costs or Costs.of(device)
        self.rates = self.costs.rates
        self.cost_s = self.costs.of_step(flow)
        self._gain = gains(flow, self.cost_s, self.rates)
        orders = list(orders or rank_orders(flow, self.cost_s))
        if not snapshot.chunks:
            # Which plan fragments least in an arena that is not known would be a guess: one order.
            del orders[1:]
        moves = frozenset(tactics) - {"encode"}
        solvers = SOLVERS[solver][moves]
        # A loop asks for as much as all kernels that it runs.
        kernels = max(1, len(orders[0]), sum(map(len, flow.requests)) // REQUESTS_OF_A_KERNEL)
        sweeps = max(MIN_SWEEPS, int(share * KERNELS_SWEPT) // kernels)
        count = max(1 + (kernels <= TWO_SOLVERS), sweeps // MIN_SWEEPS)
        groups = [solvers[:count]]
        if solvers is BOTH and sweeps > MIN_SWEEPS:
            # Who allows more than swapping gets what swapping alone finds, too.
            groups = [EVICT[:count], SWAP[:count]]
        climbs = [_Climb.of(group, sweeps, int(share * MAX_RUNGS), len(orders)) for group in groups]
        del orders[max(climb.orders for climb in climbs) :]
        self._roomy: list[list[int]] = []
        if outside is not None:
            orders, self._roomy = outside.ranked[: len(orders)], outside._roomy
        elif self._runs_pairs:
            if kernels <= TWO_SOLVERS:
                self._roomy = orders_with_room(flow, orders[0], self.cost_s, self.rates)
            orders = [brought_together(flow, order, self.cost_s, self.rates) for order in orders]
        self.ranked: list[list[int]] = orders
        orders = [*orders, *self._roomy]
        self.problems = [
            make_problem(flow, order, self.rates, self.cost_s, snapshot=snapshot, tiers=self.tiers) for order in orders
        ]
        self.unmoved = [self.judged(Choice(p.order, [])) for p in self.problems]
        pairs = list(zip(self.problems, self.unmoved, strict=True))
        self.ladders = [
            _Ladder(self, p, unmoved, s, climb.rungs)
            for climb in climbs
            for p, unmoved in pairs[: climb.orders]
            for s in climb.solvers
        ]
        restarts = RESTARTS.get(moves, ()) if solver == "default" else ()
        first = climbs[0]
        self.ladders += [
            _Ladder(self, *pairs[0], cheapest_eviction.solver(p), first.rungs) for p in restarts[: first.spare]
        ]

    def live_bytes_outside(self, bodies: Collection[Node]) -> int:
        """The least that is live at once with nothing moved, while none of these nodes runs, which have bodies."""
        nodes = self.flow.nodes
        return min(
            max((int(n) for i, n in zip(p.order, p.live_bytes, strict=True) if nodes[i] not in bodies), default=0)
            for p in self.problems
        )

    @property
    def live_peak_bytes(self) -> int:
        """The least that is live at once with nothing moved."""
        return min(problem.live_peak_bytes for problem in self.problems)

    def candidate(self, limit_bytes: int | None, best: Candidate | None = None) -> Candidate | None:
        """The fastest of all rungs within the limit, the unmoved step for no limit; None if none fits.

        Args:
            best: another planner's; returned where nothing is faster.
        """
        if limit_bytes is None:
            return self.unmoved[0].fitting(NEVER)
        best = self.unmoved_candidate(limit_bytes, best)
        # To move something takes time: where an order is no faster than the best, no rung on it is.
        ladders = [ladder for ladder in self.ladders if best is None or ladder.unmoved_s < best.timing.total_s]
        rungs = [rung for ladder in progress.over("solving", ladders) for rung in ladder.rungs]
        for rung in sorted(rungs, key=lambda rung: rung.judged.seconds):
            if best is not None and rung.judged.seconds >= best.timing.total_s:
                break
            if rung.target > limit_bytes and not rung.judged.may_fit(limit_bytes):
                continue
            found = rung.judged.fitting(limit_bytes)
            if found is None or not self.tiers.fit(found.memory):
                continue
            if best is None or found.timing.total_s < best.timing.total_s:
                best = found
        return best

    def unmoved_candidate(self, limit_bytes: int, best: Candidate | None = None) -> Candidate | None:
        """As `candidate`, of the orders alone, which no solver has to be asked for."""
        for problem, judged in zip(self.problems, self.unmoved, strict=True):
            # An allocator never needs less than what is live.
            if problem.live_peak_bytes > limit_bytes:
                continue
            if best is not None and best.timing.total_s <= judged.draft.timing.total_s:
                continue
            found = judged.fitting(limit_bytes)
            if found is not None and (best is None or found.timing.total_s < best.timing.total_s):
                best = found
        return best

    def drafted(self, live_bytes: int) -> Draft | None:
        """The fastest choice that holds no more than `live_bytes` at once, chunks aside; None where none does."""
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
        """The least that a choice holds at once, chunks aside."""
        return min((self.live_peak_bytes, *(target for ladder in self.ladders for target in ladder.targets)))

    def lowest_unmoved(self, below_bytes: float = NEVER) -> Candidate | None:
        """The order that needs least, if that is less than `below_bytes`."""
        return self._lowest(self.unmoved, below_bytes)

    def lowest(self, below_bytes: float = NEVER) -> Candidate | None:
        """The rung that needs least, if that is less than `below_bytes`."""
        rungs = [rung for ladder in progress.over("solving", self.ladders) for rung in ladder.rungs]
        # From the lowest target on: nearly all others then have more live bytes than what was found.
        rungs.sort(key=lambda rung: rung.target)
        return self._lowest([*(rung.judged for rung in rungs), *self.unmoved], below_bytes)

    def _lowest(self, made: Iterable[Judged], below_bytes: float) -> Candidate | None:
        best: Candidate | None = None
        for judged in made:
            found = judged.lowest(below_bytes)
            if found is not None and (judged in self.unmoved or self.tiers.fit(found.memory)):
                best, below_bytes = found, found.peak_bytes
        return best

    def draft(self, choice: Choice, least_s: float = 0.0) -> Draft:
        """What is cheap to compute of any choice: its time, with kernels side by side wherever that saves some.

        Args:
            least_s: what it takes at least, as is known from what it is made from.
        """
        if self._runs_pairs:
            choice = choice._replace(paired=side_by_side(self.flow, choice, self.cost_s, self._gain))
        return Draft(choice, self.timing(choice).no_less_than(max(self._least_s, least_s)))

    def judged(self, choice: Choice, least_s: float = 0.0) -> Judged:
        """What is known of any choice, whoever made it: neighbouring rungs often are one choice.

        Args:
            least_s: as of `draft`.
        """
        choice = choice._replace(exact_chunks=self._exact_chunks)
        key = (tuple(choice.order), tuple(choice.intervals), tuple(choice.paired), tuple(choice.splits), least_s)
        if key not in self._judged:
            self._judged[key] = Judged(self, choice, least_s)
        return self._judged[key]

    def timing(self, choice: Choice) -> Timing:
        return simulate_time(self.flow, build_schedule(*choice), self.cost_s, self.rates, on_disk(choice.intervals))


_Besides = tuple[tuple[int, ...], tuple[Split, ...]]
"""What a choice has besides an order and what is swapped: what runs side by side, and splits."""


class Judged:
    """A draft, and what the allocator makes of it: as it is, with fewer kernels side by side, and in exact chunks.

    None of these depends on a limit. One takes no less time, and promises no lower peak, than those that are tried
    before it and stand for it: so whoever is given the first that fits misses nothing. The draft is made when it is
    first asked for: what holds too much is refused without it.

    Args:
        choice, least_s: as of `Planner.draft`.
    """

    def __init__(self, planner: Planner, choice: Choice, least_s: float):
        self._choice = choice
        self._one_by_one = choice._replace(paired=())
        self._least_s = least_s
        self._planner = planner
        self._memories: dict[_Besides, Memory] = {}
        self._above: dict[_Besides, float] = {}  # what it peaks above, where no more is known
        self._live_above: dict[tuple[int, ...], float] = {}  # by its pairs: more than this is live at once
        self._splits: dict[tuple[int, ...], tuple[int, tuple[Split, ...]]] = {}  # and live bytes, by its pairs
        self._needs: dict[_Besides, list[Need]] = {}

    @cached_property
    def draft(self) -> Draft:
        """The choice with kernels side by side, timed."""
        return self._planner.draft(self._choice, self._least_s)

    @property
    def seconds(self) -> float:
        """What none of them takes less than."""
        return self.draft.timing.total_s

    def may_fit(self, limit_bytes: float) -> bool:
        """Whether what is live at once is within a limit: an allocator never needs less."""
        return self._is_live_within(self._one_by_one, limit_bytes)

    def _is_live_within(self, choice: Choice, limit_bytes: float) -> bool:
        most_bytes, made = _simulated(limit_bytes), choice.paired
        if made in self._splits:
            return self._splits[made][0] <= most_bytes
        if self._live_above.get(made, -1) >= most_bytes:
            return False
        planner, steps = self._planner, build_schedule(*choice._replace(splits=()))
        if memory_within(planner.flow, steps, most_bytes, snapshot=planner.snapshot, live=True) is not None:
            return True
        self._live_above[made] = most_bytes
        return False

    def fitting(self, limit_bytes: float) -> Candidate | None:
        """The fastest within a limit."""
        found = next(self._fastest_first(limit_bytes), None)
        if found is None or not self._planner.takes_workspaces or limit_bytes == NEVER:
            return found
        made = self._computed(found.choice, limit_bytes)
        if found.choice.splits:  # which may leave more room for workspaces, by chance
            least_s = self._computed(found.choice._replace(splits=()), limit_bytes).timing.total_s
            made = dataclasses.replace(made, timing=made.timing.no_less_than(least_s))
        return dataclasses.replace(found, timing=made.timing, computed=made)

    def _fastest_first(self, limit_bytes: float) -> Iterator[Candidate]:
        """Those within a limit."""
        if self.draft.choice.paired:
            yield from self._as_drafted(self.draft.choice, self.draft.timing, limit_bytes)
        if self._candidate(self._one_by_one, self._alone, limit_bytes) is not None:
            for choice, timing in self._fewer_pairs:
                found = self._candidate(choice, timing, limit_bytes)
                if found is not None:
                    yield dataclasses.replace(found, peak_bytes=max(found.peak_bytes, self.apart.peak_bytes))
            yield self.within
        for share, choice in self._split(self._one_by_one, limit_bytes):
            apart = self._candidate(choice, self._alone, limit_bytes)
            if apart is not None:
                yield self._with_pairs(apart, share) or apart
        yield from self._at_ends(limit_bytes)

    def _as_drafted(self, choice: Choice, timing: Timing, limit_bytes: float) -> Iterator[Candidate]:
        """A choice in chunks as they come, and in exact ones, where that is within a limit."""
        found = self._candidate(choice, timing, limit_bytes)
        if found is not None:
            yield found
        for _, split in self._split(choice, limit_bytes):
            found = self._candidate(split, timing, limit_bytes)
            if found is not None:
                yield found

    def lowest(self, below_bytes: float) -> Candidate | None:
        """The one that needs least, if that is less than `below_bytes`."""
        best: Candidate | None = None
        if not self.may_fit(below_bytes - 1):
            return None
        made = [(self._one_by_one, self._alone)]
        made += [(self.draft.choice, self.draft.timing)] if self.draft.choice.paired else []
        for choice, timing in made:
            for one in itertools.chain((choice,), (split for _, split in self._split(choice, below_bytes - 1))):
                found = self._candidate(one, timing, below_bytes - 1)
                if found is not None:
                    best, below_bytes = found, found.peak_bytes
        for found in self._at_ends(below_bytes - 1):
            if found.peak_bytes < below_bytes:
                best, below_bytes = found, found.peak_bytes
        return best

    @cached_property
    def _alone(self) -> Timing:
        """What that takes."""
        if not self.draft.choice.paired:
            return self.draft.timing
        return self._planner.timing(self._one_by_one).no_less_than(self.seconds)

    @cached_property
    def apart(self) -> Candidate:
        """With all kernels one after another."""
        found = self._candidate(self._one_by_one, self._alone, NEVER)
        assert found is not None, "any peak is within that"
        return found

    @cached_property
    def _fewer_pairs(self) -> list[tuple[Choice, Timing]]:
        """With ever fewer side by side of those that raise the peak; each takes no less time than the one before."""
        choice, least_s = self.draft.choice, self.seconds
        if not choice.paired:
            return []
        memory = self._memory(choice, NEVER)
        assert memory is not None, "any peak is within that"
        found: list[tuple[Choice, Timing]] = []
        for kept in ever_fewer(choice, memory, self.apart.memory.peak_bytes, PAIR_LEVELS):
            fewer = choice._replace(paired=kept)
            timing = self._planner.timing(fewer).no_less_than(least_s)
            found.append((fewer, timing))
            least_s = timing.total_s
        return found

    @cached_property
    def within(self) -> Candidate:
        """With those side by side that don't raise the peak."""
        return self._with_pairs(self.apart) or self.apart

    def _with_pairs(self, apart: Candidate, share: float | None = None) -> Candidate | None:
        """The draft with those side by side that don't raise the peak of `apart`; in chunks as they come, or exact ones
        (`share`).
        """
        choice, count, most_bytes = self.draft.choice, 1, apart.memory.peak_bytes
        for _ in range(PAIR_TRIES):
            if not choice.paired:
                break
            tried = choice if share is None else self._in_exact_chunks(choice, share)
            memory = self._memory(tried, NEVER)
            assert memory is not None, "any peak is within that"
            if memory.peak_bytes <= most_bytes:
                least_s = self._fewest_pairs_s if share is None else self.within.timing.total_s
                return Candidate(tried, memory, self._planner.timing(choice).no_less_than(least_s), apart.peak_bytes)
            kept = kept_pairs(tried, memory, most_bytes)
            if len(kept) == len(choice.paired):
                # None is at the peak, and earlier kernels left other chunks: without the last of them, then more.
                kept = without_last(tried, memory.peak_step, count)
                count *= 2
            choice = choice._replace(paired=kept)
        return None

    @property
    def _fewest_pairs_s(self) -> float:
        return self._fewer_pairs[-1][1].total_s if self._fewer_pairs else self.seconds

    def _candidate(self, choice: Choice, timing: Timing, limit_bytes: float) -> Candidate | None:
        """What the draft is with what `choice` has besides; None where that is not within a limit."""
        memory = self._memory(choice, _simulated(limit_bytes))
        if memory is None:
            return None
        peak_bytes = max(promised(memory.peak_bytes), self._planner.least_bytes)
        return Candidate(choice, memory, timing, peak_bytes) if peak_bytes <= limit_bytes else None

    def _split(self, choice: Choice, limit_bytes: float) -> Iterator[tuple[float, Choice]]:
        """A choice with requests that get no larger chunks than they need, where that may get it within a limit.

        With few, then with more, each with the share of the live peak from which on requests are taken.
        """
        if self._planner.portable or choice.exact_chunks or not self._is_live_within(choice, limit_bytes):
            return
        if self._splits_of(choice)[1]:
            for share in LEAST_SHARES:
                yield share, self._in_exact_chunks(choice, share)

    def _at_ends(self, limit_bytes: float) -> Iterator[Candidate]:
        """One kernel after another, with what stays at the ends of chunks, where the arena has no hole for a request
        although it has as many bytes. Nearly all of the arena is in use on the way.
        """
        planner, choice = self._planner, self._one_by_one
        most_bytes = planner.snapshot.limit_bytes
        if planner.portable or choice.exact_chunks or most_bytes is None:
            return
        least_bytes = int(ENDS_SHARE * most_bytes)
        if limit_bytes < least_bytes or not self.may_fit(most_bytes):
            return
        if self._memory(choice, most_bytes) is not None:
            return
        _, splits = self._splits_of(choice)
        steps = build_schedule(*choice)
        for ends in choose_ends(planner.flow, steps, planner.snapshot, splits):
            found = self._candidate(choice._replace(splits=ends), self._alone, limit_bytes)
            if found is not None:
                found = dataclasses.replace(found, peak_bytes=max(found.peak_bytes, least_bytes))
                timing = found.timing.no_less_than(self.within.timing.total_s)
                yield dataclasses.replace(found, timing=timing)

    def _in_exact_chunks(self, choice: Choice, share: float) -> Choice:
        live_bytes, splits = self._splits_of(choice)
        return choice._replace(splits=tuple(split for split in splits if split.nbytes >= share * live_bytes))

    def _splits_of(self, choice: Choice) -> tuple[int, tuple[Split, ...]]:
        if choice.paired not in self._splits:
            steps = build_schedule(*choice)
            self._splits[choice.paired] = choose_splits(self._planner.flow, steps, self._planner.snapshot)
        return self._splits[choice.paired]

    def _memory(self, choice: Choice, most_bytes: float) -> Memory | None:
        """What the draft does to memory with what `choice` has besides; None where it peaks above `most_bytes`."""
        made = choice.paired, choice.splits
        if made not in self._memories and self._above.get(made, -1) < most_bytes:
            planner = self._planner
            memory = planner.judge.memory(build_schedule(*choice), on_disk(choice.intervals), most_bytes)
            if memory is None:
                self._above[made] = most_bytes
            else:
                self._memories[made] = planner.tiers.with_overflow(memory)
        found = self._memories.get(made)
        return None if found is None or found.peak_bytes > most_bytes else found

    def _computed(self, choice: Choice, limit_bytes: float) -> Computed:
        """How cuDNN computes the draft's convolutions within a limit, with what `choice` has side by side."""
        made = choice.paired, choice.splits
        planner, steps = self._planner, build_schedule(*choice)
        if made not in self._needs:
            self._needs[made] = needs(planner.flow, steps, planner.snapshot)
        return computed(
            planner.flow,
            steps,
            self._needs[made],
            simulated_limit(int(limit_bytes)),
            planner.cost_s,
            planner.rates,
            on_disk(choice.intervals),
        )


class _Rung(NamedTuple):
    """What a solver chooses, and the lowest target that it chooses it for: no more is live at once."""

    judged: Judged
    target: int


class _Ladder:
    """One solver on one order, asked for ever lower targets of live bytes; remembers what it has judged.

    Attributes:
        targets: bytes, from just below the live peak down to the lowest that the solver reaches. A rung may hold less
            than its own.
        unmoved_s: the least that a step in this order takes.
    """

    def __init__(self, planner: Planner, problem: Problem, unmoved: Judged, solve: Solver, count: int):
        self.planner = planner
        self.problem = problem
        self.unmoved_s = unmoved.draft.timing.total_s
        self.solve = solve
        self.count = count
        self._choices: dict[int, Choice | None] = {}  # by target
        self._judged: dict[int, Judged | None] = {}

    @cached_property
    def targets(self) -> list[int]:
        high = self.problem.live_peak_bytes
        met, unmet = high, 0
        for _ in range(BISECTIONS):
            middle = (met + unmet) // 2
            if self.choice(middle) is None:
                unmet = middle
            else:
                met = middle
        targets = (high - (high - met) * (n + 1) // self.count for n in range(self.count))
        return [target for target in dict.fromkeys(targets) if target < high]

    @cached_property
    def rungs(self) -> list[_Rung]:
        """What the solver chooses for all targets, each once."""
        judged = ((self.judged(number), target) for number, target in enumerate(self.targets))
        lowest = {made: target for made, target in judged if made is not None}
        return [_Rung(made, target) for made, target in lowest.items()]

    def choice(self, target: int) -> Choice | None:
        if target not in self._choices:
            self._choices[target] = self.solve(self.problem, target)
        return self._choices[target]

    def judged(self, rung: int) -> Judged | None:
        """None where the solver does not meet the target; it may meet lower ones all the same."""
        if rung not in self._judged:
            choice = self.choice(self.targets[rung])
            self._judged[rung] = None if choice is None else self.planner.judged(choice, self.unmoved_s)
        return self._judged[rung]
