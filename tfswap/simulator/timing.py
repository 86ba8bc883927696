"""Predicts how long a schedule takes, on three lanes.

The compute lane is serial, by the schedule's total order. There is one copy lane in each direction. A variable's copies
from its home on the host and back take these lanes, and a kernel that waits for one starts no earlier than it ends.
What goes to, or comes from, another device takes the copy lane of its direction, and the compute lane meanwhile. A
kernel that waits for another device starts no earlier than that device allows (device_timing.py).

Not handled: which kernel loses time to a concurrent copy. The loss is spread over the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from tfswap.analysis.cost import concurrent_seconds
from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.custom_ops import TO_HOST
from tfswap.kernels.hardware import HOST, Rates
from tfswap.plan.schedule import (
    AWAIT,
    HOST_ONLY,
    IN,
    KERNELS,
    LEAD,
    OUT,
    RELEASE,
    RERUN,
    RUN,
    SPLIT,
    CopyTiers,
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


_OUT: Sequence[str] = "out", "disk out", "between"
_IN: Sequence[str] = "in", "disk in", "between"
"""The lanes of copies from and to the device, by tier."""

SPLIT_S = 20e-6
"""Host seconds to split chunks for a kernel and free the rest: measured among some thousand chunks."""


def simulate_time(
    flow: Dataflow,
    steps: Sequence[Step],
    cost_s: Sequence[float],
    rates: Rates,
    tiers: CopyTiers = HOST_ONLY,
    spans: list[Span] | None = None,
    arrivals: Mapping[int, float] = MappingProxyType({}),
) -> Timing:
    """Three lanes: kernels in order, copies out and copies in each one after another, overlapping compute.

    A disk has a lane of its own in each direction. The memory that another device lends has one for both directions:
    TensorFlow has one stream for copies between devices. Two concurrent kernels share the cores. The time that kernels
    lose to concurrent copies (`Rates.copy_share`) is added as a whole.

    Args:
        spans: gets one for each step, without the time that kernels lose.
        arrivals: the earliest start of kernels that wait for other devices.
    """
    lanes = run_lanes(flow, steps, cost_s, rates, tiers, spans, waiting=arrivals)
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
    tiers: CopyTiers = HOST_ONLY,
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
    ends = {} if ends is None else ends
    now = host = compute = rerun = 0.0
    crossing, copying, loads, commits = flow.crossing, flow.copying, flow.loads, flow.commits
    copies = CopyLanes(flow, rates, tiers)
    lead, lead_number = -1, -1  # the kernel that runs concurrently with the next, and its step
    is_plain = spans is None and not (loads or copying or crossing or commits or waiting)
    for number, (kind, subject) in enumerate(steps):
        if is_plain and kind == RUN and lead < 0:  # most steps of the many plans that a search tries
            now, compute, ends[subject] = max(now, host) + cost_s[subject], compute + cost_s[subject], host
            continue
        start, copied = now, None
        if loads and kind in KERNELS:
            start = now = copies.read(flow.reads[subject], now)
        if kind in (RUN, RERUN) and subject in copying:
            copied = copies.load(subject, now) if subject in loads else copies.store(subject, now)
            ends[subject] = host  # it has started the copy
        elif kind == RUN:
            seconds = _kernel_s(flow, cost_s, rates, lead, subject)
            lead = -1
            if subject in waiting:
                host = max(host, (yield subject))
            if subject in commits:
                host = max(host, copies.store_end[commits[subject]])
            start = now = max(now, host)
            if subject in crossing:
                start, now = copies.cross(crossing[subject], now, seconds)
                host = now if crossing[subject] == TO_HOST else host
            else:
                now += seconds
            compute += seconds
            ends[subject] = host
        elif kind == LEAD:
            lead, lead_number = subject, number
        elif kind == SPLIT:
            now += 0.0 if steps[number + 1].kind == SPLIT else SPLIT_S
        elif kind == RERUN:
            now, rerun = now + cost_s[subject], rerun + cost_s[subject]
        elif kind == OUT:
            copied = copies.start_out(subject, now)
        elif kind == IN:
            copied = copies.start_in(subject, now)
        elif kind in (RELEASE, AWAIT):
            host = max(host, (copies.out_end if kind == RELEASE else copies.in_end)[subject])
            now = max(now, host)
        if spans is not None:
            spans.append(Span(start, now) if copied is None else copied)
            if kind == RUN and lead_number >= 0:
                spans[lead_number], lead_number = spans[number], -1
    return Timing(now + copies.lost_s, compute, rerun, now - compute - rerun, copies.lost_s)


def _kernel_s(flow: Dataflow, cost_s: Sequence[float], rates: Rates, lead: int, kernel: int) -> float:
    """The seconds of a kernel, or of a pair with the kernel `lead`; -1 for none."""
    if lead < 0:
        return cost_s[kernel]
    return concurrent_seconds([(flow.nodes[i], cost_s[i]) for i in (lead, kernel)], rates)


class CopyLanes:
    """The copy lanes of a device.

    Attributes:
        out_end, in_end: by value, when its latest copy in that direction ends.
        store_end: by kernel that starts the copy of a variable to its home, when that ends.
        lost_s: time that kernels lose to copies.
    """

    def __init__(self, flow: Dataflow, rates: Rates, tiers: CopyTiers):
        self._flow = flow
        self._rates = rates
        self._tiers = tiers
        self._free = dict.fromkeys([*_OUT, *_IN], 0.0)  # by lane, when it has ended its latest copy
        self.out_end: dict[int, float] = {}
        self.in_end: dict[int, float] = {}
        self.store_end: dict[int, float] = {}
        self.lost_s = 0.0

    def free_in(self, tier: int) -> float:
        """When the lane of copies from a tier has ended its latest copy."""
        return self._free[_IN[tier]]

    def load(self, kernel: int, now: float) -> Span:
        """The copy of a variable from its home on the host."""
        value = self._flow.loads[kernel]
        span = self._copy(value, self._flow.home_tiers[kernel], _IN, now)
        self.in_end[value] = span.end_s
        return span

    def store(self, kernel: int, now: float) -> Span:
        """The copy of a variable's new value to its home on the host."""
        value = self._flow.stores[kernel]
        span = self._copy(value, self._flow.home_tiers[kernel], _OUT, self.read((value,), now))
        self.store_end[kernel] = span.end_s
        return span

    def read(self, values: Iterable[int], now: float) -> float:
        """When a kernel can start that reads these values."""
        ends = self.in_end
        for value in values if ends else ():
            now = max(now, ends.get(value, now))
        return now

    def start_out(self, value: int, now: float) -> Span:
        span = self._copy(value, self._tiers.get(value, HOST), _OUT, self.read((value,), now))
        self.out_end[value] = span.end_s
        return span

    def start_in(self, value: int, now: float) -> Span:
        span = self._copy(value, self._tiers.get(value, HOST), _IN, max(now, self.out_end[value]))
        self.in_end[value] = span.end_s
        return span

    def cross(self, op: str, now: float, seconds: float) -> Span:
        """A copy of a tensor that goes to another device, or comes from one."""
        return self._occupy((_OUT if op == TO_HOST else _IN)[HOST], now, seconds)

    def _copy(self, value: int, tier: int, lanes: Sequence[str], now: float) -> Span:
        nbytes, rates = self._flow.values[value].nbytes, self._rates
        rate = rates.out_rate if lanes is _OUT else rates.in_rate
        self.lost_s += nbytes / rate(HOST) * rates.copy_share
        return self._occupy(lanes[tier], now, rates.copy_latency_s + nbytes / rate(tier))

    def _occupy(self, lane: str, now: float, seconds: float) -> Span:
        start = max(self._free[lane], now)
        self._free[lane] = start + seconds
        return Span(start, self._free[lane])
