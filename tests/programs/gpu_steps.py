"""Programs of test_gpu.py, each for a process of its own; the tests on a CPU run them on its arena.

    python gpu_steps.py train NET DEVICE unoptimised   # Grappler off: the reference for the bits
    python gpu_steps.py train NET DEVICE LIMIT         # a share such as 60%
    python gpu_steps.py overlap NET DEVICE LIMIT       # one step, profiled
    python gpu_steps.py codecs DEVICE                  # codecs' bits there and on the CPU

DEVICE is "GPU:0" or "CPU:0"; nets are smaller on a CPU, and with GPU_PROOF_SMALL in the environment. Each prints a JSON
object.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tfswap
from tfswap.exporters.function import memory_optimizer_off

STEPS = 5
SETTLED = 2
"""Steps after which what the first one showed of cuDNN's workspaces has been planned for."""

Made = tuple[list[Any], Callable[[Any], Any], Any]


def mlp(small: bool) -> Made:
    layers, width, rows = (8, 64, 512) if small else (24, 1024, 16384)
    weights = [tf.Variable(tf.random.stateless_normal([width, width], seed=(i, 7)) * 0.05) for i in range(layers)]

    def loss_of(x: Any) -> Any:
        for weight in weights:
            x = tf.nn.relu(x @ weight)
        return tf.reduce_mean(x * x)

    return weights, loss_of, tf.random.stateless_normal([rows, width], seed=(1, 2))


def resnet(small: bool) -> Made:
    """Blocks of two convolutions parallel to an identity, with normalisation by the batch's own moments."""
    blocks, width, size, images = (4, 8, 16, 8) if small else (12, 64, 64, 64)
    weights = [
        tf.Variable(tf.random.stateless_normal([3, 3, width, width], seed=(i, 7)) * 0.05) for i in range(2 * blocks)
    ]

    def normalised(x: Any, kernel: Any) -> Any:
        x = tf.nn.conv2d(x, kernel, 1, "SAME")
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        return (x - mean) * tf.math.rsqrt(variance + 1e-3)

    def loss_of(x: Any) -> Any:
        for first, second in zip(weights[::2], weights[1::2], strict=True):
            x = tf.nn.relu(x + normalised(tf.nn.relu(normalised(x, first)), second))
        return tf.reduce_mean(x * x)

    return weights, loss_of, tf.random.stateless_normal([images, size, size, width], seed=(1, 2))


NETS: dict[str, Callable[[bool], Made]] = {"mlp": mlp, "resnet": resnet}


def make(net: str, device: str) -> tuple[list[Any], Any, Any]:
    """The net's variables, its step and a batch, on `device`."""
    tf.config.experimental.enable_op_determinism()
    with tf.device(device):
        weights, loss_of, batch = NETS[net](device.startswith("CPU") or "GPU_PROOF_SMALL" in os.environ)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-3 * gradient)
        return loss

    return weights, tf.function(step), batch


def train(net: str, device: str, limit: str) -> dict[str, Any]:
    weights, function, batch = make(net, device)
    digest, peaks, reported = hashlib.sha256(), [], {}
    reference = limit == "unoptimised"
    if not reference:
        function = tfswap.optimize(function, memory_limit=limit)
    with memory_optimizer_off() if reference else contextlib.nullcontext():
        for _ in range(STEPS):
            tf.config.experimental.reset_memory_stats(device)
            digest.update(function(batch).numpy().tobytes())
            peaks.append(tf.config.experimental.get_memory_info(device)["peak"])
    for weight in weights:
        digest.update(weight.numpy().tobytes())
    if not reference:
        plan = function.plan()
        reported = {"limit": plan.limit_bytes, "swapped": len(plan.evictions)}
    return {"digest": digest.hexdigest(), "peak": max(peaks[SETTLED:]), **reported}


def overlap(net: str, device: str, limit: str) -> dict[str, Any]:
    from gpu.traces import overlap_s, read_profile, total_s

    _, function, batch = make(net, device)
    # Nothing but copies: recomputation would leave few.
    optimized = tfswap.optimize(function, memory_limit=limit, tactics=("swap",))
    for _ in range(SETTLED):
        optimized(batch).numpy()
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        optimized(batch).numpy()
        tf.profiler.experimental.stop()
        streams = read_profile(folder)
    copies = [*streams.out, *streams.back]
    return {
        "swapped": len(optimized.plan().evictions),
        "kernels": len(streams.kernels),
        "out": len(streams.out),
        "back": len(streams.back),
        "copies_s": total_s(copies),
        "kernels_s": total_s(streams.kernels),
        "concurrent_s": overlap_s(copies, streams.kernels),
    }


def codecs(device: str) -> dict[str, Any]:
    """By codec, whether its bits on `device` are those on the CPU. Denormals, which CPU threads flush, are left out."""
    differing = []
    for name, run in codec_calls().items():
        there, here = (run_on(place, run) for place in (device, "CPU:0"))
        if there != here:
            differing.append(name)
    return {"compared": len(codec_calls()), "differing": differing}


def run_on(device: str, run: Callable[[], Any]) -> list[bytes]:
    with tf.device(device):
        results = tf.nest.flatten(run())
    return [with_one_nan(np.asarray(result)).tobytes() for result in results]


def with_one_nan(values: np.ndarray) -> np.ndarray:
    """Arithmetic on a NaN gives another one on a GPU than on a CPU. Encodings are integers, and stay as they are."""
    if values.dtype.kind in "iub":
        return values
    return np.where(np.isnan(values), np.array(np.nan, values.dtype), values)


def codec_calls() -> dict[str, Callable[[], Any]]:
    """The codecs that have GPU kernels, each there and back, over values that go wrong easily."""
    import tfswap.ops.codecs as ops

    random = np.random.default_rng(0)
    special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 6.0, 1.0, -1.0, 448.0, 5.999])
    values = np.where(random.random(100_003) < 0.3, random.choice(special, 100_003), random.standard_normal(100_003))
    finite = np.nan_to_num(values, nan=0.5, posinf=2.0, neginf=-2.0)
    image, gradients = random.standard_normal([2, 17, 19, 5]), random.standard_normal([2, 9, 10, 5])
    window = {"ksize": [1, 3, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
    calls: dict[str, Callable[[], Any]] = {}

    def add(name: str, run: Callable[[Any], Any], content: np.ndarray, dtype: Any) -> None:
        calls[f"{name} {dtype.name}"] = lambda: run(tf.identity(tf.constant(content, dtype)))

    def pooled(x: Any) -> Any:
        positions = ops.encode_max_pool(x, **window)
        return positions, ops.max_pool_grad_from_positions(tf.cast(gradients, x.dtype), positions, x.shape, **window)

    for dtype in (tf.float32, tf.float16, tf.bfloat16, tf.float64):
        for predicate in ("positive", "relu6"):

            def masked(x: Any, predicate: str = predicate) -> Any:
                mask = ops.encode_mask(x, predicate)
                return mask, ops.decode_mask(mask, x.shape), ops.multiply_by_mask(x + 1, mask)

            add(f"mask {predicate}", masked, values, dtype)
        add("leaky mask", lambda x: ops.leaky_relu_grad_from_mask(x, ops.encode_mask(x, "positive")), values, dtype)
        add("select", lambda x: ops.select_by_mask(ops.encode_mask(x, "positive"), x, -x, x.shape), values, dtype)
    for dtype in (tf.float32, tf.float16, tf.bfloat16):
        add("max pool", pooled, image, dtype)
        for kind in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "gist_float8", "gist_float10"):

            def narrowed(x: Any, kind: str = kind) -> Any:
                encoded = ops.encode_floats(x, kind)
                return encoded, ops.decode_floats(encoded, x.shape, kind, x.dtype)

            add(kind, narrowed, values, dtype)
        for width in (4, 8):

            def grouped(x: Any, width: int = width) -> Any:
                encoded = ops.encode_groups(x, 3, bits=width)
                return encoded, ops.decode_groups(encoded, x.shape, x.dtype, bits=width)

            add(f"groups of {width} bits", grouped, finite, dtype)
    return calls


if __name__ == "__main__":
    program = {"train": train, "overlap": overlap, "codecs": codecs}[sys.argv[1]]
    print(json.dumps(program(*sys.argv[2:])))
