"""A step as TensorFlow's executor runs it: loops and conditionals are lowered to the executor's nodes, Enter to Exit.

Follows tensorflow/core/common_runtime/lower_while_op.cc, lower_if_op.cc, lower_case_op.cc, inline_function_utils.cc
(what a body's arguments, constants and results become), graph_constructor.cc (nodes and edges come in topological
order, the smallest number first) and graph/optimizer_cse.cc. simulator/propagator.py runs it.

Not handled: loops and conditionals that TensorFlow is configured not to lower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tfswap.analysis.constants import constant_nodes
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import control_flow, is_pure
from tfswap.simulator.call_order import in_call_order
from tfswap.support.reach import reach
from tfswap.support.topological import topological

ARGUMENT = "argument"
CALL = "call"
CONTROL = "control"
ENTER = "enter"
EXIT = "exit"
IDENTITY = "identity"
KERNEL = "kernel"
LOOP_CONDITION = "loop condition"
MERGE = "merge"
NEXT = "next iteration"
RESULT = "result"
SWITCH = "switch"
_STRUCTURE = frozenset((ENTER, EXIT, LOOP_CONDITION, MERGE, NEXT, RESULT, SWITCH))
"""Kinds of nodes that TensorFlow never prunes."""

Source = tuple[int, int]
"""A node's number, and the index of its output."""


class Scope(NamedTuple):
    """A graph that is inlined: the step itself, a condition, a body or a branch.

    Attributes:
        name: as in `Graph.named_bodies`; "" of the step.
        node: the node of `outer` that runs it; None for the step.
        number: which of its bodies it is.
        loop: the number of the innermost loop that it is in; -1 outside of loops.
    """

    name: str
    graph: Graph
    node: Node | None
    number: int
    outer: Scope | None
    loop: int


def callee(outer: Scope, node: Node, number: int, loop: int) -> Scope:
    """The scope of a body of a node of `outer`."""
    name = f"{outer.name}{'/' if outer.name else ''}{node.name}[{number}]"
    return Scope(name, outer.graph.bodies[node][number], node, number, outer, loop)


class InlinedCall(NamedTuple):
    """The call of a function that was inlined at import: as call_order.Inlined, with the numbers of items."""

    entries: Sequence[int]
    inputs: Sequence[int]
    waits: bool


@dataclass
class Item:
    """A node of the executor.

    Attributes:
        node: of the graph, where the item is a kernel.
        scope: the graph that it comes from.
        loop: the loop in whose frame it runs; for an Enter, the loop that it enters.
        constant: for a kernel, whether TensorFlow has folded it, so that it reads nothing; for an Enter, whether all
            iterations get its value.
        choice: for a conditional's Switch, the conditional; None for a loop's.
        callee: for a call, the body that it runs.
        inlined: for a call, the function that was inlined at import.
        start: the item that nodes without inputs wait for.
        removed: whether other items replace it.
    """

    kind: str
    inputs: list[Source]
    controls: list[int]
    scope: Scope
    loop: int
    node: Node | None = None
    constant: bool = False
    choice: Node | None = None
    callee: Scope | None = None
    inlined: InlinedCall | None = None
    start: int | None = None
    removed: bool = False


class LoweredLoop(NamedTuple):
    """A loop's node, its scope, and the number of its iterations that run concurrently."""

    node: Node
    scope: Scope
    parallel: int


@dataclass
class Lowered:
    """Items in the executor's order, and the edges between them.

    Attributes:
        data: per item, (reader, which output, which input), in order.
        control: per item, the items that wait for it.
        loops: by number.
        enters: per loop, how many values enter it.
        decides: whether there are conditionals.
    """

    items: list[Item]
    data: list[list[tuple[int, int, int]]]
    control: list[list[int]]
    loops: list[LoweredLoop]
    enters: list[int]
    decides: bool


def lower(graph: Graph) -> Lowered:
    """Lower a step. Its nodes must be in TensorFlow's order, and equal nodes merged."""
    work = _Lowering()
    return _built(work.items, work.step(graph), work.loops)


@dataclass
class _Lowering:
    items: list[Item] = field(default_factory=list[Item])
    loops: list[LoweredLoop] = field(default_factory=list[LoweredLoop])
    _numbered: list[int] = field(default_factory=list[int])  # in TensorFlow's order
    _instead: dict[Source, Source] = field(default_factory=dict[Source, Source])  # by replaced item
    _waits: dict[int, int] = field(default_factory=dict[int, int])  # by replaced item, the item to wait for

    def step(self, graph: Graph) -> list[int]:
        """Add all items; returns their numbers, in TensorFlow's order."""
        scope = Scope("", graph, None, 0, None, -1)
        arguments = {node: (self._add(ARGUMENT, scope, node=node), 0) for node in graph.feeds}
        results, _ = self._inline(scope, arguments, None)
        for source in results:
            self._add(RESULT, scope, [source])
        for number in self._numbered:  # it grows
            item = self.items[number]
            if item.inlined is not None:
                self._number(item, item.inlined)
            elif item.callee is not None:
                self._call(number, item, item.callee)
            elif item.node is not None and item.node in item.scope.graph.bodies:
                flow = control_flow(item.node.op)
                assert flow is not None
                (self._loop if flow.is_loop else self._conditional)(number, item)
        for item in self.items:
            item.inputs = [self._now(source) for source in item.inputs]
            item.controls = list(dict.fromkeys(map(self._waited, item.controls)))
        return self._numbered

    def _now(self, source: Source) -> Source:
        while source in self._instead:
            source = self._instead[source]
        return source

    def _waited(self, number: int) -> int:
        while number in self._waits:
            number = self._waits[number]
        return number

    def _add(
        self,
        kind: str,
        scope: Scope,
        inputs: Sequence[Source] = (),
        controls: Sequence[int] = (),
        *,
        loop: int | None = None,
        node: Node | None = None,
        numbered: bool = True,
    ) -> int:
        self.items.append(Item(kind, list(inputs), list(controls), scope, scope.loop if loop is None else loop, node))
        number = len(self.items) - 1
        if numbered:
            self._numbered.append(number)
        return number

    def _inline(self, scope: Scope, arguments: dict[Node, Source], start: int | None) -> tuple[list[Source], list[int]]:
        """Add a graph's nodes; returns its results, and the items that must run.

        Args:
            start: the item that nodes without inputs wait for.
        """
        graph = scope.graph
        order = graph.topological()
        constants = constant_nodes(graph, order)
        made: dict[Node, int] = {node: source[0] for node, source in arguments.items()}
        parts = in_call_order(graph, [node for node in order if node not in made])
        at: dict[Node | str, int] = {}
        for call, part in parts.items():
            for entry in part.entries:
                kind, node = (KERNEL, entry) if isinstance(entry, Node) else (CALL, None)
                at[entry] = self._add(kind, scope, node=node, numbered=not call)
        made |= {node: number for node, number in at.items() if isinstance(node, Node)}
        for node, number in at.items():
            item = self.items[number]
            if isinstance(node, str):
                part = parts[node]
                entries, inputs = ([at[e] for e in several] for several in (part.entries, part.inputs))
                item.inlined = InlinedCall(entries, inputs, part.waits)
                continue
            item.constant = node in constants
            item.inputs = [arguments.get(t.node) or (made[t.node], t.index) for t in node.inputs]
            item.controls = [made[control] for control in node.controls]
        if start is not None:
            self._hold_up([at[entry] for entry in parts[""].entries], start)
        results = [arguments.get(t.node) or (made[t.node], t.index) for t in graph.fetches]
        return results, [made[node] for node in graph.targets]

    def _hold_up(self, numbers: Iterable[int], start: int) -> None:
        """Make a graph's nodes without inputs wait, as in calls without control inputs."""
        for item in map(self.items.__getitem__, numbers):
            item.start = start
            waits = item.inputs or item.controls if item.inlined is None else item.inlined.waits
            if not waits:
                item.controls = [start]

    def _number(self, call: Item, inlined: InlinedCall) -> None:
        """Replace a call by the nodes of its function, which was inlined at import."""
        if call.controls:
            start = self._add(CONTROL, call.scope, controls=call.controls)
            for number in inlined.inputs:
                self.items[number].controls.append(start)
            self._hold_up(inlined.entries, start)
        self._numbered += inlined.entries
        call.removed = True

    def _call(self, number: int, call: Item, scope: Scope) -> None:
        """Replace a call by its function's nodes."""
        start = self._add(CONTROL, scope, controls=call.controls) if call.controls else None
        waits = [] if start is None else [start]
        arguments = {
            feed: (self._add(IDENTITY, scope, [source], waits), 0)
            for feed, source in zip(scope.graph.feeds, call.inputs, strict=True)
        }
        results, targets = self._inline(scope, arguments, start)
        for i, source in enumerate(results):
            self._instead[number, i] = (self._add(IDENTITY, scope, [source]), 0)
        self._waits[number] = self._add(CONTROL, scope, controls=targets or waits)
        call.removed = True

    def _called(self, callee: Scope, inputs: Sequence[Source], controls: Sequence[int]) -> int:
        number = self._add(CALL, callee, inputs, controls)
        self.items[number].callee = callee
        return number

    def _loop(self, number: int, item: Item) -> None:
        node, scope, loop = item.node, item.scope, len(self.loops)
        assert node is not None
        parallel = node.attrs.get("parallel_iterations")
        self.loops.append(LoweredLoop(node, scope, parallel if isinstance(parallel, int) else 10))
        inner = scope._replace(loop=loop)
        handles = [kind.dtype == "resource" for kind in node.outputs]
        enters = [self._add(ENTER, scope, [source]) for source in item.inputs]
        for enter, is_handle in zip(enters, handles, strict=True):
            self.items[enter].constant = is_handle
            self.items[enter].loop = loop
        if item.controls:
            start = self._add(CONTROL, scope, controls=item.controls)
            for enter in enters:
                self.items[enter].controls = [start]
        carried = [i for i, is_handle in enumerate(handles) if not is_handle]
        merges = {i: self._add(MERGE, inner, [(enters[i], 0), (enters[i], 0)]) for i in carried}
        around = [(enter, 0) for enter in enters]
        inputs_of_test = [(merges[i], 0) if i in merges else around[i] for i in range(len(enters))]
        condition = self._called(callee(scope, node, 0, loop), inputs_of_test, [merges[carried[0]]])
        decision = self._add(LOOP_CONDITION, inner, [(condition, 0)])
        switches = {i: self._add(SWITCH, inner, [(merges[i], 0), (decision, 0)]) for i in carried}
        given = [(switches[i], 1) if i in switches else around[i] for i in range(len(enters))]
        body = self._called(callee(scope, node, 1, loop), given, [])
        self.items[body].controls = [self._add(IDENTITY, inner, [(switches[carried[0]], 1)])]
        exits = {i: self._add(EXIT, inner, [(switches[i], 0)]) for i in carried}
        self._waits[number] = self._add(CONTROL, scope, controls=list(exits.values()))
        for i in carried:
            following = self._add(NEXT, inner, [(body, i)], [body])
            self.items[merges[i]].inputs[1] = (following, 0)
        for i, source in enumerate(item.inputs):
            self._instead[number, i] = (exits[i], 0) if i in exits else source
        item.removed = True

    def _conditional(self, number: int, item: Item) -> None:
        node, scope = item.node, item.scope
        assert node is not None
        flow = control_flow(node.op)
        assert flow is not None
        decides, *given = item.inputs
        branches = len(scope.graph.bodies[node])
        switch = self._switch(item, decides, item.controls)
        # Outputs are counted as in `Graph.bodies`; an If's branches are in the opposite order.
        numbers = range(branches) if flow.functions == ("branches",) else reversed(range(branches))
        pivots = {branch: self._add(IDENTITY, scope, [(switch, branch)]) for branch in numbers}
        switches = [self._switch(item, source, ()) for source in given]
        calls = [
            self._called(callee(scope, node, branch, scope.loop), [(s, branch) for s in switches], [pivots[branch]])
            for branch in range(branches)
        ]
        for i in range(len(node.outputs)):
            self._instead[number, i] = (self._add(MERGE, scope, [(call, i) for call in calls]), 0)
        done = [(pivots[branch], 0) for branch in range(branches)]
        self._waits[number] = self._add(MERGE, scope, done, calls)
        item.removed = True

    def _switch(self, item: Item, source: Source, controls: Sequence[int]) -> int:
        number = self._add(SWITCH, item.scope, [source, item.inputs[0]], controls)
        self.items[number].choice = item.node
        return number


def _built(items: Sequence[Item], numbered: Sequence[int], loops: list[LoweredLoop]) -> Lowered:
    """The remaining `items` in topological order, with their edges."""
    live = _live(items)
    order = _ordered(items, [number for number in numbered if number in live])
    _fold(items, order)
    live = _live(items)
    order = [number for number in order if number in live]
    order = _merged(items, order)
    place = {number: i for i, number in enumerate(order)}
    kept = [items[number] for number in order]
    data: list[list[tuple[int, int, int]]] = [[] for _ in kept]
    control: list[list[int]] = [[] for _ in kept]
    for i, item in enumerate(kept):
        item.inputs = [(place[source], output) for source, output in item.inputs]
        item.controls = [place[source] for source in item.controls]
        for position, (source, output) in enumerate(item.inputs):
            data[source].append((i, output, position))
        for source in item.controls:
            control[source].append(i)
    enters = [0] * len(loops)
    for item in kept:
        if item.kind == ENTER:
            enters[item.loop] += 1
    return Lowered(kept, data, control, loops, enters, any(item.choice is not None for item in kept))


def _fold(items: Sequence[Item], order: Iterable[int]) -> None:
    """Have constants wait for the control inputs of the nodes that they are computed from, and read nothing."""
    for item in map(items.__getitem__, order):
        if item.kind == KERNEL and item.constant:
            sources = (control for source, _ in item.inputs for control in items[source].controls)
            item.controls = list(dict.fromkeys((*item.controls, *sources)))
            if not item.controls and item.start is not None:
                item.controls = [item.start]
            item.inputs = []


def _live(items: Sequence[Item]) -> set[int]:
    """The items that TensorFlow does not prune."""
    scopes = {item.scope.name: item.scope for item in items}
    targets = {(name, node) for name, scope in scopes.items() for node in scope.graph.targets}
    kept = [
        number
        for number, item in enumerate(items)
        if not item.removed
        and (
            item.kind in _STRUCTURE
            or (item.node is not None and ((item.scope.name, item.node) in targets or not is_pure(item.node.op)))
        )
    ]
    return set(reach(kept, lambda n: [*(source for source, _ in items[n].inputs), *items[n].controls]))


def _ordered(items: Sequence[Item], live: Sequence[int]) -> list[int]:
    """`live` in topological order; of the ready items the first in `live` comes first."""
    place = {number: i for i, number in enumerate(live)}
    order = [live[i] for i in topological([[place[n] for n in _before(items, number)] for number in live])]
    assert len(order) == len(live), "a loop's back edges are its Merges' alone"
    return order


def _before(items: Sequence[Item], number: int) -> Iterator[int]:
    item = items[number]
    for source, _ in item.inputs:
        if not (item.kind == MERGE and items[source].kind == NEXT):
            yield source
    yield from item.controls


def _merged(items: Sequence[Item], order: Sequence[int]) -> list[int]:
    """The order without items that are equal to others, Enters, Switches and Identities included."""
    first: dict[object, int] = {}
    instead: dict[int, int] = {}
    kept: list[int] = []
    for number in order:
        item = items[number]
        item.inputs = [(instead.get(source, source), output) for source, output in item.inputs]
        item.controls = list(dict.fromkeys(instead.get(source, source) for source in item.controls))
        if item.kind in (ENTER, SWITCH, IDENTITY, CONTROL, NEXT) and (item.inputs or item.controls):
            key = item.kind, item.loop, item.constant, tuple(item.inputs), frozenset(item.controls)
            same = first.setdefault(key, number)
            if same != number:
                instead[number] = same
                continue
        kept.append(number)
    for number in kept:  # a loop's Merge comes before its inputs
        items[number].inputs = [(instead.get(source, source), output) for source, output in items[number].inputs]
    return kept
