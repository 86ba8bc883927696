"""Published policies as solvers, to be measured against.

Their units are feature maps: what waits across the turn from the forward half to the backward half. A target that a
policy does not come to is out of its reach.

- `sqrt`: Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016), section 4. The forward
  half is cut into segments; what crosses a boundary stays, what is inside is dropped and recomputed, once for each
  segment, when the backward half comes to it. Differences: segments are cut by bytes made, and of sqrt(n) segments,
  twice and half as many and so on the first that meets the target are taken.
- `superneurons`: Wang et al., "SuperNeurons" (PPoPP 2018), section 3.4. Outputs of contractions (convolutions,
  products of matrices) are checkpoints, and the cheap layers between two of them a segment. Where a segment and what
  its backward layers need take no more than the largest layer (l_peak), it is recomputed once (speed-centric), else
  for each reader (memory-centric). Differences: all segments speed-centric come first, where that meets the target,
  and all memory-centric last; checkpoints are not swapped (section 3.3), which `vdnn_conv` stands for.
- `vdnn_all`, `vdnn_conv`: Rhu et al., "vDNN" (MICRO 2016), section 3. Every feature map, or those that contractions
  read, is copied out during its last forward reader, and comes back one layer ahead of its backward reader. A layer
  here is a kernel that makes something large.

Not handled, as in the papers: a value leaves once, for the wait across the turn; what waits elsewhere stays.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from itertools import accumulate

from tfswap.analysis.cost import kernel_seconds
from tfswap.kernels.hardware import Rates
from tfswap.plan.schedule import Interval
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.problem import NEVER, Choice, Gap, Problem

_ARITHMETIC = Rates(1.0, math.inf, math.inf, math.inf, math.inf, launch_s=0.0)
"""A device on which a kernel takes as many seconds as its contraction has floating point operations."""


def sqrt(problem: Problem, target: LiveTarget) -> Choice | None:
    """Checkpoints at the boundaries of about sqrt(n) segments."""
    maps = _droppable(problem)
    root = math.isqrt(max(1, len(maps)))
    counts = sorted(range(1 - root.bit_length(), root.bit_length() + 1), key=lambda e: (abs(e), e))

    def choices() -> Iterator[Choice]:
        for count in counts:
            bounds = _boundaries(maps, max(1, int(root * 2.0**count)))
            yield _recomputed(problem, _segments(maps, bounds), kept=_crossing(problem, bounds))

    return _first_that_fits(problem, target, choices())


def superneurons(problem: Problem, target: LiveTarget) -> Choice | None:
    """Checkpoints after contractions; each segment recomputed as a whole or reader by reader, by what it takes."""
    uses, flow = problem.uses, problem.flow
    checkpoints = [p for p, kernel in enumerate(problem.order) if uses.makes[kernel] and _contracts(problem, kernel)]
    segments: dict[int, list[Gap]] = {}
    for gap in _droppable(problem):
        if not _contracts(problem, flow.values[gap.value].producer):
            segments.setdefault(bisect_right(checkpoints, gap.made), []).append(gap)
    kept = {v for position in checkpoints for v in uses.makes[problem.order[position]]}
    most = max((_layer_bytes(problem, kernel) for kernel in problem.order), default=0)

    def choices() -> Iterator[Choice]:
        for threshold in (math.inf, most, -1):
            together = [gaps for gaps in segments.values() if _segment_bytes(problem, gaps) <= threshold]
            singly = [[gap] for gaps in segments.values() if _segment_bytes(problem, gaps) > threshold for gap in gaps]
            yield _recomputed(problem, together, singly, kept=kept)

    return _first_that_fits(problem, target, choices())


def vdnn_all(problem: Problem, target: LiveTarget) -> Choice | None:
    """Every feature map is swapped."""
    return _swapped(problem, target, _feature_maps(problem))


def vdnn_conv(problem: Problem, target: LiveTarget) -> Choice | None:
    """The feature maps that contractions read in the forward half are swapped."""
    readers: dict[int, list[int]] = {}
    for position, kernel in enumerate(problem.order):
        if _contracts(problem, kernel):
            for v in problem.uses.reads[kernel]:
                readers.setdefault(v, []).append(position)
    maps = _feature_maps(problem)
    read = [gap for gap in maps if any(position <= gap.start for position in readers.get(gap.value, ()))]
    return _swapped(problem, target, read)


def _feature_maps(problem: Problem) -> list[Gap]:
    """What waits across the turn from the forward to the backward half, in the order in which it is made."""
    turn = _turn(problem)
    across = {gap.value: gap for gap in problem.gaps if gap.start < turn <= gap.end}
    return sorted(across.values(), key=lambda gap: (gap.made, gap.value))


def _turn(problem: Problem) -> int:
    """The position at which the most bytes wait for a later use: there the backward half begins."""
    change = [0] * (len(problem.order) + 1)
    for gap in problem.gaps:
        change[gap.start + 1] += gap.nbytes
        change[gap.end] -= gap.nbytes
    waiting = list(accumulate(change))
    return max(range(len(waiting)), key=waiting.__getitem__)


def _droppable(problem: Problem) -> list[Gap]:
    """The feature maps that can be recomputed when they are needed."""
    uses = problem.uses
    found = (gap for gap in _feature_maps(problem) if (gap.value, gap.end) in uses.until)
    return [gap for gap in found if uses.until[gap.value, gap.end].rerun_s < NEVER]


def _contracts(problem: Problem, kernel: int) -> bool:
    return kernel_seconds(problem.flow.nodes[kernel], _ARITHMETIC) > 0


def _layer_bytes(problem: Problem, kernel: int) -> int:
    uses = problem.uses
    return sum(uses.nbytes[v] for v in (*uses.reads[kernel], *uses.makes[kernel]))


def _segment_bytes(problem: Problem, gaps: list[Gap]) -> int:
    """What a segment takes when all of it is present, and the largest of the layers that read it."""
    backward = max((_layer_bytes(problem, problem.order[gap.end]) for gap in gaps), default=0)
    return backward + sum(problem.uses.nbytes[gap.value] for gap in gaps)


def _boundaries(maps: list[Gap], count: int) -> list[int]:
    """Positions of the first kernels of all segments but the first: `count` segments of about as many bytes."""
    total, done = sum(gap.nbytes for gap in maps), 0
    bounds: list[int] = []
    for gap in maps:
        if done and done * count >= total * (len(bounds) + 1):
            bounds.append(gap.made)
        done += gap.nbytes
    return bounds


def _segments(maps: list[Gap], bounds: list[int]) -> list[list[Gap]]:
    """What is read in the forward half by its own segment only."""
    segments: list[list[Gap]] = [[] for _ in range(len(bounds) + 1)]
    for gap in maps:
        segment = bisect_right(bounds, gap.made)
        if segment == bisect_right(bounds, gap.start):
            segments[segment].append(gap)
    return segments


def _crossing(problem: Problem, bounds: list[int]) -> set[int]:
    """What a later segment of the forward half reads."""
    turn = _turn(problem)
    return {
        v
        for v, positions in problem.uses.positions.items()
        if any(bisect_right(bounds, positions[0]) < bisect_right(bounds, p) for p in positions if p < turn)
    }


def _recomputed(
    problem: Problem, together: Collection[list[Gap]], singly: Collection[list[Gap]] = (), *, kept: Collection[int]
) -> Choice:
    """The order in which what these groups of gaps drop is recomputed: a group when the first of it is needed.

    Args:
        singly: groups whose values leave again after each later use too.
        kept: what stays as long as a rerun may read it, also when nothing else does any more.
    """
    uses, flow = problem.uses, problem.flow
    group_of = {gap.value: group for group in (*together, *singly) for gap in group}
    drops: dict[int, list[int]] = {}
    for group in (*together, *singly):
        for gap in group:
            drops.setdefault(gap.start, []).append(gap.value)
    again = {gap.value for group in singly for gap in group}
    place = {kernel: position for position, kernel in enumerate(problem.order)}
    gone: set[int] = set()
    left: set[int] = set()
    order: list[int] = []
    for position, kernel in enumerate(problem.order):
        wanted = [gap.value for v in uses.reads[kernel] if v in gone for gap in group_of[v] if gap.value in gone]
        reruns: set[int] = set()
        while wanted:
            producer = flow.values[wanted.pop()].producer
            if producer not in reruns:
                reruns.add(producer)
                reads = (v for v in uses.reads[producer] if v not in kept)
                wanted += [v for v in reads if v in gone or uses.is_dead(v, position)]
        for rerun in sorted(reruns, key=place.__getitem__):
            order.append(rerun)
            gone.difference_update(uses.makes[rerun])
        order.append(kernel)
        left.update(drops.get(position, ()))
        gone.update(drops.get(position, ()))
        for v in uses.reads[kernel]:
            if v in again and v in left and not uses.is_dead(v, position + 1):
                wait = uses.after.get((v, position))
                if wait is not None and wait.rerun_s < NEVER:
                    gone.add(v)
    return Choice(order, [])


def _swapped(problem: Problem, target: LiveTarget, gaps: list[Gap]) -> Choice | None:
    layers = [position for position, kernel in enumerate(problem.order) if problem.uses.makes[kernel]]
    intervals: list[Interval] = []
    for gap in gaps:
        ahead = layers[bisect_left(layers, gap.end) - 1]
        first = gap.start + 1
        intervals.append(Interval(gap.value, max(gap.made, gap.start - 1), first, max(first, ahead), gap.end))
    return _first_that_fits(problem, target, iter([Choice(problem.order, intervals)]))


def _first_that_fits(problem: Problem, target: LiveTarget, choices: Iterator[Choice]) -> Choice | None:
    return next((choice for choice in choices if not target.is_exceeded_by(problem.live_peak_of(choice))), None)
