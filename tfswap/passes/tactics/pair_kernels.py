"""Puts concurrent kernels into one node, which runs them (csrc/core/paired_kernels.cc, group_ops.cc).

Requires: on one device, in a step two kernels that do not depend on each other, in a body kernels with only views
between them. Ensures: nodes that read or awaited one of them read the node's outputs, or await all. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from tfswap.analysis.cost import Costs, makers
from tfswap.analysis.function_runs import group_chunks
from tfswap.analysis.groups import Chunks, with_views
from tfswap.ir.custom_ops import GROUP, PAIR
from tfswap.ir.graph import Dtype, Graph, Node
from tfswap.ir.op_traits import is_view
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import without_colocation


def join_leads(graph: Graph, chain: Sequence[Node], leads: Mapping[Node, int]) -> list[Node]:
    """Join each kernel of `leads` with the next one of the chain, in place; returns the new chain.

    Args:
        leads: kernels, and how many allocations each makes.
    """
    pairs = [(first, second) for first, second in pairwise(chain) if first in leads]
    joint = {_add(graph, first, second, leads[first]): (first, second) for first, second in pairs}
    graph.join(joint)
    stands_for = {member: node for node, members in joint.items() for member in members}
    return list(dict.fromkeys(stands_for.get(node, node) for node in chain))


@graph_pass(
    requires="bodies with an order, and groups of kernels in it",
    ensures="each group is one node, which runs its kernels concurrently",
)
def join_groups(graph: Graph, target: Target) -> int:
    """Join the kernels of each group of a body, in place; returns how many groups there are."""
    count = 0
    costs = Costs.of(target.device)
    for body in graph.all_bodies():
        groups = body.groups()
        if groups:
            order = body.topological()
            members = [with_views(group, order) for group in groups]
            chunks = [group_chunks(body, group, target.device) for group in members]
            body.join({_add_group(body, g, c, costs): g for g, c in zip(members, chunks, strict=True)})
            count += len(groups)
    return count


def _add_group(graph: Graph, group: Sequence[Node], chunks: Chunks, costs: Costs) -> Node:
    members = set(group)
    outputs = [node.out(o) for node in group for o in range(len(node.outputs))]
    number = {output: -1 - n for n, output in enumerate(outputs)}
    inputs = list(dict.fromkeys(t for node in group for t in node.inputs if t not in number))
    number.update({tensor: n for n, tensor in enumerate(inputs)})
    requests: list[int] = []
    left_s: dict[Node, float] = {}  # from the start of each to the end of all that wait for it
    for node in reversed(group):
        own_s = 0.0 if is_view(node.op) else costs.seconds(node)
        left_s[node] = own_s + left_s.get(node, 0.0)
        for source in makers(node, members):
            left_s[source] = max(left_s.get(source, 0.0), left_s[node])
    for node in group:
        served = [each for each in chunks.served[node] if each.over is None]
        requests += [len(served), *(number for each in served for number in (each.chunk, each.offset))]
    kept = {*(t for node in graph if node not in members for t in node.inputs), *graph.fetches}
    over = {(node, each.over) for node in group for each in chunks.served[node]}
    ranks = {node: rank for rank, node in enumerate(sorted(group, key=lambda node: -left_s[node]))}
    return graph.add(
        GROUP,
        graph.unique_name(f"tfswap/group/{group[0].name}"),
        inputs,
        controls=dict.fromkeys(c for node in group for c in node.controls if c not in members),
        attrs={
            "Tin": tuple(Dtype(tensor.type.dtype) for tensor in inputs),
            "Tout": tuple(Dtype(output.type.dtype) for output in outputs),
            "kernels": tuple(map(alone, group)),
            "sources": tuple(number[t] for node in group for t in node.inputs),
            "chunks": tuple(chunks.sizes),
            "reserved": chunks.reserved,
            "requests": tuple(requests),
            "overwrites": tuple(int((node, p) in over) for node in group for p in range(len(node.inputs))),
            "kept": tuple(int(output in kept) for output in outputs),
            "ranks": tuple(ranks[node] for node in group),
        },
        outputs=[output.type for output in outputs],
        device=group[0].device,
    )


def _add(graph: Graph, first: Node, second: Node, allocations: int) -> Node:
    inputs, outputs = (*first.inputs, *second.inputs), (*first.outputs, *second.outputs)
    return graph.add(
        PAIR,
        graph.unique_name(f"tfswap/pair/{first.name}"),
        inputs,
        controls=dict.fromkeys(c for c in (*first.controls, *second.controls) if c not in (first, second)),
        attrs={
            "Tin": tuple(Dtype(tensor.type.dtype) for tensor in inputs),
            "Tout": tuple(Dtype(kind.dtype) for kind in outputs),
            "kernels": (alone(first), alone(second)),
            "allocations": allocations,
        },
        outputs=outputs,
        device=first.device,
    )


def alone(node: Node) -> Node:
    """The node as part of another: its inputs are given in order, without names, and it has no colocation."""
    return Node(node.name, node.op, node.inputs, (), without_colocation(node.attrs), node.outputs, node.device)
