"""What a watch has seen as one page that needs no network: what held each device's memory at its highest moment, by
source line, and what a limit would cost each training step.
"""

from __future__ import annotations

from typing import Any

from tfswap.report.markup import render, trusted
from tfswap.report.peak_owners import Owner, StepCosts, Watched, WatchedDevice, cost_line, divided, headline_of
from tfswap.report.timeline import ACTIVATIONS, GRADIENTS, INPUTS, KINDS, OTHERS, VARIABLES, WORKSPACES
from tfswap.support.sizes import Unit

ROWS = 3000
"""The most rows of a device."""


def watch_page(seen: Watched, refresh_s: int | None = None) -> str:
    """The page.

    Args:
        refresh_s: the page loads itself again after this time, since the program still runs. None: it has ended.
    """
    return render(
        "watch.html",
        title="tfswap watch",
        refresh_s=refresh_s,
        note=seen.note,
        devices=[_device(each) for each in seen.devices.values()],
        steps=[_step(each) for each in seen.steps],
        search=trusted("search.js"),
        script=trusted("watch.js"),
    )


def _device(seen: WatchedDevice) -> dict[str, Any]:
    shown, left = divided(seen, ROWS, 0.0)
    size = Unit.of(max((each.nbytes for each in seen.owners), default=0)).text
    rows = [(*_figures(seen, size, each.nbytes), each.tensors, each.what, each.source, _kind(each)) for each in shown]
    others = [("all others", sum(o.nbytes for o in left), sum(o.tensors for o in left))] if left else []
    if seen.unknown_bytes:
        others.append(("allocated before, and freed since", seen.unknown_bytes, 0))
    rows += [
        (*_figures(seen, size, nbytes), tensors or "-", what, "", KINDS[OTHERS]) for what, nbytes, tensors in others
    ]
    return {"answer": f"{headline_of(seen)}.", "rows": rows, "kinds": list(dict.fromkeys(row[-1] for row in rows))}


def _figures(seen: WatchedDevice, size: Any, nbytes: int) -> tuple[str, int, float]:
    return size(nbytes), nbytes, 100 * nbytes / seen.nbytes


def _kind(owner: Owner) -> str:
    """The kind of memory, whose colour the row has."""
    if owner.what.endswith("its own workspace"):
        return KINDS[WORKSPACES]
    if owner.source:
        return KINDS[GRADIENTS if owner.source.endswith("its gradient") else ACTIVATIONS]
    if owner.what.startswith("variable"):
        return KINDS[VARIABLES]
    return KINDS[INPUTS if owner.what.startswith(("argument", "tensor")) else OTHERS]


def _step(step: StepCosts) -> dict[str, Any]:
    size = Unit.of(step.peak_bytes).text
    limits = [(size(each.limit_bytes), f"{each.time_ratio:.2f}") for each in step.limits]
    return {"name": step.name, "line": cost_line(step), "peak": size(step.peak_bytes), "limits": limits}
