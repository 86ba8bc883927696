"""TensorFlow's executor and its thread pool: in what order kernels of a graph without an order start and end.

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
- The body of a loop or a conditional starts on the thread that has decided that it runs.

Which thread is first is a race: kernels' times vary by chance, from run to run and from type to type.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from tfswap.ir.graph import Node
from tfswap.ir.op_traits import runs_inline
from tfswap.kernels.device import DeviceModel

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


class Program:
    """The graph as the executor sees it.

    Attributes:
        seconds: per node, what a thread spends on it.
        cheap: per node, whether the thread that makes it ready keeps it.
        pending: per node, how many edges it waits for; one for a node that waits for nothing but the step's start.
        users: per node, the nodes that wait for it, those behind data edges first; at START, those that wait for none.
        unordered: of nodes with so many users that their order is by chance, (node, users by data, by control).
        ops: per node, its type.
    """

    def __init__(
        self, nodes: Sequence[Node], cost_s: Sequence[float], device: DeviceModel, *, constants: Collection[Node]
    ):
        """
        Args:
            cost_s: seconds that each node's kernel takes; 0 of a node that has none.
            constants: computed before the step: they wait for nothing, and take no time.
        """
        self.threads = max(1, device.inter_op_threads)
        on_gpu = device.is_gpu
        self.cheap = [on_gpu or runs_inline(node.op) or node in constants for node in nodes]
        self.seconds = [DISPATCH_S + (0.0 if on_gpu else cost) for cost in cost_s]
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
        self.users = [d + c for d, c in zip(data, control, strict=True)]
        wide = (i for i, users in enumerate(self.users) if len(users) > ORDERED_EDGES)
        self.unordered = [(i, data[i], control[i]) for i in wide]
        self.ops = [node.op for node in nodes]


class Executor:
    """One thread pool, and runs of one graph one after another.

    Attributes:
        is_body: whether the graph is the body of a loop or a conditional, which TensorFlow lowers.
    """

    is_body = False

    def __init__(self, program: Program, chance: random.Random):
        self.program = program
        self.chance = chance
        self.users = list(program.users)
        for i, data, control in program.unordered:
            self.users[i] = chance.sample(data, len(data)) + chance.sample(control, len(control))
        error = {op: COST_ERROR ** chance.uniform(-1, 1) for op in dict.fromkeys(program.ops)}
        self.seconds = [s * error[op] for s, op in zip(program.seconds, program.ops, strict=True)]
        self.kept: list[deque[int]] = [deque() for _ in range(program.threads)]
        self.queues: list[deque[int]] = [deque() for _ in range(program.threads)]
        self.waiting: list[int] = []
        self.events: list[tuple[float, int, int, list[int]]] = []

    def begin(self, i: int) -> list[int]:
        """Node `i` starts; returns its kernel's temporaries."""
        raise NotImplementedError

    def finish(self, i: int, temporaries: list[int]) -> None:
        """Node `i` ends."""
        raise NotImplementedError

    def run(self) -> None:
        """All nodes, once each."""
        queues, events = self.queues, self.events
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
                self.finish(i, temporaries)
                self._hand_on(i, thread)

    def _begin(self) -> None:
        """The step starts: what waits for nothing else is a task each, for any thread."""
        if self.is_body:  # the thread that decides that it runs
            self._hand_on(START, 0)
            return
        for i in self.users[START]:
            self.queues[self.chance.randrange(len(self.queues))].append(i)

    def _go_on(self, thread: int, now: float) -> bool:
        """Start the next node that `thread` finds; False when there is none."""
        kept = self.kept[thread]
        i = kept.popleft() if kept else self._take(thread)
        if i is None:
            return False
        temporaries = self.begin(i)
        took = self._cost_s(i) * (1 + NOISE * (2 * self.chance.random() - 1))
        heapq.heappush(self.events, (now + took, thread, i, temporaries))
        return True

    def _hand_on(self, done: int, thread: int) -> None:
        self._share(self._ready(done), thread)

    def _share(self, ready: Iterable[int], thread: int) -> None:
        """Give each node that is ready to the thread that made it so, or to the pool."""
        kept, queue = self.kept[thread], self.queues[thread]
        last = -1
        for i in ready:
            if self._is_cheap(i):
                kept.append(i)
                continue
            if last >= 0:
                queue.appendleft(last)
            last = i
        if last >= 0:
            (queue.appendleft if kept else kept.append)(last)

    def _ready(self, done: int) -> Iterable[int]:
        """What the end of `done` makes ready, in order."""
        waiting = self.waiting
        for i in self.users[done]:
            waiting[i] -= 1
            if not waiting[i]:
                yield i

    def _is_cheap(self, i: int) -> bool:
        return self.program.cheap[i]

    def _cost_s(self, i: int) -> float:
        return self.seconds[i]

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
