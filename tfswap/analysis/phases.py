"""Which nodes are of the backward pass.

Found by what they are and read, not by their names: some kernels exist for gradients alone, some of the others have
gradients among their outputs, and what reads a gradient is of the backward pass too. So is what makes factors for those
alone, as 2 * x for the gradient of x * x. The first products behind a loss that has no such kernel (a mean of squares)
are not found: what is said to be backward is, and more may be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from tfswap.analysis.encodings import FLOATS
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.ops import is_pure, is_view, writes_variable

MARKS = ("Backprop", "Grad")
"""Parts of the names of kernels that only gradients need."""
FORWARD_TOO = "BackpropInput"
"""But these are transposed convolutions as well, which are layers."""
_GRADIENTS: dict[str, int] = {
    "CTCLoss": 1,
    "CTCLossV2": 1,
    "SoftmaxCrossEntropyWithLogits": 1,
    "SparseSoftmaxCrossEntropyWithLogits": 1,
}
"""Losses that make a gradient beside their value, and at which output."""


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
        if _is_gradient(node.op) or any(t.node in found or _is_seed(t) for t in node.inputs):
            found.add(node)
    return found


def forward_among(nodes: Sequence[Node], fetched: Iterable[Node]) -> set[Node]:
    """The nodes, of some in topological order, that gradients or what is fetched are computed from.

    Of the rest, what does not read a gradient either is optimizers' arithmetic. (The backward pass is among these where
    it is fetched, or where gradients of gradients are taken.)
    """
    found: set[Node] = set(fetched)
    for node in reversed(nodes):
        if node in found or _is_gradient(node.op) or node.op in _GRADIENTS:
            found.update(t.node for t in node.inputs)
    return found


def _is_gradient(op: str) -> bool:
    if is_view(op) or writes_variable(op) or FORWARD_TOO in op:  # StopGradient, ResourceApplyGradientDescent
        return False
    return any(mark in op for mark in MARKS)


def _is_seed(tensor: Output) -> bool:
    return _GRADIENTS.get(tensor.node.op) == tensor.index
