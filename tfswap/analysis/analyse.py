"""The facts of a graph, and those of each course that it can take.

A step whose branches or numbers of iterations are decided as it runs has several courses. Where they are few, each has
facts of its own. Where they are many, facts that cover all of them are looked for (pools.py).
"""

from __future__ import annotations

import math

from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.dataflow_builder import Builder
from tfswap.analysis.function_runs import Seconds
from tfswap.analysis.records import UnboundedLoop
from tfswap.ir.graph import Graph, Node
from tfswap.kernels.device import DeviceModel

MOST_COURSES, EVENTS_OF_COURSES = 64, 20_000
"""All courses that a step can take are judged where there are no more, and have no more dealings with the allocator
together; otherwise a run that covers them all."""


def analyse_dataflow(
    graph: Graph, device: DeviceModel, *, strict: bool = True, lowered: Seconds | None = None
) -> Dataflow:
    """The facts of `graph` on `device`. Unknown sizes must have been bound before; they count 0 here.

    Args:
        strict: raise UnsupportedGraph for a loop whose memory has no bound; else a few iterations stand for it.
        lowered: seconds of a kernel, where loops and conditionals are lowered to the executor's own control flow, as
            TensorFlow does unless it is set not to: they hold of what they are given only what they still need, and
            the kernels of their bodies have no order.
    """
    builder = Builder(graph, device, strict, lowered)
    flow, found = builder.build(), builder.found
    # Where a body's order is asked for (not strict), only its own loops' courses are.
    several = found.ends_early or (found.undecided and (strict or found.repeated))
    if several and lowered is None:
        flow.courses, flow.all_courses = _of_courses(builder)
        if not flow.all_courses:
            flow.covering = _covering(builder)
    return flow


def undetermined_nodes(graph: Graph, device: DeviceModel) -> list[Node]:
    """The loops and conditionals of `graph`, and in its bodies, of which the step decides how often they run, or which
    branch.
    """
    builder = Builder(graph, device, strict=False, lowered=None)
    builder.build()
    return list(builder.found.undetermined)


def analyse_body(body: Graph, device: DeviceModel) -> Dataflow:
    """The facts of the body of a loop or a conditional of a step on `device`: loops in it need no bound."""
    return analyse_dataflow(body, device.in_bodies, strict=False)


def _of_courses(builder: Builder) -> tuple[tuple[Dataflow, ...], bool]:
    """The facts for each course that the step can take, where these are few; and whether these are all."""
    if builder.found.endless:
        return (), False
    most = min(MOST_COURSES, EVENTS_OF_COURSES // max(1, sum(map(len, builder.flow.events))))
    found: list[Dataflow] = []
    digits: list[int] | None = []
    while digits is not None:
        numbered = _Numbered(digits)
        # Whether a loop has a bound is decided by its worst branches: others make less of it in one iteration.
        found.append(Builder(builder.graph, builder.device, False, None, numbered, builder).build())
        digits = numbered.following()
        if math.prod(numbered.options) > most or (digits is not None and len(found) >= most):
            return (), False
    return tuple(found), True


def _covering(builder: Builder) -> Dataflow | None:
    """Facts that cover all courses; None where none are known to."""
    try:
        return Builder(builder.graph, builder.device, False, None, before=builder, covering=True).build()
    except UnboundedLoop:
        return None


class _Numbered:
    """The course that takes the options with these numbers, in the order in which it is asked, and then the first."""

    def __init__(self, digits: list[int]):
        self.digits = digits
        self.options: list[int] = []

    def branch(self, iteration: int, branches: int) -> int:
        if len(self.options) == len(self.digits):
            self.digits.append(0)
        self.options.append(branches)
        return self.digits[len(self.options) - 1]

    def trips(self, most: int) -> int:
        return most - self.branch(0, most + 1)  # the first course has the most to decide

    def following(self) -> list[int] | None:
        """The digits of the next course; None after the last."""
        digits = self.digits[: len(self.options)]
        while digits and digits[-1] + 1 == self.options[len(digits) - 1]:
            digits.pop()
        return [*digits[:-1], digits[-1] + 1] if digits else None
