"""Random training steps, run under several limits: values and peaks. Run by test_random_programs.py on a capped arena.

    python random_programs.py FIRST_SEED COUNT

Prints a JSON list, one entry per program and limit.
"""

from __future__ import annotations

import json
import random
import sys

import tensorflow as tf

import tfswap
from tfswap.exporters.function import memory_optimizer_off

MIB = 2**20
STEPS = 3
TRIES = 3
TACTICS = (("swap", "recompute", "encode"), ("recompute",), ("swap",), ("swap", "recompute"), ("encode", "swap"))
SHARES = (0.0, 0.1, 0.5, 1.0)  # of the way from the floor to the unoptimised peak


def normal(shape, seed, scale=1.0):
    return tf.random.stateless_normal(shape, seed=(seed, 11)) * scale


class Program:
    """A chain of random layers with skips, and its training step with momentum for some of the variables."""

    def __init__(self, seed: int):
        choose = random.Random(seed)
        self.image = choose.random() < 0.5
        if self.image:
            self.size, self.width = choose.choice((14, 16)), choose.choice((12, 16))
            self.shape = [choose.choice((24, 32)), self.size, self.size, self.width]
        else:
            self.width = choose.choice((96, 128))
            self.shape = [choose.choice((500, 1024)), self.width]
        kinds = ["relu", "relu6", "leaky", "tanh", "scale", "add", "mul", "dropout", "norm", "dense", "dense", "dense"]
        if self.image:
            kinds += ["pool"]
        self.layers = [(choose.choice(kinds), choose.random()) for _ in range(choose.randint(6, 14))]
        self.layers.insert(0, ("dense", 0.0))
        self.learning_rate = 0.05
        filters = [3, 3, self.width, self.width] if self.image else [self.width, self.width]
        self.weights = [
            tf.Variable(normal(filters, i, 0.2)) for i, (kind, _) in enumerate(self.layers) if kind == "dense"
        ]
        self.momenta = [tf.Variable(tf.zeros_like(w)) if choose.random() < 0.5 else None for w in self.weights]
        self.count = tf.Variable(tf.constant(0))

    def forward(self, x, step):
        weights = iter(self.weights)
        made = [x]
        for i, (kind, where) in enumerate(self.layers):
            h, skip = made[-1], made[int(where * len(made))]
            if kind == "dense":
                w = next(weights)
                h = tf.nn.conv2d(h, w, 1, "SAME") if self.image else h @ w
            elif kind == "relu":
                h = tf.nn.relu(h)
            elif kind == "relu6":
                h = tf.nn.relu6(4 * h)
            elif kind == "leaky":
                h = tf.nn.leaky_relu(h, 0.1)
            elif kind == "tanh":
                h = tf.tanh(h)
            elif kind == "scale":
                h = h * 0.5 + 0.1
            elif kind == "add":
                h = h + skip
            elif kind == "mul":
                h = tf.tanh(h) * tf.sigmoid(skip)
            elif kind == "pool":
                h = tf.nn.max_pool2d(h, 3, 1, "SAME")
            elif kind == "norm":
                mean, variance = tf.nn.moments(h, [0], keepdims=True)
                h = (h - mean) * tf.math.rsqrt(variance + 1e-3)
            else:
                mask = tf.random.stateless_uniform(tf.shape(h), seed=tf.stack([step, i]))
                h = tf.where(mask < 0.7, h / 0.7, 0.0)
            made.append(h)
        return tf.reduce_mean(made[-1] ** 2)

    def step(self, x):
        count = self.count.assign_add(1)
        with tf.GradientTape() as tape:
            loss = self.forward(x, count)
        gradients = tape.gradient(loss, self.weights)
        for w, m, g in zip(self.weights, self.momenta, gradients, strict=True):
            if m is not None:
                m.assign(0.9 * m + tf.convert_to_tensor(g))
                g = m
            w.assign_sub(self.learning_rate * tf.clip_by_norm(g, 1.0))
        return loss, tf.linalg.global_norm(gradients)

    def reset(self):
        for i, w in enumerate(self.weights):
            w.assign(normal(w.shape, i, 0.2))
        for m in self.momenta:
            if m is not None:
                m.assign(tf.zeros_like(m))
        self.count.assign(0)


def bits(tensors) -> list[bytes]:
    return [t.numpy().tobytes() for t in tf.nest.flatten(tensors)]


def state(program):
    return [program.count, *program.weights, *(m for m in program.momenta if m is not None)]


def run(program, function, x) -> tuple[list, list[tuple[int, int | None]]]:
    """Results of each step and the variables after the last. For each step the measured peak and the predicted one, in
    the arena as the step found it; None where the step ran as it was traced.
    """
    program.reset()
    found, peaks = [], []
    for _ in range(STEPS):
        tf.config.experimental.reset_memory_stats("CPU:0")
        found.append(bits(function(x)))
        # A step that runs as it was traced can be planned before the next call: each has its own plan.
        planned = hasattr(function, "plan") and not function.plan().changes_nothing
        measured = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        peaks.append((measured, function.report().planned_peak_bytes if planned else None))
    return [found, bits(state(program))], peaks


def check(seed: int) -> list[dict]:
    program = Program(seed)
    # Once: where the allocator puts it, and with how large a chunk, is part of any floor.
    x = normal(program.shape, 5)
    reference = tf.function(program.step, autograph=False)
    with memory_optimizer_off():
        expected, peaks = run(program, reference, x)
    del reference
    traced = tf.function(program.step, autograph=False)
    floor, baseline = _floor(program, traced, x, TACTICS[seed % len(TACTICS)])
    results = []
    for number, share in enumerate(SHARES):
        tactics = TACTICS[(seed + number) % len(TACTICS)]
        limit = floor + int((max(baseline, floor) - floor) * share)
        for _ in range(TRIES):
            entry = {"seed": seed, "share": share, "limit": limit, "unoptimised": max(peaks)[0]}
            step = tfswap.optimize(traced, memory_limit=limit, tactics=tactics)
            try:
                found, steps = run(program, step, x)
            except tfswap.InfeasibleMemoryLimit as error:
                # The floor was that of other tactics, in the arena as it was then; other tensors have come
                # since, and this step's own constants.
                entry["refused"] = limit = error.floor_bytes + error.floor_bytes // 50
                continue
            entry["steps"], entry["peak"] = steps, max(measured for measured, _ in steps)
            entry["unchanged"] = any(planned is None for _, planned in steps)
            # A step as it was traced runs TensorFlow's default, Grappler and all: other bits.
            entry["same"] = found == expected or entry["unchanged"]
            entry["swapped"] = len(step.plan().evictions)
            entry["reruns"], entry["encoded"] = step.report().reruns, len(step.plan().encoded)
            break
        results.append(entry)
    return results


def _floor(program, traced, x, tactics) -> tuple[int, int]:
    """The floor of some tactics, with room for what a refused try leaves out, and the unoptimised peak."""
    step = tfswap.optimize(traced, memory_limit="1KiB", tactics=tactics)
    program.reset()
    try:
        step(x)
    except tfswap.InfeasibleMemoryLimit as error:
        floor = error.floor_bytes
    analysed = tfswap.optimize(traced, memory_limit="300%", mode="analyze")
    analysed.get_concrete_function(tf.TensorSpec(program.shape))
    return floor + floor // 50, analysed.report().baseline_peak_bytes


def main() -> None:
    first, count = map(int, sys.argv[1:])
    slab = tf.raw_ops.Empty(shape=[(512 << 20) - (2 << 20)], dtype=tf.uint8)
    del slab
    print(json.dumps([entry for seed in range(first, first + count) for entry in check(seed)]))


if __name__ == "__main__":
    main()
