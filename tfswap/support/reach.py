"""What can be reached in a graph that is given by a function: for graphs of any size, without a copy of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def reach(roots: Iterable[T], successors: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """`roots` and all that paths from them lead to, each once, depth first.

    Args:
        successors: what one edge leads to. It is called of each item after that was given out, so that a caller who
            stops early saves the rest. Where it gives nothing, paths end.
    """
    seen: set[T] = set()
    pending = list(roots)
    while pending:
        item = pending.pop()
        if item not in seen:
            seen.add(item)
            yield item
            pending += successors(item)
