"""What `tfswap run` costs a program that has room: for each step, and at its start.

    TF_CPU_ALLOCATOR_USE_BFC=1 TF_CPU_BFC_MEM_LIMIT_IN_MB=2048 python benchmarks/unmodified.py [ROUNDS]

Steps: the same function is traced twice in one process, as under `tfswap run` with a limit that leaves room. One trace
is left alone, the other is under the limit. A round calls each once, in an order that is drawn, and their times are
compared within rounds. Printed are medians of times, and of the rounds' ratios, for steps of several sizes.

Start: a program that trains one small step runs by `python` and by `tfswap run`, in turn. Printed are medians of the
seconds of each, and of the rounds' differences; CPU time too, which other programs on the machine hardly change. Of
these, `tfswap run` itself takes what "refused" does: it ends before the program begins.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LIMIT = "1GiB"
ROWS = (64, 1024, 8192)
STARTS = 5
PROGRAM = """
import tensorflow as tf
weight = tf.Variable(tf.ones([64, 64]))

@tf.function
def train_step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.tanh(x @ weight))
    weight.assign_sub(0.1 * tape.gradient(loss, weight))
    return loss

train_step(tf.ones([32, 64]))
"""


def make_step() -> Any:
    """A step that trains a few dense layers."""
    import tensorflow as tf

    weights = [tf.Variable(tf.random.stateless_normal([256, 256], seed=(i, 0)) * 0.1) for i in range(4)]

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.nn.relu(h @ weight)
            loss = tf.reduce_mean(h)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return step


def steps(rounds: int) -> None:
    """Times steps that have room, left alone and under the limit."""
    from tfswap.frontends.unmodified.functions import VERDICT
    from tfswap.frontends.unmodified.settings import RUN, STARTUP

    os.environ[RUN] = json.dumps({"memory_limit": LIMIT})
    runpy.run_path(str(STARTUP))
    import tensorflow as tf

    print(f"{'rows':>6} {'plain':>10} {'tfswap run':>10} {'ratio':>7}")
    for rows in ROWS:
        x = tf.random.stateless_normal([rows, 256], seed=(1, 2))
        plain, watched = make_step(), make_step()
        setattr(plain.get_concrete_function(x), VERDICT, False)
        calls: dict[str, Callable[[Any], Any]] = {"plain": plain, "watched": watched}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(5):
            for call in calls.values():
                call(x)
        for _ in range(rounds):
            for name in random.sample(list(calls), len(calls)):
                begin = time.perf_counter()
                calls[name](x)
                times[name].append(time.perf_counter() - begin)
        ratio = statistics.median(b / a for a, b in zip(times["plain"], times["watched"], strict=True))
        middle = [f"{1e3 * statistics.median(each):.3f} ms" for each in times.values()]
        print(f"{rows:>6} {middle[0]:>10} {middle[1]:>10} {ratio:>7.3f}")


def seconds(words: Sequence[str]) -> tuple[float, float]:
    """The seconds that a process takes, and those of the CPU."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    subprocess.run([sys.executable, *words], check=False, capture_output=True)
    took = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def starts() -> None:
    """Times programs of one step."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        run = ["-m", "tfswap", "run", f"--memory_limit={LIMIT}"]
        words = {"plain": [str(program)], "tfswap run": [*run, str(program)], "refused": [*run, f"{program}.lost"]}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in words}
        for number in range(1 + STARTS):
            for name in random.sample(list(words), len(words)):
                took = seconds(words[name])
                if number:  # the first one fills caches of files
                    found[name].append(took)
    print(f"{'start':<12} {'seconds':>8} {'of the CPU':>11}")
    for name, each in found.items():
        print(f"{name:<12} {_median(each, 0):>8.2f} {_median(each, 1):>11.2f}")
    differences = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(found["tfswap run"], found["plain"], strict=True)]
    print(f"{'added':<12} {_median(differences, 0):>8.2f} {_median(differences, 1):>11.2f}")


def _median(rounds: Sequence[tuple[float, float]], position: int) -> float:
    return statistics.median(each[position] for each in rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=300)
    parser.add_argument("--only", choices=("steps", "starts"), help="measure one of the two")
    options = parser.parse_args()
    if options.only != "starts":
        steps(options.rounds)
    if options.only != "steps":
        starts()


if __name__ == "__main__":
    main()
