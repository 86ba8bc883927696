"""What `tfswap run` costs a program that has room: for each step, and at its start.

    TF_CPU_ALLOCATOR_USE_BFC=1 TF_CPU_BFC_MEM_LIMIT_IN_MB=2048 python benchmarks/unmodified.py [ROUNDS]

Steps: the same step is made several times in one process. Two are left alone, whose difference is that of the
measurement; one is under a limit that leaves room, and one may be rescued. A round calls each once, in an order that is
drawn. Printed are the median times of the step alone, by the clock and of the CPU; the median of the rounds' ratios of
CPU times; and the median of what the calling thread takes more of the CPU, which other programs on the machine hardly
change. Steps are a `tf.function` of several sizes, and a run of a session.

Start: a program that trains one small step runs by `python` and by `tfswap run`, in turn. Printed are medians of the
seconds of each, and of the rounds' differences; CPU time too. Of these, `tfswap run` itself takes what "refused" does:
it ends before the program begins.
"""

from __future__ import annotations

import argparse
import functools
import inspect
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

LIMIT = "1GiB"
ROWS = (64, 1024, 8192)
STARTS = 5
CLOCKS = time.perf_counter, time.process_time, time.thread_time
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
            weight.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    return step


def steps(rounds: int) -> None:
    """Times steps that have room, left alone, under the limit, and where they may be rescued."""
    from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

    from tfswap.frontends.unmodified import functions
    from tfswap.frontends.unmodified.settings import RUN, STARTUP, Settings

    plain = ConcreteFunction._call_flat
    os.environ[RUN] = json.dumps({"memory_limit": LIMIT})
    runpy.run_path(str(STARTUP))
    import tensorflow as tf

    print(f"{'step':<14} {'alone':>10} {'CPU':>10} {'':<8} {'ratio':>7} {'added':>10}")
    for rows in ROWS:
        x = tf.random.stateless_normal([rows, 256], seed=(1, 2))
        alone, again, limited, rescued = (make_step() for _ in range(4))
        for step in (alone, again):
            setattr(step.get_concrete_function(x), functions.VERDICT, False)
        trace = rescued.get_concrete_function(x)
        setattr(trace, functions.VERDICT, functions._judged(trace, plain, Settings.of({})))
        calls = {"alone": alone, "again": again, "limit": limited, "rescue": rescued}
        compare(f"{rows} rows", {name: functools.partial(call, x) for name, call in calls.items()}, rounds)
    for rows in ROWS:
        runs = {name: make_session(rows, name) for name in ("alone", "again", "limit", "rescue")}
        compare(f"session {rows}", runs, rounds)


def make_session(rows: int, kind: str) -> Callable[[], Any]:
    """Runs the same step in a session of its own."""
    import numpy as np
    import tensorflow as tf

    from tfswap.frontends.unmodified import sessions
    from tfswap.frontends.unmodified.settings import Settings

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        x = h = v1.placeholder(tf.float32, [None, 256])
        for i in range(4):
            start = np.random.default_rng(i).normal(size=(256, 256)).astype("f") * 0.1
            h = tf.nn.relu(h @ v1.get_variable(f"w{i}", initializer=start, use_resource=True))
        loss = tf.reduce_mean(h)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session = v1.Session()
        session.run(v1.global_variables_initializer())
    if kind in ("alone", "again"):
        alone = mock.Mock()
        alone.of = lambda _: None
        setattr(session, sessions.STEPS, alone)
    elif kind == "rescue":
        plain = inspect.getclosurevars(type(session)._do_run).nonlocals["plain"]
        setattr(session, sessions.STEPS, sessions.SessionSteps(session, plain, Settings.of({})))
    values = np.random.default_rng(9).normal(size=(rows, 256)).astype("f")
    return functools.partial(session.run, [loss, train], {x: values})


def compare(step: str, calls: Mapping[str, Callable[[], Any]], rounds: int) -> None:
    """Prints what the first of the calls takes, and what the others add."""
    times: dict[str, list[list[float]]] = {name: [] for name in calls}
    for _ in range(5):
        for call in calls.values():
            call()
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            begin = [clock() for clock in CLOCKS]
            calls[name]()
            times[name].append([clock() - at for clock, at in zip(CLOCKS, begin, strict=True)])
    (_, alone), *others = times.items()
    wall, cpu, _ = (1e3 * statistics.median(each) for each in zip(*alone, strict=True))
    shown = f"{step:<14} {wall:>7.3f} ms {cpu:>7.3f} ms"
    for name, each in others:
        ratio = statistics.median(b[1] / a[1] for a, b in zip(alone, each, strict=True))
        added = statistics.median(b[2] - a[2] for a, b in zip(alone, each, strict=True))
        print(f"{shown} {name:<8} {ratio:>7.4f} {1e6 * added:>7.0f} us", flush=True)
        shown = " " * len(shown)


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
