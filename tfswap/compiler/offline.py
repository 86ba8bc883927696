"""Plans a step of a file or a proto. Nothing runs, and the arena of later runs is unknown."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from tfswap.analysis.cost import Costs
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.compiler.plan_cache import PlanCache
from tfswap.compiler.request import Request
from tfswap.compiler.rival_rewriters import refuse_rewriters
from tfswap.device import machine
from tfswap.errors import TfswapError, UnsupportedGraph
from tfswap.ir.graph import Graph
from tfswap.ir.op_traits import calls_functions, is_const
from tfswap.ir.permits import STATE
from tfswap.ir.types import Shape, TensorType
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.device_carriers import units
from tfswap.passes.memory_reservation import reserve_memory
from tfswap.plan.plan import Plan
from tfswap.report.report import Report
from tfswap.simulator.arena_snapshot import ArenaSnapshot

ARENA_NOTE = (
    "planned without the arena that the step will run in: variables, arguments and constants are taken to lie side "
    "by side in an otherwise empty one. Other memory of the process on the device adds to this peak, "
    "and so can holes between tensors, of up to the bytes of one; tfswap.load, or tfswap.optimize on the function "
    "itself, plans for the arena as it is."
)
PORTABLE_NOTE = (
    "portable: TensorFlow's own ops alone. The peak is a prediction, and nothing watches it: variables move when they "
    "are assigned, chunks are handed out whole, and TensorFlow may optimize the model again where it is loaded"
)
ALWAYS_OPEN = 0
"""The number of a file's gates, which no process closes."""
SLACK_SHARE = 0.02
"""Loading may put a variable into a chunk of up to twice its size, since the allocator does not split off small
remainders. The bytes of one variable are kept free for that, at most this share of the live bytes.
"""
SLACK_BYTES = 2**20
"""The bytes kept free in small steps, at most the persistent bytes. There, initial values count too: a session keeps a
constant initial value, and the first update allocates a second buffer.
"""


@dataclass(frozen=True)
class Planned:
    """A step, its plan, and the graph that carries it out (the step's own when the plan changes nothing)."""

    plan: Plan
    report: Report
    graph: Graph
    target: Target


def plan_offline(
    step: str,
    graph: Graph,
    request: Request,
    *,
    variables: Iterable[tuple[str, Shape]] = (),
    keeps_results: bool = True,
) -> Planned:
    """Plan and rewrite one step.

    Args:
        variables: element type and shape of all variables of the model on the device, used by the step or not.
        keeps_results: as of Optimizer.

    Raises:
        InfeasibleMemoryLimit, UnsupportedGraph, InvalidModel: as `optimize_graph`.
    """
    optimizer = optimizer_here(graph, request.options, variables, keeps_results=keeps_results)
    return plan_with(optimizer, step, graph, request)


def optimizer_here(
    graph: Graph, options: Options, variables: Iterable[tuple[str, Shape]], *, keeps_results: bool = True
) -> Optimizer:
    """An `offline_optimizer` for this machine's device. Raises UnsupportedGraph."""
    refuse_rewriters()
    device, cache = machine.current_device()[1], PlanCache.of_environment()
    return offline_optimizer(graph, device, options, variables, keeps_results=keeps_results, plan_cache=cache)


def plan_with(optimizer: Optimizer, step: str, graph: Graph, request: Request) -> Planned:
    """Plan and rewrite one step with its optimizer, from `optimizer_here`. Raises as `plan_offline`."""
    plan = request.choose(optimizer, machine.current_device()[0])
    if (complaint := request.complaint(step, plan)) is not None:
        raise TfswapError(complaint)
    target = optimizer.target
    gate = ALWAYS_OPEN if target.own_ops else None
    # In mode="analyze" too: it checks that the plan can be carried out.
    made = optimizer.rewrite(plan, gate, checked_by_gate=target.own_ops)
    report = _report(step, graph, optimizer, plan)
    return Planned(plan, report, graph if request.changes_nothing else made, target)


def carry_host_limit(changed: Iterable[Planned], request: Request) -> None:
    """Write the limits of swapped tensors' memory into rewritten steps, which share them and keep them wherever they
    run.
    """
    if request.options.portable:
        return  # a portable step has no such memory
    made = list(changed)
    digest = hashlib.sha256("".join(sorted(one.plan.fingerprint for one in made)).encode()).hexdigest()
    for one in made:
        reserve_memory(one.graph, Target(DeviceModel()), request.options.reservation(int(digest[:15], 16), one.plan))


def offline_optimizer(
    graph: Graph,
    model: DeviceModel,
    options: Options,
    variables: Iterable[tuple[str, Shape]] = (),
    costs: Costs | None = None,
    *,
    keeps_results: bool = True,
    plan_cache: PlanCache | None = None,
) -> Optimizer:
    """An Optimizer for a free arena with the step's arguments and constants, and all variables, in it.

    Raises:
        UnsupportedGraph: the step is on several GPUs, which have an arena each. CPUs share one.
    """
    if STATE in options.tactics:
        raise TfswapError(
            f"tactics has {STATE!r}, which moves variables of this process to host memory, and a file has none: leave "
            "it out"
        )
    if model.host_is_separate:
        _refuse_several_gpus(graph)
    there = [t for n in graph if n in graph.feeds or is_const(n.op) for t in n.outputs]
    held = [TensorType(dtype, shape) for dtype, shape in variables]
    sizes = [round_up(t.nbytes) for t in (*there, *held) if t.nbytes]
    snapshot = ArenaSnapshot(sum(sizes))
    made = Optimizer(
        graph, model, options, snapshot=snapshot, costs=costs, keeps_results=keeps_results, plan_cache=plan_cache
    )
    largest = max((t.nbytes or 0 for t in held), default=0)
    slack = min(largest, int(made.search.planners.live_peak_bytes * SLACK_SHARE))
    made.extra_margin_bytes = max(slack, min(snapshot.total_bytes, SLACK_BYTES))
    return made


def _refuse_several_gpus(graph: Graph) -> None:
    named = {where for part in (graph, *graph.all_bodies()) for where in units(part) if where.startswith("GPU:")}
    if len(named) > 1:
        raise UnsupportedGraph(
            f"the step is on {', '.join(sorted(named))}, and plans of files and predictions are of one GPU: decorate "
            "the function itself with tfswap.optimize, which plans for each GPU."
        )


def _report(step: str, graph: Graph, optimizer: Optimizer, plan: Plan) -> Report:
    report = optimizer.report(plan)
    notes = [*report.notes, ARENA_NOTE]
    if optimizer.options.portable:
        notes.append(PORTABLE_NOTE)
    calls = sorted(n.name for n in graph if calls_functions(n.op) and n not in graph.bodies)
    if calls:
        notes.append(
            f"{len(calls)} nodes run functions of their own ({calls[0]}{', ...' if len(calls) > 1 else ''}): what "
            "those allocate inside is not in these figures"
        )
    return dataclasses.replace(report, step=step, notes=tuple(notes))
