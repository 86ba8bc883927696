"""Steps whose largest kernels run in slices of rows keep limits below what these kernels hold, with the same values."""

from __future__ import annotations

import hashlib

from processes import TWO_THREADS, on_arena
from step_peaks import measuring

import tfswap
from tfswap.exporters.function import memory_optimizer_off
from tfswap.ir.permits import KNOWN_TACTICS, SLICE

IMAGES, SIDE, CHANNELS = 12, 160, 16
MAP_BYTES = 4 * IMAGES * SIDE * SIDE * CHANNELS


def train(x, filters, bias):
    """Two convolutions of as many channels, pooling, and a loss."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        h = x
        for number, kernel in enumerate(filters):
            h = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(h, kernel, 1, "SAME"), bias[number]))
        pooled = tf.nn.max_pool2d(h, 2, 2, "VALID")
        loss = tf.reduce_mean(tf.reduce_sum(pooled * pooled, [1, 2, 3]))
    variables = [*filters, bias]
    for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
        variable.assign_sub(1e-3 * gradient)
    return loss


def trained(limit=None, tactics=KNOWN_TACTICS, steps=3):
    """Losses and final values; under a limit also peaks and the plan."""
    import tensorflow as tf

    def normal(*shape):
        return tf.random.stateless_normal(shape, seed=(1, len(shape)))

    x = normal(IMAGES, SIDE, SIDE, 3)
    filters = [tf.Variable(0.1 * normal(3, 3, read, CHANNELS)) for read in (3, CHANNELS, CHANNELS)]
    bias = tf.Variable(normal(3, CHANNELS))
    step = tf.function(lambda x: train(x, filters, bias))
    if limit is not None:
        step = tfswap.optimize(step, memory_limit=limit, tactics=tactics)
    losses, peaks = [], []
    for _ in range(steps):
        with memory_optimizer_off() if limit is None else measuring(peaks):
            losses.append(float(step(x)))
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in (*filters, bias))).hexdigest()
    if limit is None:
        return {"result": [losses, digest]}
    plan = step.plan()
    return {
        "result": [losses, digest],
        "peaks": peaks,
        "planned": plan.planned_peak_bytes,
        "sliced": [each.rows for each in plan.sliced],
        "floor": step.report().floor_bytes,
    }


def test_convolutions_train_in_less_than_two_feature_maps() -> None:
    plain = on_arena(trained, **TWO_THREADS)
    roomy = on_arena(lambda: trained("100%"), **TWO_THREADS)
    whole = on_arena(lambda: trained(10 * MAP_BYTES, [t for t in KNOWN_TACTICS if t != SLICE]), **TWO_THREADS)
    limit = int(0.8 * whole["floor"])
    sliced = on_arena(lambda: trained(limit), **TWO_THREADS)
    for found in (roomy, whole, sliced):
        assert found["result"] == plain["result"], found
    assert roomy["sliced"] == whole["sliced"] == []
    assert len(sliced["sliced"]) == 1
    assert sliced["planned"] <= limit
    assert set(sliced["peaks"]) == {sliced["planned"]}
    assert sliced["floor"] < 0.7 * whole["floor"]
