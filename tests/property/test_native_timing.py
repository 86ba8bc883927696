"""The time of schedules in C++ is that of the ones in Python, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("tensorflow")

from graphs import training_steps
from hypothesis import given
from hypothesis import strategies as st
from layered_steps import Layer, training_step
from planner_problems import CPU, slow
from test_home_copies import RATES, at_home, choices

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.graph import Graph
from tfswap.kernels.hardware import DISK, HOST, LENT, Rates
from tfswap.kernels.target import Target
from tfswap.native.load import load
from tfswap.plan.plan import Split
from tfswap.plan.schedule import Step, build_schedule
from tfswap.planner.planner import Planner
from tfswap.planner.problem import Choice
from tfswap.simulator.native_timing import NativeLanes
from tfswap.simulator.timing import simulate_time

COPIES = dataclasses.replace(
    RATES, copy_share=0.3, copy_latency_s=1e-5, peer_bytes_per_s=3e9, in_bytes_per_s=1.1e9, out_bytes_per_s=0.7e9
)


def compare(flow: Dataflow, choice: Choice, cost_s: list[float], rates: Rates = COPIES) -> None:
    load()
    steps = build_schedule(*choice)
    for tier in (HOST, DISK, LENT):
        tiers = {interval.value: tier for interval in choice.intervals[::2]} if tier else {}
        assert NativeLanes(flow, cost_s, rates).timing(steps, tiers) == simulate_time(flow, steps, cost_s, rates, tiers)


def costs(flow: Dataflow, seed: int) -> list[float]:
    """Of some kernels and copies, none of which takes a multiple of another's time."""
    return [1e-4 * (1 + (7919 * (i + seed)) % 1013 / 17) for i in range(len(flow.nodes))]


@slow
@given(training_steps(), st.integers(0, 1000))
def test_swaps_reruns_and_variables_at_home(graph: Graph, seed: int) -> None:
    for flow in (at_home(graph.copy()), analyse_dataflow(graph, CPU)):
        for choice in choices(Planner(flow, Target(CPU)))[:8]:
            compare(flow, choice, costs(flow, seed))


def test_concurrent_kernels_and_splits() -> None:
    flow = analyse_dataflow(training_step([Layer("dense", i) for i in range(6)], 64, 32), CPU)
    order = Planner(flow, Target(CPU)).problems[0].order
    splits = (Split(2, 256), Split(2, 512), Split(7, 1024))
    for paired in ((), (3,), (3, 6)):
        compare(flow, Choice(order, [], paired=paired, splits=splits), costs(flow, 1))


def test_a_copy_that_has_not_started_is_refused() -> None:
    flow = analyse_dataflow(training_step([Layer("dense", 0)], 64, 32), CPU)
    load()
    lanes = NativeLanes(flow, costs(flow, 1), COPIES)
    for kind in ("release", "swap_in", "await"):
        with pytest.raises(ValueError, match="not one of this step"):
            lanes.timing([Step(kind, 0)], {})
