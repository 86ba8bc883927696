"""The road from a graph to a rewritten graph that every front end takes: facts, plan, passes, verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tfswap.analysis.cost import kernel_seconds
from tfswap.analysis.dataflow import Dataflow, analyse_dataflow
from tfswap.analysis.device import DeviceModel
from tfswap.errors import InfeasibleMemoryLimit, InvalidModel, TfswapError, UnsupportedGraph
from tfswap.frontends.marks import marked_to_keep
from tfswap.ir.graph import Graph, Output
from tfswap.ir.ops import has_small_extras, sized_by_value
from tfswap.passes.order import apply_order
from tfswap.passes.settle import apply_settle
from tfswap.passes.split_views import apply_split_views
from tfswap.passes.swap import apply_swaps, to_interval
from tfswap.passes.verify import verify
from tfswap.planner.baseline import simulate_baseline
from tfswap.planner.plan import Absence, Plan, fingerprint
from tfswap.planner.planner import Candidate, Planner
from tfswap.planner.schedule import build_schedule
from tfswap.planner.simulate import NOTHING_KNOWN, Resident, simulate_memory
from tfswap.report.report import Report, make_report
from tfswap.sizes import format_bytes, parse_limit

TACTICS = ("swap",)
BASELINE_SPREAD = 1.1
"""An unordered step's peak varies from run to run, by up to 8% where it was measured: only a limit above the
predicted peak by this much is left to chance."""


SMALL = 1024
"""Bytes: what is computed from tensors no larger than this, shapes as a rule, is taken to be no larger either."""


@dataclass(frozen=True)
class Options:
    """What a user may ask for, besides the limit.

    Attributes:
        tactics: subset of TACTICS; ordering is always on.
        host_limit_bytes: the most host memory for swapped tensors; None for no limit.
        keep: names of tensors that must stay ("node:0").
        solver: who chooses what is swapped, of SOLVERS: the baselines are there to be compared with.
    """

    tactics: tuple[str, ...] = TACTICS
    host_limit_bytes: int | None = None
    keep: frozenset[str] = frozenset()
    solver: str = "furthest"

    def __post_init__(self) -> None:
        unknown = [t for t in self.tactics if t not in TACTICS]
        if unknown:
            raise TfswapError(f"tactics names {unknown[0]!r}; known are {', '.join(map(repr, TACTICS))}")


class Optimizer:
    """One graph on its way: its facts, its planner, and what was decided.

    Args:
        graph: the step, with every size bound.
        device: where it runs.
        resident: what is in the arena before the step.
        extra_margin_bytes: kept free besides, since a run has shown the need.
    """

    def __init__(
        self,
        graph: Graph,
        device: DeviceModel,
        options: Options | None = None,
        *,
        resident: Resident = NOTHING_KNOWN,
        extra_margin_bytes: int = 0,
    ):
        self.options = options or Options()
        self.graph = graph
        self.device = device
        self.extra_margin_bytes = extra_margin_bytes
        _require_sizes(graph)
        self.fingerprint = fingerprint(graph)
        self.settled = graph.copy()
        apply_settle(self.settled)
        apply_split_views(self.settled)
        self.settled.prune()
        self.flow: Dataflow = analyse_dataflow(self.settled, device)
        kept = (self.settled.tensor(name) for name in (*self.options.keep, *marked_to_keep(self.settled)))
        self.planner = Planner(
            self.flow,
            device,
            resident=resident,
            keep=frozenset(v for t in kept if (v := self.flow.value_of.get((t.node, t.index))) is not None),
            host_limit_bytes=self.options.host_limit_bytes,
            swap="swap" in self.options.tactics,
            solver=self.options.solver,
        )
        self.resident_bytes = max(resident.total_bytes, self.flow.persistent_bytes)
        self.baseline_peak_bytes = self._baseline(resident)

    def plan(self, limit: int | str | None) -> Plan:
        """The plan for a limit. Raises InfeasibleMemoryLimit, with the floor, when there is none."""
        limit_bytes = None if limit is None else parse_limit(limit, self.baseline_peak_bytes)
        if limit_bytes is None or limit_bytes >= self.baseline_peak_bytes * BASELINE_SPREAD:
            return self._freeze(limit_bytes, None)
        aim = limit_bytes - self.extra_margin_bytes
        found = self.planner.candidate(aim)
        if found is None:
            raise self._infeasible(limit_bytes)
        return self._freeze(limit_bytes, found)

    def _baseline(self, resident: Resident) -> int:
        """Peak of the step as it was traced: variables adopt buffers, and an IdentityN holds all gradients."""
        flow = analyse_dataflow(self.graph, self.device)
        cost_s = [kernel_seconds(node, self.planner.rates) for node in flow.nodes]
        return simulate_baseline(flow, cost_s, self.device.inter_op_threads, resident=resident)

    def floor_bytes(self) -> int:
        return self.planner.floor_bytes() + self.extra_margin_bytes

    def _infeasible(self, limit_bytes: int) -> InfeasibleMemoryLimit:
        floor = self.floor_bytes()
        host = self.options.host_limit_bytes
        return InfeasibleMemoryLimit(
            f"memory_limit is {limit_bytes} bytes ({format_bytes(limit_bytes)}), and this step needs at least "
            f"{floor} ({format_bytes(floor)}): {format_bytes(self.resident_bytes)} are there throughout "
            "(variables, arguments, constants, other tensors), the rest is what its largest kernels need at once"
            + (f" with at most {format_bytes(host)} of host memory" if host is not None else "")
            + f". Ask for memory_limit={floor} or more, or make the batch smaller.",
            floor_bytes=floor,
            limit_bytes=limit_bytes,
        )

    def _freeze(self, limit_bytes: int | None, found: Candidate | None) -> Plan:
        names = [node.name for node in self.flow.nodes]
        if found is None:
            return Plan(
                self.fingerprint,
                limit_bytes,
                (),
                (),
                self.baseline_peak_bytes,
                self.baseline_peak_bytes,
                self.resident_bytes,
                0,
                1.0,
                "none",
            )
        return Plan(
            fingerprint=self.fingerprint,
            limit_bytes=limit_bytes,
            order=tuple(names[i] for i in found.problem.order),
            absences=tuple(
                Absence(
                    self.flow.values[a.value].tensor.name,
                    self.flow.values[a.value].nbytes,
                    a.out,
                    a.release,
                    a.back,
                    a.use,
                )
                for a in found.intervals
            ),
            baseline_peak_bytes=self.baseline_peak_bytes,
            planned_peak_bytes=found.peak_bytes + self.extra_margin_bytes,
            persistent_bytes=self.resident_bytes,
            host_bytes=found.memory.host_peak_bytes,
            time_ratio=round(found.timing.total_s / found.timing.compute_s, 6) if found.timing.compute_s else 1.0,
            solver=self.options.solver,
        )

    def peak_bytes(self, plan: Plan, resident: Resident) -> int:
        """The peak that `plan` has in an arena with this content."""
        values = {self.flow.values[v].tensor.name: v for v in range(len(self.flow.values))}
        order = [self.flow.place[name] for name in plan.order]
        steps = build_schedule(order, [to_interval(a, values) for a in plan.absences])
        return simulate_memory(self.flow, steps, resident=resident).peak_bytes

    def written_variables(self) -> list[int]:
        """Which feeds, by position, are variables that the step writes."""
        written = {t.node.name for i, us in enumerate(self.flow.updates) if us for t in self.flow.nodes[i].inputs}
        return [
            p for p, feed in enumerate(self.graph.feeds) if feed.name in written and feed.outputs[0].dtype == "resource"
        ]

    def rewrite(self, plan: Plan, gate: int | None = None) -> Graph:
        """A new graph that carries out `plan`, behind a gate if one is given.

        Raises InvalidModel when the plan is another graph's.
        """
        if plan.fingerprint != self.fingerprint:
            raise InvalidModel(
                "this plan was made for another graph (its fingerprint differs): plan again for this one, or "
                "load the plan that was made for it"
            )
        strange = [name for name in plan.order if name not in self.flow.place]
        if strange:
            raise InvalidModel(
                f"this plan names the node {strange[0]!r}, which this graph does not have: the two are built alike "
                "and named otherwise (a second model in one process, say). Plan again for this one."
            )
        if plan.changes_nothing:
            return self.graph
        made = self.settled.copy()
        chain = apply_swaps(made, self.flow, plan)
        apply_order(made, chain, gate)
        made.prune()
        verify(made)
        return made

    def report(self, plan: Plan, locate: Callable[[str], str | None] = lambda _: None) -> Report:
        """What was found and decided."""
        return make_report(self.flow, self.planner, plan, self.floor_bytes, locate)


def _require_sizes(graph: Graph) -> None:
    """Refuse a graph with a tensor whose bytes are unknown: a plan for it would be a guess."""
    small: set[Output] = set()
    unknown = []
    for node in graph.topological():
        grows = sized_by_value(node.op) or not (
            has_small_extras(node.op)
            or all(t in small or (t.type.nbytes is not None and t.type.nbytes < SMALL) for t in node.inputs)
        )
        for tensor in (node.out(i) for i in range(len(node.outputs))):
            if tensor.type.nbytes is not None:
                continue
            if grows:
                unknown.append(tensor)
            else:  # arithmetic on shapes: a few integers, whatever they are
                small.add(tensor)
    if unknown:
        first = unknown[0]
        raise UnsupportedGraph(
            f"the size of {first.name!r} ({first.node.op}, {first.type}) is not known before the step runs, nor "
            f"are {len(unknown) - 1} others: give the sizes of the inputs (batch_size= or input_shapes=, or call "
            "the function with tensors of full shape)"
        )
