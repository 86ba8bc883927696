"""Random steps that decide for themselves which branches they take and when their loops end, in more ways than are
judged one by one: what test_random_courses.py runs in processes of their own.
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from models import settle
from step_parts import descend, make_data, make_weights

from tfswap.analysis import analyse
from tfswap.analysis.dataflow_builder import Builder
from tfswap.compiler.body_orders import choose_body_orders
from tfswap.compiler.prepare import prepare
from tfswap.importers.function import import_function
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.plan.schedule import EXACT, RUN, Step
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.memory import simulate_memory, widest_bytes

ROWS = (256, 320, 384, 448, 512, 640)
TRIPS = 6
"""Iterations of a loop at most."""
CHOICES = 64


class Program:
    """A step of random nested loops and conditionals; `decides` has a row for each iteration, with a number for each
    conditional that says which branch it takes there; `ends` says how many iterations each loop has.
    """

    def __init__(self, seed: int):
        self.chance = random.Random(seed)
        self.conditionals = self.loops = 0
        self.weights = make_weights((64, 64), (64, 64))
        self.body = self.loop(2)

    def sequence(self, depth: int) -> Callable[..., Any]:
        """Some operations, one after the other: a function of the state, the inputs that decide, and the iteration."""
        operations = [self.operation(depth) for _ in range(self.chance.randint(1, 2))]

        def run(h: Any, decides: Any, ends: Any, i: Any) -> Any:
            for operation in operations:
                h = operation(h, decides, ends, i)
            return h

        return run

    def operation(self, depth: int) -> Callable[..., Any]:
        kind = self.chance.randrange(4 if depth > 0 else 2)
        if kind == 2:
            return self.conditional(depth - 1)
        if kind == 3 and self.loops < 2:
            return self.loop(depth - 1)
        return self.kernels()

    def kernels(self) -> Callable[..., Any]:
        rows, which, kind = self.chance.choice(ROWS), self.chance.randrange(2), self.chance.randrange(4)

        def run(h: Any, *_: Any) -> Any:
            w = self.weights[which]
            if kind == 0:
                return tf.tanh(h @ w)
            if kind == 1:
                return h + tf.pad(tf.sigmoid(h[:rows] @ w), [[0, max(ROWS) - rows], [0, 0]])
            if kind == 2:
                return tf.reshape(tf.tanh(tf.tile(h, [1, 2]))[:, : h.shape[1]], h.shape)
            return h * tf.sigmoid(tf.concat([h[rows:], h[:rows]], 0))

        return run

    def conditional(self, depth: int) -> Callable[..., Any]:
        number = self.conditionals
        self.conditionals += 1
        branches = [self.sequence(depth) for _ in range(self.chance.choice((2, 3)))]
        if self.chance.randrange(3) == 0:
            branches[0] = lambda h, *_: h

        def run(h: Any, decides: Any, ends: Any, i: Any) -> Any:
            return tf.switch_case(decides[i, number % CHOICES], [lambda b=b: b(h, decides, ends, i) for b in branches])

        return run

    def loop(self, depth: int) -> Callable[..., Any]:
        number = self.loops
        self.loops += 1
        body, inner = self.sequence(depth), self.conditional(depth - 1)

        def run(h: Any, decides: Any, ends: Any, outer: Any) -> Any:
            def iteration(j: Any, h: Any) -> Any:
                return j + 1, inner(body(h, decides, ends, j), decides, ends, (outer + j) % TRIPS)

            return tf.while_loop(lambda j, _: j < ends[number], iteration, [0, h], maximum_iterations=TRIPS)[1]

        return run

    def step(self, x: Any, decides: Any, ends: Any) -> Any:
        with tf.GradientTape() as tape:
            h = self.body(x, decides, ends, tf.constant(0))
            loss = tf.reduce_mean(tf.square(h)) + sum(tf.reduce_mean(w * w) for w in self.weights)
        return descend(tape, loss, self.weights)


def peaks(seed: int, share: float, runs: int) -> dict[str, Any]:
    """The highest of the peaks of random courses, and of courses that were changed wherever it rose.

    Args:
        share: of the step's floor, that is the limit.
        runs: how many of each.
    """
    import tfswap

    settle()
    program = Program(seed)
    x = make_data(max(ROWS), 64)
    chance = np.random.RandomState(seed)

    def drawn() -> tuple[Any, Any]:
        return chance.randint(0, 3, (TRIPS, CHOICES)).astype(np.int32), chance.randint(0, TRIPS + 1, 8).astype(np.int32)

    first = (x, *map(tf.constant, drawn()))
    with pytest.raises(tfswap.InfeasibleMemoryLimit) as refused:
        tfswap.optimize(tf.function(program.step, autograph=False), memory_limit=1)(*first)
    limit = int(share * refused.value.floor_bytes)
    optimized = tfswap.optimize(tf.function(program.step, autograph=False), memory_limit=limit)
    optimized(*first)
    plan = optimized.plan()

    def measured(decides: Any, ends: Any) -> int:
        tf.config.experimental.reset_memory_stats("CPU:0")
        optimized(x, tf.constant(decides), tf.constant(ends))
        return tf.config.experimental.get_memory_info("CPU:0")["peak"]

    found = [(measured(*course), course) for course in (drawn() for _ in range(runs))]
    highest, (decides, ends) = max(found, key=lambda f: f[0])
    for _ in range(runs):
        changed, ended = decides.copy(), ends.copy()
        for _ in range(3):
            changed[chance.randint(TRIPS), chance.randint(max(1, program.conditionals))] = chance.randint(3)
        if chance.randint(3) == 0:
            ended[chance.randint(max(1, program.loops))] = chance.randint(TRIPS + 1)
        peak = measured(changed, ended)
        if peak >= highest:
            highest, decides, ends = peak, changed, ended
    return {
        "peak": highest,
        "planned": plan.planned_peak_bytes,
        "exact": plan.exact_chunks,
        "unmodelled": optimized.report().unmodelled,
        "drawn": "<svg" in optimized.report()._repr_html_(),
    }


def on_paper(seed: int, courses: int) -> dict[str, Any]:
    """Whether the run that covers all courses holds no less than random ones, at each kernel of the step.

    Returns the peaks of live bytes, and at most what a course takes of that in arenas full of holes: in exact chunks,
    and in others of what those can take.
    """
    program = Program(seed)
    shapes = (max(ROWS), 64), (TRIPS, CHOICES), (8,)
    signature = [tf.TensorSpec(s, d) for s, d in zip(shapes, (tf.float32, tf.int32, tf.int32), strict=True)]
    graph = import_function(tf.function(program.step, autograph=False).get_concrete_function(*signature))
    target = Target(DeviceModel())
    prepare(graph, target, lambda _: None)
    choose_body_orders(graph, target)
    builder = Builder(graph, target.device, True, None)
    builder.build()
    covering = analyse._covering(builder)
    assert covering is not None
    steps = [Step(RUN, i) for i, kernel in enumerate(covering.is_kernel) if kernel]
    most = simulate_memory(covering, steps, live=True)
    exact = [Step(EXACT, 0), *steps]
    passed, highest, widest, fullest = 0, 0, 0.0, 0.0
    for number in range(courses):
        chance = random.Random(number)
        course = ByChance(chance)
        flow = Builder(graph, target.device, False, None, course, builder).build()
        found = simulate_memory(flow, steps, live=True)
        passed += any(map(operator.gt, found.during_bytes, most.during_bytes))
        highest = max(highest, found.peak_bytes)
        arena = holes(chance)
        peak = simulate_memory(flow, steps, snapshot=arena).peak_bytes
        widest = max(widest, peak / widest_bytes(covering, steps, arena))
        peak = simulate_memory(flow, exact, snapshot=arena).peak_bytes
        fullest = max(fullest, peak / simulate_memory(covering, exact, snapshot=holes(random.Random(-1))).peak_bytes)
    return {"passed": passed, "highest": highest, "covering": most.peak_bytes, "widest": widest, "fullest": fullest}


class ByChance(NamedTuple):
    """A course that the step may take."""

    chance: random.Random

    def branch(self, iteration: int, branches: int) -> int:
        return self.chance.randrange(branches)

    def trips(self, most: int) -> int:
        return int((most + 1) ** self.chance.random()) if self.chance.randrange(4) else most  # few cost less


def holes(chance: random.Random) -> ArenaSnapshot:
    """An arena in small pieces, with a large one at its end."""
    chunks: list[tuple[int, int, bool]] = []
    end = 0
    for number in range(200):
        nbytes = 256 * (1 if number % 2 else chance.randint(1, 2000))
        chunks.append((end, nbytes, bool(number % 2)))
        end += nbytes
    chunks.append((end, 1 << 30, False))
    return ArenaSnapshot(sum(nbytes for _, nbytes, used in chunks if used), tuple(chunks))


if __name__ == "__main__":
    import sys

    print(json.dumps(peaks(int(sys.argv[1]), float(sys.argv[3]), int(sys.argv[2]))))
