"""What each tactic adds, and what each part of swapping is good for.

Tactics one by one: order alone, with swaps, with kernels that run again, with encodings; each at the smallest limit
that it reaches. Parts, switched off in turn under one limit, each by other figures in a plan that is the same
otherwise, which is carried out as plans from files are:

    no prefetch          a copy in starts where its tensor is read, and not before: prefetch distance 0
    no trigger           a buffer is let go where its copy out starts, so that the step waits for the copy
    one kernel ahead     copies in start one kernel before the reader, as vDNN has it
    four copy threads    a lane in each direction has four threads where it has one otherwise

Back-pressure itself can't be switched off: without it a buffer would be let go while it is copied. Nor can the pool: it
has no switch, and none is made for a benchmark. The tensor cache (a smaller batch keeps what has room) is a plan of its
own for sizes that recur; tests/test_cache.py measures it by the traffic that it saves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from versus.page import FORM_COLUMNS, Section, Table, form_lines
from versus.turns import FLOOR, REFERENCE, UNOPTIMISED, Form, compare

from tfswap.planner.plan import Absence, Plan

NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet": ("peer", {"name": "resnet"}),
    "transformer": ("peer", {"name": "transformer"}),
}
LIMIT = 0.5
SWAPS = f"swaps, {LIMIT:.0%}"
STEPWISE = {
    "order alone": (),
    "and swaps": ("swap",),
    "and recomputation": ("swap", "recompute"),
    "and encodings": ("swap", "recompute", "encode"),
}


def _edited(change: Callable[[Absence], Absence]) -> Callable[[Plan], Plan]:
    def edit(plan: Plan) -> Plan:
        return dataclasses.replace(plan, absences=tuple(map(change, plan.absences)))

    return edit


def _no_prefetch(one: Absence) -> Absence:
    return dataclasses.replace(one, back=one.use)


def _one_ahead(one: Absence) -> Absence:
    return dataclasses.replace(one, back=max(one.back, one.use - 1))


def _at_once(one: Absence) -> Absence:
    return one if one.out is None else dataclasses.replace(one, release=min(one.release, one.out + 1))


def _threads(plan: Plan) -> Plan:
    import tfswap.ops

    tfswap.ops.configure(copy_threads=4)
    return plan


EDITS: dict[str, Callable[[Plan], Plan]] = {
    "no prefetch": _edited(_no_prefetch),
    "one kernel ahead": _edited(_one_ahead),
    "no trigger": _edited(_at_once),
    "four copy threads": _threads,
}
"""By name: from a plan to the plan that is carried out in its place."""


ROUNDS = 9
PARTS = tuple(NETS)


def measure(part: str) -> dict[str, Any]:
    net, size = NETS[part]
    forms = [UNOPTIMISED, REFERENCE]
    forms += [Form(label, limit=FLOOR, tactics=tactics) for label, tactics in STEPWISE.items()]
    forms.append(Form(SWAPS, limit=LIMIT, tactics=("swap",)))
    forms += [Form(edit, limit=LIMIT, tactics=("swap",), edit=edit) for edit in EDITS]
    return {"rounds": ROUNDS, "lines": compare(net, size, forms, rounds=ROUNDS, arena_mib=2000)}


def present(found: dict[str, Any]) -> Section:
    tables, words = [], []
    for name, net in found.items():
        lines = net["lines"]
        tables.append(Table(f"{name}, {net['rounds']} rounds:", FORM_COLUMNS, form_lines(lines)))
        whole = next(line for line in lines if line["label"] == SWAPS)
        if whole["fits"]:
            costs = {
                line["label"]: line["clock_ratio"] / whole["clock_ratio"]
                for line in lines
                if line["edit"] and line["fits"]
            }
            words.append(f"{name}: " + ", ".join(f"{label} {cost:.2f}" for label, cost in costs.items()))
    return Section(
        "Ablation",
        "none of the papers switches all of these off",
        f"step time over that of the same swaps as planned: {'; '.join(words)}",
        "a CPU's copies share the cores with kernels, and are short beside them: overlap wins less than on a GPU",
        tables,
        notes=["Back-pressure, pool reuse and the tensor cache have no switch, and none was made for this page."],
    )
