"""Published policies as solvers in tfswap's own engine, beside tfswap's own curve of memory and time.

The policies choose what is swapped or made again (planner/classics.py, planner/meng.py); orders, the allocator's
simulation, the rewriting and the runtime are tfswap's. Each runs at the smallest cap that it reaches. So that they are
compared under the same cap, tfswap's form with the largest peak that is no larger than a policy's stands beside it.
"""

from __future__ import annotations

from typing import Any

from versus.page import FORM_COLUMNS, Section, Table, form_lines, memory_time, mib
from versus.turns import CHECKPOINTS, FLOOR, REFERENCE, UNOPTIMISED, Form, compare

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
SHARES = (0.80, 0.65, 0.50, 0.35)
ROUNDS = 7
PARTS = tuple(NETS)


def measure(part: str) -> dict[str, Any]:
    net, size = NETS[part]
    forms = [UNOPTIMISED, REFERENCE, CHECKPOINTS]
    for policy, (label, tactics) in POLICIES.items():
        forms.append(Form(label, limit=FLOOR, tactics=tactics, solver=policy))
    forms += [Form(f"tfswap, {share:.0%}", limit=share) for share in SHARES]
    forms.append(Form("tfswap, its floor"))
    return {"rounds": ROUNDS, "lines": compare(net, size, forms, rounds=ROUNDS, arena_mib=2000)}


def present(found: dict[str, Any]) -> Section:
    tables, plots, words, notes = [], [], [], []
    for name, net in found.items():
        lines = net["lines"]
        tables.append(Table(f"{name}, {net['rounds']} rounds:", FORM_COLUMNS, form_lines(lines)))
        plots.append(memory_time(f"solvers_{name.lower()}", f"{name}: published policies and tfswap", lines))
        ours = [line for line in lines if line["how"] == "tfswap" and line["solver"] == "default" and line["fits"]]
        others = [line for line in lines if line["how"] == "tfswap" and line["solver"] != "default" and line["fits"]]
        under = [_under(ours, line) for line in others]
        tables.append(Table(f"{name}: tfswap at no more than each policy's own peak:", UNDER, under))
        lowest = min(ours, key=lambda line: line["peak_bytes"])
        beaten = [line["label"] for line in others if any(_beats(one, line) for one in ours)]
        least = mib(min((line["peak_bytes"] for line in others), default=None))
        words.append(
            f"{name}: tfswap comes to {mib(lowest['peak_bytes'])} MiB, the policies to {least} at least; no more "
            f"memory and no more time than {len(beaten)} of {len(others)} of them"
        )
        if unmet := [line["label"] for line in others if line["label"] not in beaten]:
            notes.append(
                f"{name}: at no limit that was measured here does tfswap take both less memory and less CPU time than "
                f"{', '.join(unmet)}: where its peak is at most theirs, they are faster."
            )
    return Section(
        "Published policies in the same engine",
        "their own figures are of other frameworks and machines: here only their choices are compared",
        "; ".join(words),
        "policies are re-implemented; copies are those of tfswap's runtime; each policy runs at its own lowest limit, "
        "which is the cap that it is compared under: tfswap's form with the largest peak at or below it stands beside "
        "it, and nothing is interpolated",
        tables,
        plots,
        notes,
    )


UNDER = (
    "policy",
    "its peak, MiB",
    "time, clock",
    "CPU",
    "tfswap's form",
    "its peak, MiB",
    "time, clock",
    "CPU",
    "tfswap's over the policy's, clock",
    "CPU",
)


def _under(ours: list[dict[str, Any]], policy: dict[str, Any]) -> list[str]:
    """A policy, and tfswap's form with the largest peak that is no larger."""
    line = [policy["label"], *_figures(policy)]
    below = [one for one in ours if one["peak_bytes"] <= policy["peak_bytes"]]
    best = max(below, key=lambda one: one["peak_bytes"], default=None)
    if best is None:
        return [*line, "none", "", "", "", "", ""]
    over = [f"{best[f'{clock}_ratio'] / policy[f'{clock}_ratio']:.2f}" for clock in ("clock", "cpu")]
    return [*line, best["label"], *_figures(best), *over]


def _figures(line: dict[str, Any]) -> list[str]:
    return [mib(line["peak_bytes"]), f"{line['clock_ratio']:.2f}", f"{line['cpu_ratio']:.2f}"]


def _beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["peak_bytes"] <= other["peak_bytes"] and one["cpu_ratio"] <= other["cpu_ratio"]
