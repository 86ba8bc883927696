"""Places a trace's nodes, where it runs on several devices.

TensorFlow places nodes without a device when it makes the step. The devices of tensors decide what is copied, so for a
step on several devices placement is done here, by TensorFlow's rules: nodes that use a variable are on its device,
nodes with all inputs on one device are there too, nodes without a kernel for GPUs are on the CPU, and all others are on
the first device.

CPUs of one process share an arena, and their step is planned as one. Each GPU has an arena of its own, and the step is
cut by device (passes/device_parts.py).

Steps that can't be planned in this process are refused: devices of other workers, and TPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tfswap.device.machine import type_of
from tfswap.errors import UnsupportedGraph
from tfswap.ir.graph import Dtype, Graph, Node
from tfswap.ir.op_traits import control_flow, is_const
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.device_carriers import FIRST, unit, units
from tfswap.passes.prepare.text_on_host import is_text

HANDLES = ("resource", "variant")
"""Types of handles and lists. What reads one is on its device."""

FIRST_GPU = "GPU:0"
"""The device of nodes that name none, where there are GPUs."""


def place(name: str, graph: Graph, given: Sequence[Any], device: DeviceModel) -> bool:
    """Give each node of a step on several devices the device that it runs on, in place. Other graphs stay as they are.

    Args:
        name: of the function, for messages.
        graph: as it was imported.
        given: the function's arguments, feed by feed, captures included: tensors or specs.
        device: the device that the step is planned for.

    Returns:
        Whether the step has to be cut by device: its devices do not share an arena.

    Raises:
        UnsupportedGraph: it can't be planned here.
    """
    named = {unit(tensor.device): tensor.device for tensor in given if getattr(tensor, "device", None)}
    used = {each: where for part in (graph, *graph.all_bodies()) for each, where in units(part).items()}
    named |= used
    _refuse_others(name, named.values())
    hosted = _hosted(graph, given) if device.is_gpu else set[Node]()
    if device.is_gpu:
        _refuse_missing(name, named)
    first = FIRST_GPU if device.is_gpu else FIRST
    if len({*used, first}) < 2 and not (device.is_gpu and _has_parts_on_cpu(graph, hosted)):
        return False
    _Placer(graph, given, first, hosted).place()
    _place_inside(name, graph, cut=device.is_gpu)
    return device.is_gpu


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
            elif not (_has_gpu_kernel(node) or (own_ops and is_text(node))):
                why = f"TensorFlow has no kernel for GPUs of {what}"
                yield why, "Call it outside of the function that is optimized"


def _hosted(graph: Graph, given: Sequence[Any]) -> set[Node]:
    """The feeds that are handles of variables and other objects on the CPU."""
    pairs = zip(graph.feeds, given, strict=False)
    return {
        feed
        for feed, tensor in pairs
        if feed.outputs[0].dtype == "resource" and type_of(getattr(tensor, "device", "") or "") == "CPU"
    }


def _has_parts_on_cpu(graph: Graph, hosted: Collection[Node]) -> bool:
    feeds = set(graph.feeds)
    return any(_is_on_cpu(node, hosted) for node in graph if node not in feeds)


def _is_on_cpu(node: Node, hosted: Collection[Node]) -> bool:
    """Whether TensorFlow runs a node of a GPU's step on the CPU."""
    if node.device:
        return type_of(node.device) == "CPU"
    return any(t.node in hosted for t in node.inputs) or not (_has_gpu_kernel(node) or is_text(node))


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


class _Placer:
    """Gives nodes without a device one, in place.

    Args:
        first: the device of those that no rule gives one.
        hosted: as of `_hosted`.
    """

    def __init__(self, graph: Graph, given: Sequence[Any], first: str, hosted: Collection[Node]):
        self._graph = graph
        self._given = dict(zip(graph.feeds, given, strict=False))
        self._first = first
        self._hosted = hosted
        self._on_gpus = first != FIRST
        self._unit: dict[Node, str] = {}
        self._names = dict(units(graph))  # of devices, by unit

    def place(self) -> None:
        for node in self._graph.topological():
            self._unit[node] = self._choose(node)
            if self._needs_name(node):
                node.device = self._name(self._unit[node])
        if self._on_gpus:
            self._place_lists()

    def _choose(self, node: Node) -> str:
        """The device of a node: that of the first rule that holds."""
        if node in self._given:
            return unit(getattr(self._given[node], "device", None) or f"/device:{self._first}")
        if node.device:
            return unit(node.device)
        handles = {self._unit[t.node] for t in node.inputs if t.type.dtype in HANDLES and not self._is_list(t.node)}
        if handles:
            return self._only(handles)
        if self._on_gpus and _is_on_cpu(node, self._hosted):
            return FIRST
        read = self._only(
            {self._unit[t.node] for t in node.inputs if t.node not in self._given and not is_const(t.node.op)}
        )
        return self._first if self._on_gpus and read == FIRST else read

    def _only(self, found: Collection[str]) -> str:
        return next(iter(found)) if len(found) == 1 else self._first

    def _needs_name(self, node: Node) -> bool:
        """Whether a node gets the name of its device."""
        if node in self._given:
            return self._on_gpus and node.outputs[0].dtype == "resource"
        if node.device or self._is_list(node):
            return False
        return bool(node.inputs) or (self._on_gpus and not is_const(node.op))

    def _name(self, where: str) -> str:
        return self._names.setdefault(where, f"/device:{where}")

    def _is_list(self, node: Node) -> bool:
        """Whether a node without a device makes an empty list, which is where it is filled."""
        return self._on_gpus and not node.device and node not in self._given and _makes_list(node)

    def _place_lists(self) -> None:
        lists = [node for node in self._graph if self._is_list(node)]
        readers = {t.node: node for node in reversed(list(self._graph)) for t in node.inputs if node.device}
        for node in lists:
            node.device = readers[node].device if node in readers else f"/device:{self._first}"


def _place_inside(name: str, graph: Graph, *, cut: bool) -> None:
    """Place loops and conditionals where their bodies are, and the nodes of conditionals that run on several devices;
    refuse such loops.

    Args:
        cut: whether the step is cut by device. Otherwise such conditionals are refused too.
    """
    feeds = set(graph.feeds)
    for node, bodies in graph.bodies.items():
        inside = {unit(each.device) for body in bodies for each in body if each.device}
        kind = control_flow(node.op)
        if kind is None or not inside - {unit(node.device)}:
            continue
        if cut and len(inside) == 1:
            node.device = f"/device:{inside.pop()}"
            continue
        if kind.is_loop or not cut:
            raise UnsupportedGraph(
                f"{name}: {node.name!r} ({node.op}) runs nodes on {', '.join(sorted(inside))}, and steps on several "
                "devices inside of a loop are not planned, nor are those on several CPUs inside of a conditional. "
                "Optimize the function that makes one step, and call it in a loop outside."
            )
        given = [source.device if source in feeds else "" for source, _ in node.inputs[kind.first_argument :]]
        for body in bodies:
            _Placer(body, [Located(device) for device in given], unit(node.device), set()).place()
            _place_inside(name, body, cut=cut)


class Located(NamedTuple):
    """An argument of a conditional.

    Attributes:
        device: of the object that it is a handle of; empty for tensors.
    """

    device: str


def _makes_list(node: Node) -> bool:
    kinds = {kind.dtype for kind in node.outputs}
    return kinds == {"variant"} and all(is_const(t.node.op) for t in node.inputs)


def _refuse_others(name: str, devices: Any) -> None:
    from tensorflow.python.framework import device as device_lib

    for device in devices:
        spec = device_lib.DeviceSpec.from_string(device)
        if (spec.device_type or "").startswith("TPU"):
            raise UnsupportedGraph(f"{name} runs on {device}: XLA compiles what runs there, and hides its tensors.")
        if not _is_here(device):
            raise UnsupportedGraph(
                f"{name} uses {device}, which is another process's: what runs there can't be planned here, nor what "
                "variables there take. tf.distribute.MultiWorkerMirroredStrategy keeps a worker's step to its own "
                "process; a ParameterServerStrategy's steps are left to TensorFlow, without tfswap."
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


def _refuse_missing(name: str, named: Iterable[str]) -> None:
    from tensorflow.python.framework import config

    there = [unit(device.name) for device in config.list_logical_devices("GPU") if _is_here(device.name)]
    missing = sorted(each for each in named if each.startswith("GPU:") and each not in there)
    if missing:
        raise UnsupportedGraph(
            f"{name} has the device {missing[0]}, and this process has {', '.join(there)} only. Name one that "
            "there is, or leave the device to TensorFlow."
        )
