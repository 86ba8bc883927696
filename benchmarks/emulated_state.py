"""Variables at home in host memory on an emulated GPU (docs/emulated_gpu.md): stalls, and a table by hand on the CPU.

    export PYTHONPATH=tests
    python benchmarks/emulated_state.py stalls           # links of 2 and 4 GB/s; 25 minutes
    python benchmarks/emulated_state.py stalls 2 30      # a link of 2 GB/s in each direction, and kernels of 30 us
    python benchmarks/emulated_state.py table            # of 1M x 64; ten minutes
    python benchmarks/emulated_state.py table 8388608    # 8M x 64; takes 18 GiB of memory

stalls: layers with Adam under a limit below their state. Times of kernels are such that copies take from half of the
kernels' time to twice as long. The device and its link are slowed until a kernel takes LONG_US: what the host does,
whose kernels run on the CPU, is little next to that, also on a busy machine. The shortest of some steps.

The least time is that of `least_step.py`: of the kernels in the plan's order, with the copies that the variables at
home need, wherever they are placed; and of any plan in this order, whose variables may stay on the device where the
limit has room for them in addition to feature maps. The kernels' time is that of the plan's kernels, each once, by the
profile: a kernel that fills a constant is one of them, which TensorFlow alone computes ahead. The stall is the time
above the kernels', over the least possible one, or "none must be" where that is below LITTLE of the step.

table: an embedding table with Keras' Adam, which updates all rows, in a limit of TABLE_LIMIT, next to the same step
placed on the CPU by `tf.device` with all variables, without tfswap. Neither kernels nor the link take more time than
the host needs for them. Each is a process of its own; the median of the steps after the first.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import hashlib
import itertools
import json
import math
import statistics
import time
from typing import Any

import emulated
from least_step import needs_of_planned
from state import model_of, step_of
from state_tiers import parts_of

KERNELS_US = {2: (60, 30, 15), 4: (30, 15, 7)}
"""By GB/s of the link."""
LONG_US, LATENCY_US = 10_000.0, 10.0
LAYERS, WIDTH, ROWS = 12, 256, 64
NBYTES = 4 * WIDTH * WIDTH
"""Of a weight, or a slot."""
SHARES = (0.25, 0.35, 0.5)
"""Of the state's bytes: limits."""
LITTLE = 0.01
"""Of a step: measured times differ by as much."""
STEPS = 3
ROWS_OF_TABLE, TABLE_WIDTH, TABLE_LIMIT, EXAMPLES = 1 << 20, 64, 63 << 20, 64
BY_HAND, AT_HOME = "by hand", "at home"


class Net:
    """Layers with Adam, whose state is weights, then slots."""

    def __init__(self) -> None:
        import tensorflow as tf

        draws = [tf.random.stateless_normal([WIDTH, WIDTH], (n, 1)) * 0.05 for n in range(LAYERS)]
        self.weights = [tf.Variable(value, name=f"weight{n}") for n, value in enumerate(draws)]
        self.slots = [[tf.Variable(tf.zeros_like(value), name=name) for value in draws] for name in ("mean", "square")]

    def step(self, x: Any) -> Any:
        """A training step."""
        import tensorflow as tf

        with tf.GradientTape() as tape:
            h = x
            for weight in self.weights:
                h = tf.nn.relu(h @ weight)
            loss = tf.reduce_mean(h * h)
        gradients = tape.gradient(loss, self.weights)
        for weight, mean, square, gradient in zip(self.weights, *self.slots, gradients, strict=True):
            mean.assign_add((gradient - mean) * 0.1)
            square.assign_add((gradient * gradient - square) * 0.001)
            weight.assign_sub(1e-3 * mean / (tf.sqrt(square) + 1e-7))
        return loss

    @property
    def state(self) -> list[Any]:
        return [*self.weights, *self.slots[0], *self.slots[1]]


def stall(gbytes: float, kernel_us: float, gpus: Any) -> list[dict[str, Any]]:
    """By limit: bytes, and seconds of the step and of its kernels, as on the device that is not slowed."""
    import tensorflow as tf

    import tfswap

    slowed, link = LONG_US / kernel_us, gbytes * 1e9
    gpus.set_kernel_us(LONG_US)
    x = tf.random.stateless_normal([ROWS, WIDTH], (1, 2))

    def shortest(call: Any) -> float:
        times = []
        for _ in range(STEPS):
            began = time.monotonic()
            call(x)
            tf.test.experimental.sync_devices()  # the loss is not read: its copy is none of the step's
            times.append(time.monotonic() - began)
        return min(times) / slowed

    plain = Net()
    function = tf.function(plain.step)
    state_bytes = sum(variable.numpy().nbytes for variable in plain.state)
    gpus.set_links(link / slowed, link / slowed, LATENCY_US * slowed)
    profile = tfswap.profile(function, x, steps=2)
    gpus.set_links(0.0, 0.0, 0.0)
    del plain, function
    found: list[dict[str, Any]] = []
    for share in SHARES:
        gc.collect()
        with tfswap.scope():
            net = Net()
        planned = tfswap.optimize(tf.function(net.step), memory_limit=int(share * state_bytes), profile=profile)
        planned(x)
        gpus.set_links(link / slowed, link / slowed, LATENCY_US * slowed)
        tf.config.experimental.reset_memory_stats(emulated.DEVICE)
        step_s = shortest(planned)
        peak = tf.config.experimental.get_memory_info(emulated.DEVICE)["peak"]
        gpus.set_links(0.0, 0.0, 0.0)
        moved, plan, needs = planned.stats(), planned.plan(), needs_of_planned(planned)
        copy_s, kernels_s = functools.partial(seconds, gbytes), needs.once_s / slowed
        limit = plan.limit_bytes or 0
        found.append(
            {
                "limit": limit,
                "state": state_bytes,
                "planned": planned.report().planned_peak_bytes,
                "peak": peak,
                "in": moved.in_bytes,
                "out": moved.out_bytes,
                "home": planned.report().at_home_bytes,
                "step_s": step_s,
                "kernels_s": kernels_s,
                "predicted_s": plan.seconds / slowed,
                "least_s": needs.least_seconds(kernels_s, copy_s, limit),
                "any_s": needs.least_seconds(kernels_s, copy_s, limit, moves=True),
            }
        )
        del net, planned
    return found


def seconds(gbytes: float, nbytes: int) -> float:
    """The seconds that the link takes for a copy."""
    return nbytes / gbytes / 1e9 + LATENCY_US / 1e6


def show(gbytes: float, kernel_us: float) -> None:
    """Print a row for each limit."""
    for row in emulated.child("stall", str(gbytes), str(kernel_us), script=__file__):
        kernels_s = row["kernels_s"]
        stalls_s = (row["predicted_s"] - kernels_s, row["step_s"] - kernels_s)

        def over(least_s: float, stalls_s: tuple[float, float] = stalls_s, kernels_s: float = kernels_s) -> str:
            must_s = least_s - kernels_s
            if must_s <= LITTLE * least_s:
                return "none must be | none must be"
            return " | ".join(f"{stall_s / must_s:.2f}" for stall_s in stalls_s)

        sizes = f"{row['limit']:,} | {row['planned']:,} | {row['peak']:,} | {row['home'] / 2**20:.2f}"
        sizes += f" | {row['in'] / 2**20:.1f} | {row['out'] / 2**20:.1f}"
        seconds_of = ("any_s", "least_s", "predicted_s", "step_s")
        times = " | ".join(f"{row[name] / kernels_s:.3f}" for name in seconds_of)
        print(f"| {gbytes:g} | {kernel_us:g} | {sizes} | {times} | {over(row['least_s'])} |", flush=True)


def trained(rows: int, how: str) -> dict[str, Any]:
    """A few steps of a table: bytes on the device, seconds of a step, and a digest of losses and values."""
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import memory_optimizer_off

    tf.config.experimental.enable_op_determinism()
    by_hand = how == BY_HAND
    with tf.device("CPU:0") if by_hand else tfswap.scope(memory_limit=TABLE_LIMIT):
        tf.keras.utils.set_random_seed(1)
        model, x = model_of(0, rows, TABLE_WIDTH, EXAMPLES)
        optimizer = tf.keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
    function, y = step_of(model, optimizer), tf.zeros((EXAMPLES,), tf.int32)

    @tf.function
    def on_cpu(x: Any, y: Any) -> Any:
        with tf.device("CPU:0"):  # a look-up on the device would copy the whole table there
            return function.python_function(x, y)

    called = on_cpu if by_hand else tfswap.optimize(function, memory_limit=TABLE_LIMIT)
    digest, times, peaks, planned = hashlib.sha256(), [], [], []
    with memory_optimizer_off() if by_hand else contextlib.nullcontext():
        for _ in range(STEPS + 1):
            tf.config.experimental.reset_memory_stats(emulated.DEVICE)
            began = time.monotonic()
            digest.update(called(x, y).numpy().tobytes())
            times.append(time.monotonic() - began)
            peaks.append(tf.config.experimental.get_memory_info(emulated.DEVICE)["peak"])
            planned.append(0 if by_hand else called.report().planned_peak_bytes)
    variables = [*model.variables, *optimizer.variables]
    for part in itertools.chain.from_iterable(map(parts_of, variables)):
        digest.update(part.tobytes())
    found = {"state": sum(math.prod(v.shape) * 4 for v in variables), "planned": max(planned), "peak": max(peaks)}
    return {**found, "s": statistics.median(times[1:]), "digest": digest.hexdigest()}


def compare_table(rows: int) -> None:
    """Print a row of a table."""
    by_hand, ours = (emulated.child("table", str(rows), how, script=__file__) for how in (BY_HAND, AT_HOME))
    same = "identical" if by_hand["digest"] == ours["digest"] else "DIFFERENT"
    sizes = f"{ours['state'] / 2**20:,.0f} | {TABLE_LIMIT:,} | {ours['planned']:,} | {ours['peak']:,}"
    times = f"{by_hand['s']:.2f} | {ours['s']:.2f} | {ours['s'] / by_hand['s']:.2f}"
    print("| table | state, MiB | limit | planned | peak | step by hand, s | step, s | ratio | values |")
    print("| --- |" + " --: |" * 7 + " --- |")
    print(f"| {rows:,} x {TABLE_WIDTH} | {sizes} | {times} | {same} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("stalls", "table"))
    parser.add_argument(
        "given", nargs="*", type=float, help="GB/s of the link and us of a kernel, or rows of the table"
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        import emulated_gpu

        part, *given = args.child
        gpus = emulated_gpu.attach()
        print(
            json.dumps(
                stall(float(given[0]), float(given[1]), gpus) if part == "stall" else trained(int(given[0]), given[1])
            )
        )
    elif args.part == "table":
        compare_table(int(args.given[0]) if args.given else ROWS_OF_TABLE)
    elif args.part == "stalls":
        print("| link, GB/s | kernel, us | limit | planned | peak | MiB at home | MiB in | MiB out ", end="")
        print("| least of any plan | least | predicted | measured | predicted stall | measured stall |")
        print("|" + " --: |" * 14)
        cases = [(g, us) for g, each in KERNELS_US.items() for us in each]
        for gbytes, kernel_us in [(args.given[0], args.given[1])] if args.given else cases:
            show(gbytes, kernel_us)
    else:
        parser.error("name a part: stalls or table")


if __name__ == "__main__":
    main()
