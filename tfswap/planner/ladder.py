"""Ladders: the choices of one solver on one order, for lower and lower targets of live bytes. A rung is one choice.

planner.py chooses the ladders and the rung.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from tfswap.planner.candidates import Candidate, Judged
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.problem import Choice, Problem, Solver

if TYPE_CHECKING:
    from tfswap.planner.planner import Planner


MIN_SWEEPS, MAX_RUNGS = 16, 64
BISECTIONS = 8
HELD_SHARE = 16
"""A rung's peak is assumed to be no further below its target than the ladder's height divided by this.

A solver stops once its target is met, so a choice hardly ever holds less. With this bound, rungs that are too high for
a limit need not be solved.
"""


class Climb(NamedTuple):
    """The numbers of ladders and rungs of some solvers, for their share of the planning time.

    Attributes:
        orders: the number of orders. Each solver has a ladder on each.
        rungs: the number of rungs of each ladder.
        spare: the number of further ladders that there is time for.
    """

    solvers: Sequence[Solver]
    orders: int
    rungs: int
    spare: int

    @classmethod
    def of(cls, solvers: Sequence[Solver], sweeps: int, most_rungs: int, most_orders: int) -> Climb:
        """The numbers with which the solvers make `sweeps` sweeps over the step."""
        count = max(1, len(solvers))
        rungs = max(MIN_SWEEPS, min(most_rungs, sweeps // count))
        orders = min(most_orders, max(1, sweeps // (count * rungs)))
        return cls(solvers, orders, rungs, max(0, sweeps // rungs - len(solvers) * orders))


class Rung(NamedTuple):
    """A solver's choice.

    Attributes:
        target: the lowest target that it was chosen for, which its peak of live bytes does not exceed.
        least_bytes: what its peak counts as at least.
    """

    judged: Judged
    target: int
    least_bytes: int

    def fitting(self, limit_bytes: float) -> Candidate | None:
        """As `Judged.fitting`."""
        return self._counted(self.judged.fitting(limit_bytes), limit_bytes)

    def lowest(self, below_bytes: float) -> Candidate | None:
        """As `Judged.lowest`."""
        return self._counted(self.judged.lowest(below_bytes), below_bytes - 1)

    def _counted(self, found: Candidate | None, limit_bytes: float) -> Candidate | None:
        if found is None or self.least_bytes > limit_bytes:
            return None
        return found.no_lower_than(self.least_bytes)


class Ladder:
    """The choices of one solver on one order, each judged at its first use.

    Attributes:
        targets: bytes, from just below the live peak down to the lowest that the solver reaches. A rung may hold less
            than its target.
        unmoved_s: the seconds of the order without evictions, a lower bound of all rungs.
    """

    def __init__(self, planner: Planner, problem: Problem, unmoved: Judged, solve: Solver, count: int):
        self.planner = planner
        self.problem = problem
        self.unmoved_s = unmoved.seconds
        self.solve = solve
        self.count = count
        self._choices: list[tuple[LiveTarget, Choice | None]] = []
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

    def rungs_within(self, limit_bytes: float) -> list[Rung]:
        """The solver's distinct choices for all targets, without those that count as above a limit, which are not
        solved.
        """
        found: dict[Judged, Rung] = {}
        for number in reversed(range(len(self.targets))):
            least_bytes = self._least_bytes(number)
            if least_bytes > limit_bytes:
                break
            judged = self.judged(number)
            if judged is not None and judged not in found:
                found[judged] = Rung(judged, self.targets[number], least_bytes)
        return [*found.values()][::-1]

    def _least_bytes(self, rung: int) -> int:
        """What the peak of a rung counts as at least; 0 for the lowest rungs."""
        below = rung + max(1, self.count // HELD_SHARE)
        return self.targets[below] if below < len(self.targets) else 0

    def choice(self, nbytes: int) -> Choice | None:
        """The solver's choice for a target of `nbytes`, solved where no earlier choice holds for it."""
        for target, choice in self._choices:
            if target.least <= nbytes < target.beyond:
                return choice
        target = LiveTarget(nbytes)
        self._choices.append((target, self.solve(self.problem, target)))
        return self._choices[-1][1]

    def judged(self, rung: int) -> Judged | None:
        """The judged choice of a rung; None where the solver does not meet its target. It may meet lower ones."""
        if rung not in self._judged:
            choice = self.choice(self.targets[rung])
            self._judged[rung] = None if choice is None else self.planner.judged(choice, self.unmoved_s)
        return self._judged[rung]
