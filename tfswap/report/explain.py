"""Explains why one tensor is kept, swapped or recomputed: its uses, and the cost of each tactic."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.errors import TfswapError
from tfswap.ir.permits import ANYTHING, BITS, CLOSE
from tfswap.plan.plan import Inside, Plan
from tfswap.planner.problem import Problem
from tfswap.report.markup import format_seconds
from tfswap.support.printable import as_lines
from tfswap.support.sizes import format_bytes

if TYPE_CHECKING:
    from tfswap.ir.graph import Node
    from tfswap.kernels.slice_lines import Sliceable
    from tfswap.report.rows import TensorRow

SUFFICES = "memory suffices without"
"""The reason where a tactic could be used and is not, and the plan keeps the limit."""
UNMET = "no plan keeps the limit: the step is left as it is"
OVER = "this plan leaves it where it is, and does not keep the limit"
READERS_SHOWN = 6
NAMES_SHOWN = 5
SHOWN_SLICES = 16
"""The number of slices that an explanation takes as an example."""


@dataclass(frozen=True)
class Explanation:
    """All facts of one tensor under a plan. Positions count kernels in the plan's order.

    Attributes:
        tensor: its name; of a view, the name of the tensor that it is a view of.
        type: element type and shape.
        nbytes: its bytes.
        tactic, reason: as of its `TensorRow`.
        made_by: the kernel that makes it, and its op; None for what exists before the step.
        made_at: the positions of that kernel, recomputed runs included.
        read_by: (kernel, position) of all readers.
        wait: the positions of the longest gap between two uses; None where there is none.
        wait_s: predicted seconds of the kernels in that gap.
        wait_share: the same, as a share of all kernels' time.
        copy_s: predicted seconds of a copy to the host and back.
        rerun_s: predicted seconds of the kernels that recompute it at the end of that gap; None where they can't, or
            need not.
        source: the user's source line that made it, where TensorFlow knows it.
        slices: the values with which its kernel may run in slices of rows, "bits" or "close", and the bytes of what it
            would hold in slices; None where it may not, or where kernels of the plan run so.
    """

    tensor: str
    type: str
    nbytes: int
    tactic: str
    reason: str
    made_by: tuple[str, str] | None
    made_at: tuple[int, ...]
    read_by: tuple[tuple[str, int], ...]
    wait: tuple[int, int] | None
    wait_s: float
    wait_share: float
    copy_s: tuple[float, float]
    rerun_s: float | None
    source: str | None
    slices: tuple[str, int] | None = None

    def to_json(self) -> str:
        """All figures as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    def __str__(self) -> str:
        rows = [("tactic", f"{self.tactic}: {self.reason}"), ("size", f"{format_bytes(self.nbytes)}, {self.type}")]
        if self.made_by is None:
            rows.append(("made by", "nothing in the step: it exists before"))
        else:
            at = ", again at ".join(map(str, self.made_at))
            rows.append(("made by", f"{self.made_by[1]} {self.made_by[0]}, kernel {at}"))
        readers = [f"{name} (kernel {position})" for name, position in self.read_by]
        rest = f", and {len(readers) - READERS_SHOWN} more" if len(readers) > READERS_SHOWN else ""
        rows.append(("read by", ", ".join(readers[:READERS_SHOWN]) + rest or "no kernel: only the caller, if anyone"))
        if self.wait is not None:
            out_s, in_s = self.copy_s
            fits = "hidden by the wait" if out_s + in_s <= self.wait_s else "longer than the wait"
            rows += [
                ("waits", f"{format_seconds(self.wait_s)}, {100 * self.wait_share:.0f}% of the kernels' time"),
                ("to keep it", f"{format_bytes(self.nbytes)} all that time"),
                ("to swap it", f"{format_seconds(out_s)} out and {format_seconds(in_s)} back, {fits}"),
                (
                    "to recompute",
                    "impossible, or too many kernels"
                    if self.rerun_s is None
                    else f"{format_seconds(self.rerun_s)} of kernels",
                ),
            ]
        if self.slices is not None:
            values, nbytes = self.slices
            held = f"each of {SHOWN_SLICES} would hold {format_bytes(nbytes // SHOWN_SLICES)} of {format_bytes(nbytes)}"
            rows.append(("in slices", f'its kernel may run so, with values="{values}": {held}'))
        if self.source:
            rows.append(("source", self.source))
        return as_lines([self.tensor, *(f"  {label:<14} {text}" for label, text in rows)])


def why_unused(plan: Plan) -> str:
    """The reason for tensors for which a tactic could be used and is not."""
    if plan.keeps_limit:
        return SUFFICES
    return UNMET if plan.changes_nothing else OVER


def why_kept(problem: Problem, v: int, waits: bool, unused: str) -> str:
    """The reason why no tactic is used for a value.

    Args:
        waits: whether it waits between two uses.
        unused: the reason where a tactic could be used, as of `why_unused`.
    """
    if refusal := problem.refusals.get(v):
        return refusal
    if problem.flow.values[v].nbytes < problem.smallest_bytes:
        return f"below {format_bytes(problem.smallest_bytes)} a tensor costs more to move than it frees"
    return problem.flow.permits.get(v, ANYTHING).why or unused if waits else "never waits between two uses"


def explain(
    problem: Problem,
    plan: Plan | Inside,
    rows: Sequence[TensorRow],
    locate: Callable[[str], str | None],
    name: str,
    unused: str,
    within: str = "",
    may_slice: Callable[[Node], Sliceable | None] = lambda _: None,
) -> Explanation:
    """The explanation of the tensor `name`, or of the first output of the node `name`.

    Args:
        problem: the step, or the body that has the tensor.
        unused: the reason where a tactic could be used, as of `why_unused`.
        within: the prefix of the tensor's name in `rows`.
        may_slice: gives what slices of a kernel would free.

    Raises:
        TfswapError: there is no such tensor. The message has similar names.
    """
    flow = problem.flow
    v = _value(flow, name)
    value = flow.values[v]
    order = [flow.place[kernel] for kernel in plan.order] or problem.order
    row = next((row for row in rows if row.name == f"{within}{value.tensor.name}"), None)
    waits = any(gap.value == v for gap in problem.gaps)
    tactic, reason = ("keep", why_kept(problem, v, waits, unused)) if row is None else (row.tactic, row.reason)
    made = tuple(position for position, kernel in enumerate(order) if kernel == value.producer)
    reads = [position for position, kernel in enumerate(order) if v in flow.reads[kernel]]
    uses = sorted({*made, *reads})
    wait = max((w for w in pairwise(uses) if w[1] - w[0] > 1), key=lambda w: w[1] - w[0], default=None)
    rates = problem.rates
    wait_s = sum(problem.cost_s[kernel] for kernel in order[wait[0] + 1 : wait[1]]) if wait else 0.0
    sliced = None if value.producer == PERSISTENT else may_slice(flow.nodes[value.producer])
    return Explanation(
        tensor=f"{within}{value.tensor.name}",
        type=str(value.tensor.type),
        nbytes=value.nbytes,
        tactic=tactic,
        reason=reason,
        made_by=None if value.producer == PERSISTENT else (flow.nodes[value.producer].name, value.tensor.node.op),
        made_at=made,
        read_by=tuple((flow.nodes[order[position]].name, position) for position in reads),
        wait=wait,
        wait_s=wait_s,
        wait_share=wait_s / (sum(problem.cost_s[kernel] for kernel in order) or 1.0),
        copy_s=(value.nbytes / rates.out_bytes_per_s, value.nbytes / rates.in_bytes_per_s),
        rerun_s=_rerun_s(problem, v),
        source=locate(value.tensor.node.name),
        slices=None if sliced is None else (CLOSE if sliced.close else BITS, sliced.nbytes),
    )


def _value(flow: Dataflow, name: str) -> int:
    node, colon, index = name.rpartition(":")
    node, output = (node, int(index)) if colon and index.isdecimal() else (name, 0)
    place = flow.place.get(node)
    v = None if place is None else flow.value_of.get((flow.nodes[place], output))
    if v is not None:
        return v
    if name in flow.value_named:
        return flow.value_named[name]
    near = difflib.get_close_matches(name, flow.value_named, NAMES_SHOWN, 0.3)
    near += [known for known in flow.value_named if name in known and known not in near][: NAMES_SHOWN - len(near)]
    raise TfswapError(
        f"the step has no tensor {name!r}, or it holds no memory of its own. Near to it are "
        f"{', '.join(map(repr, near)) or 'none'}."
    )


def _rerun_s(problem: Problem, v: int) -> float | None:
    """The seconds of recomputing a value at the end of its longest wait, in the order without recomputed kernels."""
    waits = [(wait.end - start, wait.rerun_s) for (value, start), wait in problem.uses.after.items() if value == v]
    if not waits:
        return None
    _, seconds = max(waits)
    return seconds if math.isfinite(seconds) else None
