"""The least time of a step with variables at home on the host, wherever their copies are placed.

Kernels run one after the other, in a given order. The link copies one tensor at a time in each direction.

- Each variable is copied to the device before its first reader, and its new value back after the kernel that computes
  it. Both are within the step, since readers outside of it find variables at their homes: no copy wraps around the
  step's border. Or it stays on the device throughout the step, and is not copied.
- While a kernel runs, the variables that it reads are on the device, and of others as many as it leaves room for. All
  that the kernels after it read up to some later one are copied between the two. Room is what other tensors and the
  kernel's own memory leave of the limit. When the step starts, the variables that stay are there.
- From the end of a kernel until another one starts, the new values that the kernels between them compute are copied,
  but for as many as the device then has room for. When the step ends, those that stay are there. What waits for new
  values to be at home, as the step's result does, comes after that.
- Swapped tensors are copied as well, in the places where the plan has them.

For each pair of kernels, the bound takes those variables to be on the device for which it is lowest, and then the
latest of all pairs. It is reached where all variables have one size and memory has room for all copies: then the
variables that are read first, and those that are written last, stay. It does not count that variables on their way to
the device and new values share the room.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.alignment import round_up
from tfswap.plan.schedule import AWAIT, IN, KERNELS, LEAD, OUT, RELEASE, RERUN, RUN, Step
from tfswap.simulator.memory import simulate_memory
from tfswap.simulator.record import PlannedRecord


class Read(NamedTuple):
    """A variable at home that kernels read.

    Attributes:
        positions: of these kernels, ascending.
        nbytes: what it has on the device.
    """

    positions: tuple[int, ...]
    nbytes: int


class Written(NamedTuple):
    """A variable at home that gets a new value.

    Attributes:
        position: of the kernel that computes it.
        nbytes: what it has on the device.
    """

    position: int
    nbytes: int


class Moved(NamedTuple):
    """A copy of a swapped tensor. It starts after a kernel has ended, and ends before a later one starts.

    Attributes:
        after, before: the positions of these kernels; -1 for the step's beginning.
        nbytes: what it copies.
    """

    after: int
    before: int
    nbytes: int


class Swaps(NamedTuple):
    """The copies of swapped tensors, by direction."""

    to_device: list[Moved]
    to_host: list[Moved]


NO_SWAPS = Swaps([], [])


class _Copies:
    """The least seconds of the link for some tensors, of which as many as there is room for are not copied."""

    def __init__(self, copy_s: Callable[[int], float], most_room_bytes: int) -> None:
        self._copy_s, self._most_bytes = copy_s, most_room_bytes
        self._total_s, self._saved_s = 0.0, {0: 0.0}  # by bytes that are not copied

    def add(self, nbytes: int) -> None:
        """Add a variable, which may be on the device."""
        seconds = self._copy_s(nbytes)
        self._total_s += seconds
        for kept, saved_s in list(self._saved_s.items()):
            if (more := kept + nbytes) <= self._most_bytes:
                self._saved_s[more] = max(self._saved_s.get(more, 0.0), saved_s + seconds)

    def add_copied(self, nbytes: int) -> None:
        """Add a tensor that is copied in any case."""
        self._total_s += self._copy_s(nbytes)

    def least_seconds(self, room_bytes: int) -> float:
        return self._total_s - max(saved_s for kept, saved_s in self._saved_s.items() if kept <= max(0, room_bytes))


def least_seconds(
    kernels_s: Sequence[float],
    read: Sequence[Read],
    written: Sequence[Written],
    stay_bytes: int,
    copy_s: Callable[[int], float],
    rooms_bytes: Sequence[int] | None = None,
    awaited: Mapping[int, Collection[Written]] = MappingProxyType({}),
    swaps: Swaps = NO_SWAPS,
) -> float:
    """The least seconds of a step with these kernels in this order.

    Args:
        stay_bytes: of variables that may stay on the device throughout.
        copy_s: gives the seconds of a copy.
        rooms_bytes: by kernel, the bytes of variables that may be on the device as it runs; any number without it.
        awaited: by position of a kernel, those of `written` that are at home before it starts.
    """
    rooms = [1 << 62] * len(kernels_s) if rooms_bytes is None else rooms_bytes
    readers: dict[int, list[int]] = {}  # variables, by position
    for variable, (positions, _) in enumerate(read):
        for position in positions:
            readers.setdefault(position, []).append(variable)
    awaited_swaps: dict[int, list[Moved]] = {}
    for moved in swaps.to_device:
        awaited_swaps.setdefault(moved.before, []).append(moved)
    ends: list[float] = []

    def home_s(stores: Collection[Written], before: int, room_bytes: int) -> float:
        released = [moved for moved in swaps.to_host if moved.before <= before]
        return _home_seconds(ends, stores, released, room_bytes, copy_s)

    # After each kernel, up to the present one: the variables that kernels read, but for those that it reads itself.
    windows: list[tuple[float, int, _Copies, set[int]]] = [(0.0, stay_bytes, _Copies(copy_s, stay_bytes), set())]
    for position, seconds in enumerate(kernels_s):
        now = max((ends[-1] if ends else 0.0), home_s(awaited.get(position, ()), -1, stay_bytes))
        now = max(now, home_s([w for w in written if w.position < position], position, rooms[position]))
        for after, (since_s, room_bytes, copies, seen) in enumerate(windows, -1):
            for variable in readers.get(position, ()):
                if variable not in seen:
                    seen.add(variable)
                    copies.add(read[variable].nbytes)
            for moved in awaited_swaps.get(position, ()):
                if moved.after >= after:
                    copies.add_copied(moved.nbytes)
            now = max(now, since_s + copies.least_seconds(room_bytes))
        ends.append(now + seconds)
        own = set(readers.get(position, ()))
        room_bytes = max(0, rooms[position] - sum(read[variable].nbytes for variable in own))
        windows.append((ends[-1], room_bytes, _Copies(copy_s, room_bytes), own))
    return max(ends[-1], home_s(written, len(kernels_s), stay_bytes))


def _home_seconds(
    ends: Sequence[float],
    written: Collection[Written],
    swapped: Collection[Moved],
    room_bytes: int,
    copy_s: Callable[[int], float],
) -> float:
    """The seconds of the step when these tensors are on the host, but for variables that the device has room for."""
    copies, home_s = _Copies(copy_s, max(0, room_bytes)), 0.0
    stores = [(position, nbytes, True) for position, nbytes in written]
    stores += [(max(0, moved.after), moved.nbytes, False) for moved in swapped]
    for position, nbytes, may_stay in sorted(stores, reverse=True):
        (copies.add if may_stay else copies.add_copied)(nbytes)
        home_s = max(home_s, ends[position] + copies.least_seconds(room_bytes))
    return home_s


class Needs(NamedTuple):
    """What a planned step needs in its order of kernels.

    Attributes:
        kernels_s: the seconds of each kernel that is no copy, in order; 0 for one that runs concurrently with the next.
        rerun_s: the part of these seconds in which kernels run again.
        read, written: the variables at home.
        awaited: as of `least_seconds`.
        held_bytes: by kernel, the most live bytes while it runs, without those of variables at home.
        swaps: the plan's.
    """

    kernels_s: list[float]
    rerun_s: float
    read: list[Read]
    written: list[Written]
    awaited: dict[int, list[Written]]
    held_bytes: list[int]
    swaps: Swaps

    def least_seconds(
        self, once_s: float, copy_s: Callable[[int], float], limit_bytes: int, *, moves: bool = False
    ) -> float:
        """The least seconds with the plan's variables at home.

        Args:
            once_s: the seconds of all kernels together, each once.
            moves: whether some of these variables may be on the device instead.
        """
        rooms, scale = [limit_bytes - held for held in self.held_bytes], once_s / self.once_s
        seconds = [scale * each for each in self.kernels_s]
        stay_bytes = max(0, min(rooms)) if moves else 0
        return least_seconds(seconds, self.read, self.written, stay_bytes, copy_s, rooms, self.awaited, self.swaps)

    @property
    def once_s(self) -> float:
        """The seconds of all kernels, each once."""
        return sum(self.kernels_s) - self.rerun_s


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
    copying = flow.copying | flow.commits.keys()
    kernels = [n for n, (kind, subject) in enumerate(steps) if kind in KERNELS and subject not in copying]
    before = list(itertools.accumulate((n in set(kernels) for n in range(len(steps))), initial=0))  # kernels, by step
    loaded = {value: flow.nodes[load].inputs[0].node for load, value in flow.loads.items()}
    place: dict[int, int] = {}  # the position at which a kernel runs first
    read: dict[object, list[int]] = {}
    sizes: dict[object, int] = {}
    awaited: dict[int, list[Written]] = {}
    for position, step in enumerate(kernels):
        kernel = steps[step].subject
        place.setdefault(kernel, position)
        for value in loaded.keys() & set(flow.reads[kernel]):
            read.setdefault(loaded[value], []).append(position)
            sizes[loaded[value]] = round_up(flow.values[value].nbytes)
    last: dict[object, Written] = {}
    for commit, store in flow.commits.items():
        value, handle = flow.values[flow.stores[store]], flow.nodes[commit].inputs[0].node
        copied = Written(place.get(value.producer, 0), round_up(value.nbytes))
        last[handle] = max(copied, last.get(handle, copied))
    for kernel, position in place.items():
        commits = flow.kernels_before(kernel) & flow.commits.keys()
        if commits:
            awaited[position] = [last[handle] for handle in {flow.nodes[c].inputs[0].node: 0 for c in sorted(commits)}]
    state = {*flow.loads.values(), *flow.stores.values()}
    others = [value._replace(nbytes=0) if v in state else value for v, value in enumerate(flow.values)]
    # A new value that takes a temporary's buffer is not held in place of that: it counts as a variable.
    forwards = [tuple(pair for pair in pairs if pair[0] not in state) for pairs in flow.forwards]
    held = simulate_memory(replace(flow, values=others, forwards=forwards), steps, live=True).during_bytes
    kinds = [steps[n].kind for n in kernels]
    seconds = [0.0 if kind == LEAD else cost_s[steps[n].subject] for n, kind in zip(kernels, kinds, strict=True)]
    return Needs(
        seconds,
        sum(each_s for each_s, kind in zip(seconds, kinds, strict=True) if kind == RERUN),
        [Read(tuple(positions), sizes[handle]) for handle, positions in read.items()],
        [*last.values()],
        awaited,
        [held[n] for n in kernels],
        _swaps(flow, steps, before),
    )


def _swaps(flow: Dataflow, steps: Sequence[Step], before: Sequence[int]) -> Swaps:
    """The copies of a schedule's swaps.

    Args:
        before: by step, the number of kernels before it.
    """
    swaps = Swaps([], [])
    started: dict[tuple[str, int], int] = {}
    for n, (kind, subject) in enumerate(steps):
        if kind in (OUT, IN):
            started[kind, subject] = before[n] - 1
            continue
        ended = [(OUT, subject)] if kind == RELEASE else [(IN, subject)] if kind == AWAIT else []
        if kind in KERNELS:
            ended = [(IN, value) for value in flow.reads[subject]]
        for copy in ended:
            if (after := started.pop(copy, None)) is not None:
                moved = Moved(after, before[n], flow.values[copy[1]].nbytes)
                (swaps.to_host if copy[0] == OUT else swaps.to_device).append(moved)
    return swaps
