"""Ratios of small nets' peaks and times, in one process and in seconds: what a change of tfswap must not make worse.

Planned peaks are the same in each run. An unoptimised one varies by a tenth and more in so small a net, so that floors
are compared with that of the step in order alone. Times are ratios of CPU time; their bound is far above what is
measured, so that it is passed only where a step does work that it need not do.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable
from typing import Any

from papers.harness import peer_nets
from papers.harness.turns import ABOVE_FLOOR, TACTICS, UNOPTIMISED, Form, under_limit

ORDER, ALL = Form("order", tactics=()), Form("all", tactics=TACTICS)
SWAPS, AGAIN, ENCODED = (Form(tactic, tactics=(tactic,)) for tactic in ("swap", "recompute", "encode"))
MENG = Form("meng", tactics=("swap",), solver="meng")
BOUNDS = {
    "swaps over order alone": 0.66,
    "swaps over Meng et al.": 0.93,
    "swaps: peak over the limit": 1.0,
    "swaps: CPU time over unoptimised": 1.8,
    "recomputation over order alone": 0.92,
    "encodings over order alone": 1.0,
    "all tactics over order alone": 0.86,
    "all tactics: peak over the limit": 1.0,
}
"""The most that each may be: floors over others, and measured peaks and times of steps at their floors. The first four
are a transformer's block, the others convolutions that are pooled.
"""
STEPS, ROUNDS = 10, 3


def child(_: dict[str, Any]) -> None:
    print(json.dumps(measure()))


def measure() -> dict[str, float]:
    """By name, the ratios. Raises AssertionError where a loss is another."""
    order, swaps, meng = _floors(_transformer, ORDER, SWAPS, MENG)
    found = [swaps / order, swaps / meng, _over_limit(_transformer, SWAPS, swaps)]
    found.append(_time_over_unoptimised(_transformer, SWAPS, swaps))
    order, *floors = _floors(_pooled, ORDER, AGAIN, ENCODED, ALL)
    found += [*(floor / order for floor in floors), _over_limit(_pooled, ALL, floors[-1])]
    return dict(zip(BOUNDS, found, strict=True))


def _transformer() -> peer_nets.Model:
    return peer_nets.transformer(1, batch=4)


def _pooled(layers: int = 4, width: int = 32, size: int = 32, batch: int = 16) -> peer_nets.Model:
    """Convolutions with a ReLU and a pooling each, as in the nets that encodings were made for."""
    import tensorflow as tf

    weights = peer_nets.Weights()

    def make_block(inner: int) -> Callable[[Any], Any]:
        kernel = weights.make(3, 3, inner, width, scale=(2 / (9 * inner)) ** 0.5)
        return lambda h: tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(h, kernel, 1, "SAME")), 3, 1, "SAME")

    blocks = [make_block(width if n else 3) for n in range(layers)]
    x, y = (tf.random.stateless_normal([batch, size, size, depth], seed=(depth, 9)) for depth in (3, width))
    return peer_nets.Model(weights, blocks, lambda h, y: tf.reduce_mean((h - y) ** 2), (x, y))


def _floors(net: Callable[[], peer_nets.Model], *forms: Form) -> list[int]:
    return [_reported(net, form._replace(limit=1))["floor_bytes"] for form in forms]


def _over_limit(net: Callable[[], peer_nets.Model], form: Form, floor_bytes: int) -> float:
    limit = int(floor_bytes * ABOVE_FLOOR)
    found, plain = _reported(net, form._replace(limit=limit)), _reported(net, UNOPTIMISED)
    assert abs(found["loss"] - plain["loss"]) <= 1e-5 * abs(plain["loss"]), (found, plain)
    return found["peak_bytes"] / limit


def _time_over_unoptimised(net: Callable[[], peer_nets.Model], form: Form, floor_bytes: int) -> float:
    """Of the shortest steps of some rounds: work of others slows some of them. Within a round one form comes after the
    other: updates of an unoptimised step would move what a plan was made for.
    """
    planned = form._replace(limit=int(floor_bytes * ABOVE_FLOOR))
    times = {planned: math.inf, UNOPTIMISED: math.inf}
    for one in (planned, UNOPTIMISED) * ROUNDS:
        step, model = _step(net, one, {})
        times[one] = min(times[one], *(_cpu_s(step, model) for _ in range(STEPS)))
        del step, model
    return times[planned] / times[UNOPTIMISED]


def _cpu_s(step: Any, model: peer_nets.Model) -> float:
    began = time.process_time()
    step(*model.arguments).numpy()
    return time.process_time() - began


def _step(net: Callable[[], peer_nets.Model], form: Form, reported: dict[str, Any]) -> tuple[Any, peer_nets.Model]:
    """A form's step, called once, and its net."""
    import tensorflow as tf

    gc.collect()  # what is left of the form before it would lie in the arena
    model = net()
    step: Any = tf.function(peer_nets.make_step(model))
    tf.config.experimental.reset_memory_stats("CPU:0")
    if form is UNOPTIMISED:
        step(*model.arguments)
        return step, model
    return under_limit(step, model.arguments, form, reported), model


def _reported(net: Callable[[], peer_nets.Model], form: Form) -> dict[str, Any]:
    """What a form reports of itself, with the loss of its second step and its peak where it fits."""
    import tensorflow as tf

    reported: dict[str, Any] = {"fits": True}
    step, model = _step(net, form, reported)
    if reported["fits"]:
        reported["loss"] = float(step(*model.arguments).numpy())
        reported["peak_bytes"] = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return reported
