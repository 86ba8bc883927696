"""Keras' MobileNetV2 trained by `fit`: as it is, and with tfswap under a share of what that takes.

    python examples/keras_fit.py
    python examples/keras_fit.py --limit 65% --log_dir logs    # and then: tensorboard --logdir logs

Each runs in a process of its own, on a CPU whose memory TensorFlow manages as it manages a GPU's, so that the peak is
what the allocator says. Under a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

MIB = 1 << 20
ROOM_MIB = 2048
SIZE, CLASSES, ROWS, BATCH, EPOCHS = 96, 10, 80, 16, 3


def make_model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNetV2(alpha=0.35, weights=None, input_shape=(SIZE, SIZE, 3), classes=CLASSES)
    model.compile(
        optimizer=keras.optimizers.SGD(0.01, momentum=0.9),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Losses (as exact text), the allocator's peak, and seconds by epoch."""
    import logging

    import keras
    import numpy as np
    import tensorflow as tf

    import tfswap

    logging.basicConfig(format="  %(message)s")
    logging.getLogger("tfswap").setLevel(logging.INFO)
    # TensorFlow's optimizers re-order sums: without them both trainings have the same bits.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    # One free region, as a GPU's memory is at the start.
    slab = tf.raw_ops.Empty(shape=[(ROOM_MIB - 2) * MIB], dtype=tf.uint8)
    del slab
    tf.config.experimental.reset_memory_stats("CPU:0")

    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, SIZE, SIZE, 3)).astype("float32")
    y = random.integers(0, CLASSES, size=ROWS)
    model, callbacks, times = make_model(), [], []
    if args.variant == "tfswap":
        tfswap.keras.optimize(model, memory_limit=args.limit)
        callbacks.append(tfswap.keras.MemoryReport(log_dir=args.log_dir))
    started = [0.0]
    callbacks.append(
        keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda *_: started.__setitem__(0, time.perf_counter()),
            on_epoch_end=lambda *_: times.append(time.perf_counter() - started[0]),
        )
    )
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks).history
    result = {"losses": [float(loss).hex() for loss in history["loss"]], "epoch_s": times}
    if args.variant == "plain":
        return result | {"peak_bytes": tf.config.experimental.get_memory_info("CPU:0")["peak"]}
    report = tfswap.keras.report(model)
    return result | {
        "peak_bytes": max(epoch.measured_peak_bytes for epoch in callbacks[0].epochs),
        "planned_bytes": report.planned_peak_bytes,
        "limit_bytes": report.memory_limit_bytes,
        "swapped": len(report.swapped),
        "recomputed": len(report.recomputed),
        "encoded": len(report.encoded),
    }


def spawn(args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """`train` in a process of its own."""
    command = [sys.executable, __file__, f"--variant={variant}", f"--limit={args.limit}"]
    command += [f"--log_dir={args.log_dir}"] if args.log_dir else []
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ROOM_MIB),
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"the {variant} training failed, see above")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="68%", help="memory_limit of tfswap.keras.optimize")
    parser.add_argument("--log_dir", help="write the peaks for TensorBoard")
    parser.add_argument("--variant", choices=["plain", "tfswap"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(train(args)))
        return 0
    print(f"MobileNetV2 (alpha 0.35), batches of {BATCH}, {SIZE}x{SIZE}: fit as it is ...", flush=True)
    plain = spawn(args, "plain")
    print(f"and after tfswap.keras.optimize(model, memory_limit={args.limit!r}) ...", flush=True)
    after = spawn(args, "tfswap")
    print()
    for label, before, now in (
        ("", "plain fit", "tfswap"),
        ("peak, MiB", f"{plain['peak_bytes'] / MIB:.1f}", f"{after['peak_bytes'] / MIB:.1f}"),
        ("peak as planned, MiB", "", f"{after['planned_bytes'] / MIB:.1f}"),
        ("limit, MiB", "", f"{after['limit_bytes'] / MIB:.1f}"),
        ("first epoch, s", f"{plain['epoch_s'][0]:.1f}", f"{after['epoch_s'][0]:.1f}"),
        ("last epoch, s", f"{plain['epoch_s'][-1]:.1f}", f"{after['epoch_s'][-1]:.1f}"),
        ("swapped", "0", f"{after['swapped']}"),
        ("recomputed", "0", f"{after['recomputed']}"),
        ("encoded", "0", f"{after['encoded']}"),
    ):
        print(f"  {label:<24}{before:>12}{now:>12}")
    same = plain["losses"] == after["losses"]
    held = after["peak_bytes"] <= after["limit_bytes"]
    print(f"\nlosses {'identical to the bit' if same else 'DIFFER'}; limit {'held' if held else 'BROKEN'}")
    return 0 if same and held else 1


if __name__ == "__main__":
    sys.exit(main())
