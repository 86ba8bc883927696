"""The time of schedules in C++ (csrc/core/lane_times.cc), where the core library is loaded.

It has the results of `simulate_time`, bit for bit, in about a tenth of the time.

Not handled: kernels that wait for other devices, and the time of each step.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType

from tfswap.analysis.cost import concurrent_seconds
from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.custom_ops import TO_HOST
from tfswap.kernels.hardware import DISK, HOST, LENT, Rates
from tfswap.native import bound
from tfswap.plan.schedule import LEAD, CopyTiers, Step
from tfswap.simulator.native_replay import CLists, encoded
from tfswap.simulator.timing import SPLIT_S, Timing, simulate_time

TIERS = (HOST, DISK, LENT)
NONE = -1


class Role(IntEnum):
    """What a kernel does besides computing: `KernelRole` in C++."""

    COMPUTES, LOADS, STORES, SENDS, RECEIVES = range(5)


class _CFacts(ctypes.Structure):
    """LaneFacts in C++, field for field."""

    _fields_ = (
        ("node_count", ctypes.c_int64),
        ("value_count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("seconds", "roles", "copied", "home_tiers", "stored_by")),
        ("reads", CLists),
        ("value_bytes", ctypes.c_void_p),
        ("out_bytes_per_s", ctypes.c_double * len(TIERS)),
        ("in_bytes_per_s", ctypes.c_double * len(TIERS)),
        *((name, ctypes.c_double) for name in ("copy_latency_s", "copy_share", "split_s")),
        ("waits_for_loads", ctypes.c_int64),
    )


class StepTimes:
    """The times of one step's schedules, from C++ where that is possible.

    Args:
        arrivals: as of `simulate_time`.
    """

    def __init__(
        self,
        flow: Dataflow,
        cost_s: Sequence[float],
        rates: Rates,
        arrivals: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        self._flow, self._cost_s, self._rates, self._arrivals = flow, cost_s, rates, arrivals
        self._lanes: NativeLanes | None = None

    def timing(self, steps: Sequence[Step], tiers: CopyTiers) -> Timing:
        """As `simulate_time`."""
        if bound.core is None or self._arrivals:
            return simulate_time(self._flow, steps, self._cost_s, self._rates, tiers, arrivals=self._arrivals)
        if self._lanes is None:
            self._lanes = NativeLanes(self._flow, self._cost_s, self._rates)
        return self._lanes.timing(steps, tiers)


class NativeLanes:
    """The lanes of one step, where the core library is loaded."""

    def __init__(self, flow: Dataflow, cost_s: Sequence[float], rates: Rates) -> None:
        self._flow, self._cost_s, self._rates = flow, cost_s, rates
        flat, nodes = flow.flat, range(len(flow.nodes))
        copied = {**flow.loads, **flow.stores}
        self._arrays = (
            array("d", cost_s),
            array("b", [_role(flow, i) for i in nodes]),
            array("i", [copied.get(i, NONE) for i in nodes]),
            array("b", [flow.home_tiers.get(i, HOST) for i in nodes]),
            array("i", [flow.commits.get(i, NONE) for i in nodes]),
        )
        self._facts = _CFacts(
            len(flow.nodes),
            len(flow.values),
            *map(_address, self._arrays),
            CLists(*map(_address, flat.reads)),
            _address(flat.value_bytes),
            (ctypes.c_double * len(TIERS))(*map(rates.out_rate, TIERS)),
            (ctypes.c_double * len(TIERS))(*map(rates.in_rate, TIERS)),
            rates.copy_latency_s,
            rates.copy_share,
            SPLIT_S,
            bool(flow.loads),
        )
        self._host_only = array("b", bytes(len(flow.values)))
        self._seconds = array("d", bytes(4 * 8))

    def timing(self, steps: Sequence[Step], tiers: CopyTiers) -> Timing:
        """As `simulate_time`."""
        core = bound.core
        assert core is not None, "the core library is not loaded"
        kinds, subjects = encoded(steps)
        pairs, by_value = array("d", self._pair_seconds(steps)), self._tiers(tiers)
        is_valid = core.tfswap_lane_times(
            ctypes.byref(self._facts),
            *(_address(kinds), _address(subjects), len(steps)),
            *(_address(by_value), _address(pairs), _address(self._seconds)),
        )
        if not is_valid:
            raise ValueError("the schedule is not one of this step")
        now, compute, rerun, lost = self._seconds
        return Timing(now + lost, compute, rerun, now - compute - rerun, lost)

    def _tiers(self, tiers: Mapping[int, int]) -> array[int]:
        if not tiers:
            return self._host_only
        found = self._host_only[:]
        for value, tier in tiers.items():
            found[value] = tier
        return found

    def _pair_seconds(self, steps: Sequence[Step]) -> list[float]:
        nodes, cost_s = self._flow.nodes, self._cost_s
        leads = (number for number, step in enumerate(steps) if step.kind == LEAD)
        pairs = ((steps[number].subject, steps[number + 1].subject) for number in leads)
        return [concurrent_seconds([(nodes[i], cost_s[i]) for i in pair], self._rates) for pair in pairs]


def _role(flow: Dataflow, kernel: int) -> Role:
    if kernel in flow.copying:
        return Role.LOADS if kernel in flow.loads else Role.STORES
    if kernel in flow.crossing:
        return Role.SENDS if flow.crossing[kernel] == TO_HOST else Role.RECEIVES
    return Role.COMPUTES


def _address(numbers: array[int] | array[float]) -> int:
    return numbers.buffer_info()[0]
