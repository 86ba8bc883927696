"""The time of a program's steps under `tfswap.watch` over that without, for two programs.

    TF_CPU_ALLOCATOR_USE_BFC=1 TF_CPU_BFC_MEM_LIMIT_IN_MB=2048 python benchmarks/watch_overhead.py [ROUNDS]

"convolutions" is a step of a small convolutional net, "small_ops" an eager loop that calls a function of few small ops.
A watch begins, and sees the first ten steps, which it records. Then a round runs some steps with the watch and as many
without it, in an order that is drawn. Printed are the median of the rounds' ratios and the quartiles, of elapsed time
and of the CPU's, and the CPU's time that the watch has taken for the first steps, once: it imports tfswap, records
these, names what is in memory and takes the step's graph.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function

import tfswap

ROUND_S = 0.2
"""About the time of a round's steps, each way."""


def convolutions() -> Callable[[], Any]:
    """A step of three convolutions with 32 images of 64 x 64."""
    filters = [tf.Variable(0.1 * tf.random.normal([3, 3, i, o])) for i, o in ((3, 16), (16, 16), (16, 16))]
    images = tf.random.normal([32, 64, 64, 3])

    @tf.function
    def train_step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for kernel in filters:
                x = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
            loss = tf.reduce_mean(x * x)
        for kernel, gradient in zip(filters, tape.gradient(loss, filters), strict=True):
            kernel.assign_sub(0.1 * gradient)
        return loss

    return lambda: train_step(images)


def small_ops() -> Callable[[], Any]:
    """A function of five small ops, and five eager ones."""
    weight = tf.Variable(tf.random.normal([8, 8]))
    x = tf.random.normal([8, 8])

    @tf.function
    def train_step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.tanh(x @ weight))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    def step() -> Any:
        y = x
        for _ in range(5):
            y = y + 1.0
        return train_step(y)

    return step


def seconds(step: Callable[[], Any], steps: int) -> tuple[float, float]:
    """The seconds that steps take, and those of the CPU."""
    began, began_cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return time.perf_counter() - began, time.process_time() - began_cpu


def measured(make: Callable[[], Callable[[], Any]], rounds: int) -> tuple[list[float], list[float], float]:
    """The quartiles of the rounds' ratios of time and of the CPU's time, and the CPU's seconds of a watch's start."""
    kind: Any = concrete_function.ConcreteFunction
    step, plain = make(), kind._call_flat
    seconds(step, 3)  # it is traced
    steps = max(1, round(ROUND_S / (seconds(step, 10)[0] / 10)))
    _, alone_s = seconds(step, 10)
    began_s = time.process_time()
    watch = tfswap.watch().start()
    seconds(step, 10)
    first_s = time.process_time() - began_s - alone_s
    ways = {"watched": kind._call_flat, "plain": plain}
    ratios: list[tuple[float, float]] = []
    for _ in range(rounds):
        took: dict[str, tuple[float, float]] = {}
        for name in random.sample(list(ways), len(ways)):
            kind._call_flat = ways[name]
            took[name] = seconds(step, steps)
        elapsed, of_cpu = (watched / plain for watched, plain in zip(took["watched"], took["plain"], strict=True))
        ratios.append((elapsed, of_cpu))
    watch.stop()
    elapsed, of_cpu = (statistics.quantiles(each, n=4) for each in zip(*ratios, strict=True))
    return elapsed, of_cpu, first_s


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print("program       time   quartiles    of the CPU  quartiles    at its start")
    for make in (convolutions, small_ops):
        elapsed, of_cpu, first_s = measured(make, rounds)
        shown = "  ".join(f"{middle:.3f}  {low:.3f}-{high:.3f}" for low, middle, high in (elapsed, of_cpu))
        print(f"{make.__name__:12}  {shown}  {first_s:.2f} s")


if __name__ == "__main__":
    main()
