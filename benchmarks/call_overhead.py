"""What a call of an optimized function costs, compared with that of a concrete function, and of a `tf.function`.

    TF_CPU_ALLOCATOR_USE_BFC=1 TF_CPU_BFC_MEM_LIMIT_IN_MB=256 python benchmarks/call_overhead.py [CALLS]

The step is tiny, so that most of its time is the call. One round calls each of them once, in an order that is drawn,
and times are compared within rounds: what else the machine does falls on all alike. Printed are medians, and the
medians of the rounds' differences and ratios. Each call finds the caches cold, and what the others left in the
arena: in a loop of its own a call's Python costs a third of that. `--alone` has such loops, of one concrete and one
optimized function, in blocks of 50 calls. `--profile` prints where the time of CALLS calls goes (cProfile).
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tfswap

ROWS, WIDTH, LAYERS = 64, 64, 3
BLOCK = 50


def make_step() -> Callable[..., Any]:
    """A step that trains a few dense layers."""
    weights = [tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], seed=(i, 0)) * 0.1) for i in range(LAYERS)]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.nn.relu(tf.sin(h @ weight))
            loss = tf.reduce_mean(h)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("calls", type=int, nargs="?", default=2000)
    parser.add_argument("--alone", action="store_true", help="nothing but one concrete and one optimized function")
    parser.add_argument("--profile", action="store_true", help="print where the time of the optimized calls goes")
    options = parser.parse_args()
    x = tf.random.stateless_normal([ROWS, WIDTH], seed=(1, 2))
    traced = tf.function(make_step())
    concrete = tf.function(make_step()).get_concrete_function(x)
    optimized = tfswap.optimize(tf.function(make_step()), memory_limit="100%")
    # The same graph, called by TensorFlow alone: its nodes are no part of what a call costs.
    rewritten = tfswap.optimize(tf.function(make_step()), memory_limit="100%").get_concrete_function(x)
    left_alone = tfswap.optimize(tf.function(make_step()), memory_limit="300%")
    calls = {
        "concrete": concrete,
        "optimized": optimized,
        "left to TensorFlow": left_alone,
        "rewritten, concrete": rewritten,
        "tf.function": traced,
    }
    if options.alone:
        calls = {"concrete": concrete, "optimized": optimized}
    for call in calls.values():
        for _ in range(20):
            call(x)
    if options.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(options.calls):
            optimized(x)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    times: dict[str, list[float]] = {name: [] for name in calls}
    block = BLOCK if options.alone else 1
    for _ in range(options.calls // block):
        for name, call in random.sample(list(calls.items()), len(calls)):
            started = time.perf_counter()
            for _ in range(block):
                call(x)
            times[name].append((time.perf_counter() - started) / block)
    for name, took in times.items():
        ratio = statistics.median(t / base for t, base in zip(took, times["concrete"], strict=True))
        more = statistics.median(t - base for t, base in zip(took, times["concrete"], strict=True))
        print(f"{name:<20} {1e6 * statistics.median(took):8.1f} us   x{ratio:.2f} of concrete   {1e6 * more:+.1f} us")


if __name__ == "__main__":
    main()
