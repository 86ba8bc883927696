"""Places a step that does not run here: of a file, or for a machine that is described.

Its variables have no device yet. Where the file does not name one, a variable is taken to be on the device that the
nodes name which take its handle or its value, if they name one only, else on the first device. A file that is written
has these devices for its variables.

Not handled: CPUs. A step without a GPU is planned in one arena, whatever its nodes name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tfswap.device.placement import place, refuse_others
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import is_view, reads_variable
from tfswap.kernels.device import DeviceModel
from tfswap.passes.device_carriers import unit
from tfswap.support.reach import reach


class Located(NamedTuple):
    """An argument.

    Attributes:
        device: of the object that it is a handle of; empty where it is not known, and for tensors.
    """

    device: str


def place_offline(
    name: str, graph: Graph, known: Sequence[str], device: DeviceModel, gpus: Collection[str] | None = None
) -> list[str]:
    """As `place`. Returns the device of each argument; empty where it is not known and does not matter.

    Args:
        known: the devices of the arguments, as far as they are known; empty for others.
        gpus: as of `place`.

    Raises UnsupportedGraph as `place`.
    """
    named = _named_by_readers(graph)
    given = [where or named.get(feed, "") for feed, where in zip(graph.feeds, known, strict=True)]
    if device.is_gpu:
        place(name, graph, [Located(where) for where in given], device, gpus)
    else:
        refuse_others(name, graph, given)
    return given


def _named_by_readers(graph: Graph) -> dict[Node, str]:
    """By argument that is a handle, the device that the nodes name which use it, where they name one only."""
    readers: dict[Node, list[Node]] = {}
    for node in graph:
        for source in {tensor.node for tensor in node.inputs}:
            readers.setdefault(source, []).append(node)
    found: dict[Node, str] = {}
    for feed in graph.feeds:
        if feed.outputs[0].dtype != "resource":
            continue
        users = reach(
            readers.get(feed, ()),
            lambda node: readers.get(node, ()) if not node.device and _passes_value(node) else (),
        )
        named = {unit(node.device): node.device for node in users if node.device}
        if len(named) == 1:
            found[feed] = next(iter(named.values()))
    return found


def _passes_value(node: Node) -> bool:
    """Whether a node gives the value of a variable to others: TensorFlow names no device of nodes that read one."""
    return reads_variable(node.op) or is_view(node.op)
