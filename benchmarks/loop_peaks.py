"""Unoptimised peaks of steps with loops and conditionals: predicted over measured.

    python benchmarks/loop_peaks.py                    # all programs, about ten minutes on two cores
    python benchmarks/loop_peaks.py slopes scan --runs 9

The programs are those of tests/programs/control_flow.py. Each run is a process of its own, on TensorFlow's BFC
allocator, which trains three steps of the plain `tf.function`. The measured peak is the median of the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from tfswap.support import progress

TESTS = Path(__file__).resolve().parent.parent / "tests"
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "512",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TFSWAP_PLAN_CACHE": "off",
}
PROGRAMS = (
    "while_loop",
    "until_small",
    "nested",
    "overwritten",
    "slopes",
    "slopes_of_branches",
    "branches",
    "act",
    "scan",
    "map_fn",
    "gradients_of_examples",
    "ctc",
    "called",
    "cond",
    "skipped",
    "conditional_update",
    "lstm",
    "gru",
    "bidirectional",
    "attention",
    "loss_scale",
    "micro_batches",
    "pools_in_micro_batches",
    "dropout_in_loop",
    "recurrent_micro_batches",
    "steps_in_loop",
    "training_branch",
)
MIB = 2**20


def run(program: str, kind: str) -> dict[str, int]:
    """What tests/programs/control_flow.py prints."""
    command = [sys.executable, str(TESTS / "programs" / "control_flow.py"), program, kind]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{program}: a run failed\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; all by default")
    parser.add_argument("--runs", type=int, default=5, help="measured runs per program")
    args = parser.parse_args()
    print("| program | predicted, MiB | measured, MiB | lowest | highest | predicted / measured |")
    print("|---|---|---|---|---|---|", flush=True)
    for program in progress.over("programs", args.programs or PROGRAMS):
        predicted = run(program, "predicted")["baseline"]
        peaks = [run(program, "default")["peak"] for _ in range(args.runs)]
        measured = statistics.median(peaks)
        sizes = " | ".join(f"{nbytes / MIB:.2f}" for nbytes in (predicted, measured, min(peaks), max(peaks)))
        print(f"| `{program}` | {sizes} | {predicted / measured:.2f} |", flush=True)


if __name__ == "__main__":
    main()
