"""Carries a plan out: copies to host memory and back, and kernels that run again.

SwapOut and Release come after the forward use, SwapIn and Await before the late one; a kernel that runs again is
a twin of the first, reading what is there by then.

Requires: the graph that the plan was made for. Ensures: every late reader of a swapped or recomputed tensor
reads the buffer that came last, views between the two are made anew on it, and nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tfswap.analysis.dataflow import Dataflow
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node, Output
from tfswap.passes.contract import Target, graph_pass
from tfswap.passes.nodes import (
    add_await,
    add_free_rest,
    add_identity,
    add_release,
    add_split,
    add_swap_in,
    add_swap_out,
)
from tfswap.passes.order import apply_order
from tfswap.passes.tactics.pair_kernels import add_finish, add_start, join_leads
from tfswap.plan.plan import Inside, Plan
from tfswap.plan.schedule import (
    AWAIT,
    FINISH,
    IN,
    LEAD,
    OUT,
    RELEASE,
    RERUN,
    RUN,
    SPLIT,
    START,
    planned_schedule,
)

HOST = "/device:CPU:0"
"""Where the copies of portable models lie."""


@dataclass
class _Travel:
    """One tensor that was swapped or recomputed: what stands for it now.

    Attributes:
        original: the tensor as the graph had it.
        source: the tensor that holds it now.
        disk: whether its copies go to disk.
        handle: of its copy in host memory.
        coming: the SwapIn whose copy has not been awaited.
        views: what stands for the original, and for each of its views that was needed; empty while it stands itself.
    """

    original: Output
    source: Output
    disk: bool
    handle: Output | None = None
    coming: Node | None = None
    views: dict[Output, Output] = field(default_factory=dict)

    def renew(self, tensor: Output) -> None:
        """From now on `tensor` is what late readers see."""
        self.source = tensor
        self.views = {self.original: tensor}


def apply_swaps(graph: Graph, flow: Dataflow, plan: Plan | Inside, *, portable: bool = False) -> list[Node]:
    """Carry out the plan's copies and second runs in `graph`, in place; returns its nodes in the planned order.

    Args:
        flow: the facts of the graph as it is before.
        portable: with TensorFlow's own ops alone.
    """
    travels: dict[int, _Travel] = {}
    disk = {a.tensor for a in plan.absences if a.disk}

    def travel(value: int) -> _Travel:
        if value not in travels:
            tensor = _in(graph, flow.values[value].tensor)
            travels[value] = _Travel(tensor, tensor, flow.values[value].tensor.name in disk)
        return travels[value]

    chain: list[Node] = []
    leads: dict[Node, int] = {}  # kernels that the next one of the chain runs beside, and their allocations
    started: dict[int, Node] = {}  # by kernel, what starts it
    finished: dict[Node, Sequence[Node]] = {}  # by what waits for a kernel, the kernel
    parted: list[int] = []  # the next step's requests that are to get no larger chunks
    schedule = planned_schedule(flow, plan)
    for number, (kind, subject) in enumerate(schedule):
        if kind == SPLIT:
            parted.append(subject)
            continue
        if kind in (RUN, LEAD, START):
            node = graph[flow.nodes[subject].name]
            for position, tensor in enumerate(_current(graph, flow, subject, travels)):
                if tensor != node.inputs[position]:
                    graph.replace_input(node, position, tensor)
            if kind == LEAD:
                leads[node] = flow.allocations(subject)
            elif kind == START:
                # What is finished next wakes no thread: it makes fewer allocations than are awaited.
                is_finished = schedule[number + 1] == (FINISH, subject)
                node = started[subject] = add_start(graph, node, flow.allocations(subject) + is_finished)
        elif kind == FINISH:
            node = add_finish(graph, graph[flow.nodes[subject].name], started[subject])
            finished[node] = [graph[flow.nodes[subject].name]]
        elif kind == RERUN:
            first = flow.nodes[subject]
            node = graph.add(
                first.op,
                graph.unique_name(f"{custom_ops.AGAIN}{first.name}"),
                tuple(_current(graph, flow, subject, travels)),
                attrs=first.attrs,
                outputs=first.outputs,
                device=first.device,
            )
            for o, value in flow.makes[subject]:
                travel(value).renew(node.out(o))
        else:
            if portable and kind == OUT:
                continue  # TensorFlow starts the copy when the tensor is there
            node = (_insert_identity if portable else _insert)(graph, kind, travel(subject))
        if parted:
            split = add_split(graph, node, tuple(parted))
            chain += (split, node, add_free_rest(graph, node, split))
            parted = []
        else:
            chain.append(node)
    graph.join(finished)
    return join_leads(graph, chain, leads)


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
    chain = apply_swaps(graph, flow, plan, portable=target.portable)
    apply_order(graph, chain, gate)
    return len(chain)


def _in(graph: Graph, tensor: Output) -> Output:
    """The same tensor in `graph`, a copy of the graph that it is of."""
    return Output(graph[tensor.node.name], tensor.index)


def _current(graph: Graph, flow: Dataflow, kernel: int, travels: dict[int, _Travel]) -> Iterator[Output]:
    """What a kernel that runs now reads: the buffers that came last of what was swapped or recomputed."""
    for read in flow.nodes[kernel].inputs:
        value = flow.value_of.get((read.node, read.index))
        travel = travels.get(value) if value is not None else None
        tensor = _in(graph, read)
        if value is not None and travel is not None and travel.views:
            tensor = _fresh(graph, flow, value, tensor, travel)
        yield tensor


def _insert(graph: Graph, kind: str, travel: _Travel) -> Node:
    stem = f"tfswap/{travel.original.node.name}_{travel.original.index}"
    if kind == OUT:
        node = add_swap_out(graph, stem, travel.source, travel.source.node.device, travel.disk)
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
    """As `_insert`: an Identity on the host for what has arrived there, one for what is to come back, and one on the
    device for what has. TensorFlow puts the copies between them, and makes the one back once the second has run.
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
    """`tensor`, a view of the swapped one, on the buffer that came back."""
    if tensor not in travel.views:
        view = tensor.node
        # What it read in the step as it was: a view that runs late itself reads the buffer that came back by now.
        reads = flow.nodes[flow.place[view.name]].inputs
        viewed = [i for i, read in enumerate(reads) if flow.value_of.get((read.node, read.index)) == value]
        same = [i for i in viewed if reads[i].type == tensor.type]
        if same:
            # An Identity by any name: read what it passes on. Another IdentityN would hold all its inputs.
            position = tensor.index if tensor.index in same else same[0]
            travel.views[tensor] = _fresh(graph, flow, value, _in(graph, reads[position]), travel)
            return travel.views[tensor]
        inputs = tuple(
            _fresh(graph, flow, value, _in(graph, reads[i]), travel) if i in viewed else t
            for i, t in enumerate(view.inputs)
        )
        twin = graph.add(
            view.op,
            graph.unique_name(f"tfswap/{view.name}"),
            inputs,
            attrs=view.attrs,
            outputs=view.outputs,
            device=view.device,
        )
        for i in range(len(view.outputs)):
            travel.views[view.out(i)] = twin.out(i)
    return travel.views[tensor]
