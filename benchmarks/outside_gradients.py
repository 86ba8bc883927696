"""A residual net whose gradients are taken outside of the decorated function: memory and time under limits.

    python benchmarks/outside_gradients.py [--limits 60% 45%] [--batch 32] [--pixels 64] [--steps 12]

The net is the decorated function, and returns logits; the loss, the tape and Keras' optimizer are outside of it. Each
run has a process and an arena of its own, of one free region, as a GPU's is from the start. The reference runs as
TensorFlow runs it with Grappler off, which has the same bits; times are the medians of its and the others' steps but
the first two, as ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

ARENA_MIB = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limits", nargs="+", default=["60%", "45%"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        print(json.dumps(run(options.run, options.batch, options.pixels, options.steps)))
        return
    sizes = ["--batch", str(options.batch), "--pixels", str(options.pixels), "--steps", str(options.steps)]
    reference, default, *found = (start([*sizes, "--run", which]) for which in ("plain", "grappler", *options.limits))
    mib = 1 << 20
    print(f"{'':10} {'limit':>8} {'peak':>8} {'time':>6}  same bits")
    print(f"{'default':10} {'':8} {default['peak'] / mib:8.1f} {default['step_s'] / reference['step_s']:6.2f}")
    print(f"{'reference':10} {'':8} {reference['peak'] / mib:8.1f} {1:6.2f}")
    for name, one in zip(options.limits, found, strict=True):
        same = one["losses"] == reference["losses"]
        ratio = one["step_s"] / reference["step_s"]
        print(f"{name:10} {one['limit'] / mib:8.1f} {one['peak'] / mib:8.1f} {ratio:6.2f}  {same}")


def start(arguments: list[str]) -> dict[str, Any]:
    """One run in a process of its own."""
    arena = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ARENA_MIB)}
    environment = {
        **os.environ,
        **arena,
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TFSWAP_PLAN_CACHE": "off",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    made = subprocess.run(
        [sys.executable, __file__, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(made.stdout.splitlines()[-1])


def run(which: str, batch: int, pixels: int, steps: int) -> dict[str, Any]:
    """Train so: "plain", "grappler", or under a limit."""
    import contextlib

    import keras
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import grappler_off

    region = tf.zeros([(ARENA_MIB - 256) << 20], tf.uint8)
    del region
    keras.utils.set_random_seed(0)
    model = residual_net(pixels)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(model.trainable_variables)
    function: Any = tf.function(lambda x: model(x, training=True))
    limited = which not in ("plain", "grappler")
    if limited:
        function = tfswap.optimize(function, memory_limit=which)
    x = tf.random.stateless_normal([batch, pixels, pixels, 3], seed=(1, 2))
    y = tf.random.stateless_uniform([batch], seed=(3, 4), maxval=10, dtype=tf.int32)
    tf.config.experimental.reset_memory_stats("CPU:0")
    losses, times = [], []
    with contextlib.nullcontext() if which == "grappler" else grappler_off():
        for _ in range(steps):
            start_s = time.perf_counter()
            with tf.GradientTape() as tape:
                logits = function(x)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            losses.append(float(loss))
            times.append(time.perf_counter() - start_s)
            del logits, loss, gradients
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    limit = function.report().memory_limit_bytes if limited else None
    return {"peak": peak, "limit": limit, "losses": losses, "step_s": statistics.median(times[2:])}


def residual_net(pixels: int) -> Any:
    """Six convolutions with batch norm and skip connections, of three widths."""
    import keras

    layers = keras.layers
    h = inputs = layers.Input((pixels, pixels, 3))
    for width in (16, 32, 64):
        for _ in range(2):
            skip = h
            h = layers.Conv2D(width, 3, padding="same", use_bias=False)(h)
            h = layers.ReLU()(layers.BatchNormalization()(h))
            h = layers.Add()([skip, h]) if skip.shape == h.shape else h
        h = layers.MaxPooling2D()(h)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(h)))


if __name__ == "__main__":
    main()
