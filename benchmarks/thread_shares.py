"""Could concurrent kernels make a step faster? Shares of a step's CPU time by thread, with kernels one after another.

    python benchmarks/thread_shares.py                          # four nets, with oneDNN's kernels and without
    python benchmarks/thread_shares.py transformer --steps 12

TensorFlow's executor has one thread here, so that no two kernels overlap. That thread runs what a kernel does not share
out, and small kernels; the intra-op threads run the rest. The step takes at least the executor's share and the largest
other one; were all kernels perfectly concurrent, it would take the total divided by the cores. The ratio of the two is
the most that concurrent kernels can gain. CPU times hardly depend on other programs.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from papers.harness.peer_nets import MODELS, make_step
from step_times import in_child

from tfswap.support import progress

WARM_UP = 3
EXECUTOR = "tf_Compute"
"""The name of the thread that runs an executor's kernels."""


def cpu_seconds() -> dict[str, tuple[str, float]]:
    """The name of each thread of this process and its CPU time, by number."""
    found: dict[str, tuple[str, float]] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            nanoseconds = int((task / "schedstat").read_text().split()[0])
            found[task.name] = (task / "comm").read_text().strip(), nanoseconds * 1e-9
        except OSError:  # it has ended
            continue
    return found


def child(name: str, steps: int) -> list[float]:
    """CPU seconds of a step: of the executor's thread, and of the others, the largest first."""
    import tensorflow as tf

    from tfswap.exporters.function import memory_optimizer_off

    model = MODELS[name]()
    step = tf.function(make_step(model))
    with memory_optimizer_off():
        for _ in range(WARM_UP):
            step(*model.arguments)
        before = cpu_seconds()
        for _ in range(steps):
            step(*model.arguments).numpy()
        after = cpu_seconds()
    taken = [(kind, (seconds - before.get(task, ("", 0.0))[1]) / steps) for task, (kind, seconds) in after.items()]
    executor = sum(seconds for kind, seconds in taken if kind == EXECUTOR)
    return [executor, *sorted((seconds for kind, seconds in taken if kind != EXECUTOR), reverse=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", default=[*MODELS], metavar="NET", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.nets[0], args.steps)))
        return
    cores = len(os.sched_getaffinity(0))
    print("| net | kernels | CPU time, ms | executor | largest other | concurrent over serial, at best |")
    print("|---|---|---|---|---|---|")
    for name in progress.over("nets", args.nets):
        for onednn in (True, False):
            words = f"--steps={args.steps}"
            executor, largest, *others = in_child(__file__, name, words, onednn=onednn, TF_NUM_INTEROP_THREADS="1")
            total = executor + largest + sum(others)
            print(
                f"| {name} | {'oneDNN' if onednn else 'plain'} | {total * 1e3:.0f} | {executor / total:.2f} | "
                f"{largest / total:.2f} | {total / cores / (executor + largest):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
