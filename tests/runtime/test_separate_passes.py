"""Tapes outside of a decorated function that take gradients several times, or of gradients."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from processes import on_arena
from slow import slow

ROOM_MIB = 6
"""Eager operations between the steps find no plan, and free memory in pieces."""


def persistent(tf: Any, forward: Any, x: Any, weights: Any) -> list[Any]:
    """The same backward pass twice, for two losses, and gradients of other sources."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = forward(x)
        losses = tf.reduce_sum(y), tf.reduce_sum(y * y)
    return [*tape.gradient(losses[0], weights), *tape.gradient(losses[1], weights[:2]), tape.gradient(losses[0], x)]


def inside_of_its_context(tf: Any, forward: Any, x: Any, weights: Any) -> list[Any]:
    """A persistent tape takes gradients while it records them."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        loss = tf.reduce_sum(forward(x) ** 2)
        slope = tape.gradient(loss, x)
        penalty = tf.reduce_sum(slope * slope)
    return [slope, *tape.gradient(penalty, weights)]


def nested(tf: Any, forward: Any, x: Any, weights: Any) -> list[Any]:
    """A gradient penalty, of two calls."""
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(forward(x) ** 2)
        slope = inner.gradient(loss, x)
        total = tf.reduce_sum(slope * slope) + tf.reduce_sum(forward(2.0 * x))
    return outer.gradient(total, weights)


def third_order(tf: Any, forward: Any, x: Any, weights: Any) -> list[Any]:
    with tf.GradientTape() as outer:
        with tf.GradientTape() as middle:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(forward(x) ** 2)
            slope = inner.gradient(loss, x)
            penalty = tf.reduce_sum(slope * slope)
        total = tf.add_n([tf.reduce_sum(each * each) for each in middle.gradient(penalty, weights)])
    return outer.gradient(total, weights)


def derived(kind: str, limit: str | None) -> dict[str, Any]:
    """Two rounds of a residual net's derivatives: their bits, and the arena's peak."""
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import memory_optimizer_off

    with memory_optimizer_off():
        weights = [tf.Variable(0.1 * tf.random.stateless_normal([64, 64], (i, 1))) for i in range(4)]
        x = tf.random.stateless_uniform([4096, 64], (9, 9))

        @tf.function
        def forward(h: Any) -> Any:
            h = tf.convert_to_tensor(h)
            for weight in weights:
                h = h + 0.1 * tf.nn.tanh(h @ weight)
            return tf.reduce_mean(h, axis=0)[:4]

        function = forward if limit is None else tfswap.optimize(forward, memory_limit=limit)
        found = []
        for _ in range(2):
            found += [each.numpy().tobytes().hex() for each in globals()[kind](tf, function, x, weights)]
            gc.collect()
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        measured = None if limit is None else function.report().measured_peak_bytes
    return {"values": found, "peak": peak, "measured": measured}


@pytest.mark.parametrize(
    ("kind", "mib"), [("persistent", 8), ("nested", 12), *slow(("inside_of_its_context", 14), ("third_order", 40))]
)
def test_limits_are_kept_with_the_same_bits(kind: str, mib: int) -> None:
    """In an arena in which the undecorated function runs out of memory; it has room for the caller's own tensors."""

    def planned() -> Any:
        return derived(kind, f"{mib}MiB")

    def plain() -> Any:
        return derived(kind, None)

    found, reference = on_arena(planned, mib=mib + ROOM_MIB), on_arena(plain, mib=512)
    assert found["values"] == reference["values"]
    assert found["peak"] <= mib << 20 and (mib + ROOM_MIB) << 20 < reference["peak"]
