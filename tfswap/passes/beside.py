"""Puts two kernels that run side by side into one node, which runs both (csrc/core/beside_ops.cc).

Requires: two kernels that need nothing of each other, on one device. Ensures: whatever read or awaited one of them
reads the node's outputs, or awaits both. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from tfswap.analysis.dataflow import analyse_body
from tfswap.analysis.device import DeviceModel
from tfswap.ir.graph import Dtype, Graph, Node
from tfswap.oplib.names import BESIDE
from tfswap.planner.beside import allocations


def join_leads(graph: Graph, chain: Sequence[Node], leads: Mapping[Node, int]) -> list[Node]:
    """Join each kernel of `leads` with the next one of the chain, in place; returns the chain as it is then.

    Args:
        leads: kernels, and how many allocations each makes.
    """
    pairs = [(first, second) for first, second in pairwise(chain) if first in leads]
    joint = {_add(graph, first, second, leads[first]): (first, second) for first, second in pairs}
    graph.join(joint)
    stands_for = {member: node for node, members in joint.items() for member in members}
    return list(dict.fromkeys(stands_for.get(node, node) for node in chain))


def join_in_bodies(graph: Graph, device: DeviceModel) -> None:
    """Join the kernels of bodies that run beside the next one of their order, in place."""
    for body in graph.all_bodies():
        if body.beside:
            flow = analyse_body(body, device)
            leads = {first: allocations(flow, flow.place[first.name]) for first in body.beside}
            join_leads(body, [node for pair in body.beside.items() for node in pair], leads)


def _add(graph: Graph, first: Node, second: Node, allocations: int) -> Node:
    inputs, outputs = (*first.inputs, *second.inputs), (*first.outputs, *second.outputs)
    return graph.add(
        BESIDE,
        graph.unique_name(f"tfswap/beside/{first.name}"),
        inputs,
        controls=dict.fromkeys(c for c in (*first.controls, *second.controls) if c not in (first, second)),
        attrs={
            "Tin": tuple(Dtype(tensor.type.dtype) for tensor in inputs),
            "Tout": tuple(Dtype(kind.dtype) for kind in outputs),
            "kernels": (_alone(first), _alone(second)),
            "allocations": allocations,
        },
        outputs=outputs,
        device=first.device,
    )


def _alone(node: Node) -> Node:
    """The node as part of another: what it reads it is given in order, whatever that is called, and nothing lies beside
    it."""
    attrs = {key: value for key, value in node.attrs.items() if key != "_class"}
    return Node(node.name, node.op, node.inputs, (), attrs, node.outputs, node.device)
