"""Puts a plan's copies into the graph: SwapOut and Release after the forward use, SwapIn and Await before the late one.

Requires: the graph that the plan was made for. Ensures: every late reader of a swapped tensor reads the
buffer that came back, views between the two are made anew on it, and nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.types import TensorType
from tfswap.oplib import names
from tfswap.planner.plan import Absence, Plan
from tfswap.planner.schedule import AWAIT, IN, OUT, RELEASE, RUN, Interval, build_schedule

VARIANT = TensorType("variant", ())


@dataclass
class _Travel:
    """What has been built for one swapped tensor so far."""

    source: Output
    handle: Output | None = None
    coming: Node | None = None
    views: dict[Output, Output] = field(default_factory=dict)


def apply_swaps(graph: Graph, flow: Dataflow, plan: Plan) -> list[Node]:
    """Insert the plan's copies into `graph`, in place; returns its nodes in the order that the plan wants.

    `flow` holds the facts of the graph as it is before.
    """
    index = {node.name: i for i, node in enumerate(flow.nodes)}
    order = [index[name] for name in plan.order]
    values = {flow.values[v].tensor.name: v for v in range(len(flow.values))}
    intervals = [to_interval(a, values) for a in plan.absences]
    travels: dict[int, _Travel] = {}
    chain: list[Node] = []
    for kind, subject in build_schedule(order, intervals):
        if kind == RUN:
            node = graph[flow.nodes[subject].name]
            _reroute(graph, flow, node, flow.nodes[subject], travels)
            chain.append(node)
            continue
        if subject not in travels:
            tensor = flow.values[subject].tensor
            travels[subject] = _Travel(Output(graph[tensor.node.name], tensor.index))
        chain.append(_insert(graph, kind, travels[subject]))
    return chain


def to_interval(absence: Absence, values: dict[str, int]) -> Interval:
    return Interval(values[absence.tensor], absence.out, absence.release, absence.back, absence.use)


def _insert(graph: Graph, kind: str, travel: _Travel) -> Node:
    source = travel.source
    stem = f"tfswap/{source.node.name}_{source.index}"
    dtype = Dtype(source.type.dtype)
    device = source.node.device
    if kind == OUT:
        node = graph.add(
            names.SWAP_OUT,
            graph.unique_name(f"{stem}/out"),
            (source,),
            attrs={"T": dtype},
            outputs=(VARIANT,),
            device=device,
        )
        travel.handle = node.out()
        return node
    assert travel.handle is not None
    if kind == RELEASE:
        return graph.add(names.RELEASE, graph.unique_name(f"{stem}/release"), (travel.handle,), device=device)
    if kind == IN:
        travel.coming = graph.add(
            names.SWAP_IN,
            graph.unique_name(f"{stem}/in"),
            (travel.handle,),
            # No shape: TensorFlow takes it from the handle, and planned sizes may be of one batch among many.
            attrs={"T": dtype, "shape": None},
            outputs=(source.type, VARIANT),
            device=device,
        )
        return travel.coming
    assert kind == AWAIT
    assert travel.coming is not None
    node = graph.add(
        names.AWAIT,
        graph.unique_name(f"{stem}/await"),
        (travel.coming.out(0), travel.coming.out(1)),
        attrs={"T": dtype},
        outputs=(source.type,),
        device=device,
    )
    travel.views = {source: node.out()}
    return node


def _reroute(graph: Graph, flow: Dataflow, node: Node, original: Node, travels: dict[int, _Travel]) -> None:
    """Point what `node` reads of tensors that have come back to their fresh buffers."""
    for position, read in enumerate(original.inputs):
        value = flow.value_of.get((read.node, read.index))
        travel = travels.get(value) if value is not None else None
        if value is not None and travel is not None and travel.views:
            graph.replace_input(node, position, _fresh(graph, flow, value, node.inputs[position], travel))


def _fresh(graph: Graph, flow: Dataflow, value: int, tensor: Output, travel: _Travel) -> Output:
    """`tensor`, a view of the swapped one, on the buffer that came back."""
    if tensor not in travel.views:
        view = tensor.node
        viewed = [i for i in range(len(view.inputs)) if _is_view_of(flow, view, i, value)]
        same = [i for i in viewed if view.inputs[i].type == tensor.type]
        if same:
            # An Identity by any name: read what it passes on. Another IdentityN would hold all its inputs.
            position = tensor.index if tensor.index in same else same[0]
            travel.views[tensor] = _fresh(graph, flow, value, view.inputs[position], travel)
            return travel.views[tensor]
        inputs = tuple(_fresh(graph, flow, value, t, travel) if i in viewed else t for i, t in enumerate(view.inputs))
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


def _is_view_of(flow: Dataflow, view: Node, position: int, value: int) -> bool:
    original = flow.nodes[flow.place[view.name]]
    source = original.inputs[position]
    return flow.value_of.get((source.node, source.index)) == value


def swap_nodes(graph: Graph) -> Iterable[Node]:
    """The nodes of `graph` that tfswap has inserted to move tensors."""
    return (node for node in graph if node.op in names.ALL)
