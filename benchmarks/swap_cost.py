"""What swapping adds to a step, beside what one core's memcpy of the same bytes would take.

    python benchmarks/swap_cost.py                 # three models, each in a process of its own
    python benchmarks/swap_cost.py mlp --rounds 8

Two steps of one model take turns in one process: in order alone, and swapping under its limit. What is added is the
difference of their fastest rounds, since whatever else the machine does only makes a round slower. memcpy is timed in
the same rounds, on one core while nothing else of the process runs, between buffers that are not in the caches and have
the plan's sizes. The rate of the copies is that of the copy lanes, which work while the kernels do: the median of all
rounds, as memcpy's.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import accuracy

from tfswap import progress

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

    def copy_seconds(self, sizes: list[int]) -> float:
        """Of copying so many bytes each, one after the other."""
        total_s = 0.0
        for size in sizes:
            if self._at + size > SPAN_BYTES:
                self._at = 0
            to, source = (ctypes.byref(span, self._at) for span in self._spans)
            self._at += size
            started = time.perf_counter()
            ctypes.memmove(to, source, size)
            total_s += time.perf_counter() - started
        return total_s


def child(name: str, rounds: int) -> dict[str, Any]:
    import tensorflow as tf

    import tfswap

    build, limit = CASES[name]
    step, arguments = build()
    ordered = tfswap.optimize(tf.function(step), memory_limit="100%", tactics=())
    swapping = tfswap.optimize(tf.function(step), memory_limit=limit, tactics=("swap",))
    for made in (ordered, swapping) * 2:
        made(*arguments)
    memory = Memory()
    absences = swapping.plan().absences
    sizes = [a.nbytes for a in absences for _ in range(1 + (a.out is not None))]
    taken: dict[Any, list[float]] = {ordered: [], swapping: []}
    plain: list[float] = []
    copied: list[float] = []
    stalled: list[float] = []
    for number in range(rounds):
        for made in (ordered, swapping) if number % 2 else (swapping, ordered):
            started = time.perf_counter()
            made(*arguments).numpy()
            taken[made].append(time.perf_counter() - started)
        stats = swapping.stats()
        plain.append(memory.copy_seconds(sizes))
        copied.append(stats.copying_s)
        stalled.append(stats.stalled_s)
    return {
        "bytes": sum(sizes),
        "ordered_s": min(taken[ordered]),
        "swapping_s": min(taken[swapping]),
        "ratio": statistics.median(taken[swapping]) / statistics.median(taken[ordered]),
        "memcpy_s": statistics.median(plain),
        "copying_s": statistics.median(copied),
        "stalled_s": statistics.median(stalled),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=10)
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
        added_s = found["swapping_s"] - found["ordered_s"]
        print(
            f"{name:<9} {found['bytes'] / 2**20:,.0f} MiB move; the fastest step of {found['ordered_s']:.3f} s takes "
            f"{added_s * 1e3:+.0f} ms (medians: x{found['ratio']:.3f}), which is {added_s / found['memcpy_s']:.2f} of "
            f"memcpy's {found['memcpy_s'] * 1e3:.0f} ms; copying takes {found['copying_s'] * 1e3:.0f} ms, "
            f"{found['memcpy_s'] / found['copying_s']:.2f} of memcpy's rate; the step waits for "
            f"{found['stalled_s'] * 1e3:.0f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
