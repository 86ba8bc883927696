"""Published policies as solvers in tfswap's own engine, compared with tfswap's own curve of memory and time.

The policies choose what is swapped or recomputed (planner/solvers/published.py, planner/solvers/meng.py); orders, the
allocator's simulation, the rewriting and the runtime are tfswap's. Each runs at the smallest cap that it reaches, and
tfswap under the peak that it was then measured at.
"""

from __future__ import annotations

from typing import Any

from papers.harness.page import (
    FORM_COLUMNS,
    Comparison,
    Section,
    Table,
    against_published,
    form_lines,
    memory_time,
    mib,
    ratio,
)
from papers.harness.standing import CLOCKS, OVERLAP, UNREACHED, as_comparison, counted, of_lines
from papers.harness.turns import CHECKPOINTS, REFERENCE, UNOPTIMISED, Form, compare

NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("peer", {"name": "transformer"}),
    "ResNet": ("peer", {"name": "resnet"}),
}
POLICIES = {
    "vdnn_all": ("vDNN, all", ("swap",)),
    "vdnn_conv": ("vDNN, contractions", ("swap",)),
    "meng": ("Meng et al.", ("swap",)),
    "sqrt": ("sqrt(n) checkpoints", ("recompute",)),
    "superneurons": ("SuperNeurons, recomputation", ("recompute",)),
}
SHARES = (0.80, 0.65)
"""Limits of the curve above the policies' peaks, of the unoptimised peak."""
ROUNDS = 9
PARTS = tuple(NETS)


def measure(part: str) -> dict[str, Any]:
    net, size = NETS[part]
    peers = [CHECKPOINTS]
    peers += [Form(label, tactics=tactics, solver=policy) for policy, (label, tactics) in POLICIES.items()]
    forms = [UNOPTIMISED, REFERENCE, *peers]
    forms += [Form(f"tfswap, {share:.0%}", limit=share) for share in SHARES]
    forms += [Form(f"tfswap as {peer.label}", peak_of=peer.label) for peer in peers]
    forms.append(Form("tfswap, its floor"))
    return {"rounds": ROUNDS, "lines": compare(net, size, forms, rounds=ROUNDS, arena_mib=2000, onednn=True)}


def present(found: dict[str, Any]) -> Section:
    tables, plots, words, brief = [], [], [], []
    by_clock: list[str] = []
    comparisons: list[Comparison] = []
    for name, net in found.items():
        lines = net["lines"]
        tables.append(Table(f"{name}, {net['rounds']} rounds:", FORM_COLUMNS, form_lines(lines)))
        plots.append(memory_time(f"solvers_{name.lower()}", f"{name}: published policies and tfswap", lines))
        by_label = {line["label"]: line for line in lines}
        pairs = [(by_label[line["peak_of"]], line) for line in lines if line["peak_of"]]
        tables.append(Table(f"{name}: tfswap at each one's peak:", COMPARED, [_compared(*pair) for pair in pairs]))
        lowest = mib(by_label["tfswap, its floor"]["peak_bytes"])
        least = mib(min(line["peak_bytes"] for line, _ in pairs if line["fits"]))
        found_at = [[_standing(*pair, clock) for pair in pairs] for clock in CLOCKS]
        reported = " and ".join(f"by {word} {counted(which)}" for word, which in zip(WORDS, found_at, strict=True))
        brief.append(f"{name} {lowest} MiB, theirs {least} at least")
        by_clock += found_at[0]
        lows = [line["peak_bytes"] for line, _ in pairs if line["fits"]]
        floor_bytes = by_label["tfswap, its floor"]["peak_bytes"]
        comparisons.append(against_published(f"{name}, lowest peak", min(lows) / floor_bytes))
        comparisons += [
            as_comparison(
                f"{name}, time by the clock at the peak of {policy['label']}",
                of_lines(ours, policy, CLOCKS[0]) if ours["fits"] else None,
                reached=ours["fits"],
            )
            for policy, ours in pairs
        ]
        words.append(
            f"{name}: tfswap comes to {lowest} MiB, the others to {least} at least; at their peaks it is {reported}"
        )
    words.append(OVERLAP)
    return Section(
        "Published policies in the same engine",
        "their own figures are of other frameworks and machines: here only their choices are compared",
        "; ".join(words),
        "policies are re-implemented; copies are those of tfswap's runtime; each policy runs at the lowest limit that "
        "it reaches. A CPU with oneDNN's kernels",
        tables,
        plots,
        comparisons=comparisons,
        brief=f"lowest peaks: {'; '.join(brief)}; by the clock at their peaks {counted(by_clock)}",
    )


WORDS = "the clock", "CPU"
COMPARED = (
    "policy",
    "its peak, MiB",
    "time, clock",
    "time, CPU",
    "tfswap's peak, MiB",
    "time, clock",
    "time, CPU",
    "tfswap's over the policy's, clock",
    "CPU",
    "tfswap is, by the clock",
    "by CPU",
)


def _compared(policy: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """A policy, and tfswap under its peak."""
    line = [policy["label"], *_figures(policy), *_figures(ours)]
    if not ours["fits"]:
        return [*line, "", "", UNREACHED, UNREACHED]
    line += [of_lines(ours, policy, clock).reported for clock in CLOCKS]
    return [*line, *(_standing(policy, ours, clock) for clock in CLOCKS)]


def _standing(policy: dict[str, Any], ours: dict[str, Any], clock: str) -> str:
    return of_lines(ours, policy, clock).standing if ours["fits"] else UNREACHED


def _figures(line: dict[str, Any]) -> list[str]:
    if not line["fits"]:
        return ["", "", ""]
    return [mib(line["peak_bytes"]), *(ratio(line, clock) for clock in CLOCKS)]
