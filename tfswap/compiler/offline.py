"""Plans a step of a file or a proto. Nothing runs, and the arenas of later runs are unknown.

A step on several devices with arenas of their own is cut by device (passes/device_parts.py). Each part has an optimizer
and a plan, as where such a step runs (runtime/planning_loop.py), and one graph carries all plans out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from tfswap.analysis.cost import Costs
from tfswap.compiler.calibration import calibrated
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.device_times import assume_times, note_times, times_of
from tfswap.compiler.lower import ALWAYS_OPEN
from tfswap.compiler.options import Options
from tfswap.compiler.plan_cache import PlanCache
from tfswap.compiler.request import Request
from tfswap.compiler.rival_rewriters import refuse_rewriters
from tfswap.device import machine
from tfswap.device.placement import FIRST_GPU
from tfswap.errors import InfeasibleMemoryLimit, TfswapError, UnsupportedGraph
from tfswap.ir.graph import Graph
from tfswap.ir.op_traits import calls_functions, is_const
from tfswap.ir.permits import FUSE
from tfswap.ir.types import Shape, TensorType
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.device_carriers import FIRST, unit, units
from tfswap.passes.device_parts import Parts, cut
from tfswap.passes.join_parts import join
from tfswap.passes.memory_reservation import of_all_parts, passed_bytes, reserve_memory
from tfswap.passes.variable_devices import require_places
from tfswap.plan.plan import Plan
from tfswap.report.report import Report, report_of_devices
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.arena_snapshot import Variable as InArena

ARENA_NOTE = (
    "planned without the arena that the step will run in: variables, arguments and constants are taken to lie side "
    "by side in an otherwise empty one. Other memory of the process on the device adds to this peak, "
    "and so can holes between tensors, of up to the bytes of one; tfswap.load, or tfswap.optimize on the function "
    "itself, plans for the arena as it is."
)
SCOPE_NOTE = (
    "the limit is below the bytes of the variables: load this model in `with tfswap.scope():`, which puts each of them "
    "in host memory as soon as it has its value. Otherwise the first step fails before it begins"
)
PORTABLE_NOTE = (
    "portable: TensorFlow's own ops alone. The peak is a prediction, and nothing watches it: variables move when they "
    "are assigned, chunks are handed out whole, and TensorFlow may optimize the model again where it is loaded"
)
SLACK_SHARE = 0.02
"""Loading may put a variable into a chunk of up to twice its size, since the allocator does not split off small
remainders. The bytes of one variable are kept free for that, at most this share of the live bytes.
"""
SLACK_BYTES = 2**20
"""The bytes kept free in small steps, at most the persistent bytes. There, initial values count too: a session keeps a
constant initial value, and the first update allocates a second buffer.
"""


class Variable(NamedTuple):
    """A variable of a model.

    Attributes:
        dtype, shape: of its value.
        device: as TensorFlow names devices; empty where it is not known.
    """

    dtype: str
    shape: Shape
    device: str = ""


@dataclass(frozen=True)
class Planned:
    """A step, its plans, and the graph that carries them out (the step's own when they change nothing).

    Attributes:
        plans: by device; of a step on one device by "".
    """

    plans: Mapping[str, Plan]
    report: Report
    graph: Graph
    target: Target

    @property
    def plan(self) -> Plan:
        """The plan; of several devices, the first one's."""
        return next(iter(self.plans.values()))

    @property
    def changes_nothing(self) -> bool:
        """Whether the step stays as it is."""
        return all(plan.changes_nothing for plan in self.plans.values())


@dataclass(frozen=True)
class OfflineStep:
    """A step with an optimizer for each device.

    Attributes:
        graph: the whole step.
        parts: the step, cut by device; None where it is on one.
        optimizers: by device, the first one first; of a step on one device by "".
        device: the device of a step on one.
    """

    graph: Graph
    parts: Parts | None
    optimizers: Mapping[str, Optimizer]
    device: str

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; of several devices, the first one's."""
        return next(iter(self.optimizers.values()))

    def choose(self, request: Request, *, ordered: bool = False) -> dict[str, Plan]:
        """The plan of each device. Raises as `Request.choose`; of several devices, a refusal names the device.

        Args:
            ordered: order the step also where its limit is well above the unoptimised peak.
        """
        if request.limits_host and self.optimizer.target.device.host_is_separate:
            raise TfswapError(
                f"memory_limit has {FIRST}, and a file's step is planned for its GPUs alone: leave it out, or decorate "
                "the function (tfswap.optimize)"
            )
        self.assume_waits()
        plans = self._choose(request, ordered=ordered)
        unchanged = [plan.changes_nothing for plan in plans.values()]
        if request.plan is None and any(unchanged) and not all(unchanged):
            # One function runs all parts. In an analysis, a device that can't keep its limit has no order.
            plans = self._choose(request, ordered=True)
        return self._timed(plans)

    def assume_waits(self) -> None:
        """Have each part planned for when the other devices send it tensors, if nothing is moved there."""
        if self.parts is not None:
            for where, timed in times_of(self.parts, self.optimizers, {}).items():
                assume_times(self.optimizers[where], timed)

    def _timed(self, plans: dict[str, Plan]) -> dict[str, Plan]:
        """The plans with their times together: a device waits for what others send it."""
        if self.parts is None or any(plan.changes_nothing for plan in plans.values()):
            return plans
        timed = times_of(self.parts, self.optimizers, plans)
        for where, optimizer in self.optimizers.items():
            note_times(optimizer, timed[where])
        return {where: replace(plan, seconds=timed[where].timing.total_s) for where, plan in plans.items()}

    def _choose(self, request: Request, *, ordered: bool) -> dict[str, Plan]:
        plans: dict[str, Plan] = {}
        searched: Optimizer | None = None
        for where, optimizer in self.optimizers.items():
            optimizer.example = searched
            try:
                plans[where] = request.choose(optimizer, where or self.device, ordered=ordered)
            except InfeasibleMemoryLimit as error:
                if not where:
                    raise
                raise error.of(f"on {where}") from None
            searched = optimizer.searched
        return plans

    def rewrite(self, plans: Mapping[str, Plan]) -> Graph:
        """A graph that carries out all plans, behind gates that check the limits in the arenas that they find."""
        own_ops = self.optimizer.target.own_ops
        made = {
            where: optimizer.rewrite(plans[where], ALWAYS_OPEN if own_ops else None, checked_by_gate=own_ops)
            for where, optimizer in self.optimizers.items()
        }
        if self.parts is None:
            return made[""]
        graph = join(self.parts, made).graph
        if own_ops:
            require_places(graph, self.optimizer.target)
        return graph


class ArenaInUse(NamedTuple):
    """The arena of a step that is planned in the process in which it runs.

    Attributes:
        snapshot: the arena before the step, without its constants.
        others_bytes, extra_margin_bytes: as of Optimizer.
    """

    snapshot: ArenaSnapshot
    others_bytes: int = 0
    extra_margin_bytes: int = 0


def plan_offline(
    step: str,
    graph: Graph,
    request: Request,
    *,
    variables: Iterable[tuple[str, Shape]] = (),
    keeps_results: bool = True,
    arena: ArenaInUse | None = None,
    ordered: bool = False,
) -> Planned:
    """Plan and rewrite one step on one device.

    Args:
        variables: element type and shape of all variables of the model on the device, used by the step or not.
        keeps_results: as of Optimizer.
        arena: as it is now; None where the step runs elsewhere.
        ordered: as of OfflineStep.choose.

    Raises:
        InfeasibleMemoryLimit, UnsupportedGraph, InvalidModel: as `optimize_graph`.
    """
    refuse_rewriters()
    device, model = machine.current_device()
    model = calibrated(model, request.options)
    cache = PlanCache.of_environment()
    if arena is None:
        optimizer = offline_optimizer(
            graph, model, request.options, variables, keeps_results=keeps_results, plan_cache=cache
        )
    else:
        optimizer = Optimizer(
            graph, model, request.options, **arena._asdict(), keeps_results=keeps_results, plan_cache=cache
        )
    return plan_with(OfflineStep(graph, None, {"": optimizer}, device), step, request, ordered=ordered)


class OnDevice(NamedTuple):
    """How the part of a step on a device is planned.

    Attributes:
        model: the device's.
        options: of the plan.
        costs: as of Optimizer.
        has_host: whether the limit of host memory is of this device alone; else that of all devices.
    """

    model: DeviceModel
    options: Options
    costs: Costs | None = None
    has_host: bool = False

    def shared(self, parts: int, passed_bytes: int) -> OnDevice:
        """The same for one of several parts of a step. Arguments as of `Options.shared`."""
        return self._replace(options=self.options.shared(1 if self.has_host else parts, passed_bytes))


def step_here(graph: Graph, options: Options, variables: Iterable[Variable]) -> OfflineStep:
    """An `offline_step` for this machine's devices. Raises UnsupportedGraph."""
    refuse_rewriters()
    device, model = machine.current_device()
    on = OnDevice(calibrated(model, options), options)
    return offline_step(graph, {device: on}, variables, plan_cache=PlanCache.of_environment())


def offline_step(
    graph: Graph,
    devices: Mapping[str, OnDevice],
    variables: Iterable[Variable] = (),
    *,
    plan_cache: PlanCache | None = None,
) -> OfflineStep:
    """A step, whose nodes are placed (device/offline_placement.py), with an optimizer for each device.

    Args:
        devices: those of the machine, by name; others are like the first.
        variables: all variables of the model, used by the step or not.

    Raises UnsupportedGraph.
    """
    name, first = next(iter(devices.items()))

    def optimizer(part: Graph, on: OnDevice, held: Iterable[Variable]) -> Optimizer:
        return offline_optimizer(part, on.model, on.options, held, on.costs, plan_cache=plan_cache)

    planned = sorted((each for each in units(graph) if each.startswith("GPU:")), key=lambda each: int(each[4:]))
    portable = first.options.portable  # a prediction, in which what runs on the CPU is the GPU's
    if not is_cut_by_device(graph, first.model) or (portable and len(planned) < 2):
        return OfflineStep(graph, None, {"": optimizer(graph, first, variables)}, name)
    if portable:
        raise UnsupportedGraph(
            f"the step is on {', '.join(sorted(units(graph)))}, and portable=True is for a step on one device: what "
            "goes from one to another needs tfswap's ops."
        )
    parts = cut(graph, planned, first.model)
    passed = passed_bytes(parts.graphs.values())
    held: dict[str, list[Variable]] = {}
    for variable in variables:
        held.setdefault(unit(variable.device) if variable.device else FIRST_GPU, []).append(variable)
    optimizers = {
        where: optimizer(
            parts.graphs[where], devices.get(where, first).shared(len(planned), passed), held.get(where, ())
        )
        for where in planned
        if where in parts.graphs
    }
    return OfflineStep(graph, parts, optimizers, name)


def is_cut_by_device(graph: Graph, model: DeviceModel) -> bool:
    """Whether the devices of a step, whose nodes are placed, have arenas of their own."""
    return model.host_is_separate and len({*units(graph), FIRST_GPU}) > 1


def plan_with(offline: OfflineStep, step: str, request: Request, *, ordered: bool = False) -> Planned:
    """Plan and rewrite one step. Arguments and errors as of `plan_offline`."""
    plans = offline.choose(request, ordered=ordered)
    for plan in plans.values():
        if (complaint := request.complaint(step, plan)) is not None:
            raise TfswapError(complaint)
    # In mode="analyze" too: it checks that the plans can be carried out. Where a limit can't be kept, there is none.
    unchanged = {plan.changes_nothing for plan in plans.values()}
    made = offline.graph if len(unchanged) > 1 else offline.rewrite(plans)
    reports = {where: _report(step, where, offline, plan, request) for where, plan in plans.items()}
    graph = offline.graph if request.changes_nothing else made
    return Planned(plans, report_of_devices(step, reports), graph, offline.optimizer.target)


def carry_host_limit(changed: Iterable[Planned], request: Request) -> None:
    """Write the limits of swapped tensors' memory into rewritten steps, which share them and keep them wherever they
    run.
    """
    if request.options.portable:
        return  # a portable step has no such memory
    made = list(changed)
    fingerprints = sorted(plan.fingerprint for one in made for plan in one.plans.values())
    owner = int(hashlib.sha256("".join(fingerprints).encode()).hexdigest()[:15], 16)
    for one in made:
        reservation = of_all_parts([request.options.reservation(owner, plan) for plan in one.plans.values()])
        reserve_memory(one.graph, Target(DeviceModel()), reservation)


def offline_optimizer(
    graph: Graph,
    model: DeviceModel,
    options: Options,
    variables: Iterable[tuple[str, Shape] | Variable] = (),
    costs: Costs | None = None,
    *,
    keeps_results: bool = True,
    plan_cache: PlanCache | None = None,
) -> Optimizer:
    """An Optimizer for a free arena with the step's arguments and constants, and all variables, in it.

    Raises:
        UnsupportedGraph: the step is on several GPUs, which have an arena each (`offline_step`). CPUs share one.
        TfswapError: the options have the tactic "fuse".
    """
    if FUSE in options.tactics:
        raise TfswapError(
            f'tactics has "{FUSE}", and the memory of blocks that XLA compiles is measured in the process that runs '
            f'them: use it with tfswap.optimize on the tf.function, or leave "{FUSE}" out'
        )
    if model.host_is_separate:
        _refuse_several_gpus(graph)
    there = [t for n in graph if n in graph.feeds or is_const(n.op) for t in n.outputs]
    held = [TensorType(variable[0], variable[1]) for variable in variables]
    sizes = [round_up(t.nbytes) for t in (*there, *held) if t.nbytes]
    snapshot = ArenaSnapshot(sum(sizes), variables=_places(graph) if held else ())
    made = Optimizer(
        graph, model, options, snapshot=snapshot, costs=costs, keeps_results=keeps_results, plan_cache=plan_cache
    )
    largest = max((t.nbytes or 0 for t in held), default=0)
    slack = min(largest, int(made.search.planners.live_peak_bytes * SLACK_SHARE))
    made.extra_margin_bytes = max(slack, min(snapshot.total_bytes, SLACK_BYTES))
    made.margin_is_of_residents = True
    return made


def _places(graph: Graph) -> tuple[InArena, ...]:
    """The variables that the step has handles of."""
    known = [(feed.name, v.type.nbytes or 0) for feed in graph.feeds if (v := graph.variables.get(feed.name))]
    return tuple(InArena(name, address, nbytes) for address, (name, nbytes) in enumerate(known, 1))


def _refuse_several_gpus(graph: Graph) -> None:
    named = {where for part in (graph, *graph.all_bodies()) for where in units(part) if where.startswith("GPU:")}
    if len(named) > 1:
        raise UnsupportedGraph(
            f"the step is on {', '.join(sorted(named))}, and this is planned for one GPU: a SavedModel "
            "(tfswap.optimize_graph), tfswap.simulate and a decorated function are planned for each."
        )


def _report(step: str, where: str, offline: OfflineStep, plan: Plan, request: Request) -> Report:
    optimizer = offline.optimizers[where]
    report = optimizer.report(plan)
    notes = [*report.notes, ARENA_NOTE]
    if plan.at_home and plan.limit_bytes is not None and plan.limit_bytes < optimizer.resident_bytes:
        notes.append(SCOPE_NOTE)
    if optimizer.options.portable:
        notes.append(PORTABLE_NOTE)
    graph = offline.graph
    calls = sorted(n.name for n in graph if calls_functions(n.op) and n not in graph.bodies)
    if calls:
        notes.append(
            f"{len(calls)} nodes run functions of their own ({calls[0]}{', ...' if len(calls) > 1 else ''}): what "
            "those allocate inside is not in these figures"
        )
    name = f"{step} on {where}" if len(offline.optimizers) > 1 else step
    return replace(report, step=name, device=where, notes=tuple(notes), requested_share=request.share(where))
