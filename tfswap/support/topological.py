"""A topological order of a graph that is given by predecessors, without a copy of the graph."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence


def topological(before: Sequence[Collection[int]]) -> list[int]:
    """The places in topological order. Among those that are ready, the smallest comes first.

    Places on a cycle, or after one, are left out.

    Args:
        before: the predecessors of each place.
    """
    waiting = [len(places) for places in before]
    after: list[list[int]] = [[] for _ in before]
    for place, places in enumerate(before):
        for each in places:
            after[each].append(place)
    ready = [place for place, count in enumerate(waiting) if not count]
    order: list[int] = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for later in after[place]:
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, later)
    return order
