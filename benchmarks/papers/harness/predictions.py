"""Unoptimised peaks as they were predicted, and what the allocator then reported: over all rows that have both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

MIB = 2**20
NEAR = 0.07
"""Most predictions lie as near as this; those that do not are named."""


class Pair(NamedTuple):
    """One unoptimised step."""

    part: str
    predicted_bytes: float
    measured_bytes: float

    @property
    def ratio(self) -> float:
        """The prediction over what was measured."""
        return self.predicted_bytes / self.measured_bytes

    @property
    def reported(self) -> str:
        """The net, without its batch, and both figures."""
        net, sizes = self.part.partition(",")[0], (self.predicted_bytes / MIB, self.measured_bytes / MIB)
        return f"{net} {sizes[0]:.0f} for {sizes[1]:.0f}"


def reported(figures: dict[str, Any]) -> str:
    """How far predictions lie off, and where the most."""
    found = sorted(_pairs(figures), key=lambda pair: pair.ratio)
    if not found:
        return ""
    near = sum(abs(pair.ratio - 1) <= NEAR for pair in found)
    words = [
        f"It is {found[0].ratio:.2f} to {found[-1].ratio:.2f} of what was measured, {len(found)} times in all, and "
        f"{near} times within {NEAR:.0%} of it."
    ]
    if far := [pair for pair in found if abs(pair.ratio - 1) > NEAR]:
        words.append(f"The others, in MiB: {', '.join(pair.reported for pair in far)}.")
    words += _capped(figures)
    return " ".join(words)


def _pairs(figures: dict[str, Any]) -> Iterator[Pair]:
    """Those of arenas that are large enough."""
    for row, parts in figures.items():
        for part, one in parts.items():
            found = one["found"]
            if not isinstance(found, dict):
                continue
            if "lines" in found:
                predicted = [line["baseline_bytes"] for line in found["lines"] if "baseline_bytes" in line]
                measured = found["lines"][0]["peak_bytes"]
            elif "runs" in found:
                plain = found["runs"]["unoptimised"]
                predicted, measured = [plain["peak_bytes"]], plain.get("measured_bytes")
            elif row == "superneurons" and "ours" in found:
                predicted, measured = [found["ours"]["baseline_bytes"]], found["unoptimised"]["peak_bytes"]
            else:
                continue
            if predicted and measured:
                yield Pair(part, predicted[0], measured)


def _capped(figures: dict[str, Any]) -> list[str]:
    """Where an unoptimised step ran in an arena that is smaller than what was predicted."""
    depths = figures.get("superneurons", {}).get("depth", {}).get("found", {}).get("depths", ())
    predicted = {row["size"]: row["baseline_mib"] for row in depths if "baseline_mib" in row}
    ran = [row for row in depths if row["fits"] and not row["optimised"] and row["size"] in predicted]
    deepest = max(ran, key=lambda row: row["size"], default=None)
    if deepest is None or deepest["peak_mib"] >= predicted[deepest["size"]]:
        return []
    return [
        f"In an arena that is hard limited a step can do with less: {predicted[deepest['size']]:.0f} MiB were "
        f"predicted of one that ran in {deepest['peak_mib']:.1f} ([depth](superneurons.md)), since TensorFlow's "
        "allocator lets a kernel that finds no room wait for others to give theirs back."
    ]
