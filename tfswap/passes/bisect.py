"""Finds the pass after which a property of a graph no longer holds.

Requires: the property holds before the first pass, and once it fails it keeps failing. Ensures: the property is tested
on about log2(n) graphs of n passes, each the graph after its pass. Not handled: properties that come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfswap.ir.graph import Graph


class Applied(NamedTuple):
    """A pass that was applied.

    Attributes:
        name: its name.
        graph: a copy of the graph after it.
        changes: how many it made.
        seconds: how long it took.
    """

    name: str
    graph: Graph
    changes: int
    seconds: float


def first_failing(before: Graph, applied: Sequence[Applied], holds: Callable[[Graph], bool]) -> Applied | None:
    """The first of `applied` after which `holds` is false; None where it holds after all.

    Raises ValueError where it does not hold for `before`.
    """
    if not holds(before):
        raise ValueError("the property does not hold for the graph before the first pass")
    if not applied or holds(applied[-1].graph):
        return None
    low, high = 0, len(applied) - 1  # the last one fails
    while low < high:
        middle = (low + high) // 2
        if holds(applied[middle].graph):
            low = middle + 1
        else:
            high = middle
    return applied[high]
