"""Splits sums of many tensors: a sum holds all its inputs until the last of them is computed.

The gradient of a weight that each step of an unrolled net uses is one AddN with a tensor per step. Together these can
be larger than all other tensors of the step. Its kernel (tensorflow/core/kernels/aggregate_ops.h) adds from the left:
the first two to nine inputs, so that the rest is a multiple of eight, then the sum of each further eight. The pass adds
nodes for exactly these sums, so that the additions, their order and every bit stay the same.

Requires the order of a sum's inputs to be that in which it adds (passes/prepare/ordered_sums.py).

A sum is split if that frees memory: if its first tensors and those of each part are computed in the step, and nothing
else holds them.

Not handled: sums in the bodies of loops and conditionals.
"""

from __future__ import annotations

from collections.abc import Iterable

from tfswap.analysis.owners import solely_owned
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import is_sum
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import PRESERVE

WIDTH = 8
"""Inputs that the kernel adds at a time."""
SMALLEST_BYTES = 64 * 1024
"""The least bytes of an input: starting one more kernel takes about as long as adding this much, and smaller inputs
need little memory.
"""


@graph_pass(
    requires="the inputs of each sum in the order in which it adds",
    ensures="a sum of many tensors adds each part when it is computed, in the same order",
)
def split_add_n(graph: Graph, target: Target) -> int:
    """Split sums of `graph` into the partial sums of their kernels, in place; returns how many."""
    sums = [node for node in graph if _gains(node)]
    if not sums:
        return 0
    alone = solely_owned(graph, target.device)
    sums = [node for node in sums if all(alone(node.inputs[i]) for i in (0, *_starts(node)))]
    parts = _Parts(graph)
    for node in sums:
        first, *others = _groups(node)
        total = parts.add(node, first)
        for group in others[:-1]:
            total = parts.add(node, (total, parts.add(node, group)))
        parts.finish(node, (total, parts.add(node, others[-1])))
    parts.arrange()
    return len(sums)


def split_into_pairs(graph: Graph, sums: Iterable[Node]) -> None:
    """Split `sums` into sums of two tensors, in place: with the same additions in the same order, which TensorFlow's
    optimizers do not change.
    """
    parts = _Parts(graph, {PRESERVE: True})

    def pair_up(node: Node, inputs: tuple[Output, ...]) -> tuple[Output, ...]:
        """The last two terms to be added, of a sum of two or more."""
        total = inputs[0]
        for addend in inputs[1:-1]:
            total = parts.add(node, (total, addend))
        return total, inputs[-1]

    for node in sums:
        last, *others = _groups(node)
        pair = pair_up(node, last)
        for group in others:
            pair = parts.add(node, pair), parts.add(node, pair_up(node, group))
        parts.finish(node, pair)
    parts.arrange()


class _Parts:
    """The nodes that sums of a graph are split into.

    Args:
        attrs: additional attributes of each node.
    """

    def __init__(self, graph: Graph, attrs: dict[str, object] | None = None):
        self._graph = graph
        self._attrs = attrs or {}
        self._nodes = list(graph)
        self._place = {node: i for i, node in enumerate(self._nodes)}
        self._followers: dict[Node, list[Node]] = {}

    def add(self, node: Node, inputs: tuple[Output, ...]) -> Output:
        """A part of the sum `node`, behind the last of its inputs."""
        name = self._graph.unique_name(f"tfswap/{node.name}/part")
        attrs = self._attributes(node, inputs)
        made = self._graph.add(node.op, name, inputs, attrs=attrs, outputs=node.outputs, device=node.device)
        self._place[made] = max(self._place[t.node] for t in inputs)
        self._followers.setdefault(self._nodes[self._place[made]], []).append(made)
        return made.out()

    def finish(self, node: Node, inputs: tuple[Output, ...]) -> None:
        """Have the sum `node` add these."""
        node.inputs, node.attrs = inputs, self._attributes(node, inputs)

    def arrange(self) -> None:
        """Put the parts in their order, once all have been added."""
        self._graph.move_behind(self._followers)

    def _attributes(self, node: Node, inputs: tuple[Output, ...]) -> dict[str, object]:
        return {**node.attrs, "N": len(inputs), **self._attrs}


def _gains(node: Node) -> bool:
    if not is_sum(node.op) or len(node.inputs) <= WIDTH + 1 or node.outputs[0].dtype == "variant":
        return False
    return (node.outputs[0].nbytes or 0) >= SMALLEST_BYTES


def _groups(node: Node) -> list[tuple[Output, ...]]:
    """The groups of inputs that the kernel adds together: the first ones, and each further eight."""
    starts = _starts(node)
    first = starts[0] if starts else len(node.inputs)
    return [node.inputs[:first], *(node.inputs[start : start + WIDTH] for start in starts)]


def _starts(node: Node) -> range:
    """The positions where the further groups of eight begin."""
    count = len(node.inputs)
    return range((count - 2) % WIDTH + 2, count, WIDTH)
