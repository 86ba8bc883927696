"""Bypasses IdentityN nodes, which hold all their inputs until the last of them is computed.

Optimizers add one for all gradients, which are then held until the backward pass has ended. After this pass, its
readers read its inputs, and nodes with a control edge from it wait for a node that holds nothing. Values stay the same;
an IdentityN with control inputs is kept for its readers.

`tf.custom_gradient` adds one for all arguments and results of a function; it defines the gradient. Its readers get a
view that raises an error when it is differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.op_traits import is_view
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass

CUSTOM_GRADIENT = "_gradient_op_type"
REFUSAL = (
    "tfswap has rewritten this step, and the custom gradient of {!r} went with it. Take gradients inside of the step, "
    "or of the function as it was."
)


@graph_pass(
    ensures="no IdentityN holds its inputs until the last of them is computed",
)
def split_identity_n(graph: Graph, _: Target) -> int:
    """Bypass multi-output views in `graph`, in place; returns how many inputs were changed."""
    made: dict[Output, Output] = {}
    ends: dict[Node, Node] = {}

    def source(tensor: Output) -> Output:
        node = tensor.node
        while _splits(node):
            if CUSTOM_GRADIENT in node.attrs:
                if tensor not in made:
                    made[tensor] = _view(graph, tensor, source(node.inputs[tensor.index]))
                return made[tensor]
            tensor = node.inputs[tensor.index]
            node = tensor.node
        return tensor

    changed = 0
    for node in list(graph):
        inputs = tuple(source(t) for t in node.inputs)
        if inputs != node.inputs:
            changed += sum(a != b for a, b in zip(inputs, node.inputs, strict=True))
            node.inputs = inputs
        for control in filter(_holds, node.controls):
            if control not in ends:
                ends[control] = _end_of(graph, control, [source(tensor).node for tensor in control.inputs])
            node.controls = tuple(ends[control] if each is control else each for each in node.controls)
            changed += 1
    graph.fetches = [source(f) for f in graph.fetches]
    followers: dict[Node, list[Node]] = {view: [end] for view, end in ends.items()}
    for tensor, view in made.items():
        followers.setdefault(tensor.node, []).append(view.node)
    graph.move_behind(followers)
    return changed


def _end_of(graph: Graph, view: Node, sources: Sequence[Node]) -> Node:
    """A node that waits for the sources of a view and for its control edges, and holds nothing."""
    before = dict.fromkeys(each for each in (*sources, *view.controls) if each not in graph.feeds)
    return graph.add("NoOp", graph.unique_name(f"tfswap/{view.name}/end"), (), controls=before, device=view.device)


def _passes_each_on(node: Node) -> bool:
    """Whether each output of a node is a view of the input at its place."""
    return is_view(node.op) and len(node.inputs) == len(node.outputs)


def _holds(node: Node) -> bool:
    """Whether a node is a view of several tensors."""
    return _passes_each_on(node) and len(node.outputs) > 1


def _splits(node: Node) -> bool:
    return _passes_each_on(node) if CUSTOM_GRADIENT in node.attrs else _holds(node) and not node.controls


def _view(graph: Graph, tensor: Output, source: Output) -> Output:
    """The replacement of `tensor`, of a node with a gradient of its own."""
    node = tensor.node
    attrs = {"T": Dtype(tensor.type.dtype), "message": REFUSAL.format(node.name).encode()}
    name = graph.unique_name(f"tfswap/{node.name}_{tensor.index}/passed_on")
    view = graph.add(
        "PreventGradient",
        name,
        (source,),
        controls=node.controls,
        attrs=attrs,
        outputs=(tensor.type,),
        device=node.device,
    )
    return view.out()
