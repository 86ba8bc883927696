"""Keeps tensors in a smaller form between two uses that are far apart.

The encoding node runs after the last read before the wait, and the decoding node when all other inputs of the first
reader after it are computed: control edges ensure it in any order.

Requires: packings of tensors by a form that they have in this graph, for kernels that read them. Ensures: these kernels
read the decoded tensor, views in between are repeated on it, and nothing else is changed. Raises InvalidModel where the
graph has no such tensor or reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tfswap.analysis.integer_ranges import Ranges
from tfswap.analysis.lossless_forms import SPARSE, Form, Packing, form_of
from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.node_copies import add_copy
from tfswap.ir.op_traits import is_const, is_feed, is_view, passes_on, reads_metadata_only, reads_variable
from tfswap.ir.types import TensorType
from tfswap.ir.views import origin
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.kernel_memory import node_memory
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.tactics.encode import shape_of


@graph_pass(
    requires="packings of tensors by a form that they have in this graph",
    ensures="the late readers read the decoded tensor, and the tensor is freed in between",
)
def pack_tensors(graph: Graph, target: Target, packings: Sequence[Packing]) -> int:
    """Carry out `packings` in `graph`, in place; returns how many nodes were added."""
    if not packings:
        return 0
    before = len(graph)
    for packing, (tensor, form) in zip(packings, _forms(graph, packings, target.device), strict=True):
        readers = readers_of(graph, tensor)
        late = [name for group in packing.readers for name in group]
        unknown = next((name for name in late if name not in readers), None)
        if unknown is not None or not all(packing.readers):
            raise InvalidModel(
                f"this plan has {unknown!r} read {packing.tensor!r} as {packing.form}, and this graph has no such "
                "reader of it. Plan again for this graph."
            )
        encode = encode_after(
            graph,
            tensor,
            form.encode,
            form.encode_attrs,
            form.kept,
            [node for name, node in readers.items() if name not in late],
            target.device,
        )
        for group in packing.readers:
            decode_for(
                graph,
                tensor,
                [readers[name] for name in group],
                form.decode,
                form.decode_attrs,
                [encode.out(i) for i in range(len(form.kept))],
                takes_shape=form.takes_shape,
                awaits=_runs,
            )
    graph.bring_forward(before)
    return len(graph) - before


def _forms(graph: Graph, packings: Sequence[Packing], device: DeviceModel) -> list[tuple[Output, Form]]:
    """The packed tensors and their forms. Raises InvalidModel where the graph's tensors have no such form."""
    tensors = {t.name: t for node in graph for t in (node.out(i) for i in range(len(node.outputs)))}
    ranges = Ranges(graph)
    found: list[tuple[Output, Form]] = []
    for packing in packings:
        tensor = tensors.get(packing.tensor)
        form = None if tensor is None else form_of(packing, tensor, ranges, device)
        if tensor is None or form is None:
            numbers = f"from {packing.minimum} on" if packing.form != SPARSE else f"of {packing.capacity} values"
            raise InvalidModel(
                f"this plan keeps {packing.tensor!r} as {packing.form} {numbers}, and the graph has no such tensor, or "
                "its values do not fit this form. Plan again for this graph."
            )
        found.append((tensor, form))
    return found


def readers_of(graph: Graph, tensor: Output) -> dict[str, Node]:
    """By name, the kernels that read the elements of `tensor`, by itself or through views."""
    return {
        node.name: node
        for node in graph
        if not is_view(node.op)
        and not reads_metadata_only(node.op)
        and any(origin(read) == tensor for read in node.inputs)
    }


def encode_after(
    graph: Graph,
    tensor: Output,
    op: str,
    attrs: Mapping[str, object],
    kept: Sequence[TensorType],
    readers: Iterable[Node],
    device: DeviceModel,
) -> Node:
    """A node that encodes `tensor` after these have read it, but before one of them that could write over it."""
    return graph.add(
        op,
        graph.unique_name(f"{_stem(tensor)}{op.rpartition('>')[2]}"),
        (tensor,),
        controls=[node for node in readers if not _may_forward(node, tensor, device)],
        attrs=attrs,
        outputs=tuple(kept),
        device=tensor.node.device,
    )


def decode_for(
    graph: Graph,
    tensor: Output,
    readers: Sequence[Node],
    op: str,
    attrs: Mapping[str, object],
    kept: Sequence[Output],
    *,
    takes_shape: bool,
    awaits: Callable[[Node], bool],
) -> None:
    """Have `readers` read the result of a new decoding node, which runs when the first reader's other inputs are
    computed.

    Args:
        kept: the encoded tensor.
        takes_shape: whether it reads the tensor's shape as well.
        awaits: whether it waits for this node, which computes another input of the first reader.
    """
    on = tensor.node.device
    decode = graph.add(
        op,
        graph.unique_name(f"{_stem(tensor)}{op.rpartition('>')[2]}"),
        (*kept, shape_of(graph, tensor, on)) if takes_shape else tuple(kept),
        controls=dict.fromkeys(read.node for read in readers[0].inputs if origin(read) != tensor and awaits(read.node)),
        attrs=attrs,
        outputs=(tensor.type,),
        device=on,
    )
    views = {tensor: decode.out()}
    for node in readers:
        node.inputs = tuple(_on(graph, t, views) if origin(t) == tensor else t for t in node.inputs)


def _stem(tensor: Output) -> str:
    return f"{custom_ops.ENCODED}{tensor.node.name}_{tensor.index}/"


def _runs(node: Node) -> bool:
    """Whether the node runs in the step, and is not persistent."""
    return not (is_const(node.op) or is_feed(node.op) or reads_variable(node.op))


def _may_forward(node: Node, tensor: Output, device: DeviceModel) -> bool:
    """Whether `node` may write over the tensor where it reads it last: then the encoding node must not come after
    it.
    """
    forward = node_memory(node, device).forward
    return any(origin(node.inputs[position]) == tensor for _, candidates in forward for position in candidates)


def _on(graph: Graph, tensor: Output, views: dict[Output, Output]) -> Output:
    """`tensor`, on the buffer that was decoded.

    Args:
        views: the views of it that have been added.
    """
    if tensor not in views:
        view = tensor.node
        if passes_on(view.op):
            views[tensor] = _on(graph, view.inputs[tensor.index], views)
        else:
            inputs = (_on(graph, view.inputs[0], views), *view.inputs[1:])
            twin = add_copy(graph, view, f"tfswap/{view.name}", inputs)
            views[tensor] = twin.out(tensor.index)
    return views[tensor]
