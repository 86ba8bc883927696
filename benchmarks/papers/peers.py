"""What else makes a step smaller in TensorFlow, and tfswap at the same measured peaks: benchmarks/peers.py."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from papers.harness.page import PEAK, STEP_TIME, Comparison, Plot, Section, Series, Table, cut, mib, ratio
from papers.harness.standing import (
    CLOCKS,
    EVEN,
    RULE,
    SLOWER,
    UNREACHED,
    Over,
    as_comparison,
    counted,
    of_lines,
    of_rounds,
)
from papers.harness.turns import quartiles, written_by

SCRIPT = Path(__file__).parent.parent / "peers.py"
PARTS = "transformer", "wide_transformer", "resnet", "wide_resnet"
ROUNDS = 11
MOST_PARTS = "accumulate 4"
"""Micro-batches of the most parts that were tried."""


def measure(part: str) -> list[dict[str, Any]]:
    return written_by(SCRIPT, part, "--rounds", str(ROUNDS))[part]


class Pair(NamedTuple):
    """A peer, and tfswap at its peak."""

    peer: dict[str, Any]
    ours: dict[str, Any]

    @property
    def label(self) -> str:
        return self.peer["label"]

    @property
    def reached(self) -> bool:
        """Whether tfswap comes down to the peer's peak."""
        return bool(self.ours["at_peers_peak"])

    def over(self, clock: int) -> Over:
        """tfswap's time over the peer's, by the clock (0) or by CPU (1)."""
        return of_rounds(*([took[clock] for took in row["took_s"]] for row in (self.ours, self.peer)))

    def standing(self, clock: int) -> str:
        """What tfswap is at the peer's peak."""
        return self.over(clock).standing if self.reached else UNREACHED


def pairs_of(rows: list[dict[str, Any]]) -> list[Pair]:
    """All but the unoptimised step and tfswap at its peak."""
    by_label = {row["label"]: row for row in rows}
    ours = [row for row in rows if "over_peer" in row and row["label"] != f"{OURS}{rows[0]['label']}"]
    return [Pair(by_label[row["label"].removeprefix(OURS)], row) for row in ours]


OURS = "tfswap as "


def present(found: dict[str, list[dict[str, Any]]]) -> Section:
    tables, plots, notes = [], [], []
    by_clock: tuple[list[str], list[str]] = [], []
    pairs: list[Pair] = []
    comparisons: list[Comparison] = []
    for name, rows in found.items():
        title = name.replace("_", " ")
        tables.append(Table(f"{title}, {len(rows[0]['took_s'])} rounds:", COLUMNS, _lines(rows)))
        plots.append(_plot(name, title, rows))
        compared = pairs_of(rows)
        pairs += compared
        comparisons += [
            as_comparison(f"{title}, time by the clock at the peak of {pair.label}", pair.over(0), reached=pair.reached)
            for pair in compared
        ]
        for n, kinds in enumerate(by_clock):
            kinds.append(f"{title}: {counted([pair.standing(n) for pair in compared])}")
        notes += _faster_peers(title, compared)
    leaner = f"the process holds less in all with the peer in {sum(map(_is_leaner, pairs))} of {len(pairs)} pairs"
    return Section(
        "Peers in TensorFlow",
        "none: these are what users have",
        f"tfswap at each peer's peak, by the clock: {'; '.join(by_clock[0])}; by CPU time: {'; '.join(by_clock[1])} "
        f"({RULE}); {leaner}",
        "a CPU with oneDNN's kernels",
        tables,
        plots,
        [
            *NAMES,
            *notes,
            f"Memory in all, host memory included, is what tfswap trades: {leaner}. The column is how far the process "
            "grew in physical memory by a step after the first ones, with what stays of XLA's compiler and of tfswap's "
            "planner, not what they need for a while; of two devices, one process's.",
            *_first_calls(pairs),
            "Caffe, Torch, MXNet, GeePS and others are quoted [as published](published.md).",
        ],
        comparisons=comparisons,
        brief=f"at their peaks, {len(pairs)} pairs: by the clock {counted([pair.standing(0) for pair in pairs])}; by "
        f"CPU time {counted([pair.standing(1) for pair in pairs])}; {leaner}",
    )


NAMES = (
    "recompute_grad: every block in `tf.recompute_grad`. RematScope: every block a Keras layer in "
    '`keras.RematScope("full")`. xla: `jit_compile=True`.',
    "grappler recompute, swap, both: Grappler's memory optimizer set to RECOMPUTATION_HEURISTICS, SWAPPING_HEURISTICS "
    "or HEURISTICS.",
    "accumulate 2, 4: gradients summed over 2 or 4 micro-batches, a call for each, then one update.",
    "two devices: half of the blocks, with gradients and updates, in a second process on the same cores. Its peak is "
    "the larger of the two arenas', so that both together hold more; its CPU time is of both.",
)
"""What each form is, as benchmarks/peers.py has it."""


def across(figures: dict[str, Any]) -> list[str]:
    """The pair that the row solvers has as well, in another run: how much verdicts of one run are worth."""
    reported = []
    for name, one in figures.get("solvers", {}).items():
        lines = {line["label"]: line for line in one["found"]["lines"]}
        policy, ours = (lines.get(label) for label in (SHARED, f"{OURS}{SHARED}"))
        rows = figures["peers"].get(name.lower(), {}).get("found", [])
        pair = next((pair for pair in pairs_of(rows) if pair.label == SHARED), None) if rows else None
        if pair and policy and ours and ours["fits"]:
            here, there = pair.over(0), of_lines(ours, policy, CLOCKS[0])
            reported.append(
                f"{name} {here.reported}, {pair.standing(0)}, here and {there.reported}, {there.standing}, there"
            )
    if not reported:
        return []
    return [
        f"tfswap's time over {SHARED}'s by the clock was measured in the row [solvers](solvers.md) as well, in another "
        f"run: {'; '.join(reported)}. Quartiles are of one run, and runs differ by more."
    ]


SHARED = "recompute_grad"


def _is_leaner(pair: Pair) -> bool:
    """Whether a peer's process takes less memory in all."""
    return pair.peer["resident_bytes"] < pair.ours["resident_bytes"]


def _first_calls(pairs: Sequence[Pair]) -> list[str]:
    """What first calls take longer, where they were timed."""
    timed = [(pair.peer["first_s"], pair.ours["first_s"]) for pair in pairs if all("first_s" in row for row in pair)]
    over = [ours / peer for peer, ours in timed]
    if not over:
        return []
    slower = sum(one > 1 for one in over)
    return [
        f"tfswap's first call, which plans, takes longer than the peer's in {slower} of {len(over)} pairs: "
        f"{min(over):.1f} to {max(over):.1f} times as long, {statistics.median(over):.1f} in the middle."
    ]


def _faster_peers(title: str, compared: Sequence[Pair]) -> list[str]:
    """Peers that take less time than tfswap at their peaks by either measure, those that are level apart."""
    notes = []
    reached = [pair for pair in compared if pair.reached]
    clear = [pair for pair in reached if SLOWER in (pair.standing(0), pair.standing(1))]
    ahead = [pair for pair in reached if pair not in clear and max(pair.over(0).ratio, pair.over(1).ratio) > 1]
    for which, verb in ((clear, "faster than tfswap at their peaks"), (ahead, f"{EVEN}, with a median that is faster")):
        if which:
            reported = [f"{pair.label} ({pair.over(0).ratio:.3f}; {pair.over(1).ratio:.3f})" for pair in which]
            notes.append(f"{title}: {verb} (tfswap's time over theirs, by the clock; by CPU): {', '.join(reported)}.")
    if MOST_PARTS in [pair.label for pair in clear]:
        notes.append(
            f"{title}: micro-batches are faster at four parts, the most that were tried: more parts would go further "
            "down."
        )
    if below := [pair.label for pair in compared if pair not in reached]:
        notes.append(f"{title}: peak below tfswap's floor: {', '.join(below)}.")
    return notes


COLUMNS = (
    "form",
    "peak, MiB",
    "memory",
    "process in all, MiB",
    "first call, s",
    "time, clock",
    "time, CPU",
    "over the peer, clock",
    "CPU",
    "values",
)


def ratios_of(took: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Of steps of the same rounds, as `page.ratio` takes them."""
    made: dict[str, Any] = {}
    for n, clock in enumerate(CLOCKS):
        ratios = [mine[n] / other[n] for mine, other in zip(took, base, strict=True)]
        made[f"{clock}_ratio"] = statistics.median(ratios)
        made[f"{clock}_spread"] = quartiles(ratios)
    return made


def _lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    of = {pair.ours["label"]: pair for pair in pairs_of(rows)}
    return [_line(row, rows[0], of.get(row["label"])) for row in rows]


def _line(row: dict[str, Any], base: dict[str, Any], pair: Pair | None) -> list[str]:
    times = [ratio(ratios_of(row["took_s"], base["took_s"]), clock) for clock in CLOCKS]
    share = "" if row is base else f"{-100 * cut(row['peak_bytes'], base['peak_bytes']):+.1f}%"
    compared = ["", ""] if pair is None else [pair.over(n).reported for n in range(len(CLOCKS))]
    first = f"{row['first_s']:.1f}" if "first_s" in row else ""
    same = [name for name, off in row["differs"].items() if not off]
    values = f"as {' and '.join(same)}" if same else f"off by {min(row['differs'].values()):.0e}"
    if not row.get("limit_kept", True):
        values += "; **limit broken**"
    whole = mib(row["resident_bytes"])
    return [row["label"], mib(row["peak_bytes"]), share, whole, first, *times, *compared, "" if row is base else values]


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
