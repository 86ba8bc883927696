"""What an order of kernels alone saves: live peaks of the traced order, of the heuristics', and of the searched one.

    python benchmarks/orders.py                  # the models of benchmarks/accuracy.py and the nets of the headlines
    python benchmarks/orders.py unet DCGAN       # those whose names begin so
    python benchmarks/orders.py AlexNet --sets 100000   # with more sets for the exact solver

"heuristics" is the order with the lowest live peak of planner/ordering.py without its search, "searched" with it.
Nothing is moved. "bound" is what no order can do without: what is held throughout and, at the worst of the kernels at
the searched order's peak, what it needs and what in every order has been made before it and is read after it.
"optimum" is the exact solver's
(planner/exact_order.py), given `--sets` sets of kernels, or "-" where these are too few; where the searched order meets
the bound, it is the optimum too. Seconds are CPU time: of all orders without the search, and of the search. Steps are
traced and analysed, and do not run.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from accuracy import MODELS
from papers.kinds import NETS

from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.kernels.alignment import round_up
from tfswap.plan.schedule import build_schedule
from tfswap.planner import exact_order, order_search, ordering
from tfswap.simulator.memory import simulate_memory
from tfswap.simulator.working_set import working_set_bytes

MIB = 2**20
MOST_ROWS = 50
"""The most kernels at which the bound is computed: those with the most live bytes in the searched order."""
MOST_EXACT = 150
"""The most kernels of steps that the exact solver is given."""
ROW = "{:<44}{:>8}{:>10}{:>12}{:>10}{:>9}{:>10}{:>10}{:>10}{:>11}"


def facts_of(make: Callable[[], Any]) -> tuple[Dataflow, list[float]]:
    """A step's facts, and the seconds of its nodes."""
    import tensorflow as tf

    from tfswap.compiler.compiler import Optimizer
    from tfswap.compiler.grappler import as_planned
    from tfswap.compiler.options import Options
    from tfswap.device import arena, machine
    from tfswap.importers.function import import_function

    step, arguments = make()
    traced = step if hasattr(step, "get_concrete_function") else tf.function(step)
    concrete = traced.get_concrete_function(*arguments)
    device, model = machine.current_device()
    graph = as_planned(import_function(concrete, arguments), concrete, model)
    planner = Optimizer(graph, model, Options(), snapshot=arena.snapshot(device)).planner
    return planner.flow, planner.cost_s


def live_peak(flow: Dataflow, order: Sequence[int]) -> int:
    return simulate_memory(flow, build_schedule(order, ()), live=True).peak_bytes


def bound_bytes(flow: Dataflow, searched: Sequence[int]) -> int:
    """The live peak that no order passes below."""
    during = simulate_memory(flow, build_schedule(searched, ()), live=True).during_bytes
    rows = sorted(range(len(searched)), key=lambda place: -during[place])[:MOST_ROWS]
    before, after = [0] * len(flow.nodes), [0] * len(flow.nodes)  # a bit per node
    order = ordering.traced_order(flow)
    for i in order:
        for d in flow.deps[i]:
            before[i] |= before[d] | 1 << d
    for i in reversed(order):
        for u in flow.users[i]:
            after[i] |= after[u] | 1 << u
    readers = [0] * len(flow.values)
    for i, held in enumerate(flow.held):
        for v in held:
            readers[v] |= 1 << i
    made = [v for v, value in enumerate(flow.values) if value.producer != PERSISTENT and value.nbytes]
    there = sum(round_up(flow.values[v].nbytes) for v in flow.persistent)
    most = 0
    for i in (searched[place] for place in rows):
        own = {*flow.held[i], *(v for _, v in flow.makes[i])}
        crossing = (
            v
            for v in made
            if before[i] >> flow.values[v].producer & 1
            and (readers[v] & after[i] or v in flow.fetched)
            and v not in own
        )
        most = max(most, working_set_bytes(flow, i) + sum(round_up(flow.values[v].nbytes) for v in crossing))
    return there + most


def measure(make: Callable[[], Any], sets: int) -> dict[str, Any]:
    flow, cost_s = facts_of(make)
    begin = time.process_time()
    ranked = ordering.rank_orders(flow, cost_s)
    heuristics_s = time.process_time() - begin
    best = min(ranked, key=lambda order: live_peak(flow, order))
    begin = time.process_time()
    searched = order_search.searched_order(flow, best)
    search_s = time.process_time() - begin
    exact = exact_order.lowest_order(flow, searched, sets, MOST_EXACT)
    traced = [i for i in ordering.traced_order(flow) if flow.is_kernel[i]]
    return {
        "kernels": len(best),
        "traced": live_peak(flow, traced),
        "heuristics": live_peak(flow, best),
        "searched": live_peak(flow, searched),
        "bound": bound_bytes(flow, searched),
        "optimum": None if exact is None else live_peak(flow, exact),
        "heuristics_s": heuristics_s,
        "search_s": search_s,
    }


def cells_of(name: str, row: dict[str, Any]) -> list[str]:
    def mib(nbytes: int | None) -> str:
        return "-" if nbytes is None else f"{nbytes / MIB:.1f}"

    optimum = row["searched"] if row["searched"] == row["bound"] else row["optimum"]
    return [
        name,
        str(row["kernels"]),
        *map(mib, (row["traced"], row["heuristics"], row["searched"])),
        f"{row['searched'] / row['heuristics'] - 1:+.1%}",
        *map(mib, (row["bound"], optimum)),
        f"{row['heuristics_s']:.2f}",
        f"{row['search_s']:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", help="beginnings of names; all by default")
    parser.add_argument("--sets", type=int, default=300, help="the most sets of kernels of the exact solver")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()

    from papers.harness import nets

    import tfswap.ops

    assert tfswap.ops.status().loaded, "built before the clock starts"
    makes: dict[str, Callable[[], Any]] = dict(MODELS)
    for name, (net, size) in NETS.items():
        makes[name] = lambda net=net, size=size: nets.NETS[net](**size)
    if args.nets:
        makes = {name: make for name, make in makes.items() if name.startswith(tuple(args.nets))}
    print(
        ROW.format(
            *("net", "kernels", "traced", "heuristics", "searched", "", "bound", "optimum", "other, s", "search, s")
        )
    )
    rows: dict[str, Any] = {}
    for name, make in makes.items():
        rows[name] = measure(make, args.sets)
        print(ROW.format(*cells_of(name, rows[name])), flush=True)
    changes = [row["searched"] / row["heuristics"] - 1 for row in rows.values()]
    print(
        f"searched over heuristics: {min(changes):+.1%} to {max(changes):+.1%}, mean {sum(changes) / len(changes):+.1%}"
    )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
