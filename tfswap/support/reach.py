"""Reachability in a graph that is given by a function of successors, without a copy of the graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def reach(roots: Iterable[T], successors: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """`roots` and all items that are reachable from them, each once, depth first.

    Args:
        successors: gives the items that one edge leads to. It is called for an item after the item was yielded, so a
            caller may stop early.
    """
    seen: set[T] = set()
    pending = list(roots)
    while pending:
        item = pending.pop()
        if item not in seen:
            seen.add(item)
            yield item
            pending += successors(item)
