"""The report of a planned step, and its memory over time."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tfswap.compiler.backward import trains
from tfswap.compiler.certify import bounds_of
from tfswap.compiler.floor_levers import floor_of
from tfswap.ir.permits import STATE
from tfswap.plan.plan import Plan
from tfswap.report.report import Report
from tfswap.report.reporting import PlannedStep, make_report
from tfswap.report.timeline import Timeline
from tfswap.report.variables import Homes
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.working_set import largest_working_set

if TYPE_CHECKING:
    from tfswap.compiler.compiler import Optimizer


def report_of(optimizer: Optimizer, plan: Plan, snapshot: ArenaSnapshot | None = None) -> Report:
    """The report of a plan.

    Args:
        snapshot: the arena before the step; by default the assumed one.
    """
    search, variants = optimizer.search, optimizer.search.variants
    variant = optimizer.variant_of(plan)
    there = search.planners.snapshot_of(variant.rewriting) if snapshot is None else snapshot
    step = PlannedStep(
        graph=variant.graph,
        whole=lambda: variants[variant.rewriting._replace(sliced=())].graph,
        flow=variant.flow,
        planner=search.planners.of(variant),
        plan=plan,
        saved=variants.saved_bytes,
        recompute_s=variants.recomputing_s(variant.rewriting, optimizer.costs),
        permits=variants.permits,
        encodings=variant.encodings,
        inner=variant.inner,
        bodies=variant.bodies,
        floor=optimizer.floor_bytes,
        levers=functools.cache(lambda: floor_of(optimizer)),
        baseline=lambda: optimizer.baseline,
        bounds=lambda: bounds_of(optimizer, plan),
        trains=trains(optimizer.graph),
        locate=optimizer.locate,
        timeline=functools.cache(lambda: timeline_of(optimizer, plan, there)),
        largest=functools.partial(_largest_working_set, optimizer),
        snapshot=there,
        homes=homes_of(optimizer),
    )
    return make_report(step)


def homes_of(optimizer: Optimizer) -> Homes:
    """What decides where the step's variables are at home."""
    return Homes(
        optimizer.settled,
        optimizer.search.planners.variables,
        STATE in optimizer.options.tactics,
        optimizer.planner.problems[0].smallest_bytes,
    )


def timeline_of(optimizer: Optimizer, plan: Plan, snapshot: ArenaSnapshot) -> Timeline:
    """The bytes in the arena over the step, without and with `plan`.

    Args:
        snapshot: the content of the arena before the planned step.
    """
    after = None if plan.changes_nothing else optimizer.form_of(plan).record(optimizer.costs, snapshot)
    unoptimised = optimizer.baseline
    return Timeline(
        optimizer.unoptimised.record(), after, unoptimised.seconds, unoptimised.peak_bytes, plan.planned_peak_bytes
    )


def _largest_working_set(optimizer: Optimizer) -> tuple[str, int]:
    """The kernel that needs most in itself, of the variant that can be brought down to the least, and its bytes."""
    with optimizer.at_floor():
        flow = optimizer.search.lowest().variant.flow
    kernel, nbytes = largest_working_set(flow)
    return ("", 0) if kernel < 0 else (flow.nodes[kernel].name, nbytes)
