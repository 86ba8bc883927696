"""Which nodes are of the backward pass.

Found by what they are and read: some kernels exist for gradients alone, some of the others have gradients among their
outputs, and what reads a gradient is of the backward pass too. So is what makes factors for those alone, as 2 * x for
the gradient of x * x. The gradient of a linear op is made of linear ops as others are: those are known by the name
scopes that TensorFlow puts around all that a gradient function makes.

Not handled: gradients of linear ops in graphs whose nodes have other names, as of `tf.gradients` with `name=`. What is
said to be backward is, and more may be.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from tfswap.analysis.encodings import FLOATS
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import is_pure, is_view, writes_variable

MARKS = ("Backprop", "Grad")
"""Parts of the names of kernels that only gradients need."""
FORWARD_TOO = "BackpropInput"
"""But these are transposed convolutions as well, which are layers."""
_SCOPES = re.compile(r"(^|/)(gradient_tape|gradients(_\d+)?/([^/]+/)*[^/]+_grad)/")
"""The scopes of gradient functions: those of a tape (backprop.py, _gradient_function), and of `tf.gradients`, by which
backward functions of loops, conditionals and calls are made as well (gradients_util.py, _GradientsHelper)."""
_GRADIENTS: dict[str, int] = {
    "CTCLoss": 1,
    "CTCLossV2": 1,
    "SoftmaxCrossEntropyWithLogits": 1,
    "SparseSoftmaxCrossEntropyWithLogits": 1,
}
"""Losses that make a gradient in addition to their value, and at which output."""


def backward_nodes(graph: Graph) -> set[Node]:
    """The nodes of `graph` that certainly are of the backward pass; optimizers' arithmetic is counted to it."""
    nodes = graph.topological()
    found = backward_among(nodes)
    readers: dict[Node, list[Node]] = {}
    for node in nodes:
        for read in node.inputs:
            readers.setdefault(read.node, []).append(node)
    fetched = {fetch.node for fetch in graph.fetches}
    # Where no loss is fetched, nothing but gradients reads the forward pass: that was traced before any of them.
    traced_later = set(itertools.dropwhile(lambda node: node not in found, graph))
    for node in reversed(nodes):
        alone = node in readers and found.issuperset(readers[node])
        if alone and node in traced_later and node not in fetched and _makes_factors(node):
            found.add(node)
    return found


def _makes_factors(node: Node) -> bool:
    """Whether a node computes floats from floats. Predicates, and what is drawn at random, are the forward pass's."""
    read = any(t.type.dtype in FLOATS for t in node.inputs) and node.op != "Sign"
    return read and is_pure(node.op) and all(kind.dtype in FLOATS for kind in node.outputs)


def backward_among(nodes: Iterable[Node]) -> set[Node]:
    """Likewise, of nodes in topological order."""
    found: set[Node] = set()
    for node in nodes:
        # Equal constants of both passes are one node, which can have the name of a gradient's.
        named = bool(node.inputs) and is_gradient(node.op, node.name)
        if named or any(t.node in found or _is_seed(t) for t in node.inputs):
            found.add(node)
    return found


def forward_among(nodes: Sequence[Node], fetched: Iterable[Node]) -> set[Node]:
    """The nodes, of some in topological order, that gradients or what is fetched are computed from.

    Of the rest, what does not read a gradient either is optimizers' arithmetic. (The backward pass is among these where
    it is fetched, or where gradients of gradients are taken.)
    """
    found: set[Node] = set(fetched)
    for node in reversed(nodes):
        if node in found or is_gradient(node.op, node.name) or node.op in _GRADIENTS:
            found.update(t.node for t in node.inputs)
    return found


def is_gradient(op: str, name: str) -> bool:
    """Whether a node of this type and name is certainly part of a gradient function."""
    if _SCOPES.search(name):
        return True
    if is_view(op) or writes_variable(op) or FORWARD_TOO in op:  # StopGradient, ResourceApplyGradientDescent
        return False
    return any(mark in op for mark in MARKS)


def _is_seed(tensor: Output) -> bool:
    return _GRADIENTS.get(tensor.node.op) == tensor.index
