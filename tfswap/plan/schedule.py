"""A schedule: the total order in which a planned step's kernels and copies start.

A plan determines it, the simulator replays it, and the passes turn it into nodes and control edges. Each copy has a
start and a wait, so that every allocation and release has its place in the order:

    RUN n        kernel n runs
    LEAD n       kernel n starts, and the next kernel starts once this one has its output's buffer; they end together
    RERUN n      kernel n recomputes its outputs in new buffers, which later kernels read
    OUT v        the copy of value v to host memory starts; the copy holds v's buffer
    RELEASE v    waits until that copy has ended, then releases the buffer
    IN v         allocates a new buffer and starts the copy back
    AWAIT v      waits until that copy has ended; later kernels read the new buffer
    SPLIT n      splits the chunk that a request of n bytes in the next other step would get whole, so that it gets n
                 bytes; the rest is held until that step has ended. One for each large request of that step. With -n
                 the chunk is the end of the largest free one, and the step has no other SPLIT
    EXACT 0      the first step: until the last one has ended, each request gets a chunk of its own size
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.hardware import DISK, LENT
from tfswap.plan.plan import Inside, Plan, Split

RUN = "run"
LEAD = "lead"
RERUN = "rerun"
OUT = "swap_out"
RELEASE = "release"
IN = "swap_in"
AWAIT = "await"
SPLIT = "split"
EXACT = "exact"

KERNELS = frozenset({RUN, LEAD, RERUN})
"""Kinds of steps whose subject is a kernel."""
COPIES = frozenset({OUT, RELEASE, IN, AWAIT})
"""Kinds of steps whose subject is a value."""

CopyTiers = Mapping[int, int]
"""The tier of each value that is swapped and not to host memory."""

HOST_ONLY: CopyTiers = MappingProxyType({})


class Step(NamedTuple):
    """One step of a schedule.

    Attributes:
        kind: RUN, LEAD, RERUN, OUT, RELEASE, IN, AWAIT, SPLIT or EXACT.
        subject: a node's index for KERNELS, a value's index for COPIES, bytes for SPLIT (negative for a chunk's end).
    """

    kind: str
    subject: int


class Interval(NamedTuple):
    """One eviction of a value by a swap, as positions in the order of kernels.

    Attributes:
        value: the value's index.
        out: the kernel after which the copy out starts. None: an earlier eviction has made the copy.
        release: the kernel before which the buffer is released. If that kernel is the last reader, the buffer is
            forwarded to it.
        back: the kernel before which a new buffer is allocated and the copy back starts.
        use: the first kernel that reads the new buffer.
        disk: whether the copy is on disk, and not in host memory. The same for all evictions of a value.
        lent: where the copy is in the memory that another device lends, in bytes from its start, the same for all
            evictions of a value. None: it is not there.
    """

    value: int
    out: int | None
    release: int
    back: int
    use: int
    disk: bool = False
    lent: int | None = None


def tiers_of(evictions: Iterable[Interval]) -> CopyTiers:
    """The tiers of the values that do not go to host memory."""
    return {a.value: DISK if a.disk else LENT for a in evictions if a.disk or a.lent is not None}


def build_schedule(
    order: Sequence[int],
    evictions: Sequence[Interval],
    paired: Collection[int] = frozenset(),
    splits: Sequence[Split] = (),
    exact_chunks: bool = False,
) -> list[Step]:
    """The schedule with kernels in `order` and swaps as in `evictions`.

    A repeated kernel in `order` is recomputed. Copies that start at one position start in the order of their deadlines.

    Args:
        paired: positions whose kernels run concurrently with the one before them. No step comes between the two:
            copies out and releases move after both, copies back before both.
        splits: chunk splits. Their steps count in the schedule without splits, and rise.
        exact_chunks: whether each request gets a chunk of its own size; then there are no splits.
    """
    copies: list[tuple[int, int, int, int, str]] = []  # position, rank, deadline, value, kind
    for a in evictions:
        if a.out is not None:
            copies.append((a.out + 1, 0, a.release, a.value, OUT))
            copies.append((a.release, 1, a.use, a.value, RELEASE))
        copies.append((a.back, 2, a.use, a.value, IN))
        copies.append((a.use, 3, a.use, a.value, AWAIT))
    if paired:
        taken = frozenset(paired)
        copies = [
            (position + (1 if kind in (OUT, RELEASE) else -1), rank, deadline, value, kind)
            if position in taken
            else (position, rank, deadline, value, kind)
            for position, rank, deadline, value, kind in copies
        ]
    steps: list[Step] = []
    done = 0
    runs = _runs(order)
    for position in paired:
        runs[position - 1] = Step(LEAD, order[position - 1])
    for position, _, _, value, kind in sorted(copies):
        if position > done:
            steps += runs[done:position]
            done = position
        steps.append(Step(kind, value))
    steps += runs[done:]
    for split in reversed(splits):
        steps.insert(split.step, Step(SPLIT, -split.nbytes if split.at_end else split.nbytes))
    return [Step(EXACT, 0), *steps] if exact_chunks else steps


def at_extremes(flow: Dataflow, steps: Sequence[Step]) -> Iterator[tuple[Dataflow, Sequence[Step]]]:
    """The extreme cases of facts that are known only by bounds, each with `steps` as a schedule of it.

    Each course of loops and conditionals is an extreme case: branches leave holes of different sizes in the arena. With
    exact chunks there are no such holes, and facts that hold the most at each point cover all courses. `flow` itself
    has the branch that leaves most, which need not be the one that holds most later.
    """
    if is_exact(steps):
        yield from _renumbered(flow, steps, () if flow.covering is None else (flow.covering,)) or ((flow, steps),)
        if flow.covering is None:
            yield from _renumbered(flow, steps, flow.courses)
        return
    yield from ((extreme, steps) for extreme in flow.extremes)
    for other, its in _renumbered(flow, steps, flow.others):
        yield from ((extreme, its) for extreme in other.extremes)


def is_exact(steps: Sequence[Step]) -> bool:
    """Whether each request of a schedule gets a chunk of its own size."""
    return bool(steps) and steps[0].kind == EXACT


def _renumbered(
    flow: Dataflow, steps: Sequence[Step], others: Sequence[Dataflow]
) -> list[tuple[Dataflow, Sequence[Step]]]:
    """Other facts of the same step, each with `steps` in its own numbers of values."""
    found: list[tuple[Dataflow, Sequence[Step]]] = []
    for other in others:
        number = {s.subject: other.value_named[flow.values[s.subject].tensor.name] for s in steps if s.kind in COPIES}
        found.append((other, [s._replace(subject=number[s.subject]) if s.kind in COPIES else s for s in steps]))
    return found


def planned_schedule(flow: Dataflow, plan: Plan | Inside) -> list[Step]:
    """The schedule of a plan for the step, or the body, with these facts."""
    return build_schedule(*planned_choice(flow, plan), plan.paired, plan.splits, plan.exact_chunks)


def planned_choice(flow: Dataflow, plan: Plan | Inside) -> tuple[list[int], list[Interval]]:
    """The order and the evictions of a plan for the step, or the body, with these facts."""
    order = [flow.place[name] for name in plan.order]
    evictions = [
        Interval(flow.value_named[a.tensor], a.out, a.release, a.back, a.use, a.disk, a.lent) for a in plan.evictions
    ]
    return order, evictions


def _runs(order: Sequence[int]) -> list[Step]:
    if len(set(order)) == len(order):
        return list(map(_first, order))
    ran: set[int] = set()
    runs: list[Step] = []
    for node in order:
        runs.append(_again(node) if node in ran else _first(node))
        ran.add(node)
    return runs


@cache
def _first(node: int) -> Step:
    return Step(RUN, node)


@cache
def _again(node: int) -> Step:
    return Step(RERUN, node)
