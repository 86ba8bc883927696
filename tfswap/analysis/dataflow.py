"""The facts of a step: kernels, and the values that they allocate and read, in index form for speed.

A *value* is the content of one buffer: a kernel's new output together with all views of it, or one version of a
variable. Views, constants, feeds and variable reads allocate nothing and hold only the values behind them. They are
*free* nodes, which TensorFlow may run at any time. All other nodes are *kernels* and have a place in the order. So has
a view with a further input that a kernel computes, such as a Reshape with a computed shape.

Invariant: a pure function of the graph and the device. Nodes are indexed by their position in the graph's topological
order, values by creation.

Loops and conditionals are kernels with the requests of their bodies (analysis/control_flow.py). The elements of tensor
lists are values of their own, which readers of the list read too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from tfswap.analysis.flat_dataflow import FlatDataflow, flatten
from tfswap.analysis.home_changes import home_changes, home_tier
from tfswap.ir.custom_ops import AWAIT_STORE, COMMIT_HOME, OUTSIDE, READ_HOME, STORE_HOME, TO_DEVICE, TO_HOST
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
    """One request or release of a kernel.

    Attributes:
        kind: as of `kernels.events.EventKind`.
        subject: for "out" the new value, for "temp" and "free" the number of the temporary, for "release" the value.
        nbytes: the requested bytes, where no candidate's buffer is forwarded; 0 for an output without a buffer. For
            "split", the bytes of one of the next requests.
        candidates: the values read whose buffers may be forwarded.
    """

    kind: str
    subject: int
    nbytes: int
    candidates: tuple[int, ...]


class Update(NamedTuple):
    """A kernel's write to a variable.

    Attributes:
        old, new: the version before the write, and after it.
        adopted: the value whose buffer the variable adopts. None: the write is in place.
        copies: whether the kernel first copies the variable (copy-on-read mode).
    """

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
        deps: `own_deps`, and for a write the readers of the version before it, for which it would copy the variable.
        is_kernel: per node, whether it has a place in the order.
        reads: per node, the values of its inputs, once per edge.
        consumes: for some nodes, values of inputs that the kernel releases while it runs, once per edge. They are not
            in `reads`.
        makes: per node, (output index, value) for outputs with a buffer of their own.
        forwards: per node, (new value, candidate values read), as `KernelMemory.forward`.
        events: per node, as `KernelMemory.events`, or as `Record.events`.
        process_bytes: for some nodes, as `KernelMemory.process_bytes`.
        temp_forwards: for some nodes, by number of the temporary, the candidate values read.
        updates: per node, its writes to variables.
        written: the first version of each variable that the step writes, by the value of its handle.
        values: all values.
        fetched: the values of the step's results, which are held until the step has ended.
        value_of: the value of a (node, output index); missing where it has none.
        inexact: kernels whose memory is an upper bound, and kernels that run Python code, whose memory is unknown.
        bounded: kernels among these whose temporaries are the bound: they may have none when they run.
        usual: the measured events of kernels in `bounded`, where there are any.
        place: the index of each node, by name.
        constants: constant nodes of the graph and of its bodies.
        holders: nodes whose kernels hold memory from their construction.
        kept: the values of a tensor list's elements, by (node, output index) of the list.
        runs: the number of runs of each body, inner bodies too, by the node of the loop or conditional.
        inner_out_bytes, inner_in_bytes: bytes that bodies copy to the host, and back.
        inner_away_bytes: bytes in host memory after the loop or conditional has ended.
        passing_bytes: the most bytes that one of these has in host memory in addition, while it runs.
        permits: the permits of values with restrictions by the user.
        courses: the facts of each course, where the step decides branches or iterations, and courses are few.
        covering: facts that hold at each point at least as much as any course, where courses are many. None: unknown.
        all_courses: whether `courses` has all courses.
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
        """The most host memory of copies in bodies. Copies that stay after their node count all the time."""
        return self.inner_away_bytes + self.passing_bytes

    @cached_property
    def inexact_kernels(self) -> frozenset[int]:
        """`inexact` as a set."""
        return frozenset(self.inexact)

    @cached_property
    def has_outside(self) -> bool:
        """Whether the caller runs between the forward and the backward pass, and may change the arena."""
        return any(node.op == OUTSIDE for node in self.nodes)

    @cached_property
    def users(self) -> list[list[int]]:
        """Per node, the nodes that wait for it, by `deps`."""
        return users_of(self.deps)

    @cached_property
    def held(self) -> list[tuple[int, ...]]:
        """Per node, `reads` and `consumes`."""
        return [(*reads, *self.consumes.get(i, ())) for i, reads in enumerate(self.reads)]

    def may(self, v: int, tactic: str) -> bool:
        """Whether the user's permits allow this tactic on a value."""
        return self.permits.get(v, ANYTHING).allows(tactic)

    def times_of(self, body: Graph) -> float:
        """The number of runs of a body in a step. Only the branch of a conditional that was replayed is counted."""
        return max((times[body] for times in self.runs.values() if body in times), default=1.0)

    def values_of(self, tensors: Iterable[Output]) -> frozenset[int]:
        """The values of tensors, which may be those of a graph that this one was copied from."""
        held = (self.value_of.get((self.nodes[self.place[t.node.name]], t.index)) for t in tensors)
        return frozenset(v for v in held if v is not None)

    @cached_property
    def value_named(self) -> dict[str, int]:
        """The value that a tensor is the first to hold, by the tensor's name.

        Versions of a variable and elements of lists have no tensor of their own. They have the tensor of an earlier
        value, and are not in this table.
        """
        named: dict[str, int] = {}
        for v, value in enumerate(self.values):
            named.setdefault(value.tensor.name, v)
        return named

    @cached_property
    def requests(self) -> list[tuple[Request, ...]]:
        """Per node, its events with their values and bytes, for repeated replays."""
        return [self._requests(i) if makes or self.events[i] else () for i, makes in enumerate(self.makes)]

    @cached_property
    def flat(self) -> FlatDataflow:
        """These facts as flat arrays."""
        return flatten(self)

    def allocations(self, i: int) -> int:
        """The number of a kernel's requests where no input's buffer is forwarded."""
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
        """The peak of a node's temporaries. Those of a loop are the requests of its bodies."""
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
        """These facts; and where some temporaries or sizes are bounds, the facts without these, and with the measured
        ones.

        Smaller requests do not always give a lower peak: they leave other holes, which move later requests.
        """
        if not self.bounded and not self._has_bounded_sizes:
            return (self,)
        values = [v._replace(nbytes=0) if v.tensor.type.bound else v for v in self.values]
        found = (self, replace(self._with({}), values=values))
        return (*found, self._with(self.usual)) if self.usual else found

    @property
    def others(self) -> tuple[Dataflow, ...]:
        """`courses`, and `covering` where there is one."""
        return self.courses if self.covering is None else (*self.courses, self.covering)

    @property
    def covered(self) -> bool:
        """Whether there is a bound for all courses."""
        return self.all_courses or self.covering is not None

    @property
    def is_undecided(self) -> bool:
        """Whether the step decides more courses or sizes than can be tried one by one. The holes in the arena, and so
        the chunks that requests get, are then unknown.
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
        """Whether the size of an output of the node is a bound, and no size of its inputs is."""
        return any(t.bound for t in node.outputs) and not any(t.type.bound for t in node.inputs)

    def _with(self, usual: Mapping[int, tuple[kernel_memory.Event, ...]]) -> Dataflow:
        """These facts with the events in `usual` for bounded kernels, and without temporaries for the others."""
        events, rest = list(self.events), dict(self.temp_forwards)
        for i in self.bounded:
            events[i] = usual.get(i) or tuple(event for event in events[i] if event[0] == "out")
            rest.pop(i, None)
        return replace(self, events=events, temp_forwards=rest, bounded=[], usual={})

    def kernels_before(self, i: int) -> frozenset[int]:
        """The kernels that node `i` waits for, also through nodes that are no kernels."""
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
        """The values before the step of the written variables whose handles are the feeds of these names."""
        nodes = (self.nodes[self.place[name]] for name in feeds if name in self.place)
        versions = (self.written.get(self.value_of.get((node, 0), -1)) for node in nodes)
        return frozenset(v for v in versions if v is not None)

    @cached_property
    def crossing(self) -> dict[int, str]:
        """By kernel, the op of each that copies a tensor between the device and host memory."""
        return {i: node.op for i, node in enumerate(self.nodes) if node.op in (TO_HOST, TO_DEVICE)}

    @cached_property
    def loads(self) -> dict[int, int]:
        """By kernel that starts the copy of a variable from its home on the host, the value that the copy fills."""
        return {i: self.makes[i][0][1] for i, node in enumerate(self.nodes) if node.op == READ_HOME}

    @cached_property
    def stores(self) -> dict[int, int]:
        """By kernel that starts the copy of a variable's new value to its home on the host, that value."""
        return {i: self.reads[i][0] for i, node in enumerate(self.nodes) if node.op == STORE_HOME}

    @cached_property
    def commits(self) -> dict[int, int]:
        """By kernel that waits for such a copy, the kernel that starts it."""
        waits = ((i, node) for i, node in enumerate(self.nodes) if node.op in (AWAIT_STORE, COMMIT_HOME))
        return {i: self.place[node.inputs[-1].node.name] for i, node in waits}

    @cached_property
    def home_changes(self) -> dict[int, int]:
        """By kernel, the host memory or disk space that it takes for a variable's new home, or frees."""
        return home_changes(self.nodes)

    @cached_property
    def home_tiers(self) -> dict[int, int]:
        """By kernel that copies a variable from its home or to it, or gives it a new one, the tier of that home."""
        return {i: home_tier(self.nodes[i]) for i in (*self.loads, *self.stores, *self.commits)}

    @cached_property
    def copying(self) -> frozenset[int]:
        """The kernels that start copies of variables from their homes, or to these: they take a copy lane's time."""
        return frozenset((*self.loads, *self.stores))

    @cached_property
    def persistent(self) -> list[int]:
        """Values from before the step: arguments, constants, and first versions of variables."""
        updated = {u.new for us in self.updates for u in us}
        return [v for v, value in enumerate(self.values) if value.producer == PERSISTENT and v not in updated]

    @cached_property
    def made_with_step(self) -> set[Node]:
        """Nodes whose persistent values are allocated with the step's kernels."""
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
