"""A training step that does not fit in memory, trained all the same: tfswap's main job on ResNet-50.

    python examples/train_under_cap.py --plot memory.png

Takes one to three minutes on two cores, and prints each stage as it begins.

Four steps of ResNet-50 are run three times, each time in a process of its own:

1. as it is, with room to spare: its losses, its peak and its time are what the others are held against;
2. as it is, under a cap: TensorFlow's allocator runs out of memory, and the step fails;
3. decorated with `tfswap.optimize`, under the same cap: it trains, with the same losses.

The cap comes from the model's own figures: tfswap is asked for the smallest limit that it reaches (the floor),
and the limit is taken between that and the unoptimised peak (`--share` says where).

Why a CPU can stand in for a GPU's memory here: with TF_CPU_ALLOCATOR_USE_BFC=1 TensorFlow gives the CPU device
the same BFC allocator that it gives GPUs, and TF_CPU_BFC_MEM_LIMIT_IN_MB makes its arena as large as that and
no larger. Both are read when TensorFlow is imported, hence the processes. What tfswap swaps out lies outside
that arena, as pinned host memory lies outside a GPU's. The arena starts as one free region, as a GPU's does.
TF_ENABLE_ONEDNN_OPTS=0 because oneDNN's own graph pass fuses ops in the unoptimised step only, which changes
last bits, and a GPU has no such pass; TensorFlow's memory optimizer is off in the reference for the same reason (it
adds in any order). Where TensorFlow sees a GPU, that GPU is used and capped instead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MIB = 2**20
STEPS = 4
ARENA_ROOM = 1.15
"""The arena, over the limit: chunks leave holes between them that no allocator can hand out."""


def build_step(batch: int, size: int) -> tuple[Any, tuple[Any, Any]]:
    """An ordinary Keras model in an ordinary custom training loop. Returns the step and its arguments."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None, input_shape=(size, size, 3), classes=10)
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    optimizer.build(model.trainable_variables)

    @tf.function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    x = tf.random.stateless_uniform([batch, size, size, 3], seed=(1, 2))
    y = tf.random.stateless_uniform([batch], seed=(3, 4), maxval=10, dtype=tf.int32)
    return train_step, (x, y)


def prepare_device(cap_bytes: int, *, free: bool = False) -> str:
    """Cap the GPU where there is one, make the CPU's arena one free region where not; returns its name."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        if not free:
            capped = tf.config.LogicalDeviceConfiguration(memory_limit=cap_bytes // MIB)
            tf.config.set_logical_device_configuration(gpus[0], [capped])
        return "GPU:0"
    # Untouched pages cost nothing.
    slab = tf.raw_ops.Empty(shape=[cap_bytes // MIB - 2, MIB], dtype=tf.uint8)
    del slab
    return "CPU:0"


def train(step: Any, arguments: tuple[Any, Any], device: str) -> dict[str, Any]:
    """Losses (as exact text), the allocator's peak, and the median time of a step after the first."""
    import tensorflow as tf

    losses, times = [], []
    tf.config.experimental.reset_memory_stats(device)
    for _ in range(STEPS):
        started = time.perf_counter()
        losses.append(float(step(*arguments).numpy()).hex())
        times.append(time.perf_counter() - started)
    peak = tf.config.experimental.get_memory_info(device)["peak"]
    return {"losses": losses, "peak_bytes": peak, "step_s": statistics.median(times[1:]), "first_s": times[0]}


def run_free(args: argparse.Namespace) -> dict[str, Any]:
    """The unoptimised step with room to spare, and what tfswap says of it."""
    device = prepare_device(args.cap_bytes, free=True)
    step, arguments = build_step(args.batch, args.size)
    with memory_optimizer_off():
        result = train(step, arguments, device)
    import tfswap

    analysed = tfswap.optimize(step, mode="analyze", memory_limit="100%")
    analysed.get_concrete_function(*arguments)
    return result | {"floor_bytes": analysed.report().floor_bytes}


def run_capped(args: argparse.Namespace) -> dict[str, Any]:
    """The unoptimised step under the cap: it should fail."""
    import tensorflow as tf

    device = prepare_device(args.cap_bytes)
    step, arguments = build_step(args.batch, args.size)
    try:
        with memory_optimizer_off():
            return train(step, arguments, device)
    except tf.errors.ResourceExhaustedError as error:
        line = next((line for line in error.message.splitlines() if "OOM" in line), error.message.splitlines()[0])
        return {"error": f"{type(error).__name__}: {line.strip().partition(' on /job')[0]}"}


def run_decorated(args: argparse.Namespace) -> dict[str, Any]:
    """The decorated step under the cap; draws its memory where a plot is asked for."""
    import tfswap

    device = prepare_device(args.cap_bytes)
    step, arguments = build_step(args.batch, args.size)
    decorated = tfswap.optimize(step, memory_limit=args.limit_bytes)
    result = train(decorated, arguments, device)
    report = decorated.report()
    if args.plot:
        report.save(args.plot)
    return result | {
        "predicted_bytes": report.baseline_peak_bytes,
        "planned_bytes": report.planned_peak_bytes,
        "predicted_ratio": report.time_ratio,
        "swapped": len(report.swapped),
        "travel_bytes": sum(row.cost_bytes for row in report.swapped),
        "host_bytes": report.host_bytes,
    }


def memory_optimizer_off() -> Any:
    """TensorFlow's memory optimizer off for calls in this context, so that losses repeat to the bit."""
    from tfswap.exporters.function import memory_optimizer_off as off

    return off()


def spawn(args: argparse.Namespace, variant: str, cap_bytes: int, limit_bytes: int = 0) -> dict[str, Any]:
    """Run one variant in a process of its own under `cap_bytes` of device memory."""
    command = [sys.executable, __file__, "--variant", variant, f"--cap_bytes={cap_bytes}"]
    command += [f"--limit_bytes={limit_bytes}", f"--batch={args.batch}", f"--size={args.size}"]
    command += [f"--plot={args.plot}"] if args.plot else []
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "3",  # the failure is shown by this program, in one line
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(cap_bytes // MIB),
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
    # Standard error is left alone: the ops' build, which takes seconds at the first use, says so there.
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"the {variant} run failed, see above")
    return json.loads(done.stdout.splitlines()[-1])


def show(rows: list[tuple[str, str, str]]) -> None:
    for label, before, after in rows:
        print(f"  {label:<24}{before:>16}{after:>16}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=96, help="height and width of the images")
    parser.add_argument("--share", type=float, default=0.4, help="the limit: 0 is the floor, 1 the unoptimised peak")
    parser.add_argument("--plot", type=Path, help="draw memory over the step in this PNG (needs matplotlib)")
    parser.add_argument("--variant", choices=["free", "capped", "decorated"], help=argparse.SUPPRESS)
    parser.add_argument("--cap_bytes", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--limit_bytes", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        run = {"free": run_free, "capped": run_capped, "decorated": run_decorated}[args.variant]
        print(json.dumps(run(args)))
        return 0

    name = f"ResNet-50, batch {args.batch}, {args.size}x{args.size}"
    print(f"{name}: {STEPS} steps, three times. One to three minutes on two cores, and one more where tfswap's ops are")
    print("compiled first.")
    print("1. unoptimised, with room to spare ...", flush=True)
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4
    free = spawn(args, "free", room)
    print(f"  it peaks at {free['peak_bytes'] / MIB:.0f} MiB; tfswap's floor is {free['floor_bytes'] / MIB:.0f} MiB")
    limit = int(free["floor_bytes"] + args.share * (free["peak_bytes"] - free["floor_bytes"]))
    cap = int(limit * ARENA_ROOM)

    print(f"2. unoptimised, on a device of {cap / MIB:.0f} MiB ...", flush=True)
    capped = spawn(args, "capped", cap)
    print(f"  {capped.get('error', 'it trained: the cap is too high to show anything, lower --share')}")

    print(f"3. decorated with memory_limit={limit}, on the same device ...", flush=True)
    after = spawn(args, "decorated", cap, limit)
    same = after["losses"] == free["losses"]
    held = after["peak_bytes"] <= limit
    print(f"  it trained; losses {', '.join(f'{float.fromhex(x):.6f}' for x in after['losses'])}")
    print()
    show(
        [
            ("", "unoptimised", "tfswap"),
            ("peak measured, MiB", f"{free['peak_bytes'] / MIB:.1f}", f"{after['peak_bytes'] / MIB:.1f}"),
            ("peak predicted, MiB", f"{after['predicted_bytes'] / MIB:.1f}", f"{after['planned_bytes'] / MIB:.1f}"),
            ("limit, MiB", "", f"{limit / MIB:.1f}"),
            ("time per step, s", f"{free['step_s']:.3f}", f"{after['step_s']:.3f}"),
            ("first call, s", f"{free['first_s']:.1f}", f"{after['first_s']:.1f}"),
            ("swapped tensors", "0", str(after["swapped"])),
            ("copied per step, MiB", "0.0", f"{after['travel_bytes'] / MIB:.1f}"),
            ("host memory, MiB", "0.0", f"{after['host_bytes'] / MIB:.1f}"),
            ("trains under the cap", "no" if "error" in capped else "yes", "yes"),
        ]
    )
    print()
    print(f"losses {'identical to the bit' if same else 'DIFFER'}; limit {'held' if held else 'BROKEN'}")
    if args.plot:
        print(f"memory over the step, as predicted, drawn in {args.plot}")
    return 0 if same and held and "error" in capped else 1


if __name__ == "__main__":
    sys.exit(main())
