"""Passes tensors between devices that share an arena, in a step on several of them.

TensorFlow sends a tensor from one device of a process to another with its buffer. The sender may free it later than the
last reader ends, when the plan counts it as free. So the tensor is sent in a carrier, which is outside of the arena and
holds the tensor only until it is taken out (csrc/core/outside_ops.cc).

Requires: nodes have devices. Ensures: no tensor of the arena is sent from one device to another otherwise, except
persistent ones: arguments and constants.
"""

from __future__ import annotations

from tfswap.analysis.constants import constant_nodes
from tfswap.ir.custom_ops import CARRY, DELIVER
from tfswap.ir.devices import within_worker
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import VARIANT

FIRST = "CPU:0"
"""The device of nodes that name none, on a machine whose devices share an arena."""


def unit(device: str) -> str:
    """The device of a node within its worker, "CPU:1"; the first where it names none."""
    return within_worker(device) or FIRST


def units(graph: Graph) -> dict[str, str]:
    """The devices that nodes of a graph name: by `unit`, the name as a node has it."""
    return {unit(node.device): node.device for node in sorted(graph, key=lambda n: n.device) if node.device}


def sharing(graph: Graph) -> list[str]:
    """The devices of a step that share an arena, as nodes name them; none where it is on one, or not on CPUs alone."""
    found = units(graph)
    return list(found.values()) if len(found) > 1 and all(each.startswith("CPU:") for each in found) else []


@graph_pass(
    requires="nodes have devices",
    ensures="no tensor of the arena goes from one device to another but in a carrier",
)
def carry_between_devices(graph: Graph, _: Target) -> int:
    """Put carriers on the edges between such devices, in place; returns how many."""
    if not sharing(graph):
        return 0
    throughout = {*graph.feeds, *constant_nodes(graph, graph.topological())}
    delivered: dict[tuple[Output, str], Output] = {}
    for node in list(graph):
        if node in throughout:
            continue
        for position, tensor in enumerate(node.inputs):
            to = unit(node.device)
            crosses = unit(tensor.node.device) != to and tensor.node not in throughout
            if crosses and tensor.type.dtype not in ("resource", "variant"):
                if (tensor, to) not in delivered:
                    delivered[tensor, to] = _hand_over(graph, tensor, node.device)
                graph.replace_input(node, position, delivered[tensor, to])
    return len(delivered)


def _hand_over(graph: Graph, tensor: Output, device: str) -> Output:
    stem = f"tfswap/{tensor.node.name}_{tensor.index}"
    attrs = {"T": Dtype(tensor.type.dtype)}
    carry: Node = graph.add(
        CARRY,
        graph.unique_name(f"{stem}/carry"),
        (tensor,),
        attrs=attrs,
        outputs=(VARIANT,),
        device=tensor.node.device,
    )
    name = graph.unique_name(f"{stem}/deliver")
    return graph.add(DELIVER, name, (carry.out(),), attrs=attrs, outputs=(tensor.type,), device=device).out()
