"""Gives copies from the host to a GPU a place in the order.

Labels, tokens, indices and the keys of random numbers are in host memory (kernels/host_memory.py), and so are captured
tensors that were made on a CPU. If a kernel reads them on the device, TensorFlow inserts a `_Recv`, which requests
memory at a time that no plan decides. It does so for constants of int32 too, and does not fold the kernels that read
them. It also does so for what a graph or a body returns, such as the condition of a loop, and for arguments of bodies,
but for int32. A `ToDevice` before such readers, in bodies too, makes the copy a kernel like others, on their stream:
its result may be recomputed, and its request is planned. The host does not wait for it.

TensorFlow places a node that reads the shape of an argument on the CPU there (heuristic B in placer.cc), and
the step would have a part on the CPU. Such a node gets the name of the GPU.

Not handled: portable models; host integers of 64 bits that kernels read, which may be shapes.
"""

from __future__ import annotations

from tfswap.analysis.output_bytes import is_of_cpu, is_tensor_on_host
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import calls_functions, control_flow, reads_metadata_only
from tfswap.ir.types import REFERENCES
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.device_inputs import reads_on_device, reads_on_host
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import add_device_copy, move_behind_sources

FIRST_GPU = "/device:GPU:0"
"""Of nodes that name no device: nodes of steps on several devices name theirs."""


@graph_pass(
    ensures="values of the host that kernels of a GPU read are copied by kernels of the step",
)
def copy_to_device(graph: Graph, target: Target) -> int:
    """Copy such values before they are read, in place; returns how many."""
    if not target.device.host_is_separate:
        return 0
    _keep_shapes_there(graph)
    return sum(_copy(part, target.device) for part in (graph, *graph.all_bodies()))


def _keep_shapes_there(graph: Graph) -> None:
    feeds = set(graph.feeds)
    for node in graph:
        if not node.device and reads_metadata_only(node.op) and any(t.node in feeds for t in node.inputs):
            node.device = FIRST_GPU


def _copy(graph: Graph, device: DeviceModel) -> int:
    order = graph.topological()
    feeds = set(graph.feeds)
    made: dict[tuple[Output, str], Node] = {}

    def copied(tensor: Output, device_name: str) -> Output:
        if not is_tensor_on_host(tensor, feeds, device):
            return tensor
        key = Output(tensor.node, tensor.index), device_name
        if key not in made:
            made[key] = add_device_copy(graph, custom_ops.TO_DEVICE, "to_device", tensor, device_name)
        return made[key].out()

    for node in order:
        flow = control_flow(node.op) if node in graph.bodies else None
        if flow is None and calls_functions(node.op):
            continue
        for position, tensor in enumerate(node.inputs):
            dtype = tensor.type.dtype
            if flow is None and is_of_cpu(tensor.node):
                is_read_there = not (dtype in REFERENCES or reads_on_host(node, position, dtype))
            elif flow is None:
                is_read_there = reads_on_device(node, position, dtype)
            else:  # which reads its condition on the host
                is_read_there = position >= flow.first_argument and _passes_on_device(dtype)
            if is_read_there:
                graph.replace_input(node, position, copied(tensor, node.device))
    graph.fetches = [
        copied(f, f.node.device) if _passes_on_device(f.type.dtype) and not is_of_cpu(f.node) else f
        for f in graph.fetches
    ]
    move_behind_sources(graph, made.values())
    return len(made)


def _passes_on_device(dtype: str) -> bool:
    """Whether functions on a GPU take and return values of this type in device memory."""
    return dtype != "int32" and dtype not in REFERENCES
