"""Puts the kernels of a step's group into one node, which runs each as soon as it is ready (csrc/core/group_ops.cc).

Requires: kernels with only views between them. Ensures: nodes that read or awaited one of them read the node's outputs,
or await all. A tensor that only the group's kernels read is an empty output. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.groups import Concurrent, passes_on_buffers
from tfswap.ir.custom_ops import GROUP
from tfswap.ir.graph import Dtype, Graph, Measured, Node, Output
from tfswap.ir.node_copies import add_copy
from tfswap.ir.op_traits import acts, only_waits
from tfswap.ir.types import TensorType
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.tactics.pair_kernels import alone
from tfswap.support.reach import reach


@graph_pass(
    requires="kernels between which there are views at most",
    ensures="the kernels of each group are one node",
)
def join_concurrent(graph: Graph, _: Target, flow: Dataflow, groups: Sequence[Concurrent]) -> int:
    """Join the kernels of each group, in place; returns how many kernels there are.

    Args:
        flow: the facts of the graph, or of a copy of it.
    """
    _free_constants(graph, flow)
    for number, group in enumerate(groups):
        _join(graph, flow, group, number)
    return sum(len(group.order) for group in groups)


def _join(graph: Graph, flow: Dataflow, group: Concurrent, number: int) -> None:
    kernels = [graph[flow.nodes[i].name] for i in group.order]
    views = {graph[n.name] for i, n in enumerate(flow.nodes) if n.name in graph and passes_on_buffers(flow, i)}
    members = _with_views(kernels, views)
    _repeat_views(graph, set(members), views)
    outputs = [node.out(o) for node in members for o in range(len(node.outputs))]
    place = {output: -1 - n for n, output in enumerate(outputs)}
    inside = set(members)
    inputs = list(dict.fromkeys(t for node in members for t in node.inputs if t not in place))
    place.update({tensor: n for n, tensor in enumerate(inputs)})
    read = {*(t for node in graph if node not in inside for t in node.inputs), *graph.fetches}
    # The chunks of tensors that others read, in the order of the outputs.
    chunk_of = {_in(graph, flow.values[v].tensor): n for n, v in enumerate(group.kept, 1)}
    kept = [output for output in outputs if output in chunk_of]
    chunk = {0: 0, **{chunk_of[output]: n for n, output in enumerate(kept, 1)}}
    index = {graph[flow.nodes[i].name]: i for i in group.order}
    rank = {node: n for n, node in enumerate(members)}
    requests: list[int] = []
    for node in members:
        served = [each for each in group.served[index[node]] if each.over is None] if node in index else []
        requests += [len(served), *(n for each in served for n in (chunk[each.chunk], each.offset))]
    over = {(node, each.over) for node, i in index.items() for each in group.served[i]}
    waits = sorted(
        (rank[graph[flow.nodes[before].name]], rank[node])
        for node, i in index.items()
        for before in group.waits.get(i, ())
    )
    made = graph.add(
        GROUP,
        graph.unique_name(f"tfswap/concurrent/{number}"),
        inputs,
        controls=_awaited(members),
        attrs={
            "Tin": tuple(Dtype(tensor.type.dtype) for tensor in inputs),
            "Tout": tuple(Dtype(output.type.dtype) for output in outputs),
            "kernels": tuple(map(alone, members)),
            "sources": tuple(place[t] for node in members for t in node.inputs),
            "chunks": tuple(group.sizes[k] for k in sorted(chunk, key=chunk.__getitem__)),
            "reserved": group.reserved,
            "requests": tuple(requests),
            "overwrites": tuple(int((node, p) in over) for node in members for p in range(len(node.inputs))),
            "kept": tuple(int(output in read) for output in outputs),
            "ranks": tuple(range(len(members))),
            "waits": tuple(n for pair in waits for n in pair),
        },
        outputs=[output.type if output in read else TensorType(output.type.dtype, (0,)) for output in outputs],
        device=kernels[0].device,
    )
    made.measured = Measured(seconds=group.seconds)
    graph.join({made: sorted(members, key=rank.__getitem__)})


def _awaited(members: Sequence[Node]) -> list[Node]:
    """The nodes that the group waits for by control edges, with nodes that only wait replaced by those that they
    await.
    """
    of_group = {*members}
    first = [c for node in reversed(members) for c in reversed(node.controls)]
    awaited = reach(first, lambda node: reversed(node.controls) if only_waits(node.op) and node not in of_group else ())
    return [node for node in awaited if not only_waits(node.op) and node not in of_group]


def _in(graph: Graph, tensor: Output) -> Output:
    return Output(graph[tensor.node.name], tensor.index)


def _free_constants(graph: Graph, flow: Dataflow) -> None:
    """Remove control inputs of constants, in place: their tensors exist before the step, and these inputs may wait for
    a group. An effect that nothing else needs becomes a target: in TensorFlow 1's graphs, an update may be needed by
    that alone.
    """
    names = {constant.name for constant in flow.constants}
    awaited: list[Node] = []
    for node in graph:
        if node.name in names:
            awaited += node.controls
            node.controls = ()
    needed = graph.needed([*(tensor.node for tensor in graph.fetches), *graph.targets])
    lost = graph.needed(awaited) - needed
    graph.targets = [*graph.targets, *(node for node in graph if node in lost and acts(node.op))]


def _with_views(kernels: Sequence[Node], views: Collection[Node]) -> list[Node]:
    """The kernels, each after the views of others' results that it reads."""
    group = set(kernels)
    known: dict[Node, bool] = {}

    def is_between(node: Node) -> bool:
        """Whether a node that a kernel reads is a view of another kernel's result."""
        if node in group:
            return True
        if node not in views:
            return False
        if node not in known:
            known[node] = any(is_between(t.node) for t in node.inputs)
        return known[node]

    found: dict[Node, None] = {}

    def put(node: Node) -> None:
        for tensor in node.inputs:
            if tensor.node not in group and tensor.node not in found and is_between(tensor.node):
                put(tensor.node)
        found[node] = None

    for node in kernels:
        put(node)
    return list(found)


def _repeat_views(graph: Graph, members: Collection[Node], views: Collection[Node]) -> None:
    """Give readers outside of the group views of their own in place of views in it, in place."""
    twins: dict[Node, Node] = {}

    def outside(tensor: Output) -> Output:
        node = tensor.node
        if node not in members or node not in views:
            return tensor
        if node not in twins:
            inputs = [outside(t) for t in node.inputs]
            twins[node] = add_copy(graph, node, f"{node.name}/tfswap_again", inputs)
        return twins[node].out(tensor.index)

    for node in [node for node in graph if node not in members]:
        if any(t.node in members for t in node.inputs):
            node.inputs = tuple(outside(t) for t in node.inputs)
    graph.fetches = [outside(t) for t in graph.fetches]
