"""From facts and a byte limit to a plan.

The ladder: a solver is asked for plans at a series of ever lower targets of live bytes, which do not depend on
the limit; each is judged by the allocator's simulation; the plan is the first that fits. So a higher limit can
only stop earlier on the same ladder: it never gives a slower plan, and a lower limit never a higher peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from tfswap.analysis.cost import Rates, default_rates, kernel_seconds
from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.device import DeviceModel
from tfswap.planner import furthest
from tfswap.planner.ordering import choose_order
from tfswap.planner.problem import Problem, Solver, make_problem
from tfswap.planner.schedule import Interval, Step, build_schedule
from tfswap.planner.simulate import NOTHING_KNOWN, Memory, Resident, Timing, simulate_memory, simulate_time

LADDER_STEPS = 100
MARGIN_SHARE = 0.001
"""Of the planned peak, kept free: what may still change in the arena between planning and the first step. Where
the arena is known chunk by chunk the simulation is off by less than a thousand bytes."""


@dataclass(frozen=True)
class Candidate:
    """One rung of the ladder, judged."""

    intervals: list[Interval]
    memory: Memory
    timing: Timing

    @property
    def peak_bytes(self) -> int:
        """The peak that the plan promises: the simulated one and the margin."""
        return self.memory.peak_bytes + int(self.memory.peak_bytes * MARGIN_SHARE)


class Planner:
    """Plans for one step on one device; remembers the rungs that it has judged.

    Args:
        flow: the step's facts.
        device: where it runs.
        resident: what is in the arena before the step: variables, arguments and whatever else.
        keep: values that must stay.
        host_limit_bytes: the most host memory that swapped tensors may take.
        solver: named in the plan.
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
        solver: Solver = furthest.solve,
        rates: Rates | None = None,
    ):
        self.flow = flow
        self.resident = resident
        self.host_limit_bytes = host_limit_bytes
        self.swap = swap
        self.solver = solver
        self.rates = rates or default_rates(device)
        self.cost_s = [kernel_seconds(node, self.rates) for node in flow.nodes]
        order = choose_order(flow, self.cost_s)
        self.problem: Problem = make_problem(
            flow, order, self.rates, self.cost_s, resident=resident, keep=keep
        )
        self._judged: dict[int, Candidate | None] = {}

    def candidate(self, limit_bytes: int | None) -> Candidate | None:
        """The first rung within the limit; the top one for no limit; None when none fits."""
        if limit_bytes is None:
            return self._rung(0)
        for rung in range(LADDER_STEPS):
            if self._target(rung) > limit_bytes:
                continue
            found = self._rung(rung)
            if found is None:
                return None
            if found.peak_bytes <= limit_bytes and self._host_fits(found):
                return found
        return None

    def floor_bytes(self) -> int:
        """The smallest limit that the ladder reaches."""
        best: int | None = None
        for rung in reversed(range(LADDER_STEPS)):
            if best is not None and self._target(rung) >= best:
                break
            found = self._rung(rung)
            if found is not None and self._host_fits(found):
                best = found.peak_bytes if best is None else min(best, found.peak_bytes)
        top = self._rung(0)
        assert top is not None
        return top.peak_bytes if best is None else best

    def schedule(self, candidate: Candidate) -> list[Step]:
        return build_schedule(self.problem.order, candidate.intervals)

    def _target(self, rung: int) -> int:
        return self.problem.live_peak_bytes * (LADDER_STEPS - rung) // LADDER_STEPS

    def _host_fits(self, candidate: Candidate) -> bool:
        return self.host_limit_bytes is None or candidate.memory.host_peak_bytes <= self.host_limit_bytes

    def _rung(self, rung: int) -> Candidate | None:
        if rung not in self._judged:
            self._judged[rung] = self._judge(rung)
        return self._judged[rung]

    def _judge(self, rung: int) -> Candidate | None:
        if rung and not self.swap:
            return None
        intervals = [] if not rung else self.solver(self.problem, self._target(rung))
        if intervals is None:
            return None
        return self.judge(intervals)

    def judge(self, intervals: list[Interval]) -> Candidate:
        """Memory and time of any set of absences, whoever chose it."""
        steps = build_schedule(self.problem.order, intervals)
        memory = simulate_memory(self.flow, steps, resident=self.resident)
        timing = simulate_time(
            self.flow, steps, self.cost_s, self.rates.out_bytes_per_s, self.rates.in_bytes_per_s
        )
        return Candidate(intervals, memory, timing)
