"""Replays functions that loops and conditionals run: one kernel after another, with the buffers of a heap.

TensorFlow runs a function whose kernels have an order (passes/tactics/order_bodies.py) one kernel after the other, so
that its requests and releases are one determinate sequence. The kernels of a body that TensorFlow lowers start and end
as the executor replays them (analysis/executor.py).

Not handled: an update of a variable of which the same body still holds a read copies it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tfswap.analysis.buffers import Buffer
from tfswap.analysis.constants import constant_nodes
from tfswap.analysis.executor import Executor, Program
from tfswap.analysis.groups import Chunks, chunks_of, with_views
from tfswap.analysis.heap import Heap
from tfswap.analysis.integer_values import AtMost, Integers, Known, Values, as_feeds
from tfswap.analysis.records import Findings
from tfswap.analysis.tensor_lists import LIST_RULES, Call, uses_lists
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import control_flow, is_const, is_view, uses_tensor_list
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.kernel_memory import KernelMemory, node_memory

SCHEDULES = 3
"""So many orders of a lowered body's kernels are replayed, one after another."""

Seconds = Callable[[Node], float]
"""Says how long a node's kernel takes."""

Results = tuple[list[Buffer], list[Values | None]]
"""What a function or a node gives: buffers, held once each, and their integers where they are known."""


Trips = tuple[list[list[Values | None]] | None, bool]
"""The integers of a loop's variables before each iteration and after the last, None where the end is not known; and
whether it ends there, or may end before."""


class Course(Protocol):
    """What a step decides when it runs."""

    def branch(self, iteration: int, branches: int) -> int:
        """Which branch is taken next, in this iteration of a loop, of so many branches."""
        ...

    def trips(self, most: int) -> int:
        """How many iterations the next loop has, of at most so many."""
        ...


@dataclass
class PreparedBody:
    """A body, ready to be run many times.

    Attributes:
        integers: follows what decides how it runs, and what it gives.
        given: the same of what it gives alone.
        schedules: of a lowered body, in what order its kernels start and end; runs take them in turn.
        trips: of a loop's body, by the integers that the loop is given, how often it runs.
        groups: by the first kernel of each group, its chunks.
    """

    order: list[Node]
    memory: dict[Node, KernelMemory]
    uses: dict[tuple[Node, int], int]
    integers: Integers
    given: Integers
    constants: set[Node]
    lists: bool
    choices: list[Node]
    schedules: list[list[tuple[Node, bool]]] = field(default_factory=list[list[tuple[Node, bool]]])
    trips: dict[tuple[Values | None, ...], Trips] = field(default_factory=dict[tuple["Values | None", ...], "Trips"])
    groups: dict[Node, Chunks] = field(default_factory=dict[Node, Chunks])


Bodies = dict[Graph, PreparedBody]
"""What is known of bodies whatever runs them: for several records of nodes of one graph."""


class _Schedule(Executor):
    """Notes in what order the nodes of a body start and end."""

    is_body = True

    def __init__(self, program: Program, chance: random.Random):
        super().__init__(program, chance)
        self.log: list[tuple[int, bool]] = []

    def begin(self, i: int) -> list[int]:
        self.log.append((i, True))
        return []

    def finish(self, i: int, temporaries: list[int]) -> None:
        self.log.append((i, False))


@dataclass(frozen=True)
class Lowered:
    """How TensorFlow's executor runs bodies that it has lowered.

    Attributes:
        seconds: of a kernel.
        chance: of the races between threads.
    """

    seconds: Seconds
    chance: random.Random


class FunctionRuns:
    """Runs functions on a heap.

    Attributes:
        iterations: that are running, of loops one inside of the other.
        course: what the step decides; None where bounds are looked for.
    """

    def __init__(
        self,
        heap: Heap,
        found: Findings,
        prepared: Bodies,
        run_node: Callable[[Node, Sequence[Graph], Sequence[Buffer], Sequence[Values | None]], Results],
        *,
        course: Course | None = None,
        lowered: Lowered | None = None,
    ):
        """Nothing has run yet.

        Args:
            run_node: runs a loop or a conditional of a function, given its bodies, inputs and integers.
        """
        self.heap = heap
        self.course = course
        self.iterations: list[int] = []
        self._device: DeviceModel = heap.device
        self._found = found
        self._prepared = prepared
        self._run_node = run_node
        self._lowered = lowered

    def prepare(self, body: Graph) -> PreparedBody:
        """What is known of a body whatever runs it."""
        found = self._prepared.get(body)
        if found is None:
            order = body.topological()
            uses: dict[tuple[Node, int], int] = {}
            for tensor in (*(t for n in order for t in n.inputs), *body.fetches):
                uses[tensor.node, tensor.index] = uses.get((tensor.node, tensor.index), 0) + 1
            feeds = set(body.feeds)
            rest = [n for n in order if n not in feeds]
            deciding = [t for n in rest if n in body.bodies or uses_lists(n) for t in n.inputs]
            found = self._prepared[body] = PreparedBody(
                rest,
                {n: memory_in(body, n, self._device) for n in rest},
                uses,
                Integers(body, rest, asked=(*deciding, *body.fetches)),
                Integers(body, rest, asked=body.fetches),
                constant_nodes(body, order),
                any(uses_tensor_list(n.op) for b in (body, *body.all_bodies()) for n in b),
                [
                    n
                    for n in rest
                    if (kind := control_flow(n.op)) and not kind.is_loop and not uses_lists(n.inputs[0].node)
                ],
            )
        return found

    def choose(self, branches: int) -> int:
        """The branch that the course takes next."""
        assert self.course is not None
        return self.course.branch(self.iterations[-1] if self.iterations else 0, branches)

    def run(
        self, body: Graph, arguments: Sequence[Buffer], integers: Sequence[Values | None], *, consume: bool
    ) -> Results:
        """Run a function.

        Args:
            consume: whether the arguments are the function's own, as a loop's are from its second iteration on:
                it frees them as soon as it has read them.
        """
        made = self.prepare(body)
        self._found.runs[body] = self._found.runs.get(body, 0.0) + self.heap.weight
        buffers: dict[tuple[Node, int], Buffer] = {}
        for feed, argument in zip(body.feeds, arguments, strict=True):
            buffers[feed, 0] = argument
            argument.refs += made.uses.get((feed, 0), 0)
            if consume:
                self.heap.drop(argument)
        known = made.integers.follow(as_feeds(body, integers))
        if self.course is not None and self.iterations:
            # What decides is known from here on: the gradient's conditional finds it among what has been saved.
            for node in made.choices:
                decides = node.inputs[0].node, node.inputs[0].index
                if isinstance(known.get(decides), AtMost | None):
                    branch = self.choose(len(body.bodies[node]))
                    known = made.integers.follow({**known, decides: deciding(node, branch)})
        if self._lowered is None:
            self._run_ordered(body, made, buffers, known)
        else:
            self._run_unordered(body, made, buffers, known, self._lowered)
        results = [(f.node, f.index) for f in body.fetches]
        return [buffers[r] for r in results], [known.get(r) for r in results]

    def _run_ordered(
        self, body: Graph, made: PreparedBody, buffers: dict[tuple[Node, int], Buffer], known: Known
    ) -> None:
        groups = {group[0]: group for group in body.groups()}
        last = {group[-1] for group in groups.values()}
        for node in made.order:
            if node in groups:
                self.heap.begin_group(self._chunks(body, made, groups[node]))
            for buffer in self._node(body, made, node, buffers, known):
                self.heap.drop(buffer)
            if node in last:
                self.heap.end_group()

    def _chunks(self, body: Graph, made: PreparedBody, group: list[Node]) -> Chunks:
        if group[0] not in made.groups:
            members = with_views(group, made.order)
            made.groups[group[0]] = chunks_of(body, members, made.memory, self._device.intra_op_threads)
        return made.groups[group[0]]

    def _run_unordered(
        self,
        body: Graph,
        made: PreparedBody,
        buffers: dict[tuple[Node, int], Buffer],
        known: Known,
        lowered: Lowered,
    ) -> None:
        """As the executor does it: a kernel holds its inputs until it ends, and others run concurrently."""
        held: dict[Node, list[Buffer]] = {}
        made.schedules = made.schedules or self._schedules(body, made.constants, lowered)
        schedule = made.schedules.pop(0)
        made.schedules.append(schedule)
        for node in made.order:
            if node in made.constants:  # computed before the step
                for buffer in self._node(body, made, node, buffers, known):
                    self.heap.drop(buffer)
        for node, started in schedule:
            if started:
                held[node] = self._node(body, made, node, buffers, known)
            else:
                for buffer in held.pop(node):
                    self.heap.drop(buffer)

    def _schedules(self, body: Graph, constants: set[Node], lowered: Lowered) -> list[list[tuple[Node, bool]]]:
        """Orders in which the executor may start (True) and end (False) the nodes of a body."""
        order, feeds = body.topological(), set(body.feeds)
        cost_s = [0.0 if n in feeds or is_view(n.op) or is_const(n.op) else lowered.seconds(n) for n in order]
        computed = constants | feeds
        program = Program(order, cost_s, self._device, constants=computed)
        executor = _Schedule(program, lowered.chance)
        found: list[list[tuple[Node, bool]]] = []
        for _ in range(SCHEDULES):
            executor.log = []
            executor.run()
            found.append([(order[i], started) for i, started in executor.log if order[i] not in computed])
        return found

    def _node(
        self, body: Graph, made: PreparedBody, node: Node, buffers: dict[tuple[Node, int], Buffer], known: Known
    ) -> list[Buffer]:
        """Run a node's kernel; returns the buffers that it frees when it ends."""
        inputs = [buffers[t.node, t.index] for t in node.inputs]
        if node in made.constants:
            outputs = [self.heap.hold(Buffer(None, kind.nbytes or 0)) for kind in node.outputs]
        elif node in body.bodies:
            integers = [known.get((t.node, t.index)) for t in node.inputs]
            outputs, values = self._run_node(node, body.bodies[node], inputs, integers)
            known.update({(node, i): v for i, v in enumerate(values) if v is not None})
        elif uses_lists(node):
            call = Call(node, inputs, [known.get((t.node, t.index)) for t in node.inputs], {})
            outputs = LIST_RULES[node.op](self.heap, call)
            known.update({(node, o): v for o, v in call.known.items() if v is not None})
        else:
            outputs = self.heap.run_kernel(node, made.memory[node], inputs)
            if (node, 0) not in known:
                made.integers.follow_on(node, known)  # from what lists gave, say
        for index, output in enumerate(outputs):
            output.refs += made.uses.get((node, index), 0)
            buffers[node, index] = output
        takes_inputs = self._lowered is not None and node in body.bodies
        return [*outputs] if takes_inputs else [*inputs, *outputs]


def memory_in(body: Graph, node: Node, device: DeviceModel) -> KernelMemory:
    """What the kernel of a body's node requests."""
    values = {p: c for p, t in enumerate(node.inputs) if (c := body.small_constants.get(t.node)) is not None}
    return node_memory(node, device, values)


def group_chunks(body: Graph, group: Sequence[Node], device: DeviceModel) -> Chunks:
    """The chunks of one of the body's groups, given with the views between its kernels."""
    memory = {node: memory_in(body, node, device.in_bodies) for node in group}
    return chunks_of(body, group, memory, device.intra_op_threads)


def deciding(node: Node, branch: int) -> Values:
    """What a conditional reads that takes this branch."""
    return (int(branch == 0),) if node.inputs[0].type.dtype == "bool" else (branch,)
