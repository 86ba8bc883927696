"""Replays the functions of loops and conditionals on a heap, one kernel after another.

The kernels of a planned body have an order (passes/tactics/order_bodies.py), so its requests and releases are one
deterministic sequence. The kernels of a lowered body start and end as in the executor's model (analysis/executor.py).

Not handled: the copy of a variable that is updated while the same body still holds a read of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tfswap.analysis.buffers import Buffer
from tfswap.analysis.constants import constant_nodes
from tfswap.analysis.executor import Executor, Program
from tfswap.analysis.groups import Chunks, chunks_of, with_views
from tfswap.analysis.heap import Heap, Kernel
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


class _BodyNode(NamedTuple):
    """A node of a body, with the places of its tensors among the body's.

    Attributes:
        inputs: the places of its inputs.
        first_output: the place of its first output; the others follow.
        readers: the number of readers of each output.
        kernel: None where it has bodies or follows a rule of tensor_lists.py.
    """

    node: Node
    inputs: tuple[int, ...]
    first_output: int
    readers: tuple[int, ...]
    kernel: Kernel | None


@dataclass
class PreparedBody:
    """The facts of a body that all its runs share.

    A body's tensors have places in a list: first its arguments, then the outputs of its nodes.

    Attributes:
        nodes: its nodes in topological order, without feeds and constants.
        constants: for each output of a constant node its place, bytes and number of readers.
        places: the number of places.
        argument_readers: the number of readers of each argument.
        results: the places of its results.
        integers: propagates the integers that decide how it runs, and its results.
        given: propagates its results only.
        lists: whether it, or a body in it, has tensor lists.
        choices: its conditionals whose branch the step decides.
        schedules: for a lowered body, orders of starts and ends of its kernels. Runs use them in turn.
        trips: for a loop's body, the iterations by the integers of the loop's inputs.
        groups: the chunks of each group, by its first kernel.
        group_ends: the last kernel of each group.
    """

    nodes: list[_BodyNode]
    constants: list[tuple[int, int, int]]
    places: int
    argument_readers: list[int]
    results: list[int]
    integers: Integers
    given: Integers
    lists: bool
    choices: list[Node]
    schedules: list[list[tuple[_BodyNode, bool]]] = field(default_factory=list[list[tuple[_BodyNode, bool]]])
    trips: dict[tuple[Values | None, ...], Trips] = field(default_factory=dict[tuple["Values | None", ...], "Trips"])
    groups: dict[Node, Chunks] = field(default_factory=dict[Node, Chunks])
    group_ends: set[Node] = field(default_factory=set[Node])

    @classmethod
    def of(cls, body: Graph, device: DeviceModel, *, lowered: bool) -> PreparedBody:
        """The facts of a body, before its first run."""
        order, feeds = body.topological(), set(body.feeds)
        rest = [n for n in order if n not in feeds]
        constants = constant_nodes(body, order)
        first: dict[Node, int] = {}
        places = 0
        for node in (*body.feeds, *rest):
            first[node] = places
            places += len(node.outputs)
        readers = [0] * places
        for source, index in (*(t for n in order for t in n.inputs), *body.fetches):
            readers[first[source] + index] += 1
        memory = {n: memory_in(body, n, device) for n in rest if n not in constants}
        groups = [] if lowered else body.groups()
        lists = {n for n in rest if uses_lists(n)}
        deciding = [t for n in rest if n in body.bodies or n in lists for t in n.inputs]
        return cls(
            [
                _BodyNode(
                    node,
                    tuple([first[source] + index for source, index in node.inputs]),
                    first[node],
                    tuple(readers[first[node] : first[node] + len(node.outputs)]),
                    None if node in lists or node in body.bodies else Kernel.of(node, memory[node], device),
                )
                for node in rest
                if node not in constants
            ],
            [
                (first[node] + o, kind.nbytes or 0, readers[first[node] + o])
                for node in rest
                if node in constants
                for o, kind in enumerate(node.outputs)
            ],
            places,
            readers[: len(body.feeds)],
            [first[f.node] + f.index for f in body.fetches],
            Integers(body, rest, roots=(*deciding, *body.fetches)),
            Integers(body, rest, roots=body.fetches),
            any(uses_tensor_list(n.op) for b in (body, *body.all_bodies()) for n in b),
            [n for n in rest if (kind := control_flow(n.op)) and not kind.is_loop and not uses_lists(n.inputs[0].node)],
            groups={g[0]: chunks_of(body, with_views(g, rest), memory, device.intra_op_threads) for g in groups},
            group_ends={g[-1] for g in groups},
        )


Bodies = dict[Graph, PreparedBody]
"""Facts of bodies that several records of nodes of one graph share."""


NO_BUFFER = Buffer(None, 0)
"""In place of the buffers of tensors that are not made yet."""


class _Schedule(Executor):
    """Records the order in which the nodes of a body start and end."""

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
            found = PreparedBody.of(body, self._device, lowered=self._lowered is not None)
            self._prepared[body] = found
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
        buffers = [*arguments, *([NO_BUFFER] * (made.places - len(arguments)))]
        for argument, readers in zip(arguments, made.argument_readers, strict=True):
            argument.refs += readers
            if consume:
                self.heap.drop(argument)
        for place, nbytes, readers in made.constants:
            constant = buffers[place] = Buffer(None, nbytes)
            constant.refs = readers
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
        return [buffers[place] for place in made.results], [known.get(tensor) for tensor in body.fetches]

    def _run_ordered(self, body: Graph, made: PreparedBody, buffers: list[Buffer], known: Known) -> None:
        for each in made.nodes:
            if each.node in made.groups:
                self.heap.begin_group(made.groups[each.node])
            self.heap.drop_all(self._node(body, made, each, buffers, known))
            if each.node in made.group_ends:
                self.heap.end_group()

    def _run_unordered(
        self, body: Graph, made: PreparedBody, buffers: list[Buffer], known: Known, lowered: Lowered
    ) -> None:
        """Run kernels as in the executor: a kernel holds its inputs until it ends, and others run concurrently."""
        held: dict[Node, list[Buffer]] = {}
        made.schedules = made.schedules or self._schedules(body, made, lowered)
        schedule = made.schedules.pop(0)
        made.schedules.append(schedule)
        for each, started in schedule:
            if started:
                held[each.node] = self._node(body, made, each, buffers, known)
            else:
                self.heap.drop_all(held.pop(each.node))

    def _schedules(self, body: Graph, made: PreparedBody, lowered: Lowered) -> list[list[tuple[_BodyNode, bool]]]:
        """Orders in which the executor may start (True) and end (False) the nodes of a body."""
        order, feeds = body.topological(), set(body.feeds)
        cost_s = [0.0 if n in feeds or is_view(n.op) or is_const(n.op) else lowered.seconds(n) for n in order]
        run = {each.node: each for each in made.nodes}
        program = Program(order, cost_s, self._device, constants={n for n in order if n not in run})
        executor = _Schedule(program, lowered.chance)
        found: list[list[tuple[_BodyNode, bool]]] = []
        for _ in range(SCHEDULES):
            executor.log = []
            executor.run()
            found.append([(run[order[i]], started) for i, started in executor.log if order[i] in run])
        return found

    def _node(
        self, body: Graph, made: PreparedBody, each: _BodyNode, buffers: list[Buffer], known: Known
    ) -> list[Buffer]:
        """Run a node's kernel; returns the buffers that it frees when it ends."""
        node = each.node
        inputs = [buffers[place] for place in each.inputs]
        freed = inputs
        if each.kernel is not None:
            outputs = self.heap.run_kernel(each.kernel, inputs)
            if (node, 0) not in known:
                made.integers.follow_on(node, known)  # inputs from lists are known only now
        elif node in body.bodies:
            integers = [known.get(tensor) for tensor in node.inputs]
            outputs, values = self._run_node(node, body.bodies[node], inputs, integers)
            known.update({(node, i): v for i, v in enumerate(values) if v is not None})
            freed = inputs if self._lowered is None else []  # lowered, it has freed them
        else:
            call = Call(node, inputs, [known.get(tensor) for tensor in node.inputs], {})
            outputs = LIST_RULES[node.op](self.heap, call)
            known.update({(node, o): v for o, v in call.known.items() if v is not None})
        for place, (output, readers) in enumerate(zip(outputs, each.readers, strict=True), each.first_output):
            output.refs += readers
            buffers[place] = output
        return freed + outputs


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
