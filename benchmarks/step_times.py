"""Are predicted seconds of steps right? Predicted against measured, at the default rates and at the machine's own.

    python benchmarks/step_times.py                           # five nets, some minutes
    python benchmarks/step_times.py vgg resnet --onednn --runs 10

Each net runs in a process of its own, on one thread and on TensorFlow's BFC allocator, in the planner's order. Measured
is the process's CPU time of a step, the least of some, which depends on other work of the machine less than wall clock.
Predicted are the kernels' and launches' times with the default rates of a CPU, and with the calibration that is
measured just before (tfswap/device/calibration_kernels.py).
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

NETS = ("mlp", "vgg", "resnet", "transformer", "mobilenet")
OWN = {"TF_CPU_BFC_MEM_LIMIT_IN_MB": str(accuracy.ARENA_MIB), "TFSWAP_PLAN_CACHE": "off"}
"""The environment of its processes."""


def child(name: str, runs: int) -> dict[str, Any]:
    """Measured and predicted seconds of a net's step, in this process."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    import tfswap
    from tfswap.analysis.cost import Costs
    from tfswap.compiler import calibration
    from tfswap.compiler.compiler import Optimizer
    from tfswap.compiler.grappler import as_planned
    from tfswap.device import machine
    from tfswap.importers.function import import_function

    model = machine.current_device()[1]
    found = calibration.find(model, again=True)
    step, arguments = accuracy.MODELS[name]()
    concrete = tf.function(step).get_concrete_function(*arguments)
    flow = Optimizer(as_planned(import_function(concrete), concrete, model), model, keeps_results=True).flow
    predicted = [
        sum(s for s, is_kernel in zip(Costs.of(each).of_step(flow), flow.is_kernel, strict=True) if is_kernel)
        for each in (model, model._replace(calibration=found))
    ]
    os.environ[calibration.SWITCH] = "off"  # the same plan, whatever was measured
    ordered = tfswap.optimize(tf.function(step), memory_limit="95%")
    ordered(*arguments)
    taken: list[float] = []
    for _ in range(runs):
        started = time.process_time()
        tf.nest.map_structure(lambda t: t.numpy(), ordered(*arguments))
        taken.append(time.process_time() - started)
    return {"measured": min(taken), "predicted": predicted, "calibration": str(found)}


def in_child(script: str, name: str, *words: str, onednn: bool, **environment: str) -> Any:
    """What a benchmark's process for one net prints last, in JSON. Ends this process where that fails."""
    own = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_ENABLE_ONEDNN_OPTS": str(int(onednn))}
    command = [sys.executable, script, name, "--child", *words]
    done = subprocess.run(command, env=os.environ | own | environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: a run failed\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", default=NETS, metavar="NET", help=f"of {', '.join(accuracy.MODELS)}")
    parser.add_argument("--runs", type=int, default=8, help="steps, of which the fastest counts")
    parser.add_argument("--onednn", action="store_true", help="with oneDNN's kernels")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.nets[0], args.runs)))
        return
    off: list[list[float]] = [[], []]
    print("| net | measured, s | default rates, s | off | calibrated, s | off |\n|---|---|---|---|---|---|")
    for name in progress.over("nets", args.nets):
        found = in_child(__file__, name, f"--runs={args.runs}", onednn=args.onednn, **OWN)
        usual, own = (seconds / found["measured"] for seconds in found["predicted"])
        print(
            f"| {name} | {found['measured']:.3f} | {found['predicted'][0]:.3f} | {usual:.2f} | "
            f"{found['predicted'][1]:.3f} | {own:.2f} |",
            flush=True,
        )
        print(f"{name}: {found['calibration']}", file=sys.stderr)
        for each, ratio in zip(off, (usual, own), strict=True):
            each.append(max(ratio, 1 / ratio))
    print(
        "| geometric mean of the factors | | |"
        + " | |".join(f" {statistics.geometric_mean(e):.2f}" for e in off)
        + " |"
    )


if __name__ == "__main__":
    main()
