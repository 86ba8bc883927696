"""From facts and a byte limit to a plan.

The ladder: a solver is asked for plans at a series of ever lower targets of live bytes, which do not depend on
the limit; each is judged by the allocator's simulation; of all that fit, the plan is the fastest. A higher limit
chooses among more: it never gives a slower plan, a lower limit never a higher peak, and at the floor there is a
plan. Simulating memory costs most, so a rung gets that far only when it is fast enough and can fit.

How an arena fragments is close to chance: two plans of the same live bytes can peak a quarter apart. So there are
several ladders, one for each way to place the copies and, for steps of few and large kernels, for each order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tfswap.analysis.cost import Rates, default_rates, kernel_seconds
from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.device import DeviceModel
from tfswap.planner import furthest, meng
from tfswap.planner.allocator import round_up
from tfswap.planner.ordering import rank_orders
from tfswap.planner.problem import Problem, Solver, make_problem
from tfswap.planner.schedule import Interval, Step, build_schedule
from tfswap.planner.simulate import NOTHING_KNOWN, Memory, Resident, Timing, simulate_memory, simulate_time

SOLVERS: dict[str, tuple[Solver, ...]] = {
    "furthest": (furthest.solve, furthest.solve_tight),
    "meng": (meng.solve,),
}
LADDER_STEPS = 100
MAX_KERNELS_FOR_ALL_ORDERS = 1500
"""Up to here ladders are climbed in every order: it costs little, and few large tensors fragment most."""
MARGIN_SHARE = 0.001
"""Of the planned peak, kept free: what may still change in the arena between planning and the first step. Where
the arena is known chunk by chunk the simulation is off by less than a thousand bytes."""


class Rung(NamedTuple):
    """One rung of one ladder: its order, by number, its solver, and how far down it is."""

    order: int
    solver: int
    number: int


@dataclass(frozen=True)
class Draft:
    """One rung of the ladder, timed.

    Attributes:
        problem: the step in the order of this ladder.
        intervals: what is absent when.
        timing: of the step so.
        live_bytes: the most live at once, without fragmentation.
    """

    problem: Problem
    intervals: list[Interval]
    timing: Timing
    live_bytes: int


@dataclass(frozen=True)
class Candidate:
    """One rung of the ladder, judged.

    Attributes:
        problem: the step in the order of this ladder.
        peak_bytes: the peak that the plan promises: the simulated one and the margin.
    """

    problem: Problem
    intervals: list[Interval]
    memory: Memory
    timing: Timing
    peak_bytes: int


class Planner:
    """Plans for one step on one device; remembers the rungs that it has judged.

    Args:
        flow: the step's facts.
        device: where it runs.
        resident: what is in the arena before the step: variables, arguments and whatever else.
        keep: values that must stay.
        host_limit_bytes: the most host memory that swapped tensors may take.
        solver: one of SOLVERS.
    """

    def __init__(
        self,
        flow: Dataflow,
        device: DeviceModel,
        *,
        resident: Resident = NOTHING_KNOWN,
        keep: frozenset[int] = frozenset(),
        host_limit_bytes: int | None = None,
        swap: bool = True,
        solver: str = "furthest",
        rates: Rates | None = None,
    ):
        self.flow = flow
        self.resident = resident
        self.host_limit_bytes = host_limit_bytes
        self.swap = swap
        self.solvers = SOLVERS[solver]
        self.rates = rates or default_rates(device)
        self.cost_s = [kernel_seconds(node, self.rates) for node in flow.nodes]
        orders = rank_orders(flow, self.cost_s)
        if not resident.chunks:
            # Which plan fragments least in an arena that is not known would be a guess: one ladder.
            self.solvers = self.solvers[:1]
        if not resident.chunks or sum(flow.is_kernel) > MAX_KERNELS_FOR_ALL_ORDERS:
            del orders[1:]
        self.problems = [
            make_problem(flow, order, self.rates, self.cost_s, resident=resident, keep=keep) for order in orders
        ]
        self.rungs = [
            Rung(order, solver, number)
            for order in range(len(orders))
            for solver in range(len(self.solvers))
            for number in range(LADDER_STEPS)
        ]
        self._drafted: dict[Rung, Draft | None] = {}
        self._judged: dict[Rung, Candidate] = {}

    def candidate(self, limit_bytes: int | None) -> Candidate | None:
        """The fastest rung within the limit, the highest of several; the top one for no limit; None if none fits."""
        if limit_bytes is None:
            return self._candidate(self.rungs[0])
        best: Candidate | None = None
        for rung in self.rungs:
            draft = self._draft(rung)
            if draft is None or draft.live_bytes > limit_bytes:
                continue
            if best is not None and draft.timing.total_s >= best.timing.total_s:
                continue
            found = self._candidate(rung)
            if found.peak_bytes <= limit_bytes and self._host_fits(found):
                best = found
                if not best.timing.stall_s:
                    break  # nothing is faster
        return best

    def floor_bytes(self) -> int:
        """The smallest limit that the ladder reaches."""
        best: int | None = None
        for rung in reversed(self.rungs):
            draft = self._draft(rung)
            if draft is None or (best is not None and draft.live_bytes >= best):
                continue
            found = self._candidate(rung)
            if self._host_fits(found):
                best = found.peak_bytes if best is None else min(best, found.peak_bytes)
        assert best is not None, "the top rung swaps nothing"
        return best

    def schedule(self, candidate: Candidate) -> list[Step]:
        return build_schedule(candidate.problem.order, candidate.intervals)

    def _host_fits(self, candidate: Candidate) -> bool:
        return self.host_limit_bytes is None or candidate.memory.host_peak_bytes <= self.host_limit_bytes

    def _draft(self, rung: Rung) -> Draft | None:
        if rung not in self._drafted:
            problem = self.problems[rung.order]
            intervals: list[Interval] | None = []
            if rung.number:
                target = problem.live_peak_bytes * (LADDER_STEPS - rung.number) // LADDER_STEPS
                intervals = self.solvers[rung.solver](problem, target) if self.swap else None
            self._drafted[rung] = None if intervals is None else self.draft(problem, intervals)
        return self._drafted[rung]

    def _candidate(self, rung: Rung) -> Candidate:
        if rung not in self._judged:
            draft = self._draft(rung)
            assert draft is not None
            self._judged[rung] = self._judge(draft)
        return self._judged[rung]

    def draft(self, problem: Problem, intervals: list[Interval]) -> Draft:
        """What is cheap to tell of any set of absences: its time and its live bytes."""
        steps = build_schedule(problem.order, intervals)
        timing = simulate_time(self.flow, steps, self.cost_s, self.rates.out_bytes_per_s, self.rates.in_bytes_per_s)
        change = np.zeros(len(problem.live_bytes) + 1, dtype=np.int64)
        for a in intervals:
            change[a.release] -= round_up(self.flow.values[a.value].nbytes)
            change[a.back] += round_up(self.flow.values[a.value].nbytes)
        live = problem.live_bytes + np.cumsum(change[:-1])
        return Draft(problem, intervals, timing, int(live.max(initial=0)))

    def judge(self, problem: Problem, intervals: list[Interval]) -> Candidate:
        """Memory and time of any set of absences, whoever chose it."""
        return self._judge(self.draft(problem, intervals))

    def _judge(self, draft: Draft) -> Candidate:
        steps = build_schedule(draft.problem.order, draft.intervals)
        memory = simulate_memory(self.flow, steps, resident=self.resident)
        # A fresh buffer can be taken over where the original could not: then less is live than the draft says.
        # The larger of the two keeps a rung's promise and its draft consistent.
        peak = max(draft.live_bytes, memory.peak_bytes + int(memory.peak_bytes * MARGIN_SHARE))
        return Candidate(draft.problem, draft.intervals, memory, draft.timing, peak)
