"""What swapping adds to a step, compared with what one core's memcpy of the same bytes would take.

    python benchmarks/swap_cost.py                 # three models, each in a process of its own
    python benchmarks/swap_cost.py mlp --rounds 60

Two steps of one model take turns in one process: one that swaps under its limit, and one with the same plan, kernel for
kernel, but for what it moves. What is added is the median of the rounds' differences, in time and in the process's CPU
time, with the interval that it lies in at 95% (by ranks: no shape of the noise is assumed). memcpy is timed in the same
rounds, on one core while nothing else of the process runs, between buffers that are not in the caches and have the
plan's sizes. The rate of the copies is that of the copy lanes, which work while the kernels do: the median of all
rounds, as memcpy's.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import accuracy

from tfswap.support import progress

SPAN_BYTES = 512 << 20
CASES: dict[str, tuple[Callable[[], accuracy.Made], str]] = {
    "mlp": (lambda: accuracy.mlp(24, 1024), "50%"),
    "vgg19": (accuracy.images("VGG19", 16, 128, 0.0), "75%"),
    "resnet50": (accuracy.images("ResNet50", 32, 96, 0.9), "50%"),
}


class Memory:
    """Two spans of memory that are there already, and larger than all caches."""

    def __init__(self) -> None:
        self._spans = [(ctypes.c_char * SPAN_BYTES)() for _ in range(2)]
        for span in self._spans:
            ctypes.memset(span, 1, SPAN_BYTES)
        self._at = 0

    def copy_seconds(self, sizes: list[int]) -> tuple[float, float]:
        """Of copying `sizes` bytes, one after the other; and of CPU, which is less where others want the core."""
        total_s = total_cpu_s = 0.0
        for size in sizes:
            if self._at + size > SPAN_BYTES:
                self._at = 0
            to, source = (ctypes.byref(span, self._at) for span in self._spans)
            self._at += size
            started, started_cpu = time.perf_counter(), time.thread_time()
            ctypes.memmove(to, source, size)
            total_s += time.perf_counter() - started
            total_cpu_s += time.thread_time() - started_cpu
        return total_s, total_cpu_s


def interval(differences: list[float]) -> tuple[float, float]:
    """Where the median lies, but for one case in twenty."""
    ordered, count = sorted(differences), len(differences)
    outside, rank = 1 / 2**count, 0  # how likely no more than `rank` of all lie on one side of it
    while (further := outside + math.comb(count, rank + 1) / 2**count) <= 0.025:
        outside, rank = further, rank + 1
    return ordered[rank], ordered[-1 - rank]


def child(name: str, rounds: int) -> dict[str, Any]:
    import tensorflow as tf

    import tfswap

    build, limit = CASES[name]
    step, arguments = build()
    swapping = tfswap.optimize(tf.function(step), memory_limit=limit, tactics=("swap",))
    swapping(*arguments)
    plan = swapping.plan()
    unmoved = dataclasses.replace(plan, evictions=(), splits=(), host_bytes=0, limit_bytes=None)
    staying = tfswap.optimize(tf.function(step), plan=unmoved)
    for made in (staying, swapping) * 2:
        made(*arguments)
    memory = Memory()
    sizes = [a.nbytes for a in plan.evictions for _ in range(1 + (a.out is not None))]
    taken: dict[Any, list[tuple[float, float]]] = {staying: [], swapping: []}
    plain: list[tuple[float, float]] = []
    copied: list[float] = []
    stalled: list[float] = []
    for number in range(rounds):
        for made in (staying, swapping) if number % 2 else (swapping, staying):
            started = time.perf_counter(), time.process_time()
            made(*arguments).numpy()
            taken[made].append((time.perf_counter() - started[0], time.process_time() - started[1]))
        stats = swapping.stats()
        plain.append(memory.copy_seconds(sizes))
        copied.append(stats.copying_s)
        stalled.append(stats.stalled_s)
    added, added_cpu = ([s[i] - o[i] for s, o in zip(taken[swapping], taken[staying], strict=True)] for i in (0, 1))
    return {
        "bytes": sum(sizes),
        "staying_s": statistics.median(s for s, _ in taken[staying]),
        "swapping_s": statistics.median(s for s, _ in taken[swapping]),
        "added_s": statistics.median(added),
        "added_between_s": interval(added),
        "added_cpu_s": statistics.median(added_cpu),
        "added_cpu_between_s": interval(added_cpu),
        "memcpy_s": statistics.median(s for s, _ in plain),
        "memcpy_cpu_s": statistics.median(s for _, s in plain),
        "copying_s": statistics.median(copied),
        "stalled_s": statistics.median(stalled),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.models[0], args.rounds)))
        return
    environment = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(accuracy.ARENA_MIB),
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
    for name in progress.over("models", args.models):
        command = [sys.executable, __file__, name, "--child", f"--rounds={args.rounds}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name}: a run failed\n{done.stderr[-3000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        plain = found["memcpy_s"]
        print(
            f"{name:<9} {found['bytes'] / 2**20:,.0f} MiB move, memcpy {plain * 1e3:.0f} ms; a step of "
            f"{found['staying_s']:.3f} s takes {in_words(found, 'added', plain)} longer and "
            f"{in_words(found, 'added_cpu', found['memcpy_cpu_s'])} more of CPU; "
            f"copying takes {found['copying_s'] * 1e3:.0f} ms, {plain / found['copying_s']:.2f} of "
            f"memcpy's rate; the step waits for {found['stalled_s'] * 1e3:.0f} ms",
            flush=True,
        )


def in_words(found: dict[str, Any], what: str, plain_s: float) -> str:
    """A figure, where it lies, and what that is of memcpy's time."""
    middle, (low, high) = found[f"{what}_s"], found[f"{what}_between_s"]
    return (
        f"{middle * 1e3:+.0f} ms ({low * 1e3:+.0f} to {high * 1e3:+.0f}; "
        f"{middle / plain_s:.2f} of memcpy, {low / plain_s:.2f} to {high / plain_s:.2f})"
    )


if __name__ == "__main__":
    main()
