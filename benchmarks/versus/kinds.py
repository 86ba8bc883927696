"""Each model's peak by kind of tensor, and ResNet-50's memory over a step: Meng et al.'s first figure.

All of it is the simulator's, as reports show it (tfswap/report/timeline.py): the run of the unoptimised step that its
predicted peak is of, and the plan. Each is traced and planned in a process of its own; nothing runs.
"""

from __future__ import annotations

import json
import re
from typing import Any

from versus.page import MIB, Plot, Section, Series, Table, cut
from versus.turns import told_by

LIMIT = 0.5
COLUMNS = 240
NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet-50, 224x224, batch 16": ("application", {"name": "ResNet50", "batch": 16, "size": 224}),
    "VGG19, 128x128, batch 16": ("vgg19", {}),
    "Inception-V3, 96x96, batch 16": ("application", {"name": "InceptionV3", "batch": 16, "size": 96}),
    "AlexNet, 227x227, batch 16": ("classic", {"name": "alexnet", "batch": 16, "size": 227}),
    "DCGAN, batch 64": ("gan", {"batch": 64}),
    "transformer, 6 blocks, batch 8": ("peer", {"name": "transformer"}),
    "LSTM, 2 layers, batch 32": ("lstm_lm", {"layers": 2, "batch": 32}),
    "LSTM, 1 layer, batch 32": ("lstm_lm", {"layers": 1, "batch": 32}),
    "LSTM, 4 layers, batch 32": ("lstm_lm", {"layers": 4, "batch": 32}),
    "LSTM, 16 layers, batch 32": ("lstm_lm", {"layers": 16, "batch": 32}),
    "NMT, 8 layers, 50 steps, batch 8": ("nmt", {"batch": 8, "length": 50}),
    "NMT, 8 layers, 400 steps, batch 4": ("nmt", {"batch": 4, "length": 400}),
    "VGG16, 128x128, batch 16": ("application", {"name": "VGG16", "batch": 16, "size": 128, "momentum": 0.0}),
    "Inception (GoogLeNet), 128x128, batch 16": ("classic", {"name": "inception", "batch": 16, "size": 128}),
    "ResNet-101, 128x128, batch 16": ("application", {"name": "ResNet101", "batch": 16, "size": 128}),
    "ResNet-152, 128x128, batch 16": ("application", {"name": "ResNet152", "batch": 16, "size": 128}),
    "ResNet of 302 layers, 32x32, batch 8": ("deep_resnet", {"layers": 302}),
    "ResNet of 1517 layers, 32x32, batch 32": ("deep_resnet", {"layers": 1517, "batch": 32}),
    "NiN, 227x227, batch 32": ("classic", {"name": "nin", "batch": 32, "size": 227}),
    "Overfeat, 231x231, batch 16": ("classic", {"name": "overfeat", "batch": 16, "size": 231}),
}
CURVE = "ResNet-50, 224x224, batch 16"


PARTS = tuple(NETS)


def measure(part: str) -> dict[str, Any]:
    net, size = NETS[part]
    return told_by({"module": "kinds", "net": net, "size": size, "curve": part == CURVE})


def child(spec: dict[str, Any]) -> None:
    import tensorflow as tf
    from versus.nets import NETS

    import tfswap
    from tfswap.report.timeline import KINDS

    step, arguments = NETS[spec["net"]](**spec["size"])
    made = tfswap.optimize(tf.function(step), memory_limit=f"{LIMIT:.0%}", mode="analyze")
    made.get_concrete_function(*arguments)
    report = made.report()
    timeline = report._timeline()
    found: dict[str, Any] = {"kinds": KINDS, "runs": {}}
    for name, run in (("unoptimised", timeline.before), ("planned", timeline.after)):
        if run is None:
            continue
        used = run.record.in_use_bytes
        peak = max(range(len(used)), key=used.__getitem__)
        found["runs"][name] = {"peak_bytes": used[peak], "by_kind": run.at([peak])[0], "total_s": run.total_s}
        if spec["curve"]:
            columns = run.columns(COLUMNS, run.total_s)
            totals = [used[c.state] for c in columns]
            found["runs"][name]["curve"] = [
                [c.column / COLUMNS, total] for c, total in zip(columns, totals, strict=True)
            ]
    print(json.dumps(found))


def present(found: dict[str, Any]) -> Section:
    lines, plots, shares = [], [], []
    kinds = next(iter(found.values()))["kinds"]
    for title, net in found.items():
        for name, run in net["runs"].items():
            lines.append([title, name, f"{run['peak_bytes'] / MIB:.1f}", *(f"{b / MIB:.1f}" for b in run["by_kind"])])
        plain = net["runs"]["unoptimised"]
        maps = plain["by_kind"][kinds.index("activations")] / plain["peak_bytes"]
        shares.append(f"{_name(title)} {maps:.0%}")
        series = [
            Series(name, [(x, y / MIB) for x, y in run["curve"]], joined=True)
            for name, run in net["runs"].items()
            if "curve" in run
        ]
        if series:
            told = f"{title}: memory over a step, as it is and with half of its peak"
            plots.append(Plot("kinds", told, "share of the step's predicted time", "MiB in use", series))
    saved = [
        cut(n["runs"]["planned"]["peak_bytes"], n["runs"]["unoptimised"]["peak_bytes"])
        for n in found.values()
        if "planned" in n["runs"]
    ]
    over = [_name(name) for name, net in found.items() if "planned" not in net["runs"]]
    notes = [
        "Inputs are arguments and constants; what optimizers make of gradients counts as gradients. Chunks count "
        "whole, under the kind of what they hold; other is what those of variables and inputs are larger by."
    ]
    if saved:
        notes.append(f"Plans for half of the predicted peak cut it by {min(saved):.0%} to {max(saved):.0%}.")
    if over:
        notes.append(f"Half of the peak is below the floor of {', '.join(over)}.")
    return Section(
        "What a peak consists of",
        "feature maps dominate, and rise and fall over ResNet-50's step (Meng et al. 2017, figure 1)",
        f"feature maps at the unoptimised peak: {', '.join(shares)}",
        "simulated for a CPU's arena with plain kernels",
        [
            Table(
                "MiB of each kind at the peak, as it is and planned for half of it:",
                ("net", "step", "peak", *kinds),
                lines,
            )
        ],
        plots,
        notes,
    )


def _name(title: str) -> str:
    """Without its batch and its images."""
    return ", ".join(part for part in title.split(", ") if not re.fullmatch(r"batch \d+|\d+x\d+", part))
