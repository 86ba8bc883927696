"""Carries out a plan: copies to host memory and back, and recomputed kernels.

SwapOut and Release come after the forward use, SwapIn and Await before the late one. A recomputed kernel is a second
node like the first, which reads the tensors that exist then. Control edges keep all of them in the plan's order
(passes/order.py).

Requires: the graph that the plan was made for. Ensures: every late reader of a swapped or recomputed tensor reads its
latest buffer, through copies of the views between the two. No other data edge is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tfswap.analysis.dataflow import Dataflow
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.node_copies import add_copy
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import (
    add_await,
    add_exact_chunks,
    add_free_rest,
    add_identity,
    add_release,
    add_split,
    add_swap_in,
    add_swap_out,
)
from tfswap.passes.order import chain_nodes
from tfswap.passes.tactics.pair_kernels import join_leads
from tfswap.passes.tactics.state_homes import start_reads
from tfswap.plan.plan import Eviction, Inside, Plan
from tfswap.plan.schedule import (
    AWAIT,
    EXACT,
    IN,
    LEAD,
    OUT,
    RELEASE,
    RERUN,
    RUN,
    SPLIT,
    is_exact,
    planned_schedule,
)

HOST = "/device:CPU:0"
"""The device of the copies of portable models."""


@dataclass
class _Travel:
    """A tensor that was swapped or recomputed: its present replacement.

    Attributes:
        original: the tensor as the graph had it.
        source: the tensor that holds it now.
        disk: whether its copies go to disk.
        lent: their place in the memory that another device lends; None where they are not there.
        handle: the handle of its copy in host memory.
        coming: the SwapIn whose copy has not been awaited.
        views: replacements of the original, and of each of its views that was needed; empty while the original is
            present.
    """

    original: Output
    source: Output
    disk: bool
    lent: int | None = None
    handle: Output | None = None
    coming: Node | None = None
    views: dict[Output, Output] = field(default_factory=dict)

    def renew(self, tensor: Output) -> None:
        """Have later readers read `tensor`."""
        self.source = tensor
        self.views = {self.original: tensor}


class _Writer:
    """Writes a plan's schedule into a graph, entry by entry.

    Args:
        flow: the facts of the graph as it is before.
        evictions: those of the plan.
    """

    def __init__(self, graph: Graph, target: Target, flow: Dataflow, evictions: Iterable[Eviction]):
        self._graph = graph
        self._target = target
        self._flow = flow
        self._evictions = {eviction.tensor: eviction for eviction in evictions}
        self._travels: dict[int, _Travel] = {}
        self._parted: list[int] = []  # the next entry's requests that get exact chunks
        self.chain: list[Node] = []
        self.leads: dict[Node, int] = {}  # kernels that run concurrently with the next one, and their allocations

    def write(self, kind: str, subject: int) -> None:
        """Add the nodes of one entry of the schedule."""
        if kind == SPLIT:
            self._parted.append(subject)
            return
        node = self._node(kind, subject)
        if node is None:
            return
        if self._parted:
            split = add_split(self._graph, node, tuple(self._parted))
            self.chain += (split, node, add_free_rest(self._graph, node, split))
            self._parted = []
        else:
            self.chain.append(node)

    def _node(self, kind: str, subject: int) -> Node | None:
        """The node of an entry; None where TensorFlow does it itself."""
        if kind == EXACT:
            return add_exact_chunks(self._graph, self._device())
        if kind in (RUN, LEAD):
            return self._run(kind, subject)
        if kind == RERUN:
            return self._run_again(subject)
        if kind == OUT and not self._target.own_ops:
            return None  # TensorFlow starts the copy when the tensor is computed
        insert = _insert if self._target.own_ops else _insert_identity
        return insert(self._graph, kind, self._travel(subject))

    def _run(self, kind: str, subject: int) -> Node:
        node = self._graph[self._flow.nodes[subject].name]
        for position, tensor in enumerate(self._current(subject)):
            if tensor != node.inputs[position]:
                self._graph.replace_input(node, position, tensor)
        if kind == LEAD:
            self.leads[node] = self._flow.allocations(subject)
        return node

    def _run_again(self, subject: int) -> Node:
        first = self._flow.nodes[subject]
        node = add_copy(self._graph, first, f"{custom_ops.AGAIN}{first.name}", self._current(subject))
        for o, value in self._flow.makes[subject]:
            self._travel(value).renew(node.out(o))
        return node

    def _device(self) -> str:
        """The device of most kernels, whose arena the plan is for."""
        kernels = zip(self._flow.nodes, self._flow.is_kernel, strict=True)
        return Counter(node.device for node, is_kernel in kernels if is_kernel).most_common(1)[0][0]

    def _travel(self, value: int) -> _Travel:
        if value not in self._travels:
            planned = self._flow.values[value].tensor
            tensor = _in(self._graph, planned)
            evicted = self._evictions.get(planned.name)
            disk, lent = (evicted.disk, evicted.lent) if evicted else (False, None)
            self._travels[value] = _Travel(tensor, tensor, disk, lent)
        return self._travels[value]

    def _current(self, kernel: int) -> Iterator[Output]:
        """The inputs of a kernel that runs now: the latest buffers of swapped and recomputed tensors."""
        for read in self._flow.nodes[kernel].inputs:
            value = self._flow.value_of.get((read.node, read.index))
            travel = self._travels.get(value) if value is not None else None
            tensor = _in(self._graph, read)
            if value is not None and travel is not None and travel.views:
                tensor = _fresh(self._graph, self._flow, value, tensor, travel)
            yield tensor


def insert_schedule(graph: Graph, target: Target, flow: Dataflow, plan: Plan | Inside) -> list[Node]:
    """Put the plan's copies and recomputed kernels into `graph`, in place; returns its nodes in the planned order.

    Args:
        flow: the facts of the graph as it is before.
    """
    writer = _Writer(graph, target, flow, plan.evictions)
    schedule = planned_schedule(flow, plan)
    for kind, subject in schedule:
        writer.write(kind, subject)
    if is_exact(schedule):
        writer.chain.append(add_free_rest(graph, writer.chain[0], writer.chain[0]))
    return start_reads(graph, join_leads(graph, writer.chain, writer.leads))


@graph_pass(
    requires="the graph that the plan was made for",
    ensures="kernels, copies and second runs are in the planned order, one after the other",
)
def carry_out(graph: Graph, target: Target, flow: Dataflow, plan: Plan, gate: int | None = None) -> int:
    """Carry out the plan's copies, second runs and order in `graph`, in place; returns how many nodes are in the order.

    Args:
        flow: the facts of the graph as it is before.
        gate: put this gate before the order.
    """
    chain = insert_schedule(graph, target, flow, plan)
    chain_nodes(graph, chain, gate)
    return len(chain)


def _in(graph: Graph, tensor: Output) -> Output:
    """The same tensor in `graph`, a copy of the graph that it is of."""
    return Output(graph[tensor.node.name], tensor.index)


def _insert(graph: Graph, kind: str, travel: _Travel) -> Node:
    stem = f"tfswap/{travel.original.node.name}_{travel.original.index}"
    if kind == OUT:
        node = add_swap_out(graph, stem, travel.source, travel.source.node.device, travel.disk, travel.lent)
        travel.handle = node.out()
        return node
    assert travel.handle is not None
    if kind == RELEASE:
        return add_release(graph, stem, travel.handle)
    if kind == IN:
        travel.coming = add_swap_in(graph, stem, travel.handle, travel.source.type)
        return travel.coming
    assert kind == AWAIT
    assert travel.coming is not None
    node = add_await(graph, stem, travel.coming)
    travel.renew(node.out())
    return node


def _insert_identity(graph: Graph, kind: str, travel: _Travel) -> Node:
    """As `_insert`: an Identity on the host for the arrived copy, one for the copy that is to return, and one on the
    device for the returned tensor. TensorFlow puts the copies between them, and starts the one back once the second has
    run.
    """
    stem = f"tfswap/{travel.original.node.name}_{travel.original.index}"
    device = travel.source.node.device
    if kind == RELEASE:
        node = add_identity(graph, f"{stem}/to_host", travel.source, HOST)
        travel.handle = node.out()
        return node
    assert travel.handle is not None
    if kind == IN:
        travel.coming = add_identity(graph, f"{stem}/from_host", travel.handle, HOST)
        return travel.coming
    assert kind == AWAIT
    assert travel.coming is not None
    node = add_identity(graph, f"{stem}/on_device", travel.coming.out(), device)
    travel.renew(node.out())
    return node


def _fresh(graph: Graph, flow: Dataflow, value: int, tensor: Output, travel: _Travel) -> Output:
    """`tensor`, a view of the swapped one, on the returned buffer."""
    if tensor not in travel.views:
        view = tensor.node
        # Its input in the original step: a view that runs late itself already reads the returned buffer.
        reads = flow.nodes[flow.place[view.name]].inputs
        viewed = [i for i, read in enumerate(reads) if flow.value_of.get((read.node, read.index)) == value]
        same = [i for i in viewed if reads[i].type == tensor.type]
        if same:
            # A form of Identity: read its input. Another IdentityN would hold all its inputs.
            position = tensor.index if tensor.index in same else same[0]
            travel.views[tensor] = _fresh(graph, flow, value, _in(graph, reads[position]), travel)
            return travel.views[tensor]
        inputs = tuple(
            _fresh(graph, flow, value, _in(graph, reads[i]), travel) if i in viewed else t
            for i, t in enumerate(view.inputs)
        )
        twin = add_copy(graph, view, f"tfswap/{view.name}", inputs)
        for i in range(len(view.outputs)):
            travel.views[view.out(i)] = twin.out(i)
    return travel.views[tensor]
