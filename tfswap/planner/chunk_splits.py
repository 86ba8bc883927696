"""Chooses requests to be served from an exactly sized chunk, where the allocator would give them a larger one.

The allocator does not split a free chunk of less than twice the requested bytes. The excess counts for as long as the
tensor lives. For this reason alone a step's peak is some per cent above its live bytes, by an amount close to chance.
Before the kernel makes its request, such a chunk can be split (`SPLIT` in a schedule), so that it fits. The choice of
requests depends on live bytes alone, so a plan with splits has about the same peak in any arena.

Where the arena may grow no further than the limit, free bytes must also be contiguous. Long-lived tensors are then put
at the end of the largest free chunk, and short-lived ones before it. Otherwise a map that waits for the backward pass
can be in the hole of a smaller tensor, and divide a chunk that a larger tensor needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from tfswap.analysis.dataflow import Dataflow
from tfswap.plan.plan import Split
from tfswap.plan.schedule import LEAD, Step
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.lives import simulate_lives

LEAST_SHARES = (1 / 64, 1 / 256, 1 / 1024)
"""Least sizes of split requests, as shares of the live peak: smaller requests are not worth two more ops. Which of
these is best is close to chance.
"""
MOST_REQUESTS = 64
"""The most splits of one step: a loop can hold any number of tensors."""
LEAST_STAYS = (4, 32)
"""The least lifetimes, in steps of a schedule, of tensors that are put at a chunk's end."""
NEAR_PEAK = 0.8
"""The share of the live peak below which the excess of chunks does not matter."""


def choose_splits(flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot) -> tuple[int, tuple[Split, ...]]:
    """Splits for a schedule that has none: for large requests that are live near the peak, or near the peak that a
    larger chunk for one of them would cause.

    Of the requests of one kernel, those that are live together at the kernel's peak are split.

    Returns the schedule's live peak in bytes, and the splits, of which a plan may use some.
    """
    lives = simulate_lives(flow, steps, snapshot)
    peak, during = lives.peak_bytes, lives.during_bytes
    near = [0, *accumulate(nbytes >= NEAR_PEAK * peak for nbytes in during)]
    least = min(LEAST_SHARES) * peak
    large: dict[int, list[int]] = {}  # by step, its requests by number
    matter: set[int] = set()  # steps
    for number, (nbytes, made, gone) in enumerate(zip(lives.nbytes, lives.made, lives.gone, strict=True)):
        if nbytes < least or made < 0 or LEAD in (steps[made].kind, steps[made - 1].kind):
            continue
        large.setdefault(made, []).append(number)
        if near[min(gone + 1, len(steps))] > near[made] or during[made] + nbytes > peak:
            matter.add(made)
    splits = (
        Split(step, lives.nbytes[number])
        for step in sorted(matter)
        for number in lives.held_together(large[step])[:MOST_REQUESTS]
    )
    return peak, tuple(splits)


def choose_ends(
    flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot, splits: Sequence[Split]
) -> Iterator[tuple[Split, ...]]:
    """For each of LEAST_STAYS: the large requests that live long and go to a chunk's end, and splits of other steps.

    Args:
        splits: those of `choose_splits`.
    """
    lives = simulate_lives(flow, steps, snapshot)
    least = min(LEAST_SHARES) * lives.peak_bytes
    large: list[tuple[int, int, int]] = []  # the lifetime in steps, the step that makes it, and its bytes
    for nbytes, made, gone in zip(lives.nbytes, lives.made, lives.gone, strict=True):
        if nbytes >= least and made >= 0 and LEAD not in (steps[made].kind, steps[made - 1].kind):
            large.append((gone - made, made, nbytes))
    for least_stay in LEAST_STAYS:
        stays: dict[int, int] = {}  # by step, the bytes of the largest
        for stay, made, nbytes in large:
            if stay >= least_stay:
                stays[made] = max(nbytes, stays.get(made, 0))
        ends = [Split(step, nbytes, at_end=True) for step, nbytes in stays.items()]
        yield tuple(sorted((*(s for s in splits if s.step not in stays), *ends), key=lambda split: split.step))
