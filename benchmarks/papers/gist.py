"""Gist (Jain et al., ISCA 2018): encodings as the only tactic, by benchmarks/gist.py, and every tactic on its nets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from papers.harness.page import MIB, PEAK, STEP_TIME, Plot, Section, Series, Table, against_published, spread
from papers.harness.turns import written_by

SCRIPT = Path(__file__).parent.parent / "gist.py"
FORMS = {"unoptimised": "as it is", "order": "order alone", "lossless": "lossless", "fp8": "lossless and fp8"}
FORMS |= {"all": "every tactic"}


PUBLISHED, PUBLISHED_TIME, DYNAMIC = 1.8, 1.04, 4.1
"""How many times smaller Gist reports footprints at best, with further software and dynamic allocation."""
NETS = ("alexnet", "nin", "overfeat", "vgg16", "inception")
EVERY = "every tactic on "
PARTS = (*NETS, *(EVERY + net for net in NETS))
COLUMNS = "net", "form", "maps, MiB", "smaller", "peak, MiB", "smaller", "time, clock", "time, CPU"
KEYS = "maps_smaller", "peak_smaller", "clock", "cpu"


def measure(part: str) -> list[dict[str, Any]]:
    modes = ["--modes", "unoptimised", "all"] if part.startswith(EVERY) else []
    return written_by(SCRIPT, part.removeprefix(EVERY), *modes)


def present(found: dict[str, Any]) -> Section:
    notes = [
        "Gist's measure, as its paper has it, is bytes of feature maps. What the device needs is the peak: weights and "
        "their gradients, which no encoding makes smaller, are in that.",
        "Every tactic: the defaults, slices and variables at home on the host, with the same bits, under a limit of "
        "the unoptimised peak over 4.1. There feature maps are in pieces, and are not counted.",
    ]
    rows = [row for part, network in found.items() if not part.startswith(EVERY) for row in network]
    every = [
        row for part, network in found.items() if part.startswith(EVERY) for row in network if row["mode"] == "all"
    ]
    means = {mode: _means(rows, mode) for mode in ("order", "lossless", "fp8")} | {"all": _means(every, "all")}
    words = [
        f"{FORMS[mode]}: maps {maps:.2f} times smaller, peaks {peaks:.2f}, at {clock:.2f} of the time by the clock "
        f"and {cpu:.2f} of the CPU time"
        for mode, (maps, peaks, clock, cpu) in means.items()
        if mode != "all" and rows
    ]
    nets = list(dict.fromkeys(row["network"] for row in rows))
    best = max((row["peak_smaller"] for row in every), default=math.nan)
    verdict = "; ".join(_verdicts(means, best))
    (maps, *_), (fewer_bits, peaks, *_) = means["lossless"], means["fp8"]
    notes.append("fp8 changes gradients: what that does to accuracy is in [Rounding](../precision.md).")
    if any("clock_spread" not in row for row in rows):
        notes.append("Times without brackets: of these only the medians were kept.")
    return Section(
        "Gist: encodings alone",
        f"footprint 1.8 times smaller on average and 2 at best at 4% more time, to {DYNAMIC:.1f} with dynamic "
        "allocation (2018)",
        f"{verdict}; means over {len(nets)} of {len(NETS)} nets, {', '.join(nets)}: {'; '.join(words)}",
        "Gist counts feature maps; peaks also hold weights and workspaces. A CPU's plain kernels; of Gist's encodings, "
        "that of maps with many zeros as compressed sparse rows is not used; "
        "forms run one after another, and brackets are of a form's own steps over the unoptimised median",
        [Table("", COLUMNS, _lines(rows, every))],
        [_plot([*rows, *every])],
        notes,
        brief=verdict,
        comparisons=tuple(
            against_published(what, ratio)
            for what, ratio in (
                ("feature maps, lossless encodings", maps / PUBLISHED),
                ("feature maps, fp8 as well", fewer_bits / PUBLISHED),
                ("time, fp8 as well", PUBLISHED_TIME / means["fp8"][2]),
                ("peak, fp8 as well, over dynamic allocation", peaks / DYNAMIC),
                ("peak, every tactic, over dynamic allocation", best / DYNAMIC),
            )
            if not math.isnan(ratio)
        ),
    )


def _verdicts(means: Mapping[str, Sequence[float]], best: float) -> Iterator[str]:
    """What was found.

    Args:
        means: by form, as of `_means`.
        best: how many times smaller the smallest peak with every tactic is; NaN where none was measured.
    """
    (maps, exact, *_), (fewer_bits, peaks, *_) = means["lossless"], means["fp8"]
    if not math.isnan(maps):
        yield (
            f"by Gist's measure, feature maps, {maps:.2f} times smaller with lossless encodings, {fewer_bits:.2f} with "
            f"fp8 as well; by peaks {exact:.2f} and {peaks:.2f}, of which {means['order'][1]:.2f} are order alone, "
            f"{'short of' if peaks < DYNAMIC else 'with'} the {DYNAMIC:.1f} published with dynamic allocation"
        )
    if not math.isnan(best):
        yield (
            f"by peaks {means['all'][1]:.2f} on average with every tactic and the same bits, {best:.2f} at best, at "
            f"{means['all'][2]:.2f} of the time by the clock and {means['all'][3]:.2f} of the CPU time"
        )


def _means(rows: Iterable[dict[str, Any]], mode: str) -> list[float]:
    """The means of a form over the nets, by `KEYS`; NaN where there are none."""
    of = [row for row in rows if row["mode"] == mode]
    return [statistics.mean(row[key] for row in of) if of else math.nan for key in KEYS]


def _lines(rows: Iterable[dict[str, Any]], every: Iterable[dict[str, Any]]) -> list[list[str]]:
    """A line of the table for each net and form; those of a net together."""
    of_net: dict[str, list[dict[str, Any]]] = {}
    for row in (*rows, *every):
        of_net.setdefault(row["network"], []).append(row)
    lines: list[list[str]] = []
    for row in (row for rows in of_net.values() for row in rows):
        maps = [f"{row['map_bytes'] / MIB:.1f}", f"{row['maps_smaller']:.2f}"] if "map_bytes" in row else ["", ""]
        line = [row["network"], FORMS[row["mode"]], *maps, f"{row['peak_bytes'] / MIB:.1f}"]
        lines.append([*line, f"{row['peak_smaller']:.2f}", *(_time(row, clock) for clock in ("clock", "cpu"))])
    return lines


def _plot(rows: list[dict[str, Any]]) -> Plot:
    """What footprints and times come to: a point for each net."""
    series = [
        Series(label, [(1 / row["peak_smaller"], row["clock"]) for row in rows if row["mode"] == mode])
        for mode, label in FORMS.items()
        if mode != "unoptimised"
    ]
    return Plot("gist", "Encodings alone, each net a point", PEAK, STEP_TIME, series)


def _time(row: dict[str, Any], clock: str) -> str:
    """A ratio of medians; in brackets the quartiles of the form's own steps, over the same median."""
    if f"{clock}_spread" not in row:
        return f"{row[clock]:.2f}"
    return spread(row[clock], row[f"{clock}_spread"])
