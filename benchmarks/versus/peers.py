"""What else makes a step smaller in TensorFlow, beside tfswap at the same measured peaks: benchmarks/peers.py."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from versus.page import Plot, Section, Series, Table, cut, mib, ratio
from versus.turns import written_by

SCRIPT = Path(__file__).parent.parent / "peers.py"
PARTS = "transformer", "wide_transformer", "resnet", "wide_resnet"
ROUNDS = 11
CLOCKS = "clock", "cpu"
LEVEL = 1.02
"""A peer is faster where tfswap takes more than this of its time at its peak."""


def measure(part: str) -> list[dict[str, Any]]:
    return written_by(SCRIPT, part, "--rounds", str(ROUNDS))[part]


def present(found: dict[str, list[dict[str, Any]]]) -> Section:
    tables, plots, words, notes = [], [], [], []
    for name, rows in found.items():
        title = name.replace("_", " ")
        base = rows[0]
        lines = [_line(row, base) for row in rows]
        tables.append(Table(f"{title}, {len(base['took_s'])} rounds:", COLUMNS, lines))
        plots.append(_plot(name, title, rows))
        won, lost = [], []
        for row in rows:
            if "over_peer" in row and row["label"] != "tfswap as unoptimised":
                peer = row["label"].removeprefix("tfswap as ")
                faster = row["over_peer"][1] <= LEVEL and row["at_peers_peak"]
                (won if faster else lost).append(f"{peer} ({row['over_peer'][0]:.2f}; {row['over_peer'][1]:.2f})")
        words.append(f"{title}: no slower than {len(won)} of {len(won) + len(lost)} at their peaks")
        if lost:
            notes.append(f"{title}: faster than tfswap at their peaks, or below its floor: {', '.join(lost)}.")
    return Section(
        "Peers in TensorFlow",
        "none: these are what users have",
        f"by CPU time, {'; '.join(words)}",
        "a CPU with oneDNN's kernels; in brackets tfswap's time over the peer's, clock and CPU",
        tables,
        plots,
        notes,
    )


COLUMNS = ("form", "peak, MiB", "memory", "time, clock", "time, CPU", "over the peer, clock", "CPU", "values")


def _ratios(row: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """As `page.ratio` takes them."""
    made: dict[str, Any] = {}
    for n, clock in enumerate(CLOCKS):
        pairs = zip(row["took_s"], base["took_s"], strict=True)
        ratios = sorted(mine[n] / other[n] for mine, other in pairs)
        made[f"{clock}_ratio"] = statistics.median(ratios)
        made[f"{clock}_spread"] = [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]]
    return made


def _line(row: dict[str, Any], base: dict[str, Any]) -> list[str]:
    times = [ratio(_ratios(row, base), clock) for clock in CLOCKS]
    share = "" if row is base else f"{-100 * cut(row['peak_bytes'], base['peak_bytes']):+.1f}%"
    beside = [f"{one:.2f}" for one in row.get("over_peer", ())] or ["", ""]
    same = [name for name, off in row["differs"].items() if not off]
    values = f"as {' and '.join(same)}" if same else f"off by {min(row['differs'].values()):.0e}"
    if not row.get("limit_kept", True):
        values += "; **limit broken**"
    return [row["label"], mib(row["peak_bytes"]), share, *times, *beside, "" if row is base else values]


def _plot(name: str, title: str, rows: list[dict[str, Any]]) -> Plot:
    base = rows[0]

    def point(row: dict[str, Any]) -> tuple[float, float]:
        return row["peak_bytes"] / base["peak_bytes"], _ratios(row, base)["cpu_ratio"]

    ours = sorted(point(row) for row in rows if "over_peer" in row)
    peers = [Series(row["label"], [point(row)]) for row in rows if "over_peer" not in row]
    series = [Series("tfswap", ours, joined=True), *peers]
    return Plot(f"peers_{name}", title, "peak over unoptimised", "step CPU time over unoptimised", series)
