"""Runs of an unordered step in C++ (csrc/core/executor_runs.cc), where the core library is loaded.

They have the results of `_Order` and `Replay` in unordered.py, in about a fiftieth of the time.
"""

from __future__ import annotations

import ctypes
from array import array

from tfswap.analysis.cost import GRAIN_S
from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.executor import (
    CONTENTION,
    COST_ERROR,
    DELAY_S,
    DELAYED_SHARE,
    NOISE,
    ORDERED_EDGES,
    SPIN_S,
    WAKE_S,
    Program,
)
from tfswap.analysis.flat_dataflow import Lists, lists_of
from tfswap.native import bound
from tfswap.simulator.arena_snapshot import ArenaSnapshot, located
from tfswap.simulator.native_replay import CLists, addresses, c_facts


class _CProgram(ctypes.Structure):
    """ExecutorProgram in C++, field for field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("node_count", "threads", "op_count")),
        *((name, ctypes.c_void_p) for name in ("seconds", "cheap", "pending", "ops", "is_kernel")),
        ("data", CLists),
        ("control", CLists),
        *(
            (name, ctypes.c_double)
            for name in ("cost_error", "noise", "contention", "grain_s", "delayed_share", "delay_s", "spin_s", "wake_s")
        ),
        ("ordered_edges", ctypes.c_int64),
    )


class NativeRuns:
    """Runs of one step in one arena. Requires `native_replay.is_available`."""

    def __init__(self, program: Program, flow: Dataflow, snapshot: ArenaSnapshot):
        self._flow = flow  # whose arrays the facts point to
        self._facts = c_facts(flow, snapshot, live=False)
        there = located(flow, addresses(flow, snapshot), snapshot)
        self._there = array("q", [max(address, 0) for address in there])
        numbers = {op: number for number, op in enumerate(dict.fromkeys(program.ops))}
        self._arrays = (
            array("d", program.seconds),
            array("b", program.cheap),
            array("i", program.pending),
            array("i", map(numbers.__getitem__, program.ops)),
            array("b", flow.is_kernel),
        )
        self._lists = lists_of(program.data), lists_of(program.control)
        self._program = _CProgram(
            len(program.ops),
            program.threads,
            len(numbers),
            *map(_address, self._arrays),
            *map(_c_lists, self._lists),
            COST_ERROR,
            NOISE,
            CONTENTION,
            GRAIN_S,
            DELAYED_SHARE if program.is_delayed else 0.0,
            DELAY_S,
            SPIN_S,
            WAKE_S,
            ORDERED_EDGES,
        )

    def peak_bytes(self, seed: int, steps: int) -> int:
        """The peak of one process: an arena, a thread pool, and steps one after another."""
        core = bound.core
        assert core is not None, "is_available"
        facts = self._facts
        peak: int = core.tfswap_unordered_peak(
            ctypes.byref(facts.flow),
            facts.filled.pointer,
            _address(self._there),
            _address(facts.pins),
            ctypes.byref(self._program),
            ctypes.c_uint64(seed),
            steps,
        )
        if peak < 0:
            raise ValueError("the orders are not those of this step")
        return peak


def _c_lists(lists: Lists) -> CLists:
    return CLists(*map(_address, lists))


def _address(numbers: array[int] | array[float]) -> int:
    return numbers.buffer_info()[0]
