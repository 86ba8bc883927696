"""Random steps full of sums, run under several limits: bits. Run by test_random_sums.py on a capped arena.

    python random_sums.py FIRST_SEED COUNT [loops | open | decided]

Terms are shared, repeated, views, arguments and variables, and other kernels read them too; sums have 2 to 12 of them.
TensorFlow's threads race there for which buffer is forwarded to a sum. With one thread for kernels (the process must
have TF_NUM_INTEROP_THREADS=1) it is none, as long as no tensor has more readers than TensorFlow keeps in order: then
its bits are the same in every run, and they are what is expected.

With `loops` most sums are in loops, loops inside of loops, branches and functions: iterations overlap, and one may add
in another order than the next. TensorFlow's order of many readers of one node is by chance there, but the same in each
run of one trace; several traces say what is expected, and more of them where these do not.

With `open` values decide how many iterations these loops have.

With `decided` sums read what conditionals give, or what they read too, and values decide which branch is taken: each
program runs with several arguments.

Prints a JSON list, one entry per program.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections import Counter

import tensorflow as tf

import tfswap
from tfswap.exporters.function import memory_optimizer_off

ORDERED_READERS = 8
"""Of a node: TensorFlow keeps more of them in a hash set of pointers."""
SHARES = (0.0, 0.3, 0.7)  # of the way from the floor to the unoptimised peak
TACTICS = (("swap", "recompute", "encode"), ("recompute",), ("swap",))
RUNS, MORE_RUNS = 3, 12


def normal(shape, seed, dtype, scale=1.0):
    return tf.random.stateless_normal(shape, (seed, 7), dtype=dtype) * tf.cast(scale, dtype)


class Program:
    def __init__(self, seed: int):
        choose = random.Random(seed)
        self.dtype = choose.choice((tf.float32, tf.float64))
        self.rows, self.width = choose.choice((64, 160)), choose.choice((300, 700))
        kinds = ("dense", "solve", "tanh", "mul", "sum", "sum", "sum", "sum")
        self.layers = [
            (choose.choice(kinds), choose.random(), choose.randint(0, 10**9)) for _ in range(choose.randint(3, 6))
        ]
        self.weights = [tf.Variable(self.start(i)) for i in range(3)]

    def start(self, i: int):
        return normal([self.rows, self.rows], i, self.dtype, 0.1) + 3 * tf.eye(self.rows, dtype=self.dtype)

    def forward(self, x):
        made, losses = [x, self.weights[0] @ x], []
        self.factor = 1.0

        def scaled(t):  # by a number of its own, so that no constant has many readers
            self.factor += 0.01
            return t * tf.constant(self.factor, self.dtype)

        for kind, other, seed in self.layers:
            choose = random.Random(seed)
            last = choose.choice(made[-4:])
            w = choose.choice(self.weights)
            if kind == "dense":
                t = scaled(w @ last)
            elif kind == "solve":
                t = tf.linalg.triangular_solve(w, last)
            elif kind == "tanh":
                t = tf.tanh(last)
            elif kind == "mul":
                t = last * scaled(choose.choice(made[-4:]))
            else:
                terms = [self.term(choose.choice(made[-5:]), choose, scaled) for _ in range(choose.randint(2, 12))]
                t = scaled(tf.add_n([choose.choice(terms) for _ in terms]))
            if other < 0.4:
                losses.append(tf.reduce_sum(scaled(w @ t)))
            made.append(t)
        return tf.add_n([*losses, tf.reduce_sum(made[-1] ** 2)])

    def term(self, t, choose, scaled):
        kind = choose.random()
        if kind < 0.15:
            return tf.identity(t)
        if kind < 0.3:
            return tf.reshape(tf.reshape(t, [-1]), [self.rows, self.width])
        return scaled(t) if kind < 0.5 else tf.tanh(t) if kind < 0.65 else t

    def step(self, x):
        with tf.GradientTape() as tape:
            loss = self.forward(x)
        for w, g in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            if g is not None:
                w.assign_sub(tf.cast(1e-4, self.dtype) * g / tf.norm(g))
        return loss

    def run(self, function, x) -> tuple[bytes, ...]:
        for i, w in enumerate(self.weights):
            w.assign(self.start(i))
        return tuple(t.numpy().tobytes() for t in (function(x), *self.weights))


class LoopProgram(Program):
    def __init__(self, seed: int):
        choose = random.Random(seed)
        self.seed = 3 * seed
        self.dtype = choose.choice((tf.float32, tf.float64))
        self.trips, self.parallel = choose.choice((1, 2, 4)), choose.choice((1, 10))
        self.trains, self.branches = choose.random() < 0.5, choose.random() < 0.3
        self.calls, self.nests = choose.random() < 0.3, choose.random() < 0.3
        self.rows, self.width = 64, 300
        self.weights = [tf.Variable(self.start(i)) for i in range(2)]

    def layers_of(self, seed: int, terms, scaled):
        choose, made = random.Random(seed), list(terms)
        for _ in range(choose.randint(2, 5)):
            kind = choose.choice(("dense", "tanh", "mul", "sum", "sum", "sum"))
            last = choose.choice(made[-4:])
            if kind == "dense":
                t = scaled(choose.choice(self.weights) @ last)
            elif kind == "tanh":
                t = tf.tanh(last)
            elif kind == "mul":
                t = scaled(last * choose.choice(made[-4:]))
            else:
                terms = [self.term(choose.choice(made[-5:]), choose, scaled) for _ in range(choose.randint(2, 6))]
                t = scaled(tf.add_n([choose.choice(terms) for _ in terms]))
            made.append(t)
        return made

    def tame(self, t):
        return t / (1 + tf.norm(t)) * 20

    def loop(self, body, state, trips: int):
        most = trips if self.trains else None
        return tf.while_loop(
            lambda i, *_: i < trips, body, [0, *state], parallel_iterations=self.parallel, maximum_iterations=most
        )[1:]

    def forward(self, x):
        self.factor = 1.0

        def scaled(t):
            self.factor += 0.01
            return t * tf.constant(self.factor, self.dtype)

        def inner(i, a):
            return i + 1, self.tame(self.layers_of(self.seed + 3, [a, tf.tanh(a)], scaled)[-1])

        def layers(a, b):
            return tuple(self.layers_of(self.seed + 1, [a, b, self.weights[0] @ a], scaled)[-4:])

        def body(i, a, b):
            made = list((tf.function(layers, autograph=False) if self.calls else layers)(a, b))
            if self.branches:
                taken = [lambda: self.layers_of(self.seed + 2, made[-3:], scaled)[-1]]
                taken.append(lambda: scaled(tf.add_n([made[-1], made[-2], made[-1], made[-3]])))
                made.append(tf.cond(tf.equal(i % 2, 0), *taken))
            if self.nests:
                made += self.loop(inner, [self.tame(made[-1])], 2)
            return i + 1, self.tame(made[-1]), self.tame(random.Random(self.seed + 2).choice(made[-4:]))

        before = self.layers_of(self.seed, [x, self.weights[0] @ x, tf.tanh(x)], scaled)
        a, b = self.loop(body, [before[-1], before[-2]], self.trips)
        return tf.reduce_sum(a * a) + tf.reduce_sum(tf.sin(b) * a) + tf.reduce_sum(before[-1])

    def step(self, x):
        return super().step(x) if self.trains else self.forward(x)


class OpenLoopProgram(LoopProgram):
    def loop(self, body, state, trips: int):
        most = trips + 3 if self.trains else None
        count = tf.cast(tf.reduce_any(tf.math.is_finite(state[0])), tf.int32) * trips
        return tf.while_loop(
            lambda i, *_: i < count, body, [0, *state], parallel_iterations=self.parallel, maximum_iterations=most
        )[1:]


class DecidedProgram(LoopProgram):
    def __init__(self, seed: int):
        super().__init__(seed)
        choose = random.Random(seed + 1)
        self.before, self.cases = choose.choice((1, 1, 2)), choose.random() < 0.2
        self.loops = choose.random() < 0.5
        self.trips = choose.choice((1, 2, 3))

    def decide(self, made, seed: int, scaled):
        """What a conditional gives that the values of some of its terms decide."""
        choose = random.Random(seed)
        branches = [
            lambda: self.layers_of(seed + 1, made[-3:], scaled)[-1],
            lambda: self.layers_of(seed + 2, made[-2:], scaled)[-1],
            lambda: scaled(tf.add_n([made[-1], made[-2], made[-1], made[-3]])),
            lambda: tf.identity(made[-1]),
            lambda: tf.tanh(made[-2]),
        ]
        number = tf.cast(choose.choice(made[-3:])[0, choose.randrange(self.width)] > 0, tf.int32)
        if self.cases:
            number += tf.cast(choose.choice(made[-3:])[1, choose.randrange(self.width)] > 0, tf.int32)
            return tf.switch_case(number, choose.sample(branches, 3))
        return tf.cond(tf.equal(number, 1), *choose.sample(branches, 2))

    def forward(self, x):
        self.factor = 1.0

        def scaled(t):
            self.factor += 0.01
            return t * tf.constant(self.factor, self.dtype)

        def decisions(made, seed: int, count: int):
            for i in range(seed, seed + 10 * count, 10):
                twice = tf.tanh(made[-1])
                made.append(self.decide(made, i, scaled))
                total = scaled(tf.add_n([twice, twice, made[-1]]))
                made += self.layers_of(i + 5, [*made[-3:], total], scaled)[3:]
                made.append(made[-1] + total)  # needed for the result
            return made

        def body(i, a, b):
            made = decisions([a, tf.tanh(b), b], 100 * self.seed + 50, 1)
            return i + 1, self.tame(made[-1]), self.tame(random.Random(self.seed).choice(made[-4:]))

        made = decisions([x, self.weights[0] @ x, tf.tanh(x)], 100 * self.seed, self.before)
        if self.loops:
            made += self.loop(body, [self.tame(made[-1]), self.tame(made[-2])], self.trips)
            made += self.layers_of(self.seed + 4, made[-4:], scaled)[4:]
        return tf.reduce_sum(self.tame(made[-1]) * made[-2]) + tf.reduce_sum(tf.sin(made[-1]))


def crowded(graph) -> bool:
    """Whether a node may have more readers than TensorFlow keeps in order, where it merges equal nodes."""
    kinds: dict = {}
    numbers: dict[str, int] = {}  # by node, that of the nodes that are equal to it
    readers: dict[int, Counter] = {}
    for op in graph.get_operations():
        attrs = {key: value for key, value in op.node_def.attr.items() if not key.startswith("_")}
        inputs = tuple((numbers[t.op.name], t.value_index) for t in op.inputs)
        own = op.name if op.type in ("Placeholder", "AssignSubVariableOp", "ReadVariableOp") else ""
        kind = op.type, own, str(sorted((key, str(value)) for key, value in attrs.items())), inputs
        numbers[op.name] = kinds.setdefault(kind, len(kinds))
    for op in graph.get_operations():  # control edges may come from nodes that were made later
        waits_for = {numbers[t.op.name] for t in op.inputs} | {numbers[other.name] for other in op.control_inputs}
        for source in waits_for:
            edges = sum(numbers[t.op.name] == source for t in op.inputs) or 1
            readers.setdefault(source, Counter())[numbers[op.name]] = edges
    return any(counts.total() > ORDERED_READERS for counts in readers.values())


def uncrowded(seed: int) -> Program:
    """The first of a series of programs in which no node has too many readers."""
    for attempt in range(200):
        program = Program(1000 * seed + attempt)
        x = tf.TensorSpec([program.rows, program.width], program.dtype)
        if not crowded(tf.function(program.step, autograph=False).get_concrete_function(x).graph):
            return program
    raise AssertionError("all programs are crowded")


@contextlib.contextmanager
def grappler_off():
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def check(seed: int, kind: str) -> dict:
    kinds = {"loops": LoopProgram, "open": OpenLoopProgram, "decided": DecidedProgram}
    program = kinds[kind](seed) if kind else uncrowded(seed)
    arguments = [normal([program.rows, program.width], i, program.dtype) for i in (5, 6, 7, 8)]
    if kind != "decided":
        del arguments[1:]

    expected: list[set[tuple[bytes, ...]]] = [set() for _ in arguments]

    def trace_again(times: int) -> None:
        with grappler_off() if kind else memory_optimizer_off():  # a step with loops is planned as it was traced
            for _ in range(times):
                function = tf.function(program.step, autograph=False)
                for found, x in zip(expected, arguments, strict=True):
                    found.add(program.run(function, x))

    trace_again(RUNS)
    traced = tf.function(program.step, autograph=False)
    entry = {"seed": seed, "limits": 0, "wrong": 0, "swapped": 0, "reruns": 0}
    analysed = tfswap.optimize(traced, memory_limit="300%", mode="analyze")
    analysed.get_concrete_function(tf.TensorSpec(arguments[0].shape, program.dtype))
    report = analysed.report()
    floor, peak = report.floor_bytes, report.baseline_peak_bytes
    for number, share in enumerate(SHARES):
        limit = floor + floor // 50 + int(max(0, peak - floor) * share)
        tactics = TACTICS[(seed + number) % len(TACTICS) if share else 0]
        step = tfswap.optimize(traced, memory_limit=limit, tactics=tactics)
        found: list[tuple[int, tuple[bytes, ...]]] = []
        try:
            for i, x in enumerate(arguments):
                bits = program.run(step, x)
                if not (kind and step.plan().changes_nothing):  # left to TensorFlow, Grappler included
                    found.append((i, bits))
        except tfswap.InfeasibleMemoryLimit:
            continue
        entry["limits"] += 1
        if any(bits not in expected[i] for i, bits in found):
            trace_again(MORE_RUNS)
        entry["wrong"] += sum(bits not in expected[i] for i, bits in found)
        entry["swapped"] += len(step.plan().evictions)
        entry["reruns"] += step.report().reruns
    return entry | {"references": max(map(len, expected))}


def main() -> None:
    first, count, kind = int(sys.argv[1]), int(sys.argv[2]), "".join(sys.argv[3:])
    slab = tf.raw_ops.Empty(shape=[(512 << 20) - (2 << 20)], dtype=tf.uint8)
    del slab
    print(json.dumps([check(seed, kind) for seed in range(first, first + count)]))


if __name__ == "__main__":
    main()
