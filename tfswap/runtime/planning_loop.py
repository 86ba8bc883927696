"""Plans a step for the arena as it is: chooses a plan, makes its function, checks that it keeps the limit there.

A peak depends on the arena's chunks when the step begins, and the step's own constants are among them once TensorFlow
has made its function. So a plan is simulated in the arena after its function is made. Where it does not keep the limit,
the next one is chosen for the arena with these constants. Each try has an `Outcome`:

    choose --> UNCHANGED                     the step runs as it was traced
      |------> ROOM_MADE ------> again       no plan fits since free memory is in pieces: a region or slots are added
      |------> LENT -----------> again       of several devices, one lends memory to another (lending.py)
      |------> (refusal is raised)
      v
    make ----> UNSEEN                        the arena is not the one in which the step runs
      |
      v
    judge ---> PLANNED                       it keeps its limit, with what its function has made in the arena
      |------> ARENA_CHANGED --> again       it does not: its constants are known from now on

A step on several devices has a plan for each, and one function that carries all of them out. It is planned where each
part keeps its limit.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfswap.compiler.alternatives import MOST_VARIANTS
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.device_times import assume_times, lanes_of, note_times
from tfswap.compiler.rewriting import PLAIN
from tfswap.device.live import free_functions
from tfswap.device.variable_buffers import HomePlaces
from tfswap.errors import InfeasibleMemoryLimit, TfswapError
from tfswap.passes.tactics.state_homes import bytes_at_home
from tfswap.plan.plan import Plan
from tfswap.planner.promise import promised
from tfswap.runtime.function_maker import Chosen, FunctionMaker
from tfswap.runtime.home_tiers import within_host_limit
from tfswap.runtime.lending import Lending
from tfswap.runtime.limit import report_floor
from tfswap.runtime.step_part import StepPart
from tfswap.runtime.trace import Trace
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.device_timing import TimedPart
from tfswap.simulator.requests import Requests
from tfswap.support.gc_pause import without_collector

log = logging.getLogger("tfswap")

PLANNING_TRIES = 6 + MOST_VARIANTS
"""Each variant may have to be made once, to find its constants."""


class Outcome(enum.Enum):
    """How one try to plan has ended."""

    UNCHANGED = "the step runs as it was traced"
    UNSEEN = "a plan for an arena that can't be seen yet"
    PLANNED = "a plan that keeps the limit in this arena"
    LENT = "a device lends memory to another, or no longer does, and the arenas are others"
    ROOM_MADE = "a region or slots were added, and the arena is another one"
    ARENA_CHANGED = "the plan does not keep the limit with what its function has made in the arena"

    @property
    def is_final(self) -> bool:
        return self not in (Outcome.LENT, Outcome.ROOM_MADE, Outcome.ARENA_CHANGED)


@dataclass(frozen=True)
class Planned:
    """A plan of a part that is carried out.

    Attributes:
        function: the function that runs it; the trace itself where nothing is changed.
        gate: the number of its gate; None where nothing is changed.
        live: whether it was made for the arena as it is.
        snapshot: the arena before the step.
        requests: the step's requests of the allocator; None where nothing is changed.
        peak_bytes: the simulated peak; 0 where it was not simulated.
    """

    optimizer: Optimizer
    plan: Plan
    function: Any
    gate: int | None
    live: bool
    snapshot: ArenaSnapshot
    requests: Requests | None
    peak_bytes: int


@dataclass
class PartPlanning:
    """The planning of a part of the step.

    Attributes:
        part: the part.
        optimizer: its optimizer.
        snapshot: its arena before the step.
        live, ordered, first: as of PlanningLoop.
        given: the plan to carry out instead of choosing one.
        plan: the plan of the latest try.
        fits: whether that plan was found for the limit.
        instantiated: whether it was chosen for the arena with the step's constants.
        requests: the requests of its function; None before it is simulated, and where nothing is changed.
        peak_bytes: the simulated peak.
        lacking_bytes: the most by which a plan has passed the limit so far.
    """

    part: StepPart
    optimizer: Optimizer
    snapshot: ArenaSnapshot
    live: bool
    given: Plan | None
    ordered: bool
    first: bool
    plan: Plan = dataclasses.field(init=False)
    fits: bool = True
    instantiated: bool = False
    requests: Requests | None = None
    peak_bytes: int = 0
    lacking_bytes: int = 0
    _at_home_before: HomePlaces | None = None  # None while no variable was moved

    def choose(self, drop_function: Callable[[], None]) -> Outcome | None:
        """Choose a plan. The outcome, where that ends the try.

        Raises InfeasibleMemoryLimit.
        """
        self.instantiated, self.fits = self.snapshot.instantiated, True
        try:
            self.plan = self.given or self.part.compiler.choose(
                self.optimizer, ordered=self.ordered, first=self.first, lacking_bytes=self.lacking_bytes
            )
        except InfeasibleMemoryLimit as error:
            if self._make_room(error, drop_function):
                return Outcome.ROOM_MADE
            self.fits, self.plan = False, self._lowest(error)
        return None

    @property
    def changes_nothing(self) -> bool:
        """Whether the plan of the latest try leaves the part as it was traced."""
        return self.part.request.changes_nothing or self.plan.changes_nothing

    def _make_room(self, error: InfeasibleMemoryLimit, drop_function: Callable[[], None]) -> bool:
        """Add what the arena may grow by as one region, or reserve slots, where a refusal may be due to fragmentation
        alone; returns whether that was done.
        """
        arena_bytes = self.snapshot.limit_bytes
        compiler = self.part.compiler
        if not self.live or compiler.slots or arena_bytes is None or error.floor_bytes <= arena_bytes:
            return False
        if not self._has_grown():
            drop_function()
            if not compiler.make_slots(self.optimizer):
                return False
        self.snapshot = self.part.arena.snapshot()
        self.optimizer.assume_arena(self.snapshot)
        return True

    def _has_grown(self) -> bool:
        """Add all that the arena may grow by as one region; returns whether it has grown."""
        growth_bytes = self.snapshot.growth_bytes
        if growth_bytes:
            self.part.arena.add_regions([growth_bytes])
        return self.part.arena.snapshot().growth_bytes < growth_bytes

    def _lowest(self, error: InfeasibleMemoryLimit) -> Plan:
        """The plan with the lowest peak, for a limit that has none, while its function's constants are not known.

        The floor that a refusal names must hold with the step's constants in the arena too. Once they are known, the
        step stays as it was traced, or `error` is raised.
        """
        optimizer, limit = self.optimizer, self.part.limit
        plan = optimizer.lowest()
        if self.live and not optimizer.has_made(plan):
            return plan
        if limit.allows_unchanged(optimizer, ordered=self.ordered):
            limit.cover_unchanged(optimizer)
            return optimizer.unchanged(limit.bytes)
        report_floor(optimizer.fingerprint, error.floor_bytes)
        raise limit.refusal(error, optimizer, self.snapshot) from None

    @property
    def host_bytes(self) -> int:
        """The host memory that the plan takes, with the variables that are at home there."""
        return self.plan.host_bytes + bytes_at_home(self.optimizer.form_of(self.plan).variant.graph)

    def place_variables(self) -> None:
        """Have the part's variables where the plan has them."""
        if self._at_home_before is None:
            self._at_home_before = self.part.arena.at_home()
        self.part.arena.keep_at_home(self.part.home_places(self.plan), move=self.live)

    def put_variables_back(self) -> None:
        """Have the part's variables where they were before it was planned."""
        if self._at_home_before is not None:
            self.part.arena.keep_at_home(self._at_home_before, move=self.live)

    def judge(self) -> bool:
        """Simulate the plan in the arena with its function in it; returns whether it keeps the limit."""
        optimizer, snapshot, plan, part = self.optimizer, self.snapshot, self.plan, self.part
        self.requests = optimizer.form_of(plan).requests(snapshot)
        if regions := self.requests.added_regions(snapshot):
            part.arena.add_regions(regions)
            self.snapshot = snapshot = part.arena.snapshot(instantiated=snapshot.instantiated)
        begin_bytes = optimizer.search.planners.begin_bytes if plan.at_home else 0
        self.peak_bytes = peak = max(self.requests.peak_bytes(snapshot), begin_bytes)
        margin = min(optimizer.extra_margin_bytes, part.margins.others_bytes)
        if self.given or part.request.plan or (self.fits and part.limit.has_room(promised(peak), margin)):
            there = snapshot.total_bytes if snapshot.instantiated else max(plan.persistent_bytes, snapshot.total_bytes)
            self.plan = dataclasses.replace(plan, planned_peak_bytes=peak, persistent_bytes=there)
            return True
        if self.instantiated:  # the rest of the arena's contents changes
            lacking = part.limit.lacking_bytes(peak, part.margins.others_bytes)
            self.lacking_bytes = max(self.lacking_bytes, lacking)
        optimizer.assume_made(plan, snapshot)  # planned again for that arena
        if not part.limit.is_final:
            as_it_is = PLAIN._replace(unrolled=plan.unrolled)
            optimizer.unoptimised.renew(optimizer.search.planners.snapshot_of(as_it_is))
            part.limit.compute(optimizer, snapshot)
        return False


@dataclass
class PlanningLoop:
    """One planning of a step.

    Attributes:
        parts: its parts.
        live: whether it runs now.
        given: for each part, a plan to carry out instead of choosing one, whatever it needs.
        ordered: order the step also where its limit is well above the unoptimised peak.
        first: whether it has not been planned yet.
    """

    parts: Sequence[StepPart]
    trace: Trace
    maker: FunctionMaker
    inputs: Sequence[Any]
    live: bool
    given: Sequence[Plan] | None = None
    ordered: bool = False
    first: bool = False

    @without_collector
    def run(self) -> list[Planned]:
        """The plan of each part, carried out. Raises InfeasibleMemoryLimit and UnsupportedGraph."""
        new = [part.compiler.import_step(self.inputs, first=self.first) for part in self.parts]
        free_functions(recent=any(new))
        for part in self.parts:
            part.borrowed = None
        self._parts = [self._begun(i, part) for i, part in enumerate(self.parts)]
        self._lending = Lending(self._parts)
        self._assume_waits()
        self.maker.making_bytes = []
        self._function: Any = None
        self._gate: int | None = None
        self._actions: list[object] | None = None  # of the plans that the function carries out
        for _ in range(PLANNING_TRIES):
            if self._try().is_final:
                self._note_times()
                return [
                    Planned(
                        each.optimizer,
                        each.plan,
                        self._function,
                        self._gate,
                        each.live,
                        each.snapshot,
                        each.requests,
                        each.peak_bytes,
                    )
                    for each in self._parts
                ]
        raise TfswapError(
            f"{self.trace.name}: the arena changed under each of {PLANNING_TRIES} plans: is something else "
            "allocating on the device at the same time?"
        )

    def _begun(self, number: int, part: StepPart) -> PartPlanning:
        live = self.live and part.trace.device.has_arena
        if live:  # also where the step is refused: callers go on with another batch, or another limit
            part.trace.device.split_exactly_between_steps()
        optimizer, snapshot = part.compiler.for_arena(self.inputs, live=live, first=self.first)
        given = None if self.given is None else self.given[number]
        return PartPlanning(part, optimizer, snapshot, live, given, self.ordered, self.first)

    def _assume_waits(self) -> None:
        """Have each part planned for when the other devices send it tensors, if nothing is moved there."""
        for each, timed in self._timed({}):
            assume_times(each.optimizer, timed)

    def _note_times(self) -> None:
        """Predict the seconds of the plans together: a device waits for what others send it."""
        if all(each.changes_nothing for each in self._parts):
            return
        for each, timed in self._timed(self._plans):
            note_times(each.optimizer, timed)
            each.plan = dataclasses.replace(each.plan, seconds=timed.timing.total_s)

    def _seconds(self) -> float:
        """The time of the step with the chosen plans."""
        return max(timed.timing.total_s for _, timed in self._timed(self._plans))

    @property
    def _plans(self) -> dict[str, Plan]:
        """The chosen plans, by device."""
        return {each.part.trace.device.name: each.plan for each in self._parts}

    def _timed(self, plans: Mapping[str, Plan]) -> list[tuple[PartPlanning, TimedPart]]:
        """Each part of several with its time under these plans; without one, in the order that is planned first."""
        if len(self._parts) == 1:
            return []
        by_device = {each.part.trace.device.name: each for each in self._parts}
        timed = self.trace.timed({name: lanes_of(each.optimizer, plans.get(name)) for name, each in by_device.items()})
        return [(each, timed[name]) for name, each in by_device.items() if name in timed]

    def _try(self) -> Outcome:
        try:
            outcomes = [self._chosen(i) for i in range(len(self._parts))]
            if Outcome.ROOM_MADE in outcomes:
                return Outcome.ROOM_MADE
            unchanged = [each.changes_nothing for each in self._parts]
            is_new = not all(each.ordered for each in self._parts)
            if any(unchanged) and not all(unchanged) and is_new:  # one function runs all parts, and orders each
                for each in self._parts:
                    each.ordered = True
                return self._try()
        except InfeasibleMemoryLimit:
            if self._lending.give_back():
                return Outcome.LENT
            self._drop_function()  # a held refusal holds this loop, and with it constants in the arena
            for each in self._parts:
                each.put_variables_back()
            raise
        if all(unchanged):
            self._place_variables()
            self._function, self._gate = self.trace.concrete, None
            for each in self._parts:
                each.requests = None
            return Outcome.UNCHANGED
        if self._may_lend and self._lending.changes_arenas(self._seconds, self._choose):
            return Outcome.LENT
        self._make()
        if not self.live:
            return Outcome.UNSEEN
        kept = [each.judge() for each in self._parts if each.live]
        return Outcome.PLANNED if all(kept) else Outcome.ARENA_CHANGED

    @property
    def _may_lend(self) -> bool:
        """Whether devices of the step may lend memory to one another now."""
        return self.live and self.given is None and len(self._parts) > 1 and self._actions is None

    def _chosen(self, number: int) -> Outcome | None:
        """Choose the plan of a part, with the search for a part before as an example. Of several parts, a refusal names
        the device.
        """
        planning = self._parts[number]
        planning.optimizer.example = self._parts[number - 1].optimizer.searched if number else None
        return self._choose(planning)

    def _choose(self, planning: PartPlanning) -> Outcome | None:
        try:
            return planning.choose(self._drop_function)
        except InfeasibleMemoryLimit as error:
            if len(self._parts) == 1:
                raise
            raise error.of(planning.part.trace.name) from None

    def _make(self) -> None:
        """Make the function of the chosen plans, unless it exists."""
        actions = [(each.plan.actions, each.part.borrowed) for each in self._parts]
        if actions == self._actions:
            return
        if self._actions is not None:
            # The earlier plan's function is freed first: the next one's constants get its chunks.
            self._drop_function()
        places = [each.part.home_places(each.plan) for each in self._parts]
        variables = [each.part.arena.variables if self.live else None for each in self._parts]
        chosen = [Chosen(each.part.trace, each.optimizer, each.plan, each.part.borrowed) for each in self._parts]
        limits = dataclasses.replace(self.maker.limits, host_bytes=sum(each.host_bytes for each in self._parts))
        with within_host_limit(limits, zip(variables, places, strict=True), self._place_variables):
            self._function, self._gate = self.maker.make(chosen, live=self.live)
        self._actions = actions
        if self.live:
            self.maker.instantiate(self._function, self.inputs)
            for each in self._parts:
                each.snapshot = each.part.arena.snapshot(instantiated=True)

    def _place_variables(self) -> None:
        """Have the variables of the step where the chosen plans have them."""
        for each in self._parts:
            each.place_variables()

    def _drop_function(self) -> None:
        self._function = self._gate = self._actions = None
        free_functions()
