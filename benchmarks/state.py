"""Trains nets whose variables and Adam slots are many times larger than the arena, with and without tfswap.

    python benchmarks/state.py                      # 0.23 GiB of state in 24 MiB, 4 GiB in 192 MiB; 5 minutes
    python benchmarks/state.py --tables             # embedding tables, updated in slices: up to 3 GiB in 64 MiB
    python benchmarks/state.py --rows 8388608 --width 64 --cap 64       # 6 GiB; takes 18 GiB of memory
    python benchmarks/state.py --layers 20 --width 1024 --cap 24
    python benchmarks/state.py --branches           # optimizers that update in a branch of a conditional; a minute
    python benchmarks/state.py --bandwidth 2e8 --cap 48     # a link of 0.2 GB/s in each direction; 2 minutes
    python benchmarks/state.py --bandwidth 2e9 --optimizer SGD --width 2048 --batch 8 --cap 96

With tfswap the arena is capped at `--cap` MiB from the start: the model is built in a `tfswap.scope`, tables in slices.
Without tfswap the arena has room for all. Each is a process of its own, one after the other. Values are all losses and
variables after the steps, bit by bit. The time is the median of the steps after the first. Two ratios of dense layers
are over the time that one thread takes for a memcpy of all bytes that a step moves: that of the time above the
unlimited step's, and that of the unlimited step's time.

With `--bandwidth` copies take as long as on such a link, and the step is planned with a profile that has measured it.
The least time is that of `least_step.py`: of kernels that together take the time of the step without a limit, in the
plan's order, with the copies that the variables at home need, wherever they are placed. The stall is the time above the
unlimited step's, over the least possible one.
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
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from least_step import needs_of_planned

STEPS = 4
ROOM_MIB = 1
"""Of the cap, left for what is not the step's: inputs and results."""
SIZES = ((20, 1024, 24), (85, 2048, 192))
"""Layers, their width, and the cap in MiB."""
TABLES = ((65_536, 16, 2), (1_048_576, 16, 8), (4_194_304, 64, 64))
"""Rows of an embedding table, their width, and the cap in MiB."""
IDS = 8
"""Rows that an example reads."""
BRANCHES = (4, 1024, 10)
"""Layers, their width, and the cap in MiB, of optimizers that update in a branch."""
OPTIMIZERS = ("Adam", "LossScaleOptimizer", "gradient accumulation")
"""Keras' optimizers; all update as Adam does. The second skips steps, the third adds up the gradients of two steps."""
SGD = "SGD"
"""Keras' optimizer without slots, whose kernels take little time for each byte that is copied."""


def optimizer_of(name: str) -> Any:
    """An optimizer of `OPTIMIZERS`, or `SGD`."""
    import tensorflow as tf

    keras = tf.keras.optimizers
    if name == SGD:
        return keras.SGD(1e-3)
    adam = keras.Adam(1e-3, gradient_accumulation_steps=2 if name == OPTIMIZERS[2] else None)
    return keras.LossScaleOptimizer(adam) if name == OPTIMIZERS[1] else adam


def model_of(layers: int, rows: int, width: int, batch: int) -> tuple[Any, Any]:
    """Dense layers, or an embedding table where it has rows; and a batch."""
    import tensorflow as tf

    keras = tf.keras.layers
    if rows:
        table = [tf.keras.Input((IDS,), dtype="int32"), keras.Embedding(rows, width), keras.Flatten()]
        return tf.keras.Sequential([*table, keras.Dense(10)]), tf.random.uniform(
            (batch, IDS), 0, rows, tf.int32, seed=2
        )
    dense = [keras.Dense(width, "relu") for _ in range(layers)]
    x = tf.random.stateless_normal((batch, width), (1, 2))
    return tf.keras.Sequential([tf.keras.Input((width,)), *dense, keras.Dense(10)]), x


def step_of(model: Any, optimizer: Any) -> Any:
    """A training step."""
    import tensorflow as tf

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf.keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            loss = tf.reduce_mean(losses)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    return step


def train(
    layers: int,
    rows: int,
    width: int,
    batch: int,
    cap_mib: int | None,
    bandwidth: float | None,
    optimizer_name: str,
    unlimited_s: float,
) -> dict[str, Any]:
    """The figures of some steps, under a cap or without one.

    Args:
        rows: of an embedding table; 0 for dense layers.
        bandwidth: of the link, in bytes per second, with which the step is planned; None where it is not profiled.
        unlimited_s: the seconds of the step without a limit, where these are known.
    """
    import tensorflow as tf

    import tfswap
    import tfswap.ops

    with nullcontext() if cap_mib is None else tfswap.scope():
        tf.keras.utils.set_random_seed(1)
        model, x = model_of(layers, rows, width, batch)
        optimizer = optimizer_of(optimizer_name)
        optimizer.build(model.trainable_variables)

    step = step_of(model, optimizer)
    y = tf.zeros((batch,), tf.int32)
    called: Any = step
    profile = None
    if bandwidth is not None and cap_mib is not None:
        profile = tfswap.profile(tfswap.optimize(step, memory_limit=(cap_mib - ROOM_MIB) << 20), x, y)
    if cap_mib is not None:
        called = tfswap.optimize(step, memory_limit=(cap_mib - ROOM_MIB) << 20, profile=profile)
    digest, peaks, planned, seconds, cpu_seconds = hashlib.sha256(), [], [], [], []
    for _ in range(STEPS):
        tf.config.experimental.reset_memory_stats("CPU:0")
        tfswap.ops.reset_stats()
        began, cpu_began = time.perf_counter(), time.process_time()
        digest.update(called(x, y).numpy().tobytes())
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        if cap_mib is not None:
            planned.append(called.report().planned_peak_bytes)  # the first step's plan may be another than later ones'
    nbytes = 0
    for variable in (*model.variables, *optimizer.variables):
        value = variable.numpy()
        nbytes += value.nbytes
        digest.update(memoryview(value).cast("B") if value.ndim else value.tobytes())
    found = {"state": nbytes, "peak": max(peaks), "digest": digest.hexdigest()}
    found |= {"s": statistics.median(seconds[1:]), "cpu_s": statistics.median(cpu_seconds[1:])}
    if cap_mib is not None:
        moved = tfswap.ops.stats()  # of the last step
        found |= {"planned": max(planned), "in": moved.in_bytes, "out": moved.out_bytes}
        found |= {"memcpy_s": memcpy_s(moved.in_bytes + moved.out_bytes)}
        if bandwidth is not None:
            needs = needs_of_planned(called)
            found |= {
                "least_s": needs.least_seconds(
                    unlimited_s, lambda nbytes: nbytes / bandwidth, called.plan().limit_bytes
                )
            }
        found |= {"floor": called.report().floor_bytes, "slice": called.plan().slice_bytes}
    return found


def memcpy_s(nbytes: int) -> float:
    """The seconds that one thread takes to copy this number of bytes, each of which is in memory and in no cache."""
    block, count = 16 << 20, 16
    source, target = bytearray(os.urandom(4096) * (block * count // 4096)), bytearray(block * count)
    views = memoryview(source), memoryview(target)
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for begin in range(0, block * count, block):
            views[1][begin : begin + block] = views[0][begin : begin + block]
        rounds.append(time.perf_counter() - began)
    return nbytes / (block * count) * statistics.median(rounds)


def measured(
    layers: int,
    rows: int,
    width: int,
    batch: int,
    cap_mib: int | None,
    link: float | None = None,
    optimizer: str = OPTIMIZERS[0],
    unlimited_s: float = 0.0,
) -> dict[str, Any]:
    """`train` in a process of its own, with copies as on such a link."""
    table_mib = rows * width * 4 // 2**20
    room_mib = cap_mib or (layers + 8) * width * width * 4 * 4 // 2**20 + 7 * table_mib + 64
    of_child = [layers, rows, width, batch, cap_mib, link, optimizer, unlimited_s]
    speed = {} if link is None else {"TFSWAP_COPY_BANDWIDTH": str(link)}
    return in_arena([__file__, "--child", json.dumps(of_child)], room_mib, **speed)


def in_arena(command: Sequence[str], mib: int, **environment: str) -> dict[str, Any]:
    """The JSON value that a program prints last, in an arena of `mib` MiB. Where it fails, this process ends."""
    arena = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(mib), "TF_CPP_MIN_LOG_LEVEL": "2"}
    given = {**os.environ, **arena, **environment}
    ran = subprocess.run([sys.executable, *command], env=given, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(ran.stderr or f"it ended with {ran.returncode}")
    return json.loads(ran.stdout.splitlines()[-1])


def compare(layers: int, width: int, batch: int, cap_mib: int) -> None:
    """Print a row of the step under the cap next to the unlimited one."""
    plain, ours = measured(layers, 0, width, batch, None), measured(layers, 0, width, batch, cap_mib)
    sizes = f"{ours['state'] / 2**20:,.0f} | {cap_mib} | {ours['planned']:,} | {ours['peak']:,}"
    print(f"| {layers} | {width} | {batch} | {sizes} | {_same(plain, ours)} | {_times(plain, ours)} |", flush=True)


def compare_tables(rows: int, width: int, batch: int, cap_mib: int) -> None:
    """As `compare`, of a step with an embedding table."""
    plain, ours = measured(0, rows, width, batch, None), measured(0, rows, width, batch, cap_mib)
    slices = -(-rows * width * 4 // ours["slice"]) if ours["slice"] else 1
    sizes = f"{ours['state'] / 2**20:,.0f} | {cap_mib - ROOM_MIB}"
    peaks = f"{ours['planned']:,} | {ours['peak']:,} | {ours['floor']:,}"
    print(
        f"| {rows:,} x {width} | {sizes} | {peaks} | {slices} | {_same(plain, ours)} | {ours['s'] / plain['s']:.2f} |",
        flush=True,
    )


def compare_branches(layers: int, width: int, batch: int, cap_mib: int) -> None:
    """Print a row for each optimizer, with the floor of its step."""
    print("| optimizer | state, MiB | arena, MiB | planned | peak | floor | values | time |")
    print("| --- | --: | --: | --: | --: | --: | --- | --: |")
    for optimizer in OPTIMIZERS:
        plain, ours = (measured(layers, 0, width, batch, cap, optimizer=optimizer) for cap in (None, cap_mib))
        sizes = f"{ours['state'] / 2**20:,.0f} | {cap_mib} | {ours['planned']:,} | {ours['peak']:,} | {ours['floor']:,}"
        print(f"| {optimizer} | {sizes} | {_same(plain, ours)} | {ours['s'] / plain['s']:.2f} |", flush=True)


def compare_on_link(layers: int, width: int, batch: int, cap_mib: int, link: float, optimizer: str) -> None:
    """Print a row of the step on a link next to the least time that its copies and its kernels allow."""
    plain = measured(layers, 0, width, batch, None, optimizer=optimizer)
    ours = measured(layers, 0, width, batch, cap_mib, link, optimizer, plain["s"])
    copies_s, least_s, stall_s = ours["in"] / link, ours["least_s"], ours["s"] - plain["s"]
    stalls = f"{stall_s / (least_s - plain['s']):.2f}" if least_s > plain["s"] else "none must be"
    moved = f"{ours['in'] / 2**20:,.0f} | {ours['out'] / 2**20:,.0f} | {copies_s / plain['s']:.2f}"
    times = f"{ours['s'] / plain['s']:.2f} | {ours['s'] / least_s:.2f} | {stalls}"
    sizes = f"{optimizer} | {layers} | {width} | {batch} | {cap_mib} | {ours['peak']:,}"
    print(f"| {link / 1e9:g} | {sizes} | {moved} | {times} | {_same(plain, ours)} |", flush=True)


def _times(plain: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Ratios of times, and MiB moved."""
    moved, memcpy_s = (ours["in"] + ours["out"]) / 2**20, ours["memcpy_s"]
    added = f"{(ours['s'] - plain['s']) / memcpy_s:.2f} | {plain['s'] / memcpy_s:.1f}" if moved else "none | none"
    return f"{ours['s'] / plain['s']:.2f} | {ours['cpu_s'] / plain['cpu_s']:.2f} | {moved:,.0f} | {added}"


def _same(plain: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    return "identical" if plain["digest"] == ours["digest"] else "DIFFERENT"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rows", type=int, help="of an embedding table in place of layers")
    parser.add_argument("--tables", action="store_true", help="some embedding tables")
    parser.add_argument("--branches", action="store_true", help="optimizers that update in a branch")
    parser.add_argument("--cap", type=int, default=24, help="MiB of the arena")
    parser.add_argument("--optimizer", default=OPTIMIZERS[0], help="of the step on a link: Adam, or SGD")
    parser.add_argument("--bandwidth", type=float, help="bytes per second of copies in each direction")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(train(*json.loads(args.child))))
        return
    if args.branches:
        compare_branches(*BRANCHES[:2], args.batch, BRANCHES[2])
        return
    if args.bandwidth:
        print("| link, GB/s | optimizer | layers | width | batch | arena, MiB | peak | MiB in | MiB out ", end="")
        print("| copies | time | over the least | stall | values |")
        print("| --: | --- |" + " --: |" * 11 + " --- |")
        layers = args.layers or SIZES[0][0]
        compare_on_link(layers, args.width, args.batch, args.cap, args.bandwidth, args.optimizer)
        return
    if args.tables or args.rows:
        print("| table | state, MiB | limit, MiB | planned | peak | floor | slices | values | time |")
        print("| --- | --: | --: | --: | --: | --: | --: | --- | --: |")
        for rows, width, cap_mib in [(args.rows, args.width, args.cap)] if args.rows else TABLES:
            compare_tables(rows, width, args.batch, cap_mib)
        return
    print(
        "| layers | width | batch | state, MiB | arena, MiB | planned | peak | values | time | CPU time | MiB moved ",
        end="",
    )
    print("| added over memcpy | unlimited over memcpy |")
    print("| --: " * 7 + "| --- " + "| --: " * 5 + "|")
    for layers, width, cap_mib in [(args.layers, args.width, args.cap)] if args.layers else SIZES:
        compare(layers, width, args.batch, cap_mib)


if __name__ == "__main__":
    main()
