"""Moccasin's formulation of rematerialisation, solved by OR-Tools' CP-SAT.

Bartan, Li, Teague, Lott, Dilkina, "Moccasin: Efficient Tensor Rematerialization for Neural Networks" (ICML 2023):
each node has up to two retention intervals, each of which begins with a run of it and holds its output. Events are
staged: stage j has a place for each of the first j nodes of the given order, and the last of these is for the first run
of node j. At each run there is an interval of each input that holds it. The bytes of all intervals never exceed the
budget.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from instances.graphs import Instance
from tfswap.errors import TfswapError


class Missing(TfswapError):
    """A solver that this benchmark compares with is not installed."""


class Found(NamedTuple):
    """The result of a search.

    Attributes:
        order: of the best schedule; None where none was found.
        bound: no schedule of this formulation takes less extra time, as a share of each node's once.
        impossible: whether no schedule of this formulation keeps the budget.
    """

    order: list[int] | None
    bound: float
    impossible: bool


def solve(instance: Instance, budget: int, limit_s: float, workers: int = 1) -> Found:
    """The schedule of the least time within a budget. Raises Missing."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise Missing("OR-Tools, or a package that it needs, is missing: pip install 'tfswap[bench]'") from error
    model = cp_model.CpModel()
    runs = _Runs(model, instance)
    runs.keep(budget)
    total = sum(instance.times)
    model.minimize(sum(instance.times[v] * again for v, again in zip(instance.order, runs.again, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    bound = max(0.0, solver.best_objective_bound) / max(1, total)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Found(runs.order(solver), bound, False)
    return Found(None, bound, status == cp_model.INFEASIBLE)


class _Runs:
    """The intervals of one instance. Nodes have their numbers in the given order here.

    Attributes:
        again: per node, whether it has a second interval.
    """

    def __init__(self, model: Any, instance: Instance):
        self._model, self._instance = model, instance
        count = len(instance.order)
        last = _place(count - 1, count - 1)
        self._first = [_place(n, n) for n in range(count)]
        self._first_end = [model.new_int_var(self._first[n], last, f"end {n}") for n in range(count)]
        self.again = [model.new_bool_var(f"again {n}") for n in range(count)]
        self._second = [self._start(n, count) for n in range(count)]
        self._second_end = [model.new_int_var(0, last, f"second end {n}") for n in range(count)]
        place = {v: n for n, v in enumerate(instance.order)}
        for v in instance.order:
            for u in instance.inputs[v]:
                self._read(place[u], place[v])
        for n in range(count):
            model.add_hint(self.again[n], 0)

    def _start(self, n: int, count: int) -> Any:
        from ortools.sat.python import cp_model

        if n + 1 == count:
            self._model.add(self.again[n] == 0)
            return self._model.new_constant(self._first[n])
        stages = (_place(stage, n) for stage in range(n + 1, count))
        return self._model.new_int_var_from_domain(cp_model.Domain.from_values([*stages]), f"second {n}")

    def _read(self, u: int, v: int) -> None:
        """At each run of `v` an interval of `u` holds its output."""
        model = self._model
        for run, start in enumerate((self._first[v], self._second[v])):
            by_first = model.new_bool_var(f"{v} run {run} reads {u}'s first")
            runs = [self.again[v]] if run else []
            model.add(self._first_end[u] >= start).only_enforce_if(by_first, *runs)
            by_second = [~by_first, *runs]
            model.add(self.again[u] == 1).only_enforce_if(*by_second)
            model.add(self._second[u] < start).only_enforce_if(*by_second)
            model.add(self._second_end[u] >= start).only_enforce_if(*by_second)

    def keep(self, budget: int) -> None:
        model, sizes = self._model, self._instance.ordered(self._instance.sizes)
        intervals: list[Any] = []
        for n in range(len(sizes)):
            first, end, second, second_end = self._first[n], self._first_end[n], self._second[n], self._second_end[n]
            intervals.append(model.new_interval_var(first, end - first + 1, end + 1, f"interval {n}"))
            length = model.new_int_var(1, _place(len(sizes) - 1, len(sizes) - 1) + 1, f"length {n}")
            intervals.append(
                model.new_optional_interval_var(second, length, second_end + 1, self.again[n], f"second interval {n}")
            )
            model.add(second > end).only_enforce_if(self.again[n])
        model.add_cumulative(intervals, [size for size in sizes for _ in range(2)], budget)

    def order(self, solver: Any) -> list[int]:
        starts = [(self._first[n], n) for n in range(len(self._first))]
        starts += [(solver.value(self._second[n]), n) for n, again in enumerate(self.again) if solver.value(again)]
        return [self._instance.order[n] for _, n in sorted(starts)]


def _place(stage: int, n: int) -> int:
    """The place of node `n` in a stage, both counted from 0."""
    return stage * (stage + 1) // 2 + n
