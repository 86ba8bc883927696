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
NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet of 152 layers, batch 8": ("deep_resnet", {"layers": 152}),
    "AlexNet, batch 16": ("classic", {"name": "alexnet", "batch": 16, "size": 227}),
    "transformer, batch 8": ("peer", {"name": "transformer"}),
}


def measure() -> dict[str, Any]:
    asked = ("--cap_mib", str(CAP_MIB), "--times", *map(str, TIMES), "--steps", "2")
    found: dict[str, Any] = {"cap_mib": CAP_MIB, "depths": written_by(SCRIPT, *asked), "largest": []}
    for name, (net, size) in NETS.items():
        plain, ours = (attempt(net, size, form, 6000) for form in (UNOPTIMISED, Form("floor")))
        found["largest"].append({"name": name, "unoptimised": plain, "ours": ours})
    return found


def present(found: dict[str, Any]) -> Section:
    lines = []
    for row in found["depths"]:
        line = [
            "tfswap" if row["optimised"] else "unoptimised",
            str(row.get("convolutions", "")),
            str(row.get("nodes", "")),
        ]
        done = f"{row['peak_mib']:.1f}" if row["fits"] else "out of memory"
        moved = f"{row['swapped']} swapped, {row['reruns']} kernels again" if row["fits"] and row["optimised"] else ""
        lines.append([*line, done, f"{row['baseline_mib']:.0f}" if moved else "", moved])
    plain, ours = (
        max((r["size"] for r in found["depths"] if r["fits"] and r["optimised"] == mine), default=0) for mine in (0, 1)
    )
    near = [
        [
            one["name"],
            mib(one["unoptimised"]["peak_bytes"]),
            mib(one["ours"]["persistent_bytes"]),
            mib(one["ours"]["working_set_bytes"]),
            mib(one["ours"]["peak_bytes"]),
            f"{one['ours']['peak_bytes'] / (one['ours']['persistent_bytes'] + one['ours']['working_set_bytes']):.3f}",
        ]
        for one in found["largest"]
    ]
    columns = ("net", "unoptimised peak, MiB", "always there", "largest kernel", "peak at the floor", "over both")
    return Section(
        f"SuperNeurons: depth under {found['cap_mib']} MiB",
        "3.24 times deeper at least; 10^4 basic layers in 12 GB; the peak down to the largest layer's need (2018)",
        f"{ours / plain:.0f} times deeper, the deepest that was tried; at the floor peaks are "
        f"{' and '.join(sorted(n[-1] for n in near)) or '-'} times what is always there and the largest kernel's need",
        "small images in a CPU's arena of some MiB; SuperNeurons' other nets were not tried",
        [
            Table(
                "Bottleneck ResNets, 8 images of 32x32:",
                ("", "convolutions", "nodes", "peak, MiB", "of, MiB", "in the step"),
                lines,
            ),
            Table("MiB:", columns, near),
        ],
        notes=[
            "10^4 basic layers: `python benchmarks/depth.py --cap_mib 256 --blocks 833` (half an hour): Measurements."
        ],
    )
