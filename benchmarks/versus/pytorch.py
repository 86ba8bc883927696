"""What makes a step smaller in PyTorch (versus/pytorch_step.py), on the architectures of benchmarks/peers.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from versus import peers as tensorflow
from versus.page import Plot, Section, Series, Table, cut, mib, ratio

SCRIPT = Path(__file__).parent / "pytorch_step.py"


PARTS = "transformer", "ResNet"
BESIDE = ("peers",)
SAME = {"transformer": "transformer", "ResNet": "resnet"}
"""The same nets in the row peers."""


def measure(part: str, python: str = sys.executable) -> dict[str, Any]:
    """Args: python: an interpreter that has PyTorch."""
    # Threads that wait do not spin: where others use the cores too, these would take what the others need.
    passive = os.environ | {"OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([python, str(SCRIPT), part], env=passive, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"PyTorch's steps failed; does {python} have the extra 'peers'?\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def present(found: dict[str, Any], peers: dict[str, Any] | None = None) -> Section:
    """Args: peers: figures of that row, whose tfswap is set beside PyTorch."""
    lines, words, against, plots = [], [], [], []
    version = ""
    for name, net in found.items():
        measured, version = net["lines"], net["torch"]
        base = measured[0]["peak_bytes"]
        for line in measured:
            share = cut(line["peak_bytes"], base)
            times = [ratio(line, clock) for clock in tensorflow.CLOCKS]
            lines.append(
                [name, line["label"], mib(line["peak_bytes"]), f"{-100 * share:+.1f}%" if share else "", *times]
            )
            if share:
                words.append(f"{name}, {line['label']}: {-100 * share:+.0f}% at {line['clock_ratio']:.2f}")
        rows = (peers or {}).get(SAME[name])
        if rows:
            others = tensorflow.points(rows)
            against += [[name, *line] for line in _against(measured, others)]
            plots.append(_plot(name, measured, others))
    tables = [Table("", ("net", "form", "peak, MiB", "memory", "time, clock", "time, CPU"), lines)]
    notes = ["The same nets in TensorFlow, with tfswap and published policies, are the rows peers and solvers."]
    if against:
        title = (
            "Beside tfswap's largest peak of the row peers that is no larger, each relative to its own framework's "
            "unoptimised step:"
        )
        tables.append(Table(title, AGAINST, against))
        notes += _verdicts(against)
    return Section(
        "PyTorch on the same architectures",
        "none: these are what users have there",
        "; ".join(words),
        f"PyTorch {version} for CPUs; each ratio is to PyTorch's own step, whose kernels and buffers are "
        "others than TensorFlow's; OpenMP's threads wait without spinning; save_on_cpu's copies go where PyTorch does "
        "not count them",
        tables,
        plots,
        notes,
    )


AGAINST = (
    "net",
    "PyTorch's form",
    "memory",
    "time, clock",
    "CPU",
    "tfswap's memory",
    "time, clock",
    "CPU",
    "faster by the clock",
    "faster by CPU",
)
NONE = "not measured so low"


def _against(measured: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[list[str]]:
    """Each of PyTorch's forms, and what tfswap was measured at with no more memory; nothing is interpolated."""
    base, made = measured[0]["peak_bytes"], []
    for line in measured[1:]:
        memory = line["peak_bytes"] / base
        told = [
            line["label"],
            f"{100 * (memory - 1):+.1f}%",
            *(f"{line[f'{clock}_ratio']:.2f}" for clock in tensorflow.CLOCKS),
        ]
        below = [one for one in others if one["ours"] and one["memory"] <= memory]
        ours = max(below, key=lambda one: (one["memory"], one["cpu_ratio"]), default=None)  # of equals the slower
        if ours is None:
            made.append([*told, NONE, "", "", "", ""])
            continue
        told += [
            f"{100 * (ours['memory'] - 1):+.1f}%",
            *(f"{ours[f'{clock}_ratio']:.2f}" for clock in tensorflow.CLOCKS),
        ]
        made.append(told + [_faster(ours[f"{clock}_ratio"], line[f"{clock}_ratio"]) for clock in tensorflow.CLOCKS])
    return made


def _faster(ours: float, theirs: float) -> str:
    if max(ours, theirs) <= tensorflow.LEVEL * min(ours, theirs):
        return tensorflow.EVEN
    return "tfswap" if ours < theirs else "PyTorch"


def _verdicts(against: list[list[str]]) -> list[str]:
    """By net, who is faster by CPU time at what memory."""
    verbs = {"PyTorch": "PyTorch is faster with", "tfswap": "tfswap is faster than", tensorflow.EVEN: "level are"}
    notes = []
    for name in dict.fromkeys(line[0] for line in against):
        told = []
        for who, verb in verbs.items():
            which = [
                f"{line[1]} ({line[2]} at {line[4]}; tfswap {line[5]} at {line[7]})"
                for line in against
                if (line[0], line[-1]) == (name, who)
            ]
            told += [f"{verb} {', '.join(which)}"] * bool(which)
        if low := [line[1] for line in against if line[0] == name and NONE in line]:
            told.append(f"tfswap was not measured as low as {', '.join(low)} (its floor is in the row solvers)")
        notes.append(
            f"{name}, by CPU time, each over its own unoptimised step, level within {tensorflow.LEVEL - 1:.0%}: "
            f"{'; '.join(told)}."
        )
    return notes


def _plot(name: str, measured: list[dict[str, Any]], others: list[dict[str, Any]]) -> Plot:
    """tfswap's curve, its peers in TensorFlow, and PyTorch, each over its own framework's unoptimised step."""
    base = measured[0]["peak_bytes"]
    series = tensorflow.series_of(others)
    for line in measured[1:]:
        series.append(Series(f"PyTorch, {line['label']}", [(line["peak_bytes"] / base, line["cpu_ratio"])]))
    title = f"{name}: tfswap, its peers in TensorFlow, and PyTorch"
    axes = "peak over its own framework's unoptimised", "step CPU time over its own framework's unoptimised"
    return Plot(f"pytorch_{name.lower()}", title, *axes, series)
