"""Steps on several emulated GPUs (docs/emulated_gpu.md): each device's peak against its limit and plan, values, time.

    export PYTHONPATH=tests:tests/programs
    python benchmarks/emulated_devices.py            # two and four devices, and 1,000 steps; five minutes
    python benchmarks/emulated_devices.py adam       # one kind
    python benchmarks/emulated_devices.py --steps 0  # without the 1,000 steps
    python benchmarks/emulated_devices.py nets       # the acceptance nets on two and four devices; half an hour
    python benchmarks/emulated_devices.py copies     # times of steps whose copies between devices dominate; a minute
    python benchmarks/emulated_devices.py lent       # times with swaps to the host, and to another device; four minutes
    python benchmarks/emulated_devices.py planning   # of one replica and of four, in CPU seconds; two minutes

The kinds are those of tests/programs/several_gpu_kinds.py and gathering_programs.py, replicas, and a pipeline that is
placed by hand; nets are Keras models in small sizes, with a limit of its own for each device. Values are compared with
TensorFlow's without Grappler's memory optimizer, bit by bit, those of sparse_gradients without Grappler. Times are
medians of steps in turns, with and without tfswap, with kernels of a millisecond and links of 25 GB/s. Planning is the
first call's time, less that of the step without tfswap. The 1,000 steps have delays drawn at random. Each row is a
process of its own. Exit status 1 where a limit is passed, a plan is not exact, values differ, something races, or a
step takes 15% more or less than predicted, of the shortest of some steps with slow links.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import emulated

KERNEL_US, LINK = 1000.0, 25e9
SLOW_LINK, SLOW_LATENCY_US = 2e6, 500.0
"""Of `copies`: these dominate the time."""
SWAP_LINK, PEER_LINK = 10e6, 120e6
"""Of `lent`: their ratio is that of PCIe 4 and NVLink 3."""
ROUNDS, TURNS = 15, 5
FOUR = ("mirrored", "pipeline")
"""Kinds that also run on four devices."""


SHARES = ("60%", "55%", "50%", "60%")
"""Of each device, of its own unoptimised peak."""


def kinds() -> dict[str, tuple[Any, Any]]:
    import gathering_programs
    import several_gpu_kinds
    import several_gpus

    more = {"mirrored": (several_gpus.mirrored, "60%"), "pipeline": (several_gpus.pipeline, "70%")}
    limits = dict(zip(several_gpus.gpus(), SHARES, strict=False))
    nets = {name: (functools.partial(replicated_net, name), limits) for name in MODELS}
    gathering = {
        name: (functools.partial(first_call_of, make), own) for name, (make, own) in gathering_programs.PROGRAMS.items()
    }
    return {**more, **several_gpu_kinds.KINDS, **gathering, **nets}


def first_call_of(make: Any) -> Any:
    """The variables and the step of a program, and the arguments of its first call."""
    program = make()
    return program.variables, program.step, program.calls[0]


def replicated_net(name: str) -> Any:
    """A Keras model on all devices, with momentum."""
    import keras
    import numpy as np
    import several_gpu_kinds
    from gpu_compare import draws

    keras.utils.set_random_seed(0)
    make, shape = MODELS[name]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model: Any = None

    def make_variables() -> Any:
        nonlocal model
        model = make(keras, shape[1:])
        return model.trainable_variables

    return several_gpu_kinds.replicated(
        lambda _, x, y: loss(y, model(x, training=True)) / shape[0],
        make_variables,
        lambda i: several_gpu_kinds.on(i, draws(*shape, seed=i)),
        lambda i: several_gpu_kinds.on(i, np.arange(shape[0]) % 10),
        make_optimizer=lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    )


def mlp(keras: Any, shape: tuple[int, ...]) -> Any:
    hidden = [keras.layers.Dense(64, "relu") for _ in range(24)]
    return keras.Sequential([keras.Input(shape), *hidden, keras.layers.Dense(10)])


def transformer(keras: Any, shape: tuple[int, ...]) -> Any:
    x = inputs = keras.Input(shape)
    for _ in range(4):
        x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(4, 16)(x, x))
        h = keras.layers.Dense(256, "relu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(64)(h))
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x)))


def resnet50(keras: Any, shape: tuple[int, ...]) -> Any:
    body = keras.applications.ResNet50(weights=None, input_shape=shape, include_top=False, pooling="avg")
    return keras.Model(body.input, keras.layers.Dense(10)(body.output))


MODELS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "mlp": (mlp, (512, 64)),
    "transformer": (transformer, (8, 64, 64)),
    "resnet50": (resnet50, (32, 96, 96, 3)),
}
"""The acceptance nets, each with the shape of a replica's batch."""


def compare(kind: str, gpus: Any) -> dict[str, Any]:
    """Peaks and values of one kind on all devices of this process."""
    import several_gpus
    import tensorflow as tf

    tf.config.experimental.enable_op_determinism()
    make, limit = kinds()[kind]
    return {**several_gpus.compare(make, limit), "races": gpus.report().splitlines()}


def times(kind: str, gpus: Any) -> dict[str, float]:
    """The step's time over that without tfswap, and the seconds of planning."""
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import memory_optimizer_off

    gpus.set_check(False)
    make, limit = kinds()[kind]
    _, python_function, inputs = make()
    functions = [tf.function(python_function) for _ in range(2)]
    for function in functions:
        function.get_concrete_function(*inputs)  # the trace is no part of the first call's time
    steps = [functions[0], tfswap.optimize(functions[1], memory_limit=limit)]
    first_s = []
    for step in steps:
        with memory_optimizer_off():
            began = time.monotonic()
            step(*inputs).numpy()
        first_s.append(time.monotonic() - began)
    gpus.set_kernel_us(KERNEL_US)
    gpus.set_links(LINK, LINK, 10.0)
    found: list[list[float]] = [[], []]
    for _ in range(TURNS):
        for step, seconds in zip(steps, found, strict=True):
            step(*inputs).numpy()  # the other step has left another arena, for which this one may be planned again
            for _ in range(ROUNDS // TURNS):
                began = time.monotonic()
                step(*inputs).numpy()
                seconds.append(time.monotonic() - began)
    plain_s, planned_s = map(statistics.median, found)
    return {"ratio": planned_s / plain_s, "planning_s": first_s[1] - first_s[0]}


def described(link: float, peer: float = 0.0, latency_s: float = 0.0) -> Any:
    """A profile of devices whose kernels take KERNEL_US.

    Args:
        link, peer: bytes per second between host and device, and between two devices.
    """
    from tfswap.kernels.hardware import Rates
    from tfswap.kernels.profile import Profile

    kernel_s, all_fast = KERNEL_US * 1e-6, (1e18,) * 3
    times = {"launch_s": kernel_s, "copy_latency_s": latency_s, "peer_bytes_per_s": peer}
    return Profile("gpu", "emulated", "", Rates(*all_fast, link, link, cudnn=True, **times), None, ())


def copied(kind: str, gpus: Any) -> dict[str, float]:
    """The seconds of a step with slow links, as predicted and as measured, and the time of its copies."""
    import several_gpus
    import tensorflow as tf

    import tfswap

    reductions = {"hierarchy": tf.distribute.HierarchicalCopyAllReduce, "one": tf.distribute.ReductionToOneDevice}
    make = several_gpus.pipeline if kind == "pipeline" else lambda: several_gpus.mirrored(reductions[kind]())
    gpus.set_check(False)
    gpus.set_kernel_us(KERNEL_US)
    gpus.set_links(SLOW_LINK, SLOW_LINK, SLOW_LATENCY_US)
    profile = described(SLOW_LINK, latency_s=SLOW_LATENCY_US * 1e-6)
    _, python_function, inputs = make()
    step = tfswap.optimize(tf.function(python_function), memory_limit="70%", profile=profile)
    step(*inputs).numpy()
    before, measured = gpus.counts(), []
    for _ in range(5):
        began = time.monotonic()
        step(*inputs).numpy()
        measured.append(time.monotonic() - began)
    after = gpus.counts()
    copied_bytes = after.bytes_in + after.bytes_out - before.bytes_in - before.bytes_out
    predicted = max(step.plan(device).seconds for device in several_gpus.gpus())
    return {"predicted": predicted, "measured": min(measured), "copies": copied_bytes / 5 / SLOW_LINK}


def copies() -> bool:
    """Prints a row for each way to cross; returns whether times are within 15% of the predicted."""
    print("| step | copies, s | predicted, s | measured, s |\n|---|--:|--:|--:|")
    good = True
    for kind in ("pipeline", "hierarchy", "one"):
        found = emulated.child("copied", kind, script=__file__, count=2)
        good &= abs(found["predicted"] / found["measured"] - 1) <= 0.15
        print(f"| {kind} | {found['copies']:.2f} | {found['predicted']:.3f} | {found['measured']:.3f} |", flush=True)
    return good


def lending(kind: str, peer: float, gpus: Any) -> dict[str, Any]:
    """A step whose first device has little room: seconds, and bytes in another device's memory.

    Args:
        peer: the rate between devices that plans know of; 0 for none.
    """
    import several_gpus
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import memory_optimizer_off

    tf.config.experimental.enable_op_determinism()
    make, limits = kinds()[kind][0], {"GPU:0": "55%", "GPU:1": "150%"}
    with memory_optimizer_off():
        expected = several_gpus.train(make(), lambda function: function)[0]
    gc.collect()  # the first step's variables
    made, profile = make(), described(SWAP_LINK, peer)
    found, peaks, step = several_gpus.train(
        made, lambda f: tfswap.optimize(f, memory_limit=limits, profile=profile, tactics=("swap", "recompute"))
    )
    plans = {device: step.plan(device) for device in several_gpus.gpus()}
    exact = all(plan.planned_peak_bytes == peaks[device] <= plan.limit_bytes for device, plan in plans.items())
    races = gpus.report().splitlines()
    gpus.set_check(False)
    gpus.set_kernel_us(KERNEL_US)
    gpus.set_links(SWAP_LINK, SWAP_LINK)
    measured = []
    for _ in range(5):
        began = time.monotonic()
        step(*made[2]).numpy()
        measured.append(time.monotonic() - began)
    predicted = max(plan.seconds for plan in plans.values())
    good = exact and found == expected and not races
    return {"good": good, "predicted": predicted, "measured": min(measured), "lent": plans["GPU:0"].lent_bytes}


def lent() -> bool:
    """Prints a row for each kind; returns whether limits, peaks and values are as promised."""
    print("| step | to the host: predicted, measured, s | to the other device: predicted, measured, s | there, bytes |")
    print("|---|--:|--:|--:|")
    good = True
    for kind in ("mirrored", "mlp", "transformer"):
        found = [
            emulated.child(
                "lending", kind, str(peer), script=__file__, count=2, EMULATED_GPU_BETWEEN_BANDWIDTH=str(PEER_LINK)
            )
            for peer in (0.0, PEER_LINK)
        ]
        good &= all(each["good"] for each in found)
        times = " | ".join(f"{each['predicted']:.3f}, {each['measured']:.3f}" for each in found)
        print(f"| {kind} | {times} | {found[1]['lent']:,} |", flush=True)
    return good


def planned(limit: str, gpus: Any) -> dict[str, float]:
    """The CPU seconds of the first call of a transformer's replicas: of facts, plans and simulations, and in all."""
    import contextlib
    from unittest import mock

    import tensorflow as tf

    import tfswap
    from tfswap.compiler.compiler import Optimizer
    from tfswap.runtime.limit import StepLimit
    from tfswap.runtime.planning_loop import PartPlanning, PlanningLoop

    gpus.set_check(False)
    _, python_function, inputs = replicated_net("transformer")
    function = tf.function(python_function)
    function.get_concrete_function(*inputs)
    seconds = {"own": 0.0, "all": 0.0}

    def timed(run: Callable[..., Any], name: str = "own") -> Callable[..., Any]:
        @functools.wraps(run)
        def measured(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return run(*args, **options)
            finally:
                seconds[name] += time.thread_time() - began

        return measured

    own = (Optimizer, "__init__"), (StepLimit, "compute"), (PartPlanning, "choose"), (PartPlanning, "judge")
    with contextlib.ExitStack() as stack:
        for owner, name in (*own, (PlanningLoop, "_timed")):
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        step = tfswap.optimize(function, memory_limit=limit)
        timed(step, "all")(*inputs)
    return seconds


def planning() -> bool:
    """Prints the CPU seconds for one replica and for four, each the least of three processes."""
    print("| limit of each | facts, plans and simulations: one, four | first call: one, four |\n|---|--:|--:|")
    for limit in ("7.5MiB", "60%"):
        ran: dict[int, list[dict[str, float]]] = {1: [], 4: []}
        for _ in range(3):
            for count, each in ran.items():
                each.append(emulated.child("planned", limit, script=__file__, count=count, TFSWAP_PLAN_CACHE="off"))
        (one, first), (four, first_of_four) = (
            [min(each[name] for each in found) for name in ("own", "all")] for found in ran.values()
        )
        calls = f"{first:.1f}, {first_of_four:.1f}"
        print(f"| {limit} | {one:.2f}, {four:.2f}: {four / one:.2f} | {calls} |", flush=True)
    return True


def endure(kind: str, steps: float, gpus: Any) -> dict[str, Any]:
    """Many steps with random delays: by device, how often each difference from the planned peak was measured."""
    import several_gpus
    import tensorflow as tf

    import tfswap

    gpus.set_kernel_us(30.0)
    make, limit = kinds()[kind]
    _, python_function, inputs = make()
    step = tfswap.optimize(tf.function(python_function), memory_limit=limit)
    differences: dict[str, dict[int, int]] = {device: {} for device in several_gpus.gpus()}
    for _ in range(int(steps)):
        _, peaks = several_gpus.peaks_of(lambda: step(*inputs).numpy())
        for device, peak in peaks.items():
            difference = peak - step.report(device).planned_peak_bytes
            differences[device][difference] = differences[device].get(difference, 0) + 1
    return {"differences": differences, "races": gpus.report().splitlines()}


def table(chosen: list[str]) -> bool:
    """Prints a row for each kind and number of devices; returns whether all is as promised."""
    print("| step | GPUs | limit, planned, peak of each | values | races | time | planning, s |")
    print("|---|--:|---|---|--:|--:|--:|")
    good = True
    for kind in chosen:
        for count in (2, 4) if kind in (*FOUR, *MODELS) else (2,):
            found = emulated.child("compare", kind, script=__file__, count=count)
            took = emulated.child("times", kind, script=__file__, count=count)
            exact = all(planned == peak for planned, peak in found["planned"].values())
            kept = all(peak <= found["limits"][device] for device, (_, peak) in found["planned"].items())
            good &= exact and kept and found["same"] and not found["races"]
            sizes = [(found["limits"][device], *found["planned"][device]) for device in found["limits"]]
            shown = "; ".join(", ".join(f"{size:,}" for size in each) for each in dict.fromkeys(sizes))
            values = "identical" if found["same"] else "other"
            seconds = f"{took['ratio']:.2f} | {took['planning_s']:.1f}"
            print(f"| {kind} | {count} | {shown} | {values} | {len(found['races'])} | {seconds} |", flush=True)
    return good


def endurance(steps: int) -> bool:
    found = emulated.child("endure", "mirrored", str(steps), script=__file__, count=4, EMULATED_GPU_JITTER="11")
    print(f"{steps} steps on four devices, by difference from the planned peak: {found['differences']}")
    return not found["races"] and all(set(each) == {"0"} for each in found["differences"].values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--steps", type=int, default=1000, help="of endurance")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        import emulated_gpu

        gpus = emulated_gpu.attach()
        part, kind, *given = arguments.child
        runs = compare, times, copied, lending, endure, planned
        run: dict[str, Callable[..., Any]] = {each.__name__: each for each in runs}
        print(json.dumps(run[part](kind, *map(float, given), gpus)))
        return 0
    alone = {"copies": copies, "lent": lent, "planning": planning}
    if len(arguments.kinds) == 1 and arguments.kinds[0] in alone:
        return 0 if alone[arguments.kinds[0]]() else 1
    nets, every = arguments.kinds == ["nets"], kinds()
    if not nets and (unknown := [kind for kind in arguments.kinds if kind not in every]):
        parser.error(f"there is no kind {unknown[0]!r}: choose from {', '.join((*every, 'nets', *alone))}")
    good = table([*MODELS] if nets else arguments.kinds or [kind for kind in every if kind not in MODELS])
    good &= nets or not arguments.steps or endurance(arguments.steps)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
