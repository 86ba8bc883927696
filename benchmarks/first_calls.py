"""What a first call takes, compared with TensorFlow's, and what its report takes, each program in a process of its own.

    python benchmarks/first_calls.py
    python benchmarks/first_calls.py --between 0 --only nms-1 soft-dtw    # at the floor

Of each program: seconds of TensorFlow's first call, of tfswap's at a limit between its floor and its predicted
unoptimised peak, with no plan cache, of `report()` with the floor, and of `print(report())` with the predicted
unoptimised peak as well, as wall clock and, in brackets, as CPU time. TensorFlow's own optimizers have nothing on disk
from runs before. The targets: a first call takes at most twice TensorFlow's and 10 s, a report with its floor 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMES_MORE, SECONDS_MORE = 2, 10
FLOOR_SECONDS = 1
ARENA_MIB = 2000

Step = tuple[Callable[..., Any], tuple[Any, ...]]


def random(seed: int, *shape: int) -> Any:
    import tensorflow as tf

    return tf.random.stateless_normal(shape, (seed, 7))


def trained(loss_of: Callable[..., Any], variables: list[Any]) -> Callable[..., Any]:
    """A step of gradient descent."""
    import tensorflow as tf

    def step(*arguments: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(*arguments)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    return step


def convolutions() -> tuple[list[Any], Callable[[Any], Any]]:
    import tensorflow as tf

    sizes = [(3, 32), (32, 32), (32, 5)]
    kernels = [tf.Variable(random(i, 3, 3, a, b) * (9 * a) ** -0.5) for i, (a, b) in enumerate(sizes)]

    def features(x: Any) -> Any:
        for kernel in kernels:
            x = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
        return x

    return kernels, features


def nms(calls: int) -> Step:
    """Proposals of a detector, thinned out by `non_max_suppression_padded` once for each image."""
    import tensorflow as tf

    kernels, features = convolutions()

    def loss_of(x: Any) -> Any:
        h = features(x)
        loss = tf.reduce_mean(tf.square(h))
        for image in range(calls):
            rows = tf.reshape(h[image], [-1, 5])
            scores, best = tf.math.top_k(rows[:, 0], 300)
            boxes = tf.sigmoid(tf.gather(rows[:, 1:], best))
            keep, _ = tf.image.non_max_suppression_padded(
                tf.stop_gradient(boxes), tf.stop_gradient(scores), 48, 0.7, pad_to_max_output_size=True
            )
            loss += tf.reduce_mean(tf.gather(boxes, keep))
        return loss

    return trained(loss_of, kernels), (random(9, 2, 64, 64, 3),)


def soft_dtw() -> Step:
    """Dynamic programming over pairs of frames: a loop over columns in a loop over rows (Cuturi and Blondel 2017)."""
    import tensorflow as tf

    length, width = 24, 64
    weights = tf.Variable(random(1, width, width) * width**-0.5)

    def loss_of(x: Any, y: Any) -> Any:
        made = tf.tanh(tf.tensordot(x, weights, 1))
        distances = tf.reduce_sum(tf.square(made[:, :, None] - y[:, None]), -1)
        above = tf.concat([tf.zeros([tf.shape(x)[0], 1]), tf.fill([tf.shape(x)[0], length], 1e6)], 1)

        def row(i: Any, above: Any) -> Any:
            def column(j: Any, left: Any, done: Any) -> Any:
                near = tf.stack([left, above[:, j], above[:, j + 1]], -1)
                left = distances[:, i, j] - tf.reduce_logsumexp(-near, -1)
                return j + 1, left, done.write(j + 1, left)

            first = tf.fill([tf.shape(x)[0]], 1e6)
            done = tf.TensorArray(tf.float32, length + 1).write(0, first)
            _, _, done = tf.while_loop(lambda j, *_: j < length, column, (0, first, done), maximum_iterations=length)
            return i + 1, tf.transpose(tf.ensure_shape(done.stack(), [length + 1, x.shape[0]]))

        _, last = tf.while_loop(lambda i, _: i < length, row, (0, above), maximum_iterations=length)
        return tf.reduce_mean(last[:, -1])

    return trained(loss_of, [weights]), (random(2, 16, length, width), random(3, 16, length, width))


def map_in_loop() -> Step:
    """Refinement steps, in each of which every example is treated by itself."""
    import tensorflow as tf

    weights = tf.Variable(random(1, 96, 96) * 96**-0.5)

    def loss_of(x: Any) -> Any:
        def refined(i: Any, h: Any) -> Any:
            return i + 1, h + tf.map_fn(lambda one: tf.tanh(one @ weights), h)

        _, h = tf.while_loop(lambda i, _: i < 6, refined, (0, x), maximum_iterations=6)
        return tf.reduce_mean(tf.square(h))

    return trained(loss_of, [weights]), (random(2, 16, 128, 96),)


def nested_loops() -> Step:
    """Three loops one inside of the other, of which the inner ones save what the outer ones' gradients read."""
    import tensorflow as tf

    weights = tf.Variable(random(1, 128, 128) * 128**-0.5)

    def looped(count: int, body: Callable[[Any], Any], h: Any) -> Any:
        return tf.while_loop(lambda i, _: i < count, lambda i, h: (i + 1, body(h)), (0, h), maximum_iterations=count)[1]

    def loss_of(x: Any) -> Any:
        inner = lambda h: looped(4, lambda h: tf.tanh(h @ weights), h)  # noqa: E731
        return tf.reduce_mean(tf.square(looped(4, lambda h: looped(4, inner, h), x)))

    return trained(loss_of, [weights]), (random(2, 256, 128),)


def decode() -> Step:
    """A decoder with attention that reads its own tokens, and ends early once all sequences have ended."""
    import tensorflow as tf

    batch, width, tokens, most = 32, 128, 1000, 24
    sizes = [(tokens, width), (width, width), (width, width), (width, tokens), (width, width)]
    embedding, given, state, output, attention = weights = [
        tf.Variable(random(i, *size) * size[0] ** -0.5) for i, size in enumerate(sizes)
    ]

    def loss_of(memory: Any, target: Any) -> Any:
        keys = tf.tensordot(memory, attention, 1)

        def step(t: Any, token: Any, h: Any, done: Any, loss: Any) -> Any:
            h = tf.tanh(tf.gather(embedding, token) @ given + h @ state)
            scores = tf.nn.softmax(tf.reduce_sum(tf.tanh(keys + h[:, None]), -1))
            logits = (h + tf.reduce_sum(scores[..., None] * memory, 1)) @ output
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=target[:, t], logits=logits)
            token = tf.argmax(logits, -1, output_type=tf.int32)
            return t + 1, token, h, done | tf.equal(token, 1), loss + tf.reduce_mean(losses)

        first = (0, tf.zeros([batch], tf.int32), tf.reduce_mean(memory, 1), tf.zeros([batch], tf.bool), 0.0)
        go_on = lambda t, token, h, done, loss: ~tf.reduce_all(done)  # noqa: E731
        return tf.while_loop(go_on, step, first, maximum_iterations=most)[-1]

    target = tf.random.stateless_uniform([batch, most], (1, 2), 0, tokens, tf.int32)
    return trained(loss_of, weights), (random(8, batch, 40, width), target)


def experts() -> Step:
    """A loop each of whose iterations takes one of three experts, as its input says."""
    import tensorflow as tf

    width, count = 128, 16
    weights = [tf.Variable(random(i, width, width) * width**-0.5) for i in range(4)]

    def loss_of(x: Any, which: Any) -> Any:
        def step(t: Any, h: Any) -> Any:
            branches = [
                lambda: tf.tanh(h @ weights[0]),
                lambda: h + tf.nn.relu(h @ weights[1]) @ weights[2],
                lambda: tf.tanh(tf.tanh(h @ weights[3]) @ weights[0]),
            ]
            return t + 1, tf.switch_case(which[t], branches)

        _, h = tf.while_loop(lambda t, _: t < count, step, (0, x), maximum_iterations=count)
        return tf.reduce_mean(tf.square(h))

    return trained(loss_of, weights), (random(3, 256, width), tf.range(count) % 3)


def resnet50() -> Step:
    """Keras' ResNet-50 with momentum, as in planning_time.py."""
    from planning_time import resnet50

    step, arguments = resnet50()
    return step.python_function, arguments


def unet_3d() -> Step:
    """As in room.py."""
    from room import unet_3d

    return unet_3d()


def transformer() -> Step:
    """As in room.py, but of six layers."""
    from room import transformer

    return transformer(layers=6)


def maml() -> Step:
    """Gradients through five inner steps of four tasks, unrolled (Finn et al. 2017)."""
    import tensorflow as tf

    sizes = [(1, 32), (32, 32), (32, 32), (32, 32)]
    weights = [tf.Variable(random(i, 3, 3, a, b) * 0.1) for i, (a, b) in enumerate(sizes)]
    weights.append(tf.Variable(random(9, 32, 5) * 0.1))

    def task_loss(weights: list[Any], x: Any, y: Any) -> Any:
        for kernel in weights[:-1]:
            x = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
            x = tf.nn.max_pool2d(x, 2, 2, "VALID") if x.shape[1] > 2 else x
        logits = tf.reshape(x, [x.shape[0], -1]) @ weights[-1]
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))

    def loss_of(xs: Any, ys: Any) -> Any:
        losses = []
        for x, y in zip(tf.unstack(xs), tf.unstack(ys), strict=True):
            adapted = list(weights)
            for _ in range(5):
                with tf.GradientTape() as tape:
                    tape.watch(adapted)
                    loss = task_loss(adapted, x, y)
                adapted = [w - 0.01 * g for w, g in zip(adapted, tape.gradient(loss, adapted), strict=True)]
            losses.append(task_loss(adapted, x, y))
        return tf.add_n(losses)

    labels = tf.random.stateless_uniform([4, 25], (1, 1), 0, 5, tf.int32)
    return trained(loss_of, weights), (random(2, 4, 25, 28, 28, 1), labels)


PROGRAMS: dict[str, Callable[[], Step]] = {
    "nms-1": lambda: nms(1),
    "nms-2": lambda: nms(2),
    "soft-dtw": soft_dtw,
    "map-in-loop": map_in_loop,
    "nested": nested_loops,
    "decode": decode,
    "experts": experts,
    "maml": maml,
    "unet-3d": unet_3d,
    "transformer": transformer,
    "resnet50": resnet50,
}


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of wall clock and of CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(name: str, way: str, limit: int) -> dict[str, Any]:
    """One program, in this process: TensorFlow's first call; tfswap's, and what a report takes; or its limits."""
    import tensorflow as tf

    import tfswap
    import tfswap.ops

    assert tfswap.ops.status().loaded, "built before the clock starts"
    slab = tf.raw_ops.Empty(shape=[ARENA_MIB - 2, 2**20], dtype=tf.uint8)
    del slab
    step, arguments = PROGRAMS[name]()
    if way == "TensorFlow":
        plain = tf.function(step)
        return {"first": timed(lambda: plain(*arguments))}
    if way == "limits":
        optimized = tfswap.optimize(tf.function(step), memory_limit=ARENA_MIB << 20)
        optimized(*arguments)
        report = optimized.report()
        return {"floor": report.floor_bytes, "peak": report.baseline_peak_bytes}
    optimized = tfswap.optimize(tf.function(step), memory_limit=limit)
    first = timed(lambda: optimized(*arguments))
    floor = timed(lambda: optimized.report().floor_bytes)
    left = timed(lambda: str(optimized.report()))
    return {"first": first, "floor": floor, "print": (floor[0] + left[0], floor[1] + left[1])}


def in_its_own_process(name: str, way: str, limit: int = 0) -> dict[str, Any]:
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ARENA_MIB),
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TFSWAP_PLAN_CACHE": "off",
    }
    command = [sys.executable, __file__, "--measure", name, way, "--limit", str(limit)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, {way}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--between", type=float, default=0.5, help="the limit: 0 for the floor, 1 for the peak")
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--measure", nargs=2, metavar=("PROGRAM", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure, args.limit)))
        return
    rows: dict[str, Any] = {}
    print(f"{'program':<14}{'TensorFlow':>18}{'tfswap':>18}{'the floor':>18}{'print(report())':>18}  within")
    for name in args.only:
        plain = in_its_own_process(name, "TensorFlow")
        known = in_its_own_process(name, "limits")
        limit = known["floor"] + max(0, int((known["peak"] - known["floor"]) * args.between))
        ours = in_its_own_process(name, "tfswap", limit)
        rows[name] = {"TensorFlow": plain, "tfswap": ours}
        cells = "".join(f"{f'{wall:.1f} ({cpu:.1f})':>18}" for wall, cpu in (plain["first"], *ours.values()))
        within = ours["first"][0] <= TIMES_MORE * plain["first"][0] + SECONDS_MORE
        within &= ours["floor"][0] <= FLOOR_SECONDS
        print(f"{name:<14}{cells}  {'yes' if within else 'NO'}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
