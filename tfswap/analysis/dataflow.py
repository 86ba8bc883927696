"""The step as the allocator sees it: kernels that allocate and read values, in index form for speed.

A *value* is one buffer's worth of data: a kernel's fresh output together with every view of it, or one
version of a variable. Views, constants, feeds and variable reads neither allocate nor hold more than the
values behind them, so they are *free* nodes: TensorFlow may run them at any time. All other nodes are
*kernels*, and get a place in the order: also a view that reads something else, such as the shape that a kernel makes.

Invariant: pure function of the graph and the device; everything is indexed by position in the graph's
topological order (nodes) or by creation (values).

Loops and conditionals are kernels whose requests are those of all that they run (analysis/control_flow.py). The
elements of tensor lists are values of their own: whoever reads the list reads them too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from tfswap.analysis.buffers import Contents, Element
from tfswap.analysis.constants import folds, kept_constants
from tfswap.analysis.control_flow import (
    Bodies,
    Course,
    Record,
    Seconds,
    UnboundedLoop,
    deciding,
    record,
    record_list,
    resources_used,
    uses_lists,
)
from tfswap.analysis.integer_values import AtMost, Values, known_results
from tfswap.analysis.output_bytes import output_bytes, record_bytes
from tfswap.analysis.permits import permits_of_values
from tfswap.ir.custom_ops import ASSIGN_IN_PLACE, OUTSIDE
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import (
    control_flow,
    reads_variable,
    runs_python,
    turns_off_copy_on_read,
    turns_on_copy_on_read,
    uses_tensor_list,
)
from tfswap.ir.permits import ANYTHING, Permit
from tfswap.ir.python_calls import held_until
from tfswap.kernels import kernel_memory
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel
from tfswap.support.reach import reach

SMALL_BYTES = 1
"""A tensor of unknown size, which is small (a graph with a large one is refused): it takes a chunk all the same."""

PERSISTENT = -1
"""Producer of a value that is there before the step: a variable, an argument, a constant."""

MOST_COURSES, EVENTS_OF_COURSES = 64, 20_000
"""All courses that a step can take are judged where there are no more, and have no more dealings with the allocator
together; otherwise a run that covers them all."""

Forwards = tuple[tuple[int, tuple[int, ...]], ...]
"""(value made, candidate values read), of one kernel."""


class Value(NamedTuple):
    """One buffer's worth of data.

    Attributes:
        tensor: the tensor that first holds it.
        nbytes: unrounded bytes.
        producer: index of the kernel that makes it, or PERSISTENT.
    """

    tensor: Output
    nbytes: int
    producer: int


class Request(NamedTuple):
    """One of a kernel's dealings with the allocator, in full.

    Attributes:
        kind: as of `kernels.Event`.
        subject: the value made, for "out"; which temporary, for "free"; the value, for "release".
        nbytes: what is asked for, where no candidate's buffer is taken over. Nothing is, for an output without buffer.
            For "split", what the next request asks for.
        candidates: values read.
    """

    kind: str
    subject: int
    nbytes: int
    candidates: tuple[int, ...]


class Update(NamedTuple):
    """A kernel's write to a variable: `old` version becomes `new`, in place or by adopting `adopted`'s buffer."""

    old: int
    new: int
    adopted: int | None
    copies: bool = False


@dataclass
class Dataflow:
    """The facts. Lists indexed by node hold empty tuples for free nodes.

    Attributes:
        nodes: live nodes in topological order.
        own_deps: per node, indices of the nodes that must run before it: data and control.
        deps: these, and for a write the readers of the version that it ends: it would have to copy the
            variable for them.
        is_kernel: per node, whether it has a place in the order.
        reads: per node, the values that its inputs hold, once per edge.
        consumes: by node where there are any, those of its inputs' values that it releases while it runs, once per
            edge; they are not among `reads`.
        makes: per node, (output index, value) for outputs with a buffer of their own.
        forwards: per node, (value made, candidate values read), as `KernelMemory.forward`.
        events: per node, as `KernelMemory.events`, or as `Record.events`.
        process_bytes: by node where there are any, as `KernelMemory.process_bytes`.
        temp_forwards: by node where there are any, (number of the temporary, candidate values read).
        updates: per node, its writes to variables.
        written: by handle, as a value, of each variable that these are, its first version.
        values: all values.
        fetched: values that the caller gets, held until the step has ended.
        value_of: the value that a (node, output index) holds; missing where it holds none.
        inexact: kernels whose memory is known by an upper bound only; of what runs Python code nothing is known but
            what it returns.
        bounded: those of them whose temporaries are what is not exact: at run time they may take none.
        usual: by those of which it was measured what they ask for, the events.
        place: index of each node by name.
        constants: nodes that are tensors of the graph itself, or of its bodies.
        holders: nodes whose kernels hold memory from when they are made on.
        kept: values that tensor lists keep, by (node, output index) of the list.
        runs: by node that is a loop or a conditional, how often it runs each body, those of its bodies' own included.
        inner_out_bytes, inner_in_bytes: what copies inside of bodies take to the host, and back.
        inner_away_bytes: what of that is in host memory when its loop or conditional has ended.
        passing_bytes: what one of these has there at most besides, while it runs.
        permits: by value, what the user allows to be done to it, of those to which not everything may be.
        courses: where the step decides which branches its conditionals take, or when its loops end, the facts for each
            course that it can take, if these are few.
        covering: of many, facts that hold at each point no less than those of any course; None where none are known.
        all_courses: whether `courses` are all.
    """

    nodes: list[Node]
    deps: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    is_kernel: list[bool] = field(default_factory=list[bool])
    reads: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    makes: list[tuple[tuple[int, int], ...]] = field(default_factory=list[tuple[tuple[int, int], ...]])
    forwards: list[Forwards] = field(default_factory=list[Forwards])
    events: list[tuple[kernel_memory.Event, ...]] = field(default_factory=list[tuple[kernel_memory.Event, ...]])
    process_bytes: dict[int, int] = field(default_factory=dict[int, int])
    temp_forwards: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict[int, dict[int, tuple[int, ...]]])
    updates: list[tuple[Update, ...]] = field(default_factory=list[tuple[Update, ...]])
    written: dict[int, int] = field(default_factory=dict[int, int])
    values: list[Value] = field(default_factory=list[Value])
    fetched: frozenset[int] = frozenset()
    value_of: dict[tuple[Node, int], int] = field(default_factory=dict[tuple[Node, int], int])
    inexact: list[int] = field(default_factory=list[int])
    bounded: list[int] = field(default_factory=list[int])
    usual: dict[int, tuple[kernel_memory.Event, ...]] = field(
        default_factory=dict[int, tuple[kernel_memory.Event, ...]]
    )
    place: dict[str, int] = field(default_factory=dict[str, int])
    constants: set[Node] = field(default_factory=set[Node])
    holders: set[Node] = field(default_factory=set[Node])
    own_deps: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    consumes: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    kept: dict[tuple[Node, int], tuple[int, ...]] = field(default_factory=dict[tuple[Node, int], tuple[int, ...]])
    runs: dict[int, dict[Graph, float]] = field(default_factory=dict[int, dict[Graph, float]])
    inner_out_bytes: int = 0
    inner_in_bytes: int = 0
    inner_away_bytes: int = 0
    passing_bytes: int = 0
    permits: dict[int, Permit] = field(default_factory=dict[int, Permit])
    courses: tuple[Dataflow, ...] = ()
    covering: Dataflow | None = None
    all_courses: bool = True

    @property
    def inner_host_bytes(self) -> int:
        """The most host memory that copies inside of bodies take, where what stays is there all the time."""
        return self.inner_away_bytes + self.passing_bytes

    @cached_property
    def inexact_kernels(self) -> frozenset[int]:
        """`inexact`, to look up."""
        return frozenset(self.inexact)

    @cached_property
    def has_outside(self) -> bool:
        """Whether the caller has a part in the middle of the step, which leaves the arena otherwise each time."""
        return any(node.op == OUTSIDE for node in self.nodes)

    @cached_property
    def users(self) -> list[list[int]]:
        """Per node, the nodes that `deps` makes wait for it."""
        return _users(self.deps)

    @cached_property
    def held(self) -> list[tuple[int, ...]]:
        """Per node, `reads` and `consumes`."""
        return [(*reads, *self.consumes.get(i, ())) for i, reads in enumerate(self.reads)]

    def may(self, v: int, tactic: str) -> bool:
        """Whether the user lets this tactic be used on a value."""
        return self.permits.get(v, ANYTHING).allows(tactic)

    def times_of(self, body: Graph) -> float:
        """How often a body runs in a step. Of two branches only the one that holds more is known to run."""
        return max((times[body] for times in self.runs.values() if body in times), default=1.0)

    def values_of(self, tensors: Iterable[Output]) -> frozenset[int]:
        """The values that tensors hold, of a graph that this one is a copy of too."""
        held = (self.value_of.get((self.nodes[self.place[t.node.name]], t.index)) for t in tensors)
        return frozenset(v for v in held if v is not None)

    @cached_property
    def value_named(self) -> dict[str, int]:
        """The value that a tensor is the first to hold, by the tensor's name.

        Versions of a variable, and what lists keep, have no tensor of their own and are known by another value's,
        which was there before them.
        """
        named: dict[str, int] = {}
        for v, value in enumerate(self.values):
            named.setdefault(value.tensor.name, v)
        return named

    @cached_property
    def requests(self) -> list[tuple[Request, ...]]:
        """Per node, its events with all that there is to know of each, for those who replay them again and again."""
        return [self._requests(i) if makes or self.events[i] else () for i, makes in enumerate(self.makes)]

    def allocations(self, i: int) -> int:
        """How many allocations a kernel makes of which no input's buffer is forwarded."""
        return sum(bool(request.nbytes) for request in self.requests[i])

    def _requests(self, i: int) -> tuple[Request, ...]:
        made, forwards = dict(self.makes[i]), dict(self.forwards[i])
        temp_forwards = self.temp_forwards.get(i, {})
        temporaries = 0
        found: list[Request] = []
        for kind, amount in self.events[i]:
            if kind == "temp":
                found.append(Request(kind, temporaries, amount, temp_forwards.get(temporaries, ())))
                temporaries += 1
            elif kind in ("free", "release", "part", "rest"):
                found.append(Request(kind, amount, 0, ()))
            elif kind == "split":
                found.append(Request(kind, 0, amount, ()))
            elif kind == "out" and amount in made:
                v = made.pop(amount)
                found.append(Request(kind, v, self.values[v].nbytes, forwards.get(v, ())))
        return (*found, *(Request("out", v, 0, ()) for v in made.values()))

    def temporary_bytes(self, i: int) -> int:
        """The most that a node's temporaries take at once: a loop's are those of all that it runs."""
        sizes: list[int] = []
        live = most = 0
        for kind, subject, nbytes, _ in self.requests[i]:
            if kind == "temp":
                sizes.append(nbytes)
                live += nbytes
                most = max(most, live)
            elif kind == "free":
                live -= sizes[subject]
        return most

    @cached_property
    def extremes(self) -> tuple[Dataflow, ...]:
        """These facts, and where some temporaries or tensors are bounds, the facts without those, and with those that
        were measured.

        Less memory asked for is not always a lower peak: a hole that is not there, or another one, moves what comes
        after it.
        """
        if not self.bounded and not self._has_bounded_sizes:
            return (self,)
        values = [v._replace(nbytes=0) if v.tensor.type.bound else v for v in self.values]
        found = (self, replace(self._with({}), values=values))
        return (*found, self._with(self.usual)) if self.usual else found

    @property
    def others(self) -> tuple[Dataflow, ...]:
        """`courses`, and what covers them."""
        return self.courses if self.covering is None else (*self.courses, self.covering)

    @property
    def covered(self) -> bool:
        """Whether it is known of all courses what they hold at most."""
        return self.all_courses or self.covering is not None

    @property
    def is_undecided(self) -> bool:
        """Whether the step decides more, courses or sizes, than is tried one by one: which holes there are, and so what
        is given in place of what is asked for, is then not known before.
        """
        return not self.all_courses or self._has_bounded_sizes

    @cached_property
    def _has_bounded_sizes(self) -> bool:
        return any(value.tensor.type.bound for value in self.values)

    def decides_sizes(self, node: Node) -> bool:
        """Whether the size of what a node gives is a bound, and of nothing that it is given."""
        return any(t.bound for t in node.outputs) and not any(t.type.bound for t in node.inputs)

    def _with(self, usual: Mapping[int, tuple[kernel_memory.Event, ...]]) -> Dataflow:
        """These facts, with other requests of what is bounded; where none are given, without temporaries."""
        events, rest = list(self.events), dict(self.temp_forwards)
        for i in self.bounded:
            events[i] = usual.get(i) or tuple(event for event in events[i] if event[0] == "out")
            rest.pop(i, None)
        return replace(self, events=events, temp_forwards=rest, bounded=[], usual={})

    def kernels_before(self, i: int) -> frozenset[int]:
        """The kernels that node `i` waits for, those behind nodes that are no kernels included."""
        found = self._kernels_before.get(i)
        if found is None:
            is_kernel, deps = self.is_kernel, self.deps
            before = reach(deps[i], lambda d: () if is_kernel[d] else deps[d])
            found = self._kernels_before[i] = frozenset(d for d in before if is_kernel[d])
        return found

    @cached_property
    def _kernels_before(self) -> dict[int, frozenset[int]]:
        return {}

    def first_versions(self, feeds: Iterable[str]) -> frozenset[int]:
        """The values that those of the step's variables have before it whose handles are fed by these names."""
        nodes = (self.nodes[self.place[name]] for name in feeds if name in self.place)
        versions = (self.written.get(self.value_of.get((node, 0), -1)) for node in nodes)
        return frozenset(v for v in versions if v is not None)

    @cached_property
    def persistent(self) -> list[int]:
        """Values that are there before the step: arguments, constants, and variables in their first version."""
        updated = {u.new for us in self.updates for u in us}
        return [v for v, value in enumerate(self.values) if value.producer == PERSISTENT and v not in updated]

    @cached_property
    def made_with_step(self) -> set[Node]:
        """Nodes whose persistent values come with the step's kernels: before, they are not in the arena."""
        return self.constants | self.holders

    @property
    def persistent_bytes(self) -> int:
        """Rounded bytes of variables, arguments and constants."""
        return sum(round_up(self.values[v].nbytes) for v in self.persistent)


def analyse_dataflow(
    graph: Graph, device: DeviceModel, *, strict: bool = True, lowered: Seconds | None = None
) -> Dataflow:
    """The facts of `graph` on `device`. Unknown sizes must have been bound before; they count 0 here.

    Args:
        strict: raise UnsupportedGraph for a loop whose memory has no bound; else a few iterations stand for it.
        lowered: seconds of a kernel, where loops and conditionals are lowered to the executor's own control flow, as
            TensorFlow does unless it is set not to: they hold of what they are given only what they still need, and
            the kernels of their bodies have no order.
    """
    builder = _Builder(graph, device, strict, lowered)
    flow = builder.build()
    # Where a body's order is asked for (not strict), only its own loops' courses are.
    several = builder.ends_early or (builder.undecided and (strict or builder.repeated))
    if several and lowered is None:
        flow.courses, flow.all_courses = _of_courses(builder)
        if not flow.all_courses:
            flow.covering = _covering(builder)
    return flow


def undetermined_nodes(graph: Graph, device: DeviceModel) -> list[Node]:
    """The loops and conditionals of `graph`, and in its bodies, of which the step decides how often they run, or which
    branch.
    """
    builder = _Builder(graph, device, strict=False, lowered=None)
    builder.build()
    return list(builder.undetermined)


def analyse_body(body: Graph, device: DeviceModel) -> Dataflow:
    """The facts of the body of a loop or a conditional of a step on `device`: loops in it need no bound."""
    return analyse_dataflow(body, device.in_bodies, strict=False)


def _of_courses(builder: _Builder) -> tuple[tuple[Dataflow, ...], bool]:
    """The facts for each course that the step can take, where these are few; and whether these are all."""
    if builder.endless:
        return (), False
    most = min(MOST_COURSES, EVENTS_OF_COURSES // max(1, sum(map(len, builder.flow.events))))
    found: list[Dataflow] = []
    digits: list[int] | None = []
    while digits is not None:
        numbered = _Numbered(digits)
        # Whether a loop has a bound is decided by its worst branches: others make less of it in one iteration.
        found.append(_Builder(builder.graph, builder.device, False, None, numbered, builder).build())
        digits = numbered.following()
        if math.prod(numbered.options) > most or (digits is not None and len(found) >= most):
            return (), False
    return tuple(found), True


def _covering(builder: _Builder) -> Dataflow | None:
    """Facts that cover all courses; None where none are known to."""
    try:
        return _Builder(builder.graph, builder.device, False, None, before=builder, covering=True).build()
    except UnboundedLoop:
        return None


class _Numbered:
    """The course that takes the options with these numbers, in the order in which it is asked, and then the first."""

    def __init__(self, digits: list[int]):
        self.digits = digits
        self.options: list[int] = []

    def branch(self, iteration: int, branches: int) -> int:
        if len(self.options) == len(self.digits):
            self.digits.append(0)
        self.options.append(branches)
        return self.digits[len(self.options) - 1]

    def trips(self, most: int) -> int:
        return most - self.branch(0, most + 1)  # the first course has the most to decide

    def following(self) -> list[int] | None:
        """The digits of the next course; None after the last."""
        digits = self.digits[: len(self.options)]
        while digits and digits[-1] + 1 == self.options[len(digits) - 1]:
            digits.pop()
        return [*digits[:-1], digits[-1] + 1] if digits else None


def _note_requests(
    flow: Dataflow, i: int, memory: kernel_memory.KernelMemory, inputs: Sequence[int], made: Mapping[int, int]
) -> None:
    """Notes what a kernel requests of values that it reads (-1 for none) and makes (by output)."""

    def known(candidates: Sequence[int]) -> tuple[int, ...]:
        return tuple(inputs[c] for c in candidates if inputs[c] >= 0)

    flow.forwards.append(tuple((made[o], known(candidates)) for o, candidates in memory.forward if o in made))
    flow.events.append(memory.events)
    if memory.process_bytes:
        flow.process_bytes[i] = memory.process_bytes
    if memory.temp_forward:
        flow.temp_forwards[i] = {k: known(candidates) for k, candidates in memory.temp_forward}


class _Builder:
    def __init__(
        self,
        graph: Graph,
        device: DeviceModel,
        strict: bool,
        lowered: Seconds | None,
        course: Course | None = None,
        before: _Builder | None = None,
        *,
        covering: bool = False,
    ):
        self.graph = graph
        # What is known already, by the builder of the same facts for another course.
        self.before = before
        self.prepared: Bodies = {} if before is None else before.prepared
        self.records: dict[Node, tuple[list[Contents | None], list[Values | None], Record]] = {}
        self.course = course
        self.covering = covering
        self.undetermined: dict[Node, None] = {}
        self.undecided = 0
        self.choices: set[Node] = set()  # conditionals whose branch the step decides
        self.repeated = False
        self.ends_early = self.endless = False
        self.strict = strict
        self.lowered = lowered
        self.feeds = set(graph.feeds)
        self.device = device
        self.flow = Dataflow(graph.topological())
        self.flow.place = {node.name: i for i, node in enumerate(self.flow.nodes)}
        self.index = {node: i for i, node in enumerate(self.flow.nodes)}
        # Variables that are read in part (ResourceGather): from then on every read copies them.
        self.copied_on_read: set[int] = set()
        self.sparsely_read = {
            t.node
            for node in graph
            if turns_on_copy_on_read(node.op)
            for t in node.inputs
            if t.type.dtype == "resource"
        }
        self.used = {node: resources_used(node, bodies) for node, bodies in graph.bodies.items()}
        for node, used in self.used.items():
            self.sparsely_read.update(node.inputs[p].node for p in used.sparsely_read)
        # Where the graph turns that off, it is off at each access to the whole (passes/prepare/copy_on_read.py).
        self.sparsely_read -= {node.inputs[0].node for node in graph if turns_off_copy_on_read(node.op)}
        self.integers: dict[tuple[Node, int], Values] = {(n, 0): v for n, v in graph.small_constants.items()}
        self.contents: dict[tuple[Node, int], Contents] = {}
        self.version: dict[int, int] = {}  # current value of the variable that a resource value stands for
        self.readers: dict[int, list[int]] = {}  # kernels that read a variable's version, by value

    def build(self) -> Dataflow:
        flow = self.flow
        for i, node in enumerate(flow.nodes):
            self._node(i, node)
        flow.fetched = frozenset(
            v
            for f in self.graph.fetches
            for v in (flow.value_of.get((f.node, f.index)), *self._kept(f))
            if v is not None
        )
        self._drop_folded_inputs()
        for body in self.graph.all_bodies():
            for node in kept_constants(body):
                self._value(node.out(), node.outputs[0].nbytes or 0, PERSISTENT)
                flow.constants.add(node)
        self._order_writes_after_reads()
        flow.permits = permits_of_values(self.graph, flow.value_of)
        return flow

    def _value(self, output: Output, nbytes: int, producer: int) -> int:
        self.flow.values.append(Value(output, nbytes, producer))
        return len(self.flow.values) - 1

    def _node(self, i: int, node: Node) -> None:
        flow = self.flow
        integers = self.integers
        memory = kernel_memory.kernel_memory(
            node.op,
            node.attrs,
            [source.outputs[o] for source, o in node.inputs],
            node.outputs,
            self.device,
            {p: known for p, t in enumerate(node.inputs) if not isinstance(known := integers.get(t), AtMost | None)},
        )
        record_ = self._record(node)
        if record_ is not None:
            flow.runs[i] = record_.runs
            flow.inner_out_bytes += record_.out_bytes
            flow.inner_in_bytes += record_.in_bytes
            flow.inner_away_bytes += record_.away_bytes
            flow.passing_bytes = max(flow.passing_bytes, record_.passing_bytes)
            memory = memory._replace(
                events=record_.events,
                alias=tuple(record_.alias.items()),
                forward=memory.forward if uses_tensor_list(node.op) else (),  # zeros and sums of lists are new ones
                updates=self.used[node].written if node in self.used else (),
                exact=record_.exact,
            )
        inputs = [flow.value_of.get(t, -1) for t in node.inputs]
        if reads_variable(node.op) and not memory.events and inputs and inputs[0] in self.copied_on_read:
            memory = memory._replace(alias=(), events=(("out", 0),))
        works = memory.events or memory.updates or memory.retains or memory.held_bytes or memory.writes
        works = works or record_ is not None
        free = node in self.feeds or not works
        if free and node.controls and any(t.type.dtype != "resource" for t in node.inputs):
            free = False  # a view that waits for something else holds what it views until then
        if free and node not in self.feeds:
            shared = {source for _, source in memory.alias}
            free = not any(self._is_made(v) for p, v in enumerate(inputs) if p not in shared)
        folded = self._is_folded(node)
        free = free or folded
        deps = {self.index[source] for source, _ in node.inputs}
        deps.update(self.index[c] for c in node.controls)
        flow.deps.append(tuple(sorted(deps)))
        flow.is_kernel.append(not free)
        certain = memory.exact and not runs_python(node.op)
        if not free and (not certain or any(t.bound for t in (*node.outputs, *(t.type for t in node.inputs)))):
            flow.inexact.append(i)
            if record_ is None and any(event != "out" for event, _ in memory.events):
                flow.bounded.append(i)
                if memory.usual is not None:
                    flow.usual[i] = memory.usual
        makes: list[tuple[int, int]] = []
        aliases = dict(memory.alias)
        twins = record_.twins if record_ is not None else {}
        for o, kind in enumerate(node.outputs):
            if o in twins:
                if (node, twins[o]) in flow.value_of:
                    flow.value_of[node, o] = flow.value_of[node, twins[o]]
            elif not folded and o in aliases and inputs[aliases[o]] >= 0:
                viewed = inputs[aliases[o]]
                if kind.dtype != "resource" and node.inputs[aliases[o]].type.dtype == "resource":
                    viewed = self._variable_version(viewed, node.out(o))
                flow.value_of[node, o] = viewed
            elif memory.held_bytes:
                flow.value_of[node, o] = self._value(node.out(o), memory.held_bytes, PERSISTENT)
                flow.holders.add(node)
            elif folded or (free and not node.inputs):  # a constant, an argument, or a variable's handle
                flow.value_of[node, o] = self._value(node.out(o), output_bytes(node, o, self.device), PERSISTENT)
                if node not in self.feeds:
                    flow.constants.add(node)
                if node in self.sparsely_read:
                    self.copied_on_read.add(flow.value_of[node, o])
            elif not free:
                nbytes = self._fresh_bytes(node, o) if record_ is None else record_bytes(node, o, self.device)
                value = self._value(node.out(o), nbytes, i)
                flow.value_of[node, o] = value
                makes.append((o, value))
        self._keep(i, node, record_, aliases, makes)
        flow.makes.append(tuple(makes))
        if free:
            flow.reads.append(())
            flow.forwards.append(())
            flow.events.append(())
            flow.updates.append(())
            return
        reads = tuple([r for v, t in zip(inputs, node.inputs, strict=True) for r in (v, *self._kept(t)) if r >= 0])
        reads += tuple([v for t in held_until(node) if (v := flow.value_of.get((t.node, t.index), -1)) >= 0])
        consumed = [v for kind, v in memory.events if kind == "release"]
        if consumed:
            left = Counter(reads)
            left.subtract(consumed)
            flow.consumes[i], reads = tuple(consumed), tuple(left.elements())
        flow.reads.append(reads)
        for v in reads:
            if v in self.readers:
                self.readers[v].append(i)
        _note_requests(flow, i, memory, inputs, dict(makes))
        flow.updates.append(self._updates(memory, inputs, node))

    def _fresh_bytes(self, node: Node, o: int) -> int:
        """What an output asks for. One of unknown size is small: it takes a chunk, unless it is known to be empty."""
        unknown = 0 if self.integers.get((node, o)) == () else SMALL_BYTES
        return output_bytes(node, o, self.device, unknown)

    def _is_made(self, v: int) -> bool:
        """Whether a value comes from a kernel of the step: whoever reads it holds it until then, such as a reshape its
        shape, or an assertion.
        """
        return v >= 0 and self.flow.values[v].producer != PERSISTENT

    def _record(self, node: Node) -> Record | None:
        """What a loop, a conditional or an op of lists does; None for other nodes. Notes what is known of integers."""
        bodies = self.graph.bodies.get(node)
        if bodies is None and not uses_lists(node):
            results = known_results(node, [self.integers.get(t) for t in node.inputs])
            self.integers.update({(node, o): values for o, values in results.items()})
            return None
        if self.course is not None and self.before is not None and node in self.before.choices:
            # What decides is known from here on: the gradient's conditional reads it too.
            assert bodies is not None
            if isinstance(self.integers.get(node.inputs[0]), AtMost | None):
                self.integers[node.inputs[0]] = deciding(node, self.course.branch(0, len(bodies)))
        known = [self.integers.get(t) for t in node.inputs]
        contents = [self.contents.get(t) for t in node.inputs]
        if bodies is None:
            made = record_list(node, self.device, contents, known, covering=self.covering)
        elif self.before is not None and (kept := self.before.records.get(node)) and kept[:2] == (contents, known):
            made = kept[2]
        else:
            given_up = [self.flow.value_of.get(t) for t in node.inputs] if self.lowered is not None else ()
            made = record(
                node,
                bodies,
                self.device,
                contents,
                known,
                strict=self.strict,
                given_up=given_up,
                lowered=self.lowered,
                course=self.course,
                covering=[self._held_bytes(t) for t in node.inputs] if self.covering else None,
                prepared=self.prepared,
            )
            if made.decided:
                self.records[node] = contents, known, made
            self.undetermined.update(dict.fromkeys(made.undetermined))
            self.undecided = max(self.undecided, made.undecided)
            kind = control_flow(node.op)
            if made.undecided and kind is not None and not kind.is_loop:
                self.choices.add(node)
            self.repeated |= made.repeated
            self.ends_early |= made.ends_early
            self.endless |= made.endless
        self.integers.update({(node, o): v for o, v in made.integers.items()})
        return made

    def _held_bytes(self, tensor: Output) -> int:
        """What is held with a tensor: all of what it is a view of."""
        v = self.flow.value_of.get(tensor)
        return 0 if v is None else self.flow.values[v].nbytes

    def _kept(self, tensor: Output) -> tuple[int, ...]:
        return self.flow.kept.get(tensor, ())

    def _keep(
        self, i: int, node: Node, made: Record | None, aliases: dict[int, int], makes: list[tuple[int, int]]
    ) -> None:
        """Note what lists keep: elements that the node makes, and what its inputs are or keep; and what they are."""
        flow = self.flow
        for o, source in aliases.items():
            tensor = node.inputs[source]
            if kept := self._kept(tensor):
                flow.kept[node, o] = kept
            if (contents := self.contents.get(tensor)) is not None:
                self.contents[node, o] = contents
        if made is None:
            return
        number = dict(makes)
        owner: dict[int, int] = {}  # of several lists that keep it the first
        for k, keeps in made.keeps.items():
            for o in keeps.outputs:
                owner.setdefault(o, k)
        for o, nbytes in enumerate(made.part_bytes, len(node.outputs)):
            if node in flow.constants:  # TensorFlow folds lists too, with all that they keep
                number[o] = self._value(node.out(owner[o]), nbytes, PERSISTENT)
                continue
            number[o] = self._value(node.out(owner[o]), nbytes, i)
            makes.append((o, number[o]))
        for o, keeps in made.keeps.items():
            kept = [*(number[p] for p in keeps.outputs), *keeps.values]
            for source in keeps.inputs:
                tensor = node.inputs[source]
                value = flow.value_of.get((tensor.node, tensor.index))
                kept += [*([] if value is None or tensor.type.dtype == "resource" else [value]), *self._kept(tensor)]
            flow.kept[node, o] = tuple(dict.fromkeys(kept))
        for o, contents in made.contents.items():
            self.contents[node, o] = _numbered(contents, number)

    def _is_folded(self, node: Node) -> bool:
        return node not in self.graph.bodies and folds(node, self.flow.constants)

    def _drop_folded_inputs(self) -> None:
        """Constants that only folded nodes read are gone once those are computed: they take no bytes."""
        flow = self.flow
        kept = {t.node for node in flow.nodes if node not in flow.constants for t in node.inputs}
        kept.update(f.node for f in self.graph.fetches)
        lists = [
            node.out(o) for node in flow.constants & kept for o, k in enumerate(node.outputs) if k.dtype == "variant"
        ]
        in_lists = {v for made in lists for v in self._kept(made)}
        for node in flow.constants - kept:
            for o in range(len(node.outputs)):
                for v in {flow.value_of[node, o], *self._kept(node.out(o))} - in_lists:
                    flow.values[v] = flow.values[v]._replace(nbytes=0)

    def _variable_version(self, resource: int, output: Output) -> int:
        """The value that a read of the variable behind `resource` sees now."""
        if resource not in self.version:
            self.version[resource] = self._value(output, output.type.nbytes or 0, PERSISTENT)
            self.readers[self.version[resource]] = []
        return self.version[resource]

    def _updates(self, memory: kernel_memory.KernelMemory, inputs: list[int], node: Node) -> tuple[Update, ...]:
        writes: list[tuple[int, int | None]] = [(inputs[r], None) for r in memory.updates]
        if memory.retains:
            writes.append((inputs[0], inputs[memory.retains[0]]))
        result: list[Update] = []
        for resource, adopted in writes:
            if resource < 0:
                continue
            old = self.version.get(resource)
            if old is None and node in self.used:
                size = self.used[node].nbytes.get(inputs.index(resource), 0)
                old = self.version[resource] = self._value(node.inputs[inputs.index(resource)], size, PERSISTENT)
                self.readers[old] = []
            if old is None:  # written and never read: as large as the largest of what it is updated with
                old = self._variable_version(resource, max(node.inputs, key=lambda t: t.type.nbytes or 0))
            self.flow.written.setdefault(resource, old)
            new = self._value(self.flow.values[old].tensor, self.flow.values[old].nbytes, PERSISTENT)
            self.version[resource] = new
            self.readers[new] = []
            in_place = node.op == ASSIGN_IN_PLACE or turns_on_copy_on_read(node.op)
            copies = resource in self.copied_on_read and not in_place
            result.append(Update(old, new, adopted, copies))
        return tuple(result)

    def _order_writes_after_reads(self) -> None:
        """Let every write wait for the readers of the version that it ends, where that makes no cycle.

        A read still held when its variable is updated would make the update copy the variable.
        """
        flow = self.flow
        flow.own_deps = list(flow.deps)
        users = _users(flow.deps)
        forward = True  # whether all edges lead to nodes with a higher index, as they do at first
        for i, updates in enumerate(flow.updates):
            extra = {r for u in updates for r in self.readers[u.old] if r != i}
            if not extra:
                continue
            if not forward or max(extra) > i:
                extra -= reached(i, users)
                forward = forward and max(extra, default=i) <= i
            flow.deps[i] = tuple(sorted({*flow.deps[i], *extra}))
            for r in extra:
                users[r].append(i)


def _numbered(contents: Contents, number: Mapping[int, int]) -> Contents:
    """What is known of a list, with the values that a node's outputs are, by `number`."""
    numbered: list[Element | None] = []
    for element in contents:
        if element is not None and element.parts:
            element = element._replace(parts=_numbered(element.parts, number))
        if element is not None and element.output is not None:
            element = element._replace(value=number.get(element.output), output=None)
        numbered.append(element)
    return tuple(numbered)


def _users(waits_for: Sequence[Sequence[int]]) -> list[list[int]]:
    """Per node, the nodes that wait for it."""
    users: list[list[int]] = [[] for _ in waits_for]
    for i, sources in enumerate(waits_for):
        for source in sources:
            users[source].append(i)
    return users


def reached(start: int, users: Sequence[Sequence[int]]) -> set[int]:
    """The nodes that paths from `start` lead to."""
    return set(reach(users[start], users.__getitem__))
