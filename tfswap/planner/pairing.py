"""Pairs of concurrent kernels: a kernel that uses one core leaves the others idle.

A planned order runs kernel after kernel, so that requests have one order. Two kernels may overlap without changing that
order (csrc/core/paired_kernels.cc): the first has made all its requests before the second starts, and their inputs and
temporaries are freed when both have ended. Meng et al. and the other papers order GPU kernels, which run one after
another anyway: this is for CPUs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from tfswap.analysis.cost import LOOPED_S, spread_over
from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.custom_ops import KERNEL
from tfswap.ir.graph import Graph
from tfswap.ir.op_traits import depends_on_owners, is_pure, uses_tensor_list
from tfswap.kernels.hardware import Rates
from tfswap.plan.plan import Eviction
from tfswap.plan.schedule import LEAD, Interval, build_schedule
from tfswap.planner.ordering import PEAK_TIE
from tfswap.planner.problem import Choice
from tfswap.simulator.memory import Memory, simulate_memory
from tfswap.support.reach import reach

LEAST_GAIN_S = 150e-6
"""The least seconds that a pair must save: three more nodes and a change of threads take a third of it."""
GOOD_SHARES = (1.8, 0.6)
"""The least share of a kernel's idle core time that a pair must use, in rounds: kernels that match well are paired
first.
"""
LEAST_LOOPED_GAIN_S = 30e-6
"""The least seconds that a pair in a loop must save: its threads are awake."""
MOST_AHEAD = 4
"""The most kernels that may be moved ahead for a partner's inputs, each shorter than a pair must save."""
WINDOW = 32
"""The number of kernels ahead among which a partner is searched: one further away would hold its output for long."""
ROOM_SHARES, ROOM_WINDOW = (1.1, 1.2, 1.35, 1.5, 1.75, 2.0), 96
"""For orders with room: the live bytes over those of kernels one by one, and how far ahead a partner is searched."""
ORDERS_TRIED = 12
"""The most orders that are tried; in each, some pairs with too many live bytes are undone."""


def keep_apart(body: Graph, flow: Dataflow) -> None:
    """Unpair those of a body's kernels, in place, whose concurrent run would raise its peak.

    Args:
        flow: the facts of the body, which has an order.
    """
    order = [i for i, kernel in enumerate(flow.is_kernel) if kernel]
    nodes = [flow.nodes[i] for i in order]
    at = tuple(p for p, (first, second) in enumerate(pairwise(nodes), 1) if body.paired.get(first) is second)
    apart, together = (simulate_memory(flow, build_schedule(order, (), leads), live=True) for leads in ((), at))
    kept = kept_pairs(Choice(order, [], at), together, apart.peak_bytes)
    body.paired = {nodes[p - 1]: nodes[p] for p in kept}


def kept_pairs(choice: Choice, memory: Memory, most_bytes: float) -> tuple[int, ...]:
    """The pairs that hold at most `most_bytes`.

    Args:
        memory: of `choice`.
    """
    return tuple(p for p, held in zip(choice.paired, _held(choice, memory), strict=True) if held <= most_bytes)


def ever_fewer(choice: Choice, memory: Memory, least_bytes: float, count: int) -> list[tuple[int, ...]]:
    """Sets of pairs: without those that hold the most bytes, then without more, until all others hold `least_bytes`.

    Args:
        memory: of `choice`.
        count: largest number of sets, which are evenly spread.
    """
    held = _held(choice, memory)
    levels = sorted({h for h in held if h > least_bytes}, reverse=True)[1:]  # up to the highest, all are kept
    levels = [levels[len(levels) * n // count] for n in range(count)] if len(levels) > count else levels
    return [kept_pairs(choice, memory, level) for level in levels]


def _held(choice: Choice, memory: Memory) -> list[int]:
    """Bytes in use while each pair runs."""
    return [int(max(memory.during_bytes[n : n + 2])) for n in _leads(choice)]


def without_last(choice: Choice, step: int, count: int) -> tuple[int, ...]:
    """The pairs without the last `count` before a step of the schedule."""
    before = sum(n < step for n in _leads(choice))
    return (*choice.paired[: max(0, before - count)], *choice.paired[before:]) if before else ()


def _leads(choice: Choice) -> list[int]:
    """The steps of the schedule at which pairs begin."""
    return [n for n, step in enumerate(build_schedule(*choice)) if step.kind == LEAD]


def brought_together(
    flow: Dataflow,
    order: list[int],
    cost_s: Sequence[float],
    rates: Rates,
    whole: Dataflow | None = None,
    *,
    looped: bool = False,
) -> list[int]:
    """`order`, with kernels next to each other that gain as pairs, except pairs that raise its peak.

    Args:
        whole: facts of the same nodes that memory is simulated for; by default `flow`.
        looped: as of `gains`.
    """

    def live(made: list[int], _: Collection[int] = ()) -> Memory:
        return simulate_memory(whole or flow, build_schedule(made, ()), live=True)

    tries = _Tries(_Partners(flow, cost_s, rates, looped=looped), order, live)
    return tries.within(live(order).peak_bytes * PEAK_TIE)


def orders_with_room(flow: Dataflow, order: list[int], cost_s: Sequence[float], rates: Rates) -> list[list[int]]:
    """Orders with more pairs, which hold ever more bytes.

    Where a pair holds more than a limit allows, its kernels have other partners in one of these orders.
    """

    def live(made: list[int], at: Collection[int] = ()) -> Memory:
        return simulate_memory(flow, build_schedule(made, (), at), live=True)

    lowest_bytes = live(order).peak_bytes
    tries = _Tries(_Partners(flow, cost_s, rates, ROOM_WINDOW), order, live)
    found: list[list[int]] = []
    for share in ROOM_SHARES:
        made = tries.within(lowest_bytes * share)
        if made != order and made not in found:
            found.append(made)
    return found


class _Tries:
    """Orders with kernels next to each other that gain as pairs; each is made and simulated once.

    Args:
        live: the live bytes of an order, given the positions of its pairs.
    """

    def __init__(
        self, partners: _Partners, order: list[int], live: Callable[[list[int], Collection[int]], Memory]
    ) -> None:
        self._partners, self._order, self._live = partners, order, live
        self._place = {i: position for position, i in enumerate(order)}
        self._made: dict[frozenset[tuple[int, int]], tuple[list[int], list[tuple[int, int]], Memory | None]] = {}

    def within(self, most_bytes: float) -> list[int]:
        """The order with pairs, except those with too many live bytes."""
        place, apart = self._place, frozenset[tuple[int, int]]()
        for _ in range(ORDERS_TRIED):
            made, pairs, memory = self._without(apart)
            if memory is None:
                break
            if memory.peak_bytes <= most_bytes:
                return made
            # A tensor that a pair's kernel holds longer, or earlier, is live while the kernels run that were between
            # the two.
            high = [place[i] for i, held in zip(made, memory.during_bytes, strict=True) if held > most_bytes]
            spans = ((pair, sorted(place[i] for i in pair)) for pair in pairs)
            parted = {pair for pair, (first, last) in spans if any(first <= h <= last for h in high)}
            if not parted:
                break
            apart |= parted
        return self._order

    def _without(self, apart: frozenset[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]], Memory | None]:
        """The order without these pairs, its pairs, and its live bytes; None where it is the one without pairs."""
        if apart not in self._made:
            made, pairs = self._partners.bring_together(self._order, apart)
            at = {i: position for position, i in enumerate(made)}
            memory = None if made == self._order else self._live(made, [max(at[i] for i in pair) for pair in pairs])
            self._made[apart] = made, pairs, memory
        return self._made[apart]


def bring_together(
    flow: Dataflow,
    order: Sequence[int],
    cost_s: Sequence[float],
    rates: Rates,
    apart: Collection[tuple[int, int]] = (),
    window: int = WINDOW,
    *,
    looped: bool = False,
) -> tuple[list[int], list[tuple[int, int]]]:
    """`order`, with kernels that gain as pairs next to each other: one is moved forward, or the other backward.

    Args:
        apart: pairs that are not made.
        looped: as of `gains`.

    Returns:
        The order, and the pairs; in each the kernel that came first is first.
    """
    return _Partners(flow, cost_s, rates, window, looped=looped).bring_together(order, apart)


class _Partners:
    """The kernels of a step that gain as pairs.

    Attributes:
        window: how far ahead a partner is searched.
        able: kernels that can be one of a pair.
    """

    def __init__(
        self,
        flow: Dataflow,
        cost_s: Sequence[float],
        rates: Rates,
        window: int = WINDOW,
        *,
        looped: bool = False,
    ) -> None:
        self.flow, self.cost_s, self.window = flow, cost_s, window
        self.least_s = least_s = least_gain_s(looped)
        self.able = {i for i, seconds in enumerate(cost_s) if seconds > least_s and _stands_alone(flow, i)}
        self._gains = [gains(flow, cost_s, rates, share, looped=looped) for share in GOOD_SHARES]

    def bring_together(
        self, order: Sequence[int], apart: Collection[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """As the function of this name."""
        made = list(order)
        pairs: list[tuple[int, int]] = []
        for gain in self._gains:

            def gain_if_free(first: int, second: int, gain: Callable[[int, int], float] = gain) -> float:
                return 0.0 if (first, second) in apart else gain(first, second)

            made = _Pairing(self, made, gain_if_free, pairs).reordered()
        return made, pairs


class _Pairing:
    """An order that is made with more kernels next to each other.

    Attributes:
        order: the order that it starts from.
        paired: kernels of pairs, those from before included.
        made, ran: the new order so far, as a list and as a set.
        waiting: kernels whose position has passed, and that wait for a partner.
        later: by kernel, the one that waits to run with it, and those that wait for that one.
    """

    def __init__(
        self,
        partners: _Partners,
        order: Sequence[int],
        gain: Callable[[int, int], float],
        pairs: list[tuple[int, int]],
    ):
        self.flow, self.cost_s, self.able = partners.flow, partners.cost_s, partners.able
        self.window, self.least_s = partners.window, partners.least_s
        self.order, self.gain, self.pairs = order, gain, pairs
        self.paired = {i for pair in pairs for i in pair}
        self.made: list[int] = []
        self.ran: set[int] = set()
        self.waiting: set[int] = set()
        self.later: dict[int, list[int]] = {}
        self.place = {i: position for position, i in enumerate(order)}

    def reordered(self) -> list[int]:
        """The order, with more kernels next to each other, which join `pairs`."""
        for position, first in enumerate(self.order):
            if first in self.ran or first in self.waiting:
                continue
            if first in self.later:
                lead, *behind = self.later[first]
                self.waiting.difference_update((lead, *behind))
                self._run(lead, first, *behind)
            elif first in self.able and first not in self.paired:
                self._run_with_partner(position, first)
            else:
                self._run(first)
        return self.made

    def _run(self, *kernels: int) -> None:
        self.made += kernels
        self.ran.update(kernels)

    def _run_with_partner(self, position: int, first: int) -> None:
        """Run `first` with the kernel that gains most, or have it wait for that one, or run it alone."""
        second, held_up = self._partner(position, first)
        if second is None:
            return self._run(first)
        before = self._ahead(second)
        self.paired.update((first, second))
        self.pairs.append((first, second))
        if before is None:
            self.later[second] = held_up
            return self.waiting.update(held_up)
        return self._run(*before, first, second)

    def _partner(self, position: int, first: int) -> tuple[int | None, list[int]]:
        """The kernel that gains most by running with `first`, and the kernels before it that wait with `first`."""
        best, gain_s = None, 0.0
        held_up = [first]
        count = 1
        flow, paired, waiting = self.flow, self.paired, self.waiting
        window = self.order[position + 1 : position + 1 + self.window]
        saved = {second: self.gain(first, second) for second in window if second in self.able and second not in paired}
        saved = {second: saved_s for second, saved_s in saved.items() if saved_s}
        for second in window if saved else ():
            if second in self.ran:
                continue
            needs = flow.kernels_before(second)
            if not needs.isdisjoint(held_up):
                if second in paired or second in waiting:
                    break  # it can't wait longer
                held_up.append(second)
            elif (
                (saved_s := saved.get(second, 0.0)) > gain_s
                and second not in waiting
                and needs.isdisjoint(waiting)
                and _share_device(flow, first, second)
            ):
                best, gain_s, count = second, saved_s, len(held_up)
        return best, held_up[:count]

    def _ahead(self, second: int) -> list[int] | None:
        """The kernels that have to run before `second`: a few small ones, or None."""

        def missing(k: int) -> list[int]:
            return [d for d in self.flow.kernels_before(k) if d not in self.ran]

        found: list[int] = []
        for k in reach(missing(second), missing):
            fixed = k in self.waiting or k in self.later or k in self.paired
            if fixed or self.cost_s[k] > self.least_s or len(found) == MOST_AHEAD:
                return None
            found.append(k)
        return sorted(found, key=self.place.__getitem__)


def side_by_side(
    flow: Dataflow,
    choice: Choice,
    cost_s: Sequence[float],
    gain: Callable[[int, int], float],
    *,
    looped: bool = False,
) -> tuple[int, ...]:
    """Positions in the choice's order whose kernels can run concurrently with the one before, and gain by it.

    Args:
        looped: as of `gains`.
    """
    least_s = least_gain_s(looped)
    can_overlap = overlaps(flow, choice.order, choice.intervals)
    found: list[int] = []
    for position, (first, second) in enumerate(pairwise(choice.order), 1):
        if (
            cost_s[first] > least_s < cost_s[second]  # the test that excludes most comes first
            and (not found or found[-1] < position - 1)
            and gain(first, second)
            and can_overlap(position)
        ):
            found.append(position)
    return tuple(found)


def overlaps(flow: Dataflow, order: Sequence[int], evictions: Sequence[Interval | Eviction]) -> Callable[[int], bool]:
    """Whether the kernel at a position may run concurrently with the one before it, in this order with these evictions:
    both run once, neither needs the other, and no eviction lies between the two alone.
    """
    runs = Counter(order)
    # Copies back come before both kernels of a pair, and a reader of the old buffer may not come after them.
    reloaded_immediately = {a.release for a in evictions if a.release in (a.back, a.use)}
    reloaded_immediately |= {a.back for a in evictions if a.release == a.back - 1}

    def can_overlap(position: int) -> bool:
        first, second = order[position - 1], order[position]
        once = runs[first] == runs[second] == 1
        return once and position not in reloaded_immediately and can_pair(flow, first, second)

    return can_overlap


def can_pair(flow: Dataflow, first: int, second: int) -> bool:
    """Whether one op can run both, the second starting when the first has made all its requests."""
    return (
        first != second
        and _stands_alone(flow, first)
        and _stands_alone(flow, second)
        and _share_device(flow, first, second)
        and first not in flow.kernels_before(second)
    )


def _stands_alone(flow: Dataflow, i: int) -> bool:
    """Whether a kernel can be part of another node: it has no effects but its results and its requests. Its requests
    are new buffers, held until it has ended, since in a pair none is forwarded. It is not fetched, which is done by its
    name.
    """
    return (
        is_pure(flow.nodes[i].op)
        and not uses_tensor_list(flow.nodes[i].op)  # which change a list in place where no other holder exists
        and not flow.updates[i]
        and i not in flow.inexact_kernels
        and i not in flow.runs
        and has_one_result(flow, i)
        and all(event in ("out", "temp") for event, _ in flow.events[i])
        and flow.allocations(i) > 0
        and flow.fetched.isdisjoint(v for _, v in flow.makes[i])
    )


def has_one_result(flow: Dataflow, i: int) -> bool:
    """Whether a kernel's bits do not depend on other holders of its inputs.

    TensorFlow's sums of three terms or more begin with one that they can write over, and tfswap's own do not
    (passes/prepare/ordered_sums.py).
    """
    node = flow.nodes[i]
    return KERNEL in node.attrs or not depends_on_owners(node.op) or len(node.inputs) <= 2


def _share_device(flow: Dataflow, first: int, second: int) -> bool:
    return flow.nodes[first].device == flow.nodes[second].device


def gains(
    flow: Dataflow, cost_s: Sequence[float], rates: Rates, share: float = GOOD_SHARES[-1], *, looped: bool = False
) -> Callable[[int, int], float]:
    """The seconds that a pair saves; 0 where a better partner should be awaited.

    Args:
        looped: whether they are of a loop's body or a branch.
    """

    copies = flow.copying | flow.commits.keys()
    cores = rates.cores

    @functools.cache
    def work_of(i: int) -> tuple[float, float]:
        """The core seconds of a kernel, and the seconds of cores that it leaves idle, of one of them."""
        used = spread_over(flow.nodes[i], rates)
        return cost_s[i] * used, cost_s[i] * (1 - used / cores)

    @functools.cache
    def gain(first: int, second: int) -> float:
        if first in copies or second in copies:
            return 0.0  # a copy overlaps with kernels as it is
        (work_s, idle_s), (other_s, other_idle_s) = work_of(first), work_of(second)
        one_s, two_s = cost_s[first], cost_s[second]
        if looped and first != second and max(one_s, two_s) <= LOOPED_S:
            shorter_s, longer_s = sorted((work_s, other_s))
            return shorter_s if shorter_s > max(LEAST_LOOPED_GAIN_S, share * (longer_s - shorter_s)) else 0.0
        idle_s = max(idle_s, other_idle_s)
        if first == second or not idle_s:
            return 0.0
        saved_s = one_s + two_s - max((work_s + other_s) / cores, one_s, two_s)  # as concurrent_seconds
        return saved_s if saved_s > max(LEAST_GAIN_S, share * idle_s) else 0.0

    return gain


def least_gain_s(looped: bool) -> float:
    """The seconds that a pair must save, and that each of its kernels must take. `looped` as of `gains`."""
    return LEAST_LOOPED_GAIN_S if looped else LEAST_GAIN_S
