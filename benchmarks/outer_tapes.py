"""Tapes outside of the decorated function, and the same tapes inside of it.

    python benchmarks/outer_tapes.py [--share 60%]

A step of eight layers whose derivatives are taken by a persistent tape, by nested tapes (a gradient penalty), by
`tape.jacobian`, by a forward accumulator, and by a tape inside of another `tf.function`. "outside": only the forward
function is decorated. "inside": the whole step is. The limit is a share of the predicted peak: outside of that with
one tape that asks once, inside of the whole step's. "-": not planned. Peaks are in MiB. Each run has a process and an
arena of its own. Values are compared with those of the same step as it is, without
Grappler's memory optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

ROWS, WIDTH, LAYERS = 4096, 64, 8
OUTPUTS = 4
PLACES = "plain", "outside", "traced", "inside"
"""The tape outside of a function as it is, of a decorated one; inside of these."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", default="60%")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is not None:
        print(json.dumps(run(*options.run, options.share)))
        return
    one = "as it is", "limit", "decorated"
    heads = "tape", *(f"outside: {each}" for each in one), *(f"inside: {each}" for each in one), "same bits, both"
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for kind in KINDS:
        plain, outside, traced, inside = (start(kind, where, options.share) for where in PLACES)
        figures = [(one["peak"], two["limit"], two["peak"]) for one, two in ((plain, outside), (traced, inside))]
        mib = ["-" if nbytes is None else f"{nbytes / (1 << 20):.1f}" for each in figures for nbytes in each]
        same = [outside["digest"] == plain["digest"], inside["digest"] == traced["digest"]]
        words = [kind.replace("_", " "), *mib, ", ".join("yes" if each else "no" for each in same)]
        print(f"| {' | '.join(words)} |", flush=True)


def start(kind: str, where: str, share: str) -> dict[str, Any]:
    """One run in a process of its own."""
    environment = {
        **os.environ,
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TFSWAP_PLAN_CACHE": "off",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = [sys.executable, __file__, "--share", share, "--run", kind, where]
    made = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(made.stdout.splitlines()[-1])


def run(kind: str, where: str, share: str) -> dict[str, Any]:
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import memory_optimizer_off

    with memory_optimizer_off():
        weights = [tf.Variable(0.1 * tf.random.stateless_normal([WIDTH, WIDTH], (i, 1))) for i in range(LAYERS)]
        x = tf.random.stateless_normal([ROWS, WIDTH], (9, 9))

        def forward(h: Any) -> Any:
            for weight in weights:
                h = tf.nn.tanh(h @ weight)
            return tf.reduce_mean(h, axis=0)[:OUTPUTS]

        if where == "outside":
            forward = tfswap.optimize(tf.function(forward), memory_limit=share)
        elif where == "plain":
            forward = tf.function(forward)

        def derived(h: Any) -> Any:
            return KINDS[kind](forward, h, weights)

        step: Any = derived
        if where == "inside":
            step = tfswap.optimize(tf.function(derived), memory_limit=share)
        elif where == "traced" or kind == "another_function":
            step = tf.function(derived)
        results = step(x)
        digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in tf.nest.flatten(results))).hexdigest()
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    limit = None
    if where in ("inside", "outside"):
        with contextlib.suppress(tfswap.TfswapError):  # not planned
            limit = (step if where == "inside" else forward).report().memory_limit_bytes
    return {"peak": peak, "limit": limit, "digest": digest}


def persistent(forward: Any, x: Any, weights: Any) -> Any:
    import tensorflow as tf

    with tf.GradientTape(persistent=True) as tape:
        y = forward(x)
        losses = tf.reduce_sum(y), tf.reduce_sum(y * y)
    return [tape.gradient(loss, weights) for loss in losses]


def nested(forward: Any, x: Any, weights: Any) -> Any:
    import tensorflow as tf

    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(forward(x))
        penalty = tf.reduce_sum(inner.gradient(loss, x) ** 2)
    return outer.gradient(penalty, weights)


def jacobian(forward: Any, x: Any, weights: Any) -> Any:
    import tensorflow as tf

    with tf.GradientTape(persistent=True) as tape:
        y = forward(x)
    return tape.jacobian(y, weights[0])


def forward_accumulator(forward: Any, x: Any, weights: Any) -> Any:
    import tensorflow as tf

    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        y = forward(x)
    return accumulator.jvp(y)


def another_function(forward: Any, x: Any, weights: Any) -> Any:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(forward(x))
    return tape.gradient(loss, weights)


KINDS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (persistent, nested, jacobian, forward_accumulator, another_function)
}

if __name__ == "__main__":
    main()
