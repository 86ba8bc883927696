"""Integers that are known before the step runs: sizes, counters, and conditions of loops.

Values of small integer and boolean tensors are propagated through the graph, flat, and on demand the lengths of lists.
Where one input decides (False and anything), the other may be unknown.

Invariant: a tensor's values here are those that it will have, or an `AtMost`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from tfswap.ir import custom_ops
from tfswap.ir.graph import SMALL_INTEGERS, Graph, Node, Output
from tfswap.ir.op_traits import is_view

Values = tuple[int, ...]
Known = dict[tuple[Node, int], Values]
"""The elements of tensors, by (node, output index)."""


class AtMost(tuple[int, ...]):
    """Elements that are upper bounds, as after a loop that may end early."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AtMost) and super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((AtMost, *self))


def common(ways: Sequence[Sequence[Values | None]], *, bounds: bool = False) -> list[Values | None]:
    """The common values of tensors in several cases; None where they differ.

    Args:
        ways: the values of all tensors, in each case.
        bounds: give bounds where the values differ.
    """
    return [_common(values, bounds) for values in zip(*ways, strict=True)]


def _common(ways: Sequence[Values | None], bounds: bool) -> Values | None:
    values = set(ways)
    if len(values) == 1:
        return ways[0]
    known = [way for way in values if way is not None]
    if not bounds or len(known) < len(values) or len(set(map(len, known))) > 1:
        return None
    return AtMost(map(max, *known))


_DTYPES = frozenset(("bool", "int32", "int64"))


def is_followed(tensor: Output) -> bool:
    """Whether the tensor's values are propagated: few integers or booleans."""
    count = tensor.type.num_elements
    return tensor.type.dtype in _DTYPES and count is not None and count <= SMALL_INTEGERS


Rule = Callable[[Node, Sequence["Values | None"]], "Values | None"]


def _elementwise(function: Callable[[int, int], int]) -> Rule:
    def rule(node: Node, inputs: Sequence[Values | None]) -> Values | None:
        left, right = inputs
        if left is None or right is None:
            return None
        count = max(len(left), len(right))
        if min(len(left), len(right)) > 1:
            ranks = [len(t.type.shape or ()) for t in node.inputs]
            if ranks[0] != ranks[1]:
                return None  # broadcasting of rows is not supported
        if len(left) not in (1, count) or len(right) not in (1, count):
            return None
        pairs = zip(left * (count // len(left)), right * (count // len(right)), strict=True)
        try:
            return tuple([int(function(a, b)) for a, b in pairs])
        except ZeroDivisionError:
            return None

    return rule


def _decided(rule: Rule, decides: int) -> Rule:
    """`rule` for two booleans, where an input with the value `decides` decides the result."""

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
    """The first input's elements, in the same order."""
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
    """Concatenated scalars or vectors (Pack of scalars, ConcatV2 of vectors)."""
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
    "Tfswap>ToDevice": _same,
    "Tfswap>ToHost": _same,
    "Shape": _shape,
    "Size": _size,
    "StridedSlice": _strided_slice,
    "Sub": _elementwise(operator.sub),
    "Sum": _reduced(sum),
}


_RISING = frozenset(("Add", "AddV2", "Maximum", "Minimum", "Pack"))
"""Ops whose result is no smaller for larger inputs."""

_CERTAIN: dict[str, tuple[int, int]] = {
    "Greater": (0, 1),
    "GreaterEqual": (0, 1),
    "Less": (1, 0),
    "LessEqual": (1, 0),
}
"""For each comparison, the result that also holds for all smaller values of the first input, and of the second."""


def _applied(node: Node, rule: Rule, inputs: Sequence[Values | None]) -> Values | None:
    """The result of a rule for inputs of which some may be bounds."""
    bounds = [p for p, values in enumerate(inputs) if isinstance(values, AtMost)]
    if not bounds:
        return rule(node, inputs)
    exact = rule(node, [None if p in bounds else values for p, values in enumerate(inputs)])
    if exact is not None:
        return exact
    values = rule(node, inputs)
    if values is None:
        return None
    if rule is _same or node.op in _RISING:
        return AtMost(values)
    certain = _CERTAIN.get(node.op)
    return values if certain and len(bounds) == 1 and set(values) == {certain[bounds[0]]} else None


def _reduced_axes(first: Values, second: Values) -> tuple[Values, Values]:
    """The results of BroadcastGradientArgs for two shapes: the axes over which each gradient is summed (bcast.h)."""
    if first == second:
        return (), ()
    rank = max(len(first), len(second))
    padded = ((1,) * (rank - len(shape)) + shape for shape in (first, second))
    one, other = (tuple(axis for axis, size in enumerate(shape) if size == 1) for shape in padded)
    return one, other


_SEVERAL: dict[str, Callable[..., tuple[Values, ...]]] = {
    "BroadcastGradientArgs": _reduced_axes,
}
"""Ops with several outputs, which are computed where all inputs are known."""


def _set(node: Node, inputs: Sequence[Values | None]) -> Values | None:
    length, index = inputs[:2]
    if length is None or not node.attrs.get("resize_if_index_out_of_bounds"):
        return length
    return None if index is None else (max(length[0], index[0] + 1),)


def _longer(by: int) -> Rule:
    def rule(node: Node, inputs: Sequence[Values | None]) -> Values | None:
        return None if inputs[0] is None else (inputs[0][0] + by,)

    return rule


def _rows(node: Node, inputs: Sequence[Values | None]) -> Values | None:
    shape = _shape(node, inputs)
    return shape[:1] if shape else None


_LENGTHS: dict[str, Rule] = {
    "EmptyTensorList": lambda node, inputs: (0,),
    "Identity": _same,
    "TensorListFromTensor": _rows,
    "TensorListLength": _same,
    "TensorListPopBack": _longer(-1),
    "TensorListPushBack": _longer(1),
    "TensorListReserve": lambda node, inputs: inputs[1],
    "TensorListResize": lambda node, inputs: inputs[1],
    "TensorListSetItem": _set,
    custom_ops.PREFETCH: _same,
    "ZerosLike": _same,
}
"""Rules for lengths of lists. A list's length is its value."""


class Integers:
    """Propagates the integers of one graph.

    Args:
        order: its nodes in topological order.
        lengths: propagate the lengths of lists as well, as the lists' values.
        roots: propagate only values on which these tensors depend. None: all.
    """

    def __init__(
        self, graph: Graph, order: Sequence[Node], *, lengths: bool = False, roots: Iterable[Output] | None = None
    ):
        self._constants: Known = {(node, 0): values for node, values in graph.small_constants.items()}
        self._rules: dict[Node, Rule] = {}  # in the nodes' order
        for node in order:
            variant = any(kind.dtype == "variant" for kind in (*(t.type for t in node.inputs), *node.outputs))
            rule = (_LENGTHS.get(node.op) if lengths else None) if variant else rule_of(node)
            if rule is not None:
                self._rules[node] = rule
        if roots is not None:
            needed = {tensor.node for tensor in roots}
            for node in reversed(order):
                if node in needed and node in self._rules:
                    needed.update(tensor.node for tensor in node.inputs)
            self._rules = {node: rule for node, rule in self._rules.items() if node in needed}
        # Values that depend on constants only are computed once: loops are evaluated for thousands of iterations.
        for node in self._rules:
            self.follow_on(node, self._constants)
        self._rules = {node: rule for node, rule in self._rules.items() if (node, 0) not in self._constants}

    def follow(self, given: Mapping[tuple[Node, int], Values]) -> Known:
        """All values that follow from `given`."""
        known = {**self._constants, **given}
        for node, rule in self._rules.items():
            values = _applied(node, rule, [known.get(t) for t in node.inputs])
            if values is not None:
                known[node, 0] = values
        return known

    def follow_on(self, node: Node, known: Known) -> None:
        """Add the value of one node's output to `known`, where it follows."""
        rule = self._rules.get(node)
        if rule is None:
            return
        values = _applied(node, rule, [known.get(t) for t in node.inputs])
        if values is not None:
            known[node, 0] = values


def known_results(node: Node, inputs: Sequence[Values | None]) -> dict[int, Values]:
    """The values of a node's outputs that follow from its inputs, by output."""
    if (several := _SEVERAL.get(node.op)) is not None:
        given = [() if t.type.num_elements == 0 else v for t, v in zip(node.inputs, inputs, strict=True)]
        known = [values for values in given if values is not None and not isinstance(values, AtMost)]
        return dict(enumerate(several(*known))) if len(known) == len(given) else {}
    rule = rule_of(node)
    values = None if rule is None else _applied(node, rule, inputs)
    return {} if values is None else {0: values}


def rule_of(node: Node) -> Rule | None:
    """The rule for the node's only output; None where its values are not propagated."""
    if len(node.outputs) != 1 or not node.inputs or not is_followed(node.out()):
        return None
    if is_view(node.op):
        return _same
    if node.op == "Cast" and not is_followed(node.inputs[0]):
        return None
    return _RULES.get(node.op)


MOST_TRIPS = 1 << 17
"""The most iterations that are evaluated to find a loop's number of iterations."""
LOOKED_AHEAD = 256
"""After this many iterations, a loop that may end early is evaluated further only if its counters end it."""


class Loop(NamedTuple):
    """A loop's condition and body, and the integers of each."""

    condition: Graph
    body: Graph
    test: Integers
    change: Integers

    def run(
        self, given: Sequence[Values | None], *, bound: bool = True, most: int = MOST_TRIPS
    ) -> tuple[list[list[Values | None]] | None, bool]:
        """The loop variables' integers before each iteration and after the last one, None where the number of
        iterations is unknown; and whether that number is exact, and not a bound.

        Args:
            bound: whether to find a bound where the number is not exact.
            most: the most iterations to evaluate.
        """
        condition = (self.condition.fetches[0].node, self.condition.fetches[0].index)
        results = [(f.node, f.index) for f in self.body.fetches]
        found: list[list[Values | None]] = [list(given)]
        certain = True
        while len(found) <= most + 1:
            goes_on = self.test.follow(as_feeds(self.condition, found[-1])).get(condition)
            if goes_on == (0,):
                return found, certain
            known = self.change.follow(as_feeds(self.body, found[-1]))
            after = [known.get(r) for r in results]
            if goes_on is None or isinstance(goes_on, AtMost):
                certain = False
                if after == found[-1] or not bound:
                    break
                if len(found) == LOOKED_AHEAD and not self._ends(found[-1], after, condition):
                    break
            found.append(after)
        return None, certain

    def _ends(
        self, before: Sequence[Values | None], after: Sequence[Values | None], condition: tuple[Node, int]
    ) -> bool:
        """Whether the condition is false after MOST_TRIPS steps of the counters as from `before` to `after`."""
        far = [
            one
            if one == other
            else tuple(a + (b - a) * MOST_TRIPS for a, b in zip(one, other, strict=True))
            if one is not None and other is not None and len(one) == len(other) and not isinstance(one, AtMost)
            else None
            for one, other in zip(before, after, strict=True)
        ]
        return self.test.follow(as_feeds(self.condition, far)).get(condition) == (0,)

    def unchanging(self, given: Sequence[Values | None]) -> list[Values | None]:
        """The loop variables' integers that are the same in all iterations."""
        results = [(f.node, f.index) for f in self.body.fetches]
        values = list(given)
        while True:
            known = self.change.follow(as_feeds(self.body, values))
            kept = common([values, [known.get(r) for r in results]])
            if kept == values:
                return kept
            values = kept


def as_feeds(graph: Graph, integers: Sequence[Values | None]) -> dict[tuple[Node, int], Values]:
    """The known integers of a graph's feeds, by tensor."""
    return {(f, 0): v for f, v in zip(graph.feeds, integers, strict=True) if v is not None}
