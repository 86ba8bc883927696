"""CPU offloading of a CNN's training (Hascoet et al. 2019): VGG19's memory against time, compared with checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from papers.harness.page import (
    FORM_COLUMNS,
    Section,
    Table,
    against_published,
    cut,
    form_lines,
    lowest_peak,
    memory_time,
    mib,
)
from papers.harness.turns import CHECKPOINTS, REFERENCE, UNOPTIMISED, Form, compare

SIZE = {"batch": 16, "size": 128}
ROUNDS = 7
SWAP = ("swap",)
KERNELS = {"oneDNN's kernels": True, "plain kernels": False}
CUT, SLOWER = 0.45, 1.08
"""What is to be cut, and what that may cost."""
PUBLISHED_CUT, PUBLISHED_TIME = 0.35, 1.21
SHARES = {True: (0.53, 0.50), False: (0.58, 0.55)}
"""Limits, by whether the kernels are oneDNN's, around that of the headline."""


PARTS = tuple(KERNELS)


def measure(part: str) -> dict[str, Any]:
    onednn = KERNELS[part]
    forms = [UNOPTIMISED, REFERENCE, CHECKPOINTS, Form("swapping alone, its floor", tactics=SWAP)]
    forms += [Form(f"all tactics, {share:.0%}", limit=share) for share in SHARES[onednn]]
    forms.append(Form("all tactics, their floor"))
    return {"size": SIZE, "lines": compare("vgg19", SIZE, forms, rounds=ROUNDS, onednn=onednn)}


def present(found: dict[str, Any]) -> Section:
    ours: list[str] = []
    brief: list[str] = []
    tables, plots, notes, comparisons = [], [], [], []
    for name, kernels in found.items():
        lines, size = kernels["lines"], kernels["size"]
        fitting = [line for line in lines if line["fits"] and line["how"] == "tfswap"]
        swap = next((line for line in fitting if tuple(line["tactics"]) == SWAP), None)
        bases = lines[0]["peak_bytes"], lowest_peak(lines[0]), next((line["baseline_bytes"] for line in fitting), 0)
        fast = [line for line in fitting if line is not swap and line["cpu_ratio"] <= SLOWER]
        best = min(fast, key=lambda line: line["peak_bytes"], default=None)
        reported = f"none at {SLOWER - 1:.0%} or less" if best is None else in_words(best, *bases)
        brief.append(f"{name}: {_short(best, *bases[:2])}")
        ours.append(f"{name}: all tactics {reported}" + (f"; swapping alone {in_words(swap, *bases)}" if swap else ""))
        tables.append(
            Table(
                f"Batch {size['batch']}, {size['size']}x{size['size']}, {name}, {ROUNDS} rounds:",
                FORM_COLUMNS,
                form_lines(lines),
            )
        )
        plots.append(memory_time(f"offloading_{'onednn' if KERNELS[name] else 'plain'}", f"VGG19, {name}", lines))
        peer = next(line for line in lines if line["how"] == "recompute_grad")
        beaten = [line for line in fitting if line["peak_bytes"] <= peer["peak_bytes"]]
        quick = min(beaten, key=lambda line: line["cpu_ratio"], default=None)
        verb = (
            "reached by none of these limits"
            if quick is None
            else (f"where tfswap ({quick['label']}) takes {quick['cpu_ratio']:.2f} in {mib(quick['peak_bytes'])} MiB")
        )
        every = [line for line in fitting if line is not swap]
        notes.append(_judged(f"{name}, all tactics", every, bases[0]))
        notes.append(_judged(f"{name}, all tactics, of the lowest peak of an unoptimised step", every, bases[1]))
        if swap:
            notes.append(_swapping(name, swap, bases[0]))
            saved = cut(swap["peak_bytes"], bases[0])
            comparisons += [
                against_published(f"{name}, cut of memory by swapping alone", saved / PUBLISHED_CUT),
                against_published(f"{name}, time by swapping alone", PUBLISHED_TIME / swap["clock_ratio"]),
            ]
        notes.append(
            f"{name}: checkpoints at VGG19's five stages peak at {mib(peer['peak_bytes'])} MiB and take "
            f"{peer['cpu_ratio']:.2f} of the CPU time, {verb}."
        )
    return Section(
        "CPU offloading: VGG19",
        f"memory -{PUBLISHED_CUT:.0%} at {PUBLISHED_TIME - 1:.0%} more time, by offloading (Hascoet et al. 2019)",
        "; ".join(ours),
        "a CPU's arena stands in for a GPU's memory; copies share the cores with kernels; smaller images; "
        "VGG19 without its fully connected layers, whose variables no tactic moves: ten classes behind a mean",
        tables,
        plots,
        notes,
        comparisons=comparisons,
        brief=f"all tactics: {'; '.join(brief)}" if brief else "",
    )


def _short(line: dict[str, Any] | None, base: int, lowest: int) -> str:
    if line is None:
        return f"none at {SLOWER - 1:.0%} or less"
    cuts = [f"-{cut(line['peak_bytes'], one):.0%}" for one in (base, lowest)]
    return f"{cuts[0]} ({cuts[1]} of the lowest unoptimised peak) at {line['clock_ratio']:.2f} of the time"


def _swapping(name: str, swap: dict[str, Any], base: int) -> str:
    """Swapping alone compared with the published offloading, which is swapping too."""
    saved = cut(swap["peak_bytes"], base)
    points = 100 * (saved - PUBLISHED_CUT)
    return (
        f"{name}: swapping alone, which is what the published figure is of, cuts {saved:.0%}, {abs(points):.0f} points "
        f"{'more' if points >= 0 else 'less'} than {PUBLISHED_CUT:.0%}, at {swap['clock_ratio']:.2f} of the time by "
        f"the clock and {swap['cpu_ratio']:.2f} of the CPU time, where {PUBLISHED_TIME:.2f} is published; of another "
        "machine and link."
    )


def _judged(name: str, lines: Sequence[dict[str, Any]], base: int) -> str:
    """Whether all tactics make the cut that is to be passed in the time that it may take, by each clock."""
    enough = [line for line in lines if cut(line["peak_bytes"], base) >= CUT]
    parts = []
    for clock, of in (("CPU time", "cpu"), ("time by the clock", "clock")):
        least = min((line[f"{of}_ratio"] for line in enough), default=None)
        met = least is not None and least <= SLOWER
        parts.append(f"{'met' if met else 'not met'} in {clock}" + ("" if least is None else f" ({least:.2f})"))
    return f"{name}: to be cut by {CUT:.0%} at no more than {SLOWER:.2f} of the time: {', '.join(parts)}."


def in_words(line: dict[str, Any], base: int, lowest: int, predicted: int) -> str:
    cuts = [f"{-100 * cut(line['peak_bytes'], one):+.0f}%" for one in (base, lowest, predicted)]
    return (
        f"{cuts[0]} ({cuts[1]} of the lowest unoptimised peak, {cuts[2]} of the predicted one) at "
        f"{line['cpu_ratio']:.2f} of the CPU time and "
        f"{line['clock_ratio']:.2f} by the clock"
    )
