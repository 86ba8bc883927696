"""Whether a step that swaps can run for ever: host pool, resident memory and arena after 100, 1,000 and 10,000 steps.

    export TF_CPU_ALLOCATOR_USE_BFC=1 TF_CPU_BFC_MEM_LIMIT_IN_MB=64 TF_ENABLE_ONEDNN_OPTS=0
    python benchmarks/endurance.py [STEPS]

A small net with dense layers and a loop, planned at 2% above its floor, so that both its own tensors and what its loop
saves are swapped. Each batch is new and each loss is read, as a training loop does. Printed at each power of ten: the
most that a step took in the arena so far, what is in use there between steps, what the host pool has reserved and what
of it is in use, and the process's resident memory. What is asserted is that no step passed the limit and that arena and
pool are flat from the hundredth step on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

import tfswap
import tfswap.ops

ROWS, WIDTH, LAYERS, TIMES = 512, 64, 4, 4
ABOVE_FLOOR = 1.02
KIB = 1024


def make_step() -> Callable[..., Any]:
    """A step that trains a few dense layers and a recurrent one."""
    shapes = [(i, [WIDTH, WIDTH]) for i in range(LAYERS + 1)]
    *weights, recurrent = [tf.Variable(tf.random.stateless_normal(s, seed=(i, 0)) * 0.1) for i, s in shapes]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.nn.relu(tf.sin(h @ weight))
            loop = tf.while_loop(
                lambda i, h: i < TIMES,
                lambda i, h: (i + 1, tf.tanh(h @ recurrent)),
                [0, h],
                maximum_iterations=TIMES,
            )
            loss = tf.reduce_mean(loop[1] ** 2)
        trained = [*weights, recurrent]
        for weight, gradient in zip(trained, tape.gradient(loss, trained), strict=True):
            weight.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    return step


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * KIB
    raise RuntimeError("/proc/self/status has no VmRSS: this needs Linux.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=int, nargs="?", default=10_000)
    steps = parser.parse_args().steps

    def batch(i: int) -> Any:
        return tf.random.stateless_normal([ROWS, WIDTH], seed=(i, 1))

    try:
        tfswap.optimize(tf.function(make_step()), memory_limit=1)(batch(0))
    except tfswap.InfeasibleMemoryLimit as refused:
        limit = int(refused.floor_bytes * ABOVE_FLOOR)
    else:
        raise RuntimeError("A limit of one byte was granted.")
    optimized = tfswap.optimize(tf.function(make_step()), memory_limit=limit)

    marks = [10**k for k in range(2, 9) if 10**k <= steps]
    flat: dict[int, tuple[int, int]] = {}
    peak = 0
    began = time.monotonic()
    print(f"limit {limit / KIB:.1f} KiB")
    print("    step   peak, KiB  arena, KiB  pool, KiB  in use  resident, MiB  ms/step")
    for i in range(1, steps + 1):
        x = batch(i)
        tf.config.experimental.reset_memory_stats("CPU:0")
        float(optimized(x))
        memory = tf.config.experimental.get_memory_info("CPU:0")
        peak = max(peak, memory["peak"])
        if i not in marks:
            continue
        stats = tfswap.ops.stats()
        flat[i] = memory["current"], stats.pool_reserved_bytes
        print(
            f"{i:8d}{peak / KIB:12.1f}{memory['current'] / KIB:12.1f}{stats.pool_reserved_bytes / KIB:11.1f}"
            f"{stats.pool_in_use_bytes:8d}{resident_bytes() / KIB**2:15.1f}{(time.monotonic() - began) / i * 1e3:9.2f}",
            flush=True,
        )
    swapped = tfswap.ops.stats().out_copies
    print(f"{swapped} copies out, {optimized.plans} plan(s)")
    assert swapped > steps, "nothing was swapped"
    assert peak <= limit, f"a step took {peak} bytes of {limit}"
    assert len(set(flat.values())) == 1, f"arena or pool is not flat: {flat}"


if __name__ == "__main__":
    main()
