"""Ratios of a small net's peaks, in one process and in seconds: what a change of tfswap must not make worse.

Nothing here is a time. Planned peaks are the same in each run. An unoptimised one varies by a tenth and more in so
small a net, so that floors are compared with that of the step in order alone.
"""

from __future__ import annotations

import json
from typing import Any

import peers
from versus.turns import ABOVE_FLOOR, UNOPTIMISED, Form, under_limit

ORDER, SWAPS, MENG = (
    Form("order", tactics=()),
    Form("swaps", tactics=("swap",)),
    Form("meng", tactics=("swap",), solver="meng"),
)
BOUNDS = {"swaps over order alone": 0.62, "swaps over Meng et al.": 0.95, "peak over the limit": 1.0}
"""The most that each may be: a floor over another, and the measured peak of a step at the floor of its swaps."""


def child(_: dict[str, Any]) -> None:
    print(json.dumps(measure()))


def measure() -> dict[str, float]:
    """By name, the ratios. Raises AssertionError where a loss is another."""
    floors = [_told(form._replace(limit=1))["floor_bytes"] for form in (ORDER, SWAPS, MENG)]
    limit = int(floors[1] * ABOVE_FLOOR)
    found = _told(SWAPS._replace(limit=limit))
    plain = _told(UNOPTIMISED)
    assert abs(found["loss"] - plain["loss"]) <= 1e-5 * abs(plain["loss"]), (found, plain)
    ratios = floors[1] / floors[0], floors[1] / floors[2], found["peak_bytes"] / limit
    return dict(zip(BOUNDS, ratios, strict=True))


def _told(form: Form) -> dict[str, Any]:
    """What a form tells of itself, with the loss of its second step and its peak where it fits."""
    import tensorflow as tf

    model = peers.transformer(1, batch=4)
    step: Any = tf.function(peers.make_step(model))
    tf.config.experimental.reset_memory_stats("CPU:0")
    told: dict[str, Any] = {"fits": True}
    if form is UNOPTIMISED:
        step(*model.arguments)
    else:
        step = under_limit(step, model.arguments, form, told)
    if told["fits"]:
        told["loss"] = float(step(*model.arguments).numpy())
        told["peak_bytes"] = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return told
