"""What prefetching saves a backward loop: a step that swaps what its loop saves, with each element's copy back
started in the iteration before, and without.

    python benchmarks/prefetch.py                # a while_loop and an LSTM layer, each in a process of its own
    python benchmarks/prefetch.py lstm

Both steps have one plan but for that and take turns in one process, over links of several rates: a throttled copy takes
as long as the link, and no more of the cores than any other. Medians of the rounds; `ratio` is the median of their
ratios, `stalled_s` what kernels wait for copies. Each step's peak is planned and measured with the other's constants.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

LINKS = (None, 2e9, 1e9, 5e8)
ROUNDS = 6
ARENA = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "1900", "TF_CPP_MIN_LOG_LEVEL": "2"}


def while_loop() -> tuple[Any, Any]:
    import tensorflow as tf

    w = tf.Variable(0.05 * tf.random.stateless_normal([512, 512], seed=(0, 7)))

    def forward(x: Any) -> Any:
        return tf.while_loop(lambda i, h: i < 16, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, x], maximum_iterations=16)[
            1
        ]

    return _trained(forward, [w]), tf.random.stateless_normal([2048, 512], seed=(1, 2))


def lstm() -> tuple[Any, Any]:
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layer = keras.layers.LSTM(128, use_cudnn=False)
    x = tf.random.stateless_normal([1024, 16, 128], seed=(1, 2))
    layer(x[:1])
    return _trained(layer, layer.trainable_variables), x


def _trained(forward: Any, variables: Any) -> Any:
    import tensorflow as tf

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(forward(x) ** 2)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.01 * tf.convert_to_tensor(gradient))
        return loss

    return step


def child(name: str) -> dict[str, Any]:
    import tensorflow as tf

    import tfswap
    from tfswap import ops

    step, x = CASES[name]()
    limit = tfswap.optimize(tf.function(step), memory_limit="60%", tactics=("swap",))
    limit(x)
    plan = limit.plan()
    plans = {"ahead": plan.accumulators, "behind": ()}
    steps: dict[str, Any] = {}
    peaks: dict[str, Any] = {}
    for which, prefetched in plans.items():
        given = dataclasses.replace(plan, prefetched=prefetched, limit_bytes=None)
        steps[which] = tfswap.optimize(tf.function(step), plan=given, tactics=("swap",))
        steps[which](x)
        tf.config.experimental.reset_memory_stats("CPU:0")
        steps[which](x)
        measured = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        peaks[which] = {"planned": steps[which].plan().planned_peak_bytes, "measured": measured}
    links: list[dict[str, Any]] = []
    for link in LINKS:
        ops.configure(bandwidth_bytes_per_s=link)
        taken: dict[str, list[float]] = {which: [] for which in steps}
        stalled: dict[str, list[float]] = {which: [] for which in steps}
        for number in range(ROUNDS):
            for which in sorted(steps, reverse=bool(number % 2)):
                started = time.perf_counter()
                steps[which](x).numpy()
                taken[which].append(time.perf_counter() - started)
                stalled[which].append(steps[which].stats().stalled_s)
        ratio = statistics.median(a / b for a, b in zip(taken["ahead"], taken["behind"], strict=True))
        medians = {
            which: {
                "s": round(statistics.median(taken[which]), 3),
                "stalled_s": round(statistics.median(stalled[which]), 3),
            }
            for which in steps
        }
        links.append({"bytes_per_s": link, **medians, "ratio": round(ratio, 3)})
    return {"case": name, "lists": len(plan.accumulators), "peaks": peaks, "links": links}


CASES = {"while_loop": while_loop, "lstm": lstm}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2])))
        return
    for name in sys.argv[1:] or CASES:
        command = [sys.executable, __file__, "--child", name]
        made = subprocess.run(command, env={**os.environ, **ARENA}, check=True, stdout=subprocess.PIPE, text=True)
        print(json.dumps(json.loads(made.stdout.splitlines()[-1]), indent=1))


if __name__ == "__main__":
    main()
