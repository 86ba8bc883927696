"""Changes the type of the elements of a list or an optional."""

from __future__ import annotations

from tfswap.analysis.accumulators import Place
from tfswap.ir.graph import Dims, Dtype, Graph, Node, Opaque, Output
from tfswap.ir.op_traits import pops_list
from tfswap.ir.types import TensorType

ANY_SHAPE = Opaque("tensor", bytes.fromhex("080312003a0affffffffffffffffff01"))
"""-1, an int32 scalar: an unknown shape in list ops."""


def _any_shape(graph: Graph) -> Output:
    """An unknown shape, as a constant of the graph."""
    name = "tfswap/any_shape"
    if name in graph:
        return graph[name].out()
    node = graph.add(
        "Const",
        name,
        attrs={"dtype": Dtype("int32"), "value": ANY_SHAPE},
        outputs=(TensorType("int32", ()),),
    )
    graph.small_constants[node] = (-1,)
    return node.out()


def make_keep(graph: Graph, maker: Node, dtype: str, dims: Dims) -> None:
    """Give an empty list elements of this type."""
    if maker.inputs:  # an optional without value has no type
        graph.replace_input(maker, 0, _any_shape(graph))
        _retype(maker, dtype, dims)


def push_instead(push: Place, tensor: Output, dims: Dims) -> None:
    """Push `tensor`."""
    push.graph.replace_input(push.node, push.position, tensor)
    _retype(push.node, tensor.type.dtype, dims)


def pop_instead(pop: Place, kind: TensorType, dims: Dims) -> None:
    """Pop a tensor of this type."""
    node = pop.node
    if pops_list(node.op):
        pop.graph.replace_input(node, 1, _any_shape(pop.graph))
    _retype(node, kind.dtype, dims)
    node.outputs = (*node.outputs[: pop.position], kind)


def _retype(node: Node, dtype: str, dims: Dims) -> None:
    """Give the elements of the node's list or optional this type.

    Args:
        dims: its shape in every step, of a smaller batch too.
    """
    types = {
        "element_dtype": Dtype(dtype),
        "Toutput_types": (Dtype(dtype),),
        "output_types": (Dtype(dtype),),
        "output_shapes": (dims,),
    }
    node.attrs = {**node.attrs, **{key: value for key, value in types.items() if key in node.attrs}}
