"""Lets tensors wait for the backward pass in fewer bits.

What encodes runs when the forward pass has read the tensor for the last time, and what decodes when all else that its
first reader waits for is there: control edges say so, whatever order is chosen. Only the copy that the backward pass
reads is rounded.

Requires: reductions of tensors that `saved_tensors` lists, by readers that it lists for them. Ensures: these readers
read what is decoded, views between are made anew on it, and nothing else is changed. Raises InvalidModel where
the graph has no such tensor or reader.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.analysis.device import DeviceModel
from tfswap.analysis.kernels import kernel_memory
from tfswap.analysis.phases import backward_nodes
from tfswap.analysis.precision import FORMATS, Reduction, Saved, saved_tensors
from tfswap.errors import InvalidModel
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.ops import passes_on
from tfswap.ir.types import TensorType
from tfswap.ir.views import origin
from tfswap.oplib import names
from tfswap.passes.encode import add_shape


def apply_precision(graph: Graph, reductions: Sequence[Reduction], device: DeviceModel) -> int:
    """Carry out `reductions` in `graph`, in place; returns how many nodes were added."""
    if not reductions:
        return 0
    before = len(graph)
    saved = saved_tensors(graph)
    backward = backward_nodes(graph)
    for number, reduction in enumerate(reductions):
        if reduction.tensor not in saved or reduction.precision not in FORMATS:
            raise InvalidModel(
                f"this plan keeps {reduction.tensor!r} as {reduction.precision!r} for the backward pass, and the graph "
                "has no such tensor that waits for it, or tfswap no such precision. Plan again for this graph."
            )
        _reduce(graph, saved[reduction.tensor], reduction, number, device, backward)
    return len(graph) - before


def _reduce(
    graph: Graph, saved: Saved, reduction: Reduction, seed: int, device: DeviceModel, backward: set[Node]
) -> None:
    tensor, precision = saved.tensor, FORMATS[reduction.precision]
    stem = f"{names.ENCODED}{tensor.node.name}_{tensor.index}/"
    on = tensor.node.device
    attrs = {"T": Dtype(tensor.type.dtype), **precision.attrs}
    encode = graph.add(
        precision.encode,
        graph.unique_name(f"{stem}{precision.encode.rpartition('>')[2]}"),
        (tensor,),
        controls=[node for node in saved.forward if not _may_take_over(node, tensor, device)],
        attrs={**attrs, "seed": seed} if precision.encode == names.ENCODE_GROUPS else attrs,
        outputs=(TensorType("uint8", (precision.nbytes(tensor.type.num_elements or 0),)),),
        device=on,
    )
    readers = {node.name: node for node in saved.backward}
    for group in reduction.readers:
        strange = next((name for name in group if name not in readers), None)
        if strange is not None or not group:
            raise InvalidModel(
                f"this plan lets {strange!r} read {reduction.tensor!r} in {reduction.precision}, and that is no kernel "
                "of the backward pass that reads it. Plan again for this graph."
            )
        first = readers[group[0]]
        decode = graph.add(
            precision.decode,
            graph.unique_name(f"{stem}{precision.decode.rpartition('>')[2]}"),
            (encode.out(), add_shape(graph, tensor, on)),
            controls=dict.fromkeys(read.node for read in first.inputs if read.node in backward),
            attrs={**attrs, "Tshape": Dtype("int32")},
            outputs=(tensor.type,),
            device=on,
        )
        views = {tensor: decode.out()}
        for name in group:
            node = readers[name]
            node.inputs = tuple(_on(graph, t, views) if origin(t) == tensor else t for t in node.inputs)


def _may_take_over(node: Node, tensor: Output, device: DeviceModel) -> bool:
    """Whether `node` may write over the tensor where it reads it last: then what encodes must not come after it."""
    types = [t.type for t in node.inputs]
    forward = kernel_memory(node.op, node.attrs, types, node.outputs, device).forward
    return any(origin(node.inputs[position]) == tensor for _, candidates in forward for position in candidates)


def _on(graph: Graph, tensor: Output, views: dict[Output, Output]) -> Output:
    """`tensor`, on the buffer that was decoded.

    Args:
        views: what is on it so far.
    """
    if tensor not in views:
        view = tensor.node
        if passes_on(view.op):
            views[tensor] = _on(graph, view.inputs[tensor.index], views)
        else:
            name = graph.unique_name(f"tfswap/{view.name}")
            inputs = (_on(graph, view.inputs[0], views), *view.inputs[1:])
            twin = graph.add(view.op, name, inputs, attrs=view.attrs, outputs=view.outputs, device=view.device)
            views[tensor] = twin.out(tensor.index)
    return views[tensor]
