"""Is the predicted range of the unoptimised peak the range of its runs? For the nets of the headlines, and others.

    python benchmarks/peak_ranges.py                               # all nets, hours on two cores
    python benchmarks/peak_ranges.py --list                        # their names
    python benchmarks/peak_ranges.py "AlexNet, 227x227, batch 32" scan --runs 5
    python benchmarks/peak_ranges.py --json ranges.json            # adds nets to the figures of this file
    python benchmarks/peak_ranges.py --json ranges.json --table    # only prints its tables

Each run is a process of its own, one at a time, which takes three steps in an arena that starts as one free region;
measured is the allocator's peak. "off" is the end of the predicted range over that of the measured one. Nets of the
headlines are those of "kinds" (benchmarks/papers/kinds.py); the others have loops, conditionals, derivatives of a
second order, and gradients that are taken outside of the function.

The last lines are the measures of xMem (Shi et al., 2025), for runs as TensorFlow has them and for planned ones: the
median relative error of the prediction, and the share of runs for which it is a safe threshold, which they do not pass.
The threshold of an unoptimised step is the upper end of its range, and that of a planned one is its plan's peak.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfswap.support import progress

TESTS = Path(__file__).resolve().parent.parent / "tests"
MIB = 2**20
STEPS = 3
NEAR = 0.05
LIMIT = "70%"
OUTSIDE = "gradients outside"
KINDS = ("hvp", "gp", "accum_cond", "map_fn_grad", "scan_ssm", "switch_experts")
PROGRAMS = ("scan", "cond", "while_loop", "slopes", "conditional_update", "map_fn")
ARENAS_MIB = {"net": 16000, "kind": 4000, "program": 512, "outside": 2048}


class Step(NamedTuple):
    """A step: a function, its arguments, and what runs it once."""

    function: Any
    arguments: Sequence[Any]
    run: Callable[[Any], None]


def steps() -> dict[str, str]:
    """The kind of each step, by its name."""
    from papers.kinds import NETS

    return {
        **dict.fromkeys(NETS, "net"),
        **dict.fromkeys(KINDS, "kind"),
        **dict.fromkeys(PROGRAMS, "program"),
        OUTSIDE: "outside",
    }


def built(name: str, kind: str) -> Step:
    """A step, in an arena that starts as one free region."""
    import keras

    if kind == "outside":
        return _outside()
    if kind == "program":
        programs, models = (importlib.import_module(module) for module in ("control_flow", "models"))
        models.settle()
        keras.utils.set_random_seed(0)
        _, made, arguments = programs.PROGRAMS[name]()
    else:
        from papers.harness.turns import settled
        from papers.kinds import NETS

        net, size = NETS[name] if kind == "net" else ("kind", {"name": name})
        made, arguments = settled(net, size, ARENAS_MIB[kind])
    return Step(made, arguments, lambda function: function(*arguments))


def _outside() -> Step:
    """The forward pass of a residual net; the tape and the optimizer are outside of it."""
    import keras
    import tensorflow as tf
    from outside_gradients import residual_net

    region = tf.zeros([(ARENAS_MIB["outside"] - 256) << 20], tf.uint8)
    del region
    keras.utils.set_random_seed(0)
    model = residual_net(64)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(model.trainable_variables)
    x = tf.random.stateless_normal([32, 64, 64, 3], seed=(1, 2))
    y = tf.random.stateless_uniform([32], seed=(3, 4), maxval=10, dtype=tf.int32)

    def run(function: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=function(x)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return Step(lambda x: model(x, training=True), (x,), run)


def measured(name: str, kind: str) -> int:
    """The peak of one run as TensorFlow has it."""
    import tensorflow as tf

    step = built(name, kind)
    return _peak_bytes(step, tf.function(step.function))


def _peak_bytes(step: Step, function: Any) -> int:
    import tensorflow as tf

    tf.config.experimental.reset_memory_stats("CPU:0")
    for _ in range(STEPS):
        step.run(function)
    return tf.config.experimental.get_memory_info("CPU:0")["peak"]


def planned(name: str, kind: str) -> dict[str, Any]:
    """The prediction, and a run under a limit, where it is not refused."""
    import tensorflow as tf

    import tfswap

    step = built(name, kind)
    analysed = tfswap.optimize(tf.function(step.function), memory_limit="100%", mode="analyze")
    if kind == "outside":
        step.run(analysed)
    else:
        analysed.get_concrete_function(*step.arguments)
    report = analysed.report()
    found: dict[str, Any] = {
        "lowest_bytes": report.baseline.lowest_bytes,
        "likely_bytes": report.baseline_peak_bytes,
        "highest_bytes": report.baseline.highest_bytes,
    }
    del analysed, report
    function = tfswap.optimize(tf.function(step.function), memory_limit=LIMIT)
    try:
        peak = _peak_bytes(step, function)
    except tfswap.InfeasibleMemoryLimit:
        return found
    return found | {"planned_bytes": function.report().planned_peak_bytes, "planned_run_bytes": peak}


def in_process(work: str, name: str, kind: str, *, onednn: bool) -> Any:
    """What a function of this module returns in a process of its own."""
    env = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ARENAS_MIB[kind]),
        "TF_ENABLE_ONEDNN_OPTS": str(int(onednn)),
        "TFSWAP_PLAN_CACHE": "off",
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TESTS), str(TESTS / "programs")]),
    }
    done = subprocess.run([sys.executable, __file__, "--child", work, name], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: a run failed\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, kind: str, runs: int, *, onednn: bool) -> dict[str, Any]:
    found = in_process("planned", name, kind, onednn=onednn)
    found["run_bytes"] = [
        in_process("measured", name, kind, onednn=onednn) for _ in progress.over(f"runs of {name}", range(runs))
    ]
    return found


WORK: dict[str, Callable[[str, str], Any]] = {"planned": planned, "measured": measured}


HEADS = ("step", "predicted, MiB", "likely", "measured, MiB", "median", "runs", "low end, off", "high end, off", "")


def row(name: str, found: dict[str, Any]) -> str:
    runs = found["run_bytes"]
    ends = found["lowest_bytes"] / min(runs), found["highest_bytes"] / max(runs)
    near = all(abs(end - 1) <= NEAR for end in ends)
    cells = (
        name,
        f"{found['lowest_bytes'] / MIB:.1f} to {found['highest_bytes'] / MIB:.1f}",
        f"{found['likely_bytes'] / MIB:.1f}",
        f"{min(runs) / MIB:.1f} to {max(runs) / MIB:.1f}",
        f"{statistics.median(runs) / MIB:.1f}",
        len(runs),
        *(f"{end - 1:+.1%}" for end in ends),
        "" if near else "OFF",
    )
    return f"| {' | '.join(map(str, cells))} |"


def xmem(figures: dict[str, dict[str, Any]]) -> list[str]:
    """xMem's measures: of unoptimised steps by the likely peak and by the upper end, and of planned ones."""
    plain = [(found, run) for found in figures.values() for run in found["run_bytes"]]
    plans = [
        (found["planned_bytes"], found["planned_run_bytes"]) for found in figures.values() if "planned_bytes" in found
    ]
    measures = {
        "unoptimised, the likely peak": [(found["likely_bytes"], run) for found, run in plain],
        "unoptimised, the upper end": [(found["highest_bytes"], run) for found, run in plain],
        f"planned for {LIMIT}": plans,
    }
    lines = ["| prediction | runs | median relative error | safe threshold |", "|---|---|---|---|"]
    for what, pairs in measures.items():
        if pairs:
            error = statistics.median(abs(predicted - run) / run for predicted, run in pairs)
            safe = sum(run <= predicted for predicted, run in pairs) / len(pairs)
            lines.append(f"| {what} | {len(pairs)} | {error:.2%} | {safe:.0%} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="all by default")
    parser.add_argument("--runs", type=int, default=10, help="runs of each step as TensorFlow has it")
    parser.add_argument("--onednn", action="store_true", help="leave oneDNN's kernels in")
    parser.add_argument("--json", type=Path, help="the file of figures: steps are added to those in it")
    parser.add_argument("--table", action="store_true", help="measure nothing, and print the tables of that file")
    parser.add_argument("--list", action="store_true", help="print the steps' names")
    parser.add_argument("--child", choices=WORK, help=argparse.SUPPRESS)
    args = parser.parse_args()
    known = steps()
    if unknown := [name for name in args.steps if name not in known]:
        parser.error(f"no step is named {unknown[0]!r}: see --list")
    if args.list:
        print("\n".join(known))
        return 0
    if args.child:
        (name,) = args.steps
        print(json.dumps(WORK[args.child](name, known[name])))
        return 0
    figures: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    print(f"| {' | '.join(HEADS)} |\n{'|---' * len(HEADS)}|", flush=True)
    names = list(figures) if args.table else args.steps or list(known)
    for name in progress.over("steps", names):
        if not args.table:
            figures[name] = measure(name, known[name], args.runs, onednn=args.onednn)
            if args.json:
                args.json.write_text(json.dumps(figures, indent=1) + "\n")
        print(row(name, figures[name]), flush=True)
    print("\n".join(["", *xmem({name: figures[name] for name in names})]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
