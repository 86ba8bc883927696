"""The unoptimised step's peak: TensorFlow's executor and its thread pool, replayed without an order.

Follows tensorflow/core/common_runtime/executor.cc (ProcessInline, ScheduleReady), graph/edgeset.h and Eigen's
NonBlockingThreadPool.h, which decide what runs when:

- A node is ready when its last input is there. The thread that made it ready keeps it if it is cheap; of the
  expensive ones it keeps the last if it has nothing else to do, and puts the others into its queue.
- A kernel is expensive unless its class says otherwise: the measured costs that could make it cheap later start at
  10^8 cycles and lose a tenth a step, so that this takes some ninety steps.
- A thread takes the newest task of its own queue; one without any takes the oldest of another's. A thread that has
  slept must be woken first, so that many small kernels have run on the other before it comes.
- The nodes that wait for one node come in the order in which they were made, up to eight; more are kept in a hash
  set of pointers, in any order.
- What waits for nothing but the step's start is a task each, at the end of any thread's queue.
- On a GPU no kernel is expensive: one thread starts them all, and goes on while they run.
- Loops and conditionals are lowered to nodes of the executor's own: nobody holds what they are given but they
  themselves, as long as they need it (analysis/bodies.py).

Which thread is first is a race, and the real peak varies from run to run; and the model of the kernels' times, which
decides most races, is true to a factor only. So a few runs are replayed, each with other kernel times, and the
median of their peaks is what is predicted.

Not handled: iterations of one loop that run side by side (`parallel_iterations`), where one need not wait for all of
another.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Sequence
from statistics import median_low
from typing import NamedTuple

from tfswap import progress
from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.device import DeviceModel
from tfswap.ir.ops import runs_inline
from tfswap.planner.allocator import round_up
from tfswap.planner.record import Record, Recorder, Watched
from tfswap.planner.schedule import RUN, Step
from tfswap.planner.simulate import NOTHING_KNOWN, Buffer, Replay, Resident, filled

MOST_RUNS = 25
MOST_KERNELS = 50_000
"""Fewer runs of large steps: this many kernels in all. The peaks of large steps vary less."""
EVENTS = 8
"""Of a loop so many of its dealings with the allocator count as a kernel."""
STEPS = 4
"""Steps per run: updates move variables, so that each step finds another arena. The peak is that of all of them."""
COST_ERROR = 1.5
"""Factor by which the kernels of one type of op may all take less, or more, than their cost says."""
NOISE = 0.1
"""Share by which one kernel may take less, or more, than the last time."""
DISPATCH_S = 5e-7
"""What the executor spends on a node, whatever its kernel does."""
SPIN_S = 200e-6
"""How long an idle thread looks for work before it sleeps: 5000 tries, shared among the threads."""
WAKE_S = 50e-6
"""From the call that wakes a thread until it looks for work."""
ORDERED_EDGES = 8
WOKEN = START = -1


class Baseline(NamedTuple):
    """What is predicted of the unoptimised step: its peak, and its time."""

    peak_bytes: int
    seconds: float

    def time_ratio(self, seconds: float) -> float:
        """The time of a step over that of the unoptimised one."""
        return round(seconds / self.seconds, 6) if self.seconds else 1.0


def simulate_baseline(
    flow: Dataflow,
    cost_s: Sequence[float],
    device: DeviceModel,
    *,
    resident: Resident = NOTHING_KNOWN,
) -> int:
    """Peak bytes that a run of the unordered step on `device` is likely to have.

    Args:
        cost_s: seconds that each node's kernel takes.
    """
    return median_low(_peaks(_Program(flow, cost_s, device), resident))


def record_baseline(flow: Dataflow, cost_s: Sequence[float], device: DeviceModel, *, resident: Resident) -> Record:
    """The run whose peak `simulate_baseline` predicts: of its steps the one that peaks, whatever its kernels cost."""
    program = _Program(flow, cost_s, device)
    peaks = _peaks(program, resident)
    return _RecordedRun(program, resident, random.Random(peaks.index(median_low(peaks)))).record()


def simulate_forwarding(
    flow: Dataflow,
    cost_s: Sequence[float],
    device: DeviceModel,
    kernels: Collection[int],
    own: Collection[int] = (),
    *,
    is_body: bool = False,
) -> dict[int, int | None]:
    """Whose buffer the output of each of `kernels` is most likely to take over in the unordered step on `device`.

    Args:
        cost_s: seconds that each node's kernel takes.
        kernels: by their places in `flow`; each has one output.
        own: values that are there before the step, and that nobody holds who is not in it.
        is_body: the step is the body of a loop or a conditional, which TensorFlow lowers.

    Returns, by kernel, the position of the input; None for a new buffer.
    """
    program = _Program(flow, cost_s, device)
    made = {v: i for i in kernels for _, v in flow.makes[i]}
    found: dict[int, Counter[int | None]] = {i: Counter() for i in kernels}
    for seed in range(_runs_of(flow, steps=1)):
        taken = dict.fromkeys(kernels)
        for v, source in _ForwardingRun(program, NOTHING_KNOWN, random.Random(seed)).forwarded(own, is_body):
            if v in made:
                taken[made[v]] = source
        for i, source in taken.items():
            found[i][_position(flow, i, source)] += 1
    return {i: counts.most_common(1)[0][0] for i, counts in found.items()}


def _position(flow: Dataflow, i: int, value: int | None) -> int | None:
    """Which of a kernel's inputs holds `value`."""
    if value is None:
        return None
    return next(p for p, t in enumerate(flow.nodes[i].inputs) if flow.value_of.get(t) == value)


def _peaks(program: _Program, resident: Resident) -> list[int]:
    """Of each run, by the seed of its chances."""
    seeds = progress.over("simulating runs", range(_runs_of(program.flow, STEPS)))
    return [_Run(program, resident, random.Random(seed)).peak_bytes() for seed in seeds]


def _runs_of(flow: Dataflow, steps: int) -> int:
    """How many runs of so many steps are replayed: an odd number, so that there is a middle one."""
    kernels = sum(max(1, len(flow.events[i]) // EVENTS) for i, kernel in enumerate(flow.is_kernel) if kernel)
    runs = max(1, min(MOST_RUNS, MOST_KERNELS // (steps * max(1, kernels))))
    return runs - (1 - runs % 2)


class _Program:
    """The graph as the executor sees it.

    Attributes:
        seconds: per node, what a thread spends on it.
        cheap: per node, whether the thread that makes it ready keeps it.
        pending: per node, how many edges it waits for; one for a node that waits for nothing but the step's start.
        users: per node, the nodes that wait for it, those behind data edges first; at START, those that wait for none.
        unordered: of nodes with so many users that their order is by chance, (node, users by data, by control).
        ops: per node, its type.
    """

    def __init__(self, flow: Dataflow, cost_s: Sequence[float], device: DeviceModel):
        self.flow = flow
        self.threads = max(1, device.inter_op_threads)
        on_gpu = device.kind == "gpu"
        self.cheap = [on_gpu or runs_inline(node.op) or node in flow.constants for node in flow.nodes]
        self.seconds = [DISPATCH_S] * len(flow.nodes)
        for i, kernel in enumerate(flow.is_kernel):
            if kernel:
                self.seconds[i] += 0.0 if on_gpu else cost_s[i]
        index = {node: i for i, node in enumerate(flow.nodes)}
        data: list[list[int]] = [[] for _ in range(len(flow.nodes) + 1)]
        control: list[list[int]] = [[] for _ in data]
        self.pending = [0] * len(flow.nodes)
        for i, node in enumerate(flow.nodes):
            read = () if node in flow.constants else (t.node for t in node.inputs)  # computed before the step
            for edges, sources in ((data, read), (control, node.controls)):
                before = {index[source] for source in sources}
                self.pending[i] += len(before)
                for source in before:
                    edges[source].append(i)
            if not self.pending[i]:
                self.pending[i] = 1
                control[START].append(i)
        self.users = [d + c for d, c in zip(data, control, strict=True)]
        wide = (i for i, users in enumerate(self.users) if len(users) > ORDERED_EDGES)
        self.unordered = [(i, data[i], control[i]) for i in wide]
        self.ops = [node.op for node in flow.nodes]


class _Run:
    """One process: an arena, a thread pool, and steps one after another."""

    def __init__(self, program: _Program, resident: Resident, chance: random.Random):
        flow = program.flow
        self.program = program
        self.chance = chance
        steps = [Step(RUN, i) for i, kernel in enumerate(flow.is_kernel) if kernel]
        self.replay = self._replay(flow, steps, resident)
        _locate(self.replay, resident)
        self.users = list(program.users)
        for i, data, control in program.unordered:
            self.users[i] = chance.sample(data, len(data)) + chance.sample(control, len(control))
        error = {op: COST_ERROR ** chance.uniform(-1, 1) for op in dict.fromkeys(program.ops)}
        self.seconds = [s * error[op] for s, op in zip(program.seconds, program.ops, strict=True)]
        self.kept: list[deque[int]] = [deque() for _ in range(program.threads)]
        self.queues: list[deque[int]] = [deque() for _ in range(program.threads)]
        self.waiting: list[int] = []
        self.buffers: dict[int, Buffer] = {}
        self.events: list[tuple[float, int, int, list[int]]] = []

    def _replay(self, flow: Dataflow, steps: Sequence[Step], resident: Resident) -> Replay:
        return Replay(flow, steps, *filled(flow, resident))

    def peak_bytes(self) -> int:
        for _ in range(STEPS):
            self._step()
        return self.replay.arena.peak_bytes

    def _step(self) -> None:
        replay, queues, events = self.replay, self.queues, self.events
        is_kernel = self.program.flow.is_kernel
        self.buffers = replay.start()
        self.waiting = list(self.program.pending)
        self._begin()
        now, thread = 0.0, 0
        idle_since = dict.fromkeys(range(1, len(queues)), -math.inf)
        while True:
            if not self._go_on(thread, now):
                idle_since[thread] = now
            while idle_since and any(queues):
                other = next(iter(idle_since))
                if now - idle_since.pop(other) > SPIN_S:
                    heapq.heappush(events, (now + WAKE_S, other, WOKEN, []))
                else:
                    self._go_on(other, now)
            if not events:
                break
            now, thread, i, temporaries = heapq.heappop(events)
            if i != WOKEN:
                if is_kernel[i]:
                    replay.finish(i, self.buffers, temporaries)
                self._hand_on(i, thread)
        replay.end(self.buffers)

    def _begin(self) -> None:
        """The step starts: what waits for nothing else is a task each, for any thread."""
        for i in self.users[START]:
            self.queues[self.chance.randrange(len(self.queues))].append(i)

    def _go_on(self, thread: int, now: float) -> bool:
        """Start the next node that `thread` finds; False when there is none."""
        kept = self.kept[thread]
        i = kept.popleft() if kept else self._take(thread)
        if i is None:
            return False
        temporaries = self.replay.begin(i, self.buffers) if self.program.flow.is_kernel[i] else []
        took = self.seconds[i] * (1 + NOISE * (2 * self.chance.random() - 1))
        heapq.heappush(self.events, (now + took, thread, i, temporaries))
        return True

    def _hand_on(self, done: int, thread: int) -> None:
        """Give each node that the end of `done` makes ready to the thread that did so, or to the pool."""
        waiting, cheap, kept, queue = self.waiting, self.program.cheap, self.kept[thread], self.queues[thread]
        last = -1
        for i in self.users[done]:
            waiting[i] -= 1
            if waiting[i]:
                continue
            if cheap[i]:
                kept.append(i)
                continue
            if last >= 0:
                queue.appendleft(last)
            last = i
        if last >= 0:
            (queue.appendleft if kept else kept.append)(last)

    def _take(self, thread: int) -> int | None:
        """The next node that the pool has for `thread`."""
        if self.queues[thread]:
            return self.queues[thread].popleft()
        count = len(self.queues)
        first = self.chance.randrange(count)
        for k in range(count):
            queue = self.queues[(first + k) % count]
            if queue:
                return queue.pop()
        return None


class _ForwardingRun(_Run):
    """A step, or a body, of which it is noted what takes over whose buffer; where buffers lie does not matter."""

    is_body = False

    def _replay(self, flow: Dataflow, steps: Sequence[Step], resident: Resident) -> Replay:
        return Replay(flow, steps, *filled(flow, resident, live=True))

    def _begin(self) -> None:
        if self.is_body:  # the thread that decides that it runs
            self._hand_on(START, 0)
        else:
            super()._begin()

    def forwarded(self, own: Collection[int], is_body: bool) -> list[tuple[int, int]]:
        """Pairs of a value made and the value whose buffer it has."""
        self.is_body = is_body
        for v in own:
            self.replay.persistent[v].pins = 0
        found: list[tuple[int, int]] = []
        self.replay.forwarded = found
        self._step()
        return found


class _RecordedRun(_Run):
    """A run of which notes are taken."""

    def _replay(self, flow: Dataflow, steps: Sequence[Step], resident: Resident) -> Replay:
        self._watched = Watched(flow, steps, resident)
        self._stamped = 0
        return self._watched

    def record(self) -> Record:
        """Of the step in which the most is in use."""
        best: Recorder | None = None
        for _ in range(STEPS):
            self._watched.take_notes()
            self._watched.now_s, self._stamped = 0.0, 0
            self._step()
            notes = self._watched.notes
            notes.stamp(self._stamped)
            if best is None or max(notes.used) > max(best.used):
                best = notes
        assert best is not None, "there are steps"
        return Record(self.program.flow, tuple(best.finished()), best.used, best.began_s, best.began_s[-1])

    def _go_on(self, thread: int, now: float) -> bool:
        self._watched.now_s = now
        notes = self._watched.notes
        notes.stamp(self._stamped)  # what the kernel let go of that has just ended
        started = super()._go_on(thread, now)
        self._stamped = len(notes.began_s)
        return started


def _locate(replay: Replay, resident: Resident) -> None:
    """Give the values that are there before the step a chunk each: one of their size, in order of address.

    A variable whose buffer is replaced frees the old one. Which of several chunks of one size is whose matters little.
    """
    used = sorted((size, address) for address, size, in_use in resident.chunks if in_use)
    sizes = {v: round_up(replay.flow.values[v].nbytes) for v in replay.persistent}
    for v in sorted(sizes, key=lambda v: (-sizes[v], v)):
        at = bisect_left(used, (sizes[v], 0))
        if replay.persistent[v].address < 0 < sizes[v] and at < len(used) and used[at][0] < 2 * sizes[v]:
            replay.persistent[v].address = used.pop(at)[1]
