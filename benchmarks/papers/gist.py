"""Gist (Jain et al., ISCA 2018): encodings as the only tactic, by benchmarks/gist.py."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from papers.harness.page import MIB, PEAK, STEP_TIME, Plot, Section, Series, Table, against_published, spread
from papers.harness.turns import written_by

SCRIPT = Path(__file__).parent.parent / "gist.py"
FORMS = {"unoptimised": "as it is", "order": "order alone", "lossless": "lossless", "fp8": "lossless and fp8"}


PUBLISHED, PUBLISHED_TIME, DYNAMIC = 1.8, 1.04, 4.1
"""How many times smaller Gist reports footprints at best, with further software and dynamic allocation."""
PARTS = ("alexnet", "nin", "overfeat", "vgg16", "inception")


def measure(part: str) -> list[dict[str, Any]]:
    return written_by(SCRIPT, part)


def present(found: dict[str, Any]) -> Section:
    lines, words, means = [], [], {}
    notes = [
        "Gist's measure, as its paper has it, is bytes of feature maps. What the device needs is the peak: weights and "
        "their gradients, which no encoding makes smaller, are in that."
    ]
    rows = [row for network in found.values() for row in network]
    for row in rows:
        line = [row["network"], FORMS[row["mode"]], f"{row['map_bytes'] / MIB:.1f}", f"{row['maps_smaller']:.2f}"]
        line += [f"{row['peak_bytes'] / MIB:.1f}", f"{row['peak_smaller']:.2f}"]
        lines.append([*line, *(_time(row, clock) for clock in ("clock", "cpu"))])
    for mode in ("order", "lossless", "fp8"):
        of = [row for row in rows if row["mode"] == mode]
        keys = "maps_smaller", "peak_smaller", "clock", "cpu"
        maps, peaks, clock, cpu = means[mode] = [statistics.mean(row[key] for row in of) for key in keys]
        words.append(
            f"{FORMS[mode]}: maps {maps:.2f} times smaller, peaks {peaks:.2f}, at {clock:.2f} of the time by the clock "
            f"and {cpu:.2f} of the CPU time"
        )
    (maps, exact, *_), (fewer_bits, peaks, *_) = means["lossless"], means["fp8"]
    verdict = (
        f"by Gist's measure, feature maps, {maps:.2f} times smaller with lossless encodings, {fewer_bits:.2f} with fp8 "
        f"as well; by peaks {exact:.2f} and {peaks:.2f}, of which {means['order'][1]:.2f} are order alone, "
        f"{'short of' if peaks < DYNAMIC else 'with'} the {DYNAMIC:.1f} published with dynamic allocation"
    )
    notes.append("fp8 changes gradients: what that does to accuracy is in [Rounding](../precision.md).")
    if any("clock_spread" not in row for row in rows):
        notes.append("Times without brackets: of these only the medians were kept.")
    return Section(
        "Gist: encodings alone",
        f"footprint 1.8 times smaller on average and 2 at best at 4% more time, to {DYNAMIC:.1f} with dynamic "
        "allocation (2018)",
        f"{verdict}; means over {len(found)} of {len(PARTS)} nets, {', '.join(found)}: {'; '.join(words)}",
        "Gist counts feature maps; peaks also hold weights and workspaces. A CPU's plain kernels; of Gist's encodings, "
        "that of maps with many zeros as compressed sparse rows is not used; "
        "forms run one after another, and brackets are of a form's own steps over the unoptimised median",
        [Table("", ("net", "form", "maps, MiB", "smaller", "peak, MiB", "smaller", "time, clock", "time, CPU"), lines)],
        [_plot(rows)],
        notes,
        brief=verdict,
        comparisons=(
            against_published("feature maps, lossless encodings", maps / PUBLISHED),
            against_published("feature maps, fp8 as well", fewer_bits / PUBLISHED),
            against_published("time, fp8 as well", PUBLISHED_TIME / means["fp8"][2]),
            against_published("peak, fp8 as well, over dynamic allocation", peaks / DYNAMIC),
        ),
    )


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
