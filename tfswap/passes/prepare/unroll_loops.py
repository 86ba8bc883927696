"""Unrolls loops of few iterations, so that each iteration's kernels are planned as kernels of the step.

TensorFlow lowers a loop, and kernels of several iterations run concurrently. A planned loop is one kernel, whose
iterations run one after the other, and oneDNN's graph pass does not rewrite its body. Gradients accumulated over a few
micro-batches are most of a step: unrolled, their kernels take part in the step's order, swaps, encodings and pairs.

Ensures: the nodes of an iteration are named "loop/iteration_k/node", where k counts from 0. Effects have the loop's
order: if a body writes, or has other effects, no node that reads or writes a state runs before all such nodes of the
iteration before, except reads of variables that nothing in the body writes. Values are the loop's.

A loop is unrolled if constants decide the number of its iterations, if these are few, and if copies of a body's node
have the same values as repeated runs of one node. (They have not for a random op, whose kernel keeps its generator's
state from one iteration to the next: `is_one_node` in ir/op_traits.py.) A loop of small kernels is unrolled only where
the target says so: its own kernel runs them in less time than the executor, which takes a few microseconds for each
kernel of an order.

Not handled: loops with tensor lists among their variables, whose backward loops pop the elements; loops inside of
bodies that are not unrolled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from tfswap.analysis.analyse import analyse_body
from tfswap.analysis.cost import Costs
from tfswap.analysis.integer_values import Integers, Known, Loop, Values, as_feeds
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.node_copies import add_copy
from tfswap.ir.op_traits import (
    acts,
    calls_functions,
    control_flow,
    is_const,
    is_one_node,
    is_pure,
    is_view,
    reads_variable,
    turns_on_copy_on_read,
)
from tfswap.ir.views import origin
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import without_colocation
from tfswap.passes.prepare.ordered_sums import fix_iteration

MOST_TRIPS = 16
MOST_KERNELS = 20_000
"""The most kernels of all unrolled loops of a step: a transformer of 8,480 took 6 s of CPU time to plan."""
LEAST_MEAN_S = 50e-6
"""The least average seconds of a body's kernels. Bodies of 5 to 36 us took more CPU time unrolled than as loops, by 1.2
to 2.2 times, one of 50 us as much, and those of 240 and 590 us less time.
"""


@graph_pass(
    ensures="loops of few iterations of large kernels are kernels of the step; values are the loop's",
)
def unroll_loops(graph: Graph, target: Target, *, lowered: bool = False) -> int:
    """Unroll loops of `graph`, in place; returns how many nodes were added.

    `Graph.names_in_bodies` has their names in the bodies.

    Args:
        lowered: as TensorFlow lowers loops: also those of small kernels, but none whose iterations do not all run
            concurrently.
    """
    if not any(flow.is_loop for node in graph.bodies if (flow := control_flow(node.op))):
        return 0
    work = _Unrolling(graph, target.device, lowered, small=lowered or target.unrolls)
    work.run()
    graph.names_in_bodies = {**graph.names_in_bodies, **work.named}
    return len(work.named)


def leaves_loops(graph: Graph, target: Target) -> bool:
    """Whether `unroll_loops` leaves loops of `graph` that it may unroll for a target that `unrolls`."""
    return bool(graph.bodies) and _Unrolling(graph, target.device, lowered=False, small=True).leaves_loops()


@dataclass
class _Unrolling:
    """The unrolling of the loops of one graph.

    Attributes:
        small: whether loops of small kernels are unrolled.
        named: by the name of each added node, its name in the body.
    """

    graph: Graph
    device: DeviceModel
    lowered: bool
    small: bool
    named: dict[str, str] = field(default_factory=dict)
    _room: int = field(default_factory=lambda: MOST_KERNELS)
    _results: dict[Output, Output] = field(
        default_factory=dict
    )  # by result of an unrolled loop, the tensor that replaces it
    _ends: dict[Node, Node | None] = field(default_factory=dict)  # by unrolled loop, the node to wait for in its place
    _nodes: dict[Node, list[Node]] = field(default_factory=dict)  # by loop, in order

    def run(self) -> None:
        graph = self.graph
        order = graph.topological()
        known = Integers(graph, order).follow({})
        pending = deque(node for node in order if node in graph.bodies)
        while pending:
            loop = pending.popleft()
            trips = self._trips(loop, known)
            if trips is not None:
                pending.extendleft(reversed(self._unroll(loop, trips, known)))
        if not self._nodes:
            return
        for node in graph:
            node.inputs = tuple([self._now(tensor) for tensor in node.inputs])
            if any(control in self._ends for control in node.controls):
                node.controls = tuple(self._waits(node.controls))
        graph.fetches = [self._now(tensor) for tensor in graph.fetches]
        graph.targets = list(self._waits(graph.targets))
        for loop, nodes in self._nodes.items():
            graph.move_behind({loop: nodes})
        graph.prune()

    def _trips(self, loop: Node, known: Known) -> list[list[Values | None]] | None:
        """The integers of a loop's variables before each iteration and after the last; None where it stays a loop."""
        flow = control_flow(loop.op)
        assert flow is not None
        if not flow.is_loop or any(kind.dtype == "variant" for kind in loop.outputs):
            return None
        condition, body = self.graph.bodies[loop]
        if not _may_be_copied(body) or _has_effects(condition):
            return None
        test, change = (Integers(g, g.topological(), roots=g.fetches) for g in (condition, body))
        given = [known.get(self._now(tensor)) for tensor in loop.inputs]
        found, certain = Loop(condition, body, test, change).run(given, bound=False, most=MOST_TRIPS)
        if found is None or not certain:
            return None
        trips = len(found) - 1
        kernels = trips * _kernels(body)
        if kernels > self._room:
            return None
        concurrent = loop.attrs.get("parallel_iterations")
        if self.lowered and isinstance(concurrent, int) and concurrent < trips:
            return None
        if not self.small and self._is_small(body):
            return None
        self._room -= kernels
        return found

    def _is_small(self, body: Graph) -> bool:
        """Whether a body's kernels are small on average."""
        kernels = _kernels(body)
        return kernels > 0 and self._seconds(body) < kernels * LEAST_MEAN_S

    def leaves_loops(self) -> bool:
        """Whether loops of small kernels could be unrolled, or loops in the bodies of others, as far as can be seen."""
        order = self.graph.topological()
        known = Integers(self.graph, order).follow({})
        for loop in (node for node in order if node in self.graph.bodies):
            body = self.graph.bodies[loop][-1]
            if self._trips(loop, known) is not None and (self._is_small(body) or body.bodies):
                return True
        return False

    def _seconds(self, body: Graph) -> float:
        """The total seconds of an iteration's kernels."""
        flow = analyse_body(body.copy(), self.device)
        cost_s = Costs.of(self.device).of_step(flow)
        return sum(s for s, is_kernel in zip(cost_s, flow.is_kernel, strict=True) if is_kernel)

    def _unroll(self, loop: Node, trips: Sequence[Sequence[Values | None]], known: Known) -> list[Node]:
        """Add the nodes of all iterations; returns loops and conditionals among them."""
        body = self.graph.bodies[loop][1]
        live = body.live_nodes().difference(body.feeds)
        nodes = [node for node in body.topological() if node in live]
        stateful = {node for node in nodes if not is_pure(node.op)}
        in_order = any(_acts(body, node) for node in stateful)
        anytime = _reads_of_unwritten(body, stateful)
        noticed = [node for node in nodes if node in stateful or node in body.targets]
        # In a lowered loop, values for the next iteration wait for the body's effects.
        in_turn = self.lowered and any(node in body.targets for node in nodes)
        change = Integers(body, nodes)
        made = self._nodes[loop] = []
        shared: dict[Node, Node] = {}
        waits: list[Node] = list(self._waits(loop.controls))
        values = [self._now(tensor) for tensor in loop.inputs]
        first: Node | None = None
        start, ran = None, list[Node]()
        for k, integers in enumerate(trips[:-1]):
            if (stateful and (k == 0 or in_order)) or (in_turn and k):
                start = self._barrier(loop, f"iteration_{k}/start", waits if k == 0 else ran)
                ran = []
                first = start if k == 0 else first
            copies = self._copied(loop, k, nodes, dict(zip(body.feeds, values, strict=True)), shared)
            fix_iteration(self.graph, copies.values(), k)
            for node in stateful:
                awaited = first if node in anytime else start
                if awaited is not None and stateful.isdisjoint(node.controls):
                    copies[node].controls = (*copies[node].controls, awaited)
            if in_turn and k and start is not None:
                for copy in _first(copies[node] for node in nodes if node not in shared):
                    copy.controls = tuple(dict.fromkeys((*copy.controls, start)))
            for (node, index), value in change.follow(as_feeds(body, integers)).items():
                if node in copies:
                    known[copies[node], index] = value
            ran += [copies[node] for node in noticed]
            given = dict(zip(body.feeds, values, strict=True))
            values = [given[t.node] if t.node in given else copies[t.node].out(t.index) for t in body.fetches]
        known |= {(loop, index): value for index, value in enumerate(trips[-1]) if value is not None}
        self._results |= {loop.out(index): value for index, value in enumerate(values)}
        self._ends[loop] = self._barrier(loop, "end", ran or waits)
        if in_order and loop not in self.graph.targets:
            self.graph.targets.append(loop)
        return [node for node in made if node in self.graph.bodies]

    def _copied(
        self, loop: Node, k: int, nodes: Sequence[Node], given: Mapping[Node, Output], shared: dict[Node, Node]
    ) -> dict[Node, Node]:
        """Add the nodes of the `k`-th iteration; returns them by those of the body.

        Args:
            nodes: of the body, those that run, in order.
            given: the tensors of the body's feeds.
            shared: constants, which all iterations share.
        """
        graph, body = self.graph, self.graph.bodies[loop][1]
        copies = dict(shared)
        awaited = {control for node in nodes for control in node.controls}
        for node in nodes:
            if node in shared:
                continue
            # Nodes that pass results on wait for the iteration's effects, which have an order anyway.
            waits = () if is_view(node.op) and node.inputs and node not in awaited else node.controls
            is_shared = is_const(node.op) and not node.controls
            scope = loop.name if is_shared else f"{loop.name}/iteration_{k}"
            inputs = [given[t.node] if t.node in given else copies[t.node].out(t.index) for t in node.inputs]
            controls = [copies[control] for control in waits if control in copies]
            device = node.device or loop.device
            name = f"{scope}/{node.name}"
            copy = add_copy(graph, node, name, inputs, controls=controls, device=device, source=body)
            copy.attrs = without_colocation(node.attrs)
            copies[node] = copy
            self._nodes[loop].append(copy)
            self.named[copy.name] = node.name
            if is_shared:
                shared[node] = copy
        for tensor, permit in body.permits.items():
            if tensor.node in given:
                graph.restrict(origin(given[tensor.node]), permit)
        return copies

    def _barrier(self, loop: Node, name: str, waits: Collection[Node]) -> Node | None:
        """A node that waits for all of `waits`, if there are any."""
        if not waits:
            return None
        controls = tuple(dict.fromkeys(waits))
        node = self.graph.add(
            "NoOp", self.graph.unique_name(f"{loop.name}/{name}"), controls=controls, device=loop.device
        )
        self._nodes[loop].append(node)
        self.named[node.name] = loop.name
        return node

    def _now(self, tensor: Output) -> Output:
        """The tensor that replaces `tensor`, after the unrolling of all loops so far."""
        while tensor in self._results:
            tensor = self._results[tensor]
        return tensor

    def _waits(self, nodes: Iterable[Node]) -> Iterable[Node]:
        """`nodes`, with unrolled loops replaced by their last nodes."""
        ends = (self._ends.get(node, node) for node in nodes)
        return dict.fromkeys(node for node in ends if node is not None)


def _first(nodes: Iterable[Node]) -> list[Node]:
    """The nodes of an iteration that read none of its nodes."""
    made = list(nodes)
    within = set(made)
    return [node for node in made if within.isdisjoint(t.node for t in node.inputs)]


def _acts(graph: Graph, node: Node) -> bool:
    """Whether a node of `graph` has effects."""
    if node in graph.bodies:
        return any(map(_has_effects, graph.bodies[node]))
    return acts(node.op) and bool(node.inputs or node.outputs)


def _has_effects(body: Graph) -> bool:
    """Whether `body` has effects."""
    return any(_acts(body, node) for node in body.live_nodes().difference(body.feeds))


def _reads_of_unwritten(body: Graph, stateful: Set[Node]) -> set[Node]:
    """The nodes of a body that read variables which no other node of it may write."""

    def variables(node: Node) -> set[Output]:
        return {origin(t) for t in node.inputs if t.type.dtype == "resource"}

    reads = {node for node in stateful if reads_variable(node.op) and not turns_on_copy_on_read(node.op)}
    written = {handle for node in stateful - reads for handle in variables(node)}
    return {node for node in reads if written.isdisjoint(variables(node))}


def _may_be_copied(body: Graph) -> bool:
    """Whether copies of each of a body's nodes have the same values as repeated runs of one."""
    for node in body.live_nodes().difference(body.feeds):
        if is_one_node(node.op) or (calls_functions(node.op) and node not in body.bodies):
            return False
        if not all(map(_may_be_copied, body.bodies.get(node, ()))):
            return False
    return True


def _kernels(body: Graph) -> int:
    """How many kernels one iteration runs, at most."""
    own = sum(not (is_view(node.op) or is_const(node.op)) for node in body.live_nodes().difference(body.feeds))
    return own + sum(map(_kernels, body.all_bodies()))
