"""How a step's time grows with what is moved, and with how slow the link to the host is.

Moves: a chain of small layers, of which the first few tensors of one plan are swapped, more and more of them. Tensors
are small, so that what is measured is what a swap costs besides its bytes. Forms are in one process and take turns.

Planning: CPU seconds and memory against the nodes of a step, by benchmarks/scale.py, to 443,130 of them.

Links: a ResNet of 152 layers at ImageNet's size (benchmarks/scale.py) on a described V100 whose link to the host is
another. Devices: on other described GPUs, with their own links. All of these two is simulated.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from papers.harness.page import Plot, Section, Series, Table, mib
from papers.harness.turns import quartiles, reported_by, written_by

PLANNING, MOVES, LINKS, DEVICES = "planning", "moves", "links", "devices"
PARTS = PLANNING, MOVES, LINKS, DEVICES
SCRIPT = Path(__file__).parent.parent / "scale.py"
DEPTHS = "50", "152", "500", "1001", "1517", "2500", "6017"
LAYERS, WIDTH, ROWS, ROUNDS = 256, 64, 64, 61
COUNTS = 0, 32, 64, 128, 255
BATCH, DEPTH, DEVICE = 32, 152, "v100-pcie"
RATES = 4, 16, 64
"""GB/s of the link, each way."""
OTHERS = "k40c", "p100", "v100-pcie", "v100-nvlink", "a100", "h100", "rtx-4090"
SHARES = 0.8, 0.6, 0.4
"""Limits, of the unoptimised peak."""


def measure(part: str) -> Any:
    if part == PLANNING:
        return written_by(SCRIPT, "--layers", *DEPTHS)
    return reported_by({"module": "scale", "part": part}, 1000)


def child(spec: dict[str, Any]) -> None:
    print(json.dumps({MOVES: _moves, LINKS: _links, DEVICES: _devices}[spec["part"]]()))


def _moves() -> dict[str, Any]:
    import accuracy
    import tensorflow as tf

    import tfswap

    swaps = ("swap",)
    step, (x,) = accuracy.mlp(LAYERS, WIDTH, ROWS)
    floor = 0
    try:
        tfswap.optimize(tf.function(step), memory_limit=1, tactics=swaps)(x)
    except tfswap.InfeasibleMemoryLimit as error:
        floor = error.floor_bytes
    lowest = tfswap.optimize(tf.function(step), memory_limit=int(1.01 * floor), tactics=swaps)
    lowest(x)
    whole = lowest.plan()
    made: dict[int, Any] = {}
    for count in COUNTS:
        plan = dataclasses.replace(whole, evictions=whole.evictions[:count])
        made[len(plan.evictions)] = tfswap.optimize(tf.function(step), plan=plan, tactics=swaps)
    took: dict[int, list[tuple[float, float]]] = {count: [] for count in made}
    for round_ in range(ROUNDS + 3):
        for count, one in made.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            one(x).numpy()
            if round_ >= 3:
                took[count].append((time.perf_counter() - started, time.process_time() - cpu_started))
    base = took[0]
    rows = []
    for count, times in took.items():
        more = [(a - b, c - d) for (a, c), (b, d) in zip(times, base, strict=True)]
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        rows.append({"swapped": count, "took_s": medians})
        rows[-1]["more_s"] = [statistics.median(column) for column in zip(*more, strict=True)]
        rows[-1]["more_spread_s"] = [quartiles(column) for column in zip(*more, strict=True)]
    return {"layers": LAYERS, "tensor_bytes": 4 * WIDTH * ROWS, "rounds": ROUNDS, "rows": rows}


def _links() -> dict[str, Any]:
    from tfswap.kernels.hardware import described

    on = described(DEVICE)
    rates = [dataclasses.replace(on.rates, out_bytes_per_s=r * 1e9, in_bytes_per_s=r * 1e9) for r in RATES]
    return {"machine": on.title, "layers": DEPTH, "batch": BATCH, "rows": _simulated((on, one) for one in rates)}


def _devices() -> dict[str, Any]:
    from tfswap.kernels.hardware import described

    found = [described(name) for name in OTHERS]
    return {"layers": DEPTH, "batch": BATCH, "rows": _simulated((on, on.rates) for on in found)}


def _simulated(machines: Iterable[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """By swapping alone and by all tactics, each share's predicted time over the unoptimised step's, on machines with
    these rates.
    """
    import scale

    from tfswap.analysis.cost import Costs
    from tfswap.compiler.offline import offline_optimizer
    from tfswap.compiler.options import Options
    from tfswap.frontends.resizable_step import find_step
    from tfswap.ir.permits import TACTICS

    step, specs = scale.supernet(DEPTH, BATCH)
    rows = []
    for on, rates in machines:
        found = find_step(step, specs, device=on.device)
        for tactics in (("swap",), TACTICS):
            options = Options(tactics=tactics, host_limit_bytes=on.host_bytes)
            made = offline_optimizer(found.graph(), on.device, options, found.variables, Costs(rates))
            peak, ratios = made.baseline.peak_bytes, []
            for share in SHARES:
                candidate = made.search.fastest(int(share * peak) - made.extra_margin_bytes)
                ratios.append(candidate and made.baseline.time_ratio(candidate.candidate.timing.total_s))
            rate = rates.out_bytes_per_s / 1e9
            rows.append({"machine": on.title, "tactics": tactics, "rate": rate, "ratios": ratios, "peak_bytes": peak})
            rows[-1]["unoptimised_s"] = made.baseline.seconds
    return sorted(rows, key=lambda row: len(row["tactics"]))


def _each(count: int, more_s: float, spread_s: Sequence[float]) -> str:
    """What each of `count` swaps adds, in microseconds, with the quartiles."""
    if not count:
        return ""
    low_high = " to ".join(f"{1e6 * s / count:.0f}" for s in spread_s)
    return f"{1e6 * more_s / count:.0f}" + f" ({low_high})" * bool(spread_s)


@dataclass
class _Part:
    """What one kind of measurement adds to the section."""

    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    brief: str = ""


def present(found: dict[str, Any]) -> Section:
    present_part = {PLANNING: _planning_part, MOVES: _moves_part, LINKS: _links_part, DEVICES: _devices_part}
    parts = [show(found[kind]) for kind, show in present_part.items() if found.get(kind)]
    return Section(
        "Scale",
        "none of the papers has these",
        "; ".join(word for part in parts for word in part.words),
        "planning: bottleneck ResNets on small images, each size planned once",
        [table for part in parts for table in part.tables],
        [plot for part in parts for plot in part.plots],
        [note for part in parts for note in part.notes],
        brief="".join(part.brief for part in parts),
    )


def _planning_part(planning: Sequence[dict[str, Any]]) -> _Part:
    """How long planning takes."""
    part = _Part()
    part.tables.append(_planning(planning))
    part.plots.append(_growth(planning))
    most = planning[-1]
    part.brief = (
        f"{most['nodes']:,} nodes planned in {most['total_s']:.0f} s of CPU time, "
        f"{most['total_s'] / most['tracing_s']:.2f} of TensorFlow's tracing; for a limit that is a share "
        f"{share_total_s(most):.0f} s, {share_total_s(most) / most['tracing_s']:.2f}; over all sizes "
        f"{_over_tracing(planning, lambda row: row['total_s'])} and {_over_tracing(planning, share_total_s)}"
    )
    part.words.append(
        f"planning and rewriting a step of {most['nodes']:,} nodes takes {most['total_s']:.0f} s of CPU time, "
        f"{most['total_s'] / most['tracing_s']:.2f} of TensorFlow's tracing, for a limit in bytes, and "
        f"{share_total_s(most):.0f} s, {share_total_s(most) / most['tracing_s']:.2f} of it, for one that is a "
        f"share of the peak, which has to be predicted; {most['more_mib']:,.0f} MiB more than its trace; from "
        f"{planning[min(2, len(planning) - 1)]['nodes']:,} nodes on "
        f"{_over_n_log_n(planning[min(2, len(planning) - 1)], most):.2f} times what n log n gives (limits in bytes)"
    )
    part.notes.extend(_planning_notes(planning))
    return part


def _moves_part(moves: dict[str, Any]) -> _Part:
    """What a swapped tensor adds to a step."""
    part = _Part()
    lines = []
    for row in moves["rows"]:
        spreads = row.get("more_spread_s", [(), ()])
        each = [_each(row["swapped"], *which) for which in zip(row["more_s"], spreads, strict=True)]
        lines.append([str(row["swapped"]), *(f"{1e3 * t:.1f}" for t in row["took_s"]), *each])
    most = moves["rows"][-1]
    part.words.append(
        f"a swapped tensor of {moves['tensor_bytes'] // 1024} KiB adds "
        f"{1e6 * most['more_s'][0] / most['swapped']:.0f} us to a step, {most['swapped']} of them "
        f"{1e3 * most['more_s'][0]:.1f} ms"
    )
    title = (
        f"A step's time against the swaps in it, {moves['layers']} dense layers, tensors of "
        f"{moves['tensor_bytes'] // 1024} KiB, {moves['rounds']} rounds; of the tactics only swapping is counted, "
        "not recomputation and not encodings:"
    )
    columns = ("tensors swapped", "step, ms", "CPU time, ms", "us each", "us each, CPU")
    part.tables.append(Table(title, columns, lines))
    return part


def _links_part(links: dict[str, Any]) -> _Part:
    """Predicted times over links of several rates."""
    part = _Part()
    columns = ("tactics", "link, GB/s each way", *(f"{share:.0%}" for share in SHARES))
    lines, series = [], []
    for row in links["rows"]:
        reported = ["out of reach" if ratio is None else f"{ratio:.2f}" for ratio in row["ratios"]]
        lines.append([_named(row["tactics"]), f"{row['rate']:g}", *reported])
    for tactics in ("swapping alone", "all tactics"):
        for n, share in enumerate(SHARES):
            of = [row for row in links["rows"] if _named(row["tactics"]) == tactics]
            points = [(row["rate"], row["ratios"][n]) for row in of if row["ratios"][n] is not None]
            series.append(Series(f"{tactics}, {share:.0%}", points, joined=True))
    peak = mib(links["rows"][0]["peak_bytes"])
    title = f"A ResNet of {links['layers']} layers, 224x224, batch {links['batch']}, {peak} MiB, {links['machine']}"
    part.tables.append(Table(f"{title}; predicted time over unoptimised:", columns, lines))
    part.plots.append(Plot("scale_links", title, "link, GB/s each way", "predicted time over unoptimised", series))
    reported = [
        f"{_named(row['tactics'])} {row['ratios'][1]:.2f} at {row['rate']:g} GB/s"
        for row in links["rows"]
        if row["rate"] in (RATES[0], RATES[-1]) and row["ratios"][1] is not None
    ]
    part.words.append(f"at {SHARES[1]:.0%} of the peak, step time over unoptimised, simulated: {', '.join(reported)}")
    return part


def _devices_part(devices: dict[str, Any]) -> _Part:
    """Predicted times on described GPUs."""
    part = _Part()
    columns = ("GPU", "tactics", "link, GB/s each way", "unoptimised, ms", *(f"{share:.0%}" for share in SHARES))
    lines = []
    for row in devices["rows"]:
        reported = ["out of reach" if ratio is None else f"{ratio:.2f}" for ratio in row["ratios"]]
        lines.append(
            [
                row["machine"],
                _named(row["tactics"]),
                f"{row['rate']:.1f}",
                f"{1e3 * row['unoptimised_s']:.0f}",
                *reported,
            ]
        )
    title = (
        f"A ResNet of {devices['layers']} layers, 224x224, batch {devices['batch']}, on described GPUs with their "
        "own links; predicted time over unoptimised, at shares of its peak there:"
    )
    part.tables.append(Table(title, columns, lines))
    return part


def _over_tracing(rows: Sequence[dict[str, Any]], total_s: Callable[[dict[str, Any]], float]) -> str:
    """The least and the most of the time that TensorFlow takes to trace the step."""
    over = [total_s(row) / row["tracing_s"] for row in rows]
    return f"{min(over):.2f} to {max(over):.2f}"


def share_total_s(row: dict[str, Any]) -> float:
    """CPU seconds of planning for a limit that is a share, which takes the prediction of the unoptimised peak too."""
    return row["total_s"] + row["stages_s"]["unoptimised"]


def _planning_notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where planning takes longer than tracing, what else is broken, and what changes with the size."""
    from tfswap.compiler.grappler import MOST_NODES
    from tfswap.planner.planner import TWO_SOLVERS
    from tfswap.simulator.unordered import MOST_KERNELS, MOST_RUNS, STEPS

    longer = [f"{row['nodes']:,}" for row in rows if row["total_s"] > row["tracing_s"]]
    share = [f"{row['nodes']:,}" for row in rows if share_total_s(row) > row["tracing_s"]]
    reported = [
        f"{verb} takes longer than tracing at {_listed(which, len(rows))}."
        for verb, which in (("Planning for a limit in bytes", longer), ("For a limit that is a share, it", share))
        if which
    ]
    broken = [(row["layers"], sorted({*row["broken"]} - {"longer than tracing"})) for row in rows]
    return [
        *reported,
        *(f"{layers:,} layers: {', '.join(which)}." for layers, which in broken if which),
        f"n log n does not extrapolate from small sizes to large ones. Up to {TWO_SOLVERS:,} kernels two solvers are "
        f"asked at least, above that one may be alone. The unoptimised peak is predicted from {MOST_RUNS} runs of "
        f"small steps and from fewer of larger ones, {MOST_KERNELS // STEPS:,} kernels in all, down to a single run; "
        f"up to {MOST_NODES:,} nodes Grappler is asked for it as well.",
    ]


def _listed(which: Sequence[str], of: int) -> str:
    return "all of these sizes" if len(which) == of else f"{', '.join(which)} nodes"


def _planning(rows: Sequence[dict[str, Any]]) -> Table:
    stages = list(rows[0]["stages_s"])
    totals = "import to export", "of tracing", "for a share", "of tracing"
    columns = ("layers", "nodes", "tracing", *stages, *totals, "MiB traced", "MiB more")
    lines = []
    for row in rows:
        line = [f"{row['layers']:,}", f"{row['nodes']:,}", f"{row['tracing_s']:.1f}"]
        line += [f"{row['stages_s'][stage]:.1f}" for stage in stages]
        for total_s in (row["total_s"], share_total_s(row)):
            line += [f"{total_s:.1f}", f"{total_s / row['tracing_s']:.2f}"]
        lines.append([*line, f"{row['traced_mib']:,.0f}", f"{row['more_mib']:,.0f}"])
    title = (
        'CPU seconds of planning for 60% of the peak, each size in a process of its own and once. "import to export" '
        'is what a limit in bytes takes; one that is a share also takes "unoptimised", the prediction of that peak: '
        '"for a share". Grappler is TensorFlow\'s own work, which it does for graphs of up to 100,000 nodes; "import '
        'to export" leaves it out, and so does "of tracing":'
    )
    return Table(title, columns, lines)


def _growth(rows: Sequence[dict[str, Any]]) -> Plot:
    kinds: tuple[tuple[str, Callable[[dict[str, Any]], float]], ...] = (
        ("import to export", lambda row: row["total_s"]),
        ("the same for a limit that is a share", share_total_s),
        ("TensorFlow's tracing", lambda row: row["tracing_s"]),
    )
    series = [Series(label, [(row["nodes"], of(row)) for row in rows], joined=True) for label, of in kinds]
    return Plot("scale_planning", "Planning over sizes", "nodes of the traced step", "CPU seconds", series)


def _over_n_log_n(small: dict[str, Any], large: dict[str, Any]) -> float:
    """What the total grows by, over what n log n grows by."""
    least, most = (row["nodes"] * math.log(row["nodes"]) for row in (small, large))
    return large["total_s"] / small["total_s"] / (most / least)


def _named(tactics: list[str]) -> str:
    return "swapping alone" if len(tactics) == 1 else "all tactics"
