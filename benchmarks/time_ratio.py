"""Are predicted step times true? Predicted against measured time of a planned step over the unoptimised one.

    python benchmarks/time_ratio.py                            # VGG16 and a transformer, some minutes on two cores
    python benchmarks/time_ratio.py resnet --limits 80 60 --steps 15

Each model runs in a process of its own, on TensorFlow's BFC allocator. The unoptimised step (once as TensorFlow runs
it, once without its memory optimizer, as it is planned) and the planned ones take turns, so that whatever else the
machine does slows all of them alike; the ratio is that of the medians. Predicted is what `report().time_ratio` says,
with the analytic model and with a profile taken just before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import accuracy

from tfswap.support import progress


def child(name: str, limits: list[int], steps: int) -> dict[str, Any]:
    """Medians of all variants, in this process."""
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import memory_optimizer_off

    step, arguments = accuracy.MODELS[name]()
    plain, bare = tf.function(step), tf.function(step)

    def repeatable() -> Any:
        with memory_optimizer_off():
            return bare(*arguments)

    profile = tfswap.profile(plain, *arguments, steps=5)
    calls: dict[str, Any] = {"plain": lambda: plain(*arguments), "memory optimizer off": repeatable}
    predicted: dict[str, list[float]] = {}
    for limit in limits:
        made = tfswap.optimize(tf.function(step), memory_limit=f"{limit}%", profile=profile)
        calls[f"{limit}%"] = lambda made=made: made(*arguments)
        made(*arguments)
        analysed = tfswap.optimize(tf.function(step), memory_limit=f"{limit}%", mode="analyze")
        analysed.get_concrete_function(*arguments)
        predicted[f"{limit}%"] = [analysed.report().time_ratio, made.report().time_ratio]
    taken: dict[str, list[float]] = {label: [] for label in calls}
    for n in range(steps + 1):
        for label, call in calls.items():
            started = time.perf_counter()
            call().numpy()
            if n:  # the first of each is a warm-up
                taken[label].append(time.perf_counter() - started)
    medians = {label: statistics.median(seconds) for label, seconds in taken.items()}
    return {
        "medians_s": medians,
        "predicted": predicted,
        "rates": vars(profile.rates),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["vgg", "transformer"], help=f"of {', '.join(accuracy.MODELS)}")
    parser.add_argument("--limits", type=int, nargs="*", default=[80, 60], help="per cent of the unoptimised peak")
    parser.add_argument("--steps", type=int, default=15, help="steps of each variant")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.models[0], args.limits, args.steps)))
        return
    environment = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(accuracy.ARENA_MIB),
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TFSWAP_PLAN_CACHE": "off",
    }
    for name in progress.over("models", args.models):
        command = [
            sys.executable,
            __file__,
            name,
            "--child",
            f"--steps={args.steps}",
            "--limits",
            *map(str, args.limits),
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name}: a run failed\n{done.stderr[-3000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        plain, bare = found["medians_s"]["plain"], found["medians_s"]["memory optimizer off"]
        print(f"{name}: {plain:.3f} s a step, {bare:.3f} s without memory optimizer; {found['rates']}")
        for label, (analytic, profiled) in found["predicted"].items():
            measured = found["medians_s"][label]
            print(
                f"  {label:<6} measured x{measured / plain:.2f} (x{measured / bare:.2f} of that), "
                f"predicted x{analytic:.2f} analytic, x{profiled:.2f} profiled",
                flush=True,
            )


if __name__ == "__main__":
    main()
