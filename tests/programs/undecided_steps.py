"""Steps that decide branches and iterations when they run, in all or many of their courses."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from control_flow import prefetching
from models import settle
from step_parts import descend, make_data, make_weights
from step_peaks import measuring


def any_number_of_iterations() -> dict[str, Any]:
    """A step whose argument says how many of at most 6 iterations there are, with what its loop saves prefetched."""
    import tfswap

    settle()
    (w,) = weights = make_weights((64, 64))

    def step(x: Any, n: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.while_loop(lambda i, h: i < n, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, x], maximum_iterations=6)[1]
            loss = tf.reduce_sum(h * h)
        return descend(tape, loss, weights)

    x, first, numbers = make_data(1000, 64), w.numpy().copy(), (6, 0, 1, 2, 6)
    with prefetching():
        optimized = tfswap.optimize(tf.function(step), memory_limit="80%", tactics=("swap",), on_exceeded="raise")
        losses, peaks = [], []
        for n in numbers:
            with measuring(peaks):
                losses.append(float(optimized(x, tf.constant(n))))
    made = w.numpy().copy()
    w.assign(first)
    plain = [float(tf.function(step)(x, tf.constant(n))) for n in numbers]
    return {
        "same": losses == plain and bool((w.numpy() == made).all()),
        "peaks": peaks,
        "planned": optimized.plan().planned_peak_bytes,
        "prefetched": len(optimized.plan().prefetched),
    }


def every_sequence(limit: str) -> dict[str, Any]:
    """A loop whose input decides the branch of each iteration, through all sequences of four."""
    import tfswap

    settle()
    (w,) = weights = make_weights((16, 16))
    branches: list[Callable[[Any], Any]] = [
        lambda h: tf.tanh(tf.stack([h, h, h]))[0] @ w,
        lambda h: tf.tanh(h @ w),
    ]

    def step(x: Any, chosen: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.nn.relu(x @ w)
            for i in tf.range(4):
                h = tf.switch_case(chosen[i], [functools.partial(branch, h) for branch in branches])
            loss = tf.reduce_sum(h * h)
        return descend(tape, loss, weights)

    optimized = tfswap.optimize(tf.function(step), memory_limit=limit)
    x = make_data(1000, 16)
    sequences = [tf.constant(sequence) for sequence in itertools.product(range(2), repeat=4)]
    optimized(x, sequences[0])
    peaks: list[int] = []
    for sequence in sequences:
        with measuring(peaks):
            optimized(x, sequence)
    return {"peak": max(peaks), "planned": optimized.plan().planned_peak_bytes, "plans": optimized.plans}


def any_end(share: float) -> dict[str, Any]:
    """A loop that saves for its gradient, and ends after none to all of four iterations, as its argument says.

    Args:
        share: of the step's floor, that is the limit.
    """
    import tfswap

    settle()
    (w,) = weights = make_weights((16, 16))
    x = make_data(600, 16)

    def body(i: Any, h: Any) -> Any:
        return i + 1, tf.tanh(tf.concat([tf.sigmoid(h[:150] @ w), h[150:]], 0))

    def step(x: Any, n: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.while_loop(lambda i, h: i < n, body, [0, tf.nn.relu(x @ w)], maximum_iterations=4)[1]
            h = tf.nn.relu(tf.reshape(tf.tanh(tf.tile(h, [1, 2])), [-1, 16]) @ w)
            loss = tf.reduce_sum(h * h)
        return descend(tape, loss, weights)

    with pytest.raises(tfswap.InfeasibleMemoryLimit) as refused:
        tfswap.optimize(tf.function(step), memory_limit=1)(x, tf.constant(2))
    optimized = tfswap.optimize(tf.function(step), memory_limit=int(share * refused.value.floor_bytes))
    ends = [tf.constant(n) for n in (0, 1, 2, 3, 4, 5, 4, 3, 2, 1, 0)]
    optimized(x, ends[0])
    peaks: list[int] = []
    for n in ends:
        with measuring(peaks):
            optimized(x, n)
    plan = optimized.plan()
    return {
        "peak": max(peaks),
        "planned": plan.planned_peak_bytes,
        "limit": plan.limit_bytes,
        "plans": optimized.plans,
    }


def rare_branch_and_early_end(share: float) -> dict[str, Any]:
    """A branch that one of a hundred iterations takes, and a loop with as many iterations as another one has left.

    Args:
        share: of the step's floor, that is the limit.
    """
    import tfswap

    settle()
    (w,) = weights = make_weights((64, 64))

    def heavy(h: Any) -> Any:
        made = [tf.tanh(h * float(k)) for k in range(2, 8)]
        return tf.add_n([*made, *(tf.sigmoid(t @ w) for t in made)])

    def step(x: Any, least: Any) -> Any:
        h = x
        for i in tf.range(100):
            h = tf.cond(tf.equal(i, 50), lambda: heavy(h), lambda: tf.tanh(h))  # noqa: B023 - called immediately
        n, h = tf.while_loop(
            lambda _, h: tf.reduce_sum(h) > least, lambda n, h: (n + 1, tf.tanh(h)), [0, h], maximum_iterations=8
        )
        h = tf.while_loop(lambda i, _: i < 8 - n, lambda i, h: (i + 1, heavy(h)), [0, h])[1]
        h = tf.stop_gradient(h)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(h @ w))
        return descend(tape, loss, weights)

    x, least = make_data(1024, 64), tf.constant(1e9)
    with pytest.raises(tfswap.InfeasibleMemoryLimit) as refused:
        tfswap.optimize(tf.function(step), memory_limit=1)(x, least)
    optimized = tfswap.optimize(tf.function(step), memory_limit=int(share * refused.value.floor_bytes))
    optimized(x, least)
    tf.config.experimental.reset_memory_stats("CPU:0")
    optimized(x, least)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return {"peak": peak, "limit": optimized.plan().limit_bytes}


def undecided_step(weights: list[Any]) -> Any:
    """Loops with no bound, one in the other, and a conditional in them, whose inputs decide how often and which."""
    w, u = weights

    def converge(x: Any, h: Any, tolerance: Any) -> Any:
        def damped(h: Any) -> Any:
            return 0.3 * h + 0.7 * tf.tanh(tf.nn.relu(h @ u) @ tf.transpose(u) + x)

        def refine(h: Any, change: Any) -> tuple[Any, Any]:
            new = tf.cond(change > 0.3, lambda: damped(h), lambda: tf.tanh(h @ w + x))
            return new, tf.reduce_mean(tf.abs(new - h))

        return tf.while_loop(lambda h, change: change > tolerance, refine, [h, 1.0])[0]

    def step(x: Any, inner: Any, outer: Any) -> Any:
        def refine(h: Any, change: Any) -> tuple[Any, Any]:
            new = 0.5 * (converge(x, h, inner) + converge(x, 0.9 * h, inner))
            return new, tf.reduce_mean(tf.abs(new - h))

        h = tf.stop_gradient(tf.while_loop(lambda h, change: change > outer, refine, [x, 1.0])[0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.nn.relu(tf.tanh(h @ w + x) @ u)))
        return descend(tape, loss, weights)

    return step


def any_course(share: float) -> dict[str, Any]:
    """Runs `undecided_step` along many courses, in a limit.

    Args:
        share: the limit, as a share of the step's floor.
    """
    import tfswap
    from tfswap.exporters.function import grappler_off

    settle()
    weights = make_weights((64, 64), (64, 112))

    step = undecided_step(weights)
    first = [weight.numpy() for weight in weights]
    tolerances = ((2.0, 2.0), (2.0, 0.1), (0.1, 2.0), (0.5, 0.2), (1e-3, 1e-2), (1e-4, 1e-4))
    calls = [(s * make_data(1000, 64), tf.constant(i), tf.constant(o)) for i, o in tolerances for s in (0.1, 3.0)]

    def digests(function: Any) -> tuple[list[bytes], list[int]]:
        for weight, value in zip(weights, first, strict=True):
            weight.assign(value)
        found: list[bytes] = []
        peaks: list[int] = []
        for call in calls:
            with measuring(peaks):
                found.append(function(*call).numpy().tobytes())
        return [*found, *(weight.numpy().tobytes() for weight in weights)], peaks

    with grappler_off():
        expected, _ = digests(tf.function(step))
    with pytest.raises(tfswap.InfeasibleMemoryLimit) as refused:
        tfswap.optimize(tf.function(step), memory_limit=1)(*calls[0])
    limit = int(share * refused.value.floor_bytes)
    optimized = tfswap.optimize(tf.function(step), memory_limit=limit, on_exceeded="raise")
    found, peaks = digests(optimized)
    plan = optimized.plan()
    return {
        "same": found == expected,
        "peaks": peaks,
        "planned": plan.planned_peak_bytes,
        "limit": plan.limit_bytes,
        "plans": optimized.plans,
    }
