"""Steps with `max_slowdown`: the measured peak is the planned one, far below the unoptimised step's."""

from __future__ import annotations

from typing import Any

import pytest
from processes import on_arena

SLOWDOWN = 1.1


def run(**options: Any) -> dict[str, Any]:
    """A step with these options of `tfswap.optimize`, and the same unoptimised."""
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import memory_optimizer_off

    def made() -> tuple[list[tf.Variable], Any]:
        weights = [tf.Variable(tf.random.stateless_normal([256, 256], seed=(i, 1)) * 0.08) for i in range(8)]

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                h = x
                for weight in weights:
                    h = tf.nn.relu(h @ weight)
                loss = tf.reduce_mean(h * h)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        return weights, step

    x = tf.random.stateless_normal([2048, 256], seed=(0, 3))
    weights, step = made()
    optimized = tfswap.optimize(tf.function(step), on_exceeded="raise", **options)
    peaks: list[int] = []
    for _ in range(3):
        tf.config.experimental.reset_memory_stats("CPU:0")
        optimized(x)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    report = optimized.report()
    found = {
        "peaks": peaks,
        "planned": report.planned_peak_bytes,
        "limit": report.memory_limit_bytes,
        "ratio": report.time_ratio,
        "floor": report.floor_bytes,
        "baseline": report.baseline_peak_bytes,
        "weights": [w.numpy().tobytes().hex() for w in weights],
    }
    del optimized, weights
    weights, step = made()
    with memory_optimizer_off():
        plain = tf.function(step)
        for _ in range(3):
            plain(x)
    return {**found, "same": found.pop("weights") == [w.numpy().tobytes().hex() for w in weights]}


@pytest.mark.parametrize("options", [{}, {"memory_limit": "70%"}], ids=["alone", "with_a_limit"])
def test_the_lowest_peak_for_a_time(options: dict[str, Any]):
    pytest.importorskip("tensorflow")
    found = on_arena(lambda: run(max_slowdown=SLOWDOWN, **options))
    assert found["same"]
    assert found["peaks"][1:] == [found["planned"]] * 2
    assert max(found["peaks"]) <= found["limit"]
    assert found["ratio"] <= SLOWDOWN
    assert found["floor"] < found["planned"] < 0.5 * found["baseline"]
