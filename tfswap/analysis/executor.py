"""A model of TensorFlow's executor and its thread pool: the order in which kernels of an unordered graph start and end.

Follows tensorflow/core/common_runtime/executor.cc (ProcessInline, ScheduleReady), graph/edgeset.h and Eigen's
NonBlockingThreadPool.h:

- A node is ready when its last input is. The thread that made it ready keeps a cheap node. It keeps the last expensive
  node if it has no other work, and puts the others into its queue.
- A kernel is expensive unless its class says otherwise. Measured costs could make it cheap later, but they start at
  10^8 cycles and lose a tenth a step, which takes some ninety steps.
- A thread takes the newest task of its own queue, or the oldest of another queue. A sleeping thread must be woken
  first, and other threads run many small kernels before it starts.
- The users of one node become ready in the order of their creation, up to eight users. More are in a hash set of
  pointers, in any order.
- Nodes without inputs wait for the graph's source, which is the one task of a step's start. So one thread makes them
  ready; those of the body of a loop or a conditional, the thread that has decided to run it.
- On a GPU no kernel is expensive: one thread launches all, and continues while they run.

Threads race: times of kernels vary at random, between runs and between types of ops.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from tfswap.analysis.cost import GRAIN_S
from tfswap.analysis.draws import Draws
from tfswap.ir.graph import Node
from tfswap.ir.op_traits import runs_inline
from tfswap.kernels.device import DeviceModel

COST_ERROR = 1.5
"""The largest factor between the predicted and the actual time of all kernels of one type."""
NOISE = 0.1
"""The largest relative variation of one kernel's time between runs."""
CONTENTION = 2.0
"""The most, as a multiple of its time, that a large kernel takes longer if another runs when it starts, since both
share the cores. Chance decides which gets them first: one convolution's gradient took 60 ms in one step, and 214 ms in
the next."""
DELAYED_SHARE = 0.1
DELAY_S = 3e-3
"""On a busy machine threads lose their core: this share of kernels takes so much longer, a slice of the scheduler."""
DISPATCH_S = 5e-7
"""The executor's time for a node, without its kernel."""
SPIN_S = 200e-6
"""The time that an idle thread searches for work before it sleeps: 5000 tries, shared among the threads."""
WAKE_S = 50e-6
"""The time from the call that wakes a thread until it searches for work."""
ORDERED_EDGES = 8
WOKEN = START = -1

Chance = random.Random | Draws


def runs_within(most: int) -> int:
    """The number of runs to simulate, at most `most` and at least 1: an odd number, so that one has the median peak."""
    return max(1, most - 1 + most % 2)


class Program:
    """The graph in the executor's terms. Lists are indexed by node.

    Attributes:
        seconds: the time that a thread spends on the node.
        cheap: whether the thread that makes the node ready keeps it.
        pending: the number of edges that the node waits for; 1 (the start) for a node without inputs.
        data, control: the nodes that wait for the node by such edges; at START, the nodes without inputs.
        users: both.
        unordered: (node, users by data edges, users by control edges) for nodes whose users have a random order.
        ops: the node's op type.
        is_delayed: whether the machine is busy.
    """

    is_delayed = False

    def __init__(
        self, nodes: Sequence[Node], cost_s: Sequence[float], device: DeviceModel, *, constants: Collection[Node]
    ):
        """
        Args:
            cost_s: the seconds of each node's kernel; 0 for a node without one.
            constants: nodes that are computed before the step: they wait for nothing, and take no time.
        """
        self.threads = max(1, device.inter_op_threads)
        enqueues = device.is_asynchronous
        self.cheap = [enqueues or runs_inline(node.op) or node in constants for node in nodes]
        self.seconds = [DISPATCH_S + (0.0 if enqueues else cost) for cost in cost_s]
        index = {node: i for i, node in enumerate(nodes)}
        data: list[list[int]] = [[] for _ in range(len(nodes) + 1)]
        control: list[list[int]] = [[] for _ in data]
        self.pending = [0] * len(nodes)
        for i, node in enumerate(nodes):
            read = () if node in constants else (t.node for t in node.inputs)  # computed before the step
            for edges, sources in ((data, read), (control, node.controls)):
                before = {index[source] for source in sources}
                self.pending[i] += len(before)
                for source in before:
                    edges[source].append(i)
            if not self.pending[i]:
                self.pending[i] = 1
                control[START].append(i)
        self.data, self.control = data, control
        self.users = [d + c for d, c in zip(data, control, strict=True)]
        wide = (i for i, users in enumerate(self.users) if len(users) > ORDERED_EDGES)
        self.unordered = [(i, data[i], control[i]) for i in wide]
        self.ops = [node.op for node in nodes]


def _error(chance: Chance) -> float:
    """The actual time of a type of kernels over the predicted one: as often above 1 as below it."""
    drawn = 2 * chance.random() - 1
    larger = 1 + (COST_ERROR - 1) * abs(drawn)
    return larger if drawn > 0 else 1 / larger


class Executor:
    """Runs one graph repeatedly on one thread pool.

    Subclasses override `begin_all`, `begin`, `finish`, `start_next`, `ready_after`, `is_cheap` and `cost_of`. The core
    library has the same run of a step without loops (csrc/core/executor_runs.cc).
    """

    def __init__(self, program: Program, chance: Chance):
        self.program = program
        self.chance = chance
        self.users = list(program.users)
        for i, data, control in program.unordered:
            self.users[i] = chance.sample(data, len(data)) + chance.sample(control, len(control))
        error = {op: _error(chance) for op in dict.fromkeys(program.ops)}
        self.seconds = [s * error[op] for s, op in zip(program.seconds, program.ops, strict=True)]
        self.kept: list[deque[int]] = [deque() for _ in range(program.threads)]
        self.queues: list[deque[int]] = [deque() for _ in range(program.threads)]
        self.waiting: list[int] = []
        self.events: list[tuple[float, int, int, list[int]]] = []

    def begin(self, i: int) -> list[int]:
        """Called when node `i` starts. Returns its kernel's temporaries."""
        raise NotImplementedError

    def finish(self, i: int, temporaries: list[int]) -> None:
        """Called when node `i` ends."""
        raise NotImplementedError

    def run(self) -> None:
        """Run all nodes, once each."""
        queues, events = self.queues, self.events
        self.waiting = list(self.program.pending)
        self.begin_all()
        now, thread = 0.0, 0
        idle_since = dict.fromkeys(range(1, len(queues)), -math.inf)
        while True:
            if not self.start_next(thread, now):
                idle_since[thread] = now
            while idle_since and any(queues):
                other = next(iter(idle_since))
                if now - idle_since.pop(other) > SPIN_S:
                    heapq.heappush(events, (now + WAKE_S, other, WOKEN, []))
                else:
                    self.start_next(other, now)
            if not events:
                break
            now, thread, i, temporaries = heapq.heappop(events)
            if i != WOKEN:
                self.finish(i, temporaries)
                self._hand_on(i, thread)

    def begin_all(self) -> None:
        """Start the graph: one thread makes all nodes without inputs ready."""
        self._hand_on(START, 0)

    def start_next(self, thread: int, now: float) -> bool:
        """Start the next node that `thread` finds; False where there is none."""
        kept = self.kept[thread]
        i = kept.popleft() if kept else self._take(thread)
        if i is None:
            return False
        temporaries = self.begin(i)
        took = self.cost_of(i) * (1 + NOISE * (2 * self.chance.random() - 1))
        if took > GRAIN_S and any(event[2] != WOKEN for event in self.events):
            took *= 1 + CONTENTION * self.chance.random()
        if self.program.is_delayed and self.chance.random() < DELAYED_SHARE:
            took += DELAY_S
        heapq.heappush(self.events, (now + took, thread, i, temporaries))
        return True

    def _hand_on(self, done: int, thread: int) -> None:
        self._share(self.ready_after(done), thread)

    def _share(self, ready: Iterable[int], thread: int) -> None:
        """Give each ready node to the thread that made it ready, or to the pool."""
        kept, queue = self.kept[thread], self.queues[thread]
        last = -1
        for i in ready:
            if self.is_cheap(i):
                kept.append(i)
                continue
            if last >= 0:
                queue.appendleft(last)
            last = i
        if last >= 0:
            (queue.appendleft if kept else kept.append)(last)

    def ready_after(self, done: int) -> Iterable[int]:
        """The nodes that the end of `done` makes ready, in order."""
        waiting = self.waiting
        for i in self.users[done]:
            waiting[i] -= 1
            if not waiting[i]:
                yield i

    def is_cheap(self, i: int) -> bool:
        """Whether the thread that makes node `i` ready keeps it."""
        return self.program.cheap[i]

    def cost_of(self, i: int) -> float:
        """The seconds that a thread spends on node `i`, before noise."""
        return self.seconds[i]

    def _take(self, thread: int) -> int | None:
        """The next node in the pool for `thread`."""
        if self.queues[thread]:
            return self.queues[thread].popleft()
        count = len(self.queues)
        first = self.chance.randrange(count)
        for k in range(count):
            queue = self.queues[(first + k) % count]
            if queue:
                return queue.pop()
        return None
