"""TensorFlow's executor on a lowered step: frames and iterations, dead nodes, iterations that wait for others.

Follows tensorflow/core/common_runtime/propagator_state.cc and executor.cc, on the thread pool of analysis/executor.py.
The step's start is a task that makes all items without inputs ready.

Invariant: a value is held once for each edge that it is on, until the edge's reader has ended.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tfswap.analysis.executor import DISPATCH_S, ORDERED_EDGES, Executor, Program
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import runs_inline
from tfswap.kernels.device import DeviceModel
from tfswap.simulator.lowered_graph import ENTER, EXIT, KERNEL, MERGE, NEXT, Item, lower


class Buffer:
    """One allocation, or one list.

    Attributes:
        references: edges and lists that hold it.
        pins: permanent owners: the caller, a variable, the graph.
        elements: the elements of a list.
        variable: for a handle, the variable's buffer.
        decision: for a predicate, whether a loop continues, or which branch is taken.
    """

    __slots__ = ("decision", "elements", "pins", "references", "variable")

    def __init__(self, pins: int = 0, elements: Iterable[Buffer] = ()):
        self.references = 0
        self.pins = pins
        self.elements = list(elements)
        self.variable: Buffer | None = None
        self.decision: int | None = None
        for element in self.elements:
            element.references += 1

    def hold(self) -> None:
        self.references += 1

    def release(self) -> None:
        self.references -= 1
        if not self.references and not self.pins:
            elements, self.elements = self.elements, []
            for element in elements:
                element.release()

    @property
    def is_alone(self) -> bool:
        """Whether a single reader holds it."""
        return self.references == 1 and not self.pins


@dataclass
class Iteration:
    """One iteration of a frame; the step's own frame has one.

    Attributes:
        pending: as `LoweredProgram.pending`, for items that have received an input.
        dead: the number of these inputs that were dead.
        entries: by item and input, its value.
        running: items that are ready, or run.
        frames: loops that run in it.
    """

    number: int
    pending: dict[int, int] = field(default_factory=dict[int, int])
    dead: Counter[int] = field(default_factory=Counter[int])
    entries: dict[tuple[int, int], Buffer] = field(default_factory=dict[tuple[int, int], Buffer])
    running: int = 0
    frames: int = 0


@dataclass
class Frame:
    """One run of a loop, or the step."""

    loop: int
    outer: Frame | None
    within: Iteration | None  # of the outer frame
    parallel: int
    entering: int  # values that have not entered yet
    count: int = 0
    running: int = 1
    iterations: dict[int, Iteration] = field(default_factory=dict[int, Iteration])
    waiting: list[tuple[int, Buffer]] = field(default_factory=list[tuple[int, Buffer]])  # for the next iteration
    invariant: list[tuple[int, Buffer | None]] = field(default_factory=list["tuple[int, Buffer | None]"])
    dead_exits: list[int] = field(default_factory=list[int])
    children: dict[tuple[int, int], Frame] = field(default_factory=dict["tuple[int, int]", "Frame"])
    trips: int = 0

    def numbers(self, iteration: Iteration) -> tuple[int, ...]:
        """The numbers of this iteration, and of those around it."""
        if self.outer is None or self.within is None:
            return ()
        return (*self.outer.numbers(self.within), iteration.number)


Task = tuple[int, Frame, Iteration, bool]


class LoweredProgram(Program):
    """The parts of a lowered step that all runs share.

    Attributes:
        pending: per item, the number of edges that it waits for; for a Merge twice its control edges, and one for the
            first input.
        wide: items with too many readers for a fixed order.
        roots: items without inputs.
    """

    def __init__(self, graph: Graph, device: DeviceModel, seconds: Callable[[Node], float]):
        self.lowered = lower(graph)
        items = self.lowered.items
        self.device = device
        self.threads = max(1, device.inter_op_threads)
        self.ops = [item.kind if item.node is None else item.node.op for item in items]
        self.cheap = [device.is_asynchronous or _is_cheap(item) for item in items]
        self.seconds = [
            DISPATCH_S + (0.0 if cheap or item.node is None else seconds(item.node))
            for item, cheap in zip(items, self.cheap, strict=True)
        ]
        self.pending = [
            1 + 2 * len(item.controls) if item.kind == MERGE else len(item.inputs) + len(item.controls)
            for item in items
        ]
        readers = zip(self.lowered.data, self.lowered.control, strict=True)
        self.wide = [i for i, (data, control) in enumerate(readers) if len(data) + len(control) > ORDERED_EDGES]
        self.roots = [i for i, item in enumerate(items) if not item.inputs and not item.controls]
        self.users, self.unordered = [], []  # each run has its own


def _is_cheap(item: Item) -> bool:
    return item.node is None or item.kind != KERNEL or item.constant or runs_inline(item.node.op)


class Propagator(Executor):
    """One run.

    Attributes:
        ran: the items that ran, in order of their start; the executor's numbers are positions in it.
    """

    def __init__(self, step: LoweredProgram, chance: random.Random):
        super().__init__(step, chance)
        self.step = step
        lowered = self.lowered = step.lowered
        self.data, self.control = list(lowered.data), list(lowered.control)
        for i in step.wide:
            self.data[i] = chance.sample(self.data[i], len(self.data[i]))
            self.control[i] = chance.sample(self.control[i], len(self.control[i]))
        self.ran: list[Task] = []
        self.outputs: dict[int, dict[int, Buffer]] = {}
        self.root = Frame(-1, None, None, 1, 0)
        self.root.iterations[0] = Iteration(0)

    def compute(self, number: int, frame: Frame, iteration: Iteration) -> dict[int, Buffer]:
        """The outputs of an item that is not dead."""
        raise NotImplementedError

    def trips(self, loop: int, iterations: tuple[int, ...]) -> int:
        """The number of a loop's iterations, in these iterations of the loops around."""
        raise NotImplementedError

    # --- the interface of Executor ---------------------------------------------------------------------------

    def begin_all(self) -> None:
        root = self.root.iterations[0]
        root.running += len(self.step.roots)
        self._share([self._task(i, self.root, root, False) for i in self.step.roots], 0)

    def _task(self, item: int, frame: Frame, iteration: Iteration, dead: bool) -> int:
        self.ran.append((item, frame, iteration, dead))
        return len(self.ran) - 1

    def is_cheap(self, i: int) -> bool:
        item, _, _, dead = self.ran[i]
        return dead or self.step.cheap[item]

    def cost_of(self, i: int) -> float:
        item, _, _, dead = self.ran[i]
        return DISPATCH_S if dead else self.seconds[item]

    def begin(self, i: int) -> list[int]:
        number, frame, iteration, dead = self.ran[i]
        self.outputs[i] = {} if dead else self.compute(number, frame, iteration)
        for made in self.outputs[i].values():
            made.hold()
        return []

    def finish(self, i: int, temporaries: list[int]) -> None:
        number, _, iteration, _ = self.ran[i]
        for position in range(len(self.lowered.items[number].inputs)):
            entry = iteration.entries.pop((number, position), None)
            if entry is not None:
                entry.release()

    def ready_after(self, done: int) -> list[int]:
        number, frame, iteration, dead = self.ran[done]
        outputs = self.outputs.pop(done)
        ready: list[int] = []
        self._propagate(number, frame, iteration, dead, outputs, ready)
        for made in outputs.values():
            made.release()
        return ready

    # --- propagator_state.cc ---------------------------------------------------------------------------------

    def _propagate(
        self,
        number: int,
        frame: Frame,
        iteration: Iteration,
        dead: bool,
        outputs: dict[int, Buffer],
        ready: list[int],
    ) -> None:
        item = self.lowered.items[number]
        ended: bool
        if item.kind == ENTER:
            child = self._child(frame, iteration, item.loop)
            if item.constant:
                child.invariant.append((number, None if dead else outputs[0]))
                if not dead:
                    outputs[0].hold()
                for at in range(child.count + 1):
                    if at in child.iterations:
                        self._activate(number, child, child.iterations[at], dead, outputs, ready)
            else:
                self._activate(number, child, child.iterations[0], dead, outputs, ready)
            child.entering -= 1
            ended = self._one_less(frame, iteration, ready)
        elif item.kind == EXIT:
            if dead:
                if iteration.number == frame.count:
                    frame.dead_exits.append(number)
            else:
                assert frame.outer is not None and frame.within is not None
                self._activate(number, frame.outer, frame.within, False, outputs, ready)
            ended = self._one_less(frame, iteration, ready)
        elif item.kind == NEXT:
            if not dead:
                if iteration.number == frame.count and frame.running == frame.parallel:
                    outputs[0].hold()
                    frame.waiting.append((number, outputs[0]))
                else:
                    if iteration.number == frame.count:
                        self._next(frame, ready)
                    self._activate(number, frame, frame.iterations[iteration.number + 1], False, outputs, ready)
            ended = self._one_less(frame, iteration, ready)
        else:
            self._activate(number, frame, iteration, dead, outputs, ready)
            ended = self._one_less(frame, iteration, ready)
        if ended:
            self._delete(frame, ready)

    def _child(self, frame: Frame, iteration: Iteration, loop: int) -> Frame:
        found = frame.children.get((iteration.number, loop))
        if found is None:
            made = self.lowered.loops[loop]
            found = Frame(loop, frame, iteration, made.parallel, self.lowered.enters[loop])
            found.iterations[0] = Iteration(0)
            found.trips = self.trips(loop, frame.numbers(iteration))
            frame.children[iteration.number, loop] = found
            iteration.frames += 1
        return found

    def _next(self, frame: Frame, ready: list[int]) -> None:
        """IncrementIteration."""
        frame.count += 1
        frame.running += 1
        made = frame.iterations[frame.count] = Iteration(frame.count)
        frame.dead_exits.clear()
        waiting, frame.waiting = frame.waiting, []
        for number, value in waiting:
            self._activate(number, frame, made, False, {0: value}, ready)
            value.release()
        for number, value in frame.invariant:
            self._activate(number, frame, made, value is None, {} if value is None else {0: value}, ready)

    def _one_less(self, frame: Frame, iteration: Iteration, ready: list[int]) -> bool:
        """One item of an iteration has ended; returns whether the frame has."""
        iteration.running -= 1
        return self._clean(frame, iteration, ready)

    def _clean(self, frame: Frame, iteration: Iteration, ready: list[int]) -> bool:
        """CleanupIterations."""
        at: Iteration | None = iteration
        while at is not None and not at.running and not at.frames:
            if frame.entering if at.number == 0 else at.number - 1 in frame.iterations:
                break
            del frame.iterations[at.number]
            frame.running -= 1
            if frame.waiting:
                self._next(frame, ready)
            at = frame.iterations.get(at.number + 1)
        return not frame.running and not frame.entering

    def _delete(self, frame: Frame, ready: list[int]) -> None:
        if frame.outer is None or frame.within is None:
            return
        for number in frame.dead_exits:
            self._activate(number, frame.outer, frame.within, True, {}, ready)
        for _, value in frame.invariant:
            if value is not None:
                value.release()
        frame.within.frames -= 1
        del frame.outer.children[frame.within.number, frame.loop]
        if self._clean(frame.outer, frame.within, ready):
            self._delete(frame.outer, ready)

    def _activate(
        self,
        number: int,
        frame: Frame,
        iteration: Iteration,
        dead: bool,
        outputs: dict[int, Buffer],
        ready: list[int],
    ) -> None:
        items, pending = self.lowered.items, iteration.pending
        source = items[number]
        for reader, output, position in self.data[number]:
            value = None if dead else outputs.get(output)
            left = pending.get(reader)
            if left is None:
                left = self.step.pending[reader]
            if items[reader].kind == MERGE:
                if value is not None:
                    iteration.entries[reader, position] = value
                    value.hold()
                    pending[reader] = left & ~1
                    if left == 1:
                        self._start(reader, frame, iteration, False, ready)
                else:
                    iteration.dead[reader] += 1
                    pending[reader] = left
                    is_dead = iteration.dead[reader] == len(items[reader].inputs) or source.kind == ENTER
                    if left == 1 and is_dead:
                        self._start(reader, frame, iteration, True, ready)
                continue
            if value is not None:
                iteration.entries[reader, position] = value
                value.hold()
            else:
                iteration.dead[reader] += 1
            pending[reader] = left - 1
            if left == 1:
                self._start(reader, frame, iteration, iteration.dead[reader] > 0, ready)
        for reader in self.control[number]:
            left = pending.get(reader)
            if left is None:
                left = self.step.pending[reader]
            if items[reader].kind == MERGE:
                left -= 2
                pending[reader] = left
                is_dead = iteration.dead[reader] == len(items[reader].inputs)
                if left == 0 or (left == 1 and is_dead):
                    self._start(reader, frame, iteration, is_dead, ready)
                continue
            iteration.dead[reader] += dead
            pending[reader] = left - 1
            if left == 1:
                self._start(reader, frame, iteration, iteration.dead[reader] > 0, ready)

    def _start(self, number: int, frame: Frame, iteration: Iteration, dead: bool, ready: list[int]) -> None:
        iteration.running += 1
        ready.append(self._task(number, frame, iteration, dead))
