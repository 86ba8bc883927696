"""What the examples saved_model.py, seq2seq.py and transformer.py share: one program, run as it is and with tfswap,
each in a process of its own. It is no example by itself: run one of these.

Each process has TensorFlow manage the CPU's memory as it manages a GPU's, so that the peak is what the allocator says.
TensorFlow's own optimizers re-order sums, and are off in both: so that both trainings have the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

MIB = 1 << 20
ROOM_MIB = 4096
ROOM = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ROOM_MIB),
    "TF_ENABLE_ONEDNN_OPTS": "0",
}


def settle() -> None:
    """Let the memory be one free region, as a GPU's is at the start."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    slab = tf.raw_ops.Empty(shape=[ROOM_MIB - 2, MIB], dtype=tf.uint8)
    del slab


def trained(step: Any, arguments: tuple[Any, ...], steps: int) -> dict[str, Any]:
    """Losses (as exact text), the allocator's peak, and the seconds of the first step and of a later one."""
    import tensorflow as tf

    tf.config.experimental.reset_memory_stats("CPU:0")
    losses, times = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        losses.append(float(step(*arguments)).hex())
        times.append(time.perf_counter() - begin)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return {"losses": losses, "peak_bytes": peak, "first_s": times[0], "step_s": sorted(times[1:])[len(times[1:]) // 2]}


def run(*arguments: object) -> dict[str, Any]:
    """This program again, with these arguments, in a process of its own; what its last line says."""
    command = [sys.executable, sys.argv[0], *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | ROOM, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def side_by_side(
    doc: str | None, make_step: Callable[[int], tuple[Any, tuple[Any, ...]]], limit: str, length: int
) -> int:
    """The whole program of an example; gives its exit status.

    Args:
        doc: what `--help` says.
        make_step: gives a training step and its arguments for a length.
        limit, length: their defaults.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default=limit, help="share of the peak of the step as it is")
    parser.add_argument("--length", type=int, default=length, help="of a text, or a word")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit_bytes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        settle()
        step, arguments = make_step(args.length)
        print(json.dumps(limited(step, arguments, args.steps, args.limit_bytes)))
        return 0
    how = ("--child", "--length", args.length, "--steps", args.steps)
    plain = run(*how)
    limit_bytes = int(plain["peak_bytes"] * float(args.limit.rstrip("%")) / 100)
    planned = run(*how, "--limit_bytes", limit_bytes)
    print(f"{planned['swapped']} tensors swapped, {planned['recomputed']} recomputed, {planned['encoded']} encoded")
    return compare(plain, planned, limit_bytes)


def limited(step: Any, arguments: tuple[Any, ...], steps: int, limit_bytes: int | None) -> dict[str, Any]:
    """As `trained`, under a limit if there is one."""
    if limit_bytes is None:
        return trained(step, arguments, steps)
    import tfswap

    step = tfswap.optimize(step, memory_limit=limit_bytes)
    found, report = trained(step, arguments, steps), step.report()
    counts = {tactic: len(getattr(report, tactic)) for tactic in ("swapped", "recomputed", "encoded")}
    return found | counts


def compare(plain: dict[str, Any], planned: dict[str, Any], limit_bytes: int) -> int:
    """Print both; gives the program's exit status."""
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("peak, MiB", lambda r: f"{r['peak_bytes'] / MIB:.1f}"),
        ("first step, s", lambda r: f"{r['first_s']:.1f}"),
        ("step, s", lambda r: f"{r['step_s']:.3f}"),
        ("last loss", lambda r: f"{float.fromhex(r['losses'][-1]):.6f}"),
    ]
    print(f"{'':<16}{'as it is':>12}{'tfswap':>12}")
    for name, show in rows:
        print(f"{name:<16}{show(plain):>12}{show(planned):>12}")
    same, held = plain["losses"] == planned["losses"], planned["peak_bytes"] <= limit_bytes
    print(
        f"limit {limit_bytes / MIB:.1f} MiB {'held' if held else 'PASSED'}, losses {'identical' if same else 'DIFFER'}"
    )
    return 0 if same and held else 1


if __name__ == "__main__":
    raise SystemExit(__doc__)
