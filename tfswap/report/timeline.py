"""Memory over a step, by kind, for the pictures and traces of a report.

All figures are the simulator's (simulator/record.py). The unoptimised step is one of the simulated runs from which its
peak is predicted, with kernels that overlap at random. The planned step has one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tfswap.analysis.dataflow import PERSISTENT
from tfswap.analysis.phases import backward_among, forward_among
from tfswap.ir.graph import Node, Output
from tfswap.kernels.hardware import LENT
from tfswap.plan.schedule import AWAIT, IN, KERNELS, OUT, RELEASE, RERUN
from tfswap.simulator.record import NO_ID, Hold, PlannedRecord, Record

VARIABLES, INPUTS, ACTIVATIONS, GRADIENTS, WORKSPACES, OTHERS, MARGIN = range(7)
KINDS = ("variables", "inputs", "activations", "gradients", "workspaces", "other", "margin")
"""Names of the kinds of memory, by number. Inputs are arguments and constants. Tensors that optimizers compute from
gradients count as gradients. Chunks allocated during the step count whole, under the kind of their tensor. "other" is
the rest of the arena before the step, with the unused ends of the chunks of variables and inputs. The margin is the
difference between the predicted and the simulated peak, so that the highest point of a chart is the report's peak."""
COMPUTE, COPIES_OUT, COPIES_IN, COPIES_BETWEEN = "compute", "copies out", "copies in", "copies between"


class Block(NamedTuple):
    """A kernel, a copy or a wait on a lane, in seconds from the step's start."""

    lane: str
    kind: str  # "run", "again", "wait" or "copy"
    name: str
    start_s: float
    end_s: float


class Column(NamedTuple):
    """The state with the most bytes in use, for all columns from this one to the next `Column`."""

    column: int
    state: int


@dataclass(frozen=True)
class Run:
    """A recorded step, scaled for charts.

    Attributes:
        record: the simulator's record.
        total_s: the predicted time of the step, to which the record's times are scaled.
        margin_bytes: the predicted peak minus the record's.
    """

    record: Record
    total_s: float
    margin_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The predicted peak."""
        return self.record.peak_bytes + self.margin_bytes

    @property
    def seconds_per_second(self) -> float:
        """The ratio of the predicted time to the record's time."""
        return self.total_s / self.record.total_s if self.record.total_s > 0 else 1.0

    @cached_property
    def kinds(self) -> list[int]:
        """The kind of each value."""
        flow = self.record.flow
        forward = forward_among(flow.nodes, (flow.values[v].tensor.node for v in flow.fetched))
        forward -= backward_among(flow.nodes)
        variables = {v for us in flow.updates for u in us for v in (u.old, u.new)}
        found: list[int] = []
        for v, (tensor, _, producer) in enumerate(flow.values):
            if v in variables or (producer == PERSISTENT and _variable(tensor) is not None):
                found.append(VARIABLES)
            elif producer == PERSISTENT:
                found.append(INPUTS)
            else:
                found.append(ACTIVATIONS if tensor.node in forward else GRADIENTS)
        return found

    def kind(self, hold: Hold) -> int:
        """The kind of a held buffer."""
        return WORKSPACES if hold.value == NO_ID else self.kinds[hold.value]

    def name(self, hold: Hold) -> str:
        """The name of a held buffer, for people."""
        flow = self.record.flow
        if hold.value != NO_ID:
            tensor = flow.values[hold.value].tensor
            variable = _variable(tensor) if self.kinds[hold.value] == VARIABLES else None
            return tensor.name if variable is None else variable.name
        return "kept back to split a chunk" if hold.kernel == NO_ID else f"workspace of {flow.nodes[hold.kernel].name}"

    def at(self, states: Sequence[int]) -> list[tuple[int, ...]]:
        """The bytes of each kind in these states, which rise."""
        by_state: dict[int, list[tuple[int, int]]] = {}
        for hold in self.record.holds:
            kind = self.kind(hold)
            by_state.setdefault(hold.first, []).append((kind, hold.nbytes))
            by_state.setdefault(hold.last, []).append((kind, -hold.nbytes))
        changes = iter(sorted(by_state))
        change = next(changes, None)
        now = [0] * OTHERS
        found: list[tuple[int, ...]] = []
        for state in states:
            while change is not None and change <= state:
                for kind, nbytes in by_state[change]:
                    now[kind] += nbytes
                change = next(changes, None)
            others = self.record.in_use_bytes[state] - sum(now)
            found.append((*now, others, self.margin_bytes))
        return found

    def columns(self, count: int, width_s: float) -> list[Column]:
        """The step in columns of `width_s / count` seconds: the state with the most bytes in use during each.

        Peaks are preserved. Columns with the same state as the one before are left out.
        """
        record, pace = self.record, self.seconds_per_second * count / width_s if width_s > 0 else 0.0
        began, used = record.began_s, record.in_use_bytes
        last = max(0, min(count, round(self.total_s * count / width_s)) - 1) if width_s > 0 else 0
        best = [NO_ID] * (last + 1)
        for state in range(len(used)):
            first = min(last, int(began[state] * pace))
            until = min(last, int(began[state + 1] * pace)) if state + 1 < len(used) else last
            for column in range(first, until + 1):
                if best[column] == NO_ID or used[state] > used[best[column]]:
                    best[column] = state
        return [Column(c, state) for c, state in enumerate(best) if not c or best[c - 1] != state]

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks of all lanes, in the order of the schedule."""
        if not isinstance(self.record, PlannedRecord):
            return []
        return [b for b in _blocks(self.record, self.seconds_per_second) if b.end_s > b.start_s]


@dataclass(frozen=True)
class Timeline:
    """A step without and with its plan.

    Attributes:
        unoptimised: one run of the unoptimised step.
        planned: the run under the plan; None where the plan changes nothing.
        baseline_s: predicted time of the unoptimised step.
        baseline_peak_bytes: its predicted peak.
        planned_peak_bytes: the predicted peak under the plan.
    """

    unoptimised: Record
    planned: PlannedRecord | None
    baseline_s: float
    baseline_peak_bytes: int
    planned_peak_bytes: int

    @cached_property
    def before(self) -> Run:
        return _run(self.unoptimised, self.baseline_s, self.baseline_peak_bytes)

    @cached_property
    def after(self) -> Run | None:
        """The planned run. Delays of kernels by concurrent copies are spread over the whole step."""
        if self.planned is None:
            return None
        return _run(self.planned, self.planned.timing.total_s, self.planned_peak_bytes)


def _run(record: Record, total_s: float, peak_bytes: int) -> Run:
    return Run(record, total_s, max(0, peak_bytes - record.peak_bytes))


def _variable(tensor: Output) -> Node | None:
    """The handle of the variable that the tensor's node reads or writes; None for other tensors."""
    return next((t.node for t in tensor.node.inputs if t.type.dtype == "resource"), None)


def _blocks(record: PlannedRecord, pace: float) -> Iterator[Block]:
    flow = record.flow
    for (kind, subject), span in zip(record.steps, record.spans, strict=True):
        start_s, end_s = span.start_s * pace, span.end_s * pace
        if kind in KERNELS and subject in flow.loads:
            yield Block(COPIES_IN, "copy", flow.values[flow.loads[subject]].tensor.name, start_s, end_s)
        elif kind in KERNELS and subject in flow.stores:
            yield Block(COPIES_OUT, "copy", flow.values[flow.stores[subject]].tensor.name, start_s, end_s)
        elif kind in KERNELS:
            name = flow.nodes[subject].name
            yield Block(COMPUTE, "again" if kind == RERUN else "run", name, start_s, end_s)
        elif kind in (OUT, IN):
            lane = COPIES_OUT if kind == OUT else COPIES_IN
            lane = COPIES_BETWEEN if record.tiers.get(subject) == LENT else lane
            yield Block(lane, "copy", flow.values[subject].tensor.name, start_s, end_s)
        elif kind in (RELEASE, AWAIT):
            yield Block(COMPUTE, "wait", flow.values[subject].tensor.name, start_s, end_s)
