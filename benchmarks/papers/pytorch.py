"""What makes a step smaller in PyTorch (papers/harness/pytorch_step.py), on the architectures of benchmarks/peers.py.

All take turns in one run: TensorFlow's step, PyTorch's and its forms, and for each of these tfswap under the same share
of TensorFlow's peak as the form has of PyTorch's.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from papers import peers as tensorflow
from papers.harness import standing
from papers.harness.page import Plot, Section, Series, Table, mib, ratio
from peers import REFERENCES, Running, Variant, take_turns

SCRIPT = Path(__file__).parent / "harness" / "pytorch_step.py"
SAME = {"transformer": "transformer", "ResNet": "resnet"}
"""The same nets in the row peers."""
PARTS = tuple(SAME)
ROUNDS = 11
PLAIN = "PyTorch"
FORMS = (
    "checkpoint",
    "save_on_cpu",
    "checkpoint, save_on_cpu",
    *(f"torch.compile, budget {share}" for share in (1.0, 0.5, 0.2)),
)


def measure(part: str, python: str = sys.executable) -> dict[str, Any]:
    """Args: python: an interpreter that has PyTorch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def theirs(form: str) -> Running:
            one = Running(form, [python, str(SCRIPT), part, form], folder, {})
            one.step()  # which reports its peak
            return one

        pytorch = [theirs(form) for form in (PLAIN, *FORMS)]
        plain = [Variant(SAME[part], reference, folder) for reference in REFERENCES]
        plain[0].step()
        shares = [one.peak_bytes / pytorch[0].peak_bytes for one in pytorch[1:]]
        limits = [int(share * plain[0].peak_bytes) for share in shares]
        ours = [Variant(SAME[part], form, folder, limit) for form, limit in zip(FORMS, limits, strict=True)]
        running = [*plain, *pytorch, *ours]
        take_turns(running, ROUNDS, f"rounds of {part}")
        for one in running:
            one.close()

    def lines(of: list[Any], base: Running) -> list[dict[str, Any]]:
        return [
            {"label": one.label, "peak_bytes": one.peak_bytes, "took_s": one.took} | _times(one, base) | one.reported
            for one in of
        ]

    across = _times(pytorch[0], plain[0])
    return {"pytorch": lines(pytorch, pytorch[0]), "tensorflow": lines([*plain, *ours], plain[0]), "across": across}


def _times(one: Running, base: Running) -> dict[str, Any]:
    return tensorflow.ratios_of(one.took, base.took)


def present(found: dict[str, Any]) -> Section:
    lines, words, notes, plots, comparisons = [], [], [], [], []
    counts: tuple[list[str], list[str]] = [], []
    version = ""
    for name, net in found.items():
        version = net["pytorch"][0]["torch"]
        verdicts: dict[str, list[str]] = {}
        standings: list[list[str]] = []
        for form, own in zip(_sides(net["pytorch"][0], net["pytorch"][1:]), _ours(net), strict=True):
            reached = own.memory <= form.memory
            over = [own.over(form, clock) for clock in standing.CLOCKS]
            verdict = tuple(FASTEST[one.standing] for one in over)
            last = [f"{who}, {one.reported}" for who, one in zip(verdict, over, strict=True)]
            lines.append([name, form.label, *form.cells, *own.cells, *(last if reached else [ABOVE, ABOVE])])
            reported = f"{form.label} ({form.reported}; tfswap {own.reported})"
            verdicts.setdefault(verdict[-1] if reached else ABOVE, []).append(reported)
            standings.append([COUNTED[one] for one in (verdict if reached else (ABOVE, ABOVE))])
            label = f"{name}, time by the clock at the memory of {form.label}"
            comparisons.append(standing.as_comparison(label, over[0], reached=reached))
        for kinds, column in zip(counts, zip(*standings, strict=True), strict=True):
            kinds += column
        by_clock, by_cpu = (standing.counted(column) for column in zip(*standings, strict=True))
        words.append(f"{name}: by the clock {by_clock}, by CPU {by_cpu}")
        notes += _notes(name, net, verdicts)
        plots.append(_plot(name, net))
    return Section(
        "PyTorch on the same architectures",
        "none: these are what users have there",
        f"tfswap at the share of memory of each of PyTorch's {len(FORMS)} forms: {'; '.join(words)}; "
        f"{standing.OVERLAP}",
        f"PyTorch {version} for CPUs, whose kernels and buffers are others than TensorFlow's; what save_on_cpu copies "
        f"goes where PyTorch does not count it; steps of {len(FORMS) * 2 + 3} processes take turns, on cold caches",
        [Table(TITLE, COLUMNS, lines)],
        plots,
        [
            *notes,
            "save_on_cpu is PyTorch's by what it does and not by its code: on a CPU its own copies nothing, so here "
            "saved tensors are copied to numpy's memory and back.",
            "What else there is in TensorFlow is the row peers, and published policies are the row solvers.",
        ],
        comparisons=comparisons,
        brief=f"at their shares of memory, {len(counts[0])} pairs: by the clock {standing.counted(counts[0])}; by CPU "
        f"time {standing.counted(counts[1])}",
    )


def across(figures: dict[str, Any]) -> list[str]:
    """Forms of PyTorch's that hold less than tfswap's floor on the same net, which the row solvers has."""
    notes = []
    for name, one in figures["pytorch"].items():
        lines = figures.get("solvers", {}).get(name, {}).get("found", {}).get("lines", ())
        floor = next((line["peak_bytes"] for line in lines if line["label"] == "tfswap, its floor"), 0)
        below = [row for row in one["found"]["pytorch"][1:] if row["peak_bytes"] < floor]
        if below:
            reported = ", ".join(f"{row['label']} {mib(row['peak_bytes'])}" for row in below)
            notes.append(
                f"{name}: below tfswap's floor, {mib(floor)} MiB in the row [solvers](solvers.md): {reported}."
            )
    return notes


class Side(NamedTuple):
    """A form over its own framework's unoptimised step: its peak's share, and its times by each clock."""

    label: str
    memory: float
    times: tuple[float, ...]
    cells: list[str]
    line: dict[str, Any]
    base: dict[str, Any]

    def over(self, other: Side, clock: str) -> standing.Over:
        """Its time over another framework's, each over that framework's unoptimised step."""
        if all("took_s" in one for side in (self, other) for one in (side.line, side.base)):
            return standing.of_rounds(self._rounds(clock), other._rounds(clock))
        return standing.of_spreads(self.line, other.line, clock)

    def _rounds(self, clock: str) -> list[float]:
        n = standing.CLOCKS.index(clock)
        return [mine[n] / base[n] for mine, base in zip(self.line["took_s"], self.base["took_s"], strict=True)]

    @property
    def reported(self) -> str:
        return f"{100 * (self.memory - 1):+.1f}% at {self.times[-1]:.2f}"


def _sides(base: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[Side]:
    made = []
    for row in rows:
        memory = row["peak_bytes"] / base["peak_bytes"]
        cells = [mib(row["peak_bytes"]), f"{100 * (memory - 1):+.1f}%"]
        cells += [ratio(row, clock) for clock in standing.CLOCKS]
        times = tuple(row[f"{clock}_ratio"] for clock in standing.CLOCKS)
        made.append(Side(row["label"], memory, times, cells, row, base))
    return made


def _ours(net: dict[str, Any]) -> list[Side]:
    return _sides(net["tensorflow"][0], net["tensorflow"][len(REFERENCES) :])


def _notes(name: str, net: dict[str, Any], verdicts: dict[str, list[str]]) -> list[str]:
    """How the frameworks' own steps compare, and who is faster with what."""
    across, (theirs, ours) = net["across"], (mib(net[of][0]["peak_bytes"]) for of in ("pytorch", "tensorflow"))
    reported = [f"{verb} {', '.join(verdicts[who])}" for who, verb in VERBS.items() if who in verdicts]
    both = list(zip(net["pytorch"][1:], net["tensorflow"][len(REFERENCES) :], strict=True))
    leaner = sum(form["peak_bytes"] < own["peak_bytes"] for form, own in both)
    return [
        f"{name}, unoptimised: PyTorch's step peaks at {theirs} MiB, TensorFlow's at {ours}. PyTorch's step takes "
        f"{across['clock_ratio']:.2f} of TensorFlow's by the clock, {across['cpu_ratio']:.2f} by CPU time.",
        f"{name}, by CPU time, each over its own framework's unoptimised step: {'; '.join(reported)}.",
        f"{name}: in bytes, not shares, PyTorch's form peaks below tfswap's counterpart in {leaner} of {len(both)} "
        "pairs.",
    ]


TITLE = (
    "Each over its own framework's unoptimised step, all in turns; tfswap's limit is the share of TensorFlow's peak "
    "that the form has of PyTorch's, or its floor where that is above it:"
)
COLUMNS = (
    "net",
    "PyTorch's form",
    "peak, MiB",
    "memory",
    "time, clock",
    "time, CPU",
    "tfswap's peak, MiB",
    "memory",
    "time, clock",
    "time, CPU",
    "faster by the clock; tfswap's time over PyTorch's",
    "faster by CPU, the same",
)
TFSWAP, ABOVE = "tfswap", "floor above"
VERBS = {
    PLAIN: "PyTorch is faster with",
    TFSWAP: "tfswap is faster than",
    standing.EVEN: "level are",
    ABOVE: "tfswap's floor is above",
}
COUNTED = {
    TFSWAP: standing.FASTER,
    standing.EVEN: standing.EVEN,
    PLAIN: standing.SLOWER,
    ABOVE: standing.UNREACHED,
}
"""By who is faster: in notes, and as the row peers counts."""
FASTEST = {one: who for who, one in COUNTED.items() if who != ABOVE}
"""By what tfswap is: who is faster."""


def _plot(name: str, net: dict[str, Any]) -> Plot:
    """tfswap's curve and PyTorch's points, each over its own framework's unoptimised step."""
    curve = sorted([(1.0, 1.0), *((one.memory, one.times[0]) for one in _ours(net))])
    series = [Series(TFSWAP, curve, joined=True)]
    for one in _sides(net["pytorch"][0], net["pytorch"][1:]):
        series.append(Series(f"PyTorch, {one.label}", [(one.memory, one.times[0])]))
    title = f"{name}: tfswap, and PyTorch's forms"
    axes = "peak over its own framework's unoptimised", "step time over that, by the clock"
    return Plot(f"pytorch_{name.lower()}", title, *axes, series)
