"""Each model's peak by kind of tensor, and ResNet-50's memory over a step: Meng et al.'s first figure.

Kinds are the simulator's, as reports show them (tfswap/report/timeline.py): of the run of the unoptimised step that its
predicted peak is of, and of the plan. Next to them is what the allocator reported of both, of two steps each; each net
has a process of its own.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Sequence
from typing import Any

from papers.harness.page import MIB, Plot, Section, Series, Table, cut, mib
from papers.harness.turns import reported_by, settled

LIMIT = 0.5
COLUMNS = 240
ARENA_MIB = 16000
NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet-50, 224x224, batch 16": ("application", {"name": "ResNet50", "batch": 16, "size": 224}),
    "VGG19, 128x128, batch 16": ("vgg19", {}),
    "Inception-V3, 96x96, batch 16": ("application", {"name": "InceptionV3", "batch": 16, "size": 96}),
    "AlexNet, 227x227, batch 32": ("classic", {"name": "alexnet", "batch": 32, "size": 227}),
    "DCGAN, batch 64": ("gan", {"batch": 64}),
    "transformer, 6 blocks, batch 8": ("peer", {"name": "transformer"}),
    "wide transformer, 4 blocks, batch 16": ("peer", {"name": "wide_transformer"}),
    "LSTM, 1 layer, batch 32": ("lstm_lm", {"layers": 1, "batch": 32}),
    "LSTM, 4 layers, batch 32": ("lstm_lm", {"layers": 4, "batch": 32}),
    "LSTM, 16 layers, batch 32": ("lstm_lm", {"layers": 16, "batch": 32}),
    "NMT, 8 layers, 50 steps, batch 8": ("nmt", {"batch": 8, "length": 50}),
    "NMT, 8 layers, 400 steps, batch 4": ("nmt", {"batch": 4, "length": 400}),
    "VGG16, 128x128, batch 16": ("application", {"name": "VGG16", "batch": 16, "size": 128, "momentum": 0.0}),
    "Inception (GoogLeNet), 128x128, batch 16": ("classic", {"name": "inception", "batch": 16, "size": 128}),
    "NiN, 227x227, batch 32": ("classic", {"name": "nin", "batch": 32, "size": 227}),
    "Overfeat, 231x231, batch 16": ("classic", {"name": "overfeat", "batch": 16, "size": 231}),
    "ResNet-101, 128x128, batch 16": ("application", {"name": "ResNet101", "batch": 16, "size": 128}),
    "ResNet-152, 128x128, batch 16": ("application", {"name": "ResNet152", "batch": 16, "size": 128}),
    "ResNet of 8 blocks, 32x32, batch 16": ("peer", {"name": "resnet"}),
    "wide ResNet of 6 blocks, 56x56, batch 8": ("peer", {"name": "wide_resnet"}),
    "ResNet of 302 layers, 32x32, batch 8": ("deep_resnet", {"layers": 302}),
    "ResNet of 1517 layers, 32x32, batch 32": ("deep_resnet", {"layers": 1517, "batch": 32}),
    "ResNet of 3002 layers, 32x32, batch 8": ("deep_resnet", {"layers": 3002}),
}
CURVE = "ResNet-50, 224x224, batch 16"
NOT_MEASURED = "not measured"


PARTS = tuple(NETS)


def measure(part: str) -> dict[str, Any]:
    net, size = NETS[part]
    return reported_by({"module": "kinds", "net": net, "size": size, "curve": part == CURVE}, ARENA_MIB)


def child(spec: dict[str, Any]) -> None:
    import tensorflow as tf

    import tfswap
    from tfswap.report.timeline import KINDS

    step, arguments = settled(spec["net"], spec["size"], ARENA_MIB)
    limit, measured = f"{LIMIT:.0%}", {}
    made = tfswap.optimize(tf.function(step), memory_limit=limit)
    try:
        measured["planned"] = _measured(made, arguments)
    except tfswap.InfeasibleMemoryLimit:
        made = tfswap.optimize(tf.function(step), memory_limit=limit, mode="analyze")
        made.get_concrete_function(*arguments)
    timeline = made.report()._timeline()
    del made
    gc.collect()  # and with it host memory of what was swapped: of the deepest nets both do not fit into a machine
    measured["unoptimised"] = _measured(tf.function(step), arguments)
    found: dict[str, Any] = {"kinds": KINDS, "runs": {}}
    for name, run in (("unoptimised", timeline.before), ("planned", timeline.after)):
        if run is None or name not in measured:
            continue
        used = run.record.in_use_bytes
        peak = max(range(len(used)), key=used.__getitem__)
        found["runs"][name] = {"peak_bytes": used[peak], "by_kind": run.at([peak])[0], "total_s": run.total_s}
        found["runs"][name]["measured_bytes"] = measured[name]
        if spec["curve"]:
            columns = run.columns(COLUMNS, run.total_s)
            totals = [used[c.state] for c in columns]
            found["runs"][name]["curve"] = [
                [c.column / COLUMNS, total] for c, total in zip(columns, totals, strict=True)
            ]
    print(json.dumps(found))


def _measured(step: Any, arguments: Sequence[Any]) -> int:
    """The allocator's peak of two steps."""
    import tensorflow as tf

    tf.config.experimental.reset_memory_stats("CPU:0")
    for _ in range(2):
        step(*arguments)
    return tf.config.experimental.get_memory_info("CPU:0")["peak"]


def present(found: dict[str, Any]) -> Section:
    lines, plots, shares = [], [], {}
    kinds = next(iter(found.values()))["kinds"]
    for title, net in found.items():
        for name, run in net["runs"].items():
            sizes = run.get("measured_bytes"), run["peak_bytes"], *run["by_kind"]
            lines.append([title, name, *(NOT_MEASURED if size is None else mib(size) for size in sizes)])
        plain = net["runs"]["unoptimised"]
        maps = plain["by_kind"][kinds.index("activations")] / plain["peak_bytes"]
        shares[title] = maps
        series = [
            Series(name, [(x, y / MIB) for x, y in run["curve"]], joined=True)
            for name, run in net["runs"].items()
            if "curve" in run
        ]
        if series:
            reported = f"{title}: memory over a step, as it is and with half of its peak"
            plots.append(Plot("kinds", reported, "share of the step's predicted time", "MiB in use", series))
    saved = [
        cut(n["runs"]["planned"]["peak_bytes"], n["runs"]["unoptimised"]["peak_bytes"])
        for n in found.values()
        if "planned" in n["runs"]
    ]
    over = [_name(name) for name, net in found.items() if "planned" not in net["runs"]]
    notes = [
        "Inputs are arguments and constants; what optimizers make of gradients counts as gradients. Chunks count "
        "whole, under the kind of what they hold; other is what those of variables and inputs are larger by, and what "
        "else the arena holds before the step. Activations are what the papers call feature maps."
    ]
    if saved:
        notes.append(
            f"Plans for half of the predicted peak cut it by {min(saved):.0%} to {max(saved):.0%}: what loops save is "
            "moved as a whole, so that a plan for a net of loops can come out far below its limit."
        )
    if over:
        notes.append(f"Half of the peak is below the floor of {', '.join(over)}.")
    return Section(
        "What a peak consists of",
        "feature maps dominate, and rise and fall over ResNet-50's step (Meng et al. 2017, figure 1)",
        f"feature maps at the unoptimised peak: {', '.join(f'{_name(t)} {share:.0%}' for t, share in shares.items())}",
        "a CPU's arena with plain kernels; kinds are simulated",
        [
            Table(
                "MiB of each kind at the peak, as it is and planned for half of it:",
                ("net", "step", "measured", "simulated", *kinds),
                lines,
            )
        ],
        plots,
        notes,
        brief=f"feature maps are {min(shares.values()):.0%} to {max(shares.values()):.0%} of {len(shares)} nets' peaks"
        + (f", {shares[CURVE]:.0%} of ResNet-50's" if CURVE in shares else ""),
    )


def _name(title: str) -> str:
    """Without its batch and its images."""
    return ", ".join(part for part in title.split(", ") if not re.fullmatch(r"batch \d+|\d+x\d+", part))
