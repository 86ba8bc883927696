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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from tfswap.ir.custom_ops import OUTSIDE
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.permits import ANYTHING, Permit
from tfswap.kernels import kernel_memory
from tfswap.kernels.alignment import round_up
from tfswap.kernels.compiled_functions import is_compiled
from tfswap.support.reach import reach

SMALL_BYTES = 1
"""The bytes of a tensor of unknown size, which is small (a graph with a large one is refused): it takes a chunk."""
PERSISTENT = -1
"""The producer of a persistent value: a variable, an argument, a constant."""
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
    """One request or release of a kernel, in full.

    Attributes:
        kind: as of `kernels.Event`.
        subject: the value made, for "out"; which temporary, for "free"; the value, for "release".
        nbytes: what is asked for, where no candidate's buffer is forwarded. Nothing is, for an output without buffer.
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

    def add(self, value: Value) -> int:
        """Add a value; returns its number."""
        self.values.append(value)
        return len(self.values) - 1

    @property
    def inner_host_bytes(self) -> int:
        """The most host memory of copies inside of bodies, with copies that stay counted all the time."""
        return self.inner_away_bytes + self.passing_bytes

    @cached_property
    def inexact_kernels(self) -> frozenset[int]:
        """`inexact`, to look up."""
        return frozenset(self.inexact)

    @cached_property
    def has_outside(self) -> bool:
        """Whether the caller has a part in the middle of the step, which changes the arena each time."""
        return any(node.op == OUTSIDE for node in self.nodes)

    @cached_property
    def users(self) -> list[list[int]]:
        """Per node, the nodes that `deps` makes wait for it."""
        return users_of(self.deps)

    @cached_property
    def held(self) -> list[tuple[int, ...]]:
        """Per node, `reads` and `consumes`."""
        return [(*reads, *self.consumes.get(i, ())) for i, reads in enumerate(self.reads)]

    def may(self, v: int, tactic: str) -> bool:
        """Whether the user's permits allow this tactic on a value."""
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
        """The peak of a node's temporaries: a loop's are those of all that it runs."""
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
        """Whether there is a bound for all courses."""
        return self.all_courses or self.covering is not None

    @property
    def is_undecided(self) -> bool:
        """Whether the step decides more, courses or sizes, than is tried one by one: which holes there are, and so what
        is given in place of what is asked for, is then not known before.
        """
        return not self.all_courses or self._has_bounded_sizes

    @property
    def holes_are_unknown(self) -> bool:
        """Whether the requests, their sizes or their order are not known one by one, so that a request may get a larger
        chunk than simulated: where the step is undecided, and where XLA compiled a part of it.
        """
        return self.is_undecided or any(map(is_compiled, self.nodes))

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


def users_of(waits_for: Sequence[Sequence[int]]) -> list[list[int]]:
    """Per node, the nodes that wait for it."""
    users: list[list[int]] = [[] for _ in waits_for]
    for i, sources in enumerate(waits_for):
        for source in sources:
            users[source].append(i)
    return users


def reached(start: int, users: Sequence[Sequence[int]]) -> set[int]:
    """The nodes reachable from `start`."""
    return set(reach(users[start], users.__getitem__))
