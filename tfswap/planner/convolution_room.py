"""What a plan leaves free at each convolution's place in its schedule, and what that buys.

As SuperNeurons does it (Wang et al. 2018): memory comes first, and each convolution then gets the fastest algorithm
whose workspace fits the bytes that are free where it runs. What is free is what the allocator could still hand out, in
one piece, with no more than the limit in use; a chunk that it would give whole counts whole.

Not handled: convolutions in the bodies of loops and conditionals, of which the step sees the whole as one kernel.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from tfswap.analysis.cost import copying_seconds
from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.cudnn_algorithms import Algorithm, algorithms, is_convolution
from tfswap.kernels.hardware import Rates
from tfswap.plan.schedule import Step
from tfswap.simulator.arena_snapshot import ArenaSnapshot, filled
from tfswap.simulator.bfc_allocator import Arena
from tfswap.simulator.replay import Buffer, Replay
from tfswap.simulator.timing import Timing, simulate_time


class Room(NamedTuple):
    """Of one run of a convolution.

    Attributes:
        kernel: which.
        in_use_bytes: of the arena while it runs.
        free_bytes: what it can have besides.
    """

    kernel: int
    in_use_bytes: int
    free_bytes: int


Way = tuple[Algorithm, int]


class Need(NamedTuple):
    """Of one run of a convolution.

    Attributes:
        kernel: which.
        ways: its algorithms, the first without a workspace; each with what is in use of the arena while it runs so.
    """

    kernel: int
    ways: tuple[Way, ...]


Seen = TypeVar("Seen", Room, Need)


def rooms(flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot, limit_bytes: int) -> list[Room]:
    """Of each convolution that `steps` run, in order of their ends."""
    if not has_convolutions(flow):
        return []
    replay = _Rooms(flow, steps, snapshot, limit_bytes)
    replay.repeat()
    return replay.found


def needs(flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot) -> list[Need]:
    """Of each convolution that `steps` run, in order of their ends, whatever the limit."""
    replay = _Needs(flow, steps, snapshot)
    replay.repeat()
    return replay.found


def has_convolutions(flow: Dataflow) -> bool:
    return any(map(is_convolution, flow.nodes))


class _Watch(Replay, Generic[Seen]):
    """Looks at the arena while convolutions run, and at its least free moment where another kernel runs concurrently
    with one.

    Attributes:
        found: what was seen of each.
    """

    arena: Arena

    def __init__(self, flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot):
        arena, addresses = filled(flow, snapshot)
        assert isinstance(arena, Arena)
        super().__init__(flow, steps, arena, addresses, snapshot)
        self.found: list[Seen] = []
        self._running: dict[int, Seen | None] = {}

    @abstractmethod
    def look(self, kernel: int, before: Seen | None) -> Seen:
        """What there is for a kernel now, if that is less than `before`."""

    def begin(self, i: int, buffers: dict[int, Buffer], *, takes_over: bool = True) -> list[int]:
        temps = super().begin(i, buffers, takes_over=takes_over)
        if is_convolution(self.flow.nodes[i]):
            self._running[i] = None
        for kernel, before in self._running.items():
            self._running[kernel] = self.look(kernel, before)
        return temps

    def finish(self, i: int, buffers: dict[int, Buffer], temps: list[int]) -> None:
        seen = self._running.pop(i, None)
        if seen is not None:
            self.found.append(seen)
        super().finish(i, buffers, temps)


class _Rooms(_Watch[Room]):
    def __init__(self, flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot, limit_bytes: int):
        super().__init__(flow, steps, snapshot)
        self._limit_bytes = limit_bytes

    def look(self, kernel: int, before: Room | None) -> Room:
        in_use, free = self.arena.in_use_bytes, self.arena.room_bytes(self._limit_bytes)
        if before is None:
            return Room(kernel, in_use, free)
        return Room(kernel, max(in_use, before.in_use_bytes), min(free, before.free_bytes))


class _Needs(_Watch[Need]):
    def look(self, kernel: int, before: Need | None) -> Need:
        found = algorithms(self.flow.nodes[kernel])
        in_use = [self.arena.with_bytes(a.workspace_bytes) for a in found]
        if before is not None:
            in_use = [max(now, then) for now, (_, then) in zip(in_use, before.ways, strict=True)]
        return Need(kernel, tuple(zip(found, in_use, strict=True)))


def fastest(ways: Sequence[Way], limit_bytes: float, rates: Rates) -> Way:
    """Of those with which no more is in use; the first where that can't be."""
    fitting = [way for way in ways if way[1] <= limit_bytes] or ways[:1]
    return min(fitting, key=lambda way: way[0].seconds(rates))


@dataclass(frozen=True)
class Computed:
    """A step whose convolutions have the fastest algorithms that there is room for.

    Attributes:
        timing: of the step so.
        peak_bytes: the most in use with the workspaces; of convolutions alone.
        workspace_bytes: the largest.
        algorithms: how many of the convolutions' runs have which.
    """

    timing: Timing
    peak_bytes: int
    workspace_bytes: int
    algorithms: Counter[str]


def computed(
    flow: Dataflow,
    steps: Sequence[Step],
    needed: Sequence[Need],
    limit_bytes: float,
    cost_s: Sequence[float],
    rates: Rates,
    disk: Collection[int] = (),
) -> Computed:
    """What `steps` take where each convolution has the algorithm that its place has room for.

    A convolution that runs again takes as long each time as where it has least room.

    Args:
        needed: of `steps`.
        limit_bytes: the most that may be in use.
        cost_s: seconds of kernels, of convolutions with their fastest algorithms.
    """
    slower: dict[int, float] = {}
    peak = workspace = 0
    names: Counter[str] = Counter()
    for kernel, ways in needed:
        if not ways:
            continue
        chosen, in_use = fastest(ways, limit_bytes, rates)
        times = chosen.seconds(rates) / min(algorithm.seconds(rates) for algorithm, _ in ways)
        slower[kernel] = max(times, slower.get(kernel, 1.0))
        names[chosen.name] += 1
        workspace = max(workspace, chosen.workspace_bytes)
        peak = max(peak, in_use)
    made_s = list(cost_s)
    for kernel, times in slower.items():
        fixed_s = rates.launch_s + copying_seconds(flow.nodes[kernel], rates)
        made_s[kernel] = fixed_s + (made_s[kernel] - fixed_s) * times
    return Computed(simulate_time(flow, steps, made_s, rates, disk), peak, workspace, names)
