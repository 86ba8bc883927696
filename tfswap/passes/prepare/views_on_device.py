"""Keeps reshaped integers in the memory of their GPU.

TensorFlow's GPU kernels of views (such as `Reshape`) of int32 have their input in host memory. If the input is on the
device, such as tokens that a kernel has checked, it is copied to the host, and back for kernels that read the result on
the device. The host waits for that, and the input is freed when the copy has ended, at an unplanned time. A view of the
same bits as uint32 stays on the device:

    Reshape(x)  ->  Bitcast(Reshape(Bitcast(x, uint32)), int32)

Not handled: views that the host reads too, and results.
"""

from __future__ import annotations

from collections.abc import Iterable

from tfswap.analysis.output_bytes import is_on_host
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.device_inputs import reads_on_device
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass

VIEWS = frozenset({"ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient"})
"""Ops with one result, a view of their first input."""
OTHER = "uint32"
"""An element type of the same size. Kernels of `VIEWS` have its inputs and results in device memory."""


@graph_pass(
    ensures="integers of the device that are reshaped for its kernels are not copied to the host and back",
)
def keep_views_on_device(graph: Graph, target: Target) -> int:
    """Carry such views out on the device, in place; returns how many."""
    if not target.device.host_is_separate:
        return 0
    return sum(_keep(part, target.device) for part in (graph, *graph.all_bodies()))


def _keep(graph: Graph, device: DeviceModel) -> int:
    readers: dict[Node, list[tuple[Node, int]]] = {}
    for node in graph:
        for position, tensor in enumerate(node.inputs):
            readers.setdefault(tensor.node, []).append((node, position))
    outside = {*graph.feeds, *graph.targets, *(fetch.node for fetch in graph.fetches)}
    kept = {node for node in graph if node.op in VIEWS and _is_int32(node) and node not in outside}

    def stays(node: Node) -> bool:
        source = node.inputs[0]
        if source.node not in kept and (source.node in graph.feeds or is_on_host(source.node, source.index, device)):
            return False
        return all(reader in kept or reads_on_device(reader, at, "int32") for reader, at in readers.get(node, ()))

    while leaving := {node for node in kept if not stays(node)}:
        kept -= leaving
    followers: dict[Node, list[Node]] = {}
    results: dict[Output, Output] = {}  # by result of int32, that of the other type
    for node in [node for node in graph.topological() if node in kept]:
        source = node.inputs[0]
        if source not in results:
            before = _same_bits(graph, source, OTHER, f"{node.name}/before")
            followers.setdefault(source.node, []).append(before)
            results[source] = before.out()
        after = _retyped(graph, node, results[source], readers.get(node, ()))
        followers.setdefault(node, []).append(after)
        results[after.out()] = node.out()
    graph.move_behind(followers)
    return len(kept)


def _is_int32(node: Node) -> bool:
    return node.inputs[0].type.dtype == node.outputs[0].dtype == "int32"


def _retyped(graph: Graph, node: Node, source: Output, readers: Iterable[tuple[Node, int]]) -> Node:
    """Make the view `node` read `source`, and have its type. Returns a view as int32, which its readers then read."""
    graph.replace_input(node, 0, source)
    node.attrs = {**node.attrs, "T": Dtype(OTHER)}
    node.outputs = (TensorType(OTHER, node.outputs[0].shape, node.outputs[0].bound),)
    after = _same_bits(graph, node.out(), "int32", f"{node.name}/after")
    for reader, position in readers:
        graph.replace_input(reader, position, after.out())
    return after


def _same_bits(graph: Graph, tensor: Output, dtype: str, name: str) -> Node:
    attrs = {"T": Dtype(tensor.type.dtype), "type": Dtype(dtype)}
    kind = TensorType(dtype, tensor.type.shape, tensor.type.bound)
    name = graph.unique_name(f"tfswap/{name}")
    return graph.add("Bitcast", name, (tensor,), attrs=attrs, outputs=(kind,), device=tensor.node.device)
