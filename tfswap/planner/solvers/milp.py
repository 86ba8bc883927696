"""The least time for a target of live bytes, by integer programming: the measure of the fast solvers.

After Checkmate (Jain et al., MLSys 2020, section 4), with swaps. The order of first runs is given. `milp_stages` says
what runs in each stage and when values are present, where Checkmate has FREE variables; `milp_copies` follows copies;
`milp_memory` and `milp_time` are the limits; `milp_choices` decodes a solution.

Copies are fluid, so the bound holds for any placing of them. Choices decoded from a solution seldom take longer.

Not handled: a kernel that runs twice in one stage, or out of order in one; recomputing kernels that make only values
too small to matter.
"""

from __future__ import annotations

from typing import NamedTuple

from tfswap.plan.schedule import build_schedule
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.problem import Choice, Problem
from tfswap.planner.solvers.milp_choices import Solution
from tfswap.planner.solvers.milp_copies import Copies
from tfswap.planner.solvers.milp_memory import MemoryRows
from tfswap.planner.solvers.milp_program import INFEASIBLE, OPTIMAL
from tfswap.planner.solvers.milp_stages import Stages
from tfswap.planner.solvers.milp_time import TimeRows
from tfswap.simulator.timing import simulate_time

GAP_SHARE = 1e-3
"""An optimum is proven when no better one is left by more than this share of the step's time."""
SOLVE_S = 10.0
"""The time for one target, where the caller gives none."""
MAX_REPAIRS = 3
"""The most further searches. The program assumes that buffers are forwarded wherever they may be. Where the executor
does not forward some, the search is repeated for a target smaller by their bytes. The bound stays the first search's.
"""


class Optimum(NamedTuple):
    """The result of a search.

    Attributes:
        choice: the best one; None where there is none, or none was found in time (then `proven` is False).
        total_s: the simulated time of the step with it; infinite without one.
        bound_s: no choice is faster; infinite where there is provably none.
        proven: whether the search was complete, and not ended by the time limit. `total_s` - `bound_s` is then what
            placing the copies adds.
    """

    choice: Choice | None
    total_s: float
    bound_s: float
    proven: bool


def solve(problem: Problem, target: LiveTarget) -> Choice | None:
    """As `optimise`, with the signature of all solvers, for SOLVE_S at most; None also where none was found in time."""
    return optimise(problem, target.alone(), SOLVE_S).choice


def optimise(problem: Problem, target_bytes: int, limit_s: float) -> Optimum:
    """The fastest way to at most `target_bytes` live, searched for at most `limit_s` seconds.

    Raises TfswapError where SciPy is missing.
    """
    found = _search(problem, target_bytes, target_bytes, limit_s)
    result, aim = found, target_bytes
    for _ in range(MAX_REPAIRS):
        if result.choice is None or (over := problem.live_peak_of(result.choice) - target_bytes) <= 0:
            break
        aim -= over
        result = _search(problem, aim, target_bytes, limit_s)
    else:
        result = Optimum(None, float("inf"), found.bound_s, False)
    return result._replace(
        bound_s=found.bound_s, proven=found.proven and (result is found or result.choice is not None)
    )


def _search(problem: Problem, aim_bytes: int, target_bytes: int, limit_s: float) -> Optimum:
    """The best choice for `aim_bytes`; of the ways to place its copies the fastest within `target_bytes`."""
    stages = Stages(problem)
    copies = Copies(stages)
    MemoryRows(copies, aim_bytes)
    TimeRows(copies)
    status, values, bound = stages.program.solve(limit_s, GAP_SHARE)
    infinity = float("inf")
    if status == INFEASIBLE:
        return Optimum(None, infinity, infinity, True)
    bound_s = stages.seconds(bound)
    if values is None:
        return Optimum(None, infinity, bound_s, False)
    # Live bytes for placing copies ignore buffers that evictions let kernels forward: tight placing fits as well.
    choice = min(
        Solution(copies, aim_bytes, values).choices(),
        key=lambda c: (max(target_bytes, problem.live_peak_of(c)), _seconds(problem, c)),
    )
    return Optimum(choice, _seconds(problem, choice), bound_s, status == OPTIMAL)


def _seconds(problem: Problem, choice: Choice) -> float:
    return simulate_time(problem.flow, build_schedule(*choice), problem.cost_s, problem.rates).total_s
