"""What makes a step smaller in PyTorch (versus/pytorch_step.py), on the architectures of benchmarks/peers.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from versus.page import Section, Table, cut, mib, ratio

SCRIPT = Path(__file__).parent / "pytorch_step.py"


PARTS = "transformer", "ResNet"


def measure(part: str, python: str = sys.executable) -> dict[str, Any]:
    """Args: python: an interpreter that has PyTorch."""
    # Threads that wait do not spin: where others use the cores too, these would take what the others need.
    passive = os.environ | {"OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([python, str(SCRIPT), part], env=passive, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"PyTorch's steps failed; does {python} have the extra 'peers'?\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def present(found: dict[str, Any]) -> Section:
    lines, words = [], []
    for name, net in found.items():
        measured, version = net["lines"], net["torch"]
        base = measured[0]["peak_bytes"]
        for line in measured:
            share = cut(line["peak_bytes"], base)
            times = [ratio(line, clock) for clock in ("clock", "cpu")]
            lines.append(
                [name, line["label"], mib(line["peak_bytes"]), f"{-100 * share:+.1f}%" if share else "", *times]
            )
            if share:
                words.append(f"{name}, {line['label']}: {-100 * share:+.0f}% at {line['clock_ratio']:.2f}")
    return Section(
        "PyTorch on the same architectures",
        "none: these are what users have there",
        "; ".join(words),
        f"PyTorch {version} for CPUs; each ratio is to PyTorch's own step, whose kernels and buffers are "
        "others than TensorFlow's; OpenMP's threads wait without spinning; save_on_cpu's copies go where PyTorch does "
        "not count them",
        [Table("", ("net", "form", "peak, MiB", "memory", "time, clock", "time, CPU"), lines)],
        notes=["The same nets in TensorFlow, with tfswap and published policies, are the row solvers."],
    )
