"""Keeps small results, which callers may hold, out of the arena's free chunks.

A training loop that holds a loss while the next step runs changes that step's arena, and a plan near the floor may not
fit then. So small results are copied into memory that their kernel holds from its construction on. This memory counts
as constants of the step, and the arena is the same in each step. Larger results stay where they are: plans leave room
for them.
"""

from __future__ import annotations

from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Output
from tfswap.ir.types import REFERENCES
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass

MOST_BYTES = 4096
"""The largest result, in bytes, that gets a slot."""

SLOTS = 8
"""The number of results that a caller may hold before further slots are allocated."""


@graph_pass(
    ensures="small results are in memory that their kernel keeps, outside the free space of the arena",
)
def use_result_slots(graph: Graph, _: Target) -> int:
    """Give the small results of `graph` slots, in place, unless they have them; returns how many."""
    handed: dict[Output, Output] = {}
    for fetch in graph.fetches:
        own = fetch.node not in graph.feeds and fetch.node.op not in (custom_ops.HAND_OVER, custom_ops.OUTSIDE)
        is_small = 0 < (fetch.type.nbytes or 0) <= MOST_BYTES and fetch.type.dtype not in REFERENCES
        if own and is_small and fetch not in handed:
            attrs = {"T": Dtype(fetch.type.dtype), "elements": fetch.type.num_elements, "slots": SLOTS}
            name = graph.unique_name(f"tfswap/{fetch.node.name}_{fetch.index}/hand_over")
            node = graph.add(
                custom_ops.HAND_OVER, name, (fetch,), attrs=attrs, outputs=(fetch.type,), device=fetch.node.device
            )
            handed[fetch] = node.out()
    graph.fetches = [handed.get(fetch, fetch) for fetch in graph.fetches]
    return len(handed)
