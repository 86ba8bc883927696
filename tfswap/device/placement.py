"""Where a trace's nodes run: on one device, or on several that share an arena and are planned as one.

TensorFlow places what is given no device when it makes the step. Which device a tensor is on decides what travels, so
for a step on several devices that is done here, as TensorFlow does it: what uses a variable is where that is, what has
inputs from one device is there too, and all else is on the first.

Refused is what can't be planned in this process: devices of other workers, several GPUs, each of which has an arena of
its own, and TPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfswap.errors import UnsupportedGraph
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import is_const
from tfswap.kernels.device import DeviceModel
from tfswap.passes.device_carriers import FIRST, unit, units

ONE_EACH = (
    "Give each GPU a process of its own, a worker of tf.distribute.MultiWorkerMirroredStrategy, which is planned for "
    "the device that it has"
)


def place(name: str, graph: Graph, given: Sequence[Any], device: DeviceModel) -> None:
    """Give each node of a step on several devices the device that it runs on, in place. Other graphs stay as they are.

    Args:
        name: of the function, for messages.
        graph: as it was imported.
        given: the function's arguments, feed by feed, captures included: tensors or specs.
        device: what the step is planned for.

    Raises:
        UnsupportedGraph: it can't be planned here.
    """
    named = {unit(tensor.device): tensor.device for tensor in given if getattr(tensor, "device", None)}
    used = {each: where for part in (graph, *graph.all_bodies()) for each, where in units(part).items()}
    named |= used
    _refuse_others(name, named.values())
    _refuse_gpus(name, named, device)
    if device.kind != "cpu" or len({*used, FIRST}) < 2:
        return
    for loop, bodies in graph.bodies.items():
        inside = {unit(node.device) for body in bodies for node in body if node.device}
        if inside - {unit(loop.device)}:
            raise UnsupportedGraph(
                f"{name}: {loop.name!r} ({loop.op}) runs nodes on {', '.join(sorted(inside))}, and steps on several "
                "devices inside of a loop or a conditional are not planned. Optimize the function that makes one step, "
                "and call it in a loop outside."
            )
    _place(graph, given)


def refuse_several(name: str, graph: Graph) -> None:
    """Raise UnsupportedGraph for a step on several devices whose gradients are taken outside."""
    if len(units(graph)) > 1:
        raise UnsupportedGraph(
            f"{name} runs on {', '.join(units(graph))}, and its gradients are taken outside of it: two calls on "
            "several devices are not planned. Take the gradients inside of the function that is optimized."
        )


def _place(graph: Graph, given: Sequence[Any]) -> None:
    known = dict(units(graph))
    feeds = dict(zip(graph.feeds, given, strict=False))
    on: dict[Node, str] = {}
    for node in graph.topological():
        if node.device:
            on[node] = unit(node.device)
        elif node in feeds:
            on[node] = unit(getattr(feeds[node], "device", None) or "")
        else:
            handles = {on[t.node] for t in node.inputs if t.type.dtype == "resource"}
            read = handles or {on[t.node] for t in node.inputs if t.node not in feeds and not is_const(t.node.op)}
            on[node] = read.pop() if len(read) == 1 else FIRST
            if node.inputs:
                node.device = known.setdefault(on[node], f"/device:{on[node]}")


def _refuse_others(name: str, devices: Any) -> None:
    from tensorflow.python.eager import context
    from tensorflow.python.framework import device as device_lib

    running: Any = context.context()
    server = running._collective_ops_server_def or running._server_def
    here = {("localhost", 0)} if server is None else {("localhost", 0), (server.job_name, server.task_index)}
    for device in devices:
        spec = device_lib.DeviceSpec.from_string(device)
        if (spec.device_type or "").startswith("TPU"):
            raise UnsupportedGraph(f"{name} runs on {device}: XLA compiles what runs there, and hides its tensors.")
        if spec.job is not None and (spec.job, spec.task or 0) not in here:
            raise UnsupportedGraph(
                f"{name} uses {device}, which is another process's: what runs there can't be planned here, nor what "
                "variables there take. tf.distribute.MultiWorkerMirroredStrategy keeps a worker's step to its own "
                "process; a ParameterServerStrategy's steps are left to TensorFlow, without tfswap."
            )


def _refuse_gpus(name: str, named: dict[str, str], device: DeviceModel) -> None:
    gpus = sorted(each for each in named if each.startswith("GPU:"))
    if device.kind != "gpu" or gpus in ([], ["GPU:0"]):
        return
    raise UnsupportedGraph(
        f"{name} runs on {', '.join(gpus)}: each GPU has an arena of its own, and a step is planned for one. "
        f"{ONE_EACH}, or let the process see one GPU (CUDA_VISIBLE_DEVICES)."
    )
