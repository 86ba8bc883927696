"""How long planning and rewriting take against the size of the graph, TensorFlow's own tracing left out.

    python benchmarks/planning_time.py                    # ResNet-50, and bottleneck ResNets of growing depth
    python benchmarks/planning_time.py --blocks 8 32 128 --json times.json
    python benchmarks/planning_time.py --profile 20       # where the time of the last graph goes
    python benchmarks/planning_time.py --slices           # ResNet-50 with "slice" over without it, CPU time in turns

Each graph is traced once, then imported, given to Grappler, analysed, planned for a limit between its floor and its
peak, rewritten and exported as `tfswap.optimize` does it; nothing runs. Two stand next to the total: Grappler, which
TensorFlow otherwise runs at a function's first call and then no longer does, and what the unoptimised peak takes, which
a report needs and a limit in bytes does not. The slope is that of log(time) over log(nodes) between the smallest and
the largest ResNet: 1.0 is linear. Times are wall clock, the best of `--repeats`.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import math
import os
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH, SIZE, WIDTH = 8, 32, 16
GRAPPLER = "Grappler"
"""TensorFlow's own optimizers, which the first call of the unoptimised step would run, and no part of the total."""
REPORT = "unoptimised"
"""Found out when it is asked for, and no part of the total."""
STAGES = ("import", "facts and order", "plan", "rewrite", "export")


def resnet50() -> tuple[Any, tuple[Any, ...]]:
    """Keras' ResNet-50 with momentum, as in the acceptance cases."""
    import keras
    import tensorflow as tf

    model = keras.applications.ResNet50(weights=None, input_shape=(96, 96, 3), classes=10)
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    return step, (tf.zeros([32, 96, 96, 3]), tf.zeros([32], tf.int32))


def deep_resnet(blocks: int) -> tuple[Any, tuple[Any, ...]]:
    """A bottleneck ResNet of `blocks` blocks of three convolutions, in plain TensorFlow, with momentum."""
    import tensorflow as tf

    kernels = []
    for _ in range(blocks):
        for size, inner, outer in ((1, 4 * WIDTH, WIDTH), (3, WIDTH, WIDTH), (1, WIDTH, 4 * WIDTH)):
            scale = (2 / (size * size * inner)) ** 0.5
            value = scale * tf.random.stateless_normal([size, size, inner, outer], seed=(len(kernels), 7))
            kernels.append(tf.Variable(value))
    slots = [tf.Variable(tf.zeros_like(k)) for k in kernels]

    def normalised(h: Any, kernel: Any) -> Any:
        h = tf.nn.conv2d(h, kernel, 1, "SAME")
        mean, variance = tf.nn.moments(h, [0, 1, 2])
        return tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for i in range(0, len(kernels), 3):
                inner = tf.nn.relu(normalised(h, kernels[i]))
                inner = tf.nn.relu(normalised(inner, kernels[i + 1]))
                h = tf.nn.relu(h + normalised(inner, kernels[i + 2]))
            loss = tf.reduce_mean(h * h)
        for kernel, slot, gradient in zip(kernels, slots, tape.gradient(loss, kernels), strict=True):
            slot.assign(0.9 * slot + gradient)
            kernel.assign_sub(1e-3 * slot)
        return loss

    return step, (tf.zeros([BATCH, SIZE, SIZE, 4 * WIDTH]),)


def staged(
    concrete: Any,
    arguments: tuple[Any, ...],
    limit: str,
    clock: Callable[[], float] = time.perf_counter,
    added: tuple[str, ...] = (),
) -> tuple[dict[str, float], int]:
    """Seconds by `clock` per stage of one planning and rewriting, and the graph's nodes.

    Args:
        limit: a share of the unoptimised peak.
        added: tactics besides the default ones.
    """
    from tfswap.compiler.compiler import Optimizer
    from tfswap.compiler.grappler import as_planned
    from tfswap.compiler.options import Options
    from tfswap.device import arena, machine
    from tfswap.exporters.function import export_function
    from tfswap.importers.function import import_function
    from tfswap.ir.permits import TACTICS

    seconds: dict[str, float] = {}
    device, model = machine.current_device()

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        started = clock()
        result = work()
        seconds[stage] = clock() - started
        return result

    traced = timed("import", lambda: import_function(concrete, arguments))
    graph = timed(GRAPPLER, lambda: as_planned(traced, concrete, model))
    optimizer = timed(
        "facts and order", lambda: Optimizer(graph, model, Options((*TACTICS, *added)), snapshot=arena.snapshot(device))
    )
    timed(REPORT, lambda: optimizer.baseline)  # of which the limit is a share
    plan = timed("plan", lambda: optimizer.plan(limit))
    rewritten = timed("rewrite", lambda: optimizer.rewrite(plan))
    timed("export", lambda: export_function(rewritten, concrete))
    return seconds, len(concrete.graph.get_operations())


def measure(name: str, made: tuple[Any, tuple[Any, ...]], args: argparse.Namespace) -> dict[str, Any]:
    step, arguments = made
    started = time.perf_counter()
    concrete = step.get_concrete_function(*arguments)
    tracing_s = time.perf_counter() - started
    runs = []
    for _ in range(args.repeats):
        gc.collect()
        runs.append(staged(concrete, arguments, args.limit))
    best, nodes = min(runs, key=lambda run: sum(run[0][stage] for stage in STAGES))
    total_s = sum(best[stage] for stage in STAGES)
    stages = "".join(f"{best[stage]:>17.2f}" for stage in STAGES)
    others = "".join(f"{best[stage]:>13.2f}" for stage in (GRAPPLER, REPORT))
    print(f"{name:<16}{nodes:>8}{tracing_s:>10.2f}{stages}{total_s:>10.2f}{others}", flush=True)
    return {"name": name, "nodes": nodes, "tracing_s": tracing_s, "stages_s": best, "total_s": total_s}


def compare_slices(args: argparse.Namespace) -> None:
    """Print the CPU seconds of planning ResNet-50 without and with the tactic "slice", the least of each."""
    from tfswap.ir.permits import SLICE

    step, arguments = resnet50()
    concrete = step.get_concrete_function(*arguments)
    least = {(): math.inf, (SLICE,): math.inf}
    for _ in range(args.repeats):
        for added in least:
            gc.collect()
            stages, _ = staged(concrete, arguments, args.limit, time.process_time, added)
            least[added] = min(least[added], sum(stages[stage] for stage in STAGES))
    without, sliced = least.values()
    print(f"CPU seconds: {without:.2f} without slices, {sliced:.2f} with them: {sliced / without:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="*", default=[8, 32, 128], help="depths of the bottleneck ResNets")
    parser.add_argument("--limit", default="60%", help="share of the planned unoptimised peak")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--slices", action="store_true", help='compare the tactic "slice" with the default ones')
    parser.add_argument("--profile", type=int, metavar="N", help="print the N functions that take longest")
    args = parser.parse_args()

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    import tfswap.ops  # built and loaded before the clock starts

    assert tfswap.ops.status().loaded
    if args.slices:
        compare_slices(args)
        return
    print(
        f"{'graph':<16}{'nodes':>8}{'tracing':>10}"
        + "".join(f"{s:>17}" for s in STAGES)
        + f"{'total, s':>10}{GRAPPLER:>13}{REPORT:>13}"
    )
    rows = [measure("ResNet-50", resnet50(), args)]
    deep = [measure(f"{blocks} blocks", deep_resnet(blocks), args) for blocks in sorted(args.blocks)]
    rows += deep
    if len(deep) > 1:
        first, last = deep[0], deep[-1]
        slope = math.log(last["total_s"] / first["total_s"]) / math.log(last["nodes"] / first["nodes"])
        print(f"slope from {first['nodes']} to {last['nodes']} nodes: {slope:.2f} (1.0 is linear)")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.profile:
        step, arguments = deep_resnet(max(args.blocks)) if args.blocks else resnet50()
        concrete = step.get_concrete_function(*arguments)
        profile = cProfile.Profile()
        profile.runcall(staged, concrete, arguments, args.limit)
        pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)


if __name__ == "__main__":
    main()
