"""Which requests of a schedule get a chunk of their own size where the allocator would give them a larger one.

The allocator gives a free chunk of less than twice the bytes asked for whole. What is too much of it counts for as long
as the tensor lives, and a step's peak lies some per cent above its live bytes for that alone, how many being close to
chance. Before the kernel makes its request, such a chunk can be parted (`SPLIT` in a schedule), so that it fits.

Which requests these are depends on what is live alone: a plan with splits peaks much the same in any arena.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

from tfswap.analysis.dataflow import Dataflow
from tfswap.planner.plan import Split
from tfswap.planner.schedule import LEAD, Step
from tfswap.planner.simulate import Ledger, Replay, Resident, added_bytes, fill

LEAST_SHARES = (1 / 64, 1 / 256, 1 / 1024)
"""Of the live peak: for smaller requests it is not worth two more ops. What is best is close to chance."""
NEAR_PEAK = 0.8
"""Of the live peak: where less is live, what chunks are too large by does not matter."""


def choose_splits(flow: Dataflow, steps: Sequence[Step], resident: Resident) -> tuple[int, tuple[Split, ...]]:
    """Splits for a schedule that has none: for the largest request of each step near whose tensor the peak is.

    Returns the schedule's live peak in bytes, and the splits; not all of them need be used.
    """
    ledger = _Lives()
    resident.enter(ledger)
    replay = Replay(flow, steps, ledger, fill(ledger, added_bytes(flow, resident), resident))
    ledger.replay = replay
    during = array("q")
    replay.repeat(array("q"), during)
    near = [0, *accumulate(nbytes >= NEAR_PEAK * replay.peak for nbytes in during)]
    found: dict[int, int] = {}
    for nbytes, made, gone in zip(ledger.nbytes, ledger.made, ledger.gone, strict=True):
        end = len(steps) if gone is None else gone
        matters = (
            nbytes >= min(LEAST_SHARES) * replay.peak and made >= 0 and near[min(end + 1, len(steps))] > near[made]
        )
        if matters and LEAD not in (steps[made].kind, steps[made - 1].kind):
            found[made] = max(nbytes, found.get(made, 0))
    return replay.peak, tuple(Split(step, nbytes) for step, nbytes in sorted(found.items()))


class _Lives(Ledger):
    """Notes, per allocation, its bytes, the step that made it (-1 before the first) and the one that let it go."""

    replay: Replay | None = None

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []
        self.made: list[int] = []
        self.gone: list[int | None] = []

    @property
    def step(self) -> int:
        return -1 if self.replay is None else self.replay.step

    def allocate(self, size_bytes: int) -> int:
        address = super().allocate(size_bytes)
        if address >= 0:
            self.nbytes.append(size_bytes)
            self.made.append(self.step)
            self.gone.append(None)
        return address

    def free(self, address: int) -> None:
        super().free(address)
        if address >= 0:
            self.gone[address] = self.step
