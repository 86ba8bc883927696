"""The shapes of arguments that steps are planned for: which calls they cover, and what to plan for next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Shapes = tuple[tuple[int, ...] | None, ...]
"""By position; None where any shape is meant. After those of the arguments, sizes that depend on values."""

GROWTH = 1.5
"""Sizes that keep growing are planned for with this much room: a tenfold range takes half a dozen plans."""
SCATTER = 4
"""Sizes that depend on batches' contents are planned for with this many times their range so far, but at most GROWTH
times their maximum. Such sizes differ by about a hundredth from batch to batch, and near a limit there may be no plan
for sizes half as large again.
"""


def covers(made: Shapes, given: Sequence[tuple[int, ...] | None], *, exactly: bool) -> bool:
    """Whether given shapes are no larger than those that a step is made for.

    Args:
        exactly: only equal ones count.
    """
    if len(made) != len(given):
        return False  # only one of the two has computed sizes
    pairs = [(most, shape) for most, shape in zip(made, given, strict=True) if most is not None]
    if exactly:
        return all(most == shape for most, shape in pairs)
    return all(
        len(most) == len(shape or ()) and all(size <= limit for size, limit in zip(shape or (), most, strict=True))
        for most, shape in pairs
    )


def elements(shapes: Shapes) -> float:
    """The number of elements of arguments with these shapes."""
    return sum(math.inf if shape is None or None in shape else math.prod(shape) for shape in shapes)


def grown(shapes: Shapes, planned: Sequence[Shapes], arguments: int) -> Shapes:
    """The sizes to plan for next, given those of existing plans: large enough that plans stay few.

    The second plan is for the arguments' own sizes. From the third on a plan covers all earlier sizes as well, and an
    axis that is longer than ever gets GROWTH times its earlier maximum. Sizes that depend on arguments' contents
    scatter from batch to batch: from the second plan on, those that differ get SCATTER times their range.

    Args:
        arguments: how many of the shapes are the arguments' own.
    """
    planned = [each for each in planned if len(each) == len(shapes)]  # others lack computed sizes
    if not planned:
        return shapes

    def size(axis: int, sizes: Sequence[int], from_values: bool) -> int:
        most = max(sizes)
        longest = max(axis, int(most * GROWTH))
        if not from_values:
            return most if axis <= most else longest
        high = max(axis, most)
        return min(high + SCATTER * (high - min(axis, *sizes)), max(high, longest))

    made = []
    for position, shape in enumerate(shapes):
        from_values = position >= arguments
        earlier = [p for each in planned if (p := each[position]) is not None and len(p) == len(shape or ())]
        if not shape or not earlier or (len(planned) < 2 and not from_values):
            made.append(shape)
            continue
        columns = zip(shape, zip(*earlier, strict=True), strict=True)
        made.append(tuple(size(axis, sizes, from_values) for axis, sizes in columns))
    return tuple(made)


def shapes_of(inputs: Sequence[Any]) -> Shapes:
    """The shapes of tensors; None for those of unknown rank."""
    return tuple(map(_shape, inputs))


def _shape(tensor: Any) -> tuple[int, ...] | None:
    if (quick := getattr(tensor, "_shape_tuple", None)) is not None:
        return quick()
    shape = getattr(tensor, "shape", None)
    return None if shape is None or shape.rank is None else tuple(shape.as_list())
