"""Measures how fast this process's CPU runs a few kernels, relative to the analytic model: a `Calibration`.

    python -m tfswap.device.calibration_kernels 2 2        # with two threads in both of TensorFlow's pools; prints JSON

It runs in a process of its own (compiler/calibration.py): in that of a training program it would change the arena's
layout and peak, and run among the program's threads. Kernels run in functions, by TensorFlow's executor, with the
threads and oneDNN as the environment has them. A rate is the predicted time of some kernels over their measured one, so
that what the model has for single ops stays in it. The least of some runs counts, since other work only adds time.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfswap.analysis.cost import work_seconds
from tfswap.exporters.function import grappler_off
from tfswap.importers.function import import_function
from tfswap.ir.graph import Node
from tfswap.ir.op_traits import is_const, is_feed, is_view
from tfswap.kernels.calibration import Calibration
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import Rates, default_rates

Kernels = Sequence[tuple[Callable[..., Any], Sequence[int]]]
"""Kernels, each with the numbers of its arguments."""

PASSES, LEAST_RUNS, LEAST_S = 4, 4, 0.02
"""Each function runs in some passes over all of them, so that other work in one moment does not decide, and in each
pass this often and this long at least."""
STREAM_BYTES = 8 << 20
STREAMS = 6
"""Tensors of element-wise kernels, which together are larger than the caches."""
BUSY_COPIES = 4
SMALL_ROUNDS = 40
"""The number of times that the small kernels run in one function."""
COLD_LAUNCHES = 2.5
"""The time of a small kernel in a step, whose large kernels have displaced it from the caches, over that among other
small ones: 1.3 and 0.55 us in profiles of a transformer, ResNet-50 and MobileNetV2."""


class Timed:
    """A function that runs kernels one after another, and the least seconds that it has taken."""

    def __init__(self, kernels: Kernels, arguments: Sequence[Any]):
        self.function, self._arguments = _traced(kernels, arguments), arguments
        self.seconds = float("inf")
        self.function(*arguments)

    def run(self) -> None:
        taken: list[float] = []
        while len(taken) < LEAST_RUNS or sum(taken) < LEAST_S:
            started = time.perf_counter()
            self.function(*self._arguments)
            taken.append(time.perf_counter() - started)
        self.seconds = min(self.seconds, *taken)


def measure(model: DeviceModel) -> Calibration:
    """The calibration of this process's CPU, which `model` describes. Takes a second or two."""
    import tensorflow as tf

    rates = default_rates(model._replace(calibration=None))
    with grappler_off():
        nothing, small = Timed([(tf.identity, [0])], [tf.ones([1])]), Timed(*_small())
        families = [
            [Timed([kernel], arguments) for kernel in kernels]
            for kernels, arguments in (_products(), _convolutions(), _irregular(), _streams())
        ]
        copies: list[float] = []
        for _ in range(PASSES):
            for timed in (nothing, small, *(each for family in families for each in family)):
                timed.run()
            copies.append(_busy_copy_rate() / rates.out_bytes_per_s)
    launch_s = (small.seconds - nothing.seconds) / len(_kernels(small))
    products, convolutions, steps, memory = (
        statistics.geometric_mean(_ratio(each, rates, nothing.seconds, launch_s) for each in family)
        for family in families
    )
    return Calibration(products, convolutions, steps, memory, max(copies), COLD_LAUNCHES * launch_s).bounded()


def _traced(kernels: Kernels, arguments: Sequence[Any]) -> Any:
    import tensorflow as tf

    @tf.function(autograph=False)
    def run(*given: Any) -> Any:
        before: list[Any] = []
        for kernel, numbers in kernels:
            with tf.control_dependencies(before):
                before = [kernel(*(given[number] for number in numbers))]
        return before[0]

    return run.get_concrete_function(*arguments)


def _kernels(timed: Timed) -> list[Node]:
    nodes = import_function(timed.function)
    return [node for node in nodes if not (is_const(node.op) or is_feed(node.op) or is_view(node.op))]


def _ratio(timed: Timed, rates: Rates, call_s: float, launch_s: float) -> float:
    """The predicted time of a function's kernels over the measured one, without the call and their launches."""
    kernels = _kernels(timed)
    predicted_s = sum(work_seconds(node, rates) for node in kernels)
    return predicted_s / max(timed.seconds - call_s - launch_s * len(kernels), launch_s)


def _products() -> tuple[Kernels, list[Any]]:
    import tensorflow as tf

    arguments = [tf.ones([512, 512]), tf.ones([512, 1024]), tf.ones([1024, 512])]
    product = tf.linalg.matmul
    return [(product, [0, 0]), (product, [2, 1]), (lambda a, b: product(a, b, transpose_b=True), [2, 2])], arguments


def _convolutions() -> tuple[Kernels, list[Any]]:
    """Convolutions of 3 x 3 and 1 x 1 and their gradients, of the sizes in the middle of nets of images."""
    import tensorflow as tf

    image, maps = [8, 16, 16, 64], [8, 16, 16, 128]
    arguments = [tf.ones(image), tf.ones([3, 3, 64, 128]), tf.ones([1, 1, 64, 128]), tf.ones(maps)]
    same: dict[str, Any] = {"strides": [1, 1, 1, 1], "padding": "SAME"}

    def forward(image: Any, kernel: Any) -> Any:
        return tf.raw_ops.Conv2D(input=image, filter=kernel, **same)

    def of_image(kernel: Any, gradient: Any) -> Any:
        return tf.raw_ops.Conv2DBackpropInput(input_sizes=image, filter=kernel, out_backprop=gradient, **same)

    def of_filter(values: Any, kernel: Any, gradient: Any) -> Any:
        sizes = kernel.shape.as_list()
        return tf.raw_ops.Conv2DBackpropFilter(input=values, filter_sizes=sizes, out_backprop=gradient, **same)

    kernels = [
        entry
        for kernel in (1, 2)
        for entry in ((forward, [0, kernel]), (of_image, [kernel, 3]), (of_filter, [0, kernel, 3]))
    ]
    return kernels, arguments


def _irregular() -> tuple[Kernels, list[Any]]:
    """Element-wise and irregular arithmetic that is not hidden by memory traffic."""
    import tensorflow as tf

    values, channels = tf.reshape(tf.linspace(-1.0, 1.0, 16 * 32 * 32 * 64), [16, 32, 32, 64]), tf.ones([64])
    pooled = tf.nn.max_pool2d(values, 2, 2, "SAME")
    window: dict[str, Any] = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}

    def normalised(x: Any, scale: Any) -> Any:
        return tf.raw_ops.FusedBatchNormV3(x=x, scale=scale, offset=scale, mean=scale, variance=scale)[0]

    def pool_gradient(x: Any, y: Any) -> Any:
        return tf.raw_ops.MaxPoolGrad(orig_input=x, orig_output=y, grad=y, **window)

    kernels = [
        (normalised, [0, 1]),
        (pool_gradient, [0, 2]),
        (tf.nn.softmax, [3]),
        (lambda x: tf.transpose(x, [1, 0]), [3]),
    ]
    return kernels, [values, channels, pooled, tf.reshape(values, [1024, 1024])]


def _streams() -> tuple[Kernels, list[Any]]:
    """Kernels that are bound by memory, on tensors that the caches do not hold: each runs on all of them in turn."""
    import tensorflow as tf

    arguments = [tf.fill([STREAM_BYTES // 4], 1.0) for _ in range(STREAMS)]
    pairs = range(0, STREAMS, 2)

    def each(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            before: list[Any] = []
            for number in pairs:
                with tf.control_dependencies(before):
                    before = [kernel(given[number], given[number + 1])]
            return before[0]

        return run

    kernels = (tf.add, tf.multiply, lambda a, _: tf.nn.relu(a))
    return [(each(kernel), range(STREAMS)) for kernel in kernels], arguments


def _small() -> tuple[Kernels, list[Any]]:
    """Kernels on small tensors, as steps have them."""
    import tensorflow as tf

    kernels: Kernels = [
        (tf.add, [0, 0]),
        (tf.multiply, [0, 0]),
        (tf.nn.bias_add, [0, 1]),
        (tf.nn.relu, [0]),
        (tf.math.sqrt, [1]),
        (lambda a: tf.reduce_sum(a, 0), [0]),
        (tf.linalg.matmul, [0, 0]),
        (tf.subtract, [0, 1]),
    ]
    return list(kernels) * SMALL_ROUNDS, [tf.ones([16, 16]), tf.ones([16])]


def _busy_copy_rate() -> float:
    """Bytes per second of the swap ops' copies while kernels use all cores, in the slower direction."""
    import tensorflow as tf

    import tfswap.ops as ops

    ops.reserve(BUSY_COPIES * STREAM_BYTES)
    tensor, square = tf.fill([STREAM_BYTES // 4], 1.0), tf.ones([512, 512])
    busy = _traced([(tf.linalg.matmul, [0, 0]), (tf.add, [1, 1])] * BUSY_COPIES, [square, tensor])
    out_s: list[float] = []
    in_s: list[float] = []
    for _ in range(LEAST_RUNS):
        before = ops.stats()
        handles = [ops.swap_out(tensor) for _ in range(BUSY_COPIES)]
        busy(square, tensor)
        for handle in handles:
            ops.release(handle)
        between = ops.stats()
        copies = [ops.swap_in(handle, tensor.dtype) for handle in handles]
        busy(square, tensor)
        for copy in copies:
            ops.await_copy(*copy)
        del handles
        after = ops.stats()
        out_s.append(between.out_busy_s - before.out_busy_s)
        in_s.append(after.in_busy_s - between.in_busy_s)
    return BUSY_COPIES * STREAM_BYTES / max(min(out_s), min(in_s))


def main() -> None:
    """Print this process's calibration as a list in JSON. Its arguments: the threads of both of TensorFlow's pools."""
    import tensorflow as tf

    from tfswap.device.machine import current_device

    for count, give in zip(
        sys.argv[1:],
        (tf.config.threading.set_intra_op_parallelism_threads, tf.config.threading.set_inter_op_parallelism_threads),
        strict=False,
    ):
        give(int(count))
    print(json.dumps(measure(current_device(on_cpu=True)[1])), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # TensorFlow's threads need not be ended one by one
