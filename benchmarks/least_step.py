"""The least time of a step with variables at home on the host, wherever its copies are placed.

Kernels run one after the other, in a given order. The link copies one tensor at a time in each direction.

- Each variable is copied to the device before its first reader, and its new value back after the kernel that computes
  it. Both are within the step, since readers outside of it find variables at their homes: no copy wraps around the
  step's border. Or it stays on the device throughout the step, and is not copied.
- Of the variables that the first k readers need, all but those that stay are copied before the k-th reader starts. The
  kernels from there on come after that.
- From the end of the kernel that computes the k-th new value, that one and all later ones are copied, but for those
  that stay. What waits for new values to be at home, as the step's result does, comes after that.

For each k, the bound takes those variables to stay for which it is lowest, as many as the room allows, and then the
latest of all k. It is reached where all variables have one size and memory has room for all copies: then the variables
that are read first, and those that are written last, stay. It does not count the memory of copies on their way, nor
variables that have to be read again for want of memory: those are the plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.alignment import round_up
from tfswap.plan.schedule import LEAD, RUN, Step, build_schedule
from tfswap.simulator.memory import simulate_memory
from tfswap.simulator.record import PlannedRecord


class Copied(NamedTuple):
    """A variable that is copied.

    Attributes:
        position: of the kernel that reads it first, or computes its new value.
        nbytes: what it has on the device.
    """

    position: int
    nbytes: int


def least_seconds(
    kernels_s: Sequence[float],
    read: Iterable[Copied],
    written: Iterable[Copied],
    room_bytes: int,
    copy_s: Callable[[int], float],
    awaited: Mapping[int, Collection[Copied]] = MappingProxyType({}),
) -> float:
    """The least seconds of a step with these kernels in this order.

    Args:
        room_bytes: of variables that may stay on the device.
        copy_s: gives the seconds of a copy.
        awaited: by position of a kernel, those of `written` that are at home before it starts.
    """
    loads = sorted(read)
    before_s = dict(zip((load.position for load in loads), _least_copies(loads, room_bytes, copy_s), strict=True))
    ends: list[float] = []

    def home_s(copies: Iterable[Copied]) -> float:
        stores = sorted(copies, reverse=True)
        after_s = zip(stores, _least_copies(stores, room_bytes, copy_s), strict=True)
        return max((ends[store.position] + seconds for store, seconds in after_s), default=0.0)

    now = 0.0
    for position, seconds in enumerate(kernels_s):
        now = max(now, before_s.get(position, 0.0), home_s(awaited.get(position, ()))) + seconds
        ends.append(now)
    return max(now, home_s(written))


def _least_copies(copies: Sequence[Copied], room_bytes: int, copy_s: Callable[[int], float]) -> list[float]:
    """By k, the least seconds in which the first k copies are made, without those whose variables stay."""
    found: list[float] = []
    total_s, saved_s = 0.0, {0: 0.0}  # by bytes that stay
    for copy in copies:
        total_s += copy_s(copy.nbytes)
        for nbytes, seconds in list(saved_s.items()):
            if (more := nbytes + copy.nbytes) <= room_bytes:
                saved_s[more] = max(saved_s.get(more, 0.0), seconds + copy_s(copy.nbytes))
        found.append(total_s - max(saved_s.values()))
    return found


class Needs(NamedTuple):
    """What a planned step needs in its order of kernels.

    Attributes:
        kernels_s: the seconds of each kernel that is no copy, in order.
        read, written: the variables at home.
        awaited: as of `least_seconds`.
        held_bytes: the most live bytes without those of variables at home.
    """

    kernels_s: list[float]
    read: list[Copied]
    written: list[Copied]
    awaited: dict[int, list[Copied]]
    held_bytes: int

    def least_seconds(self, kernels_s: float, copy_s: Callable[[int], float], limit_bytes: int = 0) -> float:
        """The least seconds with the plan's variables at home; under a limit, with some of these on the device.

        Args:
            kernels_s: the seconds of all kernels together.
        """
        room_bytes, scale = max(0, limit_bytes - self.held_bytes), kernels_s / sum(self.kernels_s)
        seconds = [scale * each for each in self.kernels_s]
        return least_seconds(seconds, self.read, self.written, room_bytes, copy_s, self.awaited)


def needs_of_planned(function: Any) -> Needs:
    """What the step of a `tfswap.optimize`d function needs, after a call."""
    record: PlannedRecord = function.report()._timeline().planned
    cost_s = [0.0] * len(record.flow.nodes)
    for step, span in zip(record.steps, record.spans, strict=True):
        if step.kind in (RUN, LEAD):
            cost_s[step.subject] = span.end_s - span.start_s
    return needs_of(record.flow, record.steps, cost_s)


def needs_of(flow: Dataflow, steps: Sequence[Step], cost_s: Sequence[float]) -> Needs:
    """What a planned step needs. Not handled: updates in slices."""
    order = [subject for kind, subject in steps if kind in (RUN, LEAD)]
    kernels = [i for i in order if i not in flow.copying and i not in flow.commits]
    place = {kernel: position for position, kernel in enumerate(kernels)}
    loaded = {value: flow.nodes[load].inputs[0].node for load, value in flow.loads.items()}
    first: dict[object, Copied] = {}
    for position, kernel in enumerate(kernels):
        for value in loaded.keys() & set(flow.reads[kernel]):
            first.setdefault(loaded[value], Copied(position, round_up(flow.values[value].nbytes)))
    last: dict[object, Copied] = {}
    for commit, store in flow.commits.items():
        value, handle = flow.values[flow.stores[store]], flow.nodes[commit].inputs[0].node
        copied = Copied(place.get(value.producer, 0), round_up(value.nbytes))
        last[handle] = max(copied, last.get(handle, copied))
    awaited: dict[int, list[Copied]] = {}
    for position, kernel in enumerate(kernels):
        commits = flow.kernels_before(kernel) & flow.commits.keys()
        if commits:
            awaited[position] = [last[handle] for handle in {flow.nodes[c].inputs[0].node: 0 for c in sorted(commits)}]
    state = {*flow.loads.values(), *flow.stores.values()}
    others = [value._replace(nbytes=0) if v in state else value for v, value in enumerate(flow.values)]
    held = simulate_memory(replace(flow, values=others), build_schedule(order, ()), live=True)
    return Needs([cost_s[i] for i in kernels], [*first.values()], [*last.values()], awaited, held.peak_bytes)
