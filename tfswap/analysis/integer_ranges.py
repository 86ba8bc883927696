"""The range of an integer tensor's values, before the step runs.

Shapes, constants and arithmetic are propagated backwards from a tensor, on demand. A position is below the size of the
searched axis, a remainder is below its divisor, and ops that move values keep their range.

Invariant: a range holds for all inputs of the step. Where nothing is known, or an op's result could wrap around, it is
the range of the type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.types import ELEMENT_BYTES
from tfswap.ir.views import origin

FURTHEST = 64
"""The most ops to follow from a tensor toward its inputs."""


class Range(NamedTuple):
    """The least and the largest possible value of an element."""

    low: int
    high: int


BOOL = Range(0, 1)


def range_of_type(dtype: str) -> Range | None:
    """The range of an integer or boolean type; None for other types."""
    if dtype == "bool":
        return BOOL
    bits = 8 * ELEMENT_BYTES.get(dtype, 0)
    if dtype.startswith("uint"):
        return Range(0, 2**bits - 1)
    return Range(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if dtype.startswith("int") else None


RangeOf = Callable[[int], "Range | None"]
"""Gives the range of the input at a position."""
Rule = Callable[[Node, int, RangeOf], "Range | None"]
"""Gives the range of the output at a position; None, or a range beyond the type's, where it is unknown."""


def _below(count: int | None) -> Range | None:
    """The range of positions among `count` elements."""
    return Range(0, max(0, count - 1)) if count is not None else None


def _positions(node: Node, index: int, range_of: RangeOf) -> Range | None:
    """Positions along the axis in the second input; along the longest axis, where that is unknown."""
    shape, axis = node.inputs[0].type.shape, range_of(1)
    if not shape or None in shape or axis is None:
        return None
    dims = cast("tuple[int, ...]", shape)
    known = axis.low == axis.high and -len(dims) <= axis.low < len(dims)
    return _below(dims[axis.low] if known else max(dims))


def _along_the_last(node: Node, index: int, range_of: RangeOf) -> Range | None:
    shape = node.inputs[0].type.shape
    return _below(shape[-1]) if index == 1 and shape else None


def _places_in_images(node: Node, index: int, range_of: RangeOf) -> Range | None:
    """Positions of MaxPoolWithArgmax: within an image, or within all of them."""
    kind = node.inputs[0].type
    images = 1 if node.attrs.get("include_batch_in_index") else (kind.shape or (None,))[0]
    if index != 1 or not kind.num_elements or not images:
        return None
    return Range(-1, kind.num_elements // images - 1)  # -1 where there is nothing to pool


def _first_of_many(node: Node, index: int, range_of: RangeOf) -> Range | None:
    """Places in a vector (Unique's second output)."""
    return _below(node.inputs[0].type.num_elements) if index == 1 else None


def _same(node: Node, index: int, range_of: RangeOf) -> Range | None:
    return range_of(0)


def _second(node: Node, index: int, range_of: RangeOf) -> Range | None:
    return range_of(1)


def _either(*positions: int) -> Rule:
    """Values of these inputs; of all inputs, where none is given."""

    def rule(node: Node, index: int, range_of: RangeOf) -> Range | None:
        return _joined([range_of(p) for p in positions or range(len(node.inputs))])

    return rule


def _all_but_the_last(node: Node, index: int, range_of: RangeOf) -> Range | None:
    return _joined([range_of(p) for p in range(len(node.inputs) - 1)])


def _joined(ranges: list[Range | None]) -> Range | None:
    known = [r for r in ranges if r is not None]
    if not known or len(known) < len(ranges):
        return None
    return Range(min(r.low for r in known), max(r.high for r in known))


def _padded(node: Node, index: int, range_of: RangeOf) -> Range | None:
    return _joined([range_of(0), Range(0, 0)])


def _sum(node: Node, index: int, range_of: RangeOf) -> Range | None:
    a, b = range_of(0), range_of(1)
    return Range(a.low + b.low, a.high + b.high) if a and b else None


def _difference(node: Node, index: int, range_of: RangeOf) -> Range | None:
    a, b = range_of(0), range_of(1)
    return Range(a.low - b.high, a.high - b.low) if a and b else None


def _product(node: Node, index: int, range_of: RangeOf) -> Range | None:
    a, b = range_of(0), range_of(1)
    if not (a and b):
        return None
    ends = [x * y for x in a for y in b]
    return Range(min(ends), max(ends))


def _remainder(node: Node, index: int, range_of: RangeOf) -> Range | None:
    """A remainder has the divisor's sign."""
    b = range_of(1)
    return Range(0, b.high - 1) if b and b.low > 0 else None


def _quotient(node: Node, index: int, range_of: RangeOf) -> Range | None:
    a, b = range_of(0), range_of(1)
    if not (a and b) or b.low <= 0:
        return None
    ends = [x // y for x in a for y in b]
    return Range(min(ends), max(ends))


def _larger(node: Node, index: int, range_of: RangeOf) -> Range | None:
    a, b = range_of(0), range_of(1)
    return Range(max(a.low, b.low), max(a.high, b.high)) if a and b else None


def _smaller(node: Node, index: int, range_of: RangeOf) -> Range | None:
    a, b = range_of(0), range_of(1)
    return Range(min(a.low, b.low), min(a.high, b.high)) if a and b else None


def _counted(node: Node, index: int, range_of: RangeOf) -> Range | None:
    """From a start in steps up to a limit, which is excluded."""
    start, limit, step = range_of(0), range_of(1), range_of(2)
    if start is None or limit is None or step is None or step.low <= 0 or limit.high <= start.low:
        return None
    return Range(start.low, limit.high - 1)


def _drawn(low: int, high: int) -> Rule:
    """From the input at `low` to below that at `high`."""

    def rule(node: Node, index: int, range_of: RangeOf) -> Range | None:
        a, b = range_of(low), range_of(high)
        return Range(a.low, b.high - 1) if a and b and b.low > a.high else None

    return rule


def _added_up(node: Node, index: int, range_of: RangeOf) -> Range | None:
    """A sum of at most all elements of the input."""
    one, count = range_of(0), node.inputs[0].type.num_elements
    return Range(min(one.low, 0) * count, max(one.high, 0) * count) if one and count is not None else None


_RULES: dict[str, Rule] = {
    "Add": _sum,
    "AddV2": _sum,
    "ArgMax": _positions,
    "ArgMin": _positions,
    "BroadcastTo": _same,
    "Cast": _same,  # a value out of the type's range would wrap around: the range is then the type's
    "Concat": _either(),
    "ConcatV2": _all_but_the_last,
    "Cumsum": _added_up,
    "Fill": _second,
    "FloorDiv": _quotient,
    "FloorMod": _remainder,
    "Gather": _same,
    "GatherV2": _same,
    "MaxPoolWithArgmax": _places_in_images,
    "Maximum": _larger,
    "Minimum": _smaller,
    "Mul": _product,
    "OneHot": _either(2, 3),
    "OnesLike": lambda node, index, range_of: Range(1, 1),
    "Pack": _either(),
    "Pad": _padded,
    "PadV2": _either(0, 2),
    "RandomShuffle": _same,
    "RandomUniformInt": _drawn(1, 2),
    "Range": _counted,
    "ReverseV2": _same,
    "Roll": _same,
    "Select": _either(1, 2),
    "SelectV2": _either(1, 2),
    "Slice": _same,
    "Split": _second,
    "SplitV": _same,
    "StatelessRandomUniformInt": _drawn(2, 3),
    "StatelessRandomUniformIntV2": _drawn(4, 5),
    "StridedSlice": _same,
    "Sub": _difference,
    "Sum": _added_up,
    "Tile": _same,
    "TopKV2": _along_the_last,
    "Transpose": _same,
    "Unique": _first_of_many,
    "Unpack": _same,
    "ZerosLike": lambda node, index, range_of: Range(0, 0),
    "Tfswap>ToDevice": _same,
    "Tfswap>ToHost": _same,
}


class Ranges:
    """The ranges of one graph's tensors, each computed on first use."""

    def __init__(self, graph: Graph):
        self._constants = graph.small_constants
        self._known: dict[Output, Range | None] = {}

    def __getitem__(self, tensor: Output) -> Range | None:
        """The tensor's range; None where it holds no integers."""
        return self._range(tensor, FURTHEST)

    def _range(self, tensor: Output, further: int) -> Range | None:
        bounds = range_of_type(tensor.type.dtype)
        held = origin(tensor)
        if bounds is None or held.type.dtype != tensor.type.dtype:  # a Bitcast
            return bounds
        if held not in self._known:
            found = self._find(held, further)
            fits = found is not None and bounds.low <= found.low <= found.high <= bounds.high
            self._known[held] = found if fits else bounds
        return self._known[held]

    def _find(self, tensor: Output, further: int) -> Range | None:
        node = tensor.node
        if node in self._constants:
            values = self._constants[node]
            return Range(min(values), max(values)) if values else None
        rule = _RULES.get(node.op)
        if rule is None or not further:
            return None
        return rule(node, tensor.index, lambda position: self._range(node.inputs[position], further - 1))


def narrowest(found: Range) -> str | None:
    """The smallest unsigned type for the values of a range minus its lowest value; None where there is none."""
    span = found.high - found.low
    return next((name for name in ("uint8", "uint16", "uint32") if span < 2 ** (8 * ELEMENT_BYTES[name])), None)
