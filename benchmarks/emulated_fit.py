"""Keras' `fit` under MirroredStrategy on two emulated GPUs (docs/emulated_gpu.md), each with a limit of its own.

    export PYTHONPATH=tests:tests/programs
    python benchmarks/emulated_fit.py               # all, ten minutes
    python benchmarks/emulated_fit.py transformer   # one

Each run is a process of its own. Two epochs, with an uneven last batch, are compared with those without tfswap:
weights, optimizer and what `fit` returns, bit by bit. Peaks are those of steps, as planned for the arena in which each
ran. In the first call a peak may come before the step, and is not the step's. A smaller batch is planned as a whole
one. Time is that of an epoch with kernels of a millisecond, with tfswap over without; processes with and without it
take turns. Exit status 1 where a limit is passed, values differ, or something races.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from typing import Any

import emulated

LIMITS = {"GPU:0": "60%", "GPU:1": "55%"}
BATCH = 64
BATCHES = 2.5
"""The last batch is an uneven one."""
KERNEL_US, LINK = 1000.0, 25e9
ROUNDS, EPOCHS = 2, 3
"""Of processes without tfswap and with it in turns, and of epochs that are timed in each."""
ROW, SECONDS = "row", "seconds"
"""What a process of this command finds."""


def adversarial(make: Any) -> Any:
    """A model with a `train_step` of the user's own: of examples, and of neighbours of them that are harder."""
    import keras
    import tensorflow as tf

    class Adversarial(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = self.compute_loss(x, y, self(x, training=True))
            harder = x + 0.01 * tf.sign(tape.gradient(loss, x))
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(x, y, predicted) + self.compute_loss(harder, y, self(harder, training=True))
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
            )
            return self.compute_metrics(x, y, predicted)

    return make(Adversarial)


def convolutions(model: Any) -> Any:
    import keras

    x = inputs = keras.Input((32, 32, 3))
    for width in (16, 32, 32):
        x = keras.layers.Conv2D(width, 3, padding="same")(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    return model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))


def mobilenet() -> Any:
    import keras

    found = keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3), include_top=False, pooling="avg")
    return keras.Model(found.input, keras.layers.Dense(10)(found.output))


def compiled(kind: str) -> Any:
    """The model of a kind, on both devices, compiled; always with the same initial values."""
    import emulated_devices
    import keras
    import several_gpus

    keras.utils.set_random_seed(0)
    with several_gpus.strategy().scope():
        sgd, adam = keras.optimizers.SGD(1e-2, momentum=0.9), keras.optimizers.Adam(1e-3, clipnorm=1.0)
        make, optimizer = {
            "mobilenet": (mobilenet, sgd),
            "transformer": (lambda: emulated_devices.transformer(keras, (64, 64)), adam),
            "train_step": (lambda: adversarial(convolutions), keras.optimizers.Adam(1e-3)),
        }[kind]
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


KINDS = "mobilenet", "transformer", "train_step"


def fit(model: Any, epochs: int) -> dict[str, list[float]]:
    import numpy as np
    from gpu_compare import draws

    count = int(BATCH * BATCHES)
    x, y = draws(count, *model.inputs[0].shape[1:]), np.arange(count) % 10
    return model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, shuffle=False).history


def trained(model: Any) -> list[str]:
    """What two epochs give, to the bit."""
    history = repr(fit(model, epochs=2))
    return [history, *(each.numpy().tobytes().hex() for each in (*model.weights, *model.optimizer.variables))]


def watch(devices: list[str]) -> dict[str, list[list[int]]]:
    """By device: of each step from now on the peak, the planned one, and the limit."""
    from several_gpus import peaks_of

    from tfswap.frontends.keras import Training

    run = Training._run
    found: dict[str, list[list[int]]] = {device: [] for device in devices}

    def watched(self: Training, spec: Any, batch: Any) -> Any:
        result, _ = peaks_of(lambda: run(self, spec, batch))  # which resets the allocators' peaks
        for device, each in self._latest.latest_report.devices.items():
            if each.measured_peak_bytes is not None:
                found[device].append([each.measured_peak_bytes, each.planned_peak_bytes, each.memory_limit_bytes or 0])
        return result

    Training._run = watched
    return found


def row(kind: str, gpus: Any) -> dict[str, Any]:
    import several_gpus
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import memory_optimizer_off

    tf.config.experimental.enable_op_determinism()
    with memory_optimizer_off():
        expected = trained(compiled(kind))
    tf.keras.backend.clear_session()
    gc.collect()  # the first model's variables
    steps = watch(several_gpus.gpus())
    optimized = tfswap.keras.optimize(compiled(kind), memory_limit=LIMITS)
    same = trained(optimized) == expected
    races = gpus.report().splitlines()
    return {"same": same, "races": races, "steps": steps}


def seconds(kind: str, with_limits: str, gpus: Any) -> list[float]:
    """Those of some epochs, without tfswap or with it, in a process that has no other model on the devices."""
    import contextlib

    import tfswap
    from tfswap.exporters.function import memory_optimizer_off

    model = compiled(kind)
    if with_limits:
        model = tfswap.keras.optimize(model, memory_limit=LIMITS)
    gpus.set_check(False)
    gpus.set_kernel_us(KERNEL_US)
    gpus.set_links(LINK, LINK, 10.0)
    found: list[float] = []
    with contextlib.nullcontext() if with_limits else memory_optimizer_off():
        fit(model, epochs=1)
        for _ in range(EPOCHS):
            began = time.monotonic()
            fit(model, epochs=1)
            found.append(time.monotonic() - began)
    return found


def time_ratio(kind: str) -> float:
    """The median epoch with tfswap over that without, of processes that run in turns."""
    found: dict[str, list[float]] = {"": [], "limits": []}
    for _ in range(ROUNDS):
        for with_limits, measured in found.items():
            measured += emulated.child(SECONDS, kind, with_limits, script=__file__, count=2)
    return statistics.median(found["limits"]) / statistics.median(found[""])


def table(kinds: list[str]) -> bool:
    """Prints a row for each kind; returns whether all is as promised."""
    print("| model | limit, planned, peak of each | most above the plan, B | values | races | time |")
    print("|---|---|--:|---|--:|--:|")
    good = True
    for kind in kinds:
        found = emulated.child(ROW, kind, script=__file__, count=2)
        steps = found["steps"].values()
        good &= found["same"] and not found["races"]
        good &= all(peak <= limit for each in steps for peak, _, limit in each)
        highest = [max(each) for each in steps]
        sizes = "; ".join(f"{limit:,}, {planned:,}, {peak:,}" for peak, planned, limit in highest)
        above = max(peak - planned for each in steps for peak, planned, _ in each)
        values = "identical" if found["same"] else "other"
        races = len(found["races"])
        print(f"| {kind} | {sizes} | {above} | {values} | {races} | {time_ratio(kind):.2f} |", flush=True)
    return good


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        import emulated_gpu

        part, *given = sys.argv[2:]
        print(json.dumps({ROW: row, SECONDS: seconds}[part](*given, emulated_gpu.attach())))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="MODEL", help=f"of {', '.join(KINDS)}; all by default")
    kinds = parser.parse_args().kinds or [*KINDS]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"there is no model {unknown[0]!r}: choose from {', '.join(KINDS)}")
    return 0 if table(kinds) else 1


if __name__ == "__main__":
    sys.exit(main())
