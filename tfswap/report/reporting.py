"""Makes the report of a planned step from its facts, its plan and its simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from tfswap.analysis.body_encodings import InnerEncoding
from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.encodings import Encoding
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import control_flow, runs_python
from tfswap.ir.permits import Permit
from tfswap.kernels.close_lines import added_terms, most_difference
from tfswap.kernels.slice_lines import Sliceable, sliceable
from tfswap.passes.tactics.state_homes import bytes_at_home
from tfswap.plan.plan import Plan, Slices
from tfswap.plan.schedule import build_schedule, planned_schedule
from tfswap.planner.bodies import PlannedBody
from tfswap.planner.certificate import Bounds
from tfswap.planner.convolution_room import rooms
from tfswap.planner.planner import Planner
from tfswap.planner.promise import simulated_limit
from tfswap.report.block_rows import block_rows, note_of
from tfswap.report.explain import Explanation, explain, why_unused
from tfswap.report.levers import Floor
from tfswap.report.report import ConvolutionRow, Report
from tfswap.report.rows import Moves, Smaller, TensorRow, inner_row, saved_rows, tensor_rows
from tfswap.report.timeline import Timeline
from tfswap.report.variables import Homes, VariableTable
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.memory import simulate_memory, widest_bytes
from tfswap.simulator.unordered import Baseline
from tfswap.simulator.working_set import Reuse, find_reuse

UNCHANGED_NOTE = (
    "the step fits its limit as it was traced, and runs unchanged. Its kernels have no fixed order, so its peak varies "
    "from run to run: the planned one is the likely one"
)


@dataclass(frozen=True)
class PlannedStep:
    """All facts that a report is made from.

    Attributes:
        graph: the graph that `plan` is for, before its tactics are applied.
        whole: gives that graph with kernels whole that the plan runs in slices.
        flow: the facts from which `planner` made `plan`.
        saved: the bytes of the lists that loops save in, by name.
        recompute_s: the seconds in a step of recomputing the elements of a list, by the list's name.
        permits: the permits of lists, by name.
        encodings: the encodings that kernels of the step can read.
        inner: the encodings that kernels of its bodies can read.
        bodies: the bodies with a plan of their own.
        floor: gives the smallest limit that the planner reaches.
        levers: gives what would lower it.
        baseline: gives the prediction for the unoptimised step.
        bounds: gives bounds of all plans; None where there are none.
        trains: as of the Report.
        locate: gives the user's source line of a node, by its name.
        timeline: gives the simulated step.
        largest: gives the kernel with the largest working set, and its bytes.
        snapshot: the arena before the step.
        homes: what decides where variables are at home.
    """

    graph: Graph
    whole: Callable[[], Graph]
    flow: Dataflow
    planner: Planner
    plan: Plan
    saved: Mapping[str, int]
    recompute_s: Mapping[str, float]
    permits: Mapping[str, Permit]
    encodings: Sequence[Encoding]
    inner: Sequence[InnerEncoding]
    bodies: Sequence[PlannedBody]
    floor: Callable[[], int]
    levers: Callable[[], Floor]
    baseline: Callable[[], Baseline]
    bounds: Callable[[], Bounds | None]
    trains: bool
    locate: Callable[[str], str | None]
    timeline: Callable[[], Timeline]
    largest: Callable[[], tuple[str, int]]
    snapshot: ArenaSnapshot
    homes: Homes


def make_report(step: PlannedStep) -> Report:
    """The report of a planned step."""
    flow, planner, plan = step.flow, step.planner, step.plan
    tables = _Tables(step)
    rows = tables.rows()
    more_bytes = _more_bytes(flow, planner, plan)
    unmodelled = tuple(_named(flow, flow.nodes[i], more_bytes) for i in flow.inexact)
    moves = (tables.outer, *tables.inside)
    blocks = () if plan.changes_nothing else block_rows(step.graph, flow, step.locate)
    return Report(
        planned_peak_bytes=plan.planned_peak_bytes,
        memory_limit_bytes=plan.limit_bytes,
        persistent_bytes=plan.persistent_bytes,
        seconds=plan.seconds,
        host_bytes=plan.host_bytes,
        disk_bytes=plan.disk_bytes,
        kernels=len(plan.order),
        reruns=sum(round(each.times * sum(map(len, each.again.values()))) for each in moves),
        rows=rows,
        alive_at_peak=_alive_at_peak(flow, planner, plan),
        unmodelled=unmodelled,
        trains=step.trains,
        costs=planner.costs.source,
        at_home_bytes=bytes_at_home(step.graph) + bytes_at_home(step.graph, disk=True),
        sliced=plan.sliced,
        blocks=blocks,
        notes=(
            *((UNCHANGED_NOTE,) if _fits_unchanged(plan) else ()),
            *_other_orders(step.whole, plan.sliced),
            *note_of(blocks),
        ),
        _floor=step.floor,
        _levers=step.levers,
        _timeline=step.timeline,
        _baseline=step.baseline,
        _bounds=step.bounds,
        _graph=lambda: step.graph,
        _explain=lambda name: _explained(tables, rows, name),
        _largest=step.largest,
        _others=lambda: tables.rows(rest=True),
        _reuse=lambda: Reuse(0, 0, 0) if plan.changes_nothing else find_reuse(flow, planned_schedule(flow, plan)),
        _rooms=lambda: _convolutions(flow, plan, step.snapshot),
    )


def _fits_unchanged(plan: Plan) -> bool:
    return plan.changes_nothing and plan.limit_bytes is not None and plan.planned_peak_bytes <= plan.limit_bytes


def _other_orders(whole: Callable[[], Graph], sliced: Sequence[Slices]) -> list[str]:
    """A note on the difference from the values of whole kernels, where some add in another order."""
    names = [name for slices in sliced if slices.close for name in slices.kernels]
    graph = whole() if names else Graph()
    close = [graph[name] for name in names if name in graph]
    node, difference = max(((node, most_difference(node)) for node in close), key=itemgetter(1), default=(None, 0.0))
    if node is None or not difference:
        return []
    return [
        f"kernels in slices add in another order, so last bits differ. Of the {added_terms(node)} terms that "
        f"{node.name} adds, the most of all, two orders differ by at most {difference:.1g} of the sum of the terms' "
        "magnitudes"
    ]


class _Tables:
    """The rows of a step's tensors, from the plans of the step and of its bodies."""

    def __init__(self, step: PlannedStep):
        plan, value_named = step.plan, step.flow.value_named
        self.step = step
        encoded: dict[int, list[Encoding]] = {}
        for e in step.encodings:
            encoded.setdefault(step.flow.value_of[e.tensor.node, e.tensor.index], []).append(e)
        self.smaller = Smaller(
            encoded, {value_named[r.tensor]: r for r in plan.reduced}, {value_named[p.tensor]: p for p in plan.packed}
        )
        self.outer, self.unused = Moves.of(step.planner.problems[0], plan), why_unused(plan)
        self.variables = VariableTable(step.homes, step.graph, plan, self.unused)
        self.in_bodies: dict[str, dict[str, list[Encoding]]] = {}  # by body and tensor
        for e in step.inner:
            if e.saved is None:
                self.in_bodies.setdefault(e.body, {}).setdefault(e.encoding.tensor.name, []).append(e.encoding)
        self.inside = [Moves.of(b.problem, b.inside, f"{b.inside.body}/", b.times) for b in step.bodies]
        self.saved_smaller = {e.saved.name: e for e in step.inner if e.saved is not None}

    def rows(self, *, rest: bool = False) -> tuple[TensorRow, ...]:
        """Rows of the tensors that were considered, or of the rest: those with a tactic first, then the largest."""
        step = self.step
        rows = tensor_rows(self.outer, self.smaller, self.unused, step.locate, rest=rest)
        for moves in self.inside:
            named = self.in_bodies.get(moves.within[:-1], {})
            by_value = {moves.problem.flow.value_named[name]: codings for name, codings in named.items()}
            rows += tensor_rows(moves, Smaller(by_value, {}, {}), self.unused, step.locate, rest=rest)
        planned_bodies = {moves.within[:-1] for moves in self.inside}
        for body in () if rest else self.in_bodies.keys() - planned_bodies:
            rows += [inner_row(body, codings, step.locate) for codings in self.in_bodies[body].values()]
        rows += saved_rows(
            step.saved, step.plan, step.recompute_s, step.permits, self.saved_smaller, step.locate, rest=rest
        )
        rows += self.variables.rows(rest=rest)
        return tuple(sorted(rows, key=lambda row: (row.tactic == "keep", -row.nbytes, row.name)))


def _more_bytes(flow: Dataflow, planner: Planner, plan: Plan) -> int | None:
    """The most bytes that untried courses and sizes add to the planned peak; None where all were tried."""
    if not flow.is_undecided or plan.changes_nothing or (plan.exact_chunks and flow.covered):
        return None
    most = widest_bytes(flow, planned_schedule(flow, plan), planner.snapshot)
    return max(0, most - plan.planned_peak_bytes)


def _named(flow: Dataflow, node: Node, more_bytes: int | None) -> str:
    """A kernel whose memory is not known exactly, for `Report.unmodelled`.

    Args:
        more_bytes: as of `_more_bytes`.
    """
    bound = ""
    if runs_python(node.op):
        bound = ", no bound on what its Python function allocates"
    elif more_bytes is None:
        pass
    elif not flow.covered and control_flow(node.op):
        bound = ", judged by some of its courses: what another takes has no known bound"
    elif not flow.all_courses and control_flow(node.op):
        bound = f", judged by some of its courses: another takes at most {more_bytes} bytes more"
    elif flow.decides_sizes(node):
        bound = f", judged by some of its sizes: another takes at most {more_bytes} bytes more"
    return f"{node.name} ({node.op}{bound})"


def _convolutions(flow: Dataflow, plan: Plan, snapshot: ArenaSnapshot) -> tuple[ConvolutionRow, ...]:
    limit = snapshot.limit_bytes if plan.limit_bytes is None else plan.limit_bytes
    if limit is None or plan.changes_nothing:
        return ()
    free: dict[int, int] = {}
    for room in rooms(flow, planned_schedule(flow, plan), snapshot, simulated_limit(limit)):
        free[room.kernel] = min(room.free_bytes, free.get(room.kernel, room.free_bytes))
    rows = (ConvolutionRow(flow.nodes[i].name, flow.nodes[i].op, nbytes) for i, nbytes in free.items())
    return tuple(sorted(rows, key=lambda row: (row.free_bytes, row.name)))


def _explained(tables: _Tables, rows: Sequence[TensorRow], name: str) -> Explanation:
    """The explanation of a variable, or of a tensor of the step or of a body with a plan."""
    step, problem, unused = tables.step, tables.outer.problem, tables.unused
    if (variable := tables.variables.explain(name, problem.rates)) is not None:
        return variable
    for body in step.bodies:
        within = f"{body.inside.body}/"
        if name.startswith(within):
            return explain(body.problem, body.inside, rows, step.locate, name.removeprefix(within), unused, within)
    return explain(problem, step.plan, rows, step.locate, name, unused, may_slice=_slicer(step))


def _slicer(step: PlannedStep) -> Callable[[Node], Sliceable | None]:
    """What slices of a kernel would free, where the plan has none."""
    if step.plan.sliced:
        return lambda _: None
    device, constants = step.planner.target.device, step.graph.small_constants
    return lambda node: sliceable(node, device, constants)


def _alive_at_peak(flow: Dataflow, planner: Planner, plan: Plan) -> tuple[tuple[str, int], ...]:
    steps = planned_schedule(flow, plan) or build_schedule(planner.problems[0].order, ())
    memory = simulate_memory(flow, steps, snapshot=planner.snapshot, detail=True)
    return tuple(
        (flow.values[v].tensor.name, flow.values[v].nbytes) for v in memory.alive_at_peak if flow.values[v].nbytes
    )
