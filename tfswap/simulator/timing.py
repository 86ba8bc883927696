"""Predicts how long a schedule takes, on three lanes.

The compute lane is serial, by the schedule's total order. There is one copy lane in each direction. What goes to, or
comes from, another device takes the copy lane of its direction, and the compute lane meanwhile. A kernel that waits for
another device starts no earlier than that device allows (device_timing.py).

Not handled: which kernel loses time to a concurrent copy. The loss is spread over the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from tfswap.analysis.cost import concurrent_seconds
from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.custom_ops import TO_HOST
from tfswap.kernels.hardware import Rates
from tfswap.plan.schedule import (
    AWAIT,
    IN,
    LEAD,
    OUT,
    RELEASE,
    RERUN,
    RUN,
    SPLIT,
    Step,
)


@dataclass
class Timing:
    """What a schedule costs.

    Attributes:
        total_s: from the first kernel's start to the last one's end.
        compute_s: the kernels alone, each once.
        rerun_s: the kernels that run again.
        stall_s: time that the compute lane waits for copies, and for other devices.
        lost_s: time that kernels lose to concurrent copies.
    """

    total_s: float
    compute_s: float
    rerun_s: float
    stall_s: float
    lost_s: float

    def no_less_than(self, seconds: float) -> Timing:
        """This timing, with a total of at least `seconds`."""
        return self if self.total_s >= seconds else dataclasses.replace(self, total_s=seconds)


class Span(NamedTuple):
    """When a step of a schedule runs: a kernel, a copy on its own lane, or the wait for one. Seconds from the start."""

    start_s: float
    end_s: float


SPLIT_S = 20e-6
"""Host seconds to split chunks for a kernel and free the rest: measured among some thousand chunks."""


def simulate_time(
    flow: Dataflow,
    steps: Sequence[Step],
    cost_s: Sequence[float],
    rates: Rates,
    disk: Collection[int] = (),
    spans: list[Span] | None = None,
    arrivals: Mapping[int, float] = MappingProxyType({}),
) -> Timing:
    """Three lanes: kernels in order, copies out and copies in each one after another, overlapping compute.

    The values `disk` go to disk, which has a lane of its own in each direction. Two concurrent kernels share the cores.
    The time that kernels lose to concurrent copies (`Rates.copy_share`) is added as a whole.

    Args:
        spans: gets one for each step, without the time that kernels lose.
        arrivals: the earliest start of kernels that wait for other devices.
    """
    lanes = run_lanes(flow, steps, cost_s, rates, disk, spans, waiting=arrivals)
    try:
        kernel = next(lanes)
        while True:
            kernel = lanes.send(arrivals[kernel])
    except StopIteration as ended:
        return ended.value


def run_lanes(
    flow: Dataflow,
    steps: Sequence[Step],
    cost_s: Sequence[float],
    rates: Rates,
    disk: Collection[int] = (),
    spans: list[Span] | None = None,
    *,
    waiting: Container[int] = (),
    ends: dict[int, float] | None = None,
) -> Generator[int, float, Timing]:
    """As `simulate_time`. Yields each kernel of `waiting` before it runs, and is sent its earliest start.

    Args:
        ends: gets, for each kernel that has run, when the host goes on. On a GPU that is before the kernel has ended,
            but after a copy to the host has.
    """
    now = host = compute = rerun = lost = 0.0
    out_bytes_per_s, in_bytes_per_s, share = rates.out_bytes_per_s, rates.in_bytes_per_s, rates.copy_share
    latency_s, crossing = rates.copy_latency_s, flow.crossing
    out_free, in_free = [0.0, 0.0], [0.0, 0.0]  # of host memory, of the disk
    lead, lead_number = -1, -1  # the kernel that runs concurrently with the next, and its step
    out_end: dict[int, float] = {}
    in_end: dict[int, float] = {}
    for number, (kind, subject) in enumerate(steps):
        start = now
        if kind == RUN:
            seconds = cost_s[subject]
            if lead >= 0:
                pair = [(flow.nodes[i], cost_s[i]) for i in (lead, subject)]
                seconds = concurrent_seconds(pair, rates)
                lead = -1
            if subject in waiting:
                host = max(host, (yield subject))
                start = now = max(now, host)
            if subject in crossing:
                lane = out_free if crossing[subject] == TO_HOST else in_free
                start = max(lane[0], now)
                now = lane[0] = start + seconds
                host = now if crossing[subject] == TO_HOST else host
            else:
                now += seconds
            compute += seconds
            if ends is not None:
                ends[subject] = host
        elif kind == LEAD:
            lead, lead_number = subject, number
        elif kind == SPLIT:
            if steps[number + 1].kind != SPLIT:
                now += SPLIT_S
        elif kind == RERUN:
            now += cost_s[subject]
            rerun += cost_s[subject]
        elif kind == OUT:
            tier = subject in disk
            seconds = flow.values[subject].nbytes / out_bytes_per_s
            lost += seconds * share
            if tier:
                seconds = flow.values[subject].nbytes / rates.disk_bytes_per_s
            start = max(out_free[tier], now)
            out_end[subject] = out_free[tier] = start + latency_s + seconds
        elif kind == RELEASE:
            host = max(host, out_end[subject])
            now = max(now, host)
        elif kind == IN:
            tier = subject in disk
            start = max(in_free[tier], now, out_end[subject])
            seconds = flow.values[subject].nbytes / in_bytes_per_s
            lost += seconds * share
            if tier:
                seconds = flow.values[subject].nbytes / rates.disk_bytes_per_s
            in_end[subject] = in_free[tier] = start + latency_s + seconds
        elif kind == AWAIT:
            host = max(host, in_end[subject])
            now = max(now, host)
        if spans is not None:
            copied = {OUT: out_end, IN: in_end}.get(kind)
            spans.append(Span(start, now if copied is None else copied[subject]))
            if kind == RUN and lead_number >= 0:
                spans[lead_number] = spans[number]
                lead_number = -1
    return Timing(now + lost, compute, rerun, now - compute - rerun, lost)
