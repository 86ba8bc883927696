"""The elements that a step takes from data pipelines: by `next(iterator)` in it, or in its loops and conditionals.

Not handled: other memory of a pipeline, and elements of unknown size, which count as 0 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from tfswap.analysis.output_bytes import is_of_cpu
from tfswap.ir.graph import Dims, Graph, Node, Output
from tfswap.ir.op_traits import control_flow, is_view, takes_from_pipeline
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel


def element_types(node: Node) -> tuple[TensorType, ...]:
    """The types of an element that `node` takes from a pipeline, directly or in an optional."""
    if all(kind.dtype != "variant" for kind in node.outputs):
        return node.outputs
    dtypes, shapes = (cast("tuple[object, ...]", node.attrs[key]) for key in ("output_types", "output_shapes"))
    known = (shape if isinstance(shape, Dims) else None for shape in shapes)
    return tuple(TensorType(str(dtype), shape) for dtype, shape in zip(dtypes, known, strict=True))


def element_bytes(graph: Graph, device: DeviceModel) -> list[int]:
    """The bytes of each tensor of one element of each pipeline that the step reads, if these make them in its arena:
    where it is the host's, or where they copy them to the device, as those of a distributed dataset do.
    """
    taken: dict[Output, Node] = {}
    _collect(graph, {}, taken)
    there = [node for node in taken.values() if not (device.host_is_separate and is_of_cpu(node))]
    return [kind.nbytes for node in there for kind in element_types(node) if kind.nbytes]


def fills_arena(graph: Graph, device: DeviceModel) -> bool:
    """Whether the pipelines that a step reads make their elements in its arena."""
    return bool(element_bytes(graph, device))


def _collect(graph: Graph, given: Mapping[Output, Output], taken: dict[Output, Node]) -> None:
    """Record a node that takes elements for each iterator's handle in the step. `given`: the handles behind feeds."""
    origin = dict(given)
    for node in graph.topological():
        handles = [origin.get(t, t) for t in node.inputs]
        if is_view(node.op):
            origin.update({node.out(o): handle for o, handle in enumerate(handles[: len(node.outputs)])})
        elif takes_from_pipeline(node.op):
            taken.setdefault(handles[0], node)
        elif (kind := control_flow(node.op)) is not None:
            for body in graph.bodies.get(node, ()):
                feeds = zip(body.feeds, handles[kind.first_argument :], strict=True)
                _collect(body, {feed.out(): handle for feed, handle in feeds}, taken)
