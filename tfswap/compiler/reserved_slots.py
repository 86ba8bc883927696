"""Which slots to reserve for the small tensors of a step that is searched for plans."""

from __future__ import annotations

from tfswap.compiler.search import Search
from tfswap.plan.schedule import build_schedule
from tfswap.planner.small_slots import choose_slots
from tfswap.simulator.arena_snapshot import ArenaSnapshot


def reserved_slots(search: Search, snapshot: ArenaSnapshot) -> list[int]:
    """The bytes of each small tensor that the step holds simultaneously with others of its size, in an arena like this;
    none where the arena has less than the step needs at least, wherever that lies.
    """
    plain = search.variants.plain
    least_bytes = search.planners.of(search.lowest().variant).live_floor_bytes
    if snapshot.limit_bytes is not None and least_bytes > snapshot.limit_bytes:
        return []
    order = search.planners.of(plain).problems[0].order
    return choose_slots(plain.flow, build_schedule(order, ()), snapshot)
