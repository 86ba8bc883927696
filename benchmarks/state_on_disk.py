"""Trains nets whose variables and Adam slots are larger than host memory: at home on disk, as far as a limit needs it.

    python benchmarks/state_on_disk.py FOLDER                       # dense layers, 240 MiB of state; half a minute
    python benchmarks/state_on_disk.py FOLDER --layers 85 --width 2048 --cap 192 --host 1024
    python benchmarks/state_on_disk.py FOLDER --rows 16777216 --width 64 --cap 96 --host 1024 --group 2048 --alone

FOLDER is on a local disk with room for twice the state. The model is built in a `tfswap.scope` with these limits, as
the step has them. With `--group` the process is in a memory control group of that many MiB, for which this must be run
by root; the figure behind it is the most that the group has taken, with the page cache. Without `--alone` the same is
done without limits in another process, and all losses and variables are compared, bit by bit. Bytes are those of the
last step, in MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from state import ROOM_MIB, model_of

GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
"""Where memory control groups are made, of versions 1 and 2."""
LIMIT = ("memory.limit_in_bytes", "memory.max")
PEAK = ("memory.max_usage_in_bytes", "memory.peak")


@contextlib.contextmanager
def control_group(mib: int | None) -> Iterator[Path | None]:
    """A memory control group of that size; None for none."""
    if mib is None:
        yield None
        return
    group = next(root for root in GROUPS if root.is_dir()) / f"tfswap_{os.getpid()}"
    group.mkdir()
    try:
        file_of(group, LIMIT).write_text(str(mib << 20))
        yield group
    finally:
        group.rmdir()


def file_of(group: Path, names: tuple[str, ...]) -> Path:
    """The file of a group, by its name in each version."""
    return next(group / name for name in names if (group / name).exists())


def train(rows: int, layers: int, width: int, batch: int, cap_mib: int | None, limits: Mapping[str, Any], steps: int):
    """The figures of some steps, under limits or without them."""
    import tensorflow as tf

    import tfswap
    import tfswap.ops

    began = time.perf_counter()
    with contextlib.nullcontext() if cap_mib is None else tfswap.scope(**limits):
        tf.keras.utils.set_random_seed(1)
        model, x = model_of(layers, rows, width, batch)
        optimizer = tf.keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
    made_s = time.perf_counter() - began

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
        called = tfswap.optimize(step, memory_limit=(cap_mib - ROOM_MIB) << 20, **limits)
    digest, peaks, planned, seconds, host = hashlib.sha256(), [], [], [], []
    y = tf.zeros((batch,), tf.int32)
    for _ in range(steps):
        tf.config.experimental.reset_memory_stats("CPU:0")
        tfswap.ops.reset_stats()
        began = time.perf_counter()
        digest.update(called(x, y).numpy().tobytes())
        seconds.append(time.perf_counter() - began)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        if cap_mib is not None:
            planned.append(called.report().planned_peak_bytes)
            host.append(tfswap.ops.stats().pool_reserved_bytes)
    found = {"peak": max(peaks), "s": statistics.median(seconds[1:]), "first_s": seconds[0], "made_s": made_s}
    if cap_mib is not None:
        stats, report = tfswap.ops.stats(), called.report()
        there = [row for row in report.variables if row.home == "disk"]
        found |= {"planned": max(planned), "slice": called.plan().slice_bytes, "host": max(host)}
        found |= {"on_disk": sum(row.nbytes for row in there), "moved": sum(row.cost_bytes for row in there)}
        found |= {"read": stats.disk_in_bytes, "written": stats.disk_out_bytes}
    found["state"] = 0
    for variable in (*model.variables, *optimizer.variables):
        value = variable.numpy()
        found["state"] += value.nbytes
        digest.update(memoryview(value).cast("B") if value.ndim else value.tobytes())
        del value
    return {**found, "digest": digest.hexdigest()}


def measured(args: argparse.Namespace, cap_mib: int | None, group: Path | None) -> dict[str, Any]:
    """`train` in a process of its own."""
    limits = {"host_memory_limit": args.host << 20, "spill_dir": args.folder} if cap_mib else {}
    state_mib = 3 * (args.layers * args.width**2 + args.rows * args.width) * 4 // 2**20
    room_mib = cap_mib or 3 * state_mib + 256
    env = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(room_mib), "TF_CPP_MIN_LOG_LEVEL": "2"}
    child = [args.rows, args.layers, args.width, args.batch, cap_mib, limits, args.steps]
    command = [sys.executable, __file__, args.folder, "--child", json.dumps(child)]

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    ran = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, preexec_fn=enter)
    if ran.returncode:
        raise SystemExit(ran.stderr or f"it ended with {ran.returncode}")
    found = json.loads(ran.stdout.splitlines()[-1])
    return found if group is None else {**found, "group": int(file_of(group, PEAK).read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="for the spill file")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rows", type=int, default=0, help="of an embedding table in place of layers")
    parser.add_argument("--cap", type=int, default=24, help="MiB of the arena")
    parser.add_argument("--host", type=int, default=64, help="MiB of host memory")
    parser.add_argument("--group", type=int, help="MiB of a memory control group")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--alone", action="store_true", help="without the process to compare with")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(train(*json.loads(args.child))))
        return
    if args.rows:
        args.layers = 0
    with control_group(args.group) as group:
        ours = measured(args, args.cap, group)
    plain = None if args.alone else measured(args, None, None)
    print("| state | arena | host memory | control group | planned | peak | on disk | planned to travel | read | written "
          "| slices of | made, s | first step, s | step, s | values |")  # fmt: skip
    print("| --: " * 14 + "| --- |")

    def mib(nbytes: int) -> str:
        return f"{nbytes / 2**20:,.0f}"

    in_group = "" if args.group is None else f"{args.group}: {mib(ours['group'])}"
    same = "" if plain is None else "identical" if plain["digest"] == ours["digest"] else "DIFFERENT"
    figures = [mib(ours["state"]), str(args.cap), f"{args.host}: {mib(ours['host'])}", in_group]
    figures += [f"{ours['planned']:,}", f"{ours['peak']:,}"]
    figures += [mib(ours[name]) for name in ("on_disk", "moved", "read", "written", "slice")]
    figures += [f"{ours[name]:.1f}" for name in ("made_s", "first_s", "s")]
    print(f"| {' | '.join(figures)} | {same} |")


if __name__ == "__main__":
    main()
