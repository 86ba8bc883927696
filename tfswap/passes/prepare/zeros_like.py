"""Replaces zeros and ones like a tensor by ops that need its shape only.

A ZerosLike or OnesLike holds the whole tensor until it runs, since its kernel may write over it. Gradients have them
for feature maps: for an unused output of a split, for the other branch of a Select. Each becomes a Fill, which may run
when it is needed, of a Shape, which runs immediately (planner/ordering.py). The bits are the same.

Zeros like a list become one tensor for all elements of a size, where TensorFlow has one for each element. The gradient
of each loop begins with such zeros, for each list among the loop's inputs.

Not handled: lists on a GPU; tensors in the bodies of loops and conditionals, whose shapes may be unknown; persistent
tensors, such as variables and arguments; types other than floating point, the type of gradients.
"""

from __future__ import annotations

from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.op_traits import is_const, is_feed, reads_variable
from tfswap.ir.views import origin
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import add_scalar, add_shape, use_own_kernel

_ONES = {"bfloat16": "803f", "float16": "003c", "float32": "0000803f", "float64": "000000000000f03f"}
"""The bytes of a one, by type."""
_FILLED_WITH_ONES = {"OnesLike": True, "ZerosLike": False}


@graph_pass(
    ensures="zeros and ones like a tensor hold its shape, not the tensor",
)
def fill_zeros_like(graph: Graph, _: Target) -> int:
    """Replace zeros and ones like a tensor that the step makes, in place; returns how many."""
    count = 0
    for node in list(graph):
        ones = _FILLED_WITH_ONES.get(node.op)
        if ones is None or node.outputs[0].dtype not in _ONES or not _is_made(node.inputs[0]):
            continue
        dtype = Dtype(node.outputs[0].dtype)
        node.op = "Fill"
        shape = add_shape(graph, f"tfswap/{node.name}/shape", node.inputs[0], node.device)
        node.inputs = (shape.out(), _number(graph, node, ones=ones))
        node.attrs = {"T": dtype, "index_type": Dtype("int32")}
        count += 1
    return count


@graph_pass(
    ensures="zeros like a list are one tensor for all elements of a size",
)
def share_list_zeros(graph: Graph, target: Target) -> int:
    """Have tfswap's own kernel make zeros like lists, in bodies too, in place; returns how many."""
    return use_own_kernel(graph, target.device, lambda n: n.op == "ZerosLike" and n.outputs[0].dtype == "variant")


def _is_made(tensor: Output) -> bool:
    """Whether the step makes it."""
    source = origin(tensor).node
    return not (is_const(source.op) or is_feed(source.op) or reads_variable(source.op))


def _number(graph: Graph, node: Node, *, ones: bool) -> Output:
    """A one, or a zero, of the node's type."""
    dtype = node.outputs[0].dtype
    one = bytes.fromhex(_ONES[dtype])
    content = one if ones else bytes(len(one))
    return add_scalar(graph, f"tfswap/{node.name}/value", dtype, node.device, content).out()
