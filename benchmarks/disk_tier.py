"""What the disk tier reaches: a step whose host pool is capped at a tenth of what it swaps.

    python benchmarks/disk_tier.py FOLDER
    python benchmarks/disk_tier.py FOLDER --slow 1000 500 250 125    # in MB/s: what compression does on such disks

Trains a stack of dense layers at 50% of its peak, once with host memory as it is asked for and once with a tenth of it
and the rest on FOLDER's disk; compares losses bit by bit, and the rate of the copies with what the same disk does in
the same run when a plain program writes a file from one end to the other and reads it back, past the page cache.

With --slow, the second form on a disk that is throttled to each rate, with and without
`tfswap.ops.configure(disk_compression=True)` in turns: the least time of a step, over that of the first form, and what
was written of the tensors' bytes.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import tempfile
import time
from typing import Any

ROWS, WIDTH, LAYERS, STEPS = 1 << 16, 256, 10, 4
TURNS = 2
SEQUENTIAL_BYTES, CHUNK_BYTES = 1 << 30, 1 << 20
os.environ.update(TF_CPU_ALLOCATOR_USE_BFC="1", TF_CPU_BFC_MEM_LIMIT_IN_MB="8192", TF_ENABLE_ONEDNN_OPTS="0")
os.environ["TFSWAP_PLAN_CACHE"] = "off"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf  # noqa: E402 - reads the environment

import tfswap  # noqa: E402
import tfswap.ops  # noqa: E402


def sequential(folder: str) -> tuple[float, float]:
    """Bytes per second of one file, written and read in whole chunks."""
    rates: list[float] = []
    with tempfile.NamedTemporaryFile(dir=folder) as named, mmap.mmap(-1, CHUNK_BYTES) as chunk:
        file = os.open(named.name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
        os.posix_fallocate(file, 0, SEQUENTIAL_BYTES)
        chunk.write(os.urandom(CHUNK_BYTES))
        view = memoryview(chunk)
        for move in (os.pwritev, os.preadv):
            started = time.perf_counter()
            for offset in range(0, SEQUENTIAL_BYTES, CHUNK_BYTES):
                move(file, [view], offset)
            rates.append(SEQUENTIAL_BYTES / (time.perf_counter() - started))
        view.release()
        os.close(file)
    return rates[0], rates[1]


def stack() -> Any:
    """A step that trains the dense layers."""
    weights = [tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], seed=(n, 0)) * 0.06) for n in range(LAYERS)]

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.nn.relu(tf.sin(h @ weight))
            loss = tf.reduce_mean(h)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return step


def optimized(**options: Any) -> Any:
    return tfswap.optimize(tf.function(stack()), memory_limit="50%", tactics=("swap",), **options)


def train(**options: Any) -> dict[str, Any]:
    step = optimized(**options)
    x = tf.random.stateless_normal([ROWS, WIDTH], seed=(1, 2))
    losses, seconds = [], []
    for _ in range(STEPS):
        started = time.perf_counter()
        losses.append(step(x).numpy().tobytes().hex())
        seconds.append(time.perf_counter() - started)
    stats, total, plan = step.stats(), tfswap.ops.stats(), step.plan()
    rate = [
        total_bytes / busy_s if busy_s else 0.0
        for total_bytes, busy_s in (
            (total.disk_out_bytes, total.disk_out_busy_s),
            (total.disk_in_bytes, total.disk_in_busy_s),
        )
    ]
    return {
        "losses": losses,
        "host_mib": plan.host_bytes >> 20,
        "disk_mib": plan.disk_bytes >> 20,
        "reserved_mib": total.pool_reserved_bytes >> 20,
        "step_s": min(seconds[1:]),
        "copying_s": stats.copying_s,
        "stalled_s": stats.stalled_s,
        "overlap": stats.overlap,
        "out_bytes_per_s": rate[0],
        "in_bytes_per_s": rate[1],
        "within_limit": tf.config.experimental.get_memory_info("CPU:0")["peak"] <= (plan.limit_bytes or 0),
        "host_bytes": plan.host_bytes,
    }


def print_slow(folder: str, rates: list[float], whole: dict[str, Any]) -> bool:
    """Whether the values stayed the same."""
    step = optimized(host_memory_limit=whole["host_bytes"] // 10, spill_dir=folder)
    x = tf.random.stateless_normal([ROWS, WIDTH], seed=(1, 2))
    losses = [step(x).numpy().tobytes().hex()]
    print(f"{'disk, MB/s':>12}{'plain':>8}{'compressed':>12}{'written':>9}{'waited, s':>18}")
    for rate in rates:
        tfswap.ops.configure(disk_bandwidth_bytes_per_s=rate * 1e6)
        seconds, waited, written = {False: [], True: []}, {}, {}
        for compressed in (False, True) * TURNS:
            tfswap.ops.configure(disk_compression=compressed)
            started = time.perf_counter()
            losses.append(step(x).numpy().tobytes().hex())
            seconds[compressed].append(time.perf_counter() - started)
            stats = step.stats()
            waited[compressed] = stats.stalled_s
            written[compressed] = stats.disk_written_bytes / stats.disk_out_bytes
        plain, less = (min(seconds[compressed]) / whole["step_s"] for compressed in (False, True))
        print(f"{rate:>12.0f}{plain:>8.2f}{less:>12.2f}{written[True]:>9.2f}{waited[False]:>10.2f}{waited[True]:>8.2f}")
    return losses[: len(whole["losses"])] == whole["losses"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the disk tier.")
    parser.add_argument("folder")
    parser.add_argument("--slow", type=float, nargs="+", help="rates of disks, in MB/s")
    arguments = parser.parse_args()
    folder = arguments.folder
    whole = train()
    tfswap.ops.reset_stats()
    if arguments.slow:
        return 0 if print_slow(folder, arguments.slow, whole) else 1
    capped = train(host_memory_limit=whole["host_bytes"] // 10, spill_dir=folder)
    out, in_ = sequential(folder)
    same = whole.pop("losses") == capped.pop("losses")
    shares = {"out": capped["out_bytes_per_s"] / out, "in": capped["in_bytes_per_s"] / in_}
    print(json.dumps({"memory": whole, "disk": capped, "same_bits": same, "of_sequential": shares}, indent=1))
    return 0 if same and min(shares.values()) >= 0.6 else 1


if __name__ == "__main__":
    raise SystemExit(main())
