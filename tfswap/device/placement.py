"""Places a trace's nodes, where it runs on several devices.

TensorFlow places nodes without a device when it makes the step. The devices of tensors decide what is copied, so for a
step on several devices placement is done here. As TensorFlow has it, nodes that use a variable are on its device, nodes
without a kernel for GPUs are on the CPU, whatever they name, and all others are on the first device; but nodes with all
inputs on one device are there too, which saves copies. Grappler gets TensorFlow's devices (tensorflow_placer.py).

CPUs of one process share an arena, and their step is planned as one. Each GPU has an arena of its own, and the step is
cut by device (passes/device_parts.py).

Steps that can't be planned in this process are refused: devices of other workers, and TPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfswap.device import machine
from tfswap.device.machine import type_of
from tfswap.device.placer import Placer, has_gpu_kernel, inner_kernels, is_on_cpu
from tfswap.device.tensorflow_placer import tensorflow_placed
from tfswap.errors import UnsupportedGraph
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import reads_variable, writes_variable
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.device_carriers import FIRST, unit, units
from tfswap.passes.prepare.text_on_host import is_text

FIRST_GPU = "GPU:0"
"""The device of nodes that name none, where there are GPUs."""


def place(
    name: str, graph: Graph, given: Sequence[Any], device: DeviceModel, gpus: Collection[str] | None = None
) -> bool:
    """Give each node of a step on several devices the device that it runs on, in place. Other graphs stay as they are.

    Args:
        name: of the function, for messages.
        graph: as it was imported.
        given: the function's arguments, feed by feed, captures included: tensors or specs.
        device: the device that the step is planned for.
        gpus: the units of the GPUs that there are; None for those of this process.

    Returns:
        Whether the step has to be cut by device: its devices do not share an arena.

    Raises:
        UnsupportedGraph: it can't be planned here.
    """
    devices = [tensor.device for tensor in given if getattr(tensor, "device", None)]
    if device.is_gpu:
        _place_softly(graph, given)
    used = _used(graph)
    named = {unit(device): device for device in devices} | used
    refuse_others(name, graph, devices)
    hosted = _hosted(graph, given) if device.is_gpu else set[Node]()
    if device.is_gpu:
        _refuse_missing(name, named, gpus_here() if gpus is None else gpus)
    first = FIRST_GPU if device.is_gpu else FIRST
    if len({*used, *_of_handles(graph, given), first}) < 2 and not (device.is_gpu and _has_parts_on_cpu(graph, hosted)):
        return False
    Placer(name, graph, _homes(graph, given, first), first, hosted, cut=device.is_gpu).place()
    return device.is_gpu


def tensorflow_devices(graph: Graph, given: Sequence[Any], device: DeviceModel) -> dict[str, str]:
    """By name, the devices on which TensorFlow runs a step's nodes, for Grappler; none where it is not on several GPUs.

    Args:
        graph: as it was imported, before `place`, whose arguments the others are.
    """
    if not device.is_gpu:
        return {}
    _place_softly(graph, given)
    homes = dict(zip(graph.feeds, _homes(graph, given, FIRST_GPU), strict=False))
    found = tensorflow_placed(graph, homes, FIRST_GPU, _hosted(graph, given))
    return {node.name: where for node, where in found.items()} if len({*found.values()}) > 1 else {}


def _homes(graph: Graph, given: Sequence[Any], first: str) -> list[str]:
    """The devices of a graph's arguments; the first for what they are not known of."""
    homes = [unit(getattr(tensor, "device", None) or f"/device:{first}") for tensor in given]
    return homes + [first] * (len(graph.feeds) - len(homes))


def _place_softly(graph: Graph, given: Sequence[Any]) -> None:
    """Change devices that nodes name as TensorFlow does by default, in place: one that accesses a variable is on its
    device, and one that has no kernel for GPUs on the CPU.
    """
    from tensorflow.python.framework import config

    if not config.get_soft_device_placement():
        return
    homes = {feed: tensor.device for feed, tensor in zip(graph.feeds, given, strict=False) if _is_handle(feed, tensor)}
    for node in graph:
        accessed = (
            node.inputs[0].node if node.inputs and (reads_variable(node.op) or writes_variable(node.op)) else None
        )
        if node.device and accessed in homes:
            node.device = homes[accessed]
    for part in (graph, *graph.all_bodies()):
        feeds = set(part.feeds)
        for node in part:
            if node not in feeds and type_of(node.device) == "GPU" and not (has_gpu_kernel(node) or is_text(node)):
                node.device = f"/device:{FIRST}"


def keep_where_given(graph: Graph, given: Sequence[Any], device: DeviceModel, *, several: bool) -> None:
    """Give the arguments of a GPU's step the devices that their values are on, in place.

    Args:
        graph: as it is planned.
        given: as of `place`. Captured tensors are where they were made, and so are arguments of steps on several GPUs;
            those of steps on one GPU are on it (`LiveDevice.with_copies`).
        several: whether the step is on several devices: then the plan copies what another one reads.
    """
    for feed, tensor in zip(graph.feeds, given, strict=False) if device.is_gpu else ():
        where = machine.device_of_value(tensor)
        if where and (several or type_of(where) == "CPU"):
            feed.device = where


def refuse_parts_on_cpu(name: str, graph: Graph, given: Mapping[str, Any], target: Target) -> None:
    """Raise UnsupportedGraph where TensorFlow runs a part of a GPU's step on the CPU: an order and an arena are of one
    device. A step that runs as it was traced may have such parts.

    Args:
        graph: what is planned for the GPU.
        given: the arguments, captures included, by name.
    """
    found = next(_on_cpu(graph, given, own_ops=target.own_ops), None) if target.device.is_gpu else None
    if found is not None:
        why, remedy = found
        raise UnsupportedGraph(f"{name}: {why}, and this is planned for the GPU alone. {remedy}.")


def _on_cpu(graph: Graph, given: Mapping[str, Any], *, own_ops: bool) -> Iterator[tuple[str, str]]:
    """The reasons why nodes are on the CPU, each with its remedy.

    Args:
        own_ops: whether constants of text become nodes of the GPU (passes/prepare/text_on_host.py).
    """
    hosted = _hosted(graph, [given.get(feed.name) for feed in graph.feeds])
    for part in (graph, *graph.all_bodies()):
        of_feeds = set(part.feeds)
        for node in part:
            what = f"{node.name!r} ({node.op})"
            if node in of_feeds:
                continue
            if type_of(node.device) == "CPU":
                yield f"{what} has the device {node.device}", "Leave its device to TensorFlow"
            elif any(t.node in hosted for t in node.inputs):
                yield f"{what} uses a variable that is on the CPU", "Create the variable on the GPU"
            elif not (has_gpu_kernel(node) or (own_ops and is_text(node))):
                why = f"TensorFlow has no kernel for GPUs of {what}"
                yield why, "Call it outside of the function that is optimized"


def _hosted(graph: Graph, given: Sequence[Any]) -> set[Node]:
    """The feeds that are handles of variables and other objects on the CPU."""
    return {feed for feed, tensor in zip(graph.feeds, given, strict=False) if _is_handle(feed, tensor, "CPU")}


def _is_handle(feed: Node, tensor: Any, *kinds: str) -> bool:
    """Whether an argument is a handle of an object on a device of these kinds; by default of any."""
    where = type_of(getattr(tensor, "device", "") or "")
    return feed.outputs[0].dtype == "resource" and (where in kinds if kinds else bool(where))


def _of_handles(graph: Graph, given: Sequence[Any]) -> set[str]:
    """The GPUs of variables and other objects, on which nodes that name no device run."""
    pairs = zip(graph.feeds, given, strict=False)
    return {unit(tensor.device) for feed, tensor in pairs if _is_handle(feed, tensor, "GPU")}


def _has_parts_on_cpu(graph: Graph, hosted: Collection[Node]) -> bool:
    feeds = set(graph.feeds)
    kernels = (node for node in graph if node not in feeds)
    return any(is_on_cpu(each, hosted) for node in kernels for each in (node, *inner_kernels(graph, node)))


def _used(graph: Graph) -> dict[str, str]:
    """As `units`, of the nodes in bodies too."""
    return {each: where for part in (graph, *graph.all_bodies()) for each, where in units(part).items()}


def refuse_others(name: str, graph: Graph, given: Iterable[str]) -> None:
    """Raise UnsupportedGraph for a step with a device that is a TPU, or another process's.

    Args:
        given: devices of its arguments.
    """
    from tensorflow.python.framework import device as device_lib

    for device in filter(None, (*given, *_used(graph).values())):
        spec = device_lib.DeviceSpec.from_string(device)
        if (spec.device_type or "").startswith("TPU"):
            raise UnsupportedGraph(f"{name} runs on {device}: XLA compiles what runs there, and hides its tensors.")
        if not _is_here(device):
            raise UnsupportedGraph(
                f"{name} uses {device}, which is another process's: what runs there can't be planned here, nor what "
                "variables there take. tf.distribute.MultiWorkerMirroredStrategy keeps a worker's step to its own "
                "process; a ParameterServerStrategy's steps are left to TensorFlow, without tfswap."
            )


def refuse_other_hosts(name: str, graph: Graph) -> None:
    """Raise UnsupportedGraph for a GPU's step with parts on other CPUs than the one that has a limit."""
    other = next((each for each in sorted(_used(graph)) if each.startswith("CPU:") and each != FIRST), None)
    if other is not None:
        raise UnsupportedGraph(
            f"{name} runs on {other} too, which shares the arena of {FIRST}, and memory_limit has {FIRST}: place what "
            f"is on the CPU on {FIRST}, or leave it out of memory_limit."
        )


def _is_here(device: str) -> bool:
    """Whether a device is this process's, by its name."""
    from tensorflow.python.eager import context
    from tensorflow.python.framework import device as device_lib

    running: Any = context.context()
    server = running._collective_ops_server_def or running._server_def
    here = {("localhost", 0)} if server is None else {("localhost", 0), (server.job_name, server.task_index)}
    spec = device_lib.DeviceSpec.from_string(device)
    return spec.job is None or (spec.job, spec.task or 0) in here


def gpus_here() -> list[str]:
    """The units of this process's GPUs."""
    from tensorflow.python.framework import config

    return [unit(device.name) for device in config.list_logical_devices("GPU") if _is_here(device.name)]


@functools.cache
def step_devices() -> tuple[str, ...]:
    """The units of the devices that this process's steps may run on, whose arenas each call may read."""
    return tuple(gpus_here()) or (FIRST,)


def devices_like(name: str) -> list[str]:
    """The units of this process's devices that have arenas of their own, of the same kind as this one: itself where it
    is a CPU, since these share one.
    """
    return (gpus_here() if name.startswith("GPU") else []) or [name]


def _refuse_missing(name: str, named: Iterable[str], there: Collection[str]) -> None:
    missing = sorted(each for each in named if each.startswith("GPU:") and each not in there)
    if missing:
        raise UnsupportedGraph(
            f"{name} has the device {missing[0]}, and there are {', '.join(there)} only. Name one that "
            "there is, or leave the device to TensorFlow."
        )
