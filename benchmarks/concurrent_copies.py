"""What a byte that is copied costs concurrent kernels, in the time that one core's memcpy takes for a byte.

    python benchmarks/concurrent_copies.py [--windows N]

swap_cost.py asks what swapping adds to a model's step, which little traffic and long steps hide in noise. Here tensors
of 64 MiB go out and come back all the time, on the copy lanes, while a kernel of VGG19's or of an MLP's runs again and
again: alone, and as often during the copies, in turns. The time that it takes longer, over the bytes that
were copied meanwhile, is what a byte costs; memcpy is timed in between, while nothing else runs. Printed are the median
over all turns, and the interval that it lies in at 95%; and the same of CPU time, the copies' own included, which other
programs change less. On two cores that kernels keep busy a byte can't cost less than
half of memcpy, for it takes one of them; it costs more where copies and kernels want the same caches and memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ.update(TF_CPU_ALLOCATOR_USE_BFC="1", TF_CPU_BFC_MEM_LIMIT_IN_MB="2048", TF_ENABLE_ONEDNN_OPTS="0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from swap_cost import Memory, interval

import tfswap.ops as ops

TENSOR_BYTES = 64 << 20
WINDOW_S = 0.5


def kernels() -> dict[str, Callable[[], Any]]:
    x, filters = tf.random.normal([4, 128, 128, 64]), tf.random.normal([3, 3, 64, 64])
    a, b, large = tf.random.normal([4096, 1024]), tf.random.normal([1024, 1024]), tf.random.normal([TENSOR_BYTES // 4])
    same = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    return {
        "convolution": tf.function(lambda: tf.nn.conv2d(x, filters, **same)),
        "its filter's gradient": tf.function(
            lambda: tf.raw_ops.Conv2DBackpropFilter(input=x, filter_sizes=filters.shape, out_backprop=x, **same)
        ),
        "matrix product": tf.function(lambda: a @ b),
        "ReLU": tf.function(lambda: tf.nn.relu(large)),
    }


class Copies:
    """Tensors that go out and come back, one after the other, while it is entered."""

    def __init__(self) -> None:
        self._tensor = tf.zeros([TENSOR_BYTES // 4])
        self._round_trip()

    def __enter__(self) -> None:
        self._going = True
        self._thread = threading.Thread(target=self._go)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._going = False
        self._thread.join()

    def _go(self) -> None:
        while self._going:
            self._round_trip()

    def _round_trip(self) -> None:
        handle = ops.swap_out(self._tensor)
        ops.release(handle)
        ops.await_copy(*ops.swap_in(handle, tf.float32))


def seconds(kernel: Callable[[], Any], times: int) -> tuple[float, float]:
    """Of `times` runs; and of this process's CPU time meanwhile."""
    started, started_cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        kernel()
    return time.perf_counter() - started, time.process_time() - started_cpu


def in_words(costs: list[float]) -> str:
    low, high = interval(costs)
    return f"{statistics.median(costs):.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=15)
    windows = parser.parse_args().windows
    ops.reserve(2 * TENSOR_BYTES)
    memory, copies = Memory(), Copies()
    for name, kernel in kernels().items():
        seconds(kernel, 1)
        times = max(2, round(WINDOW_S / seconds(kernel, 1)[0]))
        alone: list[float] = []
        rates: list[float] = []
        costs: tuple[list[float], list[float]] = ([], [])
        for _ in range(windows):
            without = seconds(kernel, times)
            plain = memory.copy_seconds([TENSOR_BYTES] * 4)
            with copies:
                ops.reset_stats()
                during = seconds(kernel, times)
                copied = ops.stats()
            nbytes = copied.out_bytes + copied.in_bytes
            alone.append(without[0])
            rates.append(nbytes / during[0])
            for cost, more, less, memcpy in zip(costs, during, without, plain, strict=True):
                cost.append((more - less) / nbytes / (memcpy / (4 * TENSOR_BYTES)))
        time_cost, cpu_cost = map(in_words, costs)
        print(
            f"{name:<22} {statistics.median(alone) / times * 1e3:.0f} ms alone; during copies of "
            f"{statistics.median(rates) / 1e9:.1f} GB/s a byte costs {time_cost} of memcpy's time, "
            f"{cpu_cost} of its CPU time",
            flush=True,
        )


if __name__ == "__main__":
    main()
