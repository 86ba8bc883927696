"""The record of a simulated step equals the simulator's states."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from graphs import training_steps
from hypothesis import given, settings
from layered_steps import Layer, training_step

from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.compiler.step_report import timeline_of
from tfswap.ir.graph import Graph
from tfswap.kernels.device import DeviceModel
from tfswap.plan.schedule import AWAIT, IN, KERNELS, OUT, RELEASE, SPLIT
from tfswap.planner.promise import promised
from tfswap.report.timeline import ACTIVATIONS, GRADIENTS, KINDS, OTHERS, VARIABLES, WORKSPACES, Run, Timeline
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN, ArenaSnapshot
from tfswap.simulator.record import NO_ID, Record, record_planned
from tfswap.simulator.timing import SPLIT_S, simulate_time

CPU = DeviceModel()
NET = [Layer("dense"), Layer("relu"), Layer("scale", 1)] * 4


def optimized(graph: Graph, share: float = 0.0) -> tuple[Optimizer, Timeline]:
    """With a plan at the floor, or so far from there to the unoptimised peak."""
    optimizer = Optimizer(graph, CPU, Options(("swap",)))
    floor = optimizer.floor_bytes()
    limit = floor + int(share * max(0, optimizer.baseline.peak_bytes - floor))
    plan = optimizer.plan(limit, ordered=True)
    found = timeline_of(optimizer, plan, NOTHING_KNOWN)
    assert found.planned is not None
    assert found.planned.peak_bytes == optimizer.form_of(plan).peak_bytes(NOTHING_KNOWN)
    return optimizer, found


def check(record: Record) -> None:
    """What must hold of every record."""
    held = [0] * len(record.in_use_bytes)
    for hold in record.holds:
        assert 0 <= hold.first < hold.last <= len(held)
        for state in range(hold.first, hold.last):
            held[state] += hold.nbytes
    assert all(reported <= used for reported, used in zip(held, record.in_use_bytes, strict=True))
    assert all(a <= b for a, b in pairwise(record.began_s))
    run = Run(record, 1.0)
    kinds = run.at(range(len(held)))
    assert [sum(row) for row in kinds] == list(record.in_use_bytes)
    assert all(min(row) >= 0 for row in kinds)


@settings(max_examples=10)
@given(training_steps(max_layers=6))
def test_what_is_held_adds_up_to_what_the_allocator_has_in_use(graph: Graph) -> None:
    optimizer, found = optimized(graph)
    check(found.unoptimised)
    assert found.planned is not None
    check(found.planned)
    assert not any(row[OTHERS] for row in Run(found.planned, 1.0).at(range(len(found.planned.in_use_bytes))))
    assert found.unoptimised.peak_bytes <= optimizer.baseline.peak_bytes


def test_the_unoptimised_record_is_of_the_run_that_the_peak_is_predicted_from() -> None:
    optimizer, found = optimized(training_step(NET, 512, 128, assign=True))
    assert promised(found.unoptimised.peak_bytes) == optimizer.baseline.peak_bytes


def test_a_swapped_tensor_is_not_in_the_arena_while_it_is_away() -> None:
    _, found = optimized(training_step(NET, 512, 128), 0.3)
    record = found.planned
    assert record is not None
    flow = record.flow
    copied = {subject for kind, subject in record.steps if kind == OUT}
    assert copied, "the limit is one that swaps"
    for value in copied:
        stays = [hold for hold in record.holds if hold.value == value]
        assert len(stays) == 1 + sum(step == (IN, value) for step in record.steps)
        released = record.steps.index((RELEASE, value))
        back = record.steps.index((IN, value))
        assert record.began_s[stays[0].last] >= record.spans[released].end_s - 1e-12
        assert record.began_s[stays[1].first] <= record.spans[record.steps.index((AWAIT, value))].end_s
        assert back > released
        assert flow.values[value].nbytes <= stays[0].nbytes


def test_a_kernel_frees_what_it_reads_last_when_it_ends() -> None:
    _, found = optimized(training_step(NET, 512, 128))
    record = found.planned
    assert record is not None
    flow = record.flow
    at_end = 0
    for hold in record.holds:
        reads = [n for n, (kind, s) in enumerate(record.steps) if kind in KERNELS and hold.value in flow.reads[s]]
        if reads and hold.value not in flow.persistent and not any(step == (OUT, hold.value) for step in record.steps):
            went, span = record.began_s[hold.last], record.spans[reads[-1]]
            assert went <= span.start_s or went == span.end_s  # before its end its buffer can be forwarded
            at_end += went == span.end_s > span.start_s
    assert at_end > 4


def test_each_step_of_a_schedule_has_its_time() -> None:
    optimizer, found = optimized(training_step(NET, 512, 128))
    planned = found.planned
    assert planned is not None
    costs = optimizer.planner.cost_s
    slow = dataclasses.replace(optimizer.planner.rates, out_bytes_per_s=1e8, in_bytes_per_s=1e8)  # copies queue
    record = record_planned(optimizer.flow, planned.steps, costs, slow, snapshot=NOTHING_KNOWN)
    assert len(record.spans) == len(record.steps)
    now = 0.0
    lanes: dict[str, float] = {}
    for (kind, _), span in zip(record.steps, record.spans, strict=True):
        assert span.start_s <= span.end_s
        if kind in KERNELS or kind in (RELEASE, AWAIT):
            assert span.start_s >= now - 1e-12  # one after another
            now = span.end_s
        elif kind in (OUT, IN):
            assert span.start_s >= lanes.get(kind, 0.0) - 1e-12
            lanes[kind] = span.end_s
    assert now + record.timing.lost_s == pytest.approx(record.timing.total_s)
    assert record.timing == simulate_time(optimizer.flow, planned.steps, costs, slow)
    splits_s = SPLIT_S * sum(kind == SPLIT for kind, _ in planned.steps)  # added to the plan that the search found
    found_s = optimizer.search.fastest(optimizer.floor_bytes()).candidate.timing.total_s
    assert splits_s > 0
    assert planned.timing.total_s == pytest.approx(found_s + splits_s)


def test_kinds_are_what_tensors_are() -> None:
    _, found = optimized(training_step(NET, 512, 128))
    for run in (found.before, found.after):
        assert run is not None
        of = {run.name(h): KINDS[run.kind(h)] for h in run.record.holds}
        assert of["w0"] == KINDS[VARIABLES]
        assert of["dense0:0"] == KINDS[ACTIVATIONS]
        assert of["back1:0"] == KINDS[GRADIENTS]
        assert of["x:0"] == "inputs"
        peak = run.at([run.record.peak_state])[0]
        assert peak[VARIABLES] == 4 * 128 * 128 * 4


def test_what_else_is_in_the_arena_is_distinguished() -> None:
    graph = training_step(NET, 512, 128)
    optimizer = Optimizer(graph, CPU)
    plan = optimizer.plan(None, ordered=True)
    there = 1 << 28
    chunks = ((0, there, True), (there, 1 << 30, False))
    found = timeline_of(optimizer, plan, ArenaSnapshot(there, chunks, instantiated=True))
    assert found.planned is not None
    assert found.after is not None
    first = found.after.at([0])[0]
    assert sum(first) == there
    assert first[OTHERS] == there - first[VARIABLES] - first[1]
    assert first[WORKSPACES] == first[ACTIVATIONS] == 0


def test_columns_keep_the_peak_and_are_bounded() -> None:
    _, found = optimized(training_step(NET * 4, 512, 128))
    run = found.after
    assert run is not None
    for count in (1, 7, 1000):
        columns = run.columns(count, run.total_s)
        assert len(columns) <= count
        assert [c.column for c in columns] == sorted({c.column for c in columns})
        assert max(run.record.in_use_bytes[c.state] for c in columns) == run.record.peak_bytes
    wide = run.columns(1000, 2 * run.total_s)  # drawn next to a step that takes twice as long
    assert wide[-1].column < 500


def test_a_workspace_is_named_by_its_kernel() -> None:
    graph = training_step([Layer("dense"), Layer("relu")], 512, 128)
    _, found = optimized(graph)
    run = found.after
    assert run is not None
    for hold in run.record.holds:
        if hold.value == NO_ID:
            assert run.name(hold).startswith("workspace of ")
