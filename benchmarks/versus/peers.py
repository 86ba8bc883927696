"""What else makes a step smaller in TensorFlow, beside tfswap at the same measured peaks: benchmarks/peers.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from versus.page import PEAK, STEP_TIME, Plot, Section, Series, Table, cut, mib, ratio
from versus.turns import quartiles, written_by

SCRIPT = Path(__file__).parent.parent / "peers.py"
PARTS = "transformer", "wide_transformer", "resnet", "wide_resnet"
ROUNDS = 11
CLOCKS = "clock", "cpu"
LEVEL = 1.02
"""Times that differ by no more are called level."""
FASTER, EVEN, SLOWER, UNREACHED = "faster", "level", "slower", "below its floor"


def measure(part: str) -> list[dict[str, Any]]:
    return written_by(SCRIPT, part, "--rounds", str(ROUNDS))[part]


def present(found: dict[str, list[dict[str, Any]]]) -> Section:
    tables, plots, notes = [], [], []
    by_clock: tuple[list[str], list[str]] = [], []
    for name, rows in found.items():
        title = name.replace("_", " ")
        base = rows[0]
        lines = [_line(row, base) for row in rows]
        tables.append(Table(f"{title}, {len(base['took_s'])} rounds:", COLUMNS, lines))
        plots.append(_plot(name, title, rows))
        beside = [row for row in rows if "over_peer" in row and row["label"] != "tfswap as unoptimised"]
        for n, kinds in enumerate(by_clock):
            told = counted([_standing(row, n) for row in beside])
            kinds.append(f"{title}: {told}")
        notes += _faster_peers(title, beside)
    notes.append("Caffe, Torch, MXNet, GeePS and others are quoted [as published](#published).")
    return Section(
        "Peers in TensorFlow",
        "none: these are what users have",
        f"tfswap at each peer's peak ({EVEN}: within {LEVEL - 1:.0%}), by the clock: {'; '.join(by_clock[0])}; by CPU "
        f"time: {'; '.join(by_clock[1])}",
        "a CPU with oneDNN's kernels",
        tables,
        plots,
        notes,
    )


def _standing(row: dict[str, Any], clock: int = 1) -> str:
    """What tfswap is at a peer's peak, by the clock (0) or by CPU time (1)."""
    if not row["at_peers_peak"]:
        return UNREACHED
    return standing(row["over_peer"][clock])


def standing(over: float) -> str:
    """What tfswap is where its time over another's is this."""
    return SLOWER if over > LEVEL else FASTER if over < 1 / LEVEL else EVEN


def counted(standings: Sequence[str]) -> str:
    """How often it is each."""
    kinds = (FASTER, EVEN, SLOWER, UNREACHED)
    return ", ".join(f"{kind} {standings.count(kind)}" for kind in kinds if kind in standings)


def _faster_peers(title: str, beside: list[dict[str, Any]]) -> list[str]:
    """Peers that take less time than tfswap at their peaks by either measure, those within the tolerance apart."""
    notes = []
    ahead = [row for row in beside if row["at_peers_peak"] and max(row["over_peer"]) > 1]
    clear = [row for row in ahead if SLOWER in (_standing(row, 0), _standing(row))]
    for which, verb in (
        (clear, f"by more than {LEVEL - 1:.0%}, by the clock or by CPU"),
        ([row for row in ahead if row not in clear], f"but within {LEVEL - 1:.0%}"),
    ):
        if which:
            told = [
                f"{row['label'].removeprefix('tfswap as ')} ({row['over_peer'][0]:.3f}; {row['over_peer'][1]:.3f})"
                for row in which
            ]
            notes.append(
                f"{title}: faster than tfswap at their peaks, {verb} (tfswap's time over theirs, by the clock; by "
                f"CPU): {', '.join(told)}."
            )
    if below := [row["label"].removeprefix("tfswap as ") for row in beside if not row["at_peers_peak"]]:
        notes.append(f"{title}: peak below tfswap's floor: {', '.join(below)}.")
    return notes


COLUMNS = ("form", "peak, MiB", "memory", "time, clock", "time, CPU", "over the peer, clock", "CPU", "values")


def ratios_of(took: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Of steps of the same rounds, as `page.ratio` takes them."""
    made: dict[str, Any] = {}
    for n, clock in enumerate(CLOCKS):
        ratios = [mine[n] / other[n] for mine, other in zip(took, base, strict=True)]
        made[f"{clock}_ratio"] = statistics.median(ratios)
        made[f"{clock}_spread"] = quartiles(ratios)
    return made


def _line(row: dict[str, Any], base: dict[str, Any]) -> list[str]:
    times = [ratio(ratios_of(row["took_s"], base["took_s"]), clock) for clock in CLOCKS]
    share = "" if row is base else f"{-100 * cut(row['peak_bytes'], base['peak_bytes']):+.1f}%"
    beside = [f"{one:.2f}" for one in row.get("over_peer", ())] or ["", ""]
    same = [name for name, off in row["differs"].items() if not off]
    values = f"as {' and '.join(same)}" if same else f"off by {min(row['differs'].values()):.0e}"
    if not row.get("limit_kept", True):
        values += "; **limit broken**"
    return [row["label"], mib(row["peak_bytes"]), share, *times, *beside, "" if row is base else values]


def points(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each form its label, its peak and its times over the unoptimised step's, and whether it is tfswap's."""
    base = rows[0]
    return [
        {"label": row["label"], "ours": "over_peer" in row, "memory": row["peak_bytes"] / base["peak_bytes"]}
        | ratios_of(row["took_s"], base["took_s"])
        for row in rows
    ]


def _plot(name: str, title: str, rows: list[dict[str, Any]]) -> Plot:
    return Plot(f"peers_{name}", title, PEAK, STEP_TIME, series_of(points(rows)))


def series_of(found: list[dict[str, Any]]) -> list[Series]:
    """tfswap's curve and its peers' points."""

    def point(one: dict[str, Any]) -> tuple[float, float]:
        return one["memory"], one["clock_ratio"]

    peers = [Series(one["label"], [point(one)]) for one in found if not one["ours"]]
    return [Series("tfswap", sorted(point(one) for one in found if one["ours"]), joined=True), *peers]
