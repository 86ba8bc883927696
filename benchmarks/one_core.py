"""Which kernels run on one core? Share of a kernel's CPU time that the thread takes which calls it, by type of op.

    python benchmarks/one_core.py                              # half a minute on two cores, quiet or not
    python benchmarks/one_core.py MaxPool3DGrad Where

A kernel that shares its work hands it to the threads of the intra-op pool; one that does not does all of it itself. So
the share is about 1 for kernels on one core, and small for others. CPU times hardly depend on other programs.
`spread` in `tfswap/analysis/work.py` says which kernels are taken to run on one core. oneDNN is off.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

REPEATS = 9
ALONE = 0.9
"""What calls a kernel on one core takes at least so much of its CPU time."""


def kernels() -> dict[str, Callable[[], Any]]:
    """By type of op, a call of a kernel large enough to be shared."""
    import tensorflow as tf

    raw = tf.raw_ops
    volume, image, rows = (tf.random.normal(shape) for shape in ([2, 48, 48, 48, 16], [8, 128, 128, 32], [4096, 1024]))
    halved: dict[str, Any] = {"strides": [1, 2, 2, 2, 1], "ksize": [1, 2, 2, 2, 1], "padding": "SAME"}
    flat: dict[str, Any] = {"strides": [1, 2, 2, 1], "ksize": [1, 2, 2, 1], "padding": "SAME"}
    small, smaller = raw.MaxPool(input=image, **flat), raw.MaxPool3D(input=volume, **halved)
    at = tf.random.uniform([4096, 1], 0, 1000, tf.int32)
    table, cube = tf.random.normal([1000, 1024]), tf.random.normal([3, 3, 3, 16, 16])
    strides: dict[str, Any] = {"strides": [1] * 5, "padding": "SAME"}
    return {
        "AvgPool": lambda: raw.AvgPool(value=image, **flat),
        "AvgPool3D": lambda: raw.AvgPool3D(input=volume, **halved),
        "AvgPool3DGrad": lambda: raw.AvgPool3DGrad(orig_input_shape=volume.shape, grad=smaller, **halved),
        "AvgPoolGrad": lambda: raw.AvgPoolGrad(orig_input_shape=image.shape, grad=small, **flat),
        "ConcatV2": lambda: tf.concat([image, image], -1),
        "Conv3D": lambda: raw.Conv3D(input=volume, filter=cube, **strides),
        "Conv3DBackpropFilterV2": lambda: raw.Conv3DBackpropFilterV2(
            input=volume, filter_sizes=cube.shape, out_backprop=volume, **strides
        ),
        "Conv3DBackpropInputV2": lambda: raw.Conv3DBackpropInputV2(
            input_sizes=volume.shape, filter=cube, out_backprop=volume, **strides
        ),
        "Cumsum": lambda: tf.cumsum(rows, 1),
        "MaxPool3D": lambda: raw.MaxPool3D(input=volume, **halved),
        "MaxPool3DGrad": lambda: raw.MaxPool3DGrad(orig_input=volume, orig_output=smaller, grad=smaller, **halved),
        "MaxPoolGrad": lambda: raw.MaxPoolGrad(orig_input=image, orig_output=small, grad=small, **flat),
        "Mean": lambda: tf.reduce_mean(image, [0, 1, 2]),
        "ResizeBilinear": lambda: raw.ResizeBilinear(images=small, size=[128, 128]),
        "ResizeBilinearGrad": lambda: raw.ResizeBilinearGrad(grads=image, original_image=small),
        "ResizeNearestNeighbor": lambda: raw.ResizeNearestNeighbor(images=small, size=[128, 128]),
        "ResizeNearestNeighborGrad": lambda: raw.ResizeNearestNeighborGrad(grads=image, size=[64, 64]),
        "ScatterNd": lambda: tf.scatter_nd(at, rows, [1000, 1024]),
        "Slice": lambda: tf.slice(image, [0, 0, 0, 8], [8, 128, 128, 16]),
        "Softmax": lambda: tf.nn.softmax(rows),
        "SpaceToDepth": lambda: tf.nn.space_to_depth(image, 2),
        "TensorScatterAdd": lambda: tf.tensor_scatter_nd_add(table, at, rows),
        "TopKV2": lambda: tf.math.top_k(rows, 8),
        "Transpose": lambda: tf.transpose(image, [0, 3, 1, 2]),
        "UnsortedSegmentSum": lambda: tf.math.unsorted_segment_sum(rows, at[:, 0], 1000),
        "Where": lambda: tf.where(rows > 0),
    }


def cpu_seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """Of one call: of all threads, and of the one that calls."""
    call()
    taken: list[tuple[float, float]] = []
    for _ in range(REPEATS):
        process, thread = time.process_time(), time.thread_time()
        call()
        thread = time.thread_time() - thread
        taken.append((time.process_time() - process, thread))
    return statistics.median(all_threads for all_threads, _ in taken), statistics.median(own for _, own in taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="OP", help="types of ops; all that there are calls of by default")
    args = parser.parse_args()
    os.environ |= {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",  # no page faults of fresh memory, which the caller would take
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": "4000",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_NUM_INTRAOP_THREADS": "2",
    }
    calls = kernels()
    unknown = [op for op in args.ops if op not in calls]
    if unknown:
        parser.error(f"there is no call of {unknown[0]!r}; there are {', '.join(calls)}")
    print(f"{'op':<28}{'CPU ms':>8}{'caller':>8}")
    for op in args.ops or calls:
        all_threads, own = cpu_seconds(calls[op])
        share = own / all_threads
        print(f"{op:<28}{1e3 * all_threads:>8.1f}{share:>8.2f}" + ("  one core" if share >= ALONE else ""), flush=True)


if __name__ == "__main__":
    main()
