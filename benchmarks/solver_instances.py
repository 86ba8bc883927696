"""Public instances of rematerialisation: tfswap's planner compared with CP-SAT, checkpoints and Checkmate's rounding.

    python benchmarks/solver_instances.py FOLDER                    # all instances in a folder
    python benchmarks/solver_instances.py FOLDER --only VGG random_layered_n100 --limit-s 60

FOLDER has graphs as in github.com/haoming-codes/moccasin; instances/graphs.py describes the format.

Each instance is scheduled at 90%, 80% and 60% of the peak of its given order, and at the lowest budget that tfswap's
search is found to meet in that order; budgets below the largest inputs and output of a node are left out. "ladders" are
the planner's default solvers, "search" is planner/solvers/rerun_search.py for longer, both in the given order, and "own
orders" the latter in the orders that tfswap makes of it. Live bytes are the measure, and times are the instance's own.

A cell is the time of what runs again, as a share of each node's once: "-" where a solver found no schedule, "none"
where CP-SAT has proven that its formulation has none, which allows two runs of a node, in the given order. "bound" is
what it has proven of that formulation.

Every schedule is replayed by instances/graphs.py, which no solver uses: each input is there, and the peak is within the
budget. Seconds are CPU time, of one process on one thread. CP-SAT has one worker and --limit-s for each budget; the
paper gives it 1,800 s below 500 nodes, and 3,600 s from there on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from instances import checkmate, moccasin, planned
from instances.graphs import Instance, read_instance

from tfswap.errors import OpLibraryError, TfswapError
from tfswap.native.load import load

SHARES = (0.9, 0.8, 0.6)
MOST_ROUNDED = 100
"""The most nodes of graphs for which Checkmate's program is solved: it has some nodes times edges columns."""
OURS, OTHERS = ("ladders", "search", "own_orders"), ("cpsat", "sqrt", "checkmate")
CLOSE, QUICK = 1.01, 0.01
"""The times to reach: of the step, and of the search, as shares of CP-SAT's."""


def cpsat(instance: Instance, budget: int, limit_s: float) -> tuple[moccasin.Found, float]:
    """What CP-SAT finds, and its seconds."""
    started = time.process_time()
    found = moccasin.solve(instance, budget, limit_s)
    return found, time.process_time() - started


class Cell:
    """One instance at one budget."""

    def __init__(self, instance: Instance, share: float, budget: int, limit_s: float):
        self.instance, self.budget, self.limit_s = instance, budget, limit_s
        self.row: dict[str, Any] = {
            "instance": instance.name,
            "nodes": len(instance.order),
            "share": share,
            "budget": budget,
        }

    def compare(self, known: dict[str, Any]) -> dict[str, Any]:
        """The row with each solver's figures; those in `known` are taken as they are."""
        for name in (*OURS, *OTHERS):
            solve = getattr(self, f"_{name}")
            started = time.process_time()
            self.row[name] = known[name] if name in known else solve()
            self.row[name].setdefault("s", time.process_time() - started)
        return self.row

    def _judged(self, order: list[int] | None) -> dict[str, Any]:
        if order is None:
            return {"extra": None}
        peak = self.instance.peak_of(order)
        if peak > self.budget:
            raise AssertionError(f"{self.instance.name}: a schedule for {self.budget} has a peak of {peak}")
        return {"extra": self.instance.extra_time(order)}

    def _ladders(self) -> dict[str, Any]:
        return self._judged(planned.ladders(self.instance, self.budget))

    def _search(self) -> dict[str, Any]:
        return self._judged(planned.search(self.instance, self.budget))

    def _own_orders(self) -> dict[str, Any]:
        return self._judged(planned.own_orders(self.instance, self.budget))

    def _sqrt(self) -> dict[str, Any]:
        return self._judged(planned.checkpoints(self.instance, self.budget))

    def _cpsat(self) -> dict[str, Any]:
        # OR-Tools and TensorFlow, which the core library needs, do not run in one process.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found, seconds = pool.submit(cpsat, self.instance, self.budget, self.limit_s).result()
        return {**self._judged(found.order), "s": seconds, "bound": found.bound, "impossible": found.impossible}

    def _checkmate(self) -> dict[str, Any]:
        if len(self.instance.order) > MOST_ROUNDED:
            return {"extra": None, "left_out": True}
        return self._judged(checkmate.solve(self.instance, self.budget, self.limit_s))


def cells(instance: Instance, limit_s: float, earlier: Sequence[dict[str, Any]]) -> Iterator[Cell]:
    """Those of an earlier run, where that has the instance."""
    if earlier:
        yield from (Cell(instance, row["share"], row["budget"], limit_s) for row in earlier)
        return
    for share in SHARES:
        budget = math.floor(instance.peak * share)
        if budget >= instance.floor:
            yield Cell(instance, share, budget, limit_s)
    lowest = planned.lowest(instance)
    yield Cell(instance, lowest / instance.peak, lowest, limit_s)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def line(row: dict[str, Any]) -> str:
    """A row of a Markdown table."""
    exact, name = row["cpsat"], f"{row['instance'][:24]} ({row['nodes']})"
    texts = [name, f"{row['share']:.1%}"]
    for solver in OURS:
        texts += [percent(row[solver]["extra"]), seconds(row[solver])]
    texts += ["none" if exact["impossible"] else percent(exact["extra"]), seconds(exact), percent(exact["bound"])]
    texts += [percent(row["sqrt"]["extra"])]
    texts += ["" if row["checkmate"].get("left_out") else percent(row["checkmate"]["extra"])]
    return f"| {' | '.join(texts)} |"


def seconds(figures: dict[str, Any]) -> str:
    return f"{figures['s']:.2f}"


HEADER = (
    "| instance (nodes) | budget | ladders | s | search | s | search, own orders | s | CP-SAT | s | bound | sqrt(n) "
    "| Checkmate |\n| " + " | ".join(["---"] * 13) + " |"
)


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """How tfswap's planner compares with CP-SAT."""
    for name, shown in zip(OURS, ("ladders", "search", "search in its own orders"), strict=True):
        both = [row for row in rows if row[name]["extra"] is not None and row["cpsat"]["extra"] is not None]
        close = sum((1 + row[name]["extra"]) <= CLOSE * (1 + row["cpsat"]["extra"]) for row in both)
        quick = sum(row[name]["s"] <= QUICK * row["cpsat"]["s"] for row in both)
        alone = sum(row[name]["extra"] is not None and row["cpsat"]["extra"] is None for row in rows)
        missed = sum(row[name]["extra"] is None and row["cpsat"]["extra"] is not None for row in rows)
        yield (
            f"{shown}: both meet {len(both)} budgets, in {close} of them within {CLOSE - 1:.0%} of CP-SAT's time, and "
            f"in {quick} in {QUICK:.0%} of its seconds; {alone} that CP-SAT does not meet, {missed} that it alone meets"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder with the instances, or one of them")
    parser.add_argument("--only", nargs="*", default=[""], help="instances whose names begin like this")
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds for CP-SAT, and for Checkmate's program")
    parser.add_argument("--json", type=Path, help="also write the figures here, after each budget")
    parser.add_argument("--others", type=Path, help="an earlier --json: its budgets, and the others' figures")
    args = parser.parse_args()
    paths = (
        sorted(args.folder.glob("*.json"), key=lambda p: p.stat().st_size) if args.folder.is_dir() else [args.folder]
    )
    paths = [path for path in paths if path.name.startswith(tuple(args.only))]
    if not paths:
        parser.error(f"{args.folder} has no file *.json whose name begins with one of {args.only}")
    earlier = json.loads(args.others.read_text("utf-8")) if args.others else []
    known = {(row["instance"], row["budget"]): {n: row[n] for n in OTHERS if n in row} for row in earlier}
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(OpLibraryError):
        load()  # in which the search runs
    print(HEADER, flush=True)
    try:
        for path in paths:
            instance = read_instance(path)
            for cell in cells(instance, args.limit_s, [row for row in earlier if row["instance"] == instance.name]):
                rows.append(cell.compare(known.get((instance.name, cell.budget), {})))
                print(line(rows[-1]), flush=True)
                if args.json:
                    args.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    except TfswapError as error:
        parser.error(str(error))
    print("", *summary(rows), sep="\n")


if __name__ == "__main__":
    main()
