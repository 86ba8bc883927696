"""The lives of a schedule's allocations, as if memory never fragmented: which step makes each, and which frees it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tfswap.analysis.dataflow import Dataflow
from tfswap.plan.schedule import Step
from tfswap.simulator import native_replay
from tfswap.simulator.arena_snapshot import ArenaSnapshot, Ledger, added_bytes, fill
from tfswap.simulator.replay import Replay

BEFORE = -1
"""The step of allocations from before the schedule."""
STAYS = (1 << 63) - 1
"""More than the number of allocations. INT64_MAX in C++."""


@dataclass(frozen=True)
class Lives:
    """One run of a schedule.

    Attributes:
        nbytes: per allocation, its bytes.
        made: per allocation, the step that makes it; BEFORE.
        gone: per allocation, the step that frees it; the number of steps for those that stay.
        made_before_gone: per allocation, how many allocations are made until it is freed.
        during_bytes: per step, the most live bytes while it runs.
        peak_bytes: the most live bytes.
    """

    nbytes: array[int]
    made: array[int]
    gone: array[int]
    made_before_gone: array[int]
    during_bytes: array[int]
    peak_bytes: int

    def held_together(self, numbers: Sequence[int]) -> list[int]:
        """The allocations of one step that are live at their peak."""
        held: list[int] = []
        most, most_bytes = held, 0
        for number in numbers:
            held = [n for n in held if self.made_before_gone[n] > number]
            held.append(number)
            nbytes = sum(self.nbytes[n] for n in held)
            if nbytes > most_bytes:
                most, most_bytes = held, nbytes
        return most


def simulate_lives(flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot) -> Lives:
    """The lives of all allocations of a schedule."""
    if native_replay.is_available(snapshot):
        return Lives(*native_replay.lives(flow, steps, snapshot))
    ledger = _Lives(len(steps))
    snapshot.enter(ledger)
    ledger.replay = Replay(flow, steps, ledger, fill(ledger, added_bytes(flow, snapshot), snapshot), snapshot)
    during = array("q")
    ledger.replay.repeat(array("q"), during)
    return Lives(ledger.nbytes, ledger.made, ledger.gone, ledger.made_before_gone, during, ledger.replay.peak)


class _Lives(Ledger):
    """Notes when each allocation is made and freed."""

    def __init__(self, steps: int):
        super().__init__()
        self.replay: Replay | None = None
        self.nbytes, self.made, self.gone, self.made_before_gone = (array("q") for _ in range(4))
        self._steps = steps

    def allocate(self, size_bytes: int) -> int:
        address = super().allocate(size_bytes)
        if address >= 0:
            self.nbytes.append(size_bytes)
            self.made.append(self._step)
            self.gone.append(self._steps)
            self.made_before_gone.append(STAYS)
        return address

    def free(self, address: int) -> None:
        super().free(address)
        if address >= 0:
            self.gone[address] = self._step
            self.made_before_gone[address] = len(self.nbytes)

    @property
    def _step(self) -> int:
        return BEFORE if self.replay is None else self.replay.step
