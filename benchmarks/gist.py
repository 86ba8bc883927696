"""Gist's own measure on its kind of network: bytes of feature maps, with encodings as the only tactic.

    python benchmarks/gist.py                         # all networks; half an hour on two cores
    python benchmarks/gist.py alexnet nin --steps 9 --json gist.json

AlexNet, NiN, Overfeat, VGG16 and Inception (GoogLeNet) on ImageNet-shaped images, with ReLU and max pooling as their
papers have them and without local response normalisation. Each runs unoptimised, in an order alone, with lossless
encodings and with "fp8" besides, in processes of their own on TensorFlow's BFC allocator, under the smallest limit that
these tactics reach. Encodings are all taken that gain something: a plan has them where its limit needs it, and where
weights and their gradients are most of a step, an order alone comes as low. With "all", the planner chooses among every
tactic with the same bits, kernels in slices and variables at home on the host among them, under a limit of the
unoptimised peak over SMALLER.

Feature maps are what the forward pass makes and the backward pass reads, encodings among them: their bytes follow from
the graph that runs. Peaks are the allocator's own. Times are medians, in clock and in CPU time, over those of the
unoptimised step; the latter hardly depends on what else the machine does.

Jain et al., *Gist* (ISCA 2018), report 1.8 times smaller footprints on average and 2 times at best, at 4% more time on
a GPU, with lossless and lossy encodings together, and up to 4.1 times with further software and dynamic allocation,
which TensorFlow's allocator has.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

MIB = 2**20
ARENA_MIB = 14000
CLOCKS = "clock", "cpu"
MODES: dict[str, dict[str, Any]] = {
    "unoptimised": {},
    "order": {"tactics": ()},
    "lossless": {"tactics": ("encode",)},
    "fp8": {"tactics": ("encode",), "precision": "fp8"},
    "all": {"tactics": ("swap", "recompute", "encode", "state", "slice")},
}
SMALLER = 4.1
"""The share of the unoptimised peak that the limit of "all" is one of: Gist's best. The floor, where that is higher."""


def conv(h: Any, filters: int, size: int, stride: int = 1, padding: str = "same") -> Any:
    import keras

    return keras.layers.Conv2D(filters, size, stride, padding, activation="relu")(h)


def pool(h: Any, size: int = 3, stride: int = 2, padding: str = "valid") -> Any:
    import keras

    return keras.layers.MaxPooling2D(size, stride, padding)(h)


def classified(h: Any, *dense: int) -> Any:
    import keras

    if dense:
        h = keras.layers.Flatten()(h)
    for width in dense:
        h = keras.layers.Dropout(0.5)(keras.layers.Dense(width, activation="relu")(h))
    return keras.layers.Dense(1000)(h)


def alexnet(h: Any) -> Any:
    h = pool(conv(h, 96, 11, 4, "valid"))
    h = pool(conv(h, 256, 5))
    h = conv(conv(h, 384, 3), 384, 3)
    return classified(pool(conv(h, 256, 3)), 4096, 4096)


def nin(h: Any) -> Any:
    """Network in network, Lin et al. 2014."""
    import keras

    h = pool(conv(conv(conv(h, 96, 11, 4, "valid"), 96, 1), 96, 1))
    h = pool(conv(conv(conv(h, 256, 5), 256, 1), 256, 1))
    h = pool(conv(conv(conv(h, 384, 3), 384, 1), 384, 1))
    h = keras.layers.Dropout(0.5)(h)
    return keras.layers.GlobalAveragePooling2D()(conv(conv(conv(h, 1024, 3), 1024, 1), 1000, 1))


def overfeat(h: Any) -> Any:
    """The fast model of Sermanet et al. 2014."""
    h = pool(conv(h, 96, 11, 4, "valid"), 2)
    h = pool(conv(h, 256, 5, padding="valid"), 2)
    h = conv(conv(h, 512, 3), 1024, 3)
    return classified(pool(conv(h, 1024, 3), 2), 3072, 4096)


def vgg16(h: Any) -> Any:
    for count, filters in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            h = conv(h, filters, 3)
        h = pool(h, 2)
    return classified(h, 4096, 4096)


def inception(h: Any) -> Any:
    """GoogLeNet, Szegedy et al. 2015, without its auxiliary classifiers."""
    import keras

    def module(h: Any, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int) -> Any:
        branches = [conv(h, one, 1), conv(conv(h, three[0], 1), three[1], 3), conv(conv(h, five[0], 1), five[1], 5)]
        return keras.layers.Concatenate()([*branches, conv(pool(h, 3, 1, "same"), pooled, 1)])

    h = pool(conv(h, 64, 7, 2), padding="same")
    h = pool(conv(conv(h, 64, 1), 192, 3), padding="same")
    h = module(h, 64, (96, 128), (16, 32), 32)
    h = pool(module(h, 128, (128, 192), (32, 96), 64), padding="same")
    h = module(h, 192, (96, 208), (16, 48), 64)
    h = module(h, 160, (112, 224), (24, 64), 64)
    h = module(h, 128, (128, 256), (24, 64), 64)
    h = module(h, 112, (144, 288), (32, 64), 64)
    h = pool(module(h, 256, (160, 320), (32, 128), 128), padding="same")
    h = module(h, 256, (160, 320), (32, 128), 128)
    h = module(h, 384, (192, 384), (48, 128), 128)
    return classified(keras.layers.GlobalAveragePooling2D()(h))


NETWORKS: dict[str, tuple[Callable[[Any], Any], int, int]] = {
    "alexnet": (alexnet, 227, 32),
    "nin": (nin, 227, 32),
    "overfeat": (overfeat, 231, 16),
    "vgg16": (vgg16, 224, 4),
    "inception": (inception, 224, 8),
}
"""By name: what makes it, the size of its images, and how many of them fit here."""


def training_step(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import keras
    import tensorflow as tf

    made, size, batch = NETWORKS[name]
    keras.utils.set_random_seed(0)
    images = keras.Input((size, size, 3))
    model = keras.Model(images, made(images))
    optimizer = keras.optimizers.SGD(1e-3)
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    x = tf.random.stateless_uniform([batch, size, size, 3], seed=(1, 2))
    return step, (x, tf.random.stateless_uniform([batch], (3, 4), 0, 1000, tf.int32))


def feature_map_bytes(graph: Any, flow: Any) -> int:
    """What kernels of the forward pass make and kernels of the backward pass read."""
    from tfswap.analysis.dataflow import PERSISTENT
    from tfswap.analysis.phases import backward_nodes
    from tfswap.ir import custom_ops

    backward = backward_nodes(graph).union(node for node in graph if node.op == custom_ops.DECODE_FLOATS)
    read = {v for i, node in enumerate(flow.nodes) if node in backward for v in flow.reads[i]}
    produced = {v: flow.values[v].producer for v in read}
    return sum(flow.values[v].nbytes for v, i in produced.items() if i != PERSISTENT and flow.nodes[i] not in backward)


def take_every_encoding() -> None:
    """Have the steps of this process planned with all encodings, whether their limits ask for that or not."""
    from tfswap.compiler.search import Search

    found = vars(Search)["rewritings"].func
    Search.rewritings = property(lambda search: found(search)[-1:])


def child(name: str, mode: str, steps: int, base_bytes: int) -> dict[str, Any]:
    import tensorflow as tf

    import tfswap
    from tfswap.compiler.compiler import Optimizer
    from tfswap.compiler.grappler import as_planned
    from tfswap.compiler.options import Options
    from tfswap.device.machine import current_device
    from tfswap.importers.function import import_function

    slab = tf.raw_ops.Empty(shape=[ARENA_MIB - 2, MIB], dtype=tf.uint8)
    del slab
    options = MODES[mode]
    with tfswap.scope() if "state" in options.get("tactics", ()) else nullcontext():
        step, inputs = training_step(name)
    function = tf.function(step)
    row: dict[str, Any] = {"network": name, "mode": mode}
    device = current_device()[1]
    concrete = function.get_concrete_function(*inputs)
    if mode == "unoptimised":
        graph = as_planned(import_function(concrete, inputs), concrete, device)
        plain = Optimizer(graph, device, Options(tactics=())).search.variants.plain
        row["map_bytes"] = feature_map_bytes(plain.graph, plain.flow)
    else:
        if options["tactics"] == ("encode",):
            take_every_encoding()
        try:
            tfswap.optimize(function, memory_limit=1, **options)(*inputs)
        except tfswap.InfeasibleMemoryLimit as error:
            floor = error.floor_bytes
        limit = max(int(1.01 * floor), int(base_bytes / SMALLER) if mode == "all" else 0)
        function = tfswap.optimize(tf.function(step), memory_limit=limit, **options)
    tf.config.experimental.reset_memory_stats("CPU:0")
    clock, cpu = [], []
    for _ in range(steps + 1):
        begun = time.perf_counter(), time.process_time()
        function(*inputs)
        clock.append(time.perf_counter() - begun[0])
        cpu.append(time.process_time() - begun[1])
    row["peak_bytes"] = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    row["clock_s"], row["cpu_s"] = statistics.median(clock[1:]), statistics.median(cpu[1:])
    row["took_s"] = list(zip(clock[1:], cpu[1:], strict=True))
    if mode != "unoptimised":
        plan = function.plan()
        row |= {"encoded": len(plan.encoded), "reduced": len(plan.reduced)}
        row["planned_bytes"] = function.report().planned_peak_bytes
        row |= {"slices": [(each.rows, each.of) for each in plan.sliced], "at_home": len(plan.at_home)}
        if mode == "all":
            return row  # there feature maps are in pieces
        graph = as_planned(import_function(concrete, inputs), concrete, device)
        rules = (("*", options["precision"]),) if "precision" in options else ()
        variant = Optimizer(graph, device, Options(tactics=options["tactics"], precision=rules)).variant_of(plan)
        row["map_bytes"] = feature_map_bytes(variant.graph, variant.flow)
    return row


def spawn(name: str, mode: str, steps: int, base_bytes: int) -> dict[str, Any]:
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ARENA_MIB),
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TFSWAP_PLAN_CACHE": "off",
    }
    command = [sys.executable, __file__, name, "--mode", mode, "--steps", str(steps), "--base", str(base_bytes)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def spreads(row: dict[str, Any], base: dict[str, Any]) -> dict[str, list[float]]:
    """Quartiles of a form's steps over the median of the unoptimised ones; forms run one after another."""
    from papers.harness.turns import quartiles

    return {
        f"{key}_spread": quartiles(took[n] / base[f"{key}_s"] for took in row["took_s"]) for n, key in enumerate(CLOCKS)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(NETWORKS)}; all by default")
    parser.add_argument("--steps", type=int, default=5, help="timed, of each form")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES)[:-1], help="the first is compared with"
    )
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--base", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        print(json.dumps(child(args.networks[0], args.mode, args.steps, args.base)))
        return
    unknown = [name for name in args.networks if name not in NETWORKS]
    if unknown:
        parser.error(f"no network is named {unknown[0]!r}; there are {', '.join(NETWORKS)}")
    columns = ("maps, MiB", "smaller", "peak, MiB", "smaller", "clock", "CPU")
    print(f"{'network':<11}{'form':<12}" + "".join(f"{column:>11}" for column in columns))
    rows = []
    for name in args.networks or NETWORKS:
        base: dict[str, Any] = {}
        for mode in args.modes:
            row = spawn(name, mode, args.steps, base.get("peak_bytes", 0))
            base = base or row
            rows.append(row)
            ratios = [base[k] / row.get(k, math.nan) for k in ("map_bytes", "peak_bytes")]
            row |= {"maps_smaller": ratios[0], "peak_smaller": ratios[1]}
            row |= {key: row[f"{key}_s"] / base[f"{key}_s"] for key in CLOCKS}
            row |= spreads(row, base)
            maps, peak = row.get("map_bytes", math.nan) / MIB, row["peak_bytes"] / MIB
            print(
                f"{name:<11}{mode:<12}{maps:>11.1f}{ratios[0]:>11.2f}{peak:>11.1f}{ratios[1]:>11.2f}{row['clock']:>11.2f}{row['cpu']:>11.2f}",
                flush=True,
            )
    for mode in args.modes:
        of = [row for row in rows if row["mode"] == mode]
        means = [statistics.mean(row[k] for row in of) for k in ("maps_smaller", "peak_smaller", "clock", "cpu")]
        print(f"{mode}: maps {means[0]:.2f} times smaller on average, peaks {means[1]:.2f}, ", end="")
        print(f"time {means[2]:.2f}, CPU {means[3]:.2f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
