"""Chooses the order of kernels: the cheapest tactic, since an order moves no bytes.

Of several orders the one with the lowest simulated live peak is chosen: the traced order; the traced order with kernels
that only allocate moved to just before their first reader; that order with weight updates as soon as their gradient is
computed, so that gradients do not accumulate; and with kernels that free at least what they allocate run immediately.
These are SuperNeurons' liveness order (section 3.2) and list scheduling for peak memory. The first of them is
where a search begins (order_search.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from tfswap.analysis.dataflow import PERSISTENT, Dataflow, reached
from tfswap.ir.op_traits import decodes, encodes, reads_metadata_only
from tfswap.plan.schedule import build_schedule
from tfswap.planner.order_search import searched_order
from tfswap.simulator.memory import Memory, simulate_memory

PEAK_TIE = 1.01
"""Peaks within 1% are equal when orders are compared: fragmentation moves them by as much."""

MOST_POSTPONED = 64
POSTPONED_KERNELS = 100_000
"""The most kernels that are postponed, one after the other, and the most kernels of all orders tried for that.
"""

SMALL_BYTES = 1024
"""The most bytes of tensors, like a learning rate, for which the place of a kernel does not matter."""
NEXT_TO_NOTHING = 64
"""A kernel that makes this many times the bytes that it reads may run late, for its inputs are small."""


def rank_orders(flow: Dataflow, cost_s: Sequence[float]) -> list[list[int]]:
    """Distinct orders of the kernels, the one with the lowest live peak first.

    Orders within PEAK_TIE of the lowest count as equal, and the one with the fewest byte-seconds wins: it needs the
    fewest evictions when the limit is below all of them.

    Args:
        cost_s: seconds per node.
    """
    computing_s = [0.0 if i in flow.copying else seconds for i, seconds in enumerate(cost_s)]  # copies overlap
    traced = traced_order(flow)
    demand = demand_order(flow, traced)
    early = early_update_order(flow, demand)
    candidates = [traced, demand, early, greedy_order(flow, demand), greedy_order(flow, early)]
    judged: list[tuple[int, float, int, list[int], Memory]] = []

    def judge(kernels: list[int], memory: Memory) -> None:
        held = sum(b * computing_s[i] for b, i in zip(memory.during_bytes, kernels, strict=True))
        judged.append((memory.peak_bytes, held, len(judged), kernels, memory))

    for order in candidates:
        kernels = _with_waits(flow, [i for i in order if flow.is_kernel[i]])
        if not any(kernels == other for *_, other, _ in judged):
            judge(kernels, _live(flow, kernels))
    *_, kernels, memory = min(judged)
    postponed, memory = postponed_order(flow, kernels, memory)
    if postponed != kernels:
        judge(postponed, memory)
    lowest = min(judged)[0]
    judged.sort(key=lambda j: (j[0] > lowest * PEAK_TIE, *j[1:3]))
    return [kernels for *_, kernels, _ in judged]


def lower_order(flow: Dataflow, kernels: Sequence[int]) -> list[int] | None:
    """The searched order, if its live peak is below that of `kernels` by more than PEAK_TIE.

    It is an order to evict nothing in. Where much leaves memory, another with a higher peak may need fewer evictions.
    """
    found = _with_waits(flow, searched_order(flow, kernels))
    return found if _live(flow, found).peak_bytes * PEAK_TIE < _live(flow, kernels).peak_bytes else None


def _with_waits(flow: Dataflow, kernels: Sequence[int]) -> list[int]:
    """`kernels`, but each wait for the copy of a slice to its home is right after the start of that, which alone it
    depends on. It frees the slice; where there is room for this, planner/home_copies.py postpones it.
    """
    waits = {start: wait for wait, start in flow.commits.items() if not flow.updates[wait]}
    if not waits:
        return list(kernels)
    moved = set(waits.values())
    return [j for i in kernels if i not in moved for j in ((i, waits[i]) if i in waits else (i,))]


def choose_order(flow: Dataflow, cost_s: Sequence[float]) -> list[int]:
    """The first of `rank_orders`."""
    return rank_orders(flow, cost_s)[0]


def traced_order(flow: Dataflow) -> list[int]:
    """All nodes, each as soon as the trace's own numbering and the dependencies allow.

    Kernels that read shapes only, or encode, run immediately: later they would hold the whole tensor for longer.
    """
    return _list_schedule(flow, list(range(len(flow.nodes))), lambda i: _frees_input(flow.nodes[i].op))


def demand_order(flow: Dataflow, base: Sequence[int]) -> list[int]:
    """`base`, but a node that decodes, or reads few bytes made in the step, runs just before its first reader."""

    def allocates_only(i: int) -> bool:
        read = [flow.values[v].nbytes for v in flow.reads[i] if flow.values[v].producer != PERSISTENT]
        return not read or sum(read) * NEXT_TO_NOTHING <= sum(flow.values[v].nbytes for _, v in flow.makes[i])

    lazy = [
        flow.is_kernel[i] and not flow.updates[i] and (allocates_only(i) or decodes(flow.nodes[i].op))
        for i in range(len(flow.nodes))
    ]
    result: list[int] = []
    done = [False] * len(flow.nodes)
    rank = _ranks(base)
    for i in base:
        if not lazy[i]:
            _visit(flow, i, rank, done, result)
    for i in base:
        _visit(flow, i, rank, done, result)
    return result


def _is_small(flow: Dataflow, i: int) -> bool:
    """Whether a node is no kernel, or reads and makes small tensors only."""
    values = (*flow.reads[i], *(v for _, v in flow.makes[i])) if flow.is_kernel[i] else ()
    return all(flow.values[v].nbytes <= SMALL_BYTES for v in values)


def early_update_order(flow: Dataflow, base: Sequence[int]) -> list[int]:
    """`base`, but each write to a variable runs as soon as its last input that others need too is computed."""
    users = flow.users
    fetched = {flow.values[v].producer for v in flow.fetched}
    rank = _ranks(base)
    # The optimizer's arithmetic, element by element or of numbers, and copies of its slots from their homes and back,
    # with the waits for these: only for writes. The kernel before it, which computes the gradient, keeps its place.
    copies = flow.copying | flow.commits.keys()
    optimiser = [False] * len(flow.nodes)
    for i in reversed(base):
        if flow.updates[i]:
            optimiser[i] = True
        elif i not in fetched and users[i] and (flow.forwards[i] or i in copies or _is_small(flow, i)):
            optimiser[i] = all(optimiser[u] or not (flow.is_kernel[u] or users[u]) for u in users[i])
    last = [-1] * len(flow.nodes)  # position in `base` of the last ancestor that is not of the optimizer
    due: dict[int, list[int]] = {}
    for i in base:
        last[i] = max((last[d] if optimiser[d] else rank[d] for d in flow.deps[i]), default=-1)
        if flow.updates[i]:
            due.setdefault(last[i], []).append(i)
    result: list[int] = []
    done = [False] * len(flow.nodes)
    for i in base:
        _visit(flow, i, rank, done, result)
        for write in due.get(rank[i], ()):
            _visit(flow, write, rank, done, result)
    return result


def greedy_order(flow: Dataflow, base: Sequence[int]) -> list[int]:
    """`base`, but a ready kernel that frees at least what it allocates runs immediately.

    So does a kernel that was ready before, such as a comparison that only the backward pass reads, as soon as it is the
    last reader of a tensor larger than its result.
    """
    unread: list[set[int]] = [set() for _ in flow.values]  # by value, those that have yet to read it
    for i, reads in enumerate(flow.reads):
        for v in reads:
            unread[v].add(i)

    def freed(i: int) -> int:
        """Bytes, less those that it allocates."""
        last = {v for v in flow.reads[i] if unread[v] == {i}} - flow.fetched
        read = sum(flow.values[v].nbytes for v in last if flow.values[v].producer != PERSISTENT)
        return read - sum(flow.values[v].nbytes for _, v in flow.makes[i])

    def shrinks(i: int) -> bool:
        return not flow.is_kernel[i] or _frees_input(flow.nodes[i].op) or freed(i) >= 0

    def ran(i: int) -> list[int]:
        for v in flow.reads[i]:
            unread[v].discard(i)
        last = {r for v in flow.reads[i] if len(unread[v]) == 1 for r in unread[v]}
        return [r for r in last if freed(r) > 0]

    return _list_schedule(flow, base, shrinks, ran)


def postponed_order(flow: Dataflow, kernels: Sequence[int], memory: Memory) -> tuple[list[int], Memory]:
    """`kernels`, but the kernel at the peak and its successors come later where that lowers the peak.

    An example is the gradient of a large weight: its kernel has the largest working set, and only the weight's update
    waits for it, while other kernels free feature maps meanwhile. Of two such branches the one with the lower peak runs
    first (Liu, An application of generalized tree pebbling, 1987, section 2), which is found by trying.

    Args:
        memory: the live memory of `kernels`.

    Returns the order, and its memory.
    """
    best = list(kernels)
    for _ in range(max(1, min(MOST_POSTPONED, POSTPONED_KERNELS // len(best))) if best else 0):
        during = memory.during_bytes
        peak = max(range(len(best)), key=during.__getitem__)
        behind = {best[peak], *reached(best[peak], flow.users)}
        rest = [place for place in range(peak, len(best)) if best[place] not in behind]
        if not rest:
            break
        after = [*memory.before_bytes[1:], memory.before_bytes[-1]]
        until = min(rest, key=after.__getitem__) + 1  # where the fewest bytes are live
        moved = [i for i in best[peak:until] if i in behind]
        order = [*best[:peak], *(i for i in best[peak:until] if i not in behind), *moved, *best[until:]]
        found = _live(flow, order)
        if found.peak_bytes >= memory.peak_bytes:
            break
        best, memory = order, found
    return best, memory


def _live(flow: Dataflow, kernels: Sequence[int]) -> Memory:
    return simulate_memory(flow, build_schedule(kernels, ()), live=True)


def _frees_input(op: str) -> bool:
    """Whether the op makes a small result of a large tensor, which may then be freed."""
    return reads_metadata_only(op) or encodes(op)


def _ranks(order: Sequence[int]) -> list[int]:
    rank = [0] * len(order)
    for position, i in enumerate(order):
        rank[i] = position
    return rank


def _visit(flow: Dataflow, root: int, rank: list[int], done: list[bool], result: list[int]) -> None:
    """Append `root` after all nodes that it waits for, depth first."""
    if done[root]:
        return
    stack = [root]
    while stack:
        i = stack[-1]
        if done[i]:
            stack.pop()
            continue
        missing = [d for d in flow.deps[i] if not done[d]]
        if missing:
            stack += sorted(missing, key=rank.__getitem__, reverse=True)
        else:
            done[i] = True
            result.append(i)
            stack.pop()


def _list_schedule(
    flow: Dataflow,
    base: Sequence[int],
    urgent: Callable[[int], bool],
    ran: Callable[[int], Iterable[int]] = lambda _: (),
) -> list[int]:
    """Repeatedly the ready node that comes first in `base`; urgent ones first.

    Args:
        urgent: called when a node becomes ready.
        ran: called with each node as it runs; gives those that are urgent from then on.
    """
    rank = _ranks(base)
    waiting = [len(deps) for deps in flow.deps]
    users = flow.users
    ready = [(not urgent(i), rank[i]) for i, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    done = [False] * len(base)
    result: list[int] = []
    while ready:
        i = base[heapq.heappop(ready)[1]]
        if done[i]:
            continue  # it has run as an urgent node
        done[i] = True
        result.append(i)
        for other in ran(i):
            if not waiting[other]:
                heapq.heappush(ready, (False, rank[other]))
        for user in users[i]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (not urgent(user), rank[user]))
    return result
