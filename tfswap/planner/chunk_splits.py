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

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from tfswap.analysis.dataflow import Dataflow
from tfswap.plan.plan import Split
from tfswap.plan.schedule import LEAD, Step
from tfswap.simulator.arena_snapshot import ArenaSnapshot, Ledger, added_bytes, fill
from tfswap.simulator.replay import Replay

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
    ledger, replay, during = _replayed(flow, steps, snapshot)
    near = [0, *accumulate(nbytes >= NEAR_PEAK * replay.peak for nbytes in during)]
    least = min(LEAST_SHARES) * replay.peak
    large: dict[int, list[int]] = {}  # by step, its requests by number
    matter: set[int] = set()  # steps
    for number, (nbytes, made, gone) in enumerate(zip(ledger.nbytes, ledger.made, ledger.gone, strict=True)):
        if nbytes < least or made < 0 or LEAD in (steps[made].kind, steps[made - 1].kind):
            continue
        large.setdefault(made, []).append(number)
        end = len(steps) if gone is None else gone.step
        if near[min(end + 1, len(steps))] > near[made] or during[made] + nbytes > replay.peak:
            matter.add(made)
    splits = (
        Split(step, ledger.nbytes[number])
        for step in sorted(matter)
        for number in ledger.held_together(large[step])[:MOST_REQUESTS]
    )
    return replay.peak, tuple(splits)


def choose_ends(
    flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot, splits: Sequence[Split]
) -> Iterator[tuple[Split, ...]]:
    """For each of LEAST_STAYS: the large requests that live long and go to a chunk's end, and splits of other steps.

    Args:
        splits: those of `choose_splits`.
    """
    ledger, replay, _ = _replayed(flow, steps, snapshot)
    least = min(LEAST_SHARES) * replay.peak
    large: list[tuple[int, int, int]] = []  # the lifetime in steps, the step that makes it, and its bytes
    for nbytes, made, gone in zip(ledger.nbytes, ledger.made, ledger.gone, strict=True):
        if nbytes >= least and made >= 0 and LEAD not in (steps[made].kind, steps[made - 1].kind):
            large.append(((len(steps) if gone is None else gone.step) - made, made, nbytes))
    for least_stay in LEAST_STAYS:
        stays: dict[int, int] = {}  # by step, the bytes of the largest
        for stay, made, nbytes in large:
            if stay >= least_stay:
                stays[made] = max(nbytes, stays.get(made, 0))
        ends = [Split(step, nbytes, at_end=True) for step, nbytes in stays.items()]
        yield tuple(sorted((*(s for s in splits if s.step not in stays), *ends), key=lambda split: split.step))


def _replayed(flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot) -> tuple[_Lives, Replay, array[int]]:
    """A schedule without chunks: its requests, and the peak of live bytes in each step."""
    ledger = _Lives()
    snapshot.enter(ledger)
    replay = Replay(flow, steps, ledger, fill(ledger, added_bytes(flow, snapshot), snapshot), snapshot)
    ledger.replay = replay
    during = array("q")
    replay.repeat(array("q"), during)
    return ledger, replay, during


class _End(NamedTuple):
    """When an allocation was freed.

    Attributes:
        step: in which step.
        before: how many allocations had been made by then.
    """

    step: int
    before: int


class _Lives(Ledger):
    """Notes, per allocation, its bytes, the step that made it (-1 before the first) and when it was freed."""

    replay: Replay | None = None

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []
        self.made: list[int] = []
        self.gone: list[_End | None] = []

    @property
    def step(self) -> int:
        return -1 if self.replay is None else self.replay.step

    def allocate(self, size_bytes: int) -> int:
        address = super().allocate(size_bytes)
        if address >= 0:
            self.nbytes.append(size_bytes)
            self.made.append(self.step)
            self.gone.append(None)
        return address

    def free(self, address: int) -> None:
        super().free(address)
        if address >= 0:
            self.gone[address] = _End(self.step, len(self.nbytes))

    def held_together(self, numbers: Sequence[int]) -> list[int]:
        """The allocations of one step that are live at their peak."""
        held: list[int] = []
        most, most_bytes = held, 0
        for number in numbers:
            held = [n for n in held if (gone := self.gone[n]) is None or gone.before > number]
            held.append(number)
            nbytes = sum(self.nbytes[n] for n in held)
            if nbytes > most_bytes:
                most, most_bytes = held, nbytes
        return most
