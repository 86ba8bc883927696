"""Plans a step for the arena as it is: chooses a plan, makes its function, checks that it keeps the limit there.

A peak depends on the arena's chunks when the step begins, and the step's own constants are among them once TensorFlow
has made its function. So a plan is simulated in the arena after its function is made. Where it does not keep the limit,
the next one is chosen for the arena with these constants. Each try has an `Outcome`:

    choose --> UNCHANGED                     the step runs as it was traced
      |------> SLOTS_MADE -----> again       a plan is missed for want of room in one piece: slots are reserved
      |------> (refusal is raised)
      v
    make ----> UNSEEN                        the arena is not the one in which the step runs
      |
      v
    judge ---> PLANNED                       it keeps its limit, with what its function has made in the arena
      |------> ARENA_CHANGED --> again       it does not: its constants are known from now on
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfswap.compiler.alternatives import MOST_VARIANTS
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.request import Request
from tfswap.compiler.rewriting import PLAIN
from tfswap.device.live import free_functions
from tfswap.errors import InfeasibleMemoryLimit, TfswapError
from tfswap.plan.plan import Plan
from tfswap.planner.promise import promised
from tfswap.runtime.arena_view import ArenaView
from tfswap.runtime.function_maker import FunctionMaker
from tfswap.runtime.limit import StepLimit, report_floor
from tfswap.runtime.margins import Margins
from tfswap.runtime.step_compiler import StepCompiler
from tfswap.runtime.trace import Trace
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.requests import Requests

PLANNING_TRIES = 4 + MOST_VARIANTS
"""Each variant may have to be made once, to find its constants."""


class Outcome(enum.Enum):
    """How one try to plan has ended."""

    UNCHANGED = "the step runs as it was traced"
    UNSEEN = "a plan for an arena that can't be seen yet"
    PLANNED = "a plan that keeps the limit in this arena"
    SLOTS_MADE = "slots were reserved, and the arena is another one"
    ARENA_CHANGED = "the plan does not keep the limit with what its function has made in the arena"

    @property
    def is_final(self) -> bool:
        return self not in (Outcome.SLOTS_MADE, Outcome.ARENA_CHANGED)


@dataclass(frozen=True)
class Planned:
    """A plan that is carried out.

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
class PlanningLoop:
    """One planning of a step.

    Attributes:
        given: a plan to carry out instead of choosing one, whatever it needs.
        ordered: order the step also where its limit is well above the unoptimised peak.
        first: whether it has not been planned yet.
    """

    trace: Trace
    request: Request
    limit: StepLimit
    margins: Margins
    arena: ArenaView
    compiler: StepCompiler
    maker: FunctionMaker
    inputs: Sequence[Any]
    live: bool
    given: Plan | None = None
    ordered: bool = False
    first: bool = False

    def run(self) -> Planned:
        """The plan, carried out. Raises InfeasibleMemoryLimit and UnsupportedGraph."""
        self._optimizer, self._snapshot = self.compiler.for_arena(self.inputs, live=self.live, first=self.first)
        self.maker.making_bytes = 0
        self._plan: Plan | None = None
        self._function: Any = None
        self._gate: int | None = None
        self._actions: tuple[object, ...] | None = None  # of the plan that the function carries out
        self._requests: Requests | None = None
        self._peak_bytes = 0
        self._lacking_bytes = 0
        for _ in range(PLANNING_TRIES):
            if self._try().is_final:
                return self._planned()
        raise TfswapError(
            f"{self.trace.name}: the arena changed under each of {PLANNING_TRIES} plans: is something else "
            "allocating on the device at the same time?"
        )

    def _planned(self) -> Planned:
        assert self._plan is not None, "it has been chosen"
        return Planned(
            self._optimizer,
            self._plan,
            self._function,
            self._gate,
            self.live,
            self._snapshot,
            self._requests,
            self._peak_bytes,
        )

    def _try(self) -> Outcome:
        instantiated = self._snapshot.instantiated
        fits = True
        try:
            self._plan = self.given or self.compiler.choose(
                self._optimizer, ordered=self.ordered, first=self.first, lacking_bytes=self._lacking_bytes
            )
        except InfeasibleMemoryLimit as error:
            if self._make_slots(error):
                return Outcome.SLOTS_MADE
            fits, self._plan = False, self._lowest(error)
        if self.request.changes_nothing or self._plan.changes_nothing:
            self._function, self._gate, self._requests = self.trace.concrete, None, None
            return Outcome.UNCHANGED
        self._make(self._plan)
        if not self.live:
            return Outcome.UNSEEN
        return self._judge(self._plan, fits=fits, instantiated=instantiated)

    def _make_slots(self, error: InfeasibleMemoryLimit) -> bool:
        """Reserve slots where a refusal may be due to fragmentation alone; returns whether slots were made."""
        arena_bytes = self._snapshot.limit_bytes
        if not self.live or self.compiler.slots or arena_bytes is None or error.floor_bytes <= arena_bytes:
            return False
        self._drop_function()
        if not self.compiler.make_slots(self._optimizer):
            return False
        self._snapshot = self.arena.snapshot()
        self._optimizer.assume_arena(self._snapshot)
        return True

    def _lowest(self, error: InfeasibleMemoryLimit) -> Plan:
        """The plan with the lowest peak, for a limit that has none, while its function's constants are not known.

        The floor that a refusal names must hold with the step's constants in the arena too. Once they are known, the
        step stays as it was traced, or `error` is raised.
        """
        optimizer = self._optimizer
        plan = optimizer.lowest()
        if self.live and not optimizer.has_made(plan):
            return plan
        if self.limit.allows_unchanged(optimizer, ordered=self.ordered):
            self.limit.cover_unchanged(optimizer)
            return optimizer.unchanged(self.limit.bytes)
        report_floor(optimizer.fingerprint, error.floor_bytes)
        self._function = None  # a held refusal holds this loop, and with it constants in the arena
        raise self.limit.refusal(error, optimizer, self._snapshot) from None

    def _make(self, plan: Plan) -> None:
        """Make the function of `plan`, unless it exists."""
        if plan.actions == self._actions:
            return
        if self._actions is not None:
            # The earlier plan's function is freed first: the next one's constants get its chunks.
            self._drop_function()
        self._function, self._gate = self.maker.make(self._optimizer, plan, live=self.live)
        self._actions = plan.actions
        if self.live:
            self.maker.instantiate(self._function, self.inputs)
            self._snapshot = self.arena.snapshot(instantiated=True)

    def _judge(self, plan: Plan, *, fits: bool, instantiated: bool) -> Outcome:
        """Simulate `plan` in the arena with its function in it.

        Args:
            fits: whether it was found for the limit.
            instantiated: whether it was chosen for the arena with the step's constants.
        """
        optimizer, snapshot = self._optimizer, self._snapshot
        self._requests = optimizer.form_of(plan).requests(snapshot)
        self._peak_bytes = peak = self._requests.peak_bytes(snapshot)
        margin = min(optimizer.extra_margin_bytes, self.margins.others_bytes)
        if self.given or self.request.plan or (fits and self.limit.has_room(promised(peak), margin)):
            there = max(plan.persistent_bytes, snapshot.total_bytes)
            self._plan = dataclasses.replace(plan, planned_peak_bytes=peak, persistent_bytes=there)
            return Outcome.PLANNED
        if instantiated:  # the rest of the arena's contents changes
            lacking = self.limit.lacking_bytes(peak, self.margins.others_bytes)
            self._lacking_bytes = max(self._lacking_bytes, lacking)
        optimizer.assume_made(plan, snapshot)  # planned again for that arena
        if not self.limit.is_final:
            optimizer.unoptimised.renew(optimizer.search.planners.snapshot_of(PLAIN))
            self.limit.compute(optimizer, snapshot)
        return Outcome.ARENA_CHANGED

    def _drop_function(self) -> None:
        self._function = self._gate = self._actions = None
        free_functions()
