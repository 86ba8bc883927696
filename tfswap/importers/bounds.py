"""Sizes that a step decides by its values, and how large they can get.

How many rows `tf.unique`, `tf.where` or `tf.boolean_mask` give is known when they have run; a plan is made before.
It counts on the most that their inputs' sizes allow, and says that this is a bound (`TensorType.bound`). What is
computed from such a tensor gets its shape from TensorFlow's own inference.

Not handled: sizes that are themselves computed from values (`tf.range(n)`, `tf.repeat` with counts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tfswap.ir.graph import Node
from tfswap.ir.types import Shape

Rule = Callable[[Node], Iterator[tuple[int, Shape]]]


def _elements(node: Node, *outputs: int) -> Iterator[tuple[int, Shape]]:
    """As many elements as the first input has."""
    count = node.inputs[0].type.num_elements
    if count is not None:
        yield from ((i, (count,)) for i in outputs)


def _unique(node: Node) -> Iterator[tuple[int, Shape]]:
    if len(node.inputs[0].type.shape or ()) == 1:
        yield from _elements(node, *(i for i in range(len(node.outputs)) if i != 1))


def _where(node: Node) -> Iterator[tuple[int, Shape]]:
    _, shape, _ = node.inputs[0].type
    count = node.inputs[0].type.num_elements
    if shape is not None and count is not None:
        yield 0, (count, len(shape))


def _partitions(node: Node) -> Iterator[tuple[int, Shape]]:
    data, rows = (t.type for t in node.inputs)
    if data.num_elements is not None and rows.num_elements is not None:
        assert data.shape is not None, "it has a size"
        assert rows.shape is not None, "so has this"
        shape = (rows.num_elements, *data.shape[len(rows.shape) :])
        yield from ((i, shape) for i in range(len(node.outputs)))


def _boxes(node: Node) -> Iterator[tuple[int, Shape]]:
    shape = node.inputs[0].type.shape
    if shape and shape[0] is not None:
        yield 0, (shape[0],)


_RULES: dict[str, Rule] = {
    "DynamicPartition": _partitions,
    "ListDiff": lambda node: _elements(node, 0, 1),
    "NonMaxSuppression": _boxes,
    "NonMaxSuppressionV2": _boxes,
    "NonMaxSuppressionV3": _boxes,
    "Unique": _unique,
    "UniqueV2": _unique,
    "UniqueWithCounts": _unique,
    "UniqueWithCountsV2": _unique,
    "Where": _where,
}


def decides_sizes(op: str) -> bool:
    """Whether the op gives tensors whose size hangs on values, and for which there is a bound."""
    return op in _RULES


def largest_shapes(node: Node) -> Iterator[tuple[int, Shape]]:
    """(output, shape) for outputs of unknown size of a node that decides sizes: the largest that its inputs' allow."""
    for i, shape in _RULES[node.op](node):
        if node.outputs[i].nbytes is None:
            yield i, shape
