"""Steps that fail inside of loops, and run well before and after."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from control_flow import prefetching
from micro_batch_steps import stack_loss
from models import settle
from step_parts import descend, make_data, make_weights


def _fail_thrice(optimized: Any, good: tuple[Any, ...], bad: tuple[Any, ...]) -> dict[str, int]:
    """Runs a step with arguments that it fails for between others; how often it failed, and what is left of that."""
    import tfswap.ops

    for _ in range(2):
        optimized(*good)
    used = tf.config.experimental.get_memory_info("CPU:0")["current"]
    failed = 0
    for _ in range(3):
        try:
            optimized(*bad)
        except tf.errors.InvalidArgumentError:
            failed += 1
    optimized(*good)
    return {
        "failed": failed,
        "host_in_use": tfswap.ops.stats().pool_in_use_bytes,
        "grown": tf.config.experimental.get_memory_info("CPU:0")["current"] - used,
    }


def fail_inside() -> dict[str, int]:
    """A step that fails in the fifth iteration of its loop, three times, and runs well before and after."""
    import tfswap

    settle()
    (w,) = weights = make_weights((64, 64))

    def body(i: Any, h: Any, bad: Any) -> Any:
        return i + 1, tf.debugging.check_numerics(tf.tanh(h @ w) / tf.cast(bad - i, tf.float32), "bad"), bad

    def step(x: Any, bad: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.while_loop(lambda i, *_: i < 8, body, [0, x, bad], maximum_iterations=8)[1]
            loss = tf.reduce_sum(h * h)
        return descend(tape, loss, weights)

    optimized = tfswap.optimize(tf.function(step), memory_limit="60%", on_exceeded="raise")
    x, good, bad = make_data(1000, 64), tf.constant(99), tf.constant(4)
    left = _fail_thrice(optimized, (x, good), (x, bad))
    return {"accumulators": len(optimized.plan().accumulators), **left}


def fail_in_backward_loop() -> dict[str, int]:
    """As `fail_inside`, in the backward loop, with an element on its way that no kernel waits for any more."""
    import tfswap

    settle()
    (w,) = weights = make_weights((64, 64))

    @tf.custom_gradient
    def scaled_back(h: Any, i: Any, bad: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return tf.debugging.check_numerics(upstream / tf.cast(bad - i, tf.float32), "bad"), None, None

        return tf.identity(h), gradient

    def step(x: Any, bad: Any) -> Any:
        def body(i: Any, h: Any) -> Any:
            return i + 1, scaled_back(tf.tanh(h @ w), i, bad)

        with tf.GradientTape() as tape:
            h = tf.while_loop(lambda i, _: i < 8, body, [0, x], maximum_iterations=8)[1]
            loss = tf.reduce_sum(h * h)
        return descend(tape, loss, weights)

    x, good, bad = make_data(1000, 64), tf.constant(99), tf.constant(4)
    with prefetching():
        optimized = tfswap.optimize(tf.function(step), memory_limit="80%", tactics=("swap",), on_exceeded="raise")
        left = _fail_thrice(optimized, (x, good), (x, bad))
    return {"prefetched": len(optimized.plan().prefetched), **left}


def fail_in_micro_batch() -> dict[str, int]:
    """As `fail_inside`, of a step that moves tensors inside of its loop: the third of four micro-batches fails."""
    import tfswap

    settle()
    weights = make_weights(*[(64, 64)] * 6)

    def step(x: Any, bad: Any) -> Any:
        for i in tf.range(4):
            with tf.GradientTape() as tape:
                loss = stack_loss(x[i], weights)
            gradients = tape.gradient(loss, weights)
            tf.debugging.check_numerics(loss / tf.cast(bad - i, tf.float32), "bad")
            for w, g in zip(weights, gradients, strict=True):
                w.assign_sub(0.01 * g)

    optimized = tfswap.optimize(tf.function(step), memory_limit="40%", on_exceeded="raise")
    x, good, bad = make_data(4, 1000, 64), tf.constant(99), tf.constant(2)
    left = _fail_thrice(optimized, (x, good), (x, bad))
    return {"moved": sum(len(i.evictions) for i in optimized.plan().inside), **left}
