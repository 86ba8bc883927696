"""tfswap on the emulated GPUs of the tests (docs/emulated_gpu.md), by the devices' own clocks and counters.

    export PYTHONPATH=tests
    python benchmarks/emulated.py nets         # peaks and values of the acceptance nets at 60%; ten minutes
    python benchmarks/emulated.py stalls       # how long copies stall a step, as predicted and as measured
    python benchmarks/emulated.py endurance    # 10,000 steps with random delays, while other threads use the CPU
    python benchmarks/emulated.py checks       # what checking for races costs a step

    nets       small sizes; values compared with TensorFlow's without Grappler's memory optimizer, bit by bit. The peak
               is that of three steps, and counts from before the first.
    stalls     at links of 2, 8 and 25 GB/s in each direction, of a step with kernels of a millisecond, behind which
               copies fit, and of 0.1, 0.02 and 0.006, behind which not all do. The device is slowed until a kernel
               takes LONG_US: what the host does, whose kernels run on the CPU, is little next to that, also on a busy
               machine. The shortest of some steps.
    endurance  peak of each step against the limit and the plan, races, and the memory of process and pool.
    checks     CPU time of a step with and without checking for races, in turns.

Each net, and each other part, is a process of its own. Exit status 1 where something is not as promised.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accuracy import trained

ROOT = Path(__file__).resolve().parent.parent
DEVICE = "GPU:0"
MIB = 1 << 20
STEPS = 3
PERCENT = 60
"""The limit of nets, of the unoptimised peak."""
RATES = (2e9, 8e9, 25e9)
KERNELS_US = (1000, 100, 20, 6)
LONG_US = 10_000.0
Made = tuple[list[Any], Callable[..., Any], tuple[Any, ...]]


# --- nets -------------------------------------------------------------------------------------------------------------


def _trained(model: Any, loss_of: Any, optimizer: Any, *arguments: Any) -> Made:
    return model.variables, trained(model, loss_of, optimizer), arguments


def _labels(batch: int) -> Any:
    import tensorflow as tf

    return tf.random.stateless_uniform([batch], seed=(3, 4), maxval=10, dtype=tf.int32)


def application(name: str, batch: int, size: int) -> Made:
    """One of Keras' applications with a pooled head of ten classes."""
    import keras
    import tensorflow as tf

    body = getattr(keras.applications, name)(
        weights=None, input_shape=(size, size, 3), include_top=False, pooling="avg"
    )
    model = keras.Model(body.input, keras.layers.Dense(10)(body.output))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    images = tf.random.stateless_uniform([batch, size, size, 3], seed=(1, 2))
    return _trained(model, loss_of, keras.optimizers.SGD(1e-3), images, _labels(batch))


def lstm(units: int = 32, length: int = 20, batch: int = 32) -> Made:
    """Two layers, by TensorFlow's loops: cuDNN's kernels are not emulated."""
    import keras
    import tensorflow as tf

    inputs = keras.Input((length, 16))
    h = keras.layers.LSTM(units, return_sequences=True, use_cudnn=False)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.LSTM(units, use_cudnn=False)(h)))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x = tf.random.stateless_uniform([batch, length, 16], seed=(1, 2))
    return _trained(model, loss_of, keras.optimizers.Adam(1e-3), x, _labels(batch))


def transformer() -> Made:
    import models

    model, step, arguments = models.transformer()
    return model.variables, step, tuple(arguments)


def mlp(layers: int = 24, width: int = 64, batch: int = 512) -> Made:
    import tensorflow as tf

    weights = [tf.Variable(tf.random.stateless_normal([width, width], seed=(i, 7)) * 0.1) for i in range(layers)]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.nn.relu(h @ weight)
            loss = tf.reduce_mean(h * h)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-3 * gradient)
        return loss

    return weights, step, (tf.random.stateless_normal([batch, width], seed=(1, 2)),)


NETS: dict[str, Callable[[], Made]] = {
    "mlp": mlp,
    "lstm": lstm,
    "transformer": transformer,
    "mobilenet_v2": functools.partial(application, "MobileNetV2", 8, 96),
    "resnet50": functools.partial(application, "ResNet50", 16, 96),
    "vgg16": functools.partial(application, "VGG16", 16, 96),
}
SMALL: dict[str, Callable[[], Made]] = {
    "small mobilenet_v2": functools.partial(application, "MobileNetV2", 2, 64),
    "small resnet50": functools.partial(application, "ResNet50", 12, 64),
    "small vgg16": functools.partial(application, "VGG16", 4, 64),
}
"""The same nets with fewer and smaller images, whose steps take a second or two."""


def train(name: str, how: str, gpus: Any) -> dict[str, Any]:
    """A few steps of a net: unoptimised, or under a limit."""
    import keras
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import memory_optimizer_off

    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    variables, step, arguments = (NETS | SMALL)[name]()
    function = tf.function(step)
    plain = how == "unoptimised"
    if not plain:
        function = tfswap.optimize(function, memory_limit=int(how) if how.isdigit() else how)
    values, peaks = [], []
    with memory_optimizer_off() if plain else contextlib.nullcontext():
        for _ in range(STEPS):
            tf.config.experimental.reset_memory_stats(DEVICE)
            values.append(function(*arguments).numpy().tobytes().hex())
            peaks.append(tf.config.experimental.get_memory_info(DEVICE)["peak"])
    values += [each.numpy().tobytes().hex() for each in variables]
    found = {"values": values, "peak": max(peaks), "races": gpus.report().splitlines()}
    if not plain:
        plan = function.plan()
        planned = function.report().planned_peak_bytes  # for the arena of the latest step
        found |= {"limit": plan.limit_bytes, "planned": planned}
    return found


def nets(chosen: list[str]) -> bool:
    """Prints a row for each net; returns whether all is as promised."""
    print(
        "| net | limit | planned | peak | unoptimised | values | races |\n| --- | --: | --: | --: | --: | --- | --: |"
    )
    good = True
    for name in chosen or NETS | SMALL:
        plain = child("train", name, "unoptimised")
        found = child("train", name, str(plain["peak"] * PERCENT // 100))
        same = found["values"] == plain["values"]
        good &= same and found["peak"] <= min(found["limit"], found["planned"]) and not found["races"]
        sizes = (found["limit"], found["planned"], found["peak"], plain["peak"])
        row = " | ".join(f"{size:,}" for size in sizes)
        print(
            f"| {name}, {PERCENT}% | {row} | {'identical' if same else 'other'} | {len(found['races'])} |",
            flush=True,
        )
    return good


# --- times ------------------------------------------------------------------------------------------------------------


def _swapping(batch: int, limit: str = "60%", **options: Any) -> tuple[Any, tuple[Any, ...]]:
    import tensorflow as tf

    import tfswap

    _, step, arguments = mlp(layers=12, width=128, batch=batch)
    return tfswap.optimize(tf.function(step), memory_limit=limit, tactics=("swap",), **options), arguments


def stall(kernel_us: int, gpus: Any, steps: int = 5) -> dict[str, Any]:
    """By link, how much longer copies make the step: as the plan says, and as measured."""
    import tensorflow as tf

    import tfswap

    slowed = LONG_US / kernel_us
    gpus.set_kernel_us(LONG_US)
    _, step, arguments = mlp(layers=12, width=128, batch=2048)
    found = {}
    for rate in RATES:
        gpus.set_links(rate / slowed, rate / slowed, 10.0 * slowed)
        profile = tfswap.profile(tf.function(step), *arguments, steps=2)
        planned = tfswap.optimize(tf.function(step), memory_limit="60%", tactics=("swap",), profile=profile)

        def shortest(call: Any = planned) -> float:
            times = []
            for _ in range(steps):
                began = time.monotonic()
                call(*arguments).numpy()
                times.append(time.monotonic() - began)
            return min(times)

        shortest()
        with_link = shortest()
        gpus.set_links(0.0, 0.0, 0.0)
        timing = planned.report()._timeline().planned.timing
        found[f"{rate / 1e9:g}"] = {
            "measured": with_link / shortest(),
            "predicted": timing.total_s / (timing.total_s - timing.stall_s - timing.lost_s),
            "swapped": sum(row.nbytes for row in planned.report().swapped),
        }
    return found


def stalls() -> bool:
    """Prints a row for each kernel time and link; returns whether stalls are within 15% of the predicted, or one
    percent of the step.
    """
    print("| kernel, us | GB/s | MB out | longer, predicted | measured |\n| --: | --: | --: | --: | --: |")
    good = True
    for kernel_us in KERNELS_US:
        for rate, row in child("stall", str(kernel_us)).items():
            stalled = row["measured"] - 1
            good &= abs(row["predicted"] - 1 - stalled) <= max(0.15 * stalled, 0.01)
            times = f"{row['predicted'] - 1:.1%} | {row['measured'] - 1:.1%}"
            print(f"| {kernel_us} | {rate} | {row['swapped'] / 1e6:.1f} | {times} |", flush=True)
    return good


def endure(steps: int, gpus: Any) -> dict[str, Any]:
    """Steps of a small net with delays drawn at random, next to threads that never stop computing."""
    import tensorflow as tf

    from tfswap.ops import stats

    gpus.set_kernel_us(20.0)
    gpus.set_links(2e9, 2e9, 50.0)
    step, arguments = _swapping(batch=256)
    ended = threading.Event()

    def load() -> None:
        while not ended.is_set():
            sum(range(10_000))

    threads = [threading.Thread(target=load) for _ in range(os.cpu_count() or 1)]
    for each in threads:
        each.start()
    peaks, memory = set(), []
    for i in range(steps):
        tf.config.experimental.reset_memory_stats(DEVICE)
        step(*arguments)
        peaks.add(tf.config.experimental.get_memory_info(DEVICE)["peak"])
        if i in (steps // 10, steps - 1):
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            memory.append((resident, stats().pool_in_use_bytes, gpus.counts().pinned_bytes))
    ended.set()
    plan = step.plan()
    return {
        "steps": steps,
        "peaks": sorted(peaks),
        "planned": plan.planned_peak_bytes,
        "limit": plan.limit_bytes,
        "memory": memory,
        "swaps": len(plan.evictions),
        "races": gpus.report().splitlines(),
    }


def endurance(steps: int) -> bool:
    found = child("endure", str(steps), EMULATED_GPU_JITTER="7")
    print(json.dumps(found, indent=1))
    return max(found["peaks"]) <= min(found["limit"], found["planned"]) and not found["races"]


def cost_of_checks(batch: int, gpus: Any) -> dict[str, float]:
    """CPU time of a step with the race detector over that without, in turns."""
    step, arguments = _swapping(batch)
    step(*arguments)
    ratios = []
    for _ in range(25):
        times = []
        for check in (False, True):
            gpus.set_check(check)
            began = time.process_time()
            step(*arguments).numpy()
            times.append(time.process_time() - began)
        ratios.append(times[1] / times[0])
    return {"median": statistics.median(ratios), "most": max(ratios)}


def checks() -> bool:
    found = child("cost_of_checks", "512")
    print(f"a step that is checked for races takes {found['median']:.2f} of the CPU time of one without")
    return found["median"] <= 3


# --- processes --------------------------------------------------------------------------------------------------------


def child(*arguments: str, script: str = __file__, count: int = 1, **env: str) -> Any:
    """What a process of this command, or of another one, prints, with this number of emulated GPUs."""
    from emulated_gpu import Gpus

    path = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "programs"), str(ROOT / "benchmarks")]
    given = {
        **os.environ,
        **Gpus(memory=max(1024, 2048 // count) * MIB, count=count).environment(),
        **env,
        "PYTHONPATH": os.pathsep.join(path),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
    command = [sys.executable, script, "--child", *arguments]
    ran = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("nets", "stalls", "endurance", "checks"))
    parser.add_argument("nets", nargs="*", metavar="NET", help=f"of {'; '.join(NETS | SMALL)}; all by default")
    parser.add_argument("--steps", type=int, default=10_000, help="of endurance")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        import emulated_gpu

        gpus = emulated_gpu.attach()
        part, *given = arguments.child
        run = {"train": train, "stall": stall, "endure": endure, "cost_of_checks": cost_of_checks}[part]
        print(json.dumps(run(*(int(g) if part != "train" else g for g in given), gpus)))
        return 0
    if arguments.part is None:
        parser.error("name a part: nets, stalls, endurance or checks")
    run = {
        "nets": lambda: nets(arguments.nets),
        "stalls": stalls,
        "endurance": lambda: endurance(arguments.steps),
        "checks": checks,
    }
    return 0 if run[arguments.part]() else 1


if __name__ == "__main__":
    sys.exit(main())
