"""The problem that a solver decides: the gaps between tensors' uses, and the live bytes to be reduced.

Positions count kernels in the chosen order. Live bytes are the simulator's, without fragmentation: solvers
aim at live bytes, and the planner then simulates the allocator for the real peak of the result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from random import Random
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.ir.op_traits import is_view, may_run_again
from tfswap.ir.types import REFERENCES
from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import Rates
from tfswap.plan.plan import Eviction, Split
from tfswap.plan.schedule import Interval, build_schedule
from tfswap.planner.host_tiers import ANYTHING, Tiers
from tfswap.planner.live_target import LiveTarget
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN, ArenaSnapshot
from tfswap.simulator.memory import simulate_memory


class Gap(NamedTuple):
    """A stretch in which a value waits: read (or made, or recomputed) at `start`, next read at `end`.

    `made` is the position of the kernel that made this buffer of it. Where its buffer is forwarded to the kernel that
    reads it last, the value is gone while that kernel runs: then `start` is the position before.
    """

    value: int
    nbytes: int
    made: int
    start: int
    end: int


class Choice(NamedTuple):
    """A decision: the kernels in order, recomputed ones named again, and the evictions.

    `paired` holds positions in the order whose kernels run concurrently with the one before them, `splits` requests
    that get no larger chunks than they need, and `exact_chunks` says whether each request gets a chunk of its own size.
    Solvers leave all three open.
    """

    order: list[int]
    intervals: list[Interval]
    paired: tuple[int, ...] = ()
    splits: tuple[Split, ...] = ()
    exact_chunks: bool = False

    def named(self, flow: Dataflow) -> tuple[tuple[str, ...], tuple[Eviction, ...]]:
        """The order and the intervals as a plan has them, by names of nodes and tensors."""
        moved = ((flow.values[a.value], a) for a in self.intervals)
        return tuple(flow.nodes[i].name for i in self.order), tuple(
            Eviction(value.tensor.name, value.nbytes, a.out, a.release, a.back, a.use, a.disk, a.lent)
            for value, a in moved
        )


@dataclass(frozen=True)
class Problem:
    """One step in one order.

    Attributes:
        order: kernels (node indices) in order; a kernel that is named again runs again.
        before_bytes: per position, the live bytes when that kernel starts, without evictions.
        live_bytes: per position, the peak of live bytes while that kernel runs, without evictions.
        starts_s: per position, when that kernel starts if no copy stalls it; one more entry for the end.
        gaps: the waits of values that may leave, by start.
        refusals: values that can't leave, with the reason.
        repeatable: per node, whether it may run again, for as long as what it reads is unchanged.
        tiers: the host memory and disk space for swapped tensors.
        arrivals: the earliest start of kernels that wait for other devices.
    """

    flow: Dataflow
    order: list[int]
    rates: Rates
    cost_s: list[float]
    before_bytes: np.ndarray
    live_bytes: np.ndarray
    starts_s: np.ndarray
    gaps: list[Gap]
    refusals: dict[int, str]
    repeatable: list[bool]
    tiers: Tiers = ANYTHING
    arrivals: Mapping[int, float] = field(default_factory=dict[int, float])

    @property
    def live_peak_bytes(self) -> int:
        return int(self.live_bytes.max(initial=0))

    @property
    def smallest_bytes(self) -> int:
        """Tensors below this are not worth the ops and edges of an eviction."""
        return smallest_bytes(self.live_peak_bytes)

    @cached_property
    def uses(self) -> Uses:
        """When values are used in this order, and the cost of recomputing them."""
        return Uses(self)

    def rerun_s(self, kernel: int) -> float:
        """The cost in seconds of one more run of a kernel. Most of a copy overlaps with other kernels."""
        return self.cost_s[kernel] * (COPY_SHARE if kernel in self.flow.loads else 1.0)

    def may_swap(self, v: int) -> bool:
        """Whether a value may be swapped. A variable's copy is dropped instead: the host has the variable."""
        producer = self.flow.values[v].producer
        return self.flow.may(v, "swap") and not (producer in self.flow.loads and self.repeatable[producer])

    @cached_property
    def there_bytes(self) -> int:
        """The live bytes of others in the arena before the step."""
        own = simulate_memory(self.flow, build_schedule(self.order, ()), live=True)
        return self.live_peak_bytes - own.peak_bytes

    def live_peak_of(self, choice: Choice) -> int:
        """The peak of live bytes with another choice, counted in the same way."""
        return self.there_bytes + simulate_memory(self.flow, build_schedule(*choice), live=True).peak_bytes

    def extended(self, reruns: Sequence[tuple[int, int]], live_bytes: np.ndarray) -> Problem:
        """The same step with recomputed kernels.

        Args:
            reruns: (position of the kernel that it comes before, kernel), in the order in which they run.
            live_bytes: per position of the new order.
        """
        order: list[int] = []
        done = 0
        for position, kernel in reruns:
            order += self.order[done:position]
            order.append(kernel)
            done = position
        order += self.order[done:]
        starts = starts_of(order, self.cost_s, self.arrivals)
        return dataclasses.replace(self, order=order, live_bytes=live_bytes, before_bytes=live_bytes, starts_s=starts)


Solver = Callable[[Problem, LiveTarget], Choice | None]
"""From a problem and a target of live bytes to a choice; None where the target is out of reach. A solver uses only
whether a number of bytes exceeds the target: its choice is the same for all targets with the same answers.
"""

NEVER = math.inf
COPY_SHARE = 0.1
"""The share of the seconds of a variable's copy that counts as its cost."""
MAX_CHAIN = 64
"""A value that takes more kernels than this to recompute is swapped or stays."""
MIN_SWAP_BYTES = 64 << 10
MIN_SWAP_SHARE = 0.001
"""A tensor below both, in bytes and as a share of the live peak, is not worth the ops and edges of an eviction."""


def smallest_bytes(peak_bytes: int) -> int:
    """The least bytes that are worth an eviction in a step with this peak."""
    return min(MIN_SWAP_BYTES, int(MIN_SWAP_SHARE * peak_bytes))


def make_problem(
    flow: Dataflow,
    order: Sequence[int],
    rates: Rates,
    cost_s: list[float],
    *,
    snapshot: ArenaSnapshot = NOTHING_KNOWN,
    tiers: Tiers = ANYTHING,
    arrivals: Mapping[int, float] = MappingProxyType({}),
) -> Problem:
    """Gaps and live bytes of `flow` in `order`.

    Args:
        snapshot: the contents before the step.
        tiers: the host memory and disk space for swapped tensors.
        arrivals: as of Problem.
    """
    refusals = _refusals(flow)
    repeatable = [
        flow.is_kernel[i]
        and may_run_again(node.op)
        and not flow.updates[i]
        and all(v not in refusals and flow.may(v, "recompute") for _, v in flow.makes[i])
        for i, node in enumerate(flow.nodes)
    ]
    order = list(order)
    memory = simulate_memory(flow, build_schedule(order, ()), snapshot=snapshot, live=True)
    starts = starts_of(order, cost_s, arrivals)
    before, during = (np.array(b, dtype=np.int64) for b in (memory.before_bytes, memory.during_bytes))
    room = tiers.besides(memory)
    problem = Problem(flow, order, rates, cost_s, before, during, starts, [], refusals, repeatable, room, arrivals)
    problem.gaps.extend(_gaps(problem))
    return problem


def starts_of(order: Sequence[int], cost_s: Sequence[float], arrivals: Mapping[int, float]) -> np.ndarray:
    """The start of each kernel, and the end, where no copy stalls any."""
    if not arrivals:
        return np.concatenate([[0.0], np.cumsum([cost_s[i] for i in order])])
    starts: list[float] = []
    now = 0.0
    for i in order:
        now = max(now, arrivals.get(i, 0.0))
        starts.append(now)
        now += cost_s[i]
    return np.array([*starts, now])


def _gaps(problem: Problem) -> list[Gap]:
    """The waits of every value that may leave."""
    flow, smallest = problem.flow, problem.smallest_bytes
    made = [-1] * len(flow.values)
    used = [-1] * len(flow.values)
    gaps: list[Gap] = []
    for position, i in enumerate(problem.order):
        for v in flow.reads[i]:
            if made[v] < 0 or used[v] == position:
                continue
            if position - used[v] > 1 and v not in problem.refusals and flow.values[v].nbytes >= smallest:
                gaps.append(Gap(v, flow.values[v].nbytes, made[v], used[v], position))
            used[v] = position
        for _, v in flow.makes[i]:
            made[v] = used[v] = position
    gaps.sort(key=lambda g: (g.start, g.end, g.value))
    return gaps


class Wait(NamedTuple):
    """A value between two successive uses, and the cost of recomputing it at the second.

    Attributes:
        slot: the value's number among the candidates.
        end: position of the second use; `end_s` when that kernel starts if nothing stalls.
        rerun_s: seconds of the kernels to recompute it, from values that are in memory at `end` unless evicted.
        sources: those of the values that they read that may have been evicted.
    """

    slot: int
    value: int
    end: int
    end_s: float
    rerun_s: float
    sources: tuple[int, ...]


class Uses:
    """When values are used in one order, and the cost of recomputing them. It does not depend on the target.

    Attributes:
        nbytes: rounded bytes per value.
        reads, makes: values that a kernel reads and makes, of those that may leave or be recomputed; smaller
            ones stay as long as any kernel may read them.
        candidates: values that wait and may leave; `slot` numbers them.
        watched_reads, watched_makes: the candidates that the kernel at a position reads and makes, where there are any.
        stretches: (begin, end, most live bytes) of the positions before each of those, and before the end.
        needs: per kernel that may be recomputed, the peak of what it allocates without buffer forwarding.
        takeable: per kernel, for each buffer that it would not allocate if an input were no longer needed, the inputs
            whose buffers may then be forwarded.
        after, until: the waits of candidates, by (value, position of the first use) and (value, of the second).
        dependents: by value, the waits that it is a source of.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        flow = problem.flow
        order = problem.order
        smallest = problem.smallest_bytes
        self.nbytes = [round_up(value.nbytes) for value in flow.values]
        heavy = [value.producer != PERSISTENT and value.nbytes >= max(1, smallest) for value in flow.values]
        self.reads = [tuple(dict.fromkeys(v for v in reads if heavy[v])) for reads in flow.reads]
        self.makes = [tuple(v for _, v in makes if heavy[v]) for makes in flow.makes]
        self.positions: dict[int, list[int]] = {}
        for position, i in enumerate(order):
            for v in self.makes[i]:
                self.positions[v] = [position]
            for v in self.reads[i]:
                if self.positions[v][-1] != position:
                    self.positions[v].append(position)
        self.needs = [self._allocates(i) if problem.repeatable[i] else 0 for i in range(len(flow.nodes))]
        self.takeable = [self._takeable(i) for i in range(len(flow.nodes))]
        takeable = {(v, position) for position in range(len(order)) for vs in self.takeovers(position) for v in vs}
        self.candidates = sorted(
            v
            for v, positions in self.positions.items()
            if v not in problem.refusals
            and any(end - start > 1 or (v, start) in takeable for start, end in pairwise(positions))
        )
        self.slot = {v: n for n, v in enumerate(self.candidates)}
        self.watched_reads: dict[int, list[int]] = {}
        self.watched_makes: dict[int, list[int]] = {}
        self.live: list[int] = problem.live_bytes.tolist()
        self.before: list[int] = problem.before_bytes.tolist()
        self.starts: list[float] = problem.starts_s.tolist()
        self.stretches: list[tuple[int, int, int]] = []
        begin = 0
        for position, i in enumerate(order):
            reads = [v for v in self.reads[i] if v in self.slot]
            makes = [v for v in self.makes[i] if v in self.slot]
            if reads or makes:
                self.watched_reads[position], self.watched_makes[position] = reads, makes
                self.stretches.append((begin, position, max(self.live[begin:position], default=0)))
                begin = position + 1
        self.stretches.append((begin, len(order), max(self.live[begin:], default=0)))
        self.ended: dict[int, int] = {}  # variable version: position of the write that ends it
        for position, i in enumerate(order):
            for update in flow.updates[i]:
                self.ended[update.old] = position
        self._factors: dict[int, dict[tuple[int, int], float]] = {}
        self.after: dict[tuple[int, int], Wait] = {}
        self.until: dict[tuple[int, int], Wait] = {}
        self.dependents: dict[int, list[Wait]] = {}
        for v in self.candidates:
            for start, end in pairwise(self.positions[v]):
                wait = Wait(self.slot[v], v, end, self.starts[end], *self._chain(v, end))
                self.after[v, start] = self.until[v, end] = wait
                for source in wait.sources:
                    self.dependents.setdefault(source, []).append(wait)

    def _allocates(self, kernel: int, taken: int | None = None) -> int:
        """The peak of what a kernel allocates, where no buffer but that of `taken` is forwarded."""
        flow = self.problem.flow
        made, forwards = dict(flow.makes[kernel]), dict(flow.forwards[kernel])
        temp_forwards = flow.temp_forwards.get(kernel, {})
        temps: list[int] = []
        held = most = 0
        for event, amount in flow.events[kernel]:
            if event == "free":
                held -= temps[amount]
                continue
            if event not in ("temp", "out"):
                continue
            v = made.get(amount)
            if event == "temp":
                nbytes, candidates = round_up(amount), temp_forwards.get(len(temps), ())
            elif v is not None:
                nbytes, candidates = self.nbytes[v], forwards.get(v, ())
            else:
                continue
            if taken in candidates:
                nbytes, taken = 0, None
            if event == "temp":
                temps.append(nbytes)
            held += nbytes
            most = max(most, held)
        return most

    def _takeable(self, kernel: int) -> tuple[tuple[int, ...], ...]:
        flow = self.problem.flow
        groups = [candidates for _, candidates in flow.forwards[kernel]]
        groups += flow.temp_forwards.get(kernel, {}).values()
        once = [[v for v in self.reads[kernel] if v in group and flow.reads[kernel].count(v) == 1] for group in groups]
        if not any(once):
            return ()
        most = self._allocates(kernel)
        saved = (tuple(v for v in vs if most - self._allocates(kernel, v) == self.nbytes[v]) for vs in once)
        return tuple(group for group in saved if group)

    def takeovers(self, position: int) -> list[tuple[int, ...]]:
        """Those of `takeable` of the kernel at `position` that are not forwarded in this order."""
        groups = self.takeable[self.problem.order[position]]
        return [vs for vs in groups if all(self.positions[v][-1] > position for v in vs)]

    def factors(self, draw: int) -> dict[tuple[int, int], float]:
        """By wait, as (value, position of the second use), a factor drawn at random around 1; none for draw 0."""
        if draw not in self._factors:
            random = Random(draw)
            self._factors[draw] = {wait: math.exp(random.gauss(0.0, 1.0)) for wait in self.until} if draw else {}
        return self._factors[draw]

    def is_dead(self, v: int, position: int) -> bool:
        """Whether nothing at or after `position` reads `v`."""
        return self.positions[v][-1] < position

    @cached_property
    def gaps(self) -> list[Gap]:
        """The gaps that a swap can use, begun immediately where the buffer can be forwarded to the kernel before.

        Of several that could be forwarded instead of one another, the one that waits longest.
        """
        early: set[tuple[int, int]] = set()
        for position in range(len(self.problem.order)):
            for group in self.takeovers(position):
                waits = [wait for v in group if (wait := self.after.get((v, position))) is not None]
                if waits:
                    early.add((max(waits, key=lambda wait: wait.end).value, position))
        gaps: list[Gap] = []
        for (v, start), wait in self.after.items():
            first = start - 1 if (v, start) in early else start
            if wait.end - first > 1 and self.problem.flow.may(v, "swap"):
                gaps.append(Gap(v, self.problem.flow.values[v].nbytes, self.positions[v][0], first, wait.end))
        return sorted(gaps, key=lambda g: (g.start, g.end, g.value))

    def _chain(self, v: int, end: int) -> tuple[float, tuple[int, ...]]:
        """Seconds to recompute `v` at `end` from values in memory then unless evicted, and those of these that may be
        evicted.
        """
        problem, flow = self.problem, self.problem.flow
        kernels: set[int] = set()
        sources: dict[int, None] = {}
        pending = [flow.values[v].producer]
        cost = 0.0
        while pending:
            kernel = pending.pop()
            if kernel in kernels:
                continue
            kernels.add(kernel)
            cost += problem.rerun_s(kernel)
            unchanged = all(self.ended.get(u, end) >= end for u in flow.reads[kernel])
            if not (problem.repeatable[kernel] and unchanged) or len(kernels) > MAX_CHAIN:
                return NEVER, ()
            for u in self.reads[kernel]:
                if self.is_dead(u, end):
                    pending.append(flow.values[u].producer)
                elif u in self.slot:
                    sources[u] = None
        return cost, tuple(sources)


def _refusals(flow: Dataflow) -> dict[int, str]:
    """Values that must not leave, with the reason for reports."""
    reasons: dict[int, str] = {}
    for v, value in enumerate(flow.values):
        if value.producer == PERSISTENT:
            reasons[v] = "there before the step: a variable, an argument or a constant"
        elif value.tensor.type.dtype in REFERENCES:
            reasons[v] = f"a {value.tensor.type.dtype} refers to memory of its own"
    for updates in flow.updates:
        for update in updates:
            if update.adopted is not None:
                reasons[update.adopted] = "a variable's update reuses its buffer"
    for v in flow.stores.values():
        reasons[v] = "a copy to a variable's home may hold it"
    for v in flow.fetched:
        reasons[v] = "the caller gets it"
    for kept in flow.kept.values():
        for v in kept:
            reasons.setdefault(v, "a tensor list keeps it")
    for v, permit in flow.permits.items():
        if not permit.tactics:
            reasons[v] = permit.why
    for other in flow.others:
        for v, value in enumerate(flow.values):
            if value.tensor.name not in other.value_named:
                reasons.setdefault(v, "one of its branches hands on what it is given")
    for (node, index), v in flow.value_of.items():
        if v not in reasons and flow.values[v].tensor != (node, index) and not is_view(node.op):
            reasons[v] = f"{node.op} {node.name} passes its buffer on in a way that can't be repeated"
    return reasons


def live_without(problem: Problem, absent: list[Gap]) -> np.ndarray:
    """Live bytes per position with these gaps' values absent in between."""
    change = np.zeros(len(problem.live_bytes) + 1, dtype=np.int64)
    for gap in absent:
        change[gap.start + 1] -= gap.nbytes
        change[gap.end] += gap.nbytes
    return problem.live_bytes + np.cumsum(change[:-1])
