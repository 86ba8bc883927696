"""Measure how fast the codec ops run on this machine's CPU, compared with TensorFlow's kernels that they stand in for.

    python benchmarks/codec_rate.py [--mib N] [--rounds N] [--threads N]
    python benchmarks/codec_rate.py --shares        # one core's rates over memcpy's, from 64 KiB to 256 MiB

Prints one row per op: its time, the rate in GB/s (10^9 bytes) of the tensor that is encoded, decoded or
made from an encoding, and the size of the encoding as a share of that tensor. The first rows are
TensorFlow's own: a copy (x + 0) as the measure of this machine's memory, and the gradient kernels, which the
rows "from mask" and "from positions" replace. Every op runs alone in a `tf.function` without Grappler; the best
of all rounds.

Memory comes from the capped arena that stands in for a GPU's, so that no op waits for the system to hand out
pages. Tensors are warm in the caches as far as they fit: take one several times as large as the last-level
cache (64 MiB by default, 32 MiB of cache on most servers).

`--shares` asks how the rates compare to memcpy's of as many bytes as the tensor has that is encoded or decoded. Both
are measured alike, in turns:

- memcpy's buffers are tensors of the same arena. NumPy's are laid out otherwise: AMD's `rep movsb` takes ten times as
  long where the target lies 16 bytes off the source's place in a line, and large ones get huge pages.
- Each time is what some calls more take, on the same buffers. Else there would be in the op's what starting a function
  costs, a third of a millisecond, and in memcpy's the way there from Python. What each op costs to start is in its
  time: the first line says how long one takes that has next to nothing to do.

docs/measurements/copies.md has what `--shares` printed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

# Read when TensorFlow is imported.
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
os.environ.setdefault("TF_CPU_BFC_MEM_LIMIT_IN_MB", "4096")

import numpy as np
import tensorflow as tf

import tfswap.ops.codecs as codecs

MIB = 2**20
WINDOWS = {"2x2/2": (2, 2), "3x3/2": (3, 2), "5x5/2": (5, 2)}


class Row(NamedTuple):
    name: str
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    bytes: int  # what the rate counts
    encoded: Any = None  # the encoding, for its size


def rows(size_bytes: int) -> list[Row]:
    count = size_bytes // 4
    x = tf.random.stateless_normal([count], seed=(1, 2))
    g = tf.random.stateless_normal([count], seed=(3, 4))
    mask = codecs.encode_mask(x, "positive")
    listed = [
        Row("copy (x + 0)", lambda x: x + 0.0, (x,), size_bytes),
        Row("ReluGrad", lambda x, g: tf.raw_ops.ReluGrad(gradients=g, features=x), (x, g), size_bytes),
        Row("  encode mask", lambda x: codecs.encode_mask(x, "positive"), (x,), size_bytes, mask),
        Row("  encode mask, relu6", lambda x: codecs.encode_mask(x, "relu6"), (x,), size_bytes, mask),
        Row("  from mask", codecs.multiply_by_mask, (g, mask), size_bytes),
        Row("  from mask, leaky", codecs.leaky_relu_grad_from_mask, (g, mask), size_bytes),
        Row("  from mask, dropout", lambda m, g: codecs.select_by_mask(m, g, 0.0, [count]), (mask, g), size_bytes),
        Row("  decode to bool", lambda m: codecs.decode_mask(m, [count]), (mask,), count),
    ]
    for name, (window, stride) in WINDOWS.items():
        listed += pooling_rows(name, window, stride, size_bytes)
    integers = tf.random.stateless_uniform([size_bytes // 8], (5, 6), 0, 200, tf.int64)
    narrow = codecs.encode_integers(integers, 0, tf.uint8)
    listed += [
        Row("encode int64 as uint8", lambda x: codecs.encode_integers(x, 0, tf.uint8), (integers,), size_bytes, narrow),
        Row("  decode", lambda x: codecs.decode_integers(x, 0, tf.int64), (narrow,), size_bytes),
    ]
    for share in (0.1, 0.5):
        listed += sparse_rows(tf.where(g > tf.sort(g[:10_000])[int(10_000 * (1 - share)) - 1], x, 0.0), share)
    for format in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "gist_float8", "gist_float10"):
        listed += format_rows(x, format)
    for bits in (8, 4):
        codes = codecs.encode_groups(x, 7, bits)
        listed += [
            Row(f"encode {bits}-bit groups", lambda x, b=bits: codecs.encode_groups(x, 7, b), (x,), size_bytes, codes),
            Row("  decode", lambda c, b=bits: codecs.decode_groups(c, [count], tf.float32, b), (codes,), size_bytes),
        ]
    return listed


def pooling_rows(name: str, size: int, stride: int, size_bytes: int) -> list[Row]:
    shape = [16, 64, 64, size_bytes // (16 * 64 * 64 * 4)]
    window = {"ksize": [1, size, size, 1], "strides": [1, stride, stride, 1], "padding": "SAME"}
    image = tf.random.stateless_normal(shape, seed=(7, 8))
    pooled = tf.raw_ops.MaxPool(input=image, **window)
    positions = codecs.encode_max_pool(image, **window)

    def tensorflows(image: Any, pooled: Any) -> Any:
        return tf.raw_ops.MaxPoolGrad(orig_input=image, orig_output=pooled, grad=pooled, **window)

    return [
        Row(f"MaxPoolGrad {name}", tensorflows, (image, pooled), size_bytes),
        Row("  encode positions", lambda x: codecs.encode_max_pool(x, **window), (image,), size_bytes, positions),
        Row(
            "  from positions",
            lambda g, p: codecs.max_pool_grad_from_positions(g, p, shape, **window),
            (pooled, positions),
            size_bytes,
        ),
    ]


def sparse_rows(x: Any, share: float) -> list[Row]:
    count = int(x.shape[0])
    capacity = int(tf.math.count_nonzero(x)) + 1
    encoded, spill = codecs.encode_sparse(x, capacity)
    shape = tf.constant([count])

    def there(x: Any) -> Any:
        return codecs.encode_sparse(x, capacity)[0]

    def back(encoded: Any, spill: Any, shape: Any) -> Any:
        return codecs.decode_sparse(encoded, spill, shape, capacity, tf.float32)

    return [
        Row(f"encode sparse, {share:.0%} of values", there, (x,), 4 * count, encoded),
        Row("  decode", back, (encoded, spill, shape), 4 * count),
    ]


def format_rows(x: Any, format: str) -> list[Row]:
    count = int(x.shape[0])
    encoded, shape = codecs.encode_floats(x, format), tf.constant([count])
    return [
        Row(f"encode {format}", lambda x: codecs.encode_floats(x, format), (x,), 4 * count, encoded),
        Row("  decode", lambda e, s: codecs.decode_floats(e, s, format, tf.float32), (encoded, shape), 4 * count),
    ]


def best_seconds(row: Row, rounds: int) -> float:
    function = tf.function(row.call, autograph=False)
    function(*row.arguments)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = function(*row.arguments)
        seconds.append(time.perf_counter() - start)
        del result
    return min(seconds)


def compared(size_bytes: int) -> list[Row]:
    """The ops whose rates are compared with memcpy's."""
    x = tf.random.stateless_normal([size_bytes // 4], seed=(1, 2))
    mask = codecs.encode_mask(x, "positive")
    bools = tf.tile(tf.random.stateless_uniform([65536], seed=(3, 4)) < 0.5, [size_bytes // 65536])
    bits = codecs.encode_mask(bools, "true")
    zeros = tf.where(tf.random.stateless_uniform(x.shape, seed=(5, 6)) < 0.8, 0.0, x)
    return [
        Row("encode mask", lambda x: codecs.encode_mask(x, "positive"), (x,), size_bytes),
        Row("encode mask of bools", lambda x: codecs.encode_mask(x, "true"), (bools,), size_bytes),
        Row("decode mask to bools", codecs.decode_mask, (bits, tf.constant([size_bytes])), size_bytes),
        Row("gradient from mask", codecs.multiply_by_mask, (x, mask), size_bytes),
        *(row for format in ("float16", "gist_float8", "float8_e4m3fn") for row in format_rows(x, format)),
        *sparse_rows(zeros, 0.2),
    ]


def repeated(row: Row, calls: int) -> Callable[[], Any]:
    """That many calls, one after another, in one function that has run before."""

    def work(*arguments: Any) -> Any:
        last: list[Any] = []
        for _ in range(calls):
            with tf.control_dependencies(last):
                last = tf.nest.flatten(row.call(*arguments))[:1]
        with tf.control_dependencies(last):
            return tf.constant(0)

    function = tf.function(work, autograph=False)
    function(*row.arguments)
    return lambda: function(*row.arguments)


def copies(source: int, target: int, size_bytes: int, calls: int) -> Callable[[], None]:
    """That many calls of memcpy: of memmove, which Python's ctypes has and which is the same code in glibc."""

    def work() -> None:
        copy = ctypes.memmove
        for _ in range(calls):
            copy(target, source, size_bytes)

    return work


def address(tensor: Any) -> int:
    return np.asarray(memoryview(tensor)).ctypes.data


def best_of(rounds: int, works: list[Callable[[], Any]]) -> list[float]:
    """The best time of each, in seconds. They take turns: what others do on the machine meanwhile is in all."""
    best = [float("inf")] * len(works)
    for _ in range(rounds):
        for number, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[number] = min(best[number], time.perf_counter() - start)
    return best


class CallAndMemcpy(NamedTuple):
    call_s: float
    memcpy_s: float


def call_and_memcpy(row: Row, rounds: int) -> CallAndMemcpy:
    """One call, and one memcpy of as many bytes, each by what some calls more take.

    A round is of 256 MiB, in several goes where that is more calls than a function should hold.
    """
    size = row.bytes
    calls = max(2, min(256, 256 * MIB // size))
    goes = max(1, min(16, 256 * MIB // (calls * size)))
    source, target = (tf.fill([size], tf.constant(value, tf.uint8)) for value in (1, 2))
    pointers = address(source), address(target)
    works = [
        repeated(row, 1),
        repeated(row, 1 + calls),
        copies(*pointers, 0, calls),
        copies(*pointers, size, calls),
    ]
    one_s, more_s, nothing_s, copied_s = best_of(rounds * goes, works)
    return CallAndMemcpy((more_s - one_s) / calls, (copied_s - nothing_s) / calls)


def print_shares(sizes: list[int], rounds: int) -> None:
    """Each op's rate as a share of memcpy's, of the same bytes."""
    least = Row("encode mask", lambda x: codecs.encode_mask(x, "positive"), (tf.zeros([8]),), 32)
    print(f"encoding a mask of 8 values takes {call_and_memcpy(least, rounds).call_s * 1e6:.1f} us")
    names: list[str] = []
    measured: list[list[CallAndMemcpy]] = []
    for size in sizes:
        compared_rows = compared(size)
        names = [row.name for row in compared_rows]
        measured.append([call_and_memcpy(row, rounds) for row in compared_rows])
    copy_seconds = [statistics.median(both.memcpy_s for both in column) for column in measured]
    print_row("", [f"{size // 1024} KiB" for size in sizes])
    print_row("memcpy, us", [f"{copy_s * 1e6:.1f}" for copy_s in copy_seconds])
    print_row("memcpy, GB/s", [f"{size / copy_s / 1e9:.1f}" for size, copy_s in zip(sizes, copy_seconds, strict=True)])
    for name, row in zip(names, zip(*measured, strict=True), strict=True):
        print_row(name, [f"{both.memcpy_s / both.call_s:.2f}" for both in row])


def print_row(name: str, texts: list[str]) -> None:
    print(f"{name:<32}" + "".join(f"{text:>12}" for text in texts))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how fast the codec ops run.")
    parser.add_argument("--mib", type=int, default=64, help="size of the tensor that is encoded")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="threads of each op; 0 for one per core")
    parser.add_argument("--shares", action="store_true", help="rates of one core over memcpy's, from 64 KiB to 256 MiB")
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1 if arguments.shares else arguments.threads)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    if arguments.shares:
        print_shares([64 * 1024 * 4**n for n in range(7)], arguments.rounds)
        return

    print(f"{'op':<32} {'ms':>8} {'GB/s':>8} {'size':>8}")
    for row in rows(arguments.mib * MIB):
        taken_s = best_seconds(row, arguments.rounds)
        line = f"{row.name:<32} {taken_s * 1e3:>8.2f} {row.bytes / taken_s / 1e9:>8.1f}"
        if row.encoded is not None:
            encoded_bytes = int(row.encoded.shape[0]) * row.encoded.dtype.size
            line += f" {encoded_bytes / row.bytes:>8.1%}"
        print(line)


if __name__ == "__main__":
    main()
