"""What a swapping solver decides about: the gaps between a tensor's uses, and the memory that must shrink.

Positions count kernels in the chosen order. Live bytes are the simulator's, without fragmentation: solvers
aim at live bytes, and the planner then asks the allocator's simulation what the result really peaks at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tfswap.analysis.cost import Rates
from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.ir.ops import is_view
from tfswap.ir.types import ELEMENT_BYTES
from tfswap.planner.schedule import Interval, build_schedule
from tfswap.planner.simulate import NOTHING_KNOWN, Resident, simulate_memory


class Gap(NamedTuple):
    """A stretch in which a value waits: read (or made) at `start`, next read at `end`."""

    value: int
    nbytes: int
    made: int
    start: int
    end: int


@dataclass(frozen=True)
class Problem:
    """One step in one order.

    Attributes:
        order: kernels (node indices) in order.
        live_bytes: per position, the most live while that kernel runs with nothing moved.
        starts_s: per position, when that kernel starts if nothing stalls; one more entry for the end.
        gaps: gaps that a swap can use, by start.
        refusals: values that can't be swapped, with the reason.
    """

    flow: Dataflow
    order: list[int]
    rates: Rates
    cost_s: list[float]
    live_bytes: np.ndarray
    starts_s: np.ndarray
    gaps: list[Gap]
    refusals: dict[int, str]

    @property
    def live_peak_bytes(self) -> int:
        return int(self.live_bytes.max(initial=0))


Solver = Callable[[Problem, int], list[Interval] | None]
"""From a problem and a target of live bytes to what is absent when; None when the target is out of reach."""

MIN_SWAP_BYTES = 64 << 10
MIN_SWAP_SHARE = 0.001
"""A tensor below both, in bytes and as a share of the live peak, costs more in ops and edges than it frees."""


def make_problem(
    flow: Dataflow,
    order: Sequence[int],
    rates: Rates,
    cost_s: list[float],
    *,
    resident: Resident = NOTHING_KNOWN,
    keep: frozenset[int] = frozenset(),
) -> Problem:
    """Gaps and live bytes of `flow` in `order`.

    Args:
        resident: what is there before the step.
        keep: values that the user marked to stay.
    """
    order = list(order)
    memory = simulate_memory(flow, build_schedule(order, ()), resident=resident, live=True)
    uses: list[list[int]] = [[] for _ in flow.values]
    made = [-1] * len(flow.values)
    for position, i in enumerate(order):
        for _, v in flow.makes[i]:
            made[v] = position
            uses[v].append(position)
        for v in flow.reads[i]:
            if uses[v] and uses[v][-1] != position:
                uses[v].append(position)
    refusals = _refusals(flow, keep)
    smallest = min(MIN_SWAP_BYTES, MIN_SWAP_SHARE * max(memory.during_bytes, default=0))
    gaps: list[Gap] = []
    for v, positions in enumerate(uses):
        value = flow.values[v]
        if v in refusals or made[v] < 0 or value.nbytes < smallest:
            continue
        for start, end in pairwise(positions):
            if end - start > 1:
                gaps.append(Gap(v, value.nbytes, made[v], start, end))
    gaps.sort(key=lambda g: (g.start, g.end, g.value))
    starts = np.concatenate([[0.0], np.cumsum([cost_s[i] for i in order])])
    return Problem(flow, order, rates, cost_s, np.array(memory.during_bytes, dtype=np.int64), starts, gaps, refusals)


def _refusals(flow: Dataflow, keep: frozenset[int]) -> dict[int, str]:
    """Values that must not travel, with the reason that a report gives."""
    reasons: dict[int, str] = {}
    for v, value in enumerate(flow.values):
        if value.producer == PERSISTENT:
            reasons[v] = "there before the step: a variable, an argument or a constant"
        elif ELEMENT_BYTES.get(value.tensor.type.dtype, 0) == 0:
            reasons[v] = f"a {value.tensor.type.dtype} has no bytes to copy"
    for updates in flow.updates:
        for update in updates:
            if update.adopted is not None:
                reasons[update.adopted] = "a variable takes over its buffer"
    for v in flow.fetched:
        reasons[v] = "the caller gets it"
    for v in keep:
        reasons[v] = "marked with tfswap.keep"
    for (node, index), v in flow.value_of.items():
        if v not in reasons and flow.values[v].tensor != (node, index) and not is_view(node.op):
            reasons[v] = f"{node.op} {node.name} passes its buffer on in a way that can't be repeated"
    return reasons


def live_without(problem: Problem, absent: list[Gap]) -> np.ndarray:
    """Live bytes per position with these gaps' values absent in between."""
    change = np.zeros(len(problem.live_bytes) + 1, dtype=np.int64)
    for gap in absent:
        change[gap.start + 1] -= gap.nbytes
        change[gap.end] += gap.nbytes
    return problem.live_bytes + np.cumsum(change[:-1])
