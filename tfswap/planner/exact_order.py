"""The order with the lowest live peak of all, of small steps: dynamic programming over sets of kernels.

What is live after some kernels depends on which have run, not on their order. So a set of kernels, with all that they
depend on, needs to be reached once, with the lowest peak; sets are taken from the lowest peak on (Dijkstra's algorithm,
with the highest of two peaks for their sum). A kernel that leaves no more bytes live than before it, within the peak so
far, runs immediately: whatever runs later holds no more for it (Liu, An application of generalized tree pebbling,
1987).

Not handled: steps in which more sets would be reached than MOST_SETS.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from tfswap.analysis.dataflow import Dataflow
from tfswap.simulator.kernel_replay import KernelReplay, State

MOST_SETS = 100
"""With these the order takes some tens of milliseconds."""
MOST_KERNELS = 100
"""Of steps that are tried. Larger ones hardly ever have so few sets."""


class _Reached(NamedTuple):
    """A set of kernels, and the order in which it was reached."""

    done: int  # a bit per kernel
    order: tuple[int, ...]
    state: State


def lowest_order(
    flow: Dataflow, kernels: Sequence[int], most_sets: int = MOST_SETS, most_kernels: int = MOST_KERNELS
) -> list[int] | None:
    """The order of the kernels with the lowest live peak; None where the step is too large.

    Args:
        kernels: all kernels, in an order. Of kernels that are as good the first in it runs first.
    """
    return None if len(kernels) > most_kernels else _Sets(flow, kernels).lowest(most_sets)


class _Sets:
    """The sets of kernels that orders of one step reach."""

    def __init__(self, flow: Dataflow, kernels: Sequence[int]):
        self._kernels = kernels
        self._replay = KernelReplay(flow, kernels)
        place = {kernel: p for p, kernel in enumerate(kernels)}
        self._needs = [sum(1 << place[j] for j in flow.kernels_before(i)) for i in kernels]
        self._all = (1 << len(kernels)) - 1

    def lowest(self, most_sets: int) -> list[int] | None:
        """The order; None where more than `most_sets` sets would be reached."""
        start = _Reached(0, (), self._replay.saved())
        pending = [(0, 0, 0, start)]  # the peak; larger sets of equal ones first
        seen: set[int] = set()
        number = 0
        while pending:
            peak, _, _, reached = heapq.heappop(pending)
            reached = self._settled(reached, peak)
            if reached.done == self._all:
                return [self._kernels[p] for p in reached.order]
            if reached.done in seen:
                continue
            seen.add(reached.done)
            if len(seen) > most_sets:
                return None
            for place in self._ready(reached.done):
                during, after = self._with(reached, place)
                if after.done not in seen:
                    number += 1
                    heapq.heappush(pending, (max(peak, during), -len(after.order), number, after))
        raise ValueError("kernels that wait for each other")

    def _settled(self, reached: _Reached, peak: int) -> _Reached:
        """With all kernels that cost nothing."""
        found = True
        while found:
            found = False
            for place in self._ready(reached.done):
                during, after = self._with(reached, place)
                if during <= peak and after.state.ledger.in_use_bytes <= reached.state.ledger.in_use_bytes:
                    reached, found = after, True
        return reached

    def _ready(self, done: int) -> list[int]:
        return [p for p, needs in enumerate(self._needs) if not done >> p & 1 and needs & done == needs]

    def _with(self, reached: _Reached, place: int) -> tuple[int, _Reached]:
        """The most bytes while a kernel runs, and the set with it."""
        self._replay.restore(reached.state)
        during = self._replay.run(self._kernels[place])
        return during, _Reached(reached.done | 1 << place, (*reached.order, place), self._replay.state)
