"""Gives copies from the host to a GPU a place in the order.

Labels, tokens, indices and the keys of random numbers are in host memory (kernels/host_memory.py). If a kernel reads
them on the device, TensorFlow inserts a `_Recv`, which requests memory at a time that no plan decides. It does so for
constants of int32 too, and does not fold the kernels that read them. A `ToDevice` before such kernels, in bodies too,
makes the copy a kernel like others, on their stream: its result may be recomputed, and its request is planned. The host
does not wait for it.

Not handled: portable models; host integers of 64 bits, which may be shapes; results.
"""

from __future__ import annotations

from tfswap.analysis.output_bytes import is_tensor_on_host
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import calls_functions
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.device_inputs import reads_on_device
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import add_device_copy, move_behind_sources


@graph_pass(
    ensures="small integers of the host that kernels of a GPU read are copied by kernels of the step",
)
def copy_to_device(graph: Graph, target: Target) -> int:
    """Copy such values before they are read, in place; returns how many."""
    if not target.device.is_gpu:
        return 0
    return sum(_copy(part, target.device) for part in (graph, *graph.all_bodies()))


def _copy(graph: Graph, device: DeviceModel) -> int:
    order = graph.topological()
    feeds = set(graph.feeds)
    made: dict[tuple[Output, str], Node] = {}

    def copied(tensor: Output, reader: Node, position: int) -> Output:
        on_host = is_tensor_on_host(tensor, feeds, device)
        if not on_host or not reads_on_device(reader, position, tensor.type.dtype):
            return tensor
        key = Output(tensor.node, tensor.index), reader.device
        if key not in made:
            made[key] = add_device_copy(graph, custom_ops.TO_DEVICE, "to_device", tensor, reader.device)
        return made[key].out()

    for node in order:
        if node in graph.bodies or calls_functions(node.op):
            continue  # arguments of bodies are where these expect them
        node.inputs = tuple(copied(t, node, p) for p, t in enumerate(node.inputs))
    move_behind_sources(graph, made.values())
    return len(made)
