"""Gives kernels an encoding in place of a tensor of which they need only a part.

Each keeps its name and its readers and becomes the op that reads the encoding. One new node encodes the tensor for all
kernels with the same encoding. The encoding is then a value like any other: it is computed immediately
(planner/ordering.py) and read late, and it may be swapped.

Requires: kernels that `find_encodings` lists for this graph. Ensures: they read nothing of the tensor but its
encoding, whose bits give the same results; nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Iterable

from tfswap.analysis.encodings import Encoding
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import add_shape


def shape_of(graph: Graph, tensor: Output, device: str) -> Output:
    """The shape of the encoded tensor, for nodes that decode on `device`, one for all. It is computed when the step
    runs: a file's batch may have another size than the planned one.
    """
    name = f"{custom_ops.ENCODED}{tensor.node.name}_{tensor.index}/Shape"
    there = name in graph and graph[name].device == device
    return (graph[name] if there else add_shape(graph, name, tensor, device)).out()


@graph_pass(
    requires="kernels that `find_encodings` lists for this graph",
    ensures="these kernels read an encoding in place of the tensor, with the same results",
)
def encode_tensors(graph: Graph, _: Target, encodings: Iterable[Encoding]) -> int:
    """Carry out `encodings` in `graph`, in place; returns how many nodes were added."""
    before = len(graph)
    made: dict[tuple[object, ...], Output] = {}  # for all kernels on one device with the same encoding
    for encoding in encodings:
        tensor, codec, device = encoding.tensor, encoding.codec, encoding.kernel.device
        attrs = encoding_attrs(encoding)
        key = (codec.encode, tensor, device, *sorted(attrs.items()))
        if key not in made:
            made[key] = add_encoding(graph, tensor, encoding, device)
        take_encoding(graph, encoding, made[key], tensor)
    return len(graph) - before


def encoding_attrs(encoding: Encoding) -> dict[str, object]:
    """The attributes of the encoding node."""
    attrs = {"T": Dtype(encoding.tensor.type.dtype), **_copied(encoding.kernel, encoding.codec.encode_copied)}
    if encoding.codec.predicate:
        attrs["predicate"] = encoding.codec.predicate.encode()
    return attrs


def add_encoding(graph: Graph, tensor: Output, encoding: Encoding, device: str) -> Output:
    """`tensor` of `graph`, encoded by `encoding`."""
    op = encoding.codec.encode
    name = graph.unique_name(f"{custom_ops.ENCODED}{tensor.node.name}_{tensor.index}/{op.rpartition('>')[2]}")
    attrs, outputs = encoding_attrs(encoding), (encoding.encoded,)
    return graph.add(op, name, (tensor,), attrs=attrs, outputs=outputs, device=device).out()


def take_encoding(graph: Graph, encoding: Encoding, encoded: Output, like: Output) -> None:
    """Have the kernel read `encoded`.

    Args:
        like: a tensor of the encoded tensor's shape.
    """
    node, codec = encoding.kernel, encoding.codec
    kept = tuple(node.inputs[position] for position in codec.kept)
    inputs = (encoded, *kept) if codec.encoding_first else (*kept, encoded)
    attrs = _copied(node, codec.copied)
    if codec.takes_shape:
        inputs += (shape_of(graph, like, node.device),)
        attrs["Tshape"] = Dtype("int32")
    node.op, node.inputs, node.attrs = codec.take, inputs, attrs


def _copied(node: Node, attributes: tuple[str, ...]) -> dict[str, object]:
    """The attributes that `node` has, of those given."""
    return {name: node.attrs[name] for name in attributes if name in node.attrs}
