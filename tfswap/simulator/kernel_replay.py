"""Replays the kernels of a step one by one, as if memory never fragmented, with states to return to.

Invariant: what is live after some kernels depends on which have run, not on their order.

Not handled: evictions, and kernels that run concurrently; `Replay` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfswap.analysis.dataflow import Dataflow
from tfswap.plan.schedule import build_schedule
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN, Ledger, filled
from tfswap.simulator.replay import Buffer, Replay


class State(NamedTuple):
    """Between two kernels."""

    ledger: Ledger
    buffers: dict[int, Buffer]


class KernelReplay:
    """A step in which each of some kernels runs once.

    Attributes:
        state: before the next kernel.
    """

    def __init__(self, flow: Dataflow, kernels: Sequence[int]):
        ledger, addresses = filled(flow, NOTHING_KNOWN, live=True)
        assert isinstance(ledger, Ledger)
        self._replay = Replay(flow, build_schedule(kernels, ()), ledger, addresses, NOTHING_KNOWN)
        self.state = State(ledger, self._replay.start())

    @property
    def live_bytes(self) -> int:
        """Bytes in use."""
        return self.state.ledger.in_use_bytes

    def run(self, kernel: int) -> int:
        """Run a kernel, and return the most bytes in use while it runs."""
        replay, (ledger, buffers) = self._replay, self.state
        ledger.peak_bytes = ledger.in_use_bytes
        replay.finish(kernel, buffers, replay.begin(kernel, buffers))
        return ledger.peak_bytes

    def saved(self) -> State:
        """A copy of the state."""
        made: dict[int, Buffer] = {}  # by identity: values may share one
        for buffer in self.state.buffers.values():
            if (buffer.refs or buffer.pins) and id(buffer) not in made:
                made[id(buffer)] = Buffer(buffer.address, buffer.refs, buffer.pins)
        buffers = {v: made[id(buffer)] for v, buffer in self.state.buffers.items() if id(buffer) in made}
        return State(self.state.ledger.copy(), buffers)

    def restore(self, state: State) -> None:
        """Return to a state, of which a copy is made."""
        self.state = state
        self.state = self.saved()
        self._replay.arena = self.state.ledger
