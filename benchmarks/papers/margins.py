"""The share of a limit that a planner can use: planned and measured peaks at the smallest limits that it accepts.

A planner whose predictions are off, or whose allocator loses memory in holes, needs a margin: bytes of the limit that
no plan may count on. tfswap's is 0.1% of the peak, and at least 1 KiB (`promised` in tfswap/planner/promise.py).
"""

from __future__ import annotations

import json
from typing import Any

from papers.harness.page import Section, Table, against_published
from papers.harness.turns import reported_by, settled

ARENA_MIB = 2000
STEPS = 3
NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "AlexNet, 227x227, batch 32": ("classic", {"name": "alexnet", "batch": 32, "size": 227}),
    "DCGAN, batch 64": ("gan", {"batch": 64}),
    "transformer, 6 blocks, batch 8": ("peer", {"name": "transformer"}),
    "ResNet of 8 blocks, 32x32, batch 16": ("peer", {"name": "resnet"}),
    "LSTM, 4 layers, batch 32": ("lstm_lm", {"layers": 4, "batch": 32}),
}
PARTS = tuple(NETS)

LOST = (
    ("GMLake (Guo et al., ASPLOS 2024)", "PyTorch's allocator, fine-tuning with recomputation and offloading", 15, 33),
    ("STAlloc (2025)", "online allocators of frameworks, as PyTorch's, with recomputation", None, 43),
)
"""What abstracts say of memory that is lost in holes, in percent: on average and at most. GMLake's figures are what it
wins back, so no less is lost.
"""


def measure(part: str) -> dict[str, Any]:
    net, size = NETS[part]
    return reported_by({"module": "margins", "net": net, "size": size}, ARENA_MIB)


def child(spec: dict[str, Any]) -> None:
    import tensorflow as tf

    import tfswap
    from tfswap.ir.permits import TENSOR_TACTICS

    step, arguments = settled(spec["net"], spec["size"], ARENA_MIB)
    made, peaks, planned = tfswap.optimize(tf.function(step), memory_limit=1, tactics=TENSOR_TACTICS), [], []
    try:
        made(*arguments)
        raise RuntimeError("a limit of one byte was kept")
    except tfswap.InfeasibleMemoryLimit as refused:
        made.memory_limit = limit = refused.floor_bytes
    for _ in range(STEPS):
        tf.config.experimental.reset_memory_stats("CPU:0")
        made(*arguments)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        planned.append(made.report().planned_peak_bytes)
    print(json.dumps({"limit": limit, "planned": planned, "measured": peaks}))


def present(found: dict[str, Any]) -> Section:
    lines, used, off = [], [], []
    for title, net in found.items():
        planned, measured = max(net["planned"]), max(net["measured"])
        used.append(measured / net["limit"])
        off.append(max(abs(p - m) for p, m in zip(net["planned"], net["measured"], strict=True)))
        lines.append([title, f"{net['limit']:,}", f"{planned:,}", f"{measured:,}", str(off[-1]), f"{used[-1]:.2%}"])
    published = [[name, of, "" if mean is None else f"{mean}%", f"{most}%"] for name, of, mean, most in LOST]
    mean, most = LOST[0][2:]
    verdict = (
        f"{min(used):.1%} to {max(used):.1%} of the smallest limits of {len(found)} nets are used; planned peaks are "
        f"off by {max(off)} bytes at most"
    )
    return Section(
        "The share of a limit that is used",
        f"holes take {mean}% of a GPU's memory on average and {most}% at most, or more, with recomputation and "
        "offloading in PyTorch (GMLake, 2024)",
        verdict,
        "limits are the smallest that tfswap accepts with variables on the device; a CPU's arena with plain kernels, "
        "which TensorFlow's allocator manages as a GPU's memory",
        [
            Table(
                "Bytes of the limit, and peaks of its steps:",
                ("net", "limit", "planned", "measured", "off by", "used"),
                lines,
            ),
            Table("Published, of memory that is lost:", ("source", "of", "on average", "at most"), published),
        ],
        [],
        ["The rest of a limit is the margin, 0.1% of the peak and at least 1 KiB."],
        brief=verdict,
        comparisons=(against_published("share of a limit that is used", min(used) / (1 - mean / 100)),),
    )
