"""Replays the functions of loops and conditionals on a heap, one kernel after another.

The kernels of a planned body have an order (passes/tactics/order_bodies.py), so its requests and releases are one
deterministic sequence. The kernels of a lowered body start and end as in the executor's model (analysis/executor.py).

Not handled: the copy of a variable that is updated while the same body still holds a read of it.
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
"""The number of a lowered body's random orders, which replays use in turn."""

Seconds = Callable[[Node], float]
"""Gives the seconds of a node's kernel."""

Results = tuple[list[Buffer], list[Values | None]]
"""The results of a function or a node: buffers, with one reference each, and their known integers."""


Trips = tuple[list[list[Values | None]] | None, bool]
"""The integers of a loop's variables before each iteration and after the last one, None where the number of iterations
is unknown; and whether that number is exact, and not a bound."""


class Course(Protocol):
    """The decisions of a step."""

    def branch(self, iteration: int, branches: int) -> int:
        """The next branch, of `branches`, in this iteration of a loop."""
        ...

    def trips(self, most: int) -> int:
        """The number of iterations of the next loop, at most `most`."""
        ...


@dataclass
class PreparedBody:
    """The facts of a body that all its runs share.

    Attributes:
        order: its nodes in topological order, without feeds.
        memory: the requests of each node's kernel.
        uses: the number of readers of each tensor.
        integers: propagates the integers that decide how it runs, and its results.
        given: propagates its results only.
        constants: its constant nodes.
        lists: whether it, or a body in it, has tensor lists.
        list_nodes: its nodes that follow the rules of tensor_lists.py.
        choices: its conditionals whose branch the step decides.
        schedules: for a lowered body, orders of starts and ends of its kernels. Runs use them in turn.
        trips: for a loop's body, the iterations by the integers of the loop's inputs.
        groups: the chunks of each group, by its first kernel.
    """

    order: list[Node]
    memory: dict[Node, KernelMemory]
    uses: dict[tuple[Node, int], int]
    integers: Integers
    given: Integers
    constants: set[Node]
    lists: bool
    list_nodes: set[Node]
    choices: list[Node]
    schedules: list[list[tuple[Node, bool]]] = field(default_factory=list[list[tuple[Node, bool]]])
    trips: dict[tuple[Values | None, ...], Trips] = field(default_factory=dict[tuple["Values | None", ...], "Trips"])
    groups: dict[Node, Chunks] = field(default_factory=dict[Node, Chunks])


Bodies = dict[Graph, PreparedBody]
"""Facts of bodies that several records of nodes of one graph share."""


class _Schedule(Executor):
    """Records the order in which the nodes of a body start and end."""

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
    """The parameters of replays of lowered bodies.

    Attributes:
        seconds: gives the seconds of a kernel.
        chance: decides the races between threads.
    """

    seconds: Seconds
    chance: random.Random


class FunctionRuns:
    """Runs functions on a heap.

    Attributes:
        iterations: the current iteration of each running loop, outermost first.
        course: the decisions of the step. None: bounds are computed.
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
        """
        Args:
            run_node: runs a loop or a conditional of a function, from its bodies, inputs and integers.
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
        """The facts of a body that all its runs share."""
        found = self._prepared.get(body)
        if found is None:
            order = body.topological()
            uses: dict[tuple[Node, int], int] = {}
            for tensor in (*(t for n in order for t in n.inputs), *body.fetches):
                uses[tensor.node, tensor.index] = uses.get((tensor.node, tensor.index), 0) + 1
            feeds = set(body.feeds)
            rest = [n for n in order if n not in feeds]
            list_nodes = {n for n in rest if uses_lists(n)}
            deciding = [t for n in rest if n in body.bodies or n in list_nodes for t in n.inputs]
            found = self._prepared[body] = PreparedBody(
                rest,
                {n: memory_in(body, n, self._device) for n in rest},
                uses,
                Integers(body, rest, roots=(*deciding, *body.fetches)),
                Integers(body, rest, roots=body.fetches),
                constant_nodes(body, order),
                any(uses_tensor_list(n.op) for b in (body, *body.all_bodies()) for n in b),
                list_nodes,
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
            # The decision is known from here on, since the gradient's conditional reads the saved one.
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
        """Run kernels as in the executor: a kernel holds its inputs until it ends, and others run concurrently."""
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
        elif node in made.list_nodes:
            call = Call(node, inputs, [known.get((t.node, t.index)) for t in node.inputs], {})
            outputs = LIST_RULES[node.op](self.heap, call)
            known.update({(node, o): v for o, v in call.known.items() if v is not None})
        else:
            outputs = self.heap.run_kernel(node, made.memory[node], inputs)
            if (node, 0) not in known:
                made.integers.follow_on(node, known)  # inputs from lists are known only now
        for index, output in enumerate(outputs):
            output.refs += made.uses.get((node, index), 0)
            buffers[node, index] = output
        takes_inputs = self._lowered is not None and node in body.bodies
        return [*outputs] if takes_inputs else [*inputs, *outputs]


def memory_in(body: Graph, node: Node, device: DeviceModel) -> KernelMemory:
    """The requests of the kernel of a body's node."""
    values = {p: c for p, t in enumerate(node.inputs) if (c := body.small_constants.get(t.node)) is not None}
    return node_memory(node, device, values)


def group_chunks(body: Graph, group: Sequence[Node], device: DeviceModel) -> Chunks:
    """The chunks of one of the body's groups, given with the views between its kernels."""
    memory = {node: memory_in(body, node, device.in_bodies) for node in group}
    return chunks_of(body, group, memory, device.intra_op_threads)


def deciding(node: Node, branch: int) -> Values:
    """The value of a conditional's first input for this branch."""
    return (int(branch == 0),) if node.inputs[0].type.dtype == "bool" else (branch,)
