"""Measure how fast the swap ops copy on this machine's CPU, compared with a plain memcpy.

    python benchmarks/copy_rate.py [--threads N] [--rounds N]

Prints one row per tensor size, in GB/s (10^9 bytes): memcpy between buffers that are in memory but not in
the caches (it walks through 256 MiB; the best of all rounds), SwapOut and SwapIn as the copy lanes timed
them (best round), and a whole SwapOut, Release, SwapIn, Await sequence called eagerly, with TensorFlow's
own cost per op in it (both copies counted). Last the sequence's time on an empty tensor: the fixed cost of
the four ops.

Tensors are in an arena, as in a step under a limit. They are warm in the caches up to a few MiB, as one that was
just computed is.

On two cores of an AMD EPYC, one busy with other work: memcpy 9 to 16, out 16 to 23, in 13 to 17, the whole
sequence 13 to 15 from 16 MiB on; about 95 us for the four ops on an empty tensor.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time

# What a tensor takes outside of an arena comes from the system each time, page by page.
os.environ.update(TF_CPU_ALLOCATOR_USE_BFC="1", TF_CPU_BFC_MEM_LIMIT_IN_MB="2048")

import tensorflow as tf

import tfswap.ops as ops

MIB = 2**20
SIZES_BYTES = tuple(mib * MIB for mib in (1, 4, 16, 64, 256))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how fast the swap ops copy.")
    parser.add_argument("--threads", type=int, default=1, help="copy threads per direction")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    ops.configure(copy_threads=arguments.threads)
    ops.reserve(2 * max(SIZES_BYTES))

    print(f"{'MiB':>5} {'memcpy':>8} {'out':>8} {'in':>8} {'ops':>8}   GB/s")
    for size_bytes in SIZES_BYTES:
        tensor = tf.fill([size_bytes // 4], 1.5)
        memcpy_s = min(memcpy_seconds(size_bytes, arguments.rounds))
        rounds = [round_trip(tensor) for _ in range(arguments.rounds)]
        out_s, in_s, whole_s = (min(times) for times in zip(*rounds, strict=True))
        rates = [size_bytes / s / 1e9 for s in (memcpy_s, out_s, in_s, whole_s / 2)]
        print(f"{size_bytes // MIB:>5}" + "".join(f" {rate:>8.1f}" for rate in rates))

    empty = tf.zeros([0])
    fixed_s = min(round_trip(empty)[2] for _ in range(200))
    print(f"four ops, called eagerly, on an empty tensor: {fixed_s * 1e6:.0f} us")


def memcpy_seconds(size_bytes: int, rounds: int) -> list[float]:
    span_bytes = max(SIZES_BYTES)
    source = (ctypes.c_char * span_bytes)()
    target = (ctypes.c_char * span_bytes)()
    ctypes.memset(source, 1, span_bytes)
    ctypes.memset(target, 1, span_bytes)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for offset in range(0, span_bytes, size_bytes):
            ctypes.memmove(ctypes.byref(target, offset), ctypes.byref(source, offset), size_bytes)
        seconds.append((time.perf_counter() - start) * size_bytes / span_bytes)
    return seconds


def round_trip(tensor: tf.Tensor) -> tuple[float, float, float]:
    """Seconds of the copy out, of the copy in, and of the four ops together."""
    ops.reset_stats()
    start = time.perf_counter()
    handle = ops.swap_out(tensor)
    ops.release(handle)
    ops.await_copy(*ops.swap_in(handle, tensor.dtype))
    whole_s = time.perf_counter() - start
    stats = ops.stats()
    return stats.out_busy_s, stats.in_busy_s, whole_s


if __name__ == "__main__":
    main()
