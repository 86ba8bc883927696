"""Gives copies from a GPU to the host a place in the order.

Seeds that a kernel computes, conditions, and shapes of 64 bits are in device memory. Where a kernel reads them on the
host, TensorFlow sends them there by a copy of its own, and frees them when a thread of its own gets to it after the
copy. A `ToHost` behind the kernel that makes them, in bodies too, is a kernel like others, which frees them before the
next one runs.

Constants are in device memory too, except for int32. A copy of one frees nothing. But TensorFlow does not fold a
kernel of constants that reads one of them on the host, such as `tf.eye`: the copy is inserted before it folds (in
bodies afterwards). Such a kernel gets a `ToHost` as well, so that it is not folded here either, and has a place.

Not handled: portable models; results that may be on the host already (`PARTLY_ON_HOST`).
"""

from __future__ import annotations

from collections.abc import Container

from tfswap.analysis.constants import constant_nodes
from tfswap.analysis.output_bytes import is_tensor_on_host
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import is_const
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
    if not target.device.host_is_separate:
        return 0
    folded = constant_nodes(graph, graph.topological())
    return _copy(graph, target.device, folded) + sum(_copy(body, target.device, ()) for body in graph.all_bodies())


def _copy(graph: Graph, device: DeviceModel, folded: Container[Node]) -> int:
    """Copy the results of `graph`. `folded`: the kernels that are folded unless they read a constant on the host."""
    feeds = set(graph.feeds)
    made: dict[Output, Node] = {}

    def copied(tensor: Output, *, constants: bool) -> Output:
        tensor = Output(tensor.node, tensor.index)
        if not _stays(tensor, feeds, device) and (constants or not is_const(tensor.node.op)):
            if tensor not in made:
                made[tensor] = add_device_copy(graph, custom_ops.TO_HOST, "to_host", tensor, tensor.node.device)
            return made[tensor].out()
        return tensor

    for node in graph.topological():
        for position, tensor in enumerate(node.inputs):
            if reads_on_host(node, position, tensor.type.dtype):
                graph.replace_input(node, position, copied(tensor, constants=node in folded))
    graph.fetches = [copied(f, constants=False) if f.type.dtype == "int32" else f for f in graph.fetches]
    move_behind_sources(graph, made.values())
    return len(made)


def _stays(tensor: Output, feeds: set[Node], device: DeviceModel) -> bool:
    """Whether TensorFlow makes no copy of the tensor for the host."""
    if tensor.type.dtype in REFERENCES or tensor.node.op in PARTLY_ON_HOST:
        return True
    return is_tensor_on_host(tensor, feeds, device)
