"""One trace of a function under its limit: planned, rewritten, called, watched and planned again.

A peak depends on where the arena's chunks lie when the step begins. So in a live process a plan is made for the arena
as it is, with the step's constants and kernels in it, which TensorFlow makes when the function is first called: a first
call makes them and runs nothing. Before each later call the arena's layout is looked at again, and where it is a new
one the plan's requests are replayed in it. A step that would not fit is planned again before it runs.

Not handled: what other steps, eager code or pipelines allocate while the step runs. It is noticed afterwards, and
the next plan leaves room for it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfswap.analysis.pipelines import element_bytes
from tfswap.analysis.variables import copied_bytes, fetched_bytes, written_in_bodies, written_variables
from tfswap.compiler.alternatives import MOST_VARIANTS
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.grappler import as_planned
from tfswap.compiler.offline import ALWAYS_OPEN
from tfswap.compiler.origin import Origin, SavedStep, sized
from tfswap.compiler.plan_cache import PlanCache
from tfswap.compiler.request import Request
from tfswap.device import machine
from tfswap.device.cudnn import limit_workspaces, without_redzones
from tfswap.device.live import free_functions, has_arena, is_live, live_device, look, runs_at_once
from tfswap.device.memory_owners import Holders
from tfswap.device.placement import place
from tfswap.device.small_slots import make_niches
from tfswap.device.variable_buffers import WrittenVariables
from tfswap.errors import InfeasibleMemoryLimit, TfswapError
from tfswap.importers.shapes import HANDLES
from tfswap.ir.graph import Graph
from tfswap.kernels.alignment import round_up
from tfswap.native.forks import calls_steps
from tfswap.passes.device_carriers import FIRST, units
from tfswap.passes.memory_reservation import Claim, reserve_memory
from tfswap.passes.nodes import waits_for_others
from tfswap.passes.random_state import share_random_state
from tfswap.plan.plan import Plan
from tfswap.planner.planner import promised
from tfswap.planner.small_slots import LARGEST_BYTES
from tfswap.report.report import Report
from tfswap.runtime import messages, turn
from tfswap.runtime.audit import Audit, gates_of
from tfswap.runtime.batches import ELEMENTS_BESIDE, batch_sizes, room_bytes, shared_device
from tfswap.runtime.captures import captured, without_asking
from tfswap.runtime.dynamic_sizes import ToldSizes
from tfswap.runtime.nested_calls import can_run, inside_function
from tfswap.runtime.program import Program
from tfswap.runtime.workers import Meeting, digest, highest, meeting
from tfswap.runtime.xla_calls import measure_compiled
from tfswap.simulator.bfc_allocator import regions_of
from tfswap.simulator.requests import Requests
from tfswap.simulator.simulate import Resident
from tfswap.support import progress
from tfswap.support.sizes import format_bytes, is_share, parse_limit

if TYPE_CHECKING:
    from tfswap.native.load import CLook
    from tfswap.ops.runtime import StepStats

log = logging.getLogger("tfswap")

PLANNING_TRIES = 4 + MOST_VARIANTS
"""Each variant may have to be made once, to know its constants."""
MAX_LAYOUTS = 1024
"""So many layouts of the arena are remembered; a program that keeps more from step to step makes new ones for ever."""

ONE_SHIFT = 1
"""The first layout change is treated as one-off. If it happens again, assume the layout changes every step."""
MOST_SHIFT = 1 / 16
"""The share of the limit that is reserved at most for such an arena."""

_named_floors: dict[str, int] = {}  # by fingerprint: the lowest that this process has reported

Shapes = tuple[tuple[int, ...] | None, ...]


class Step:
    """One trace, for arguments up to certain shapes.

    Args:
        name: of the function, for messages.
        concrete: the trace.
        shapes: of its arguments, by position; None where any shape that the trace takes is meant. After them the
            sizes that `told` tells.
        request: what to do to it.
        on_exceeded: "warn" or "raise".
        program: that it is a part of: all its steps share host memory.
        batches_beside: as of OptimizedFunction.
        instead_of: a step for larger arguments, which moves more than these need: what this one must keep is the same
            limit, in bytes, and the same order of additions, so that values do not depend on which of the two runs.
        granted_bytes: the most that another trace of the function was granted.
        first: whether it is the first that the function plans.
        told: what tells sizes that the arguments' shapes leave open.

    Attributes:
        function: the rewritten ConcreteFunction; the trace itself where nothing is changed.
        plan, report: of the latest planning.
        limit_bytes: the limit; a share is of this step's unoptimised peak at the first planning, and stays what it was.
            It comes to no less than what another trace was granted: a smaller last batch may take what the others may.
        planned: whether there is a plan.
    """

    function: Any
    plan: Plan
    report: Report

    def __init__(
        self,
        name: str,
        concrete: Any,
        shapes: Shapes,
        request: Request,
        on_exceeded: str,
        program: Program,
        batches_beside: int = 0,
        instead_of: Step | None = None,
        granted_bytes: int = 0,
        first: bool = False,
        told: ToldSizes | None = None,
    ):
        if instead_of is not None:
            request = dataclasses.replace(request, memory_limit=instead_of.limit_bytes)
        self.instead_of = instead_of
        self._granted_bytes = granted_bytes
        self._first = first
        self._told = told
        self.name = name
        self.shapes = shapes
        self.planned = False
        self.limit_bytes: int | None = None
        self._counted = False  # whether a share of the unoptimised peak has become bytes for good
        self._concrete = concrete
        self._request = request
        self._on_exceeded = on_exceeded
        self._program = program
        self._batches_beside = batches_beside
        self._batches: list[int] = []  # the bytes of each tensor that a pipeline makes while the step runs
        self._element_bytes = 0  # what each of the pipelines makes once that the step itself takes batches from
        self._optimizer: Optimizer | None = None
        self._margin_bytes = 0  # kept free for what others take while the step runs, as far as is known
        self._growth_bytes = 0  # by which the buffers of who makes the batches may grow between steps
        # Of all functions made and still in use, by number of their gates: a trace of the user's may call an earlier
        # one.
        self._audits: dict[int, Audit] = {}
        self._audited = 0  # how often gates had kept something when these were audited last
        self._waits = False  # whether kernels of the step may wait for others
        self._calls_steps = False  # whether what runs is TensorFlow's, and calls optimized steps
        self._file_function: Callable[[], Any] = lambda: self._concrete  # gives what carries out the plan in a file
        self._inside_function: Any = None  # as of `_inside`
        self._live = False  # whether the plan was made for the arena as it is; then, of that plan:
        self._gate: int | None = None
        self._variables: WrittenVariables | None = None
        self._shared: frozenset[str] = frozenset()  # feeds of variables whose buffers tensors hold too, at this call
        self._requests: dict[frozenset[str], Requests] = {}  # by what is shared; of a plan that changes nothing none
        # By layout of the arena, and what is shared, the plan's peak, where it fits.
        self._peaks: dict[tuple[int, frozenset[str]], int] = {}
        self._holders = Holders()
        self._expected_bytes = 0  # the latest step's peak
        self._seen_bytes = 0  # the arena's peak after the latest step
        self._measured_bytes = 0  # the peak that broke the limit, until the next planning
        self._hopeless_bytes: int | None = None  # with as much in the arena, no plan fitted
        self._unplannable_bytes = 0  # so much above what was planned came once, and no plan leaves room for it
        self._shifts = 0  # how often it was planned again since the arena lay otherwise
        self._shift_bytes = 0  # by which the plans were too large for that, all in all
        self._resident_bytes = 0  # in the arena at the latest planning
        self._niches: list[Any] = []  # what parts the places of small tensors (planner/small_slots.py)
        self._making_bytes = 0  # the peak while functions of the latest plan were made, if it was the highest so far

    def covers(self, shapes: Sequence[tuple[int, ...] | None]) -> bool:
        """Whether arguments of these shapes are no larger than what was planned for."""
        if len(shapes) != len(self.shapes):
            return False  # what the one knows of its sizes, and the other does not
        pairs = zip(self.shapes, shapes, strict=True)
        if not self.planned:
            return all(made is None or made == got for made, got in pairs)
        return all(
            made is None or (len(made) == len(got or ()) and all(g <= m for g, m in zip(got or (), made, strict=True)))
            for made, got in pairs
        )

    def is_made_for(self, shapes: Shapes) -> bool:
        """Whether arguments of these shapes, from now on, are this step's and no other's."""
        return self.covers_all or self.shapes == shapes

    @property
    def covers_all(self) -> bool:
        """Whether any arguments that the trace takes are covered."""
        return self.planned and all(shape is None for shape in self.shapes)

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Plan, if that has not been done. Raises InfeasibleMemoryLimit and UnsupportedGraph."""
        if self.planned:
            return
        with turn.planning(), progress.task(f"planning {self.name}"):
            if self.planned:
                return
            try:
                if self._first:
                    self._plan_with_others(inputs)
                else:
                    self._plan(inputs, ordered=self.instead_of is not None)
            finally:
                self._counted = self.limit_bytes is not None

    def __call__(self, inputs: Sequence[Any], plain: bool = False) -> Any:
        """Run the step under its limit.

        Args:
            plain: the call runs at once, and neither a tape nor who may cancel it has a part in it.
        """
        asked = captured(self._concrete)
        if self._request.changes_nothing or not has_arena() or not (plain or runs_at_once()):
            result = self._call(inputs, plain, asked)
            if self._audits:
                self._audit_what_is_new(look(before=False))
            return result
        return self._in_turn(inputs, plain, asked)

    def _in_turn(self, inputs: Sequence[Any], plain: bool, asked: list[Any] | None) -> Any:
        """As `__call__`, where a step runs now, in an arena that can be looked at.

        Args:
            asked: what the call captures, where that is asked for anew.
        """
        outer = turn.held()
        try:
            ticket = turn.begin(self._waits)
            before = self._look_before()
            if turn.alone(ticket) and not self._fits(before):
                with progress.task(f"planning {self.name} again"):
                    self._plan_again(inputs)
                before = self._look_before()
            if self._calls_steps:
                turn.end(outer)  # each of them takes its own
            return self._watched(inputs, plain, asked, before, ticket)
        finally:
            turn.end(outer)

    def _run_inside(self, *given: Any) -> list[Any]:
        """Run it now for another function, which gives it its inputs, captures included; returns flat results."""
        arguments = given[: len(given) - len(self._concrete._captured_inputs)]
        try:
            result = self._in_turn([*arguments], plain=True, asked=None)
        except InfeasibleMemoryLimit as refusal:
            raise MemoryError(str(refusal)) from None  # which TensorFlow makes a ResourceExhaustedError of
        return self._concrete.function_type.output.to_tensors(result)

    def _inside(self) -> Any:
        """What is called where another function is traced: it runs this step when that runs, where Python can do so."""
        assert self._optimizer is not None, "it has been planned"
        graph, device = self._optimizer.graph, live_device()[1]
        on_others = any({*units(part)} - {FIRST} for part in (graph, *graph.all_bodies()))
        if device.kind != "cpu" or on_others or self._calls_steps or not can_run(self._concrete):
            return self.function
        if self._inside_function is None:
            planned = self._concrete if self.plan.changes_nothing else self._file_function()
            self._inside_function = inside_function(planned, self._concrete, self._run_inside, waits=self._waits)
        return self._inside_function

    def _audit_what_is_new(self, now: CLook) -> None:
        if now.executed != self._audited:
            self.audit()
            self._audited = now.executed

    def audit(self) -> None:
        """Hold what TensorFlow has executed, also inside of other functions, against what was planned.

        Raises VerificationError where it is something else.
        """
        for audit in tuple(self._audits.values()):
            audit.check()

    def stats(self) -> StepStats:
        """What swapping did in the latest run of the function's, whose steps take turns."""
        from tfswap.ops.runtime import StepStats, step_stats

        info = machine.memory_info(live_device()[0])
        peak = None if info is None else info.peak_bytes
        hits = 0
        if self.instead_of is not None:
            hits = len({a.tensor for a in self.instead_of.plan.absences} - {a.tensor for a in self.plan.absences})
        if self._request.changes_nothing or self.plan.changes_nothing:
            return StepStats(device_peak_bytes=peak, cache_hits=hits)
        return step_stats(self._program.owner, peak, hits)

    def fits(self) -> bool:
        """Whether the step, as it is planned, stays within its limit in the arena as it is now."""
        return not has_arena() or self._fits(self._look_before())

    @property
    def elements(self) -> float:
        """Of its arguments: what is planned for fewer moves less."""
        return sum(math.inf if shape is None or None in shape else math.prod(shape) for shape in self.shapes)

    def _call(self, inputs: Sequence[Any], plain: bool, asked: list[Any] | None) -> Any:
        if plain and asked is None and self._gate is not None:
            return self.function.run(inputs)
        takes_turns = has_arena() and not self._request.changes_nothing
        function = self._inside() if takes_turns and not (plain or runs_at_once()) else self.function
        return function._call_flat(inputs, captured_inputs=function.captured_inputs if asked is None else asked)

    # --- planning -----------------------------------------------------------------------------------------

    def _plan(self, inputs: Sequence[Any], *, given: Plan | None = None, ordered: bool = False) -> None:
        """Plan for the arena as it is, and make the function.

        Args:
            given: carry out this plan instead, whatever it needs.
            ordered: order the step also where its limit is well above the unoptimised peak.
        """
        live = not self._request.changes_nothing and is_live(inputs)
        optimizer, resident = self._optimizer_now(inputs, live)
        self._making_bytes = 0
        function, gate, requests, peak, actions, lacking = self._concrete, None, None, 0, None, 0
        for _ in range(PLANNING_TRIES):
            fits, instantiated = True, resident.instantiated
            try:
                plan = given or self._choose(optimizer, ordered, lacking)
            except InfeasibleMemoryLimit as error:
                arena_bytes = resident.limit_bytes
                if live and not self._niches and arena_bytes is not None and error.floor_bytes > arena_bytes:
                    # Perhaps for what lies in the way alone.
                    function = gate = actions = None
                    free_functions()
                    if self._make_niches(optimizer):
                        resident = self._resident()
                        optimizer.suppose(resident)
                        continue
                fits, plan = False, optimizer.lowest()
                if (not live or optimizer.has_made(plan)) and self._may_stay(optimizer, ordered):
                    plan = optimizer.unchanged(self.limit_bytes)
                elif not live or optimizer.has_made(plan):
                    _name_floor(optimizer, error.floor_bytes)
                    function = None  # whoever holds the refusal holds this frame, and with it constants in the arena
                    raise self._refusal(error, resident) from None
                # What a refusal names as the floor has to hold where the step's constants are in the arena too.
            if self._request.changes_nothing or plan.changes_nothing:
                function, gate, requests = self._concrete, None, None
                break
            if plan.actions != actions:
                if actions is not None:
                    # What was made for the plan before goes first: the next one's constants take its places.
                    function = gate = None
                    free_functions()
                function, gate = self._make(optimizer, plan, live)
                actions = plan.actions
                if live:
                    resident = self._instantiate(function, inputs)
            if not live:
                break
            requests = optimizer.form_of(plan).requests(resident)
            peak = requests.peak_bytes(resident)
            kept = fits and self._keeps(peak)
            if given or self._request.plan or kept:
                there = max(plan.persistent_bytes, resident.total_bytes)
                plan = dataclasses.replace(plan, planned_peak_bytes=peak, persistent_bytes=there)
                break
            if instantiated and self.limit_bytes is not None:  # what others have there comes and goes
                lacking = max(lacking, promised(peak) + self._margin_bytes - self.limit_bytes)
            optimizer.suppose_made(plan, resident)  # planned again for that arena
            if not self._counted:
                optimizer.renew_baseline()
                self._count_limit(resident)
        else:
            raise TfswapError(
                f"{self.name}: the arena changed under each of {PLANNING_TRIES} plans: is something else "
                "allocating on the device at the same time?"
            )
        optimizer.extra_margin_bytes = self._margin_bytes
        if (complaint := self._request.complaint(self.name, plan)) is not None:
            self._complain(complaint)
        report = optimizer.report(plan, resident)
        self.report = dataclasses.replace(report, step=self.name, _floor=self._floor_bytes)
        self.plan, self.function, self._gate = plan, function, gate
        self._requests = {} if requests is None else {self._shared: requests}
        self._live, self._resident_bytes, self._peaks, self._expected_bytes = live, resident.total_bytes, {}, peak
        self._calls_steps = gate is None and calls_steps(self._concrete)
        self.planned = True
        if self.limit_bytes is not None and live_device()[1].kind == "gpu":
            without_redzones()
        if self._request.options.limit_workspaces:
            limit_workspaces(self.report.workspace_bytes)
        if live and gate is not None:
            optimizer.suppose_made(plan, resident)  # the floor that the report names is one in this arena
            if layout := look(before=True).layout:
                self._peaks[layout, self._shared] = peak
                self._holders.remember(layout, self._resident())
        log.info("tfswap: %s: %s", self.name, self.report.headline())
        if given is None and self.limit_bytes is not None and self._making_bytes > self.limit_bytes:
            self._complain(messages.exceeded_while_made(self.name, self._making_bytes, self.limit_bytes))

    def _plan_with_others(self, inputs: Sequence[Any]) -> None:
        """Plan; where other workers plan the same step, all refuse if one does, and all carry out one plan if it fits
        each of their arenas.
        """
        refusal: InfeasibleMemoryLimit | None = None
        try:
            self._plan(inputs)
        except InfeasibleMemoryLimit as error:
            refusal = error
        alone = self._request.changes_nothing or self._request.plan is not None or not is_live(inputs)
        others = None if alone or self._optimizer is None else meeting(self._optimizer.graph)
        if others is not None:
            floor = highest(others.exchange(None if refusal is None else refusal.floor_bytes))
            if floor is not None and refusal is None:
                self._unplan()
                rank, floor_bytes = floor
                raise InfeasibleMemoryLimit(
                    messages.refused_by_another(self.name, rank, floor_bytes),
                    floor_bytes=floor_bytes,
                    limit_bytes=self.limit_bytes or 0,
                )
        if refusal is not None:
            raise refusal
        if others is not None and len({*others.exchange(digest(self.plan))}) > 1:
            self._take_over(others, inputs)

    def _take_over(self, others: Meeting, inputs: Sequence[Any]) -> None:
        """Carry out the first worker's plan, if every worker can."""
        assert self._optimizer is not None, "it has made the plan"
        own, theirs = self.plan, others.hand_out(self.plan)
        fits = False
        if theirs.fingerprint == own.fingerprint:
            adopted = self._optimizer.adopt(theirs, self.limit_bytes)
            fits = adopted.keeps_limit
        if not all(others.exchange(fits)):
            log.info("tfswap: %s: the workers' plans differ: no plan of one fits the arenas of all", self.name)
        elif others.rank > 0:
            self._plan(inputs, given=adopted)
            if not self._keeps(self._expected_bytes):
                self._plan(inputs)

    def _unplan(self) -> None:
        """As if there had been no plan: nothing of it stays in the arena."""
        self.planned = False
        self.function = self._gate = None
        self._requests = {}
        free_functions()

    def _optimizer_now(self, inputs: Sequence[Any], live: bool) -> tuple[Optimizer, Resident]:
        """The optimizer, which is made once, for the arena as it is or may be when the step runs, and what is there."""
        optimizer = self._optimizer or self._new_optimizer(inputs)
        if not self.planned:
            self._own_buffers(optimizer, inputs)
        free_functions()
        if live and self._batches and not self._niches and not self._runs_unchanged(optimizer):
            largest = self._make_niches(optimizer, 2 * self._batches)  # and as many that wait
            if largest >= max(self._batches):
                self._margin_bytes -= self._growth_bytes  # none of them gets a chunk that is too large
        resident = self._resident()
        if not live:
            resident = resident.unseen().beside(self._made_around(inputs))
        optimizer.suppose(resident)
        return optimizer, resident

    def _runs_unchanged(self, optimizer: Optimizer) -> bool:
        return self.limit_bytes is None or optimizer.fits_unchanged(self.limit_bytes - self._margin_bytes)

    def _new_optimizer(self, inputs: Sequence[Any]) -> Optimizer:
        graph, held = self._import(self._planned_for(inputs))
        self._batches = batch_sizes(inputs) * self._batches_beside
        if shared_device() is not None:
            self._element_bytes = sum(map(round_up, element_bytes(graph)))
        beside_bytes = room_bytes(self._batches)
        self._growth_bytes = beside_bytes // 2
        self._margin_bytes += beside_bytes
        free_functions()  # what was made to import it, by which a share of the unoptimised peak would be another
        resident = self._resident().beside(self._made_around(inputs))
        self._waits = waits_for_others(graph)
        made = self._optimizer = Optimizer(
            graph,
            live_device()[1],
            self._request.options,
            resident=resident,
            locate=self._lines(),
            keeps_results=True,
            held=held,
            beside_bytes=beside_bytes,
            plan_cache=PlanCache.of_environment(),
        )
        self._count_limit(resident)
        return made

    def _lines(self) -> Callable[[str], str | None]:
        """Which line of the user's made a node, as Optimizer's `locate`."""
        from tfswap.importers.source_lines import SourceLines

        return SourceLines(self._concrete)

    def _import(self, arguments: Sequence[Any]) -> tuple[Graph, Sequence[str]]:
        """The graph to plan, and names of the tensors that it holds until its end as it was traced."""
        from tfswap.importers.function import import_function

        device, model = live_device()
        sizes = tuple(tuple(shape or ()) for shape in self.shapes[len(arguments) :])
        told = self._told.types(sizes) if self._told is not None and sizes else None  # none where none have values
        graph = import_function(self._concrete, arguments, told)
        given = [*arguments, *without_asking(self._concrete)]
        measure_compiled(graph, self._concrete, given, device, model)
        place(self.name, graph, given, model)
        return as_planned(graph, self._concrete, model, keeps=self._request.options.names), ()

    def _own_buffers(self, optimizer: Optimizer, inputs: Sequence[Any]) -> None:
        """Give each variable that the step writes a buffer that nothing else holds, where it keeps its content.

        One that was assigned a NumPy array may have that array's, outside of the arena, and replicas' variables are
        assigned one buffer: the first update takes another. Also where the step is traced into a function around it,
        as far as variables are known there. Before later steps these are looked at again (`_look_before`).
        """
        import tensorflow as tf

        if self._request.changes_nothing or not has_arena():
            return
        captures = without_asking(self._concrete)
        feeds = optimizer.graph.feeds
        handles = {
            feeds[p].name: captures[p - len(inputs)]
            for p in written_variables(optimizer.graph, optimizer.flow)
            if p >= len(inputs)
        }
        known = {name: handle for name, handle in handles.items() if not tf.is_symbolic_tensor(handle)}
        if known:
            with tf.init_scope():
                self._variables = WrittenVariables(known, written_in_bodies(optimizer.graph, optimizer.flow))
                self._variables.own()

    def _make_niches(self, optimizer: Optimizer, beside: Sequence[int] = ()) -> int:
        """Make places for small tensors in the arena; the bytes of the largest, or 0 where the step has no use for any,
        or the arena no room.

        Args:
            beside: as of `choose_niches`.
        """
        assert self.limit_bytes is not None, "without one no place is missed"
        resident = self._resident()
        niches = optimizer.niches(resident, beside)
        if resident.limit_bytes is not None and sum(niches) > resident.limit_bytes - self.limit_bytes:
            niches = [size for size in niches if size <= LARGEST_BYTES]  # the large ones would lie in the step's way
        self._niches = make_niches(live_device()[0], niches, self.limit_bytes)
        return max(niches) if self._niches else 0

    def _made_around(self, inputs: Sequence[Any]) -> list[int]:
        """The bytes of each tensor that the step is given and the function around it makes, and has not made yet."""
        captures = without_asking(self._concrete)
        given = zip((*inputs, *captures), (*self._planned_for(inputs), *captures), strict=True)
        return [t.shape.num_elements() * t.dtype.size for by, t in given if _is_made_around(by, t)]

    def _planned_for(self, inputs: Sequence[Any]) -> list[Any]:
        """Arguments of the sizes that the plan is for, of which these may be smaller."""
        import tensorflow as tf

        return [
            given if shape is None else tf.TensorSpec(shape, given.dtype)
            for given, shape in zip(inputs, self.shapes[: len(inputs)], strict=True)
        ]

    def _count_limit(self, resident: Resident) -> None:
        """The limit in bytes, of which a share depends on the unoptimised peak."""
        optimizer = self._optimizer
        assert optimizer is not None
        limit = self._request.limit(live_device()[0])
        if limit is not None:
            asked = parse_limit(limit, lambda: optimizer.baseline.peak_bytes)
            if is_share(limit):
                asked = max(asked, self._granted_bytes)
            # More than the arena may have is no limit that can be kept.
            self.limit_bytes = min(asked, resident.limit_bytes or asked)

    def _choose(self, optimizer: Optimizer, ordered: bool, lacking: int = 0) -> Plan:
        """The plan for the limit; if there is one, one that leaves room for results that the caller still holds, for
        more batches than wait now, and for the elements of pipelines that the step takes from.

        Args:
            lacking: what an earlier plan lacked in the arena that it met; if there is a plan, one that has it.
        """
        if self._request.plan is not None or self._request.changes_nothing:
            return self._request.choose(optimizer, live_device()[0])
        spare = fetched_bytes(optimizer.flow) + self._growth_bytes + self._shift_bytes + lacking
        # An element may get a free chunk of up to twice its size whole. Where there is no room for all, for some.
        elements = (2 * ELEMENTS_BESIDE, *range(ELEMENTS_BESIDE, 0, -1)) if self._element_bytes else ()
        spares = [*(spare + each * self._element_bytes for each in elements), spare]
        margins = [self._margin_bytes + each for each in spares if each > promised(0)]  # less is in every plan's margin
        if margins:
            for margin in (*margins, self._margin_bytes):
                optimizer.extra_margin_bytes = margin
                if (known := optimizer.recall(self.limit_bytes, ordered=ordered)) is not None:
                    return known
        for margin in margins:
            optimizer.extra_margin_bytes = margin
            if (plan := optimizer.find(self.limit_bytes, ordered=ordered)) is not None:
                return plan
        optimizer.extra_margin_bytes = self._margin_bytes
        if (plan := optimizer.find(self.limit_bytes, ordered=ordered)) is not None:
            if elements and not self.planned:
                log.warning("tfswap: %s", messages.no_room_for_batches(self.name, self._element_bytes))
            return plan
        assert self.limit_bytes is not None, "a plan for no limit is never refused"
        if has_arena() and self.limit_bytes >= _named_floors.get(optimizer.fingerprint, 0):
            # A floor that was named has to hold in later processes too, and each has an arena that differs a little:
            # there plans may use up their margin.
            optimizer.extra_margin_bytes -= promised(self.limit_bytes) - self.limit_bytes
            if (plan := optimizer.find(self.limit_bytes, ordered=ordered)) is not None:
                return plan
            optimizer.extra_margin_bytes = self._margin_bytes
        raise optimizer.infeasible(self.limit_bytes)

    def _may_stay(self, optimizer: Optimizer, ordered: bool) -> bool:
        """Whether a step that has no plan may run as it was traced.

        Its limit is a share, of the whole of its unoptimised peak, which it was not seen to pass: ops of a rewritten
        step can take more than a tiny step has.
        """
        limit = self._request.limit(live_device()[0])
        is_whole = self.limit_bytes is not None and self.limit_bytes >= optimizer.baseline.peak_bytes
        return limit is not None and is_share(limit) and is_whole and not ordered

    def _refusal(self, error: InfeasibleMemoryLimit, resident: Resident) -> InfeasibleMemoryLimit:
        """`error`, with what else there is to know where the arena itself may have no more."""
        optimizer = self._optimizer
        assert optimizer is not None
        arena_bytes = resident.limit_bytes
        asked = self._request.limit(live_device()[0])
        assert asked is not None, "a plan for no limit is never refused"
        asked_bytes = parse_limit(asked, lambda: optimizer.baseline.peak_bytes)
        if not arena_bytes or max(error.floor_bytes, asked_bytes) <= arena_bytes:
            return error
        return InfeasibleMemoryLimit(
            messages.refused_by_the_arena(error, live_device()[0], arena_bytes, len(regions_of(resident.chunks))),
            floor_bytes=error.floor_bytes,
            limit_bytes=asked_bytes,
        )

    def _floor_bytes(self) -> int:
        assert self._optimizer is not None
        floor = self._optimizer.floor_bytes() + self._optimizer.unplaced_bytes
        if self._gate is not None and self.plan.keeps_limit:  # what has been planned can be
            floor = min(floor, promised(self.plan.planned_peak_bytes) + self._margin_bytes)
            if self.limit_bytes is not None:  # also where that took the plan's own margin
                floor = min(floor, self.limit_bytes)
        _name_floor(self._optimizer, floor)
        return floor

    def _make(self, optimizer: Optimizer, plan: Plan, live: bool) -> tuple[Any, int]:
        """The function that carries out `plan`, and its gate, which looks at the arena where nobody else does."""
        import tfswap.ops

        gate = tfswap.ops.new_gate()
        graph = optimizer.rewrite(plan, gate, checked_by_gate=not live)
        claim = self._request.options.claim(self._program.owner, plan)
        swaps = reserve_memory(graph, optimizer.target, claim)
        trace = f"{self._concrete.name.decode()}/{type(self).__name__}"
        if live_device()[1].kind == "cpu" and share_random_state(graph, optimizer.target, self._program.owner, trace):
            tfswap.ops.keep_states(self._program.owner)
        function = self._export(graph, plan, gate)
        if swaps:
            self._reserve(claim)
            weakref.finalize(function.graph, tfswap.ops.drop, self._program.owner)
        return function, gate

    def _export(self, graph: Graph, plan: Plan, gate: int) -> Any:
        """What runs a rewritten graph."""
        from tfswap.exporters.function import export_function

        assert self._optimizer is not None, "it has made the plan"
        saved = functools.partial(
            _for_file, self.name, self._optimizer, plan, self._concrete, self._request, self._program.owner
        )
        self._file_function = functools.cache(saved)
        function = export_function(graph, self._concrete, self._file_function)
        self._watch(graph, gate, function.graph)
        return function

    def _watch(self, graph: Graph, gate: int, made: Any) -> None:
        """Audit what TensorFlow makes of `graph`, behind its gate, for as long as `made` is there."""
        import tfswap.ops

        self._audits[gate] = Audit(graph, gate)
        for each in gates_of(graph):
            tfswap.ops.watch_gate(each)
            weakref.finalize(made, tfswap.ops.forget_gate, each)
        weakref.finalize(made, self._audits.pop, gate, None)

    def _reserve(self, claim: Claim) -> None:
        """Reserve and take what swapped tensors need before the kernels do, so that a lack is reported before
        anything runs.
        """
        import tfswap.ops

        if live_device()[1].kind != "cpu":
            # Pinned memory is the device's own, and its kernels reserve it, and what is on disk.
            tfswap.ops.claim(self._program.owner, claim.host_limit_bytes)
            return
        try:
            tfswap.ops.claim(self._program.owner, claim.host_limit_bytes, claim.spill_dir, claim.disk_limit_bytes)
        except OSError as error:
            raise TfswapError(f"{self.name}: {error}") from error
        try:
            tfswap.ops.reserve(claim.host_bytes)
            if claim.disk_bytes:
                tfswap.ops.reserve_disk(self._program.owner, claim.disk_bytes, self.name)
        except MemoryError as error:
            tfswap.ops.drop(self._program.owner)
            raise TfswapError(
                f"{self.name}: no {format_bytes(claim.host_bytes)} of host memory for swapped tensors: {error}"
            ) from error
        except OSError as error:
            tfswap.ops.drop(self._program.owner)
            raise TfswapError(f"{self.name}: {error}") from error

    def _instantiate(self, function: Any, inputs: Sequence[Any]) -> Resident:
        """Let TensorFlow make a function's kernels and constants; what is in the arena then."""
        import tfswap.ops

        before = look(before=False)
        with tfswap.ops.instantiating():
            self._make_kernels(function, inputs)
        after = look(before=False)
        if after.peak_bytes > before.peak_bytes:
            self._making_bytes = after.peak_bytes
        self.audit()
        return self._resident(instantiated=True)

    def _make_kernels(self, function: Any, inputs: Sequence[Any]) -> None:
        """Call what `_export` made, while that runs nothing."""
        function.call([*inputs, *without_asking(function)])

    def _keeps(self, peak_bytes: int) -> bool:
        """Whether a plan with this peak keeps the limit, and the margin that it was made with."""
        assert self._optimizer is not None, "it has made the plan"
        margin = min(self._optimizer.extra_margin_bytes, self._margin_bytes)
        return self.limit_bytes is None or promised(peak_bytes) + margin <= self.limit_bytes

    def _within(self, peak_bytes: int) -> bool:
        return self.limit_bytes is None or peak_bytes + self._margin_bytes <= self.limit_bytes

    # --- the arena as it is -------------------------------------------------------------------------------

    def _look_before(self) -> CLook:
        """What the step that comes next finds."""
        self._shared = frozenset() if self._variables is None else self._variables.shared()
        return look(before=True)

    def _fits(self, now: CLook) -> bool:
        """Whether the step stays within its limit in the arena as it is now, as far as is known."""
        found = (now.layout or -now.current_bytes, self._shared)  # of an allocator without layout by its bytes
        if found in self._peaks and not self._measured_bytes:
            self._expected_bytes = self._peaks[found]
            return True
        if self._request.plan is not None or self.limit_bytes is None:
            return True
        if self._hopeless_bytes is not None and now.current_bytes >= self._hopeless_bytes:
            if self._requests:
                self._expected_bytes = self._peak_in(self._resident(instantiated=True))
            return True
        if not self._live or self._measured_bytes:
            return False
        if self._gate is None or not self._requests:  # a plan that changes nothing
            assert self._optimizer is not None
            grown = now.current_bytes - self._resident_bytes + self._copied_bytes
            return self._optimizer.unoptimised.likely_bound_bytes + grown <= self.limit_bytes
        if found not in self._peaks:
            resident = self._resident(instantiated=True)
            self._holders.remember(found[0], resident)
            peak = self._peak_in(resident)
            if not self._within(peak):
                return False
            if len(self._peaks) >= MAX_LAYOUTS:
                self._peaks.clear()
            self._peaks[found] = peak
        self._expected_bytes = self._peaks[found]
        return True

    @property
    def _copied_bytes(self) -> int:
        """Of variables whose buffers tensors hold too, which this step's updates therefore copy."""
        return copied_bytes(self._optimizer.flow, self._shared) if self._optimizer is not None and self._shared else 0

    def _peak_in(self, resident: Resident) -> int:
        """The plan's peak where this is in the arena, its constants among it."""
        assert self._optimizer is not None, "it has made the plan"
        if resident.shared not in self._requests:
            if len(self._requests) >= MAX_LAYOUTS:
                self._requests.clear()
            self._requests[resident.shared] = self._optimizer.form_of(self.plan).requests(resident)
        return self._requests[resident.shared].peak_bytes(resident)

    def _resident(self, *, instantiated: bool = False) -> Resident:
        """What is in the arena now.

        Args:
            instantiated: whether the step's constants are.
        """
        found = machine.resident(live_device()[0])
        return dataclasses.replace(found, instantiated=instantiated, shared=self._shared)

    def _plan_again(self, inputs: Sequence[Any]) -> None:
        """Plan for the arena as it is, before the step runs; where no plan fits, stay with the one that there is.

        Room is left for what an earlier step met besides, unless it is that for which no plan fits: it has gone again.
        """
        before, margin_bytes = self.plan, self._margin_bytes
        margins = [margin_bytes]
        self._note_shift()
        if self._measured_bytes and self._requests:
            # What is in the arena now is no surprise any more: room is left for the rest.
            known = max(self._expected_bytes, self._peak_in(self._resident(instantiated=True)))
            if self._measured_bytes - known > margin_bytes:
                margins.insert(0, self._measured_bytes - known)
        self._measured_bytes = 0
        was_live = self._live
        self.function, self._requests = None, {}
        refusals: list[InfeasibleMemoryLimit] = []
        for margin in margins:
            self._margin_bytes = margin
            try:
                self._plan(inputs, ordered=self._live)
            except InfeasibleMemoryLimit as error:
                refusals.append(error)
                continue
            self._unplannable_bytes = margins[0] if refusals else 0
            if refusals:
                log.warning("tfswap: %s", messages.no_room(self.name, refusals[0].floor_bytes))
            self._hopeless_bytes = None
            return
        if not was_live:  # it has never run: no step is under way that could go on
            raise refusals[-1]
        self._plan(inputs, given=before)
        self._hopeless_bytes = self._resident_bytes
        if self._on_exceeded == "raise":
            raise refusals[-1]
        log.warning("tfswap: %s", messages.not_kept(self.name, refusals[-1], self._copied_bytes))

    def _note_shift(self) -> None:
        """Take note if a plan does not fit into an arena that lies otherwise: later ones are to depend on it less."""
        if not self._live or self._measured_bytes or not self._requests or self.limit_bytes is None:
            return
        self._shifts += 1
        if self._shifts > ONE_SHIFT:
            peak = self._peak_in(self._resident(instantiated=True))
            lacked = max(0, promised(peak) + self._margin_bytes - self.limit_bytes)
            self._shift_bytes = min(self._shift_bytes + lacked, int(self.limit_bytes * MOST_SHIFT))

    def _watched(self, inputs: Sequence[Any], plain: bool, asked: list[Any] | None, before: CLook, ticket: int) -> Any:
        """Run the step, and notice when the allocator's peak passes the limit.

        Args:
            asked: what the call captures, where that is asked for anew.
            ticket: as `turn.begin` gives it.
        """
        result = self._call(inputs, plain, asked)
        self._notice(before, ticket, result)
        return result

    def _run_part(self, run: Callable[[], Any]) -> Any:
        """Run what is a part of the step and comes later, and notice the same."""
        if not has_arena():
            result = run()
            self._audit_what_is_new(look(before=False))
            return result
        outer = turn.held()
        try:
            ticket = turn.begin(self._waits)
            before = look(before=False)
            result = run()
            self._notice(before, ticket, result)
            return result
        finally:
            turn.end(outer)

    def _notice(self, before: CLook, ticket: int, result: Any) -> None:
        """Look whether what has just run, and gave `result`, has passed the limit."""
        after = look(before=False)
        self._seen_bytes = after.peak_bytes
        self._audit_what_is_new(after)
        if after.peak_bytes > before.peak_bytes:
            planned = self._expected_bytes or self.report.planned_peak_bytes
            self.report = dataclasses.replace(
                self.report, planned_peak_bytes=planned, measured_peak_bytes=after.peak_bytes
            )
            limit = self.plan.limit_bytes or self.plan.planned_peak_bytes
            hopeless = self._hopeless_bytes is not None and after.peak_bytes <= promised(planned)
            hopeless |= after.peak_bytes <= planned + self._unplannable_bytes
            if after.peak_bytes > limit and not (hopeless and self._on_exceeded != "raise"):
                came = self._what_came(before, after, result)
                self._exceeded(after.peak_bytes, limit, came, turn.alone(ticket), hopeless)

    def _what_came(self, before: CLook, after: CLook, result: Any) -> str:
        """The message on bytes that others allocated during the step; "" where there are none."""
        assert self._optimizer is not None
        own = fetched_bytes(self._optimizer.flow) + self._copied_bytes
        strange = after.current_bytes - before.current_bytes - own
        if strange <= promised(0):
            return ""
        return messages.what_came(strange, self._holders.of_what_came(before.layout, self._resident(), result))

    def _exceeded(self, peak_bytes: int, limit_bytes: int, came: str, alone: bool, hopeless: bool) -> None:
        """Report it, with the cause as far as it is known.

        Args:
            came: as of `_what_came`.
            alone: whether no other optimized function ran meanwhile.
            hopeless: whether it is known that no plan has room for it.
        """
        again = alone and self._request.plan is None and not hopeless
        if again:
            self._measured_bytes = peak_bytes
        cause = (came or self._unknown()) if alone else messages.BESIDE_OTHERS
        self._complain(messages.exceeded(self.name, peak_bytes, limit_bytes, cause, again=again))

    def _unknown(self) -> str:
        """What may have taken memory that nothing shows any more."""
        tightest = next(iter(self.report.convolutions), None) if live_device()[1].kind == "gpu" else None
        return messages.what_may_have_taken_it(tightest, self.report.unmodelled)

    def _complain(self, message: str) -> None:
        """Raise or log, as `on_exceeded` says."""
        if self._on_exceeded == "raise":
            raise TfswapError(f"tfswap: {message}")
        log.warning("tfswap: %s", message)


def _name_floor(optimizer: Optimizer, floor_bytes: int) -> None:
    named = _named_floors.get(optimizer.fingerprint, floor_bytes)
    _named_floors[optimizer.fingerprint] = min(named, floor_bytes)


def _for_file(name: str, optimizer: Optimizer, plan: Plan, concrete: Any, request: Request, owner: int) -> Any:
    """What carries out `plan` in a file whose signature calls it. Where TensorFlow loads that, its gate alone looks at
    the arena; `tfswap.load` finds in the gate what it takes to plan again.
    """
    from tfswap.exporters.function import export_function

    graph = optimizer.rewrite(plan, ALWAYS_OPEN, checked_by_gate=True)
    reserve_memory(graph, optimizer.target, request.options.claim(owner, plan))
    arguments = [argument.name for argument in concrete.function_def.signature.input_arg]
    sizes = sized(zip(arguments, optimizer.graph.feeds, strict=True))
    step = SavedStep(concrete.name.decode(), "", rewritten=True, arguments=tuple(sizes))
    answers = optimizer.policy_answers()
    Origin.of(name, plan.limit_bytes, [step], request.options, answers).carry(graph, plan)
    return export_function(graph, concrete, refers_to=[concrete])


def _is_made_around(given: Any, planned: Any) -> bool:
    """Whether the function around a step computes what the step is given, as far as the size is known; what is fed to
    that function is its caller's, who calls it now.
    """
    import tensorflow as tf

    if not tf.is_symbolic_tensor(given) or planned.dtype.name in HANDLES or not planned.shape.is_fully_defined():
        return False
    outer = getattr(given.graph, "outer_graph", None)  # where sizes are asked for there is none
    return given.op.type != "Placeholder" or (outer is not None and outer.building_function)
