"""The unoptimised step's peak: TensorFlow's executor and its thread pool, replayed without an order.

analysis/executor.py is the executor. TensorFlow lowers loops and conditionals to nodes of the executor: only these hold
their inputs, as long as they need them, and the kernels of their bodies have no order either
(analysis/control_flow.py). Threads race, so the real peak varies from run to run; and the model of kernels' times,
which decides most races, is exact to a factor only. So some runs are replayed, each with other kernel times. The median
of their peaks is the likely peak, and the range is that of ten of them.

Steps with loops are replayed node by node (lowered_peak.py), if they are not too large. Not handled here: concurrent
iterations of one loop (`parallel_iterations`), where one need not wait for all of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_low
from typing import NamedTuple

from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.draws import Draws
from tfswap.analysis.executor import Executor, Program, runs_within
from tfswap.kernels.device import DeviceModel
from tfswap.plan.schedule import RUN, Step
from tfswap.simulator import native_replay
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN, ArenaSnapshot, filled, located
from tfswap.simulator.native_runs import NativeRuns
from tfswap.simulator.record import Record, Recorder, Watched
from tfswap.simulator.replay import BEGIN, FINISH, Buffer, Replay
from tfswap.support import progress

MOST_RUNS = 25
MOST_KERNELS = 200_000
"""Fewer runs of large steps: this many kernels in all, which take the core library a quarter of a second. The peaks of
large steps vary less."""
EVENTS = 8
"""The number of a loop's events that count as one kernel."""
MOST_THREADS = 64
"""The threads of a run in which each ready kernel has a thread: about as many as iterations and branches can use."""
STEPS = 3
"""Steps per run: updates move variables, so that each step finds another arena. The peak is the highest of all
steps.
"""
RANGE_RUNS = 10
"""The range of peaks is the likely one of this number of runs: the highest of more runs is higher."""


class Baseline(NamedTuple):
    """The prediction of the unoptimised step: its peak, and its time.

    Attributes:
        peak_bytes: the likely peak, which a share is of.
        overlapping_bytes: the most that concurrent iterations of loops hold in addition to the peak.
        lowest_bytes, highest_bytes: the range of the peaks of ten runs.
    """

    peak_bytes: int
    seconds: float
    overlapping_bytes: int = 0
    lowest_bytes: int = 0
    highest_bytes: int = 0

    def more(self, nbytes: int) -> Baseline:
        """The same in an arena with this number of bytes more in use."""
        sizes = {name: getattr(self, name) + nbytes for name in ("peak_bytes", "lowest_bytes", "highest_bytes")}
        return self._replace(**sizes)

    def time_ratio(self, seconds: float) -> float:
        """The time of a step over that of the unoptimised one."""
        return round(seconds / self.seconds, 6) if self.seconds else 1.0


def range_of(peaks: Sequence[int]) -> tuple[int, int]:
    """The likely lowest and highest peak of RANGE_RUNS runs, from those of some runs."""
    ordered = sorted(peaks)
    beyond = len(ordered) // (RANGE_RUNS + 1)
    return ordered[beyond], ordered[-1 - beyond]


def simulate_unordered(
    flow: Dataflow, cost_s: Sequence[float], device: DeviceModel, *, snapshot: ArenaSnapshot = NOTHING_KNOWN
) -> list[int]:
    """Peak bytes of each run of the unordered step on an idle `device`. Their median is the likely peak.

    Args:
        cost_s: seconds that each node's kernel takes.
    """
    return _peaks(_Program(flow, cost_s, device), snapshot)


def simulate_delayed(
    flow: Dataflow,
    cost_s: Sequence[float],
    device: DeviceModel,
    *,
    snapshot: ArenaSnapshot = NOTHING_KNOWN,
    overlaps: bool = False,
) -> list[int]:
    """As `simulate_unordered`, on a busy `device`, where threads are delayed.

    Args:
        overlaps: whether the step has independent iterations of loops. Delayed ones overlap more than with the threads
            of `device`, so that one of the runs has a thread free for each kernel that can run.
    """
    program = _Program(flow, cost_s, device)
    program.is_delayed = True
    peaks = _peaks(program, snapshot)
    if overlaps:
        most = sum(flow.is_kernel)
        free = _Program(flow, cost_s, device._replace(inter_op_threads=max(1, min(most, MOST_THREADS))))
        peaks.append(_peak_of(free, snapshot)(0))
    return peaks


def record_baseline(flow: Dataflow, cost_s: Sequence[float], device: DeviceModel, *, snapshot: ArenaSnapshot) -> Record:
    """The run with the median peak of `simulate_unordered`, and of its steps the one with the highest."""
    program = _Program(flow, cost_s, device)
    peaks = _peaks(program, snapshot)
    return _RecordedRun(program, snapshot, Draws(peaks.index(median_low(peaks)))).record()


def _peaks(program: _Program, snapshot: ArenaSnapshot) -> list[int]:
    """The peak of each run, by its random seed."""
    peak_bytes = _peak_of(program, snapshot)
    return [peak_bytes(seed) for seed in progress.over("simulating runs", range(_runs_of(program.flow, STEPS)))]


def _peak_of(program: _Program, snapshot: ArenaSnapshot) -> Callable[[int], int]:
    """Gives the peak of one process by its random seed: an arena, a thread pool, and steps one after another."""
    if native_replay.is_available(snapshot):
        runs = NativeRuns(program, program.flow, snapshot)
        return lambda seed: runs.peak_bytes(seed, STEPS)
    return lambda seed: _peak_bytes(program, snapshot, Draws(seed))


def _runs_of(flow: Dataflow, steps: int) -> int:
    """The number of runs that are replayed, each of `steps` steps."""
    kernels = sum(max(1, len(flow.events[i]) // EVENTS) for i, kernel in enumerate(flow.is_kernel) if kernel)
    return runs_within(min(MOST_RUNS, MOST_KERNELS // (steps * max(1, kernels))))


class _Program(Program):
    """A step's nodes, as the executor sees them."""

    def __init__(self, flow: Dataflow, cost_s: Sequence[float], device: DeviceModel):
        ran = [cost if kernel else 0.0 for cost, kernel in zip(cost_s, flow.is_kernel, strict=True)]
        super().__init__(flow.nodes, ran, device, constants=flow.constants)
        self.flow = flow


class _Order(Executor):
    """The order in which kernels start and end.

    Attributes:
        steps: of the latest run.
    """

    def __init__(self, program: _Program, chance: Draws):
        super().__init__(program, chance)
        self._is_kernel = program.flow.is_kernel
        self.steps: list[Step] = []

    def run(self) -> None:
        self.steps = []
        super().run()

    def begin(self, i: int) -> list[int]:
        if self._is_kernel[i]:
            self.steps.append(Step(BEGIN, i))
        return []

    def finish(self, i: int, temporaries: list[int]) -> None:
        if self._is_kernel[i]:
            self.steps.append(Step(FINISH, i))


def _peak_bytes(program: _Program, snapshot: ArenaSnapshot, chance: Draws) -> int:
    """As of `_peak_of`, in Python."""
    flow, order = program.flow, _Order(program, chance)
    runs: list[list[Step]] = []
    for _ in range(STEPS):
        order.run()
        runs.append(order.steps)
    replay = Replay(flow, runs[0], *filled(flow, snapshot), snapshot)
    _locate(replay, snapshot)
    peak = 0
    for replay.steps in runs:
        replay.repeat()
        peak = max(peak, replay.peak)
    return peak


class _RecordedRun(Executor):
    """A process that is recorded."""

    def __init__(self, program: _Program, snapshot: ArenaSnapshot, chance: Draws):
        super().__init__(program, chance)
        flow = program.flow
        self.flow = flow
        steps = [Step(RUN, i) for i, kernel in enumerate(flow.is_kernel) if kernel]
        self._watched = Watched(flow, steps, snapshot)
        _locate(self._watched, snapshot)
        self._buffers: dict[int, Buffer] = {}
        self._stamped = 0

    def record(self) -> Record:
        """The record of the step with the highest use."""
        best: Recorder | None = None
        for _ in range(STEPS):
            self._watched.take_notes()
            self._watched.now_s, self._stamped = 0.0, 0
            self._buffers = self._watched.start()
            self.run()
            self._watched.end(self._buffers)
            notes = self._watched.notes
            notes.stamp(self._stamped)
            if best is None or max(notes.used) > max(best.used):
                best = notes
        assert best is not None, "there are steps"
        return Record(self.flow, tuple(best.finished()), best.used, best.began_s, best.began_s[-1])

    def begin(self, i: int) -> list[int]:
        return self._watched.begin(i, self._buffers) if self.flow.is_kernel[i] else []

    def finish(self, i: int, temporaries: list[int]) -> None:
        if self.flow.is_kernel[i]:
            self._watched.finish(i, self._buffers, temporaries)

    def start_next(self, thread: int, now: float) -> bool:
        self._watched.now_s = now
        notes = self._watched.notes
        notes.stamp(self._stamped)  # what the kernel released that has just ended
        started = super().start_next(thread, now)
        self._stamped = len(notes.began_s)
        return started


def _locate(replay: Replay, snapshot: ArenaSnapshot) -> None:
    flow = replay.flow
    addresses = located(flow, [replay.persistent[v].address for v in flow.persistent], snapshot)
    for v, address in zip(flow.persistent, addresses, strict=True):
        replay.persistent[v].address = address
