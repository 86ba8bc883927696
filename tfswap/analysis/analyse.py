"""The facts of a graph, and of each of its courses.

A step that decides branches or numbers of iterations when it runs has several courses. If they are few, each has its
own facts. If they are many, facts that cover all of them are computed where possible (pools.py).
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
"""The most courses, and the most events of all courses together, for which each course has its own facts."""


def analyse_dataflow(
    graph: Graph, device: DeviceModel, *, strict: bool = True, lowered: Seconds | None = None
) -> Dataflow:
    """The facts of `graph` on `device`. Unknown sizes must have been bound before; they count as 0 here.

    Args:
        strict: raise UnsupportedGraph for a loop whose memory has no bound. Otherwise a few iterations represent it.
        lowered: gives the seconds of a kernel. With it, loops and conditionals are lowered to the executor's own
            control flow, as in TensorFlow by default: they free each input after its last use, and the kernels of
            their bodies have no order. None: they are kernels.
    """
    builder = Builder(graph, device, strict, lowered)
    flow, found = builder.build(), builder.found
    # In the analysis of a body (not strict), only courses of its own loops matter.
    several = found.ends_early or (found.undecided and (strict or found.repeated))
    if several and lowered is None:
        flow.courses, flow.all_courses = _of_courses(builder)
        if not flow.all_courses:
            flow.covering = _covering(builder)
    return flow


def undetermined_nodes(graph: Graph, device: DeviceModel) -> list[Node]:
    """The loops and conditionals of `graph` and its bodies whose number of iterations or branch the step decides."""
    builder = Builder(graph, device, strict=False, lowered=None)
    builder.build()
    return list(builder.found.undetermined)


def analyse_body(body: Graph, device: DeviceModel) -> Dataflow:
    """The facts of a body on `device`. Loops in it need no bound."""
    return analyse_dataflow(body, device.in_bodies, strict=False)


def _of_courses(builder: Builder) -> tuple[tuple[Dataflow, ...], bool]:
    """The facts of each course, where there are few; and whether these are all courses."""
    if builder.found.endless:
        return (), False
    most = min(MOST_COURSES, EVENTS_OF_COURSES // max(1, sum(map(len, builder.flow.events))))
    found: list[Dataflow] = []
    digits: list[int] | None = []
    while digits is not None:
        numbered = _Numbered(digits)
        # Not strict: whether a loop has a bound has been decided for its worst branches.
        found.append(Builder(builder.graph, builder.device, False, None, numbered, builder).build())
        digits = numbered.following()
        if math.prod(numbered.options) > most or (digits is not None and len(found) >= most):
            return (), False
    return tuple(found), True


def _covering(builder: Builder) -> Dataflow | None:
    """Facts that cover all courses; None where there is no bound."""
    try:
        return Builder(builder.graph, builder.device, False, None, before=builder, covering=True).build()
    except UnboundedLoop:
        return None


class _Numbered:
    """The course whose decisions are these digits, in order. Later decisions are 0.

    Attributes:
        digits: the decisions.
        options: the number of options of each decision so far.
    """

    def __init__(self, digits: list[int]):
        self.digits = digits
        self.options: list[int] = []

    def branch(self, iteration: int, branches: int) -> int:
        if len(self.options) == len(self.digits):
            self.digits.append(0)
        self.options.append(branches)
        return self.digits[len(self.options) - 1]

    def trips(self, most: int) -> int:
        return most - self.branch(0, most + 1)  # the first course has the most iterations, and so decisions

    def following(self) -> list[int] | None:
        """The digits of the next course; None after the last."""
        digits = self.digits[: len(self.options)]
        while digits and digits[-1] + 1 == self.options[len(digits) - 1]:
            digits.pop()
        return [*digits[:-1], digits[-1] + 1] if digits else None
