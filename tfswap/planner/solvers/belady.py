"""The default solver: swap what is needed furthest in the future, and only when memory runs short.

Belady's rule over the order: going forward, whenever the live bytes pass the target, the value whose next use
is furthest away leaves until that use. A second pass spends what the target leaves over on the copies: a
buffer is released as late as memory allows and the copy out needs, and brought back as early as memory allows
and the copy in needs, so that copies hide behind kernels.
"""

from __future__ import annotations

import heapq

from tfswap.plan.schedule import Interval
from tfswap.planner.host_tiers import Places
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.problem import Choice, Gap, Problem, live_without

PREFETCH_SLACK = 1.5
"""Copies get this many times their modelled time, since the model is not exact."""


def solve(problem: Problem, target: LiveTarget) -> Choice | None:
    """The evictions that keep live bytes within the target; None where none do."""
    return _solve(problem, target, target)


def solve_tight(problem: Problem, target: LiveTarget) -> Choice | None:
    """As `solve`, but no buffer is kept longer or allocated sooner than it must: slower, with less in the arena."""
    return _solve(problem, target, LiveTarget(0))


def _solve(problem: Problem, target: LiveTarget, copies: LiveTarget) -> Choice | None:
    chosen = _evict(problem, target)
    if chosen is None:
        return None
    return Choice(problem.order, place_copies(problem, trim(problem, chosen, target), copies))


def _evict(problem: Problem, target: LiveTarget) -> list[Gap] | None:
    live, gaps = problem.uses.live, problem.uses.gaps
    ends = [0] * len(live)  # bytes that come back at each position
    waiting: list[tuple[int, int, int]] = []
    opened = absent = 0
    chosen: list[Gap] = []
    for position in range(len(live)):
        absent -= ends[position]
        while opened < len(gaps) and gaps[opened].start < position:
            gap = gaps[opened]
            heapq.heappush(waiting, (-gap.end, -gap.nbytes, opened))
            opened += 1
        while target.is_exceeded_by(live[position] - absent):
            if not waiting:
                return None
            gap = gaps[heapq.heappop(waiting)[2]]
            if gap.end <= position:
                return None  # the furthest next use is now: nothing else can leave
            chosen.append(gap)
            absent += gap.nbytes
            ends[gap.end] += gap.nbytes
    return chosen


def trim(problem: Problem, chosen: list[Gap], target: LiveTarget) -> list[Gap]:
    """Take back evictions that later ones made needless, the costliest first."""
    live = live_without(problem, chosen)
    kept: list[Gap] = []
    for gap in sorted(chosen, key=lambda g: (-g.nbytes, g.start, g.value)):
        inside = live[gap.start + 1 : gap.end]
        if target.is_exceeded_by(int(inside.max()) + gap.nbytes):
            kept.append(gap)
        else:
            inside += gap.nbytes
    return kept


def place_copies(problem: Problem, chosen: list[Gap], target: LiveTarget) -> list[Interval]:
    """Choose when each copy starts and when its buffer is freed, within the target."""
    live = live_without(problem, chosen)
    starts, rates = problem.starts_s, problem.rates
    places = problem.tiers.chosen(chosen)
    release: dict[Gap, int] = {}
    lanes = [0.0] * 3  # by tier
    first_gap: dict[tuple[int, int], Gap] = {}  # by value and buffer: the first that is copied out
    for gap in sorted(chosen, key=lambda g: (g.start, g.end, g.value)):
        first_gap.setdefault((gap.value, gap.made), gap)
    outgoing = sorted(first_gap.values(), key=lambda g: (g.made, g.end, g.value))
    for gap in outgoing:
        tier = places.tier(gap.value)
        seconds = PREFETCH_SLACK * gap.nbytes / rates.out_rate(tier)
        lanes[tier] = max(lanes[tier], starts[gap.made + 1]) + seconds
        first, last = gap.start + 1, min(gap.end, int(starts.searchsorted(lanes[tier])))
        stop = first + target.first_exceeded(live[first:last], gap.nbytes)
        live[first:stop] += gap.nbytes
        release[gap] = stop
    placed: list[tuple[Gap, int, int]] = []
    lanes = [float("inf")] * 3
    for gap in sorted(chosen, key=lambda g: (-g.end, -g.start, g.value)):
        first = release.get(gap, gap.start + 1)
        tier = places.tier(gap.value)
        finish = min(lanes[tier], starts[gap.end])
        lane = finish - PREFETCH_SLACK * gap.nbytes / rates.in_rate(tier)
        wanted = max(first, int(starts.searchsorted(lane, side="right")) - 1)
        back = min(gap.end, wanted + target.after_last_exceeded(live[wanted : gap.end], gap.nbytes))
        live[back : gap.end] += gap.nbytes
        lanes[tier] = min(lane, starts[back])
        if back > first:
            placed.append((gap, first, back))
    return _intervals(placed, release, places)


def _intervals(placed: list[tuple[Gap, int, int]], release: dict[Gap, int], places: Places) -> list[Interval]:
    """The intervals in which each gap's buffer is freed and allocated at these positions. A value's first gap has the
    copy out.
    """
    result: list[Interval] = []
    copied: set[tuple[int, int]] = set()
    for gap, gone, back in sorted(placed, key=lambda p: (p[0].end, p[0].value)):
        out = None
        if (gap.value, gap.made) not in copied:
            # Where a buffer's first eviction fell away (it could stay after all), the copy comes with the next.
            out = gap.made if gap in release else gone - 1
        copied.add((gap.value, gap.made))
        on_disk, lent = gap.value in places.disk, places.lent.get(gap.value)
        result.append(Interval(gap.value, out, gone, back, gap.end, on_disk, lent))
    return result
