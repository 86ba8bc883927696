"""What limits would cost the training steps that were watched.

A step's graph is taken while the program runs, since the program may drop its functions before it ends, and has no
reference to TensorFlow. It is planned at the end.

A step that takes a batch of an open number of rows from an iterator is planned for the number that its recorded call
had.

Not handled: such batches in loops, and steps that XLA compiles.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfswap.analysis.allocator_events import AllocatorEvent
from tfswap.compiler.offline import OnDevice, Variable, offline_step
from tfswap.device import machine
from tfswap.errors import TfswapError
from tfswap.frontends.resizable_step import graph_of_trace
from tfswap.frontends.simulate import point_of, target
from tfswap.frontends.unmodified.traces import computes_gradients
from tfswap.frontends.unmodified.unplannable import planning
from tfswap.ir.graph import Graph
from tfswap.ir.op_traits import takes_from_pipeline
from tfswap.ir.permits import TACTICS
from tfswap.ir.types import Shape, TensorType
from tfswap.report.peak_owners import LimitCost, StepCosts, limits_for
from tfswap.support import progress

log = logging.getLogger("tfswap")

SHARES = 0.75, 0.5
"""The limits that are tried, besides the smallest one, as shares of the step's own peak."""
MOST_STEPS = 4
"""The steps whose graphs are kept: those that have reached the highest moments."""


@dataclass
class _Step:
    """A training step, or why it can't be planned.

    Attributes:
        nbytes: the highest moment at which it was recorded.
    """

    nbytes: int
    graph: Graph | None
    variables: Sequence[Variable] = ()
    refusal: str = ""


class KnownSteps:
    """The training steps that were recorded, by name."""

    def __init__(self) -> None:
        self._steps: dict[str, _Step] = {}

    def note(self, trace: Any, inputs: Sequence[Any], events: Sequence[AllocatorEvent], nbytes: int) -> None:
        """A call of a trace with these arguments was recorded, with these events and highest moment of an arena."""
        name = trace.graph.name
        known = self._steps.get(name)
        if known is not None:
            known.nbytes = max(known.nbytes, nbytes)
            return
        lowest = min(self._steps, key=lambda each: self._steps[each].nbytes, default="")
        if len(self._steps) >= MOST_STEPS and self._steps[lowest].nbytes >= nbytes:
            return
        if not computes_gradients(trace):
            return
        if len(self._steps) >= MOST_STEPS:
            del self._steps[lowest]
        began_s = time.monotonic()
        self._steps[name] = _step(trace, inputs, events, nbytes)
        log.debug("tfswap: %s: its graph was taken in %.2f s", name, time.monotonic() - began_s)

    def costs(self) -> tuple[StepCosts, ...]:
        """What limits would cost, the step with the highest moment first. Planning takes seconds for each step."""
        found = sorted(self._steps.items(), key=lambda each: -each[1].nbytes)
        with progress.task("planning for limits"):
            return tuple(_costs(name, step) for name, step in found)


def batch_types(graph: Graph, events: Sequence[AllocatorEvent]) -> dict[str, TensorType]:
    """The types of batches with open numbers of rows that a step takes from iterators, by the events of a call.

    The number is that which most tensors had whose only open dimension is the number of rows.
    """
    taken = [node.out(i) for node in graph if takes_from_pipeline(node.op) for i in range(len(node.outputs))]
    taken = [tensor for tensor in taken if _has_open_rows(tensor.type.shape)]
    if not taken:
        return {}
    shapes = {node.name: node.outputs[0].shape for node in graph if node.outputs}
    rows: Counter[int] = Counter()
    for event in events:
        traced, found = shapes.get(event.op), [int(size) for size in re.findall(r"\d+", event.shape)]
        if event.is_request and traced is not None and _has_open_rows(traced) and [*traced[1:]] == found[1:]:
            rows[found[0]] += 1
    if not rows:
        return {}
    most = rows.most_common(1)[0][0]
    return {tensor.name: TensorType(tensor.type.dtype, (most, *(tensor.type.shape or ())[1:])) for tensor in taken}


def _has_open_rows(shape: Shape) -> bool:
    return bool(shape) and shape[0] is None and None not in shape[1:]


def _step(trace: Any, inputs: Sequence[Any], events: Sequence[AllocatorEvent], nbytes: int) -> _Step:
    device = machine.current_device()[1]
    try:
        with planning():  # the program goes on, whatever is wrong here
            known_types = functools.partial(batch_types, events=events)
            return _Step(nbytes, *graph_of_trace(trace.graph.name, trace, inputs, device, None, known_types))
    except TfswapError as error:
        return _Step(nbytes, None, refusal=str(error))


def _costs(name: str, step: _Step) -> StepCosts:
    if step.graph is None:
        return StepCosts(name, refusal=step.refusal)
    try:
        on, options, costs = target(None, None, TACTICS, None, None, None, None)
        where = machine.current_device()[0]
        offline = offline_step(step.graph, {where: OnDevice(on.device, options, costs)}, step.variables)
        offline.assume_waits()
        optimizer = offline.optimizer
        peak, floor = optimizer.baseline.peak_bytes, optimizer.floor_bytes()
        points = [point_of(optimizer, limit) for limit in limits_for(peak, floor, SHARES)]
        limits = tuple(LimitCost(point.limit_bytes, point.time_ratio) for point in points)
        return StepCosts(name, peak, limits)
    except TfswapError as error:
        return StepCosts(name, refusal=str(error))
