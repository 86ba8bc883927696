"""Trains dense layers whose variables and Adam slots are many times larger than the arena, with and without tfswap.

    python benchmarks/state.py                      # 0.23 GiB of state in 24 MiB, 4 GiB in 192 MiB; 5 minutes
    python benchmarks/state.py --layers 20 --width 1024 --cap 24

With tfswap the arena is capped at `--cap` MiB from the start: the model is built in a `tfswap.scope`. Without it the
arena has room for all. Each is a process of its own, one after the other. Values are all losses and variables after the
steps, bit by bit. The time is the median of the steps after the first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import Any

BATCH = 64
STEPS = 4
ROOM_MIB = 1
"""Of the cap, left for what is not the step's: inputs and results."""
SIZES = ((20, 1024, 24), (85, 2048, 192))
"""Layers, their width, and the cap in MiB."""


def train(layers: int, width: int, cap_mib: int | None) -> dict[str, Any]:
    """The figures of some steps, under a cap or without one."""
    import tensorflow as tf

    import tfswap
    from tfswap.ir.permits import TACTICS

    with nullcontext() if cap_mib is None else tfswap.scope():
        tf.keras.utils.set_random_seed(1)
        dense = [tf.keras.layers.Dense(width, "relu") for _ in range(layers)]
        model = tf.keras.Sequential([tf.keras.Input((width,)), *dense, tf.keras.layers.Dense(10)])
        optimizer = tf.keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf.keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            loss = tf.reduce_mean(losses)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    called: Any = step
    if cap_mib is not None:
        called = tfswap.optimize(step, memory_limit=(cap_mib - ROOM_MIB) << 20, tactics=TACTICS)
    x, y = tf.random.stateless_normal((BATCH, width), (1, 2)), tf.zeros((BATCH,), tf.int32)
    digest, peaks, planned, seconds = hashlib.sha256(), [], [], []
    for _ in range(STEPS):
        tf.config.experimental.reset_memory_stats("CPU:0")
        began = time.perf_counter()
        digest.update(called(x, y).numpy().tobytes())
        seconds.append(time.perf_counter() - began)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        if cap_mib is not None:
            planned.append(called.report().planned_peak_bytes)  # the first step's plan may be another than later ones'
    nbytes = 0
    for variable in (*model.variables, *optimizer.variables):
        value = variable.numpy()
        nbytes += value.nbytes
        digest.update(value.tobytes())
    found = {"state": nbytes, "peak": max(peaks), "s": statistics.median(seconds[1:]), "digest": digest.hexdigest()}
    if cap_mib is not None:
        found |= {"planned": max(planned), "at_home": called.report().at_home_bytes}
    return found


def measured(layers: int, width: int, cap_mib: int | None) -> dict[str, Any]:
    """`train` in a process of its own."""
    room_mib = cap_mib or (layers + 8) * width * width * 4 * 4 // 2**20
    env = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(room_mib), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, __file__, "--child", json.dumps([layers, width, cap_mib])]
    ran = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--cap", type=int, default=24, help="MiB of the arena")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(train(*json.loads(args.child))))
        return
    print("| layers | width | state, MiB | arena, MiB | planned | peak | values | time |")
    print("| --: | --: | --: | --: | --: | --: | --- | --: |")
    for layers, width, cap_mib in [(args.layers, args.width, args.cap)] if args.layers else SIZES:
        plain, ours = measured(layers, width, None), measured(layers, width, cap_mib)
        same = "identical" if plain["digest"] == ours["digest"] else "DIFFERENT"
        sizes = f"{ours['state'] / 2**20:,.0f} | {cap_mib} | {ours['planned']:,} | {ours['peak']:,}"
        print(f"| {layers} | {width} | {sizes} | {same} | {ours['s'] / plain['s']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
