"""A solution of the integer program as choices: an order with recomputed kernels, and placed copies."""

from __future__ import annotations

import numpy as np

from tfswap.plan.schedule import Interval, build_schedule
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.problem import Choice, Gap
from tfswap.planner.solvers.belady import place_copies
from tfswap.planner.solvers.milp_copies import Copies
from tfswap.simulator.memory import simulate_memory

PARTS_LOST = 1e-6
"""A copy counts as complete when its parts sum to 1 less at most this."""


class Solution:
    """The program's columns with the values that the solver found.

    Args:
        target_bytes: the most live bytes with which copies are placed.
    """

    def __init__(self, copies: Copies, target_bytes: int, values: np.ndarray):
        self.copies, self.stages = copies, copies.stages
        self.target = target_bytes
        self.found = values

    def choices(self) -> list[Choice]:
        """The choices of a solution: copies as in the solution, placed within the target, and as short as possible."""
        problem, flow = self.stages.problem, self.stages.problem.flow
        reruns: list[tuple[int, int]] = []
        swapped: list[Gap] = []
        stays: list[tuple[int, int]] = []  # for each, the moments at which the buffer is free, and held again
        made: dict[int, int] = {}
        used: dict[int, tuple[int, int]] = {}  # the moment of its last use, the position after which it may be evicted
        at_moment: dict[int, int] = {}  # position of the first kernel that runs from then on
        for (stage, kernel), moment in self.stages.moment_of.items():
            at = at_moment[moment] = self.stages.positions[stage] + len(reruns)
            if self.found[self.stages.runs(stage, kernel)] < 0.5:
                continue
            for v in self.stages.reads[kernel]:
                column = self.stages.back.get((stage, kernel, v))
                if column is not None and self.found[column] > 0.5:
                    last, start = used[v]
                    swapped.append(Gap(v, flow.values[v].nbytes, made[v], start, at))
                    stays.append(self._stay(v, last, moment))
                # A copy out that has ended leaves the buffer to the kernel that reads it last.
                used[v] = moment, at - self._is_out(moment, v)
            for v in self.stages.uses.makes[self.stages.kernels[kernel]]:
                made[v], used[v] = at, (moment, at)
            if kernel < stage:
                reruns.append((self.stages.positions[stage], self.stages.kernels[kernel]))
        order = problem.extended(reruns, problem.live_bytes).order
        extended = problem.extended(reruns, self._live(order) + problem.there_bytes)
        tight, said = _tight(swapped), list[Interval]()
        for interval, gap, (gone, there) in zip(tight, swapped, stays, strict=True):
            release = min(gap.end, max(gap.start + 1, at_moment[gone]))
            said.append(interval._replace(release=release, back=min(gap.end, max(release, at_moment[there]))))
        placed = place_copies(extended, swapped, LiveTarget(self.target))
        return [Choice(order, way) for way in (said, placed, tight)]

    def _stay(self, v: int, last: int, until: int) -> tuple[int, int]:
        """The first moment after `last` without the buffer of `v`, and the first from which it is held `until`."""
        absent = range(last + 1, until)
        gone = next((n for n in absent if not self._is_held(n, v)), until)
        there = next((n + 1 for n in reversed(absent) if not self._is_coming(n, v)), last + 1)
        return gone, there

    def _is_out(self, moment: int, v: int) -> bool:
        """Whether the copy out of `v` ends before the kernel of a moment."""
        return sum(self.found[c] for c in self.copies.parts_out(v, moment)) > 1 - PARTS_LOST

    def _is_held(self, moment: int, v: int) -> bool:
        """Whether the buffer of `v` is held during a moment, or copied out of."""
        columns = self.stages.presence(*self.stages.moments[moment], v), self.copies.leaving.get((moment, v))
        return any(self.found[c] > 0.5 for c in columns if c is not None)

    def _is_coming(self, moment: int, v: int) -> bool:
        column = self.copies.coming.get((moment, v))
        return column is not None and self.found[column] > 0.5

    def _live(self, order: list[int]) -> np.ndarray:
        memory = simulate_memory(self.stages.problem.flow, build_schedule(order, ()), live=True)
        return np.array(memory.during_bytes, dtype=np.int64)


def _tight(swapped: list[Gap]) -> list[Interval]:
    """Every buffer is freed as early as possible, and allocated as late as possible."""
    result: list[Interval] = []
    copied: set[tuple[int, int]] = set()
    for gap in swapped:
        out = None if (gap.value, gap.made) in copied else gap.made
        copied.add((gap.value, gap.made))
        result.append(Interval(gap.value, out, gap.start + 1, gap.end, gap.end))
    return result
