"""SuperNeurons (Wang et al., PPoPP 2018): depth under a fixed cap, and peaks compared with their largest kernel's need.

Depths are benchmarks/depth.py's, with hard-limited arenas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from papers.harness.page import Comparison, Plot, Section, Series, Table, against_published, mib, spread
from papers.harness.turns import UNOPTIMISED, Form, attempt, quartiles, written_by

SCRIPT = Path(__file__).parent.parent / "depth.py"
CONVOLUTIONS, LAYERS = 3, 10
"""Of a block; a step that does not fit does not report them. Layers are basic ones, as SuperNeurons counts them:
convolutions, normalisations, ReLUs, sums.
"""
DEPTH, DEEP = "depth", "10^4 layers"
ASKED: dict[str, tuple[str, ...]] = {
    DEPTH: ("--cap_mib", "64", "--times", "1", "5", "10", "20", "--steps", "8"),
    DEEP: ("--cap_mib", "256", "--blocks", "1000", "--steps", "4"),
}
NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet of 152 layers, batch 8": ("deep_resnet", {"layers": 152}),
    "AlexNet, batch 16": ("classic", {"name": "alexnet", "batch": 16, "size": 227}),
    "transformer, batch 8": ("peer", {"name": "transformer"}),
}


PARTS = (*ASKED, *NETS)
PUBLISHED_DEEPER = 3.24


def measure(part: str) -> dict[str, Any]:
    if part in ASKED:
        return {"asked": ASKED[part], "depths": written_by(SCRIPT, *ASKED[part])}
    net, size = NETS[part]
    plain, ours = (attempt(net, size, form, 6000) for form in (UNOPTIMISED, Form("floor")))
    return {"unoptimised": plain, "ours": ours}


def present(found: dict[str, Any]) -> Section:
    words, tables, plots = [], [], []
    for part in ASKED:
        if part in found:
            rows = sorted(found[part]["depths"], key=lambda row: (row["optimised"], row["size"]))
            words.append(_deepest(part, rows))
            cap = found[part]["asked"][1]
            title = f"Bottleneck ResNets, 8 images of 32x32, an arena of {cap} MiB:"
            tables.append(Table(title, COLUMNS, list(map(_depth_line, rows))))
            if part == DEPTH:
                plots.append(_plot(rows, cap))
    near = [[name, *_near(one["unoptimised"], one["ours"])] for name, one in found.items() if name not in ASKED]
    if near:
        over = ", ".join(f"{line[0].partition(',')[0]} {line[-1]}" for line in near)
        words.append(f"at the floor, the peak over what is always there and the largest kernel's need together: {over}")
        tables.append(Table("The peak at the floor, compared with what no plan can do without, in MiB:", NEAR, near))
    return Section(
        "SuperNeurons: depth under a cap",
        "3.24 times deeper at least; 10^4 basic layers in 12 GB; the peak down to the largest layer's need (2018)",
        "; ".join(words),
        "small images in a CPU's arena of some MiB, with plain kernels; SuperNeurons' other nets were not tried",
        tables,
        plots,
        notes=[
            "A multiple of depth depends on the cap: a single block takes most of this one, and tfswap's peak grows "
            "less with each block than the unoptimised one's. A second cap was not tried.",
        ]
        * (DEPTH in found),
        brief="; ".join(words[: len(ASKED)]),
        comparisons=_compared(found),
    )


def _compared(found: dict[str, Any]) -> list[Comparison]:
    """How many times deeper under one cap, against the published multiple."""
    if DEPTH not in found:
        return []
    deepest = _deepest_of(found[DEPTH]["depths"])
    return [against_published("depth under a cap", deepest[True] / deepest[False] / PUBLISHED_DEEPER)]


def _deepest_of(rows: list[dict[str, Any]]) -> dict[bool, int]:
    """Blocks of the deepest net that ran, by whether it was tfswap's."""
    return {
        mine: max((row["size"] for row in rows if row["fits"] and row["optimised"] == mine), default=0)
        for mine in (False, True)
    }


COLUMNS = (
    "",
    "blocks",
    "convolutions",
    "basic layers",
    "nodes",
    "peak, MiB",
    "unoptimised, predicted, MiB",
    "first call, s",
    "step, s",
    "step, predicted, over unoptimised",
    "on the host, MiB",
    "in the step",
)
NEAR = (
    "net",
    "unoptimised peak, MiB",
    "always there",
    "largest kernel",
    "peak at the floor",
    "over always there and kernel",
)


def _deepest(part: str, rows: list[dict[str, Any]]) -> str:
    deepest = _deepest_of(rows)
    if part == DEPTH:
        return (
            f"{deepest[True] / deepest[False]:.0f} times deeper under {ASKED[part][1]} MiB, the deepest that was tried"
        )
    most = next(row for row in rows if row["optimised"] and row["size"] == deepest[True])
    held, layers = f"{most['peak_mib']:,.1f} MiB", f"{LAYERS * most['size']:,} basic layers"
    return f"{layers} in {held}, where {most['baseline_mib']:,.0f} are predicted of the unoptimised step"


def _depth_line(row: dict[str, Any]) -> list[str]:
    line = ["tfswap" if row["optimised"] else "unoptimised", f"{row['size']:,}"]
    line += [f"{row.get('convolutions', CONVOLUTIONS * row['size']):,}", f"{LAYERS * row['size']:,}"]
    line.append(f"{row['nodes']:,}" if "nodes" in row else "")
    if not row["fits"]:
        return [*line, "out of memory", *[""] * 6]
    line.append(f"{row['peak_mib']:.1f}")
    moved = f"{row['swapped']} swapped, {row['reruns']} kernels again" if row["optimised"] else ""
    baseline = f"{row['baseline_mib']:,.0f}" if row["optimised"] else ""
    more = [f"{row['predicted_ratio']:.2f}", f"{row['host_mib']:,.0f}"] if row["optimised"] else ["", ""]
    return [*line, baseline, f"{row['first_s']:.1f}", _step_s(row), *more, moved]


def _step_s(row: dict[str, Any]) -> str:
    """The median of its steps but the first, and their quartiles."""
    return spread(row["step_s"], quartiles(row["steps_s"]))


def _near(plain: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    least = ours["persistent_bytes"] + ours["working_set_bytes"]
    sizes = plain["peak_bytes"], ours["persistent_bytes"], ours["working_set_bytes"], ours["peak_bytes"]
    return [*map(mib, sizes), f"{ours['peak_bytes'] / least:.3f}"]


def _plot(rows: list[dict[str, Any]], cap: str) -> Plot:
    """What steps take, against how deep they are."""
    done = [row for row in rows if row["fits"]]
    named = {0: "unoptimised", 1: "tfswap"}
    series = [
        Series(name, [(row["size"], row["peak_mib"]) for row in done if row["optimised"] == mine], joined=True)
        for mine, name in named.items()
    ]
    predicted = [(row["size"], row["baseline_mib"]) for row in done if row["optimised"]]
    series.append(Series("unoptimised, predicted", predicted, joined=True))
    return Plot("superneurons", f"Depth in an arena of {cap} MiB", "blocks", "peak, MiB", series)
