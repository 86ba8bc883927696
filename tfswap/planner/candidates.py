"""Judges one choice of order and evictions: the forms in which it can be carried out, each with its peak and time.

A choice can run its kernels in pairs or one by one, in the allocator's chunks, in exact chunks, or with tensors at the
ends of chunks, and with more or less room for copies of variables.

Invariant: the forms and their peaks do not depend on the limit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tfswap.plan.plan import Split
from tfswap.plan.schedule import KERNELS, build_schedule, tiers_of
from tfswap.planner.chunk_splits import LEAST_SHARES, choose_ends, choose_splits
from tfswap.planner.convolution_room import Computed, Need, computed, needs
from tfswap.planner.pairing import (
    ever_fewer,
    kept_pairs,
    without_last,
)
from tfswap.planner.problem import NEVER, Choice
from tfswap.planner.promise import promised, simulated_limit, simulated_within
from tfswap.simulator.memory import Memory, memory_within
from tfswap.simulator.timing import Timing

if TYPE_CHECKING:
    from tfswap.planner.planner import Planner


PAIR_TRIES = 8
PAIR_LEVELS = 6
"""The most forms of a choice with some of its concurrent kernels, from all of them to those that do not raise the peak.
They make steps faster under limits that have room for some pairs.
"""
ENDS_SHARE = 0.75
"""The share of the arena's limit below which plans with tensors at the ends of chunks are not tried, since they promise
no lower peak.
"""


@dataclass(frozen=True)
class Draft:
    """One rung of a ladder, timed.

    Attributes:
        choice: the order of the kernels, and its evictions.
        timing: the step's; no less than that of the order without evictions.
    """

    choice: Choice
    timing: Timing


@dataclass(frozen=True)
class Candidate:
    """One rung of the ladder, judged.

    Attributes:
        choice: the kernels in order, and the evictions.
        timing: the step's. If cuDNN computes its convolutions under a limit, with the workspaces that fit.
        peak_bytes: the peak that the plan promises: the simulated one and the margin.
        computed: the algorithms of its convolutions, by cuDNN.
    """

    choice: Choice
    memory: Memory
    timing: Timing
    peak_bytes: int
    computed: Computed | None = None

    def no_lower_than(self, nbytes: int) -> Candidate:
        """This candidate, with a promised peak of at least `nbytes`."""
        return self if self.peak_bytes >= nbytes else dataclasses.replace(self, peak_bytes=nbytes)

    def largest_kernel(self) -> int:
        """The kernel at the peak: the one that runs, or the next one."""
        steps = build_schedule(*self.choice)[self.memory.peak_step :]
        return next(subject for kind, subject in steps if kind in KERNELS)


_Besides = tuple[tuple[int, ...], tuple[Split, ...]]
"""The parts of a choice other than order and evictions: concurrent kernels and splits."""


class Judged:
    """A draft, simulated in the arena: as it is, with fewer concurrent kernels, and in exact chunks.

    None of these forms depends on a limit. A later form is no faster than those tried before it, so that the first that
    fits is the best. The draft is made at its first use: a choice with too many live bytes is refused without it.

    Args:
        choice, least_s: as of `Planner.draft`.
        roomier: the same choice with more room for copies of variables.
    """

    def __init__(self, planner: Planner, choice: Choice, least_s: float, roomier: Sequence[Judged] = ()):
        self._choice = choice
        self._roomier = roomier
        self._one_by_one = choice._replace(paired=())
        self._least_s = least_s
        self._planner = planner
        self._memories: dict[_Besides, Memory] = {}
        self._above: dict[_Besides, float] = {}  # a lower bound of the peak, where the peak is not known
        self._live_bytes: dict[tuple[int, ...], int] = {}  # the peak of live bytes, by its pairs
        self._live_above: dict[tuple[int, ...], float] = {}  # a lower bound, where that is not known
        self._splits: dict[tuple[int, ...], tuple[int, tuple[Split, ...]]] = {}  # and live bytes, by its pairs
        self._needs: dict[_Besides, list[Need]] = {}

    @cached_property
    def draft(self) -> Draft:
        """The choice with concurrent kernels, timed."""
        return self._planner.draft(self._choice, self._least_s)

    @property
    def seconds(self) -> float:
        """A lower bound of all forms' seconds."""
        return min(self._drafted_s, *(form.seconds for form in self._roomier)) if self._roomier else self._drafted_s

    @property
    def _drafted_s(self) -> float:
        return self.draft.timing.total_s

    def may_fit(self, limit_bytes: float) -> bool:
        """Whether the peak of live bytes is within a limit: an allocator never needs less."""
        return self._is_live_within(self._one_by_one, limit_bytes)

    def _is_live_within(self, choice: Choice, limit_bytes: float) -> bool:
        most_bytes, made = simulated_within(limit_bytes), choice.paired
        if made in self._splits:
            return self._splits[made][0] <= most_bytes
        if made not in self._live_bytes and self._live_above.get(made, -1) < most_bytes:
            planner, steps = self._planner, build_schedule(*choice._replace(splits=()))
            memory = memory_within(planner.flow, steps, most_bytes, snapshot=planner.snapshot, live=True)
            if memory is None:
                self._live_above[made] = most_bytes
            else:
                self._live_bytes[made] = memory.peak_bytes
        return self._live_bytes.get(made, NEVER) <= most_bytes

    def fitting(self, limit_bytes: float) -> Candidate | None:
        """The fastest form within a limit."""
        best = self._fitting(limit_bytes)
        if best is None:
            return None
        for form in self._roomier:
            found = form.fitting(limit_bytes) if form.seconds < best.timing.total_s else None
            if found is not None and self._planner.tiers.fit(found.memory):
                best = min(best, found, key=lambda candidate: candidate.timing.total_s)
        return best

    def _fitting(self, limit_bytes: float) -> Candidate | None:
        """As `fitting`, with the least room for copies of variables."""
        found = self.first_fitting(limit_bytes)
        if found is None or not self._planner.takes_workspaces or limit_bytes == NEVER:
            return found
        made = self._computed(found.choice, limit_bytes)
        if found.choice.splits:  # they may leave more room for workspaces, by chance
            least_s = self._computed(found.choice._replace(splits=()), limit_bytes).timing.total_s
            made = dataclasses.replace(made, timing=made.timing.no_less_than(least_s))
        return dataclasses.replace(found, timing=made.timing, computed=made)

    def first_fitting(self, limit_bytes: float) -> Candidate | None:
        """As `fitting`, without more room for copies of variables, and timed without cuDNN's workspaces."""
        return next(self._fastest_first(limit_bytes), None)

    def _fastest_first(self, limit_bytes: float) -> Iterator[Candidate]:
        """The forms within a limit."""
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
        """A choice in the allocator's chunks, and in exact ones, where these are within a limit."""
        found = self._candidate(choice, timing, limit_bytes)
        if found is not None:
            yield found
        for _, split in self._split(choice, limit_bytes):
            found = self._candidate(split, timing, limit_bytes)
            if found is not None:
                yield found

    def lowest(self, below_bytes: float) -> Candidate | None:
        """The form with the lowest peak, if that is below `below_bytes`."""
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
        """The memory of the form `apart`."""
        if not self.draft.choice.paired:
            return self.draft.timing
        return self._planner.timing(self._one_by_one).no_less_than(self._drafted_s)

    @cached_property
    def apart(self) -> Candidate:
        """The form with all kernels one after another."""
        found = self._candidate(self._one_by_one, self._alone, NEVER)
        assert found is not None, "any peak is within an infinite limit"
        return found

    @cached_property
    def _fewer_pairs(self) -> list[tuple[Choice, Timing]]:
        """Forms with fewer and fewer of the concurrent kernels that raise the peak, none faster than the one before."""
        choice, least_s = self.draft.choice, self._drafted_s
        if not choice.paired:
            return []
        memory = self._memory(choice, NEVER)
        assert memory is not None, "any peak is within an infinite limit"
        found: list[tuple[Choice, Timing]] = []
        for kept in ever_fewer(choice, memory, self.apart.memory.peak_bytes, PAIR_LEVELS):
            fewer = choice._replace(paired=kept)
            timing = self._planner.timing(fewer).no_less_than(least_s)
            found.append((fewer, timing))
            least_s = timing.total_s
        return found

    @cached_property
    def within(self) -> Candidate:
        """The form with the concurrent kernels that do not raise the peak."""
        return self._with_pairs(self.apart) or self.apart

    def _with_pairs(self, apart: Candidate, share: float | None = None) -> Candidate | None:
        """The draft with the concurrent kernels that do not raise the peak of `apart`, in the allocator's chunks or
        in exact ones (`share`).
        """
        choice, count, most_bytes = self.draft.choice, 1, apart.memory.peak_bytes
        for _ in range(PAIR_TRIES):
            if not choice.paired:
                break
            tried = choice if share is None else self._in_exact_chunks(choice, share)
            memory = self._memory(tried, NEVER)
            assert memory is not None, "any peak is within an infinite limit"
            if memory.peak_bytes <= most_bytes:
                least_s = self._fewest_pairs_s if share is None else self.within.timing.total_s
                return Candidate(tried, memory, self._planner.timing(choice).no_less_than(least_s), apart.peak_bytes)
            kept = kept_pairs(tried, memory, most_bytes)
            if len(kept) == len(choice.paired):
                # No pair is at the peak, but earlier pairs left other chunks: drop the last of them, then more.
                kept = without_last(tried, memory.peak_step, count)
                count *= 2
            choice = choice._replace(paired=kept)
        return None

    @property
    def _fewest_pairs_s(self) -> float:
        return self._fewer_pairs[-1][1].total_s if self._fewer_pairs else self._drafted_s

    def _candidate(self, choice: Choice, timing: Timing, limit_bytes: float) -> Candidate | None:
        """The candidate of the draft with the other parts of `choice`; None where it is not within a limit."""
        memory = self._memory(choice, simulated_within(limit_bytes))
        if memory is None:
            return None
        peak_bytes = max(promised(memory.peak_bytes), self._planner.least_bytes)
        return Candidate(choice, memory, timing, peak_bytes) if peak_bytes <= limit_bytes else None

    def _split(self, choice: Choice, limit_bytes: float) -> Iterator[tuple[float, Choice]]:
        """A choice with splits, where these may get it within a limit: with few, then with more of them, each with the
        least size of split requests as a share of the live peak.
        """
        if not self._planner.target.own_ops or choice.exact_chunks or not self._is_live_within(choice, limit_bytes):
            return
        if self._splits_of(choice)[1]:
            for share in LEAST_SHARES:
                yield share, self._in_exact_chunks(choice, share)

    def _at_ends(self, limit_bytes: float) -> Iterator[Candidate]:
        """The form without concurrent kernels and with long-lived tensors at the ends of chunks, for arenas that have
        the bytes of a request but not in one hole. Nearly all of such an arena is in use.
        """
        planner, choice = self._planner, self._one_by_one
        most_bytes = planner.snapshot.limit_bytes
        if not planner.target.own_ops or choice.exact_chunks or most_bytes is None:
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
        """The memory of the draft with the other parts of `choice`; None where it peaks above `most_bytes`."""
        made = choice.paired, choice.splits
        if made not in self._memories and self._above.get(made, -1) < most_bytes:
            planner = self._planner
            memory = planner.judge.memory(build_schedule(*choice), tiers_of(choice.intervals), most_bytes)
            if memory is None:
                self._above[made] = most_bytes
            else:
                self._memories[made] = planner.tiers.with_overflow(memory)
        found = self._memories.get(made)
        return None if found is None or found.peak_bytes > most_bytes else found

    def _computed(self, choice: Choice, limit_bytes: float) -> Computed:
        """How cuDNN computes the draft's convolutions within a limit, with the concurrent kernels of `choice`."""
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
            tiers_of(choice.intervals),
            planner.arrivals,
        )
