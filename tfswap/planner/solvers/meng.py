"""The heuristic of Meng, Sun, Yang, Qiu and Gu, "Training Deeper Models by GPU Memory Optimization on TensorFlow"
(ML Systems Workshop at NIPS 2017), section 2.1, as a baseline to be measured against.

Feature maps are taken in reverse topological order: those made last wait shortest and stay resident, up to a
threshold of bytes; all made before are swapped out once their last forward reader has run. Each comes back as
late as the copy still overlaps: its trigger is the last kernel on the critical path (here the order itself)
that starts a copy's time before the backward reader.

Differences: the paper leaves the threshold to the user; here it is the largest that keeps the target.
"""

from __future__ import annotations

import numpy as np

from tfswap.plan.schedule import Interval
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.problem import Choice, Gap, Problem, live_without


def solve(problem: Problem, target: LiveTarget) -> Choice | None:
    """What is absent, and when, with the largest resident share that keeps the target; None if none does."""
    longest: dict[int, Gap] = {}
    for gap in problem.gaps:
        known = longest.get(gap.value)
        if known is None or gap.end - gap.start > known.end - known.start:
            longest[gap.value] = gap
    candidates = sorted(longest.values(), key=lambda g: (g.made, g.value))
    few, many = 0, len(candidates) + 1
    while few < many:
        count = (few + many) // 2
        if count > len(candidates):
            return None
        if target.is_exceeded_by(int(_live(problem, candidates[:count]).max(initial=0))):
            few = count + 1
        else:
            many = count
    if few > len(candidates):
        return None
    return Choice(problem.order, [_interval(problem, gap) for gap in candidates[:few]])


def _interval(problem: Problem, gap: Gap) -> Interval:
    wanted = float(problem.starts_s[gap.end]) - gap.nbytes / problem.rates.in_bytes_per_s
    trigger = int(np.searchsorted(problem.starts_s, wanted, side="right")) - 1
    back = min(gap.end, max(gap.start + 1, trigger))
    return Interval(gap.value, gap.start, gap.start + 1, back, gap.end)


def _live(problem: Problem, swapped: list[Gap]) -> np.ndarray:
    """Live bytes with each gap absent from its release to its trigger."""
    shortened = [gap._replace(end=_interval(problem, gap).back) for gap in swapped]
    return live_without(problem, shortened)
