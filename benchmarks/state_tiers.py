"""Trains nets whose variables and Adam slots are larger than the arena, in host memory and on disk.

    python benchmarks/state_tiers.py FOLDER                         # 240 MiB of state, 64 MiB of host memory; a minute
    python benchmarks/state_tiers.py FOLDER --layers 85 --width 2048 --cap 192 --host 1024 --group 2048
    python benchmarks/state_tiers.py FOLDER --layers 85 --width 2048 --cap 192 --host 0 --steps 100 --resume
    python benchmarks/state_tiers.py FOLDER --rows 16777216 --width 64 --cap 96 --host 512 --group 2048 --alone
    python benchmarks/state_tiers.py FOLDER --tables 3 --rows 18641920 --width 64 --cap 96 --host 512 --disk 57000 \\
        --group 2048 --alone --steps 2

The model is built in a `tfswap.scope` with the limits that the step has. `--host` is the limit of host memory in MiB; 0
for none, and nothing on disk. FOLDER is on a local disk with room for the state and the new values of an update: the
step takes at most `--disk` MiB. With `--group` the process is in a memory control group of that many MiB, for which
this must be run by root; the figure behind it is the most that the group has taken, with the page cache. With
`--resume` a process does half of the steps and saves a checkpoint, and a fresh one restores it, evaluates the model and
does the others. Without `--alone` another process does all steps without limits, and all losses and variables are
compared, bit by bit. Bytes are those of the last step, in MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from state import IDS, ROOM_MIB, model_of, step_of

GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
"""Where memory control groups are made, of versions 1 and 2."""
LIMIT = ("memory.limit_in_bytes", "memory.max")
PART_BYTES = 4 << 20
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


def parts_of(variable: Any) -> Iterator[Any]:
    """The value of a variable as arrays of some rows: an array of it all may be larger than host memory."""
    import tensorflow as tf

    value = tf.convert_to_tensor(variable)
    rows = PART_BYTES * len(value) // (value.dtype.size * len(tf.reshape(value, -1))) if value.shape.rank else 0
    for begin in range(0, len(value), max(rows, 1)) if rows else ():
        yield value[begin : begin + rows].numpy()
    if not rows:
        yield value.numpy()


def net_of(tables: int, rows: int, layers: int, width: int, batch: int) -> tuple[Any, Any]:
    """As `model_of`, with several embedding tables for the same rows."""
    import tensorflow as tf

    if tables == 1:
        return model_of(layers, rows, width, batch)
    keras = tf.keras.layers
    ids = tf.keras.Input((IDS,), dtype="int32")
    read = [keras.Flatten()(keras.Embedding(rows, width)(ids)) for _ in range(tables)]
    x = tf.random.uniform((batch, IDS), 0, rows, tf.int32, seed=2)
    return tf.keras.Model(ids, keras.Dense(10)(keras.Concatenate()(read))), x


def train(
    net: Sequence[int], cap_mib: int | None, limits: dict[str, Any], steps: Sequence[int], saved: str, compares: bool
) -> dict[str, Any]:
    """The figures of some steps, under limits or without them.

    Args:
        net: embedding tables, their rows, layers, the width, the batch.
        steps: the first, the one before which the model is evaluated, and the end.
        compares: whether a digest of the variables is needed.
        saved: a checkpoint, which is restored before the evaluation, or else written after the last step; "" for none.
    """
    batch = net[-1]
    import tensorflow as tf

    import tfswap
    import tfswap.ops

    began = time.perf_counter()
    disk_bytes = limits.pop("spill_limit", None)
    with contextlib.nullcontext() if cap_mib is None else tfswap.scope(**limits):
        tf.keras.utils.set_random_seed(1)
        model, x = net_of(*net)
        optimizer = tf.keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        if saved and steps[0] == steps[1]:
            checkpoint.restore(saved)
    made_s = time.perf_counter() - began

    called: Any = step_of(model, optimizer)
    if cap_mib is not None:
        called = tfswap.optimize(called, memory_limit=(cap_mib - ROOM_MIB) << 20, spill_limit=disk_bytes, **limits)
    losses, peaks, planned, seconds, host = [], [], [], [], []
    y = tf.zeros((batch,), tf.int32)
    for number in range(steps[0], steps[2]):
        if number == steps[1]:
            losses.append(model(x).numpy().tobytes().hex())
        tf.config.experimental.reset_memory_stats("CPU:0")
        tfswap.ops.reset_stats()
        began = time.perf_counter()
        losses.append(called(x, y).numpy().tobytes().hex())
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
        found |= {
            "new": called.plan().disk_bytes,
            "on_disk": sum(row.nbytes for row in there),
            "moved": sum(row.cost_bytes for row in there),
        }
        found |= {"read": stats.disk_in_bytes, "written": stats.disk_out_bytes}
    if saved and steps[0] < steps[1]:
        found["saved"] = checkpoint.write(saved)
    variables, digest = [*model.variables, *optimizer.variables], hashlib.sha256()
    found["state"] = sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)
    for part in itertools.chain.from_iterable(map(parts_of, variables)) if compares else ():
        digest.update(part.tobytes())
    return {**found, "losses": losses, "digest": digest.hexdigest()}


def measured(
    args: argparse.Namespace, cap_mib: int | None, group: Path | None, steps: Sequence[int], saved: str = ""
) -> dict[str, Any]:
    """`train` in a process of its own."""
    limits: dict[str, Any] = {}
    if cap_mib and args.host:
        limits = {"host_memory_limit": args.host << 20, "spill_dir": args.folder, "spill_limit": args.disk << 20}
    state_mib = 3 * (args.layers * args.width**2 + args.tables * args.rows * args.width) * 4 // 2**20
    room_mib = cap_mib or 3 * state_mib + 256
    env = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(room_mib), "TF_CPP_MIN_LOG_LEVEL": "2"}
    child = [
        [args.tables, args.rows, args.layers, args.width, args.batch],
        cap_mib,
        limits,
        steps,
        saved,
        not args.alone,
    ]
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
    parser.add_argument("--tables", type=int, default=1)
    parser.add_argument("--cap", type=int, default=24, help="MiB of the arena")
    parser.add_argument("--host", type=int, default=64, help="MiB of host memory; 0 for no limit")
    parser.add_argument("--disk", type=int, default=32 << 10, help="MiB of the disk")
    parser.add_argument("--group", type=int, help="MiB of a memory control group")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--resume", action="store_true", help="in two processes, with a checkpoint")
    parser.add_argument("--alone", action="store_true", help="without the process to compare with")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(train(*json.loads(args.child))))
        return
    if args.rows:
        args.layers = 0
    half = args.steps // 2
    with control_group(args.group) as group, tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.resume:
            first = measured(args, args.cap, group, (0, args.steps, half), f"{folder}/saved")
            ours = measured(args, args.cap, group, (half, half, args.steps), f"{folder}/saved")
            ours |= {"losses": first["losses"] + ours["losses"], "peak": max(first["peak"], ours["peak"])}
        else:
            ours = measured(args, args.cap, group, (0, half, args.steps))
    plain = None if args.alone else measured(args, None, None, (0, half, args.steps))
    print("| state | arena | host memory | control group | planned | peak | on disk | new there ", end="")
    print("| to travel | read | written | slices of | made, s | first step, s | step, s | values |")
    print("| --: " * 15 + "| --- |")

    def mib(nbytes: int) -> str:
        return f"{nbytes / 2**20:,.0f}"

    in_group = "" if args.group is None else f"{args.group}: {mib(ours['group'])}"
    same = (
        "" if plain is None else "identical" if all(plain[n] == ours[n] for n in ("losses", "digest")) else "DIFFERENT"
    )
    figures = [mib(ours["state"]), str(args.cap), f"{args.host or 'any'}: {mib(ours['host'])}", in_group]
    figures += [f"{ours['planned']:,}", f"{ours['peak']:,}"]
    figures += [mib(ours[name]) for name in ("on_disk", "new", "moved", "read", "written", "slice")]
    figures += [f"{ours[name]:.1f}" for name in ("made_s", "first_s", "s")]
    print(f"| {' | '.join(figures)} | {same} |")


if __name__ == "__main__":
    main()
