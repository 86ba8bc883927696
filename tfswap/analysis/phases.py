"""Finds the nodes of the backward pass.

Some types of ops compute gradients only, and some losses have gradients among their outputs. Readers of a gradient are
of the backward pass too, and so are nodes whose only readers are, such as 2 * x for the gradient of x * x. The gradient
of a linear op is computed by ordinary linear ops, which are recognised by the name scopes of TensorFlow's gradient
functions.

Not handled: gradients of linear ops in graphs with other names, as of `tf.gradients` with `name=`. Nodes found here are
of the backward pass, but others may be too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from tfswap.analysis.encodings import FLOATS
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import is_pure, is_view, writes_variable

MARKS = ("Backprop", "Grad")
"""Parts of the names of op types for gradients."""
FORWARD_TOO = "BackpropInput"
"""Ops that are also transposed convolutions in the forward pass."""
_SCOPES = re.compile(r"(^|/)(gradient_tape|gradients(_\d+)?/([^/]+/)*[^/]+_grad)/")
"""The name scopes of gradient functions: of a tape (backprop.py, _gradient_function), and of `tf.gradients`, which also
creates the backward functions of loops, conditionals and calls (gradients_util.py, _GradientsHelper)."""
_GRADIENTS: dict[str, int] = {
    "CTCLoss": 1,
    "CTCLossV2": 1,
    "SoftmaxCrossEntropyWithLogits": 1,
    "SparseSoftmaxCrossEntropyWithLogits": 1,
}
"""Losses with a gradient among their outputs, and its position."""


def backward_nodes(graph: Graph) -> set[Node]:
    """The nodes of `graph` that are certainly of the backward pass, which includes optimizers' arithmetic."""
    nodes = graph.topological()
    found = backward_among(nodes)
    readers: dict[Node, list[Node]] = {}
    for node in nodes:
        for read in node.inputs:
            readers.setdefault(read.node, []).append(node)
    fetched = {fetch.node for fetch in graph.fetches}
    # Where no loss is fetched, all readers of the forward pass are gradients. The forward pass was traced before them.
    traced_later = set(itertools.dropwhile(lambda node: node not in found, graph))
    for node in reversed(nodes):
        alone = node in readers and found.issuperset(readers[node])
        if alone and node in traced_later and node not in fetched and _makes_factors(node):
            found.add(node)
    return found


def _makes_factors(node: Node) -> bool:
    """Whether a node computes floats from floats. Predicates and random numbers are of the forward pass."""
    read = any(t.type.dtype in FLOATS for t in node.inputs) and node.op != "Sign"
    return read and is_pure(node.op) and all(kind.dtype in FLOATS for kind in node.outputs)


def backward_among(nodes: Iterable[Node]) -> set[Node]:
    """The nodes among these, in topological order, that are of the backward pass by their names and inputs."""
    found: set[Node] = set()
    for node in nodes:
        # A constant that both passes share can have the name of a gradient's node.
        named = bool(node.inputs) and is_gradient(node.op, node.name)
        if named or any(t.node in found or _is_seed(t) for t in node.inputs):
            found.add(node)
    return found


def forward_among(nodes: Sequence[Node], fetched: Iterable[Node]) -> set[Node]:
    """The nodes among these, in topological order, from which gradients or fetches are computed.

    Other nodes that read no gradient are optimizers' arithmetic. The result includes the backward pass where gradients
    are fetched, or gradients of gradients are computed.
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
