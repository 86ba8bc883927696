"""Predicts how long a step on several devices takes: the lanes of each device, and what one waits for another.

Each device runs its own schedule (timing.py). A kernel that waits for another device starts once that one has run what
it waits for. A tensor that goes to another device has then been copied to host memory.

Invariant: the devices' schedules agree on one order of what they wait for, so that no two wait for each other.

Not handled: the time of devices that are not planned, such as the host: what they send is there as soon as what they
wait for.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from typing import NamedTuple

from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.device_waits import awaited_kernels, waits_for_others
from tfswap.ir.graph import Graph
from tfswap.kernels.hardware import Rates
from tfswap.plan.schedule import HOST_ONLY, CopyTiers, Step
from tfswap.simulator.timing import Timing, run_lanes

End = tuple[str, str]
"""A device, and the name of a node of its part."""


class PartLanes(NamedTuple):
    """The schedule of a device's part. Fields as the arguments of `simulate_time`."""

    flow: Dataflow
    steps: Sequence[Step]
    cost_s: Sequence[float]
    rates: Rates
    tiers: CopyTiers = HOST_ONLY


class TimedPart(NamedTuple):
    """The time of a device's part.

    Attributes:
        timing: from the step's start to the end of the part.
        arrivals: by name of a node that waits for another device, when that one has done what it waits for.
    """

    timing: Timing
    arrivals: dict[str, float]


def simulate_devices(
    parts: Mapping[str, PartLanes], sources: Mapping[End, End], others: Mapping[str, Graph]
) -> dict[str, TimedPart]:
    """The time of each device's part.

    Args:
        parts: by device.
        sources: as of `Parts` (passes/device_parts.py).
        others: the parts of devices that are not planned.
    """
    running = {where: _Running(where, part, sources) for where, part in parts.items()}
    resolver = _Resolver(running, sources, others)
    left = list(running.values())
    while left:
        have_run = [each.run(resolver) for each in left]
        assert any(have_run), "two devices wait for each other"
        left = [each for each in left if each.timing is None]
    return {
        where: TimedPart(each.ended, {name: resolver.end_s(sources[where, name]) or 0.0 for name in each.awaited})
        for where, each in running.items()
    }


class _Running:
    """A device whose lanes run until the next kernel that waits for another device.

    Attributes:
        awaited: names of nodes that wait for other devices.
        ends: of the kernels that have run.
        waiting_for: the kernel that waits; None before the start and after the end.
        timing: None before the end.
    """

    def __init__(self, where: str, part: PartLanes, sources: Mapping[End, End]):
        flow = part.flow
        self.flow = flow
        self.awaited = [name for home, name in sources if home == where and name in flow.place]
        waits = waits_for_others(flow, set(self.awaited))
        self._waits = {i: [sources[where, name] for name in sorted(names)] for i, names in waits.items()}
        self.ends: dict[int, float] = {}
        self._lanes: Generator[int, float, Timing] = run_lanes(*part, waiting=self._waits, ends=self.ends)
        self.waiting_for: int | None = None
        self.timing: Timing | None = None

    @property
    def ended(self) -> Timing:
        assert self.timing is not None, "it has run"
        return self.timing

    def run(self, resolver: _Resolver) -> bool:
        """Run until a kernel waits for one that has not run; returns whether any step has run."""
        before = self.waiting_for
        try:
            if self.waiting_for is None:
                self.waiting_for = next(self._lanes)
            while (start_s := resolver.latest_s(self._waits[self.waiting_for])) is not None:
                self.waiting_for = self._lanes.send(start_s)
        except StopIteration as ended:
            self.timing, self.waiting_for = ended.value, None
        return self.timing is not None or self.waiting_for != before


class _Resolver:
    """When nodes that others wait for end."""

    def __init__(self, running: Mapping[str, _Running], sources: Mapping[End, End], others: Mapping[str, Graph]):
        self._running = running
        self._sources = sources
        self._others = others
        self._before: dict[End, frozenset[End]] = {}  # by node that is not planned: the ends that it waits for

    def latest_s(self, ends: Collection[End]) -> float | None:
        """When the last of some nodes ends; None where one has not ended yet."""
        found = [self.end_s(end) for end in ends]
        return None if None in found else max((seconds or 0.0 for seconds in found), default=0.0)

    def end_s(self, end: End) -> float | None:
        """When a node ends; None where it has not ended yet."""
        where, name = end
        if where not in self._running:
            if end not in self._before:
                before = ((where, node.name) for node in Graph.needed([self._others[where][name]]))
                self._before[end] = frozenset(self._sources[each] for each in before if each in self._sources)
            return self.latest_s(self._before[end])
        device = self._running[where]
        kernels = awaited_kernels(device.flow, name)
        if any(kernel not in device.ends for kernel in kernels):
            return None
        return max((device.ends[kernel] for kernel in kernels), default=0.0)
