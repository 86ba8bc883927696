"""Gives copies from a GPU to the host a place in the order.

Seeds that a kernel computes, conditions, and shapes of 64 bits are in device memory. Where a kernel reads them on the
host, TensorFlow sends them there by a copy of its own, and frees them when a thread of its own gets to it after the
copy. A `ToHost` behind the kernel that makes them, in bodies too, is a kernel like others, which frees them before the
next one runs.

Not handled: portable models; results that may be on the host already (`PARTLY_ON_HOST`).
"""

from __future__ import annotations

from collections.abc import Iterable

from tfswap.analysis.output_bytes import is_tensor_on_host
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import control_flow, is_const
from tfswap.ir.types import REFERENCES
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.device_inputs import reads_on_host
from tfswap.kernels.host_memory import PARTLY_ON_HOST
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import add_device_copy, move_behind_sources


@graph_pass(
    ensures="what the host reads of a GPU's results is copied there by kernels of the step",
)
def copy_to_host(graph: Graph, target: Target) -> int:
    """Copy such results before they are read, in place; returns how many."""
    return _copy(graph, target.device) if target.device.is_gpu else 0


def _copy(graph: Graph, device: DeviceModel, is_condition: bool = False) -> int:
    """Copy the results of `graph`, and of its bodies. `is_condition`: whether a loop reads its result on the host."""
    inside = sum(_copy(body, device, condition) for body, condition in _bodies(graph))
    feeds = set(graph.feeds)
    made: dict[Output, Node] = {}

    def copied(tensor: Output) -> Output:
        tensor = Output(tensor.node, tensor.index)
        if tensor not in made and not _stays(tensor, feeds, device):
            made[tensor] = add_device_copy(graph, custom_ops.TO_HOST, "to_host", tensor, tensor.node.device)
        return made[tensor].out() if tensor in made else tensor

    for node in graph.topological():
        for position, tensor in enumerate(node.inputs):
            if reads_on_host(node, position, tensor.type.dtype):
                graph.replace_input(node, position, copied(tensor))
    graph.fetches = [copied(f) if is_condition or f.type.dtype == "int32" else f for f in graph.fetches]
    move_behind_sources(graph, made.values())
    return inside + len(made)


def _bodies(graph: Graph) -> Iterable[tuple[Graph, bool]]:
    for node, bodies in graph.bodies.items():
        flow = control_flow(node.op)
        for n, body in enumerate(bodies):
            yield body, flow is not None and flow.is_loop and n == 0


def _stays(tensor: Output, feeds: set[Node], device: DeviceModel) -> bool:
    """Whether TensorFlow makes no copy of the tensor for the host, or one that frees nothing."""
    op = tensor.node.op
    if tensor.type.dtype in REFERENCES or is_const(op) or op in PARTLY_ON_HOST:
        return True
    return is_tensor_on_host(tensor, feeds, device)
