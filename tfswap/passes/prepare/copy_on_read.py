"""Keeps variables that a step reads or updates both in part and as a whole out of TensorFlow's copy-on-read mode.

An access to a part (ResourceGather, ResourceScatterAdd) turns that mode on, and from then on every read and every
update of the whole variable copies it: a table of embeddings once in each step, at another address each time, so peaks
of the same order differ. This pass gathers from a read of the variable, which shares its buffer. It turns the
mode off again after an update of a part, and, since other functions can have turned it on, at the step's first access
to the variable.

Ensures: where the graph turns a variable's mode off (ops.turns_off_copy_on_read), it is off at each access to the whole
variable, in the bodies of loops and conditionals too.

Not handled: a ResourceGather with batch dimensions, which no op of two inputs can replace: its variable stays as it is,
as do those that are accessed in part only, which are never copied. Another thread that updates a part of the variable
while the step runs can turn the mode on between two nodes, which causes a copy.
"""

from __future__ import annotations

from typing import NamedTuple

from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.op_traits import (
    READ_VARIABLE,
    SHARE_READS,
    control_flow,
    gather_of_read,
    is_view,
    turns_off_copy_on_read,
    turns_on_copy_on_read,
    writes_variable,
)
from tfswap.ir.types import TensorType
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass


class _Use(NamedTuple):
    """A node that takes a handle, and the graph that it is in."""

    graph: Graph
    node: Node
    handle: Output


_Uses = dict[tuple[Graph, Output], list[_Use]]
"""Uses by the origin of the handle."""


@graph_pass(
    ensures="no access to a whole variable copies it because others access parts of it",
)
def leave_copy_on_read(graph: Graph, _: Target) -> int:
    """Rewrite the accesses to parts of such variables, in `graph` and its bodies, in place; returns how many."""
    uses: _Uses = {}
    _collect(graph, {}, uses)
    shares: dict[Graph, dict[Node, list[Node]]] = {}
    count = 0
    for (home, handle), found in uses.items():
        in_part = [use for use in found if turns_on_copy_on_read(use.node.op)]
        whole = max((t for use in found for t in _whole(use)), key=lambda kind: kind.nbytes or 0, default=None)
        off = any(turns_off_copy_on_read(use.node.op) for use in found)
        if not in_part or whole is None or off or any(use.node.attrs.get("batch_dims") for use in in_part):
            continue
        at_home = [use.node for use in found if use.graph is home]
        first = _share(home, handle, at_home[0].device)
        for node in at_home:
            home.add_control(node, first)
        for use in in_part:
            if (gather := gather_of_read(use.node.op)) is not None:
                _gather_from_read(use, gather, whole)
            else:
                share = _share(use.graph, use.handle, use.node.device, (use.node,))
                shares.setdefault(use.graph, {}).setdefault(use.node, []).append(share)
        count += len(in_part)
    for changed, after in shares.items():
        _let_wait(changed, after)
    return count


def _collect(graph: Graph, known: dict[Output, tuple[Graph, Output]], uses: _Uses) -> None:
    """Record the users of each handle, of those with a `known` origin and of those that the graph makes."""
    for node in graph.topological():
        origins = [known.setdefault(t, (graph, t)) if t.type.dtype == "resource" else None for t in node.inputs]
        if is_view(node.op):
            known.update({node.out(o): origin for o, origin in enumerate(origins) if origin is not None})
            continue
        for handle, origin in zip(node.inputs, origins, strict=True):
            if origin is not None:
                uses.setdefault(origin, []).append(_Use(graph, node, handle))
        if (kind := control_flow(node.op)) is not None:
            for body in graph.bodies.get(node, ()):
                given = zip(body.feeds, origins[kind.first_argument :], strict=True)
                _collect(body, {feed.out(): origin for feed, origin in given if origin is not None}, uses)


def _whole(use: _Use) -> list[TensorType]:
    """The types of the node's reads or updates of the whole variable that copy in the mode."""
    op = use.node.op
    if op == READ_VARIABLE:
        return list(use.node.outputs)
    if writes_variable(op) and op != custom_ops.ASSIGN_IN_PLACE and not turns_on_copy_on_read(op):
        return [t.type for t in use.node.inputs if t.type.dtype != "resource"]
    return []


def _share(graph: Graph, handle: Output, device: str, after: tuple[Node, ...] = ()) -> Node:
    """A node that turns the mode of the variable of `handle` off."""
    name = graph.unique_name(f"tfswap/{handle.node.name}/shared_reads")
    return graph.add(SHARE_READS, name, (handle,), controls=after, device=device)


def _gather_from_read(use: _Use, gather: str, whole: TensorType) -> None:
    """Have the node gather from a read of the variable at the same place."""
    graph, node, handle = use
    read = graph.add(
        READ_VARIABLE,
        graph.unique_name(f"{node.name}/read"),
        (handle,),
        controls=node.controls,
        attrs={"dtype": Dtype(whole.dtype)},
        outputs=(whole,),
        device=node.device,
    )
    node.op = gather
    node.attrs = {"Tparams": Dtype(whole.dtype), "Tindices": node.attrs["Tindices"]}
    node.inputs = (read.out(), *node.inputs[1:])
    node.controls = ()


def _let_wait(graph: Graph, after: dict[Node, list[Node]]) -> None:
    """Have nodes that wait for one of these nodes wait also for its successor."""
    added = {share for shares in after.values() for share in shares}
    for node in graph:
        if node not in added:
            for share in [share for c in node.controls for share in after.get(c, ())]:
                graph.add_control(node, share)
    graph.targets = [share for target in graph.targets for share in after.get(target, (target,))]
