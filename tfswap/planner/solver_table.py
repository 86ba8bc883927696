"""Which solvers the planner runs, by the tactics that are allowed.

The order is that in which ties between plans are decided. The published policies are in it under their own names.
"""

from __future__ import annotations

from tfswap.planner.problem import NEVER, Solver
from tfswap.planner.solvers import belady, cheapest_eviction, meng, milp, published, rerun_search

MOVES = frozenset(("swap", "recompute"))
"""The tactics that solvers choose among."""
SWAP: tuple[Solver, ...] = (belady.solve, belady.solve_tight)
RECOMPUTE: tuple[Solver, ...] = (cheapest_eviction.solver(cheapest_eviction.Prices(copy=NEVER)),)
EVICT_PRICE = 0.5
EVICT: tuple[Solver, ...] = (
    cheapest_eviction.solver(cheapest_eviction.Prices(copy=EVICT_PRICE)),
    cheapest_eviction.solver(cheapest_eviction.Prices(copy=0.1)),
    cheapest_eviction.solver(cheapest_eviction.Prices(copy=2.0)),
    *RECOMPUTE,
)
BOTH: tuple[Solver, ...] = (*EVICT, *SWAP)
SOLVERS: dict[str, dict[frozenset[str], tuple[Solver, ...]]] = {
    "default": {
        frozenset(): (),
        frozenset({"swap"}): SWAP,
        frozenset({"recompute"}): RECOMPUTE,
        frozenset({"swap", "recompute"}): BOTH,
    },
    "meng": dict.fromkeys((frozenset({"swap"}), frozenset({"swap", "recompute"})), (meng.solve,)),
    "vdnn_all": dict.fromkeys((frozenset({"swap"}), frozenset({"swap", "recompute"})), (published.vdnn_all,)),
    "vdnn_conv": dict.fromkeys((frozenset({"swap"}), frozenset({"swap", "recompute"})), (published.vdnn_conv,)),
    "sqrt": dict.fromkeys((frozenset({"recompute"}), frozenset({"swap", "recompute"})), (published.sqrt,)),
    "superneurons": dict.fromkeys(
        (frozenset({"recompute"}), frozenset({"swap", "recompute"})), (published.superneurons,)
    ),
    "search": dict.fromkeys(
        (frozenset({"recompute"}), frozenset({"swap", "recompute"})),
        (rerun_search.solver(RECOMPUTE[0], rerun_search.LONG_VISITS),),
    ),
    "exact": {frozenset({"swap", "recompute"}): (milp.solve,)},
}
"""By name and tactics. The default ones are used together: the fastest plan that fits wins. The exact one is for steps
of some dozen kernels.
"""
RESTARTS: dict[frozenset[str], tuple[cheapest_eviction.Prices, ...]] = {
    frozenset({"recompute"}): (
        cheapest_eviction.Prices(copy=NEVER, distance=1.0),
        cheapest_eviction.Prices(copy=NEVER, distance=0.25),
        *(cheapest_eviction.Prices(copy=NEVER, draw=draw) for draw in range(1, 7)),
    ),
    frozenset({"swap", "recompute"}): (
        cheapest_eviction.Prices(copy=4.0, distance=1.0),
        cheapest_eviction.Prices(copy=0.5, distance=1.0),
        cheapest_eviction.Prices(copy=0.25, distance=0.25),
        cheapest_eviction.Prices(copy=2.0, distance=0.25),
        cheapest_eviction.Prices(copy=0.5, draw=1),
        cheapest_eviction.Prices(copy=2.0, distance=1.0, draw=2),
        cheapest_eviction.Prices(copy=0.1, draw=3),
        cheapest_eviction.Prices(copy=4.0, distance=0.25, draw=4),
        cheapest_eviction.Prices(copy=0.25, distance=1.0, draw=5),
        cheapest_eviction.Prices(copy=1.0, draw=6),
        cheapest_eviction.Prices(copy=0.5, distance=0.25, draw=7),
        cheapest_eviction.Prices(copy=8.0, draw=8),
    ),
}
"""Additional solvers by default, for steps so small that there is time left."""
SEARCHES: dict[frozenset[str], Solver] = {
    frozenset({"recompute"}): rerun_search.solver(RECOMPUTE[0]),
    frozenset({"swap", "recompute"}): rerun_search.solver(EVICT[0], rerun_search.SHORT_VISITS, EVICT_PRICE),
}
"""The search that the default solvers end with. One pass is close to the best choice where swaps are allowed, and far
from it for graphs with irregular reads where they are not: so it is tried for all steps there, and otherwise for those
so small that there is time left.
"""
