"""Places a trace's nodes: on one device, or on several that share an arena and are planned as one.

TensorFlow places nodes without a device when it makes the step. The devices of tensors decide what is copied, so for a
step on several devices placement is done here, by TensorFlow's rules: nodes that use a variable are on its device,
nodes with all inputs on one device are there too, and all others are on the first device.

Steps that can't be planned in this process are refused: devices of other workers, several GPUs, each of which has an
arena of its own, and TPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from tfswap.device.machine import type_of
from tfswap.errors import UnsupportedGraph
from tfswap.ir.graph import Dtype, Graph, Node
from tfswap.ir.op_traits import is_const
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.device_carriers import FIRST, unit, units
from tfswap.passes.prepare.text_on_host import is_text

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
        device: the device that the step is planned for.

    Raises:
        UnsupportedGraph: it can't be planned here.
    """
    named = {unit(tensor.device): tensor.device for tensor in given if getattr(tensor, "device", None)}
    used = {each: where for part in (graph, *graph.all_bodies()) for each, where in units(part).items()}
    named |= used
    _refuse_others(name, named.values())
    _refuse_gpus(name, named, device)
    if device.is_gpu or len({*used, FIRST}) < 2:
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


def refuse_parts_on_cpu(name: str, graph: Graph, captures: Sequence[Any], target: Target) -> None:
    """Raise UnsupportedGraph where TensorFlow runs a part of a GPU's step on the CPU: an order and an arena are of one
    device. A step that runs as it was traced may have such parts.

    Args:
        graph: of the step, whose last feeds are these captures.
    """
    found = next(_on_cpu(graph, captures, own_ops=target.own_ops), None) if target.device.is_gpu else None
    if found is not None:
        why, remedy = found
        raise UnsupportedGraph(f"{name}: {why}, and a step on a GPU is planned for that alone. {remedy}.")


def _on_cpu(graph: Graph, captures: Sequence[Any], *, own_ops: bool) -> Iterator[tuple[str, str]]:
    """The reasons why nodes are on the CPU, each with its remedy.

    Args:
        own_ops: whether constants of text become nodes of the GPU (passes/prepare/text_on_host.py).
    """
    feeds = graph.feeds[len(graph.feeds) - len(captures) :]
    hosted = {f for f, t in zip(feeds, captures, strict=True) if type_of(getattr(t, "device", "") or "") == "CPU"}
    for part in (graph, *graph.all_bodies()):
        of_feeds = set(part.feeds)
        for node in part:
            what = f"{node.name!r} ({node.op})"
            if node in of_feeds:
                continue
            if type_of(node.device) == "CPU":
                yield f"{what} has the device {node.device}", "Leave its device to TensorFlow"
            elif any(t.type.dtype == "resource" and t.node in hosted for t in node.inputs):
                yield f"{what} uses a variable that is on the CPU", "Create the variable on the GPU"
            elif not (_has_gpu_kernel(node) or (own_ops and is_text(node))):
                why = f"TensorFlow has no kernel for GPUs of {what}"
                yield why, "Call it outside of the function that is optimized"


def _has_gpu_kernel(node: Node) -> bool:
    kernels = _gpu_kernels(node.op)
    if kernels is None:
        return True
    types = {name: value for name, value in node.attrs.items() if isinstance(value, Dtype)}
    return any(all(types[name] in allowed for name, allowed in kernel.items() if name in types) for kernel in kernels)


@functools.cache
def _gpu_kernels(op: str) -> tuple[dict[str, frozenset[str]], ...] | None:
    """By attribute, the types that each kernel for GPUs takes; None where no device has one, since calls have none."""
    from tensorflow.python.framework import dtypes, kernels

    found: Any = kernels.get_registered_kernels_for_op(op).kernel
    if not found:
        return None
    return tuple(
        {c.name: frozenset(dtypes.as_dtype(t).name for t in c.allowed_values.list.type) for c in kernel.constraint}
        for kernel in found
        if kernel.device_type in ("GPU", "DEFAULT")
    )


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
    if not device.is_gpu or gpus in ([], ["GPU:0"]):
        return
    from tensorflow.python.framework import config

    there = [f"GPU:{i}" for i, _ in enumerate(config.list_logical_devices("GPU"))]
    if missing := [each for each in gpus if each not in there]:
        raise UnsupportedGraph(
            f"{name} has the device {missing[0]}, and this process has {', '.join(there)} only. Name one that "
            "there is, or leave the device to TensorFlow."
        )
    raise UnsupportedGraph(
        f"{name} runs on {', '.join(gpus)}: each GPU has an arena of its own, and a step is planned for one. "
        f"{ONE_EACH}, or let the process see one GPU (CUDA_VISIBLE_DEVICES)."
    )
