"""How many runs are simulated to find the order of a step's sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from planner_problems import TWO_CORES

from tfswap.ir.graph import Graph, Node
from tfswap.ir.text import parse_graph
from tfswap.simulator import sum_order
from tfswap.simulator.sum_order import MOST_RUNS, simulate_sums

pytestmark = pytest.mark.fast


def racing(branches: int) -> Graph:
    """A sum of three terms, each of which another kernel reads too: whichever ends first."""
    lines = ["%x = Placeholder() {dtype=float32} -> float32[256]"]
    for k in range(branches):
        for term in "abc":
            lines.append(f"%{term}{k} = Exp(%x) -> float32[256]")
        lines.append(f"%sum{k} = AddN(%a{k}, %b{k}, %c{k}) {{N=3, T=float32}} -> float32[256]")
        lines += [f"%read_{term}{k} = Exp(%{term}{k}) -> float32[256]" for term in "abc"]
    results = [f"%{name}{k}" for k in range(branches) for name in ("sum", "read_a", "read_b", "read_c")]
    return parse_graph("\n".join([*lines, "feeds %x", "fetches " + ", ".join(results), ""]))


def costs_of(differ: bool) -> Callable[[Node], float]:
    return lambda node: (1 + hash_of(node.name) % 7) * 1e-5 if differ else 1e-5


def hash_of(name: str) -> int:
    return sum(map(ord, name))


@pytest.mark.parametrize("branches", [1, 6])
@pytest.mark.parametrize("differ", [False, True])
def test_runs_that_can_change_nothing_are_left_out(
    branches: int, differ: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    whole = sum_order._Run.run
    monkeypatch.setattr(sum_order._Run, "run", lambda self: runs.append(1) or whole(self))
    few = simulate_sums(racing(branches), TWO_CORES, costs_of(differ), {})
    made = len(runs)
    monkeypatch.setattr(sum_order, "leads_by", lambda counts: 0)
    assert few == simulate_sums(racing(branches), TWO_CORES, costs_of(differ), {})
    assert MOST_RUNS // 2 < made < len(runs) - made == MOST_RUNS


def test_the_lead_of_the_most_frequent() -> None:
    assert sum_order.leads_by(Counter("aab")) == 1
    assert sum_order.leads_by(Counter("aa")) == 2
    assert sum_order.leads_by(Counter("ab")) == 0
