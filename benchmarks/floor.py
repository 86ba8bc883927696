"""How low the planner comes: its floor beside what no plan can do without.

    python benchmarks/floor.py                            # all models of benchmarks/accuracy.py
    python benchmarks/floor.py mlp transformer --alive    # and what is in memory at the floor's peak
    python benchmarks/floor.py lstm --steps my_steps.py   # a file whose STEPS are functions that return step, arguments

No plan that keeps the order of kernels whole can take less than what is there throughout (variables, optimizer slots,
arguments, constants) and, beside it, the largest working set of a kernel: what it reads and allocates at once. Two such
sums: "in place" has each kernel write over inputs wherever it can, "fresh" has every output in a buffer of its own. A
loop is one kernel, with all that its iterations save and do not swap. The floor is the smallest limit that is planned;
"live" is that plan's peak if memory never fragmented, "time" its simulated time over that of the kernels alone. The
arena is one free region besides what is there throughout. Nothing runs: steps are traced, analysed and planned.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from accuracy import MIB, MODELS

from tfswap import progress
from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.analysis.device import DeviceModel
from tfswap.frontends.pipeline import Optimizer
from tfswap.planner.allocator import round_up
from tfswap.planner.schedule import build_schedule
from tfswap.planner.simulate import Resident, simulate_memory

ARENA_BYTES = 1 << 40


def working_set_bytes(flow: Dataflow, kernel: int, *, in_place: bool) -> int:
    """What `kernel` reads and allocates at its worst, besides what is there throughout the step."""
    made, forwards = dict(flow.makes[kernel]), dict(flow.forwards[kernel])
    temp_forwards = flow.temp_forwards.get(kernel, {})
    reads = [v for v in flow.reads[kernel] if flow.values[v].producer != PERSISTENT]
    free = [v for v in reads if reads.count(v) == 1] if in_place else []
    held = most = sum(round_up(flow.values[v].nbytes) for v in set(reads))
    temps: list[int] = []
    for event, amount in flow.events[kernel]:
        if event == "free":
            held -= temps[amount]
            continue
        nbytes, candidates = amount, temp_forwards.get(len(temps), ())
        if event == "out":
            if amount not in made:
                continue
            nbytes, candidates = flow.values[made[amount]].nbytes, forwards.get(made[amount], ())
        taken = next((v for v in candidates if v in free), None)
        if taken is not None:
            free.remove(taken)
        bytes_ = round_up(nbytes) if taken is None else 0
        if event == "temp":
            temps.append(bytes_)
        held += bytes_
        most = max(most, held)
    return most


def measure(name: str, make: Callable[[], Any], alive: bool) -> dict[str, Any]:
    import tensorflow as tf

    from tfswap.frontends.grappler import as_planned
    from tfswap.importers.function import import_function

    step, arguments = make()
    concrete = tf.function(step).get_concrete_function(*arguments)
    device = DeviceModel(intra_op_threads=2, inter_op_threads=2)
    optimizer = Optimizer(as_planned(import_function(concrete, arguments), concrete, device), device)
    there = optimizer.flow.persistent_bytes
    chunks = ((0, there, True), (there, ARENA_BYTES, False))
    optimizer.suppose(Resident(there, chunks, instantiated=True))
    started = time.process_time()
    lowest = optimizer.candidate(optimizer.floor_bytes())
    took_s = time.process_time() - started
    assert lowest is not None, "at the floor there is a plan"
    flow, found = lowest.variant.flow, lowest.candidate
    kernels = [i for i in range(len(flow.nodes)) if flow.is_kernel[i]]
    bounds = {
        p: max(working_set_bytes(flow, i, in_place=p == "in place") for i in kernels) for p in ("in place", "fresh")
    }
    steps = build_schedule(*found.choice)
    resident = optimizer.planner_of(lowest.variant).resident
    live = simulate_memory(flow, steps, resident=resident, live=True, detail=True)
    floor = found.peak_bytes
    row = {
        "model": name,
        "persistent_bytes": there,
        "in_place_bytes": there + bounds["in place"],
        "fresh_bytes": there + bounds["fresh"],
        "floor_bytes": floor,
        "live_bytes": live.peak_bytes,
        "time": found.timing.total_s / found.timing.compute_s,
        "unoptimised_bytes": optimizer.baseline.peak_bytes,
        "took_s": took_s,
    }
    columns = ("persistent_bytes", "in_place_bytes", "fresh_bytes", "live_bytes", "floor_bytes", "unoptimised_bytes")
    print(
        f"{name:<14}{len(kernels):>8}"
        + "".join(f"{row[column] / MIB:>13.1f}" for column in columns)
        + f"{floor / row['in_place_bytes']:>10.3f}{floor / row['fresh_bytes']:>9.3f}{row['time']:>8.2f}{took_s:>8.1f}",
        flush=True,
    )
    if alive:
        kind, subject = steps[live.peak_step]
        node = flow.nodes[subject if kind in ("run", "rerun") else flow.values[subject].producer]
        print(f"  at step {live.peak_step} of {len(steps)}: {kind} {node.op} {node.name}")
        for v in live.alive_at_peak:
            value = flow.values[v]
            if value.producer != PERSISTENT and value.nbytes > floor / 1000:
                print(f"  {value.nbytes / MIB:>10.2f}  {value.tensor.node.op} {value.tensor.name}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--steps", type=Path, help="models of one's own: a file that defines STEPS, by name")
    parser.add_argument("--alive", action="store_true", help="list what is in memory at the floor's peak")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    models = MODELS if args.steps is None else runpy.run_path(str(args.steps))["STEPS"]
    unknown = [name for name in args.models if name not in models]
    if unknown:
        parser.error(f"no model is named {unknown[0]!r}; there are {', '.join(models)}")
    columns = ("persistent", "in place", "fresh", "live", "floor", "unoptimised")
    print(f"{'MiB':<14}{'kernels':>8}" + "".join(f"{c:>13}" for c in columns) + "   floor over both    time  took, s")
    names = args.models or models
    rows = [measure(name, models[name], args.alive) for name in progress.over("models", names)]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
