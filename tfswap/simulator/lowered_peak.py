"""The peak of a step with loops or conditionals as TensorFlow runs it: lowered, iterations concurrent.

The runs are those of simulator/propagator.py. Requests and releases are those of kernels/kernel_memory.py and, for
lists, of analysis/tensor_lists.py: a list that two edges hold is copied by the first kernel that changes it, and its
elements stay until both are freed. Known integers are propagated with their tensors, through lists too. They decide the
number of iterations and the branches.

If the step's values decide, the branch with the most bytes is taken, and a loop that gathers or saves tensors runs its
maximum number of iterations. Loops that keep nothing from iteration to iteration, loops in loops and loops with no
bound run UNKNOWN_TRIPS times, or fewer if that is their maximum.

Not handled: temporaries of kernels that run at the same time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import cast

from tfswap.analysis.buffers import Buffer
from tfswap.analysis.constants import constant_nodes
from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.executor import runs_within
from tfswap.analysis.function_runs import memory_in
from tfswap.analysis.heap import Heap, Kernel
from tfswap.analysis.integer_values import AtMost, Known, Values, known_results
from tfswap.analysis.tensor_lists import LIST_RULES, Call, uses_lists
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import control_flow, reads_variable, writes_variable
from tfswap.kernels.device import DeviceModel
from tfswap.simulator import propagator
from tfswap.simulator.arena_snapshot import ArenaSnapshot, added_bytes, fill, located
from tfswap.simulator.body_integers import Numbers
from tfswap.simulator.lowered_graph import ARGUMENT, KERNEL, LOOP_CONDITION, MERGE, RESULT, SWITCH, Item
from tfswap.simulator.propagator import Frame, Iteration, LoweredProgram, Propagator

MOST_ITEMS = 60_000
"""The most items of all runs together: large steps have fewer runs."""
LARGEST = 200_000
"""Steps with more items are not simulated this way."""
MOST_RUNS = 9
STEPS = 4
"""Steps of a run: each has another arena."""
UNKNOWN_TRIPS = 8


class TooLarge(Exception):
    """A step has too many items."""


def simulate_lowered(
    graph: Graph,
    flow: Dataflow,
    device: DeviceModel,
    seconds: Callable[[Node], float],
    *,
    snapshot: ArenaSnapshot,
    delayed: bool = False,
) -> list[int]:
    """Peak bytes of each run of the step on `device`. Their median is the likely peak.

    Args:
        graph: as traced, in TensorFlow's order of nodes.
        flow: the step's facts, for the arena before it.
        seconds: the seconds of a node's kernel.
        delayed: on a busy machine, where threads are delayed.

    Raises:
        TooLarge: the step has more items than LARGEST.
    """
    step = _Step(graph, flow, device, seconds)
    step.is_delayed = delayed
    peaks: list[int] = []
    runs = MOST_RUNS
    while len(peaks) < runs:
        process = _Process(step, snapshot, random.Random(len(peaks)))
        items = process.run()
        runs = min(runs, runs_within(MOST_ITEMS // items))
        peaks.append(process.arena.peak_bytes)
    return peaks


class _Step(LoweredProgram):
    """A step whose requests are replayed."""

    def __init__(self, graph: Graph, flow: Dataflow, device: DeviceModel, seconds: Callable[[Node], float]):
        super().__init__(graph, device, seconds)
        self.flow = flow
        self._kernels: dict[tuple[str, Node], Kernel] = {}
        self._branches: dict[Node, int] = {}
        self._constants: dict[Graph, Known] = {}
        self._numbers = Numbers()

    def undecided_trips(self, loop: int, iterations: tuple[int, ...]) -> int:
        """The number of a loop's iterations if the step's values decide it."""
        node, scope, _ = self.lowered.loops[loop]
        keeps = any(kind.dtype == "variant" for kind in node.outputs)
        most = self._numbers.most_trips(scope, node, iterations) if keeps and scope.loop < 0 else None
        return UNKNOWN_TRIPS if most is None else min(most, max(UNKNOWN_TRIPS, MOST_ITEMS // len(self.lowered.items)))

    def kernel(self, item: Item, node: Node) -> Kernel:
        key = item.scope.name, node
        if key not in self._kernels:
            memory = memory_in(item.scope.graph, node, self.device)
            self._kernels[key] = Kernel.of(node, memory, self.device)
        return self._kernels[key]

    def folded(self, item: Item, node: Node) -> dict[int, Values]:
        """The integers of a constant."""
        graph = item.scope.graph
        if graph not in self._constants:
            known: Known = {(made, 0): values for made, values in graph.small_constants.items()}
            order = graph.topological()
            constants = constant_nodes(graph, order)
            for made in (n for n in order if n in constants):
                found = known_results(made, [known.get((t.node, t.index)) for t in made.inputs])
                known.update({(made, output): values for output, values in found.items()})
            self._constants[graph] = known
        known = self._constants[graph]
        return {output: values for output in range(len(node.outputs)) if (values := known.get((node, output)))}

    def branch(self, item: Item, choice: Node, values: Values | None) -> int:
        """The branch that is taken if the conditional reads these values."""
        bodies = item.scope.graph.bodies[choice]
        if values is None or isinstance(values, AtMost) or len(values) != 1:
            if choice not in self._branches:
                made = [sum(kind.nbytes or 0 for node in body for kind in node.outputs) for body in bodies]
                self._branches[choice] = made.index(max(made))
            return self._branches[choice]
        kind = control_flow(choice.op)
        assert kind is not None
        if len(kind.functions) > 1:
            return 0 if values[0] else 1
        return values[0] if 0 <= values[0] < len(bodies) else len(bodies) - 1


class _Tensor(propagator.Buffer):
    """The tensor of an edge.

    Attributes:
        buffer: its buffer.
        values: its integers where they are known.
        cell: for a handle, the variable's buffer.
    """

    __slots__ = ("buffer", "cell", "heap", "values")

    def __init__(self, heap: Heap, buffer: Buffer, values: Values | None = None):
        super().__init__()
        self.heap, self.buffer, self.values = heap, buffer, values
        self.cell: list[Buffer] | None = None

    def hold(self) -> None:
        self.buffer.refs += 1

    def release(self) -> None:
        self.heap.drop(self.buffer)


class _Process:
    """One process: an arena, the variables in it, and steps one after another."""

    def __init__(self, step: _Step, snapshot: ArenaSnapshot, chance: random.Random):
        self.step, self.chance = step, chance
        self.heap = Heap(step.device)
        flow = step.flow
        made = [flow.values[v].tensor.node in flow.made_with_step for v in flow.persistent]
        sizes = [0 if late else size for late, size in zip(made, added_bytes(flow, snapshot), strict=True)]
        self.arena = snapshot.arena()
        found = located(flow, fill(self.arena, sizes, snapshot), snapshot)
        self._addresses: dict[int, int] = {}
        self.constants = self._constants(snapshot)
        self._handles: dict[tuple[str, str], _Tensor] = {}
        places = dict(zip(flow.persistent, found, strict=True))
        self._written = {
            flow.nodes[i].name: (flow.values[version].nbytes, places.get(version, -1))
            for (node, _), value in flow.value_of.items()
            if (version := flow.written.get(value)) is not None and (i := flow.place.get(node.name)) is not None
        }

    def _constants(self, snapshot: ArenaSnapshot) -> dict[tuple[str, Node], list[Buffer]]:
        """Constants and other buffers that are allocated with the step's kernels and stay."""
        found: dict[tuple[str, Node], list[Buffer]] = {}
        for item in self.step.lowered.items:
            if item.node is not None and item.constant and item.kind == KERNEL:
                sizes = [0 if kind.dtype == "resource" else kind.nbytes or 0 for kind in item.node.outputs]
                if snapshot.instantiated:
                    found[item.scope.name, item.node] = [Buffer(None, size) for size in sizes]
                else:
                    found[item.scope.name, item.node] = [self.heap.allocate(size) for size in sizes]
        self.play()
        return found

    def run(self) -> int:
        """Run some steps; returns the number of items of each."""
        items, steps = 1, STEPS
        while steps > 0:
            run = _Run(self, self.chance)
            run.run()
            run.end()
            items = len(run.ran)
            steps = min(steps - 1, MOST_ITEMS // items - 1)
        return items * (STEPS - max(0, steps))

    def play(self) -> None:
        """Carry out the heap's requests and releases in the arena."""
        log, addresses = self.heap.log, self._addresses
        for kind, number, nbytes in log:
            if kind == "request":
                addresses[number] = self.arena.allocate(nbytes) if nbytes else -1
            elif kind == "free" and (address := addresses.pop(number)) >= 0:
                self.arena.free(address)
        log.clear()

    def handle(self, part: str, node: Node) -> _Tensor:
        """A resource of the step."""
        key = part, node.name
        if key not in self._handles:
            made = self._handles[key] = _Tensor(self.heap, Buffer(None, 0))
            nbytes, address = self._written.get(node.name, (0, -1))
            if nbytes:
                buffer = self.heap.allocate(nbytes)
                assert buffer.number is not None
                self._addresses[buffer.number] = address  # it is there already
                self.heap.log.pop()
            else:
                buffer = self.heap.hold(Buffer(None, 0))
            made.cell = [buffer]
        return self._handles[key]


class _Run(Propagator):
    """One step."""

    def __init__(self, process: _Process, chance: random.Random):
        super().__init__(process.step, chance)
        self._process, self._program, self._heap = process, process.step, process.heap
        self._results: list[_Tensor] = []

    def end(self) -> None:
        """The caller releases the results."""
        for result in self._results:
            result.release()
        self._process.play()

    def begin(self, i: int) -> list[int]:
        if i > LARGEST:
            raise TooLarge
        temporaries = super().begin(i)
        self._process.play()
        return temporaries

    def finish(self, i: int, temporaries: list[int]) -> None:
        super().finish(i, temporaries)
        self._process.play()

    def trips(self, loop: int, iterations: tuple[int, ...]) -> int:
        return self._process.step.undecided_trips(loop, iterations)

    def compute(self, number: int, frame: Frame, iteration: Iteration) -> dict[int, propagator.Buffer]:
        """The outputs of an item that is not dead."""
        item = self.lowered.items[number]
        found = [iteration.entries.get((number, position)) for position in range(len(item.inputs))]
        reads = cast("list[_Tensor | None]", found)
        if item.kind == KERNEL:
            assert item.node is not None
            return dict(enumerate(self._kernel(item, item.node, reads)))
        if item.kind == SWITCH:
            data, decides = reads
            assert data is not None and decides is not None
            if item.choice is None:  # a loop goes on at its second output
                return {decides.decision or 0: data}
            if decides.decision is None:
                decides.decision = self._program.branch(item, item.choice, decides.values)
            return {decides.decision: data}
        if item.kind == LOOP_CONDITION:
            return {0: self._goes_on(reads[0], frame, iteration)}
        if item.kind == ARGUMENT:
            assert item.node is not None
            if item.node.outputs[0].dtype == "resource":
                return {0: self._process.handle(item.scope.name, item.node)}
            return {0: _Tensor(self._heap, Buffer(None, item.node.outputs[0].nbytes or 0))}
        if item.kind == RESULT:
            for value in reads:
                if value is not None:
                    value.hold()
                    self._results.append(value)
            return {}
        if item.kind == MERGE:
            return {0: next(value for value in reads if value is not None)}
        return {0: reads[0]} if reads and reads[0] is not None else {}

    def _goes_on(self, condition: _Tensor | None, frame: Frame, iteration: Iteration) -> _Tensor:
        values = None if condition is None else condition.values
        made = _Tensor(self._heap, Buffer(None, 0))
        if values is None or isinstance(values, AtMost):
            made.decision = int(iteration.number < frame.trips)
        else:
            made.decision = int(any(values))
        return made

    def _kernel(self, item: Item, node: Node, reads: Sequence[_Tensor | None]) -> list[_Tensor]:
        heap = self._heap
        if not item.inputs and node.outputs and node.outputs[0].dtype == "resource":
            return [self._process.handle(item.scope.name, node)]
        if item.constant:
            known = self._program.folded(item, node)
            kept = self._process.constants[item.scope.name, node]
            return [_Tensor(heap, buffer, known.get(output)) for output, buffer in enumerate(kept)]
        handle = reads[0] if reads else None
        if handle is not None and handle.cell and len(reads) == 1:
            if reads_variable(node.op) and not writes_variable(node.op):
                return [_Tensor(heap, handle.cell[0])]
            if not node.outputs:
                return []
        given = [Buffer(None, 0) if read is None else read.buffer for read in reads]
        values = [None if read is None else read.values for read in reads]
        if uses_lists(node):
            call = Call(node, given, values, {})
            made, known = LIST_RULES[node.op](heap, call), call.known
        else:
            kernel = self._program.kernel(item, node)
            for position in kernel.memory.updates:
                self._copy_before_update(reads[position])
            made, known = heap.run_kernel(kernel, given), known_results(node, values)
            for position in kernel.memory.retains:
                self._adopt(handle, given[position])
        outputs = [_Tensor(heap, buffer, known.get(output)) for output, buffer in enumerate(made)]
        for output in outputs:
            output.buffer.refs -= 1  # its edges hold it
        if made and handle is not None and node.outputs[0].dtype == "resource":
            outputs[0].cell = handle.cell
        return outputs

    def _copy_before_update(self, handle: _Tensor | None) -> None:
        """Copy a variable before it is written, if a reader still holds it."""
        if handle is None or not handle.cell:
            return
        old = handle.cell[0]
        if old.number is not None and old.refs > 1:
            handle.cell[0] = self._heap.allocate(old.nbytes)
            self._heap.drop(old)

    def _adopt(self, handle: _Tensor | None, value: Buffer) -> None:
        """The variable's buffer is that of its new value."""
        if handle is not None and handle.cell:
            old, handle.cell[0] = handle.cell[0], self._heap.hold(value)
            self._heap.drop(old)
