"""SuperNeurons (Wang et al., PPoPP 2018): depth under a fixed cap, and peaks beside their largest kernel's need.

Depths are benchmarks/depth.py's, with hard-limited arenas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from versus.page import Section, Table, mib
from versus.turns import UNOPTIMISED, Form, attempt, written_by

SCRIPT = Path(__file__).parent.parent / "depth.py"
CAP_MIB, TIMES = 64, (1, 20)
CONVOLUTIONS = 3
"""Of a block; a step that does not fit doesn't tell of them."""
NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet of 152 layers, batch 8": ("deep_resnet", {"layers": 152}),
    "AlexNet, batch 16": ("classic", {"name": "alexnet", "batch": 16, "size": 227}),
    "transformer, batch 8": ("peer", {"name": "transformer"}),
}


DEPTH = "depth"
PARTS = (DEPTH, *NETS)


def measure(part: str) -> dict[str, Any]:
    if part == DEPTH:
        asked = ("--cap_mib", str(CAP_MIB), "--times", *map(str, TIMES), "--steps", "2")
        return {"cap_mib": CAP_MIB, "depths": written_by(SCRIPT, *asked)}
    net, size = NETS[part]
    plain, ours = (attempt(net, size, form, 6000) for form in (UNOPTIMISED, Form("floor")))
    return {"unoptimised": plain, "ours": ours}


def present(found: dict[str, Any]) -> Section:
    lines, words, tables = [], [], []
    depth = found.get(DEPTH, {"depths": []})
    for row in depth["depths"]:
        line = ["tfswap" if row["optimised"] else "unoptimised", str(row["size"])]
        line += [str(row.get("convolutions", CONVOLUTIONS * row["size"])), str(row.get("nodes", ""))]
        done = f"{row['peak_mib']:.1f}" if row["fits"] else "out of memory"
        moved = f"{row['swapped']} swapped, {row['reruns']} kernels again" if row["fits"] and row["optimised"] else ""
        lines.append([*line, done, f"{row['baseline_mib']:.0f}" if moved else "", moved])
    plain, ours = (
        max((r["size"] for r in depth["depths"] if r["fits"] and r["optimised"] == mine), default=0) for mine in (0, 1)
    )
    near = [
        [
            name,
            mib(one["unoptimised"]["peak_bytes"]),
            mib(one["ours"]["persistent_bytes"]),
            mib(one["ours"]["working_set_bytes"]),
            mib(one["ours"]["peak_bytes"]),
            f"{one['ours']['peak_bytes'] / (one['ours']['persistent_bytes'] + one['ours']['working_set_bytes']):.3f}",
        ]
        for name, one in found.items()
        if name != DEPTH
    ]
    columns = ("net", "unoptimised peak, MiB", "always there", "largest kernel", "peak at the floor", "over both")
    if lines:
        words.append(f"{ours / plain:.0f} times deeper under {depth['cap_mib']} MiB, the deepest that was tried")
        deep = "", "blocks", "convolutions", "nodes", "peak, MiB", "of, MiB", "in the step"
        tables.append(Table(f"Bottleneck ResNets, 8 images of 32x32, an arena of {depth['cap_mib']} MiB:", deep, lines))
    if near:
        over = " and ".join(sorted(line[-1] for line in near))
        words.append(f"at the floor peaks are {over} times what is always there and the largest kernel's need")
        tables.append(Table("MiB:", columns, near))
    return Section(
        "SuperNeurons: depth under a cap",
        "3.24 times deeper at least; 10^4 basic layers in 12 GB; the peak down to the largest layer's need (2018)",
        "; ".join(words),
        "small images in a CPU's arena of some MiB; SuperNeurons' other nets were not tried",
        tables,
        notes=[
            "10^4 basic layers, 1,000 blocks of ten (convolutions, normalisations, ReLUs, a sum): `python "
            "benchmarks/depth.py --cap_mib 256 --blocks 1000 --steps 2`, in "
            "[Measurements](measurements.md#depth-under-a-cap-benchmarksdepthpy)."
        ],
    )
