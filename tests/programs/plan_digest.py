"""What the planner chooses for a step at several limits, as a digest: the same in each process."""

from __future__ import annotations

import hashlib

from layered_steps import Layer, training_step

from tfswap.compiler.compiler import Optimizer
from tfswap.kernels.device import DeviceModel

KINDS = ("dense", "relu", "scale", "add", "dense", "relu", "add", "dense", "scale", "relu") * 2


def digest() -> tuple[str, int]:
    """Of all plans, and how many tensors they swap."""
    graph = training_step([Layer(kind, (3 * i) // 4) for i, kind in enumerate(KINDS)], 512, 128)
    optimizer = Optimizer(graph, DeviceModel())
    floor = optimizer.floor_bytes()
    span = optimizer.baseline.peak_bytes - floor
    plans = [optimizer.plan(floor + span * k // 4) for k in range(4)]
    texts = "".join(plan.to_json() for plan in plans)
    return hashlib.sha256(texts.encode()).hexdigest(), sum(len(plan.evictions) for plan in plans)
