"""A schedule: the one total order in which a planned step's kernels and copies start.

It is what a plan says, what the simulator judges and what the passes turn into nodes and control edges. The
swap contract is split in two at each end, so that every allocation and release has its place in the order:

    RUN n        kernel n runs
    LEAD n       kernel n starts, and the next kernel as soon as this one has its output's buffer; they end together
    RERUN n      kernel n runs again: what it makes is there anew, and reads after this see that
    OUT v        the copy of value v to host memory starts; the copy holds v's buffer
    RELEASE v    waits until that copy has ended, then releases the buffer
    IN v         allocates a fresh buffer and starts the copy back
    AWAIT v      waits until that copy has ended; reads of v after this see the fresh buffer
    SPLIT n      parts, until the next other step has ended, the chunk that a request of n bytes would be given whole
                 although it is larger, so that it fits; one for each of that step's large requests. With -n the end of
                 the largest free chunk, for one request of n bytes
    EXACT 0      the first step: until the last one has ended, each request gets a chunk of its own size
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from tfswap.analysis.dataflow import Dataflow
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
"""What has a kernel for its subject."""
COPIES = frozenset({OUT, RELEASE, IN, AWAIT})
"""What has a value for its subject."""


class Step(NamedTuple):
    """`subject` is a node's index for KERNELS, a value's for COPIES, bytes for SPLIT, negative for a chunk's end."""

    kind: str
    subject: int


class Interval(NamedTuple):
    """One stay of a value in host memory, as positions in the order of kernels.

    The buffer is released before the kernel at `release` and allocated again before the one at `back`; the
    kernel at `use` is the first to read it again. The copy out starts after the kernel at `out` (only a
    value's first eviction has one; later ones, with `out` None, find their copy in host memory already). The kernel
    that reads it last before may be the one at `release` itself, which then can take the buffer over.
    All stays of a value are in the same tier: host memory or, with `disk`, the disk.
    """

    value: int
    out: int | None
    release: int
    back: int
    use: int
    disk: bool = False


def on_disk(evictions: Iterable[Interval]) -> frozenset[int]:
    """The values that go to disk."""
    return frozenset(a.value for a in evictions if a.disk)


def build_schedule(
    order: Sequence[int],
    evictions: Sequence[Interval],
    paired: Collection[int] = frozenset(),
    splits: Sequence[Split] = (),
    exact_chunks: bool = False,
) -> list[Step]:
    """The schedule that runs the kernels in `order` and moves values as `evictions` say.

    A kernel that `order` names again runs again. Copies that start at one position start in the order of their
    deadlines.

    Args:
        paired: positions whose kernels run concurrently with the one before them. Nothing happens between the two: what
            would be released or copied out there is so after both, and what would come back comes back before both.
        splits: of steps of the schedule without them, by rising number, in the order of their requests.
        exact_chunks: whether each request gets a chunk of its own size; then there are no splits.
    """
    before: dict[int, list[tuple[int, int, int, Step]]] = {}

    def put(position: int, rank: int, deadline: int, kind: str, value: int) -> None:
        if position in paired:
            position += 1 if kind in (OUT, RELEASE) else -1
        before.setdefault(position, []).append((rank, deadline, value, Step(kind, value)))

    for a in evictions:
        if a.out is not None:
            put(a.out + 1, 0, a.release, OUT, a.value)
            put(a.release, 1, a.use, RELEASE, a.value)
        put(a.back, 2, a.use, IN, a.value)
        put(a.use, 3, a.use, AWAIT, a.value)
    steps: list[Step] = []
    done = 0
    runs = _runs(order)
    for position in paired:
        runs[position - 1] = Step(LEAD, order[position - 1])
    for position in sorted(before):
        steps += runs[done:position]
        steps += [entry[3] for entry in sorted(before[position])]
        done = position
    steps += runs[done:]
    for split in reversed(splits):
        steps.insert(split.step, Step(SPLIT, -split.nbytes if split.at_end else split.nbytes))
    return [Step(EXACT, 0), *steps] if exact_chunks else steps


def at_extremes(flow: Dataflow, steps: Sequence[Step]) -> Iterator[tuple[Dataflow, Sequence[Step]]]:
    """All extremes of what is known only by a bound: facts, and `steps`, of `flow`, as a schedule of theirs.

    Where a loop takes now this branch and now that, each leaves holes that another's tensors need not fit: so each
    course is an extreme too. In exact chunks holes do not count: what holds most at each point peaks highest.
    """
    if is_exact(steps):
        yield from _renumbered(flow, steps, () if flow.covering is None else (flow.covering,)) or ((flow, steps),)
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
    """Other facts of the same step, whose values have numbers of their own, and `steps` as a schedule of theirs."""
    found: list[tuple[Dataflow, Sequence[Step]]] = []
    for other in others:
        number = {s.subject: other.value_named[flow.values[s.subject].tensor.name] for s in steps if s.kind in COPIES}
        found.append((other, [s._replace(subject=number[s.subject]) if s.kind in COPIES else s for s in steps]))
    return found


def planned_schedule(flow: Dataflow, plan: Plan | Inside) -> list[Step]:
    """The schedule of a plan that was made for the step, or the body, with these facts."""
    order = [flow.place[name] for name in plan.order]
    evictions = [Interval(flow.value_named[a.tensor], a.out, a.release, a.back, a.use, a.disk) for a in plan.evictions]
    return build_schedule(order, evictions, plan.paired, plan.splits, plan.exact_chunks)


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
