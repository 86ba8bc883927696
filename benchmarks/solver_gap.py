"""How far the default solver is from the optimum, and published policies compared with both.

    python benchmarks/solver_gap.py                       # 30 random steps, and 5 real ones of few layers
    python benchmarks/solver_gap.py --random 100 --real --limit-s 60 --json gaps.json

Random steps that no rung of the default planner makes smaller are left out. Each step is given several limits of live
bytes, between the lowest that the default planner meets and the step's own live peak. "default" is the fastest of all
rungs of its ladders within the limit, judged by live bytes; "exact" is what planner/solvers/milp.py finds, whose bound
no choice in this order can pass; both times are simulated, as a share of the step's own. Two gaps: to the exact choice
(none where the default is faster: copies are placed by heuristics in both), and to the bound, which is the largest
that the gap to the optimum can be. Left out of both, and counted, are limits that the default meets by what the exact
solver does not cover (its docstring says what that is). Published policies stand with the lowest live bytes that they
come to, and their time. Costs are those of a CPU with two threads (copies share the cores with kernels) or, with
--gpu, of a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

from layered_steps import Layer, training_step

from tfswap.compiler.compiler import Optimizer
from tfswap.ir.graph import Graph
from tfswap.kernels.device import DeviceModel
from tfswap.plan.schedule import build_schedule
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.planner import Planner
from tfswap.planner.problem import Choice, Problem, Solver
from tfswap.planner.solvers import meng, milp, published
from tfswap.simulator.memory import simulate_memory
from tfswap.simulator.timing import simulate_time

DEVICES = {"cpu": DeviceModel(intra_op_threads=2), "gpu": DeviceModel("gpu")}
POLICIES: dict[str, Solver] = {
    "meng": meng.solve,
    "vdnn_all": published.vdnn_all,
    "vdnn_conv": published.vdnn_conv,
    "sqrt": published.sqrt,
    "superneurons": published.superneurons,
}
CLOSE = 1.05
"""Within this factor of the optimum's time a solver is as good as it."""


def random_step(seed: int) -> Graph:
    """A random step of 4 to 8 layers, as the tests have them; sizes so large that arithmetic matters."""
    draw = random.Random(seed)
    kinds = ("dense", "dense", "relu", "scale", "add")
    layers = [Layer(draw.choice(kinds), draw.randint(0, i)) for i in range(draw.randint(4, 8))]
    return training_step(layers, draw.choice((512, 2048, 8192)), draw.choice((128, 256, 512)))


def _weights(*shape: int) -> Any:
    import tensorflow as tf

    return tf.Variable(tf.zeros(shape))


def _vgg() -> tuple[Any, list[Any], Any]:
    import tensorflow as tf

    kernels = [_weights(3, 3, 3, 32), _weights(3, 3, 32, 32), _weights(3, 3, 32, 64), _weights(3, 3, 64, 64)]

    def net(h: Any) -> Any:
        for n, kernel in enumerate(kernels):
            h = tf.nn.relu(tf.nn.conv2d(h, kernel, 1, "SAME"))
            if n % 2:
                h = tf.nn.max_pool2d(h, 2, 2, "SAME")
        return h

    return net, kernels, tf.zeros([16, 64, 64, 3])


def _normalised(h: Any, scale: Any) -> Any:
    import tensorflow as tf

    return tf.compat.v1.nn.fused_batch_norm(h, scale, tf.zeros_like(scale), is_training=True)[0]


def _resnet() -> tuple[Any, list[Any], Any]:
    import tensorflow as tf

    kernels = [_weights(*shape) for _ in range(2) for shape in ((1, 1, 64, 16), (3, 3, 16, 16), (1, 1, 16, 64))]
    scales = [_weights(width) for _ in range(2) for width in (16, 16, 64)]

    def net(h: Any) -> Any:
        for first in (0, 3):
            inner = h
            for n in range(first, first + 3):
                inner = _normalised(tf.nn.conv2d(inner, kernels[n], 1, "SAME"), scales[n])
                inner = tf.nn.relu(inner if n < first + 2 else h + inner)
            h = inner
        return h

    return net, kernels + scales, tf.zeros([16, 32, 32, 64])


def _mobilenet() -> tuple[Any, list[Any], Any]:
    import tensorflow as tf

    kernels = [_weights(1, 1, 16, 96), _weights(3, 3, 96, 1), _weights(1, 1, 96, 16)]
    scales = [_weights(96), _weights(96), _weights(16)]

    def net(h: Any) -> Any:
        inner = tf.nn.relu6(_normalised(tf.nn.conv2d(h, kernels[0], 1, "SAME"), scales[0]))
        inner = tf.nn.depthwise_conv2d(inner, kernels[1], [1, 1, 1, 1], "SAME")
        inner = tf.nn.relu6(_normalised(inner, scales[1]))
        return h + _normalised(tf.nn.conv2d(inner, kernels[2], 1, "SAME"), scales[2])

    return net, kernels + scales, tf.zeros([16, 32, 32, 16])


def _transformer() -> tuple[Any, list[Any], Any]:
    import tensorflow as tf

    width, heads = 128, 4
    kernels = [_weights(width, width) for _ in range(4)] + [_weights(width, 4 * width), _weights(4 * width, width)]

    def split(h: Any) -> Any:
        return tf.transpose(tf.reshape(h, [16, 64, heads, width // heads]), [0, 2, 1, 3])

    def net(h: Any) -> Any:
        q, k, v = (split(tf.matmul(h, kernel)) for kernel in kernels[:3])
        mixed = tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)), v)
        h += tf.matmul(tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [1024, width]), kernels[3])
        return h + tf.matmul(tf.nn.relu(tf.matmul(h, kernels[4])), kernels[5])

    return net, kernels, tf.zeros([1024, width])


def _mlp() -> tuple[Any, list[Any], Any]:
    import tensorflow as tf

    kernels = [_weights(512, 512) for _ in range(6)]

    def net(h: Any) -> Any:
        for kernel in kernels:
            h = tf.nn.relu(tf.matmul(h, kernel))
        return h

    return net, kernels, tf.zeros([4096, 512])


def real_steps() -> Iterator[tuple[str, Graph]]:
    """Five kinds of net, cut down to few layers; shapes are those of training."""
    import tensorflow as tf

    from tfswap.importers.function import import_function

    for make in (_vgg, _resnet, _mobilenet, _transformer, _mlp):
        net, variables, x = make()

        @tf.function
        def step(x: Any, net: Any = net, variables: Any = variables) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(net(x))
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(1e-3 * gradient)
            return loss

        yield make.__name__.lstrip("_"), import_function(step.get_concrete_function(x), [x])


def seconds(problem: Problem, choice: Choice) -> float:
    return simulate_time(problem.flow, build_schedule(*choice), problem.cost_s, problem.rates).total_s


def live_bytes(problem: Problem, choice: Choice) -> int:
    return simulate_memory(problem.flow, build_schedule(*choice), live=True).peak_bytes


def rungs(planner: Planner) -> list[tuple[int, float]]:
    """(live bytes, seconds) of all rungs of all ladders, and of the step as it is."""
    problem = planner.problems[0]
    judged = [ladder.judged(n) for ladder in planner.ladders for n in range(len(ladder.targets))]
    choices = [Choice(problem.order, [])] + [found.draft.choice for found in judged if found is not None]
    return [(live_bytes(problem, choice), seconds(problem, choice)) for choice in choices]


def fastest(found: list[tuple[int, float]], limit: int) -> float:
    return min((total_s for nbytes, total_s in found if nbytes <= limit), default=math.inf)


def policy_rows(problem: Problem, found: list[tuple[int, float]], shares: list[float]) -> dict[str, Any]:
    """By policy: the lowest live bytes over the peak, and at each share of the peak the time over the step's own."""
    peak, own = problem.live_peak_bytes, float(problem.starts_s[-1])
    rows: dict[str, Any] = {}
    floor, times = min(nbytes for nbytes, _ in found), [fastest(found, int(peak * share)) for share in shares]
    rows["default"] = floor / peak, [total_s / own for total_s in times]
    for name, solve in POLICIES.items():
        choices = [c for n in range(1, 101) if (c := solve(problem, LiveTarget(peak * n // 100))) is not None]
        made = [(live_bytes(problem, choice), seconds(problem, choice)) for choice in choices]
        floor = min((nbytes for nbytes, _ in made), default=peak)
        rows[name] = floor / peak, [fastest(made, int(peak * share)) / own for share in shares]
    return rows


def measure(name: str, graph: Graph, args: argparse.Namespace) -> tuple[list[dict[str, Any]], Planner, Any]:
    optimizer = Optimizer(graph, DEVICES["gpu" if args.gpu else "cpu"])
    planner = optimizer.planner
    problem = planner.problems[0]
    found = rungs(planner)
    peak, floor, own = problem.live_peak_bytes, min(nbytes for nbytes, _ in found), float(problem.starts_s[-1])
    rows: list[dict[str, Any]] = []
    for n in range(args.limits):
        limit = floor + (peak - floor) * n // args.limits
        if limit >= peak:
            continue
        started = time.perf_counter()
        best = milp.optimise(problem, limit, args.limit_s)
        default_s = fastest(found, limit)
        row = {
            "name": name,
            "kernels": len(problem.order),
            "limit": limit / peak,
            "default": default_s / own,
            "exact": best.total_s / own,
            "bound": best.bound_s / own,
            "gap": default_s / min(best.total_s, default_s) - 1,
            "gap_to_bound": default_s / best.bound_s - 1,
            "proven": best.proven,
            "took_s": time.perf_counter() - started,
        }
        rows.append(row)
        print(
            f"{name:<14}{row['kernels']:>8}{row['limit']:>8.0%}{row['default']:>9.3f}{row['exact']:>9.3f}"
            f"{row['bound']:>9.3f}{row['gap']:>8.1%}{row['gap_to_bound']:>9.1%}"
            f"{remark(row)}",
            flush=True,
        )
    return rows, planner, found


def remark(row: dict[str, Any]) -> str:
    if not row["proven"]:
        return "   not proven optimal"
    return "   outside of the exact solver's model" if row["bound"] > row["default"] * (1 + milp.GAP_SHARE) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=30, help="how many random steps")
    parser.add_argument(
        "--real", action=argparse.BooleanOptionalAction, default=True, help="the cut-down real nets too"
    )
    parser.add_argument("--limits", type=int, default=4, help="limits per step")
    parser.add_argument("--limit-s", type=float, default=20.0, help="seconds that the exact solver gets for each")
    parser.add_argument("--gpu", action="store_true", help="a GPU's costs")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()

    print(f"{'step':<14}{'kernels':>8}{'limit':>8}{'default':>9}{'exact':>9}{'bound':>9}{'gap':>8}{'at most':>9}")
    rows: list[dict[str, Any]] = []
    seeds, steps = count(), 0
    while steps < args.random:
        seed = next(seeds)
        made = measure(f"random {seed}", random_step(seed), args)[0]
        steps += bool(made)
        rows += made
    policies: dict[str, Any] = {}
    shares = [0.9, 0.8, 0.7, 0.6]
    for name, graph in real_steps() if args.real else ():
        made, planner, found = measure(name, graph, args)
        rows += made
        policies[name] = policy_rows(planner.problems[0], found, shares)
    for title, column in (("to the exact choice", "gap"), ("to the bound", "gap_to_bound")):
        gaps = [row[column] for row in rows if row["bound"] <= row["default"] * (1 + milp.GAP_SHARE)]
        close = sum(gap < CLOSE - 1 for gap in gaps)
        print(
            f"gap {title}: median {statistics.median(gaps):.1%}, worst {max(gaps):.1%}, "
            f"below {CLOSE - 1:.0%} in {close} of {len(gaps)}"
        )
    print(f"not proven optimal: {sum('proven' in remark(row) for row in rows)} of {len(rows)}")
    print(f"outside of the exact solver's model: {sum('outside' in remark(row) for row in rows)} of {len(rows)}")
    if policies:
        print(f"\n{'policy':<14}{'step':<14}{'floor':>8}" + "".join(f"{f'time at {s:.0%}':>13}" for s in shares))
    for name, table in policies.items():
        for policy, (floor, times) in table.items():
            texts = ["-" if math.isinf(t) else f"{t:.3f}" for t in times]
            print(f"{policy:<14}{name:<14}{floor:>8.0%}" + "".join(f"{text:>13}" for text in texts))
    if args.json:
        args.json.write_text(json.dumps({"gaps": rows, "policies": policies}, indent=1) + "\n")


if __name__ == "__main__":
    main()
