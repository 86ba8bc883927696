"""The bytes that a node's outputs take in the arena; 0 for outputs in host memory (kernels/host_memory.py)."""

from __future__ import annotations

from collections.abc import Container

from tfswap.ir.custom_ops import NAMESPACE
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.types import TensorType
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.host_memory import on_host
from tfswap.kernels.memory_rules import VARIANT_BYTES


def is_on_host(node: Node, index: int, device: DeviceModel) -> bool:
    if device.host_is_separate and is_of_cpu(node):
        return True
    first = node.inputs[0].type if node.inputs else None
    return on_host(node.op, first, node.outputs[index], device)


def is_tensor_on_host(tensor: Output, feeds: Container[Node], device: DeviceModel) -> bool:
    """As `is_on_host`, also of the graph's arguments: values of int32, and those that name a CPU."""
    if tensor.node in feeds:
        return tensor.type.dtype == "int32" or is_of_cpu(tensor.node)
    return is_on_host(tensor.node, tensor.index, device)


def is_of_cpu(node: Node) -> bool:
    """Whether a node names a CPU. In a GPU's graph that is an argument whose value is there (device/placement.py)."""
    return "CPU:" in node.device


def output_bytes(node: Node, index: int, device: DeviceModel, unknown: int = 0) -> int:
    """The bytes of an output; `unknown` where its size is unknown."""
    if is_on_host(node, index, device):
        return 0
    nbytes = node.outputs[index].nbytes
    return unknown if nbytes is None else nbytes


def record_bytes(node: Node, index: int, device: DeviceModel) -> int:
    """The bytes of an output of a loop, a conditional or an op of lists."""
    return 0 if is_on_host(node, index, device) else tensor_bytes(node.outputs[index])


def tensor_bytes(kind: TensorType) -> int:
    """The bytes of a tensor of this type in the arena, without the elements of lists."""
    return VARIANT_BYTES * (kind.num_elements or 1) if kind.dtype == "variant" else kind.nbytes or 0


def hosted_bytes(graph: Graph, device: DeviceModel) -> int:
    """The most bytes that outputs of a device's kernels take in host memory: loops' counters, conditions and sizes.
    Those of tfswap's own ops have memory elsewhere.

    Not handled: outputs of unknown size, which count as 0.
    """
    return sum(
        round_up(node.outputs[index].nbytes or 0)
        for part in (graph, *graph.all_bodies())
        for node in part
        for index in range(len(node.outputs))
        if not node.op.startswith(NAMESPACE) and not is_of_cpu(node) and is_on_host(node, index, device)
    )
