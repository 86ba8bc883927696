"""An order of a graph that is given by what comes before each place: for graphs of any size, without a copy of them."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence


def topological(before: Sequence[Collection[int]]) -> list[int]:
    """The places so that each comes after those before it; of the ones that are ready the smallest first.

    Where there is a cycle, what is on it or after it is left out.

    Args:
        before: by place, the places that it must come after.
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
