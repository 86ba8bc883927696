"""The dataflow graph, between import and export. It has no TensorFlow and no protobufs.

Invariant: every input and control input of a node belongs to the same graph. Inputs are immutable tuples that only the
methods of `Graph` change, so that no use is left dangling.

Loops and conditionals are nodes that call functions. Each function of such a node is a graph in `Graph.bodies`.

Not handled: the reference edges and frames of TensorFlow 1 loops (Enter, Merge, NextIteration); importers
refuse them. Functions that other nodes call stay in `Graph.library`, opaque.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tfswap.ir.fused_block import FusedBlock
from tfswap.ir.networkx_graph import cycle_text, to_networkx
from tfswap.ir.permits import ANYTHING, Permit
from tfswap.ir.types import TensorType
from tfswap.support.reach import reach

SMALL_INTEGERS = 16
"""The most elements of an integer tensor whose values are known here: sizes, axes, permutations, paddings."""


class Opaque(NamedTuple):
    """A serialised value that the IR does not decode: a tensor, a function with its attributes."""

    kind: str
    data: bytes

    def __repr__(self) -> str:
        return f"{self.kind}<{len(self.data)} bytes>"


class Dims(tuple[int | None, ...]):
    """A shape-valued attribute. Its type distinguishes it from a list of ints."""

    __slots__ = ()


class Dtype(str):
    """A type-valued attribute, by TensorFlow's name ("float32")."""

    __slots__ = ()


class Measured(NamedTuple):
    """Facts about one node's kernel that no rule gives: measured before the step is planned, or computed by a pass.

    Attributes:
        temporary_bytes: the bytes that it requests from the arena besides its outputs. None: not measured.
        seconds: the time of one run after its launch. None: not measured.
        kernels: of how many kernels it does the work. None: of one.
    """

    temporary_bytes: int | None = None
    seconds: float | None = None
    kernels: int | None = None


NOT_MEASURED = Measured()


class Node:
    """One operation. Build and change it through `Graph`.

    Attributes:
        name, op, inputs, controls, attrs, device: as in TensorFlow's NodeDef.
        outputs: the types of its outputs.
        measured: facts about its kernel.
        tape: of a call that computes a Python function's gradient, the token of the call whose tape it uses
            (python_calls.py); None for other nodes.
    """

    __slots__ = ("attrs", "controls", "device", "inputs", "measured", "name", "op", "outputs", "tape")

    def __init__(
        self,
        name: str,
        op: str,
        inputs: tuple[Output, ...],
        controls: tuple[Node, ...],
        attrs: Mapping[str, object],
        outputs: tuple[TensorType, ...],
        device: str,
    ):
        self.name = name
        self.op = op
        self.inputs = inputs
        self.controls = controls
        self.attrs = attrs
        self.outputs = outputs
        self.device = device
        self.measured = NOT_MEASURED
        self.tape: bytes | None = None

    def out(self, index: int = 0) -> Output:
        return Output(self, index)

    def __repr__(self) -> str:
        return f"<{self.op} {self.name}>"


class Output(NamedTuple):
    """The `index`-th output of `node`: a tensor."""

    node: Node
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] hides tuple.index(), which nothing here needs

    @property
    def type(self) -> TensorType:
        return self.node.outputs[self.index]

    @property
    def name(self) -> str:
        """TensorFlow's tensor name, "node:index"."""
        return f"{self.node.name}:{self.index}"


KEEP: Final = "_tfswap_keep"
"""The attribute of tensors and of handles that the program has marked to stay on the device."""


class Variable(NamedTuple):
    """A variable behind a handle.

    Attributes:
        name: the program's name for it.
        kept: whether the program has marked it to stay on the device.
    """

    type: TensorType
    name: str
    kept: bool = False


class Graph:
    """Nodes in insertion order, by unique name.

    Attributes:
        feeds: the graph's arguments, in the caller's order.
        fetches: the graph's results, in order.
        targets: nodes that must run although nothing is fetched from them.
        library: functions that nodes call by name, and the graph's versions; opaque.
        small_constants: flat values of the small integer constants (axes, permutations, sizes).
        bodies: the functions of loops and conditionals, in the order of the op's attributes (cond, body). A body's
            feeds are the function's arguments, its fetches the results.
        order: in a body, names of the kernels in their planned order.
        paired: in a body, kernels that run in a group with the next kernel of the order, which is the value.
        permits: the permits of tensors with restrictions by the user.
        traced: the graph that the user traced, where this one is the result of TensorFlow's optimizers.
        unfused: the graph without blocks, where this one has blocks that XLA compiles (compiler/fused_blocks.py).
        blocks: these blocks.
        executed: names of the nodes in the order in which TensorFlow's executor gets them. Empty: the order here.
        calls: the nodes of each inlined function, inner calls among them, by the call's name; "" is the graph itself.
            Empty where there were no calls.
        names_in_bodies: names of nodes in the loop's body, by their names in the unrolled loop.
        read_in_vain: names of tensors that were read by unneeded nodes only, which were pruned at import.
        unpruned: the graph with what nothing needs and TensorFlow runs (unneeded.py). Loops and conditionals have no
            bodies there. None: there is no such node.
        variables: the variables behind feeds, by the feeds' names, where the trace has their types.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self.feeds: list[Node] = []
        self.fetches: list[Output] = []
        self.targets: list[Node] = []
        self.library: Opaque | None = None
        self.small_constants: dict[Node, tuple[int, ...]] = {}
        self.bodies: dict[Node, tuple[Graph, ...]] = {}
        self.order: tuple[str, ...] = ()
        self.paired: dict[Node, Node] = {}
        self.permits: dict[Output, Permit] = {}
        self.traced: Graph | None = None
        self.unfused: Graph | None = None
        self.blocks: tuple[FusedBlock, ...] = ()
        self.executed: tuple[str, ...] = ()
        self.calls: Mapping[str, tuple[str, ...]] = {}
        self.names_in_bodies: dict[str, str] = {}
        self.read_in_vain: frozenset[str] = frozenset()
        self.unpruned: Graph | None = None
        self.variables: Mapping[str, Variable] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    def tensor(self, name: str) -> Output:
        """The tensor called "node:index" ("node" alone is its output 0). Raises KeyError."""
        node, _, index = name.partition(":")
        return Output(self._nodes[node], int(index or 0))

    def add(
        self,
        op: str,
        name: str,
        inputs: Iterable[Output] = (),
        *,
        controls: Iterable[Node] = (),
        attrs: Mapping[str, object] | None = None,
        outputs: Iterable[TensorType] = (),
        device: str = "",
    ) -> Node:
        """Add a node. Raises ValueError where the name is taken, or an input is not of this graph."""
        if name in self._nodes:
            raise ValueError(f"the graph already has a node called {name!r}")
        node = Node(name, op, tuple(inputs), tuple(controls), attrs or {}, tuple(outputs), device)
        for source in (*(i.node for i in node.inputs), *node.controls):
            if self._nodes.get(source.name) is not source:
                raise ValueError(f"{name!r} reads {source.name!r}, which is not in this graph")
        self._nodes[name] = node
        return node

    def unique_name(self, stem: str) -> str:
        """`stem`, or the first of stem_1, stem_2, ... that is free."""
        name, suffix = stem, 0
        while name in self._nodes:
            suffix += 1
            name = f"{stem}_{suffix}"
        return name

    def restrict(self, tensor: Output, permit: Permit) -> None:
        """Restrict `tensor` to the tactics of `permit`, in addition to earlier restrictions."""
        if permit.tactics != ANYTHING.tactics:
            self.permits[tensor] = self.permits.get(tensor, ANYTHING) & permit

    def move_behind(self, followers: Mapping[Node, Sequence[Node]]) -> None:
        """Put nodes right after others in the insertion order, by which `topological` breaks ties."""
        moved = {node for nodes in followers.values() for node in nodes}
        stay = [node for node in self if node not in moved]
        self._nodes = {n.name: n for node in stay for n in (node, *followers.get(node, ()))}

    def arrange(self, rank: Mapping[Node, Any]) -> None:
        """Sort the insertion order, by which `topological` breaks ties, by rank."""
        self._nodes = {node.name: node for node in sorted(self, key=rank.__getitem__)}

    def arrange_as_executed(self) -> None:
        """Put the nodes in the order of `executed`, where there is one."""
        if self.executed:
            self.arrange({self[name]: rank for rank, name in enumerate(self.executed)})

    def replace_input(self, node: Node, position: int, value: Output) -> None:
        inputs = list(node.inputs)
        inputs[position] = value
        node.inputs = tuple(inputs)

    def add_control(self, node: Node, before: Node) -> bool:
        """Make `node` wait for `before`; False when it already does by a direct control edge."""
        if before in node.controls:
            return False
        node.controls = (*node.controls, before)
        return True

    def replace_uses(self, old: Output, new: Output, where: Callable[[Node], bool] = lambda _: True) -> int:
        """Replace `old` by `new` in the inputs of nodes that satisfy `where`; returns the number of changed nodes."""
        changed = 0
        for node in self:
            if old in node.inputs and where(node):
                node.inputs = tuple(new if i == old else i for i in node.inputs)
                changed += 1
        return changed

    def join(self, joint: Mapping[Node, Sequence[Node]]) -> None:
        """Replace several nodes by one, for each item of `joint`: the new node, and its members.

        The outputs of the new node are those of its members, in order. It takes the last member's place in the
        insertion order. The members are removed.
        """
        self.move_behind({members[-1]: (node,) for node, members in joint.items()})
        stands_for: dict[Node, tuple[Node, int]] = {}  # by member: its new node, and its first output there
        for node, members in joint.items():
            place = 0
            for member in members:
                stands_for[member] = node, place
                place += len(member.outputs)

        def now(tensor: Output) -> Output:
            node, place = stands_for.get(tensor.node, (tensor.node, 0))
            return Output(node, place + tensor.index)

        def nodes_now(nodes: Iterable[Node]) -> Iterable[Node]:
            return dict.fromkeys(stands_for[node][0] if node in stands_for else node for node in nodes)

        for node in self:
            if any(source in stands_for for source, _ in node.inputs):
                node.inputs = tuple([now(tensor) for tensor in node.inputs])
            if any(source in stands_for for source in node.controls):
                node.controls = tuple(nodes_now(node.controls))
        self.fetches = [now(tensor) for tensor in self.fetches]
        self.permits = {now(tensor): permit for tensor, permit in self.permits.items()}
        self.targets = list(nodes_now(self.targets))
        for node in stands_for:
            self._discard(node)

    def bring_forward(self, since: int) -> None:
        """Put the nodes after the first `since` right before their first reader in the insertion order.

        `topological` breaks ties by that order.
        """
        nodes = list(self)
        rank = {node: place for place, node in enumerate(nodes[:since])}
        users: dict[Node, list[Node]] = {node: [] for node in nodes[since:]}
        for node in nodes:
            for source in {*(read.node for read in node.inputs), *node.controls}:
                if source in users:
                    users[source].append(node)
        for node in reversed(nodes[since:]):
            rank[node] = min((rank[user] for user in users[node]), default=since)
        nodes.sort(key=lambda node: (rank[node], node not in users))
        self._nodes = {node.name: node for node in nodes}

    def prune(self, also: Iterable[Node] = ()) -> list[Node]:
        """Drop the nodes that neither a fetch nor a target nor a node of `also` needs; returns them.

        Feeds stay, with what they read (the default of a PlaceholderWithDefault).
        """
        live = self.needed([*(f.node for f in self.fetches), *self.targets, *self.feeds, *also])
        gone = [node for node in self if node not in live]
        for node in gone:
            self._discard(node)
        return gone

    def _discard(self, node: Node) -> None:
        del self._nodes[node.name]
        self.small_constants.pop(node, None)
        self.bodies.pop(node, None)
        self.paired.pop(node, None)
        for index in range(len(node.outputs)) if self.permits else ():
            self.permits.pop(node.out(index), None)

    def copy(self) -> Graph:
        """A graph of fresh nodes; attributes and types, which never change, are shared."""
        twin = Graph()
        twins: dict[Node, Node] = {}
        for node in self:
            twins[node] = Node(node.name, node.op, (), (), node.attrs, node.outputs, node.device)
            twins[node].measured, twins[node].tape = node.measured, node.tape
            twin._nodes[node.name] = twins[node]
        for node, made in twins.items():
            made.inputs = tuple([Output(twins[source], index) for source, index in node.inputs])
            made.controls = tuple([twins[c] for c in node.controls])
        twin.feeds = [twins[n] for n in self.feeds]
        twin.fetches = [Output(twins[f.node], f.index) for f in self.fetches]
        twin.targets = [twins[n] for n in self.targets]
        twin.library = self.library
        twin.executed = self.executed
        twin.calls = self.calls
        twin.names_in_bodies, twin.read_in_vain = self.names_in_bodies, self.read_in_vain
        twin.unfused, twin.blocks = self.unfused, self.blocks
        twin.unpruned, twin.variables = self.unpruned, self.variables
        twin.small_constants = {twins[n]: values for n, values in self.small_constants.items()}
        twin.permits = {Output(twins[t.node], t.index): permit for t, permit in self.permits.items()}
        twin.order = self.order
        twin.paired = {twins[first]: twins[second] for first, second in self.paired.items()}
        twin.bodies = {twins[n]: tuple(body.copy() for body in bodies) for n, bodies in self.bodies.items()}
        return twin

    def all_bodies(self) -> Iterator[Graph]:
        """The bodies of this graph's nodes, each after the bodies that it contains."""
        for bodies in self.bodies.values():
            for body in bodies:
                yield from body.all_bodies()
                yield body

    def named_bodies(self, within: str = "") -> dict[str, Graph]:
        """The bodies of `all_bodies`, in that order, by name.

        "node[n]" is the n-th body of a node, "node[n]/inner[m]" a body of one of its nodes.

        Args:
            within: a prefix of all names.
        """
        found: dict[str, Graph] = {}
        for node, bodies in self.bodies.items():
            for n, body in enumerate(bodies):
                name = f"{within}{node.name}[{n}]"
                found |= body.named_bodies(f"{name}/")
                found[name] = body
        return found

    def groups(self) -> list[list[Node]]:
        """The kernels of each group of `paired`, in their order."""
        later = set(self.paired.values())
        found: list[list[Node]] = []
        for first in self.paired:
            if first not in later:
                group = [first]
                while (following := self.paired.get(group[-1])) is not None:
                    group.append(following)
                found.append(group)
        return found

    def topological(self) -> list[Node]:
        """The nodes in topological order; ties by insertion order. Raises ValueError, with the cycle, where there is
        one.
        """
        found = in_topological_order(self)
        if len(found) < len(self):
            raise ValueError(f"the graph has a cycle: {cycle_text(self)}")
        return found

    def to_networkx(self) -> Any:
        """The nodes and edges as a networkx.MultiDiGraph (`networkx_graph.to_networkx`)."""
        return to_networkx(self)

    def live_nodes(self) -> set[Node]:
        """Nodes that a fetch or a target needs. TensorFlow does not run the others."""
        return self.needed([*(f.node for f in self.fetches), *self.targets])

    @staticmethod
    def needed(roots: Iterable[Node]) -> set[Node]:
        """`roots`, and all nodes that they read or await, directly or not."""
        return set(reach(roots, lambda node: (*[source for source, _ in node.inputs], *node.controls)))


def in_topological_order(nodes: Iterable[Node]) -> list[Node]:
    """Nodes in topological order, without those that wait for a cycle; ties by their order."""
    done: dict[Node, None] = {}
    waiting: dict[Node, int] = {}  # nodes whose inputs come later, with the number of these: traced graphs have few
    users: dict[Node, list[tuple[int, Node]]] = {}  # the same nodes, by their missing inputs
    for rank, node in enumerate(nodes):
        missing: dict[Node, None] = {}
        for source, _ in node.inputs:
            if source not in done:
                missing[source] = None
        for source in node.controls:
            if source not in done:
                missing[source] = None
        if missing:
            waiting[node] = len(missing)
            for source in missing:
                users.setdefault(source, []).append((rank, node))
            continue
        ready = [(rank, node)]
        while ready:
            _, first = heapq.heappop(ready)
            done[first] = None
            for user in users.pop(first, ()):
                waiting[user[1]] -= 1
                if not waiting[user[1]]:
                    del waiting[user[1]]
                    heapq.heappush(ready, user)
    return list(done)
