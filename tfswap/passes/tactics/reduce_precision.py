"""Keeps tensors for the backward pass in fewer bits.

The encoding node runs after the forward pass's last read, and the decoding node when all other inputs of its first
reader are computed: control edges ensure it in any order. Only the copy that the backward pass reads is rounded.

Requires: reductions of tensors that `saved_tensors` lists, by readers that it lists for them. Ensures: these readers
read the decoded tensor, views in between are repeated on it, and nothing else is changed. Raises InvalidModel where the
graph has no such tensor or reader.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.analysis.phases import backward_nodes
from tfswap.analysis.reduced_precision import FORMATS, Reduction, Saved, saved_tensors
from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Node
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.tactics.pack import decode_for, encode_after


@graph_pass(
    requires="tensors that the backward pass reads",
    ensures="the backward pass reads these tensors rounded to fewer bits",
)
def reduce_precision(graph: Graph, target: Target, reductions: Sequence[Reduction]) -> int:
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
        _reduce(graph, saved[reduction.tensor], reduction, number, target.device, backward)
    graph.bring_forward(before)
    return len(graph) - before


def _reduce(
    graph: Graph, saved: Saved, reduction: Reduction, seed: int, device: DeviceModel, backward: set[Node]
) -> None:
    tensor, precision = saved.tensor, FORMATS[reduction.precision]
    attrs = {"T": Dtype(tensor.type.dtype), **precision.attrs}
    encode = encode_after(
        graph,
        tensor,
        precision.encode,
        {**attrs, "seed": seed} if precision.encode == custom_ops.ENCODE_GROUPS else attrs,
        [TensorType("uint8", (precision.nbytes(tensor.type.num_elements or 0),))],
        saved.forward,
        device,
    )
    readers = {node.name: node for node in saved.backward}
    for group in reduction.readers:
        unknown = next((name for name in group if name not in readers), None)
        if unknown is not None or not group:
            raise InvalidModel(
                f"this plan has {unknown!r} read {reduction.tensor!r} in {reduction.precision}, and this graph has no "
                "such reader of it in the backward pass. Plan again for this graph."
            )
        decode_for(
            graph,
            tensor,
            [readers[name] for name in group],
            precision.decode,
            {**attrs, "Tshape": Dtype("int32")},
            [encode.out()],
            takes_shape=True,
            awaits=backward.__contains__,
        )
