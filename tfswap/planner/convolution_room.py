"""The bytes that a plan leaves free while each convolution runs, and the algorithms that they allow.

As in SuperNeurons (Wang et al. 2018): the plan comes first, and each convolution then gets the fastest algorithm whose
workspace fits the bytes that are free where it runs. These are the largest chunk that the allocator could return with
no more than the limit in use. Where it would return a larger chunk whole, all of that counts as in use.

Not handled: convolutions in the bodies of loops and conditionals, of which the step sees the whole as one kernel.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from tfswap.analysis.cost import copying_seconds
from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.cudnn_algorithms import Algorithm, algorithms, is_convolution
from tfswap.kernels.hardware import Rates
from tfswap.plan.schedule import HOST_ONLY, CopyTiers, Step
from tfswap.simulator.arena_snapshot import ArenaSnapshot, filled
from tfswap.simulator.bfc_allocator import Arena
from tfswap.simulator.replay import Buffer, Replay
from tfswap.simulator.timing import Timing, simulate_time


class Room(NamedTuple):
    """The bytes in use and free while a convolution runs once.

    Attributes:
        kernel: its index.
        in_use_bytes: bytes in use in the arena.
        free_bytes: bytes that its workspace can have.
    """

    kernel: int
    in_use_bytes: int
    free_bytes: int


Way = tuple[Algorithm, int]


class Need(NamedTuple):
    """The bytes that each algorithm of a convolution needs when it runs once.

    Attributes:
        kernel: its index.
        ways: its algorithms, each with the bytes in use in the arena while it runs. The first has no workspace.
    """

    kernel: int
    ways: tuple[Way, ...]


Seen = TypeVar("Seen", Room, Need)


def rooms(flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot, limit_bytes: int) -> list[Room]:
    """The room of each convolution that `steps` run, in the order in which they end."""
    if not has_convolutions(flow):
        return []
    replay = _Rooms(flow, steps, snapshot, limit_bytes)
    replay.repeat()
    return replay.found


def needs(flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot) -> list[Need]:
    """The needs of each convolution that `steps` run, in the order in which they end. No limit changes them."""
    replay = _Needs(flow, steps, snapshot)
    replay.repeat()
    return replay.found


def has_convolutions(flow: Dataflow) -> bool:
    return any(map(is_convolution, flow.nodes))


class _Watch(Replay, Generic[Seen]):
    """Reads the arena while each convolution runs. Where other kernels run concurrently with it, the moment with
    the least free bytes counts.

    Attributes:
        found: the result for each.
    """

    arena: Arena

    def __init__(self, flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot):
        arena, addresses = filled(flow, snapshot)
        assert isinstance(arena, Arena)
        super().__init__(flow, steps, arena, addresses, snapshot)
        self.found: list[Seen] = []
        self._running: dict[int, Seen | None] = {}

    @abstractmethod
    def combined(self, kernel: int, before: Seen | None) -> Seen:
        """The arena's present state for a kernel, combined with its earlier state `before`."""

    def begin(self, i: int, buffers: dict[int, Buffer], *, may_forward: bool = True) -> list[int]:
        temps = super().begin(i, buffers, may_forward=may_forward)
        if is_convolution(self.flow.nodes[i]):
            self._running[i] = None
        for kernel, before in self._running.items():
            self._running[kernel] = self.combined(kernel, before)
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

    def combined(self, kernel: int, before: Room | None) -> Room:
        in_use, free = self.arena.in_use_bytes, self.arena.room_bytes(self._limit_bytes)
        if before is None:
            return Room(kernel, in_use, free)
        return Room(kernel, max(in_use, before.in_use_bytes), min(free, before.free_bytes))


class _Needs(_Watch[Need]):
    def combined(self, kernel: int, before: Need | None) -> Need:
        found = algorithms(self.flow.nodes[kernel])
        in_use = [self.arena.with_bytes(a.workspace_bytes) for a in found]
        if before is not None:
            in_use = [max(now, then) for now, (_, then) in zip(in_use, before.ways, strict=True)]
        return Need(kernel, tuple(zip(found, in_use, strict=True)))


def fastest(ways: Sequence[Way], limit_bytes: float, rates: Rates) -> Way:
    """The fastest of the ways within a limit; the first where none is."""
    fitting = [way for way in ways if way[1] <= limit_bytes] or ways[:1]
    return min(fitting, key=lambda way: way[0].seconds(rates))


@dataclass(frozen=True)
class Computed:
    """A step whose convolutions have the fastest algorithms that there is room for.

    Attributes:
        timing: the step's, with these algorithms.
        peak_bytes: the most bytes in use while a convolution runs, with its workspace.
        workspace_bytes: the largest workspace.
        algorithms: by name, how many runs of convolutions use the algorithm.
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
    tiers: CopyTiers = HOST_ONLY,
    arrivals: Mapping[int, float] = MappingProxyType({}),
) -> Computed:
    """The time and memory of `steps`, with the fastest algorithm for each convolution that its place has room for.

    All runs of a recomputed convolution are assumed to take as long as the slowest of them.

    Args:
        needed: the needs of `steps`.
        limit_bytes: the most bytes that may be in use.
        cost_s: seconds of each kernel, of convolutions with their fastest algorithms.
        tiers, arrivals: as of `simulate_time`.
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
    return Computed(simulate_time(flow, steps, made_s, rates, tiers, arrivals=arrivals), peak, workspace, names)
