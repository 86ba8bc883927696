"""Searches for cheaper choices of what is recomputed: takes some of a choice's reruns out, and repairs it.

A choice is a set of reruns, each before a position of the step's order. Every tensor is held from a run of its kernel
to the last kernel that reads it before the next run. So a rerun holds what it reads for longer, or reruns that too: by
what is cheaper. cheapest_eviction.py goes through the order once, and has freed by then what no later kernel reads.

Repair: at the position with the most live bytes, the rerun with the least seconds for the bytes that it takes off the
excess of all positions, as long as there is any. What repair made needless is taken out. Then some reruns are removed
at random and the choice is repaired again; it stays where it is no slower. This is large neighbourhood search (Shaw,
"Using constraint programming and local search methods to solve vehicle routing problems", 1998), with a deterministic
draw.

Not handled: swaps. Where a kernel's buffer is forwarded in the step's own order, but not in the choice's, the bytes
counted here are too few; the result is therefore simulated, and dropped where it exceeds the target.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from random import Random

import numpy as np

from tfswap.planner.live_target import LiveTarget
from tfswap.planner.problem import Choice, Problem, Solver

VISITS = 200_000
LEAST_TRIES, MOST_TRIES = 4, 400
"""Of repairs."""
STARTS = 8
"""Of these tries, those without a choice that meets the target."""
MOST_CHAIN = 24
"""The most kernels that are rerun for one tensor."""
NOISE = 0.8
"""The spread of the random factors on costs, as a standard deviation of their logarithm."""
WORSE = 0.1
"""The share by which a choice that the search goes on with may be slower at first; none in the end."""
LEAST_S = 1e-12
"""A rerun that takes no time is better the more it takes off the excess."""
LEAST_REMOVED, MOST_REMOVED = 8, 0.15
"""How many reruns may be removed at random: this number or this share of them, whichever is more."""

Reruns = dict[int, frozenset[int]]
"""By position in the problem's order, the kernels that run again before it."""


def solver(first: Solver, visits: int = VISITS) -> Solver:
    """A solver that begins with another's choice, which has no swaps, or with none where that finds none.

    Args:
        visits: about how many kernels all replays for one target visit: it bounds the time.
    """

    def solve(problem: Problem, target: LiveTarget) -> Choice | None:
        most_bytes = target.alone()
        return _Search(problem, most_bytes, visits).run(first(problem, LiveTarget(most_bytes)))

    return solve


class _Step:
    """A problem's facts that do not depend on the target.

    Attributes:
        nbytes: rounded bytes per value.
        reads, makes: per kernel, the values that may leave or be recomputed.
        extra: per position, live bytes other than those values, while its kernel runs.
        rerun_extra: per kernel, its temporary bytes when it runs again.
        waiting: per position, live bytes other than those values, before its kernel runs.
        seconds: per kernel, of one more run.
        rank: per kernel, its position.
    """

    def __init__(self, problem: Problem):
        uses, order = problem.uses, problem.order
        self.problem, self.order = problem, order
        self.nbytes, self.reads, self.makes = uses.nbytes, uses.reads, uses.makes
        self.rank = {kernel: position for position, kernel in enumerate(order)}
        last = {v: positions[-1] for v, positions in uses.positions.items()}
        change = [0] * (len(order) + 1)
        for v, positions in uses.positions.items():
            change[positions[0]] += self.nbytes[v]
            change[last[v] + 1] -= self.nbytes[v]
        held = np.cumsum(np.array(change[:-1], dtype=np.int64))
        made = np.array([sum(self.nbytes[v] for v in self.makes[kernel]) for kernel in order], dtype=np.int64)
        self.extra: list[int] = (problem.live_bytes - held).tolist()
        self.waiting: list[int] = (problem.before_bytes - held + made).tolist()
        self.rerun_extra = {kernel: max(0, uses.needs[kernel] - int(made[p])) for p, kernel in enumerate(order)}
        self.seconds = {kernel: problem.rerun_s(kernel) for kernel in order}

        ended, flow = uses.ended, problem.flow
        self._until = {
            kernel: min((ended[u] for u in flow.reads[kernel] if u in ended), default=len(order))
            for kernel in order
            if problem.repeatable[kernel]
        }

    def may_rerun(self, kernel: int, position: int) -> bool:
        """Whether a kernel may run again before a position: none has changed what it reads."""
        return self._until.get(kernel, -1) >= position


class _Layout:
    """A set of reruns, laid out in order.

    Attributes:
        kernels: in order; `stages` are the positions of the problem's order that they run at or before.
        instances: per value, for each run that makes it, the positions of that run and of the readers of this copy.
        live: per position, the live bytes.
        seconds: of all reruns.
    """

    def __init__(self, step: _Step, reruns: Reruns):
        self.step, self.reruns = step, reruns
        self.kernels: list[int] = []
        self.stages: list[int] = []
        self.seconds = 0.0
        extra: list[int] = []
        for position, kernel in enumerate(step.order):
            for again in sorted(reruns.get(position, ()), key=step.rank.__getitem__):
                self.kernels.append(again)
                self.stages.append(position)
                self.seconds += step.seconds[again]
                extra.append(step.waiting[position] + step.rerun_extra[again])
            self.kernels.append(kernel)
            self.stages.append(position)
            extra.append(step.extra[position])
        self.instances: dict[int, list[list[int]]] = {}
        reads, makes = step.reads, step.makes
        for at, kernel in enumerate(self.kernels):
            for v in reads[kernel]:
                self.instances[v][-1].append(at)
            for v in makes[kernel]:
                self.instances.setdefault(v, []).append([at])
        change = [0] * (len(extra) + 1)
        for v, instances in self.instances.items():
            for uses in instances:
                change[uses[0]] += step.nbytes[v]
                change[uses[-1] + 1] -= step.nbytes[v]
        self.live = np.cumsum(np.array(change[:-1], dtype=np.int64)) + np.array(extra, dtype=np.int64)

    def choice(self) -> Choice:
        return Choice(self.kernels, [])


class _Search:
    """The search for one target."""

    def __init__(self, problem: Problem, most_bytes: int, visits: int):
        self._problem, self._step, self._most = problem, _Step(problem), most_bytes
        self._random = Random(1)
        self._visits = self._all_visits = visits
        self._per_replay = len(problem.order) + sum(len(self._step.reads[kernel]) for kernel in problem.order)

    def run(self, first: Choice | None) -> Choice | None:
        # A good choice of one pass may be far from a better one: of it and of none, the better begin.
        begins: list[Reruns] = [{}] if first is None else [self._reruns_of(first), {}]
        begun = [layout for begin in begins if (layout := self._repaired(begin, 0.0)) is not None]
        best = current = min(begun, key=lambda layout: layout.seconds, default=None)
        tries = 1
        while tries < (STARTS if best is None else MOST_TRIES) and (tries < LEAST_TRIES or self._visits > 0):
            if best is not None and not any(best.reruns.values()):
                break
            found = self._repaired({} if current is None else self._without_some(current), NOISE)
            tries += 1
            if found is None:
                continue
            worse = WORSE * max(0.0, self._visits / self._all_visits)
            if current is None or found.seconds <= current.seconds * (1 + worse):
                current = found
            if best is None or found.seconds < best.seconds:
                best = found
        choice = None if best is None else best.choice()
        return first if choice is None or self._problem.live_peak_of(choice) > self._most else choice

    def _reruns_of(self, choice: Choice) -> Reruns:
        found: dict[int, set[int]] = {}
        position = 0
        for kernel in choice.order:
            if position < len(self._step.order) and kernel == self._step.order[position]:
                position += 1
            else:
                found.setdefault(position, set()).add(kernel)
        return {position: frozenset(kernels) for position, kernels in found.items()}

    def _laid_out(self, reruns: Reruns) -> _Layout:
        self._visits -= self._per_replay
        return _Layout(self._step, reruns)

    def _without_some(self, layout: _Layout) -> Reruns:
        """The reruns without some: those near one position, or any."""
        pairs = [(position, kernel) for position, kernels in layout.reruns.items() for kernel in sorted(kernels)]
        if not pairs:
            return {}
        count = self._random.randint(1, max(LEAST_REMOVED, int(MOST_REMOVED * len(pairs))))
        if self._random.random() < 0.5:
            middle = self._random.choice(pairs)[0]
            pairs.sort(key=lambda pair: (abs(pair[0] - middle), pair))
        else:
            self._random.shuffle(pairs)
        return _grouped(pairs[count:])

    def _repaired(self, reruns: Reruns, noise: float) -> _Layout | None:
        """The reruns and more, with which the target is met; None where no rerun takes off any of the excess."""
        layout = self._laid_out(reruns)
        for _ in range(4 * len(self._step.order)):
            if int(layout.live.max(initial=0)) <= self._most:
                return self._shaved(layout)
            added = _Repair(layout, self._most, self._random, noise).best()
            if added is None:
                return None
            stage, kernels = added
            more = dict(layout.reruns)
            more[stage] = frozenset((*more.get(stage, ()), *kernels))
            layout = self._laid_out(more)
        return None

    def _shaved(self, layout: _Layout) -> _Layout:
        """Without reruns that are not needed for the target, the longest first."""
        pairs = [(position, kernel) for position, kernels in layout.reruns.items() for kernel in kernels]
        for stage, kernel in sorted(pairs, key=lambda pair: (-self._step.seconds[pair[1]], pair)):
            if self._fits_without(layout, stage, kernel):
                fewer = dict(layout.reruns)
                fewer[stage] = fewer[stage] - {kernel}
                shorter = self._laid_out(fewer)
                if int(shorter.live.max(initial=0)) <= self._most:
                    layout = shorter
        return layout

    def _fits_without(self, layout: _Layout, stage: int, kernel: int) -> bool:
        """Whether there is room for the copies before a rerun to stay until those that read the rerun's."""
        at = bisect_left(layout.stages, stage)
        while layout.kernels[at] != kernel:
            at += 1
        for v in self._step.makes[kernel]:
            before = next((uses for uses in reversed(layout.instances[v]) if uses[0] < at), None)
            if before is None:
                return False
            held = layout.live[before[-1] + 1 : at]
            if len(held) and int(held.max()) + self._step.nbytes[v] > self._most:
                return False
        return True


class _Repair:
    """One more rerun for a layout that exceeds the target."""

    def __init__(self, layout: _Layout, most_bytes: int, random: Random, noise: float):
        self._layout, self._step = layout, layout.step
        self._room = most_bytes - layout.live
        self._over = np.maximum(-self._room, 0)
        self._over_sums = np.concatenate([[0], np.cumsum(self._over)])
        self._random, self._noise = random, noise

    def best(self) -> tuple[int, set[int]] | None:
        """The stage and the kernels with the least seconds for what they take off the excess."""
        offers = sorted(self._offers())
        best, least = None, np.inf
        for optimistic, end, kernel, relief, factor in offers:
            if optimistic >= least:
                break
            stage = self._layout.stages[end]
            for price in dict.fromkeys((0.0, least, np.inf)):
                kernels, harm, seconds = self._chain(kernel, end, stage, relief, price)
                if relief > harm and (score := seconds * factor / (relief - harm)) < least:
                    best, least = (stage, kernels), score
        return best

    def _offers(self) -> Iterator[tuple[float, int, int, int, float]]:
        """Copies that wait at the peak: (score if nothing else is rerun or held for it, position of its next reader,
        kernel, relief of the excess, random factor).
        """
        layout, step = self._layout, self._step
        peak = int(self._over.argmax())
        for v, instances in layout.instances.items():
            uses = next((uses for uses in instances if uses[0] < peak < uses[-1]), None)
            if uses is None or v in step.problem.refusals:
                continue
            after = bisect_left(uses, peak)
            if uses[after] == peak:
                continue
            last, end = uses[after - 1], uses[after]
            kernel = step.problem.flow.values[v].producer
            # Just before its next reader, or as soon as there is room: what it is computed from may be there still.
            over = np.flatnonzero(self._over[peak:end])
            for at in dict.fromkeys((end, peak + int(over[-1]) + 1)):
                stage = layout.stages[at]
                if kernel in layout.reruns.get(stage, ()) or not step.may_rerun(kernel, stage):
                    continue
                relief = int(np.minimum(self._over[last + 1 : at], step.nbytes[v]).sum())
                factor = self._random.lognormvariate(0.0, self._noise) if self._noise else 1.0
                yield (step.seconds[kernel] + LEAST_S) * factor / relief, at, kernel, relief, factor

    def _chain(self, kernel: int, end: int, stage: int, most: int, price: float) -> tuple[set[int], int, float]:
        """The kernels that run before `end` to rerun this one, the excess that holding what they read adds, and their
        seconds.

        Args:
            most: an excess from which on the chain is of no use.
            price: seconds per byte of excess, by which it is decided what is held and what is rerun too.
        """
        step, kernels, harm = self._step, {kernel}, 0
        pending, seen, room = [kernel], set[int](), int(self._room[end])
        while pending and harm < most:
            for u in step.reads[pending.pop()]:
                until = end if u in seen else self._held_until(u, end)
                seen.add(u)
                if until >= end:
                    continue
                nbytes = step.nbytes[u]
                held = self._harm(until + 1, end + 1, nbytes)
                producer = step.problem.flow.values[u].producer
                again = max(0, nbytes - room) - max(0, -room)
                worth = again < held and (held - again) * price > step.seconds[producer]
                if worth and len(kernels) < MOST_CHAIN and step.may_rerun(producer, stage):
                    kernels.add(producer)
                    pending.append(producer)
                    held = again
                harm += held
        return kernels, harm, sum(step.seconds[k] for k in kernels) + LEAST_S

    def _held_until(self, v: int, position: int) -> int:
        """The last position at which the copy of `v` before a position is held."""
        return next(uses[-1] for uses in reversed(self._layout.instances[v]) if uses[0] < position)

    def _harm(self, begin: int, end: int, nbytes: int) -> int:
        """The excess that is added by `nbytes` more at these positions."""
        now = int(self._over_sums[end] - self._over_sums[begin])
        return int(np.maximum(nbytes - self._room[begin:end], 0).sum()) - now


def _grouped(pairs: Collection[tuple[int, int]]) -> Reruns:
    found: dict[int, set[int]] = {}
    for position, kernel in pairs:
        found.setdefault(position, set()).add(kernel)
    return {position: frozenset(kernels) for position, kernels in found.items()}
