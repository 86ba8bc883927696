"""Gives copies from the host to a GPU a place in the order.

Labels, tokens, indices and the keys of random numbers are in host memory (kernels/host_memory.py). If a kernel reads
them on the device, TensorFlow inserts a `_Recv`, which requests memory at a time that no plan decides. It does so for
constants of int32 too, and does not fold the kernels that read them. A `ToDevice` before such kernels, in bodies too,
makes the copy a kernel like others, on their stream: its result may be recomputed, and its request is planned. The host
does not wait for it.

Not handled: portable models; host integers of 64 bits, which may be shapes; results.
"""

from __future__ import annotations

from tfswap.analysis.output_bytes import is_on_host
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.op_traits import calls_functions
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.device_inputs import reads_on_device
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass


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
    made: dict[tuple[Output, str], Output] = {}

    def copied(tensor: Output, reader: Node, position: int) -> Output:
        dtype, node = tensor.type.dtype, tensor.node
        on_host = dtype == "int32" if node in feeds else is_on_host(node, tensor.index, device)
        if not on_host or not reads_on_device(reader.op, position, dtype):
            return tensor
        key = Output(node, tensor.index), reader.device
        if key not in made:
            made[key] = _add_copy(graph, tensor, reader.device)
        return made[key]

    for node in order:
        if node in graph.bodies or calls_functions(node.op):
            continue  # arguments of bodies are where these expect them
        node.inputs = tuple(copied(t, node, p) for p, t in enumerate(node.inputs))
    followers: dict[Node, list[Node]] = {}
    for (tensor, _), copy in made.items():
        followers.setdefault(tensor.node, []).append(copy.node)
    graph.move_behind(followers)
    return len(made)


def _add_copy(graph: Graph, tensor: Output, device: str) -> Output:
    name = graph.unique_name(f"tfswap/{tensor.node.name}_{tensor.index}/to_device")
    attrs = {"T": Dtype(tensor.type.dtype)}
    return graph.add(custom_ops.TO_DEVICE, name, (tensor,), attrs=attrs, outputs=(tensor.type,), device=device).out()
