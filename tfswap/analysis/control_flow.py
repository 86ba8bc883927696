"""What a loop or a conditional does to the allocator: its bodies are run on paper, and their requests written down.

TensorFlow runs a functional loop or conditional whose bodies have an order (passes/tactics/order_bodies.py) one kernel
of a body after the other, so that its requests and releases are one determinate sequence. Here the bodies are walked
through in that order, iteration by iteration, with reference counts as the runtime keeps them (functional_ops.cc): what
the node is given is held until it has ended; a body's arguments from the iteration before are its own, and can be
written over. A loop or conditional that TensorFlow lowers to the executor's own control flow frees what it is
given, and the kernels of its bodies start and end as the executor replays them (analysis/executor.py). Tensor lists and
optionals live on the heap, in a scalar of the arena, or of host memory where that is a GPU's; what they keep is in the
arena.

Invariant: a pure function of the node, its bodies, and what is known of its inputs. `Record.exact` is False where
the record bounds from above what the step decides when it runs: which branch, how many of so many iterations.

Not handled: an update of a variable of which the same body still holds a read copies it; iterations of a lowered loop
that run side by side.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

from tfswap.analysis.buffers import Buffer, Contents, Element, Part
from tfswap.analysis.constants import constant_nodes
from tfswap.analysis.executor import Executor, Program
from tfswap.analysis.groups import Chunks, Served, chunks_of, with_views
from tfswap.analysis.integer_values import AtMost, Integers, Known, Loop, Values, as_feeds, common
from tfswap.analysis.output_bytes import is_on_host, tensor_bytes
from tfswap.analysis.pools import Merged, Way, reached, structure
from tfswap.analysis.request_log import Logged, events_of
from tfswap.analysis.tensor_lists import LIST_RULES, Call
from tfswap.errors import UnsupportedGraph
from tfswap.ir.custom_ops import RELOCATED
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import (
    control_flow,
    is_const,
    is_view,
    reads_variable,
    turns_on_copy_on_read,
    uses_tensor_list,
    writes_variable,
)
from tfswap.kernels import kernel_memory
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.events import Event
from tfswap.kernels.memory_rules import VARIANT_BYTES

STEADY_TRIPS = 3
"""Iterations that stand for all, where one leaves behind as much as the one before."""
RELOCATED_TRIPS = 2
"""The same where an iteration's results are relocated: one that is given what the loop is, and one its own results."""
LOWERED_RUNS = 5
"""Of a lowered loop or conditional so many runs are compared: an odd number, so that there is a middle one."""
SCHEDULES = 3
"""So many orders of a lowered body's kernels are replayed, one after another."""
UNKNOWN_TRIPS = 8
"""Iterations that a loop is taken to have, for its time, where how many there are is not known."""


class Keeps(NamedTuple):
    """What a list keeps: outputs, numbered as in `Record.events`; values of the step; inputs, with what those keep."""

    outputs: tuple[int, ...]
    values: tuple[int, ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """A loop's or conditional's dealings with the allocator.

    Attributes:
        events: as `KernelMemory.events`, and ("release", value) of one that was given up; ("split", bytes) of one of
            the next requests, which is to get a chunk of its own size, ("part", 0) after the last of these, and
            ("rest", 0) where what parts the latest is given back. Outputs from the node's own number of outputs on are
            buffers that its lists keep.
        part_bytes: sizes of those buffers.
        alias: by output, the input whose buffer or list it is.
        twins: by output, the output before it whose buffer or list it is.
        keeps: by output, what its list keeps.
        contents: by output, what is known of its list.
        integers: by output, its values where they are known.
        exact: whether `events` are what the allocator sees, or a bound.
        undetermined: the loops and conditionals in it, and itself, of which the step decides how often they run, or
            which branch, so that where their results lie is not known.
        undecided: how many branches there are, at most, of conditionals where the step decides which is taken and they
            do not all ask for the same.
        repeated: whether such a conditional runs in a loop, now one branch and now another.
        ends_early: whether a loop may end before its last iteration, and leave other holes then.
        endless: whether there is no last iteration of such a loop, so that not all of its ends can be tried.
        decided: whether the step decides nothing: of no conditional which branch is taken, of no loop when it ends.
        runs: how often each body runs.
        out_bytes, in_bytes: what the copies in the bodies take to the host, and back.
        away_bytes: what of that is still in host memory when the node has ended.
        passing_bytes: the most that is held in addition, while it runs.
    """

    events: tuple[Event, ...] = ()
    part_bytes: tuple[int, ...] = ()
    alias: dict[int, int] = field(default_factory=dict[int, int])
    twins: dict[int, int] = field(default_factory=dict[int, int])
    keeps: dict[int, Keeps] = field(default_factory=dict[int, "Keeps"])
    contents: dict[int, Contents] = field(default_factory=dict[int, Contents])
    integers: dict[int, Values] = field(default_factory=dict[int, Values])
    exact: bool = True
    undetermined: tuple[Node, ...] = ()
    undecided: int = 0
    repeated: bool = False
    ends_early: bool = False
    endless: bool = False
    decided: bool = True
    runs: dict[Graph, float] = field(default_factory=dict[Graph, float])
    out_bytes: int = 0
    in_bytes: int = 0
    away_bytes: int = 0
    passing_bytes: int = 0


@dataclass
class _Prepared:
    """A body, ready to be run many times.

    Attributes:
        integers: follows what decides how it runs, and what it gives.
        given: the same of what it gives alone.
        schedules: of a lowered body, in what order its kernels start and end; runs take them in turn.
        trips: of a loop's body, by the integers that the loop is given, how often it runs.
        groups: by the first kernel of each group, its chunks.
    """

    order: list[Node]
    memory: dict[Node, kernel_memory.KernelMemory]
    uses: dict[tuple[Node, int], int]
    integers: Integers
    given: Integers
    constants: set[Node]
    lists: bool
    choices: list[Node]
    schedules: list[list[tuple[Node, bool]]]
    trips: dict[tuple[Values | None, ...], tuple[list[list[Values | None]] | None, bool]]
    groups: dict[Node, Chunks]


Bodies = dict[Graph, _Prepared]
"""What is known of bodies whatever runs them: for several records of nodes of one graph."""

Seconds = Callable[[Node], float]
"""Says how long a node's kernel takes."""


class Course(Protocol):
    """What a step decides when it runs."""

    def branch(self, iteration: int, branches: int) -> int:
        """Which branch is taken next, in this iteration of a loop, of so many branches."""
        ...

    def trips(self, most: int) -> int:
        """How many iterations the next loop has, of at most so many."""
        ...


class UnboundedLoop(UnsupportedGraph):
    """A loop keeps something of each iteration, and how many there are is not known.

    Attributes:
        loop: its node's name.
    """

    def __init__(self, loop: str, kept_bytes: int):
        super().__init__(
            f"the loop {loop!r} keeps {kept_bytes} bytes of each iteration, and how many iterations there are is not "
            "known before the step runs: its memory has no bound."
        )
        self.loop = loop


def record(
    node: Node,
    bodies: Sequence[Graph],
    device: DeviceModel,
    contents: Sequence[Contents | None],
    integers: Sequence[Values | None],
    *,
    strict: bool = True,
    given_up: Sequence[int | None] = (),
    lowered: Seconds | None = None,
    course: Course | None = None,
    covering: Sequence[int] | None = None,
    prepared: Bodies | None = None,
) -> Record:
    """What a loop or a conditional does to the allocator.

    Args:
        contents: by input, what is known of its list.
        integers: by input, its values where they are known.
        strict: raise UnsupportedGraph when a loop keeps something of each iteration, and how many there are is not
            known; else a few iterations stand for it.
        given_up: by input, the value of the step that it is, where TensorFlow lowers the node to an executor's own
            control flow: who gave it holds it no longer, and it is released as soon as a body has read it last.
        lowered: seconds of a kernel, where TensorFlow lowers the node: the kernels of bodies have no order then. The
            record is that of the run that peaks in the middle of a few.
        course: what the step decides; by default a bound is found.
        covering: by input, the bytes that are held with it. Where these are given, the record covers all courses: at
            each point it holds for each buffer of a course another that is no smaller.
        prepared: gets what is known of the bodies, of the same device; not of nodes that are lowered.
    """
    if lowered is None:
        machine = Machine(device, strict, course=course, covering=covering is not None, prepared=prepared)
        return _run_of(machine, node, bodies, contents, integers, (), covering or ())[1]
    runs = [
        _run_of(
            Machine(device, strict, lowered=lowered, chance=random.Random(seed), course=course),
            node,
            bodies,
            contents,
            integers,
            given_up,
        )
        for seed in range(LOWERED_RUNS)
    ]
    return sorted(runs, key=lambda run: run[0])[len(runs) // 2][1]


def _run_of(
    machine: Machine,
    node: Node,
    bodies: Sequence[Graph],
    contents: Sequence[Contents | None],
    integers: Sequence[Values | None],
    given_up: Sequence[int | None],
    given_bytes: Sequence[int] = (),
) -> tuple[int, Record]:
    """The most that a run has made at once, in bytes, and its record."""
    inputs = machine.inputs(node, contents)
    for buffer, nbytes in zip(inputs, given_bytes, strict=False):
        buffer.nbytes = max(buffer.nbytes, nbytes)
    for buffer, value in zip(inputs, given_up, strict=False):
        machine.give_up(buffer, value)
    outputs, known = machine.control_flow(node, bodies, inputs, integers)
    return machine.peak_bytes, machine.write_down(outputs, known)


def record_list(
    node: Node,
    device: DeviceModel,
    contents: Sequence[Contents | None],
    integers: Sequence[Values | None],
    *,
    covering: bool = False,
) -> Record:
    """What an op of lists does to the allocator. Arguments as those of `record`."""
    machine = Machine(device, strict=True, covering=covering)
    call = Call(node, machine.inputs(node, contents), integers, {})
    outputs = LIST_RULES[node.op](machine, call)
    return machine.write_down(outputs, [call.known.get(o) for o in range(len(outputs))])


def uses_lists(node: Node) -> bool:
    """Whether the node makes or reads a list, in a way that lists.py knows."""
    if node.op not in LIST_RULES:
        return False
    return any(t.type.dtype == "variant" for t in (*node.inputs, *map(node.out, _indices(node))))


class ResourcesUsed(NamedTuple):
    """What a node's bodies do with the variables that it is given, by position of the input.

    Attributes:
        written: which they write.
        sparsely_read: which they read in part.
        nbytes: how large those are that they read or write.
    """

    written: tuple[int, ...]
    sparsely_read: tuple[int, ...]
    nbytes: dict[int, int]


def resources_used(node: Node, bodies: Sequence[Graph]) -> ResourcesUsed:
    """Which variables the bodies of `node` write, and which they read in part."""
    kind = control_flow(node.op)
    assert kind is not None
    written: set[int] = set()
    sparse: set[int] = set()
    nbytes: dict[int, int] = {}
    for body in bodies:
        position = {(feed, 0): kind.first_argument + i for i, feed in enumerate(body.feeds)}
        for inner in body.topological():
            places = [position.get((t.node, t.index)) for t in inner.inputs]
            if inner in body.bodies:
                used = resources_used(inner, body.bodies[inner])
                written.update(p for i in used.written if (p := places[i]) is not None)
                sparse.update(p for i in used.sparsely_read if (p := places[i]) is not None)
                nbytes.update({p: n for i, n in used.nbytes.items() if (p := places[i]) is not None})
            elif is_view(inner.op):
                position.update({(inner, o): p for o, p in enumerate(places) if p is not None})
            resources = [p for p, t in zip(places, inner.inputs, strict=True) if t.type.dtype == "resource"]
            if reads_variable(inner.op) or writes_variable(inner.op):
                # What is read, or else the largest of what is written: slots are as large as their variable.
                touched = inner.outputs or [t.type for t in inner.inputs]
                size = max((kind.nbytes or 0 for kind in touched), default=0)
                nbytes.update({p: max(size, nbytes.get(p, 0)) for p in resources if p is not None})
            if writes_variable(inner.op):
                written.update(p for p in resources if p is not None)
            if turns_on_copy_on_read(inner.op):
                sparse.update(p for p in resources if p is not None)
    return ResourcesUsed(tuple(sorted(written)), tuple(sorted(sparse)), nbytes)


MOST_AT_ONCE = 10
"""How many iterations of a loop TensorFlow lets run side by side where its node does not say."""


def overlapping_bytes(graph: Graph) -> int:
    """The most that iterations of lowered loops make while another one runs.

    Those that need not wait for one another run side by side, as far as there are threads, and hold what they hold.
    """
    return sum(_overlapping_bytes(node, bodies) for node, bodies in graph.bodies.items())


def _overlapping_bytes(node: Node, bodies: Sequence[Graph]) -> int:
    kind = control_flow(node.op)
    assert kind is not None
    if not kind.is_loop:
        return max(map(overlapping_bytes, bodies), default=0)
    at_once = node.attrs.get("parallel_iterations", MOST_AT_ONCE)
    others = at_once - 1 if isinstance(at_once, int) else MOST_AT_ONCE - 1
    feeds = set(bodies[1].feeds)
    made = (n for n in bodies[1] if n not in feeds and not is_view(n.op) and not is_const(n.op))
    each = sum(kind.nbytes or 0 for n in made for kind in n.outputs)
    return others * each + (others + 1) * overlapping_bytes(bodies[1])


class _BodyRun(Executor):
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


class Machine:
    """Runs bodies on paper."""

    def __init__(
        self,
        device: DeviceModel,
        strict: bool,
        lowered: Seconds | None = None,
        chance: random.Random | None = None,
        course: Course | None = None,
        covering: bool = False,
        prepared: Bodies | None = None,
    ):
        self.device = device if lowered else device.in_bodies
        self.covering = covering
        self._seconds = lowered
        self._chance = chance
        self.course = course
        self.undecided = 0
        self.repeated = False
        self.ends_early = self.endless = False
        self.decided = True
        self.undetermined: dict[Node, None] = {}
        self.strict = strict
        self.lowered = lowered is not None
        self.exact = True
        self.live_bytes = 0
        self.peak_bytes = 0
        self.runs: dict[Graph, float] = {}
        self._weight = 1.0  # how many iterations each one that is run stands for
        self._out_bytes = self._in_bytes = 0.0
        self._away_bytes = self._most_away_bytes = 0
        self._log: list[Logged] = []
        self._count = 0
        self._prepared: Bodies = {} if prepared is None else prepared
        self._taken = 0  # of the requests of a group's kernel
        self._served: dict[Node, list[Served]] = {}  # of the group that runs
        self._chunks: list[Buffer] = []  # of it, what lies in each
        self._kept: list[Buffer] | None = None  # what is freed when the kernels of a group have ended
        self._iterations: list[int] = []  # that are running, of loops one inside of the other

    # --- buffers ---------------------------------------------------------------------------------------------

    def inputs(self, node: Node, contents: Sequence[Contents | None]) -> list[Buffer]:
        """A node's inputs, of which its lists' contents may be known."""
        known = [c if t.type.dtype == "variant" else () for t, c in zip(node.inputs, contents, strict=True)]
        return [self.given(i, tensor_bytes(t.type), known[i]) for i, t in enumerate(node.inputs)]

    def given(self, source: int, nbytes: int, contents: Contents | None) -> Buffer:
        """What the node is given: it is there, and stays."""
        made = Buffer(None, nbytes, source)
        made.endless = contents is None
        made.parts = _given_parts(contents, source)
        return made

    def give_up(self, buffer: Buffer, value: int | None) -> None:
        """What the node is given is its own, with all that it keeps."""
        buffer.value, buffer.refs = value, 1
        seen: set[int | None] = {None}
        pending = list(buffer.parts)
        while pending:
            part = pending.pop()
            if part is not None:
                pending += part.buffer.parts
                part.buffer.refs = 1
                if part.buffer.value in seen:
                    part.buffer.value = None
                seen.add(part.buffer.value)

    def allocate(self, nbytes: int, on_host: bool = False) -> Buffer:
        """A buffer that its maker holds."""
        made = Buffer(None, nbytes)
        made.refs, made.on_host = 1, on_host
        if nbytes > 0:
            made.number = self._count
            self._count += 1
            self._log.append(("request", made.number, made.arena_bytes))
            self.live_bytes += round_up(made.arena_bytes)
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return made

    def allocate_on_host(self, nbytes: int) -> Buffer:
        """What a GPU's kernel has in host memory, such as a list's scalar, and a CPU's in the arena."""
        return self.allocate(nbytes, on_host=self.device.kind == "gpu")

    def hold(self, buffer: Buffer) -> Buffer:
        buffer.refs += 1
        return buffer

    def drop(self, buffer: Buffer) -> None:
        """A buffer has one owner less."""
        if self._kept is not None:
            self._kept.append(buffer)
            return
        buffer.refs -= 1
        given = buffer.number is None and buffer.source is not None
        if buffer.refs or (given and not self.lowered):
            return
        self._away_bytes -= buffer.away_bytes
        for part in buffer.parts:
            if part is not None:
                self.drop(part.buffer)
        if buffer.ahead is not None:
            self.drop(buffer.ahead)
        if given and buffer.value is not None:
            self._log.append(("release", buffer.value, 0))
        if buffer.number is None:
            return
        self._log.append(("free", buffer.number, 0))
        self.live_bytes -= round_up(buffer.arena_bytes)

    def _end_group(self) -> None:
        """The kernels of a group have all ended."""
        kept, self._kept = self._kept or [], None
        for buffer in kept:
            self.drop(buffer)

    def _serve(self, node: Node, nbytes: int) -> Buffer:
        """A buffer for the next request of a group's kernel, in the chunk that serves it."""
        chunk = self._served[node][self._taken].chunk
        self._taken += 1
        if chunk == len(self._chunks):
            self._chunks.append(self.allocate(nbytes))
        else:
            last, made = self._chunks[chunk], Buffer(None, nbytes)
            made.number, last.number, made.refs = last.number, None, 1
            self._chunks[chunk] = made
        return self._chunks[chunk]

    def is_dying(self, buffer: Buffer) -> bool:
        """Whether nobody but the running kernel holds it."""
        return buffer.refs == 1 and buffer.number is not None and self._kept is None

    def split(self, sizes: Iterable[int]) -> None:
        """The next requests get no larger chunks than they need."""
        self._log.extend(("split", size, 0) for size in sizes)
        self._log.append(("part", 0, 0))

    def free_rest(self) -> None:
        """What parts them from the rest of these chunks is given back."""
        self._log.append(("rest", 0, 0))

    def copies_out(self, nbytes: int, handle: Buffer) -> None:
        """A copy to the host starts, which is there for as long as its handle."""
        self._out_bytes += self._weight * round_up(nbytes)
        handle.away_bytes = round_up(nbytes)
        self._away_bytes += handle.away_bytes
        self._most_away_bytes = max(self._most_away_bytes, self._away_bytes)

    def copies_in(self, nbytes: int) -> None:
        """A copy back starts."""
        self._in_bytes += self._weight * round_up(nbytes)

    # --- functions -------------------------------------------------------------------------------------------

    def _prepare(self, body: Graph) -> _Prepared:
        found = self._prepared.get(body)
        if found is None:
            order = body.topological()
            uses: dict[tuple[Node, int], int] = {}
            for tensor in (*(t for n in order for t in n.inputs), *body.fetches):
                uses[tensor.node, tensor.index] = uses.get((tensor.node, tensor.index), 0) + 1
            feeds = set(body.feeds)
            rest = [n for n in order if n not in feeds]
            deciding = [t for n in rest if n in body.bodies or uses_lists(n) for t in n.inputs]
            found = self._prepared[body] = _Prepared(
                rest,
                {n: _memory(body, n, self.device) for n in rest},
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
                [],
                {},
                {},
            )
        return found

    def _schedules(self, body: Graph, constants: set[Node]) -> list[list[tuple[Node, bool]]]:
        """Orders in which the executor may start (True) and end (False) the nodes of a body."""
        assert self._chance is not None and self._seconds is not None
        order, feeds, seconds = body.topological(), set(body.feeds), self._seconds
        cost_s = [0.0 if n in feeds or is_view(n.op) or is_const(n.op) else seconds(n) for n in order]
        there = constants | feeds
        program = Program(order, cost_s, self.device, constants=there)
        executor = _BodyRun(program, self._chance)
        found: list[list[tuple[Node, bool]]] = []
        for _ in range(SCHEDULES):
            executor.log = []
            executor.run()
            found.append([(order[i], started) for i, started in executor.log if order[i] not in there])
        return found

    def _run(
        self, body: Graph, arguments: Sequence[Buffer], integers: Sequence[Values | None], consume: bool
    ) -> tuple[list[Buffer], list[Values | None]]:
        """Run a function; its results are held once each.

        Args:
            consume: whether the arguments are the function's own, as a loop's are from its second iteration on:
                it frees them as soon as it has read them.
        """
        made = self._prepare(body)
        self.runs[body] = self.runs.get(body, 0.0) + self._weight
        there: dict[tuple[Node, int], Buffer] = {}
        for feed, argument in zip(body.feeds, arguments, strict=True):
            there[feed, 0] = argument
            argument.refs += made.uses.get((feed, 0), 0)
            if consume:
                self.drop(argument)
        known = made.integers.follow(as_feeds(body, integers))
        if self.course is not None and self._iterations:
            # What decides is known from here on: the gradient's conditional finds it among what has been saved.
            for node in made.choices:
                decides = node.inputs[0].node, node.inputs[0].index
                if isinstance(known.get(decides), AtMost | None):
                    branch = self._chosen(body.bodies[node])
                    known = made.integers.follow({**known, decides: deciding(node, branch)})
        if self.lowered:
            self._run_unordered(body, made, there, known)
        else:
            self._run_ordered(body, made, there, known)
        results = [(f.node, f.index) for f in body.fetches]
        return [there[r] for r in results], [known.get(r) for r in results]

    def _run_ordered(self, body: Graph, made: _Prepared, there: dict[tuple[Node, int], Buffer], known: Known) -> None:
        groups = {group[0]: group for group in body.groups()}
        last = {group[-1] for group in groups.values()}
        for node in made.order:
            if node in groups:
                chunks = self._group_chunks(body, made, groups[node])
                self._served, self._chunks = chunks.served, []
                self._kept = [self.allocate(chunks.reserved)] if chunks.reserved else []
            for buffer in self._node(body, made, node, there, known):
                self.drop(buffer)
            if node in last:
                self._end_group()

    def _group_chunks(self, body: Graph, made: _Prepared, group: list[Node]) -> Chunks:
        if group[0] not in made.groups:
            made.groups[group[0]] = chunks_of(
                body, with_views(group, made.order), made.memory, self.device.intra_op_threads
            )
        return made.groups[group[0]]

    def _run_unordered(self, body: Graph, made: _Prepared, there: dict[tuple[Node, int], Buffer], known: Known) -> None:
        """As the executor does it: a kernel holds its inputs until it ends, and others run concurrently."""
        held: dict[Node, list[Buffer]] = {}
        made.schedules = made.schedules or self._schedules(body, made.constants)
        schedule = made.schedules.pop(0)
        made.schedules.append(schedule)
        for node in made.order:
            if node in made.constants:  # computed before the step
                for buffer in self._node(body, made, node, there, known):
                    self.drop(buffer)
        for node, started in schedule:
            if started:
                held[node] = self._node(body, made, node, there, known)
            else:
                for buffer in held.pop(node):
                    self.drop(buffer)

    def _node(
        self, body: Graph, made: _Prepared, node: Node, there: dict[tuple[Node, int], Buffer], known: Known
    ) -> list[Buffer]:
        """Run a node's kernel; returns the buffers that it frees when it ends."""
        inputs = [there[t.node, t.index] for t in node.inputs]
        if node in made.constants:
            outputs = [self.hold(Buffer(None, kind.nbytes or 0)) for kind in node.outputs]
        elif node in body.bodies:
            integers = [known.get((t.node, t.index)) for t in node.inputs]
            outputs, values = self.control_flow(node, body.bodies[node], inputs, integers)
            known.update({(node, i): v for i, v in enumerate(values) if v is not None})
        elif uses_lists(node):
            call = Call(node, inputs, [known.get((t.node, t.index)) for t in node.inputs], {})
            outputs = LIST_RULES[node.op](self, call)
            known.update({(node, o): v for o, v in call.known.items() if v is not None})
        else:
            outputs = self._kernel(node, made.memory[node], inputs)
            if (node, 0) not in known:
                made.integers.follow_on(node, known)  # from what lists gave, say
        for index, output in enumerate(outputs):
            output.refs += made.uses.get((node, index), 0)
            there[node, index] = output
        taken_over = self.lowered and node in body.bodies
        return [*outputs] if taken_over else [*inputs, *outputs]

    def _kernel(self, node: Node, memory: kernel_memory.KernelMemory, inputs: Sequence[Buffer]) -> list[Buffer]:
        """A kernel's outputs, each held once."""
        self.exact &= memory.exact
        forward = dict(memory.forward)
        temp_forward = dict(memory.temp_forward)
        outputs: dict[int, Buffer] = {}
        temps: list[Buffer | None] = []
        self._taken = 0

        def request(nbytes: int) -> Buffer:
            in_group = nbytes > 0 and self._kept is not None and node in self._served
            return self._serve(node, nbytes) if in_group else self.allocate(nbytes)

        def fresh(index: int) -> Buffer:
            nbytes = node.outputs[index].nbytes or 0
            return self.allocate(nbytes, on_host=True) if is_on_host(node, index, self.device) else request(nbytes)

        for event, amount in memory.events:
            if event == "out":
                taken = [inputs[c] for c in forward.get(amount, ()) if self.is_dying(inputs[c])]
                outputs[amount] = self.hold(taken[0]) if taken else fresh(amount)
            elif event == "temp":
                taken = [c for c in temp_forward.get(len(temps), ()) if self.is_dying(inputs[c])]
                temps.append(None if taken else request(amount))
            elif event == "free" and (temp := temps[amount]) is not None:
                self.drop(temp)
                temps[amount] = None
        for temp in reversed(temps):
            if temp is not None:
                self.drop(temp)
        for output, source in memory.alias:
            if output not in outputs:
                outputs[output] = self.hold(inputs[source])
        return [outputs[o] if o in outputs else self.hold(Buffer(None, 0)) for o in _indices(node)]

    # --- loops and conditionals --------------------------------------------------------------------------------

    def control_flow(
        self, node: Node, bodies: Sequence[Graph], inputs: Sequence[Buffer], integers: Sequence[Values | None]
    ) -> tuple[list[Buffer], list[Values | None]]:
        """Run what `node` runs; its outputs are held once each. Lowered, it frees its inputs, once each."""
        kind = control_flow(node.op)
        assert kind is not None
        arguments = inputs[kind.first_argument :]
        given = integers[kind.first_argument :]
        if kind.is_loop:
            return self._loop(node, bodies[0], bodies[1], arguments, given)
        choice = None if isinstance(integers[0], AtMost) else integers[0]
        known = None
        relocated = None if self.lowered else relocated_places(node)
        self.decided &= choice is not None or relocated is not None
        if choice is None and relocated is None and self.course is not None:
            branch = bodies[self._chosen(bodies)]
        elif choice is not None and node.inputs[0].type.dtype == "bool":
            branch = bodies[0 if choice[0] else 1]
        elif choice is not None:
            branch = bodies[choice[0] if 0 <= choice[0] < len(bodies) else -1]
        elif relocated is not None:
            return self._any_branch(bodies, arguments, given, relocated)
        elif self.covering:
            return self._all_branches(bodies, arguments, given)
        else:
            branch, known = self._worst(node, bodies, arguments, given)
            self.exact = False
        results, its = self._run(branch, arguments, given, consume=self.lowered)
        if relocated is not None:
            self._relocate(relocated, results, branch)
        if self.lowered:
            self.drop(inputs[0])
        return results, its if known is None else known

    def _chosen(self, bodies: Sequence[Graph]) -> int:
        assert self.course is not None
        return self.course.branch(self._iterations[-1] if self._iterations else 0, len(bodies))

    def _any_branch(
        self,
        bodies: Sequence[Graph],
        arguments: Sequence[Buffer],
        integers: Sequence[Values | None],
        relocated: Sequence[int],
    ) -> tuple[list[Buffer], list[Values | None]]:
        """Run one branch after another: each finds what the one before has found, and leaves the same results."""
        self.exact = False
        results: list[Buffer] = []
        for branch in bodies:
            for buffer in results:
                self.drop(buffer)
            results, _ = self._run(branch, arguments, integers, consume=False)
        self._relocate(relocated, results, *bodies)
        return results, [None] * len(results)

    def _all_branches(
        self, bodies: Sequence[Graph], arguments: Sequence[Buffer], integers: Sequence[Values | None]
    ) -> tuple[list[Buffer], list[Values | None]]:
        """Run one branch after another, and give what covers the results of each."""
        self.exact = False
        ways: list[Way] = []
        known: list[list[Values | None]] = []
        for branch in bodies:
            results, its = self._run(branch, arguments, integers, consume=False)
            ways.append(Way.of(results))
            known.append(its)
            for buffer in results:
                self.drop(buffer)
        return self._merged(Merged.of(ways), []), common(known)

    def _merged(self, merged: Merged, results: Sequence[Buffer]) -> list[Buffer]:
        """What covers the results of several ways, in place of `results`; held once each."""
        shared = [self.hold(b) for b in merged.shared]
        same = [None if b is None else self.hold(b) for b in merged.same]
        for buffer in results:
            self.drop(buffer)
        pool = self.hold(Buffer(None, 0))
        pool.parts = [Part(b, b.nbytes) for b in (*shared, *map(self.allocate, merged.pool_bytes))]
        found: list[Buffer] = []
        for result, buffer in enumerate(same):
            made = self.allocate(merged.nbytes[result]) if buffer is None else buffer
            if buffer is None:
                made.parts = merged.parts(result, pool)
                for part in made.parts:
                    if part is not None:
                        self.hold(part.buffer)
            found.append(made)
        self.drop(pool)
        return found

    def _relocate(self, places: Sequence[int], results: list[Buffer], *bodies: Graph) -> None:
        """Give results buffers that are requested in their order, once all of them have been freed.

        Args:
            bodies: that may have given them.
        """
        for place in places:
            self.drop(results[place])
        for place in places:
            sizes = (body.fetches[place].type.nbytes or 0 for body in bodies)
            results[place] = self.allocate(max(sizes))

    def _worst(
        self, node: Node, bodies: Sequence[Graph], arguments: Sequence[Buffer], integers: Sequence[Values | None]
    ) -> tuple[Graph, list[Values | None]]:
        """The branch that leaves most behind, and the integers that all branches give. Takes, and gives back, what
        another one has more at its worst.
        """
        known: list[list[Values | None]] = []
        found: list[tuple[int, int, Graph]] = []
        requests: set[tuple[Logged, ...]] = set()
        for body in bodies:
            trial = Machine(self.device, self.strict, prepared=self._prepared)
            stand_ins = [
                trial.given(i, a.nbytes, None if a.endless else _contents(a, {})) for i, a in enumerate(arguments)
            ]
            known.append(trial._run(body, stand_ins, integers, consume=False)[1])
            # What a branch passes on, or saves, of what it is given stays after all others have released it.
            given = (*stand_ins, *(part.buffer for b in stand_ins for part in b.parts if part is not None))
            kept_bytes = sum(round_up(b.nbytes) for b in given if b.refs)
            found.append((trial.live_bytes + kept_bytes, trial.peak_bytes, body))
            requests.add(tuple(trial._log))
            self.undetermined.update(trial.undetermined)
        if len(requests) > 1:
            self.undetermined[node] = None
            self.undecided = max(self.undecided, len(bodies))
            self.repeated |= bool(self._iterations)
        _, peak, branch = max(found, key=lambda f: f[:2])
        highest = max(f[1] for f in found)
        if highest > peak:
            self.drop(self.allocate(highest))
        return branch, common(known)

    def _loop(
        self,
        node: Node,
        condition: Graph,
        body: Graph,
        arguments: Sequence[Buffer],
        integers: Sequence[Values | None],
    ) -> tuple[list[Buffer], list[Values | None]]:
        trips, certain = self._trips(condition, body, integers)
        if trips is None or not certain:
            self.undetermined[node] = None
        relocated = None if self.lowered else relocated_places(node)
        ended = None if trips is None else trips[-1] if certain else common(trips, bounds=True)
        steady = not self._prepare(body).lists and not self._prepare(condition).lists
        enough = STEADY_TRIPS if relocated is None else RELOCATED_TRIPS
        chosen = False  # whether how many iterations there are is
        if not certain and relocated is None and (trips is not None or not steady):
            self.decided, self.ends_early = False, True
            self.endless |= trips is None
            if self.course is not None:
                most = self.course.trips(UNKNOWN_TRIPS if trips is None else len(trips) - 1)
                trips = trips and trips[: 1 + most]
                ended = trips[-1] if trips else None
                enough = most if trips is None else enough
                chosen = True
        count = enough if trips is None or (steady and len(trips) > enough) else len(trips) - 1
        held = list(arguments) if self.lowered else [self.hold(a) for a in arguments]
        several = self.covering and not certain and relocated is None
        all_run = chosen if trips is None else len(trips) - 1 == count
        ways = [Way.of(held)]
        before: tuple[object, ...] = ()
        values = list(integers) if all_run else self._iterated(condition, body).unchanging(integers)
        left = self.live_bytes
        weight = self._weight
        if count:
            self._weight *= (UNKNOWN_TRIPS if trips is None else len(trips) - 1) / count
        self._iterations.append(0)
        for iteration in range(count):
            self._iterations[-1] = iteration
            results, _ = self._run(condition, held, values, consume=False)
            self.drop(results[0])
            left, before = self.live_bytes, structure(held) if self.covering else ()
            held, values = self._run(body, held, values, consume=True)
            if relocated is not None:
                self._relocate(relocated, held, body)
            if several:
                ways.append(Way.of(held))
        self._iterations.pop()
        if trips is None and self.live_bytes != left:
            self.exact = False
        if self.covering and trips is None and count and structure(held) != before:
            raise UnboundedLoop(node.name, self.live_bytes - left)
        if self.strict and (trips is None or len(trips) - 1 != count) and self.live_bytes != left:
            raise UnboundedLoop(node.name, self.live_bytes - left)
        self._weight = weight
        results, _ = self._run(condition, held, values, consume=False)
        self.drop(results[0])
        if relocated is not None and not count:
            self._relocate(relocated, held, body)
        if several:
            held = self._merged(Merged.of(ways), held)
        return held, ended if ended is not None else [None] * len(held)

    def _iterated(self, condition: Graph, body: Graph) -> Loop:
        return Loop(condition, body, self._prepare(condition).given, self._prepare(body).given)

    def _trips(
        self, condition: Graph, body: Graph, integers: Sequence[Values | None]
    ) -> tuple[list[list[Values | None]] | None, bool]:
        """The loop variables' integers before each iteration, and after the last; None where the end is not known.
        And whether it ends there, or may end before.
        """
        made, key = self._prepare(body), tuple(integers)
        if key not in made.trips:
            made.trips[key] = self._iterated(condition, body).run(integers)
        found, certain = made.trips[key]
        self.exact &= certain
        return found, certain

    # --- the record ------------------------------------------------------------------------------------------

    def _in_arena(self, buffer: Buffer) -> Buffer:
        """A result, or, of an element of a pool, a buffer that keeps the pool."""
        if buffer.number is not None or buffer.source is not None or not buffer.parts or not self.covering:
            return buffer
        made = self.allocate(max(1, *(p.nbytes for p in buffer.parts if p is not None)))
        made.parts = buffer.parts
        return made

    def write_down(self, outputs: Sequence[Buffer], known: Sequence[Values | None]) -> Record:
        """The record, of a run that has given `outputs`."""
        outputs = [self._in_arena(buffer) for buffer in outputs]
        alias: dict[int, int] = {}
        twins: dict[int, int] = {}
        keeps: dict[int, Keeps] = {}
        names: dict[int | None, int] = {}  # allocation to output
        for o, buffer in enumerate(outputs):
            if buffer.number is None:
                if buffer.source is not None:
                    alias[o] = buffer.source
            elif buffer.number in names:
                twins[o] = names[buffer.number]
            else:
                names[buffer.number] = o
        part_bytes: list[int] = []
        lists: list[int] = []
        for o, buffer in enumerate(outputs):
            if o in alias:
                continue
            kept, values, inputs = dict[int, None](), dict[int, None](), dict[int, None]()
            pending = [p.buffer for p in buffer.parts if p is not None] if buffer.number is not None else []
            if buffer.endless and buffer.source is not None:
                inputs[buffer.source] = None
            elif buffer.parts or buffer.nbytes == VARIANT_BYTES:
                lists.append(o)
            while pending:
                part = pending.pop()
                pending += [p.buffer for p in part.parts if p is not None]
                pending += [] if part.ahead is None else [part.ahead]
                if part.number is None:
                    if part.value is not None:
                        values[part.value] = None
                    elif part.source is not None:
                        inputs[part.source] = None
                    continue
                if part.number not in names:
                    names[part.number] = len(outputs) + len(part_bytes)
                    part_bytes.append(part.arena_bytes)
                kept[names[part.number]] = None
            if kept or values or inputs:
                keeps[o] = Keeps(tuple(kept), tuple(values), tuple(inputs))
        contents = {o: _contents(outputs[o], names) for o in lists}
        integers = {o: v for o, v in enumerate(known) if v is not None}
        return Record(
            tuple(events_of(self._log, names)),
            tuple(part_bytes),
            alias,
            twins,
            keeps,
            contents,
            integers,
            self.exact,
            tuple(self.undetermined),
            self.undecided,
            self.repeated,
            self.ends_early,
            self.endless,
            self.decided,
            self.runs,
            int(self._out_bytes),
            int(self._in_bytes),
            self._away_bytes,
            self._most_away_bytes - self._away_bytes,
        )


def group_chunks(body: Graph, group: Sequence[Node], device: DeviceModel) -> Chunks:
    """The chunks of one of the body's groups, given with the views between its kernels."""
    memory = {node: _memory(body, node, device.in_bodies) for node in group}
    return chunks_of(body, group, memory, device.intra_op_threads)


def relocated_places(node: Node) -> tuple[int, ...] | None:
    """The results of a loop's iteration, or of a branch, that are relocated; None where nothing is."""
    return cast("tuple[int, ...] | None", node.attrs.get(RELOCATED))


def deciding(node: Node, branch: int) -> Values:
    """What a conditional reads that takes this branch."""
    return (int(branch == 0),) if node.inputs[0].type.dtype == "bool" else (branch,)


def _contents(buffer: Buffer, names: Mapping[int | None, int]) -> Contents:
    """What is known of a list, some of whose elements' allocations are outputs, by `names`."""
    return tuple(None if p is None else _element(p, names) for p in buffer.parts)


def _element(part: Part, names: Mapping[int | None, int]) -> Element:
    buffer = part.buffer
    if part.pool is not None:  # whose buffers the lists keep by `Record.keeps`
        pool_bytes = sum(round_up(b.nbytes) for b in reached(buffer)) + round_up(buffer.nbytes)
        return Element(pool_bytes, part.values, is_list=part.is_list, pool=part.pool)
    kept = None if buffer.endless else _contents(buffer, names)
    return Element(part.nbytes, part.values, buffer.value, names.get(buffer.number), kept, part.is_list, part.pool)


def _given_element(element: Element, source: int) -> Buffer:
    """An element of a list that comes with an input."""
    made = Buffer(None, element.nbytes, source, element.value)
    made.parts = _given_parts(element.parts, source)
    made.endless = element.parts is None
    return made


def _given_parts(contents: Contents | None, source: int) -> list[Part | None]:
    return [
        None if e is None else Part(_given_element(e, source), e.nbytes, e.values, e.is_list, e.pool)
        for e in contents or ()
    ]


def _indices(node: Node) -> range:
    return range(len(node.outputs))


def _memory(body: Graph, node: Node, device: DeviceModel) -> kernel_memory.KernelMemory:
    values = {p: c for p, t in enumerate(node.inputs) if (c := body.small_constants.get(t.node)) is not None}
    return kernel_memory.kernel_memory(node.op, node.attrs, [t.type for t in node.inputs], node.outputs, device, values)
