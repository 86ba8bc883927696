"""What a plan leaves free at each convolution's place in its schedule, and what that buys.

As SuperNeurons does it (Wang et al. 2018): memory comes first, and each convolution then gets the fastest algorithm
whose workspace fits the bytes that are free where it runs. What is free is what the allocator could still hand out, in
one piece, with no more than the limit in use; a chunk that it would give whole counts whole.

Not handled: convolutions in the bodies of loops and conditionals, of which the step sees the whole as one kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfswap.analysis.convolutions import algorithms, is_convolution, slowdown
from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.devices import Rates
from tfswap.planner.allocator import Arena, round_up
from tfswap.planner.schedule import Step
from tfswap.planner.simulate import Buffer, Replay, Resident, Timing, filled, simulate_time


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


def rooms(flow: Dataflow, steps: Sequence[Step], resident: Resident, limit_bytes: int) -> list[Room]:
    """Of each convolution that `steps` run, in order of their ends."""
    if not any(map(is_convolution, flow.nodes)):
        return []
    arena, addresses = filled(flow, resident)
    assert isinstance(arena, Arena)
    replay = _Rooms(flow, steps, arena, addresses, limit_bytes)
    replay.repeat()
    return replay.found


class _Rooms(Replay):
    """Looks at the arena while convolutions run, and at its least free moment where another kernel runs beside one."""

    arena: Arena

    def __init__(self, flow: Dataflow, steps: Sequence[Step], arena: Arena, addresses: Sequence[int], limit_bytes: int):
        super().__init__(flow, steps, arena, addresses)
        self.found: list[Room] = []
        self._limit_bytes = limit_bytes
        self._running: dict[int, Room] = {}

    def begin(self, i: int, buffers: dict[int, Buffer]) -> list[int]:
        temps = super().begin(i, buffers)
        if is_convolution(self.flow.nodes[i]):
            self._running[i] = Room(i, 0, self._limit_bytes)
        if self._running:
            in_use, free = self.arena.in_use_bytes, self.arena.room_bytes(self._limit_bytes)
            for kernel, room in self._running.items():
                self._running[kernel] = Room(kernel, max(in_use, room.in_use_bytes), min(free, room.free_bytes))
        return temps

    def finish(self, i: int, buffers: dict[int, Buffer], temps: list[int]) -> None:
        if i in self._running:
            self.found.append(self._running.pop(i))
        super().finish(i, buffers, temps)


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
    resident: Resident,
    limit_bytes: int,
    cost_s: Sequence[float],
    rates: Rates,
    disk: Collection[int] = (),
) -> Computed:
    """What `steps` take where each convolution has the algorithm that its place has room for.

    A convolution that runs again takes as long each time as where it has least room.

    Args:
        cost_s: seconds of kernels, of convolutions with their fastest algorithms.
    """
    cost_s, slower = list(cost_s), dict[int, float]()
    peak = workspace = 0
    names: Counter[str] = Counter()
    for room in rooms(flow, steps, resident, limit_bytes):
        found = algorithms(flow.nodes[room.kernel])
        if not found:
            continue
        times, chosen = slowdown(found, room.free_bytes, rates)
        slower[room.kernel] = max(times, slower.get(room.kernel, 1.0))
        names[chosen.name] += 1
        workspace = max(workspace, chosen.workspace_bytes)
        peak = max(peak, room.in_use_bytes + round_up(chosen.workspace_bytes))
    for kernel, times in slower.items():
        cost_s[kernel] = rates.launch_s + (cost_s[kernel] - rates.launch_s) * times
    return Computed(simulate_time(flow, steps, cost_s, rates, disk), peak, workspace, names)
