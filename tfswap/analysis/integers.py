"""Integers that are known before the step runs: sizes, counters, and whether a loop goes on.

Follows small integer and boolean tensors through the graph, flat. Where one side decides (False and anything) the
other need not be known.

Invariant: what is given for a tensor is what it will hold; nothing is guessed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from tfswap.ir.graph import SMALL_INTEGERS, Graph, Node, Output
from tfswap.ir.ops import is_view

Values = tuple[int, ...]

_DTYPES = frozenset(("bool", "int32", "int64"))


def is_followed(tensor: Output) -> bool:
    """Whether the tensor is one of small integers."""
    count = tensor.type.num_elements
    return tensor.type.dtype in _DTYPES and count is not None and count <= SMALL_INTEGERS


Rule = Callable[[Node, Sequence["Values | None"]], "Values | None"]


def _elementwise(function: Callable[[int, int], int]) -> Rule:
    def rule(node: Node, inputs: Sequence[Values | None]) -> Values | None:
        left, right = inputs
        if left is None or right is None:
            return None
        count = max(len(left), len(right))
        ranks = [len(t.type.shape or ()) for t in node.inputs]
        if min(len(left), len(right)) > 1 and ranks[0] != ranks[1]:
            return None  # rows repeated: not followed
        if len(left) not in (1, count) or len(right) not in (1, count):
            return None
        pairs = zip(left * (count // len(left)), right * (count // len(right)), strict=True)
        try:
            return tuple(int(function(a, b)) for a, b in pairs)
        except ZeroDivisionError:
            return None

    return rule


def _decided(rule: Rule, decides: int) -> Rule:
    """`rule` of booleans, one of which can settle it alone."""

    def both(node: Node, inputs: Sequence[Values | None]) -> Values | None:
        if any(values == (decides,) for values in inputs):
            return (decides,)
        return rule(node, inputs)

    return both


def _each(function: Callable[[int], int]) -> Rule:
    def rule(node: Node, inputs: Sequence[Values | None]) -> Values | None:
        return None if inputs[0] is None else tuple(int(function(v)) for v in inputs[0])

    return rule


def _same(node: Node, inputs: Sequence[Values | None]) -> Values | None:
    """The elements in the order in which they were."""
    return inputs[0]


def _shape(node: Node, inputs: Sequence[Values | None]) -> Values | None:
    _, shape, bound = node.inputs[0].type
    return None if bound or shape is None or None in shape else cast("Values", shape)


def _size(node: Node, inputs: Sequence[Values | None]) -> Values | None:
    shape = _shape(node, inputs)
    return None if shape is None else (math.prod(shape),)


def _rank(node: Node, inputs: Sequence[Values | None]) -> Values | None:
    shape = node.inputs[0].type.shape
    return None if shape is None else (len(shape),)


def _joined(node: Node, inputs: Sequence[Values | None]) -> Values | None:
    """Scalars or vectors after one another (Pack of scalars, ConcatV2 of vectors)."""
    data = list(inputs)
    if node.op == "ConcatV2":
        data.pop()
    ranks = {len(t.type.shape or ()) for t in node.inputs[: len(data)]}
    if ranks != ({1} if node.op == "ConcatV2" else {0}):
        return None
    known = [v for v in data if v is not None]
    return None if len(known) < len(data) else tuple(x for v in known for x in v)


def _strided_slice(node: Node, inputs: Sequence[Values | None]) -> Values | None:
    """One element or a range of a vector."""
    source, begin, end, stride = inputs
    attrs = node.attrs
    if source is None or begin is None or end is None or stride is None or len(begin) != 1:
        return None
    if len(node.inputs[0].type.shape or ()) != 1 or attrs.get("ellipsis_mask") or attrs.get("new_axis_mask"):
        return None
    if attrs.get("shrink_axis_mask"):
        return (source[begin[0]],) if -len(source) <= begin[0] < len(source) else None
    first = None if attrs.get("begin_mask") else begin[0]
    last = None if attrs.get("end_mask") else end[0]
    return source[slice(first, last, stride[0])] if stride[0] else None


def _select(node: Node, inputs: Sequence[Values | None]) -> Values | None:
    if inputs[0] is None or len(inputs[0]) != 1:
        return None
    return inputs[1] if inputs[0][0] else inputs[2]


def _reduced(function: Callable[[Values], int]) -> Rule:
    def rule(node: Node, inputs: Sequence[Values | None]) -> Values | None:
        source = inputs[0]
        return None if not source or node.outputs[0].num_elements != 1 else (int(function(source)),)

    return rule


_RULES: dict[str, Rule] = {
    "Add": _elementwise(operator.add),
    "AddV2": _elementwise(operator.add),
    "All": _reduced(all),
    "Any": _reduced(any),
    "Cast": _same,  # among integers and booleans only
    "ConcatV2": _joined,
    "Equal": _elementwise(operator.eq),
    "FloorDiv": _elementwise(int.__floordiv__),
    "FloorMod": _elementwise(operator.mod),
    "Greater": _elementwise(operator.gt),
    "GreaterEqual": _elementwise(operator.ge),
    "Less": _elementwise(operator.lt),
    "LessEqual": _elementwise(operator.le),
    "LogicalAnd": _decided(_elementwise(int.__and__), 0),
    "LogicalNot": _each(operator.not_),
    "LogicalOr": _decided(_elementwise(int.__or__), 1),
    "Max": _reduced(max),
    "Maximum": _elementwise(max),
    "Min": _reduced(min),
    "Minimum": _elementwise(min),
    "Mul": _elementwise(operator.mul),
    "Neg": _each(operator.neg),
    "NotEqual": _elementwise(operator.ne),
    "Pack": _joined,
    "Prod": _reduced(math.prod),
    "Rank": _rank,
    "Select": _select,
    "SelectV2": _select,
    "Shape": _shape,
    "Size": _size,
    "StridedSlice": _strided_slice,
    "Sub": _elementwise(operator.sub),
    "Sum": _reduced(sum),
}


class Integers:
    """Follows the integers of one graph.

    Args:
        order: its nodes, each after those that it reads.
    """

    def __init__(self, graph: Graph, order: Sequence[Node]):
        self._constants = {(node, 0): values for node, values in graph.small_constants.items()}
        self._steps: list[tuple[Node, Rule]] = []
        for node in order:
            rule = rule_of(node)
            if rule is not None:
                self._steps.append((node, rule))

    def follow(self, given: Mapping[tuple[Node, int], Values]) -> dict[tuple[Node, int], Values]:
        """What is known when `given` is."""
        known = {**self._constants, **given}
        for node, rule in self._steps:
            values = rule(node, [known.get((t.node, t.index)) for t in node.inputs])
            if values is not None:
                known[node, 0] = values
        return known


def rule_of(node: Node) -> Rule | None:
    """How the node's only output follows from its inputs; None where it is not followed."""
    if len(node.outputs) != 1 or not node.inputs or not is_followed(node.out()):
        return None
    if is_view(node.op):
        return _same
    if node.op == "Cast" and not is_followed(node.inputs[0]):
        return None
    return _RULES.get(node.op)
