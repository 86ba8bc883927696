"""How much faster or smaller any other plan of a step could be: bounds that hold for all orders and all tactics.

When a kernel first runs, each tensor that a kernel before it in every order has made, and one after it in every order
reads, has been made and is needed later. It is in memory then, or it has left and comes back: by a copy out and a copy
in, or by another run of its kernel. A limit says how many bytes must have left at each kernel. The least time of that
is a linear program: a share of each tensor is swapped, a share recomputed; copies share lanes and reruns the compute
lane. It leaves out when copies run, what a rerun reads, and that an eviction ends, so its optimum is no more than the
time of any plan.

It is solved in its Lagrangian dual by subgradients (Held, Wolfe and Crowder 1974, "Validation of subgradient
optimization"): any multipliers give a bound, better ones a higher one. Steps of any size have one.

Not handled: loops and conditionals, in whose bodies tensors may leave too. There is no bound for steps that have any.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tfswap.analysis.cost import cores_used, one_core_seconds
from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import HOST, Rates
from tfswap.planner.problem import Problem
from tfswap.simulator.working_set import working_set_bytes
from tfswap.support.reach import reach

Floats = npt.NDArray[np.float64]

MOST_ROWS = 128
"""The most kernels at which the live bytes are bounded: those with the most."""
MOST_VISITS = 20_000_000
"""The most nodes that are visited to find what comes before these kernels and after them: large steps have fewer."""
SHARES = tuple(np.linspace(0.0, 1.0, 17))
"""The shares of the compute lane that are tried at one kernel."""
ITERATIONS = 400
"""The most subgradients."""
PATIENCE = 20
"""Without a better bound for this number of subgradients, the next steps are half as long."""
ROUNDING = 1 + 1e-9
"""Sums in another order differ by less."""
TOLERANCE = 1e-3
"""The search ends where the bound is within this share of the time to beat, or of the bytes."""


class Bounds(NamedTuple):
    """What no plan of a step passes, by the cost model that it is planned with.

    Attributes:
        seconds: no plan for the same limit takes less.
        peak_bytes: no plan that takes no longer has a lower peak.
    """

    seconds: float
    peak_bytes: int


class LeastWork(NamedTuple):
    """The least seconds of kernels in any plan, which may run some next to others.

    Attributes:
        total_s: of each kernel once.
        each_s: per node, what its run adds at least.
    """

    total_s: float
    each_s: Sequence[float]

    @classmethod
    def in_turn(cls, flow: Dataflow, cost_s: Sequence[float]) -> LeastWork:
        """That of kernels that run one at a time."""
        return cls(sum(s for s, kernel in zip(cost_s, flow.is_kernel, strict=True) if kernel), cost_s)

    @classmethod
    def side_by_side(
        cls, flow: Dataflow, cost_s: Sequence[float], rates: Rates, grouped: Collection[int] = ()
    ) -> LeastWork:
        """That of kernels that may share the cores, or have one core each.

        The kernels of a longest chain run one after the other, each on the cores that it uses or on one, whichever is
        faster. While one does, others have the cores that it leaves; the slower way may leave more. Of the rest of the
        others' work each core does a share.

        Args:
            grouped: kernels that may have one core.
        """
        cores, nodes = rates.cores, enumerate(zip(flow.nodes, cost_s, strict=True))
        alone_s = [one_core_seconds(node, s, rates) if i in grouped else math.inf for i, (node, s) in nodes]
        spread = [min(cores_used(node, rates), cores) for node in flow.nodes]
        work_s = [min(s * each, alone) for s, each, alone in zip(cost_s, spread, alone_s, strict=True)]
        least_s = [min(s, alone) for s, alone in zip(cost_s, alone_s, strict=True)]
        chain = _longest_chain(flow, least_s)
        rest_s = sum(s for i, s in enumerate(work_s) if flow.is_kernel[i] and i not in chain)
        room: list[tuple[float, float]] = []  # seconds of the chain's for each of others' work, and how much of that
        for i in chain:
            (fast_s, used), (slow_s, others) = sorted([(cost_s[i], spread[i]), (alone_s[i], 1.0)])
            free_s = (cores - used) * fast_s
            more_s = (cores - others) * slow_s - free_s if math.isfinite(slow_s) else 0.0
            room.append((0.0, free_s))
            if more_s > 0:
                room.append(((slow_s - fast_s) / more_s, more_s))
        total_s = sum(least_s[i] for i in chain)
        for price, amount_s in sorted(room):
            if price < 1 / cores:
                taken_s = min(rest_s, amount_s)
                total_s, rest_s = total_s + price * taken_s, rest_s - taken_s
        return cls(total_s + rest_s / cores, [min(s, work / cores) for s, work in zip(least_s, work_s, strict=True)])


def _longest_chain(flow: Dataflow, cost_s: Sequence[float]) -> set[int]:
    """The kernels of the chain of dependencies that takes longest."""
    ends: list[float] = []
    before: list[int] = []
    for i, deps in enumerate(flow.deps):
        last = max(deps, key=ends.__getitem__, default=-1)
        before.append(last)
        ends.append((ends[last] if last >= 0 else 0.0) + (cost_s[i] if flow.is_kernel[i] else 0.0))
    chain: set[int] = set()
    i = max(range(len(ends)), key=ends.__getitem__, default=-1)
    while i >= 0:
        if flow.is_kernel[i]:
            chain.add(i)
        i = before[i]
    return chain


class Free(NamedTuple):
    """What other forms of the step may have less of, at no cost in this bound.

    Attributes:
        readers: by tensor, the kernels that may read a smaller form of it.
        values: tensors that may be made in slices.
        variables: persistent values that may be elsewhere.
        kernels: kernels that may run in slices.
    """

    readers: Mapping[int, Collection[int]] = MappingProxyType({})
    values: Collection[int] = ()
    variables: Collection[int] = ()
    kernels: Collection[int] = ()


class LeastCosts:
    """Bounds of one step's plans.

    Args:
        problem: the step in one order. The bounds hold for every other order too; it decides at which kernels live
            bytes are bounded.
        tactics: those that plans may use.
        work: the least seconds of the step's kernels, together and one by one.
        tiers: those that a swapped tensor may go to.
        free: what other forms of the step may have less of.
    """

    def __init__(
        self,
        problem: Problem,
        tactics: Collection[str],
        work: LeastWork,
        tiers: Collection[int] = (HOST,),
        free: Free = Free(),  # noqa: B008 - immutable
    ):
        flow, rates = problem.flow, problem.rates
        self._kernels_s = work.total_s
        rows = _Rows(problem, free)
        self._base = rows.base_bytes
        self._around_s = np.array([rows.around_s(row, work.each_s) for row in range(len(self._base))])
        evictable = [v for v in rows.crossing if v not in problem.refusals]
        self._covers = np.zeros((len(self._base), len(evictable)))
        for row, crossing in enumerate(rows.crossed_by):
            self._covers[row] = [round_up(flow.values[v].nbytes) if v in crossing else 0 for v in evictable]
        self._may_swap = np.array(["swap" in tactics and problem.may_swap(v) for v in evictable], dtype=bool)
        self._lanes_s = _lane_seconds(np.array([flow.values[v].nbytes for v in evictable], dtype=float), rates, tiers)
        makers = [flow.values[v].producer for v in evictable]
        self._group = np.array(_numbered(makers), dtype=np.int64)
        reruns = _Reruns(problem, work, "swap" in tactics)
        seconds = [reruns.seconds(i) if "recompute" in tactics else math.inf for i in dict.fromkeys(makers)]
        self._rerun_s = np.array([s if math.isfinite(s) else 0.0 for s in seconds])
        self._may_rerun = np.isfinite(np.array(seconds))

    def least_seconds(self, limit_bytes: int, to_beat_s: float) -> float:
        """No plan whose live bytes keep a limit takes less.

        Args:
            to_beat_s: the time of a plan that does.
        """
        best_s = self._kernels_s
        excess = self._base - limit_bytes
        if not (excess > 0).any():
            return best_s
        for row in np.argsort(-excess):
            best_s = max(best_s, self._at_one(int(row), float(excess[row]), to_beat_s))
        for dual in self._ascent(excess, to_beat_s):
            if best_s >= to_beat_s * (1 - TOLERANCE):
                break
            best_s = max(best_s, dual)
        return best_s

    def least_bytes(self, seconds: float, to_beat_bytes: int) -> int:
        """No plan that takes at most `seconds` has a lower peak of live bytes.

        Args:
            to_beat_bytes: the peak of a plan that does.
        """
        low, high = 0, to_beat_bytes
        while high - low > TOLERANCE * high:
            middle = (low + high) // 2
            excess = self._base - middle
            at_one = (self._at_one(int(row), float(excess[row]), seconds) for row in np.argsort(-excess))
            if any(bound_s > ROUNDING * seconds for bound_s in chain(at_one, self._ascent(excess, seconds))):
                low = middle
            else:
                high = middle
        return low

    def _at_one(self, row: int, excess: float, to_beat_s: float) -> float:
        """The bound by what must have left at one kernel: its copies out end before it, and those in begin after it.

        That is a linear program with two constraints besides the bytes. For a price of the first it is a knapsack.
        """
        if excess <= 0:
            return 0.0
        nbytes = self._covers[row]
        there = nbytes > 0
        if nbytes.sum() < excess:
            return np.inf
        nbytes, lanes_s, group = nbytes[there], self._lanes_s[:, there], self._group[there]
        together = np.bincount(group, nbytes, minlength=len(self._rerun_s))[group]
        rerun_s = self._rerun_s[group] * nbytes / together
        best_s = 0.0
        for share in SHARES:
            by_swap = np.where(
                self._may_swap[there], share * lanes_s[0] + (1 - share) * lanes_s[1:].sum(axis=0), np.inf
            )
            costs = np.minimum(by_swap, np.where(self._may_rerun[group], share * rerun_s, np.inf))
            ranked = np.argsort(costs / nbytes)
            before = np.cumsum(nbytes[ranked]) - nbytes[ranked]
            taken = np.minimum(np.maximum((excess - before) / nbytes[ranked], 0.0), 1.0)
            cost_s = float((costs[ranked][taken > 0] * taken[taken > 0]).sum())
            best_s = max(best_s, share * self._kernels_s + (1 - share) * float(self._around_s[row]) + cost_s)
            if best_s > to_beat_s:
                break
        return best_s

    def _ascent(self, excess: Floats, to_beat_s: float) -> Iterator[float]:
        """Bounds of the time, by better and better multipliers.

        Args:
            excess: per row, the bytes that must have left.
        """
        scale = to_beat_s / max(float(excess.max()), 1.0)  # so that all multipliers are of about one size
        prices, lanes, pace = np.zeros(len(excess)), np.array([1.0, 0.0, 0.0]), 1.0
        best, waited = -np.inf, 0
        for _ in range(ITERATIONS):
            dual, row_slope, lane_slope = self._dual(excess, prices * scale, lanes)
            yield dual
            waited = 0 if dual > best + 1e-6 * to_beat_s else waited + 1
            best = max(best, dual)
            if waited >= PATIENCE:
                pace, waited = pace / 2, 0
            row_slope = np.where((prices <= 0) & (row_slope < 0), 0.0, row_slope * scale)
            lane_slope = lane_slope - lane_slope.mean()
            length = float(row_slope @ row_slope + lane_slope @ lane_slope)
            if length <= 0 or pace < 1e-4:
                return
            step = pace * max(to_beat_s * (1 + TOLERANCE) - dual, TOLERANCE * to_beat_s) / length
            prices = np.maximum(prices + step * row_slope, 0.0)
            lanes = _on_simplex(lanes + step * lane_slope)

    def _dual(self, excess: Floats, prices: Floats, lanes: Floats) -> tuple[float, Floats, Floats]:
        """The bound for these multipliers, and its slopes.

        Args:
            prices: per row, seconds for each byte that stays.
            lanes: the shares of the compute lane, the lane out and the lane in; their sum is 1.
        """
        worth = prices @ self._covers
        swap = lanes @ self._lanes_s - worth
        swapped = (swap < 0) & self._may_swap
        groups = len(self._rerun_s)
        by_swaps = np.bincount(self._group, np.where(swapped, swap, 0.0), minlength=groups)
        by_rerun = lanes[0] * self._rerun_s - np.bincount(self._group, worth, minlength=groups)
        rerun = (by_rerun < by_swaps) & self._may_rerun
        gone = swapped & ~rerun[self._group]
        dual = lanes[0] * self._kernels_s + prices @ excess + float(np.where(rerun, by_rerun, by_swaps).sum())
        left = np.where(gone | rerun[self._group], 1.0, 0.0)
        lane_slope = self._lanes_s[:, gone].sum(axis=1)
        lane_slope[0] += self._kernels_s + self._rerun_s[rerun].sum()
        return dual, excess - self._covers @ left, lane_slope


class _Rows:
    """The kernels at which live bytes are bounded.

    Attributes:
        base_bytes: per row, the bytes that are live at it in every order, if nothing leaves.
        crossed_by: per row, the tensors among them that may leave.
        crossing: all of these.
    """

    def __init__(self, problem: Problem, free: Free):
        flow = problem.flow
        self._flow = flow
        self._sums: dict[tuple[int, bool], float] = {}
        self._readers: list[list[int]] = [[] for _ in flow.values]
        for i, held in enumerate(flow.held):
            for v in held:
                if i not in free.readers.get(v, ()):
                    self._readers[v].append(i)
        self._made = [
            v
            for v, value in enumerate(flow.values)
            if value.producer != PERSISTENT and value.nbytes and v not in free.values
        ]
        there = problem.there_bytes + sum(
            round_up(flow.values[v].nbytes) for v in flow.persistent if v not in free.variables
        )
        self.crossed_by: list[set[int]] = []
        self._kernels: list[int] = []
        found: list[int] = []
        for kernel in _most_live(problem, free):
            crossing = self._crossing(kernel)
            apart = crossing.difference(flow.held[kernel], (v for _, v in flow.makes[kernel]))
            own = working_set_bytes(flow, kernel)
            found.append(there + own + sum(round_up(flow.values[v].nbytes) for v in apart))
            self.crossed_by.append(apart)
            self._kernels.append(kernel)
        self.base_bytes = np.array(found, dtype=float)
        self.crossing = dict.fromkeys(v for row in self.crossed_by for v in sorted(row))

    def around_s(self, row: int, least_s: Sequence[float]) -> float:
        """The seconds of kernels that run before any of a row's tensors can leave, or after all have come back, or
        while none of them is copied.
        """
        flow, kernel = self._flow, self._kernels[row]
        makers = {flow.values[v].producer for v in self.crossed_by[row]}
        readers = {reader for v in self.crossed_by[row] for reader in self._readers[v]}
        first = min((self._seconds(i, flow.deps, least_s) for i in makers), default=0.0)
        after = {*reach(flow.users[kernel], flow.users.__getitem__)}
        last = min((self._seconds(i, flow.users, least_s) for i in readers & after), default=0.0)
        return first + least_s[kernel] + (0.0 if any(v in flow.fetched for v in self.crossed_by[row]) else last)

    def _seconds(self, kernel: int, edges: Sequence[Sequence[int]], least_s: Sequence[float]) -> float:
        """The seconds of a kernel and of all that are reached from it."""
        key = kernel, edges is self._flow.deps
        if key not in self._sums:
            kernels = (i for i in reach([kernel], edges.__getitem__) if self._flow.is_kernel[i])
            self._sums[key] = sum(least_s[i] for i in kernels)
        return self._sums[key]

    def _crossing(self, kernel: int) -> set[int]:
        """The tensors that have been made in every order when a kernel first runs, and are needed later."""
        flow = self._flow
        before = {*reach(flow.deps[kernel], flow.deps.__getitem__)}
        after = {*reach(flow.users[kernel], flow.users.__getitem__)}
        return {
            v
            for v in self._made
            if flow.values[v].producer in before
            and (v in flow.fetched or any(reader in after for reader in self._readers[v]))
        }


class _Reruns:
    """The least seconds of recomputing what a kernel makes.

    An input that only this kernel reads, and that is as large as what it makes, is recomputed too: to hold it, or to
    swap it, would take no less than to hold or swap what the kernel makes.
    """

    def __init__(self, problem: Problem, work: LeastWork, swaps: bool):
        self._problem, self._work, self._swaps = problem, work, swaps
        self._found: dict[int, float] = {}
        readers: dict[int, set[int]] = {}
        for i, held in enumerate(problem.flow.held):
            for v in held:
                readers.setdefault(v, set()).add(i)
        self._only = {v for v, kernels in readers.items() if len(kernels) == 1}

    def seconds(self, kernel: int) -> float:
        """The seconds of runs of a kernel and of those that it needs; infinite where one of them runs once."""
        pending = [kernel]
        while pending:
            i = pending[-1]
            sources = self._sources(i) if self._problem.repeatable[i] else []
            if missing := [source for source in sources if source not in self._found]:
                pending += missing
                continue
            own = min(self._problem.rerun_s(i), self._work.each_s[i]) if self._problem.repeatable[i] else np.inf
            self._found[pending.pop()] = own + sum(self._found[source] for source in sources)
        return self._found[kernel]

    def _sources(self, kernel: int) -> list[int]:
        """The makers of the inputs that are recomputed too."""
        flow, problem = self._problem.flow, self._problem
        makes = [v for _, v in flow.makes[kernel]]
        nbytes = sum(round_up(flow.values[v].nbytes) for v in makes)
        movable = self._swaps and all(problem.may_swap(v) and v not in problem.refusals for v in makes)
        return [
            flow.values[v].producer
            for v in dict.fromkeys(flow.held[kernel])
            if v in self._only
            and v not in flow.fetched
            and flow.values[v].producer != PERSISTENT
            and round_up(flow.values[v].nbytes) >= nbytes
            and (movable or not self._swaps or v in problem.refusals or not problem.may_swap(v))
        ]


def _most_live(problem: Problem, free: Free) -> list[int]:
    """The kernels with the most live bytes in the problem's order, each once."""
    visits = len(problem.flow.nodes) + sum(map(len, problem.flow.deps))
    most = max(1, min(MOST_ROWS, MOST_VISITS // max(1, visits)))
    ranked = sorted(range(len(problem.order)), key=lambda p: (-problem.live_bytes[p], p))
    kernels = dict.fromkeys(problem.order[p] for p in ranked)
    return [i for i in kernels if i not in free.kernels][:most]


def _lane_seconds(nbytes: Floats, rates: Rates, tiers: Collection[int]) -> Floats:
    """Per lane (compute, out, in), the least seconds that a swap of each of these tensors takes of it."""
    out_s = nbytes / sum(rates.out_rate(tier) for tier in tiers)
    in_s = nbytes / sum(rates.in_rate(tier) for tier in tiers)
    lost_s = rates.copy_share * (nbytes / rates.out_rate(HOST) + nbytes / rates.in_rate(HOST))
    return np.stack([lost_s, out_s, in_s])


def _numbered(makers: Sequence[int]) -> list[int]:
    """For each kernel its number in the order of first appearance."""
    numbers = {kernel: number for number, kernel in enumerate(dict.fromkeys(makers))}
    return [numbers[kernel] for kernel in makers]


def _on_simplex(point: Floats) -> Floats:
    """The closest point whose coordinates are not negative and add up to 1."""
    ordered = np.sort(point)[::-1]
    over = (np.cumsum(ordered) - 1.0) / np.arange(1, len(point) + 1)
    return np.maximum(point - over[np.nonzero(ordered > over)[0][-1]], 0.0)
