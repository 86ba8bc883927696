"""The forms of a step that are prepared apart: with loops of small kernels as loops, or with these unrolled too.

As a loop such kernels take less time. Unrolled, what a loop's iterations hold can be moved like all else, so the
smallest limit is lower. So a step is planned unrolled where no plan with loops keeps the limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tfswap.analysis.dataflow import Dataflow
from tfswap.compiler.planned_form import PlannedForm
from tfswap.compiler.prepared_step import PreparedStep
from tfswap.compiler.rewriting import Rewriting, Variant
from tfswap.compiler.search import Search
from tfswap.ir.graph import Graph
from tfswap.kernels.target import Target
from tfswap.plan.plan import Plan
from tfswap.planner.planner import Planner
from tfswap.simulator.arena_snapshot import ArenaSnapshot


class StepForm(NamedTuple):
    """A prepared step, and the search for its plans."""

    target: Target
    prepared: PreparedStep
    search: Search


class StepForms:
    """The forms of one step, each made at its first use.

    Args:
        target: of the step.
        made: prepares the step for a target.
        snapshot: the arena before the step.
        leaves_loops: whether the step has loops that are not unrolled, and may be.

    Attributes:
        present: the form that is used now.
    """

    def __init__(
        self,
        target: Target,
        made: Callable[[Target, ArenaSnapshot], StepForm],
        snapshot: ArenaSnapshot,
        leaves_loops: Callable[[], bool],
    ):
        self._made = made
        self._snapshot = snapshot
        self._begin_bytes: int | None = None
        self._looped = self.present = made(target, snapshot)
        self._unrolled: StepForm | None = None
        self._leaves_loops, self._is_tried = leaves_loops, False

    def assume_arena(self, snapshot: ArenaSnapshot, begin_bytes: int | None = None) -> None:
        """As `Search.assume_arena`, of all forms."""
        self._snapshot, self._begin_bytes = snapshot, begin_bytes
        for form in filter(None, (self._looped, self._unrolled)):
            form.search.assume_arena(snapshot, begin_bytes)

    @property
    def unrolled(self) -> StepForm | None:
        """The form with all loops unrolled that can be; None where the other one has no loops of small kernels."""
        lent_bytes = self._looped.search.planners.lent_bytes
        if not self._is_tried and not lent_bytes:
            self._is_tried = True
            if not self._leaves_loops():
                return None
            form = self._made(dataclasses.replace(self._looped.target, unrolls=True), self._snapshot)
            if form.prepared.facts.unrolled > self._looped.prepared.facts.unrolled:
                form.search.assume_arena(self._snapshot, self._begin_bytes)
                self._unrolled = form
        return self._unrolled

    def use(self, *, unrolled: bool) -> None:
        """Use a form from now on. Where costs have all loops unrolled, it is the same."""
        self.present = (self.unrolled if unrolled else None) or self._looped

    def use_unrolled(self) -> bool:
        """Use the form with all loops unrolled from now on, if there is one; returns whether it was not used before."""
        form = self.unrolled
        if form is None or form is self.present:
            return False
        self.present = form
        return True

    @contextlib.contextmanager
    def with_least(self, bytes_of: Callable[[], int]) -> Iterator[int]:
        """Use the form with the least of these bytes meanwhile; gives them."""
        before, found = self.present, list[tuple[int, StepForm]]()
        try:
            for form in filter(None, (self._looped, self.unrolled)):
                self.present = form
                found.append((bytes_of(), form))
            nbytes, self.present = min(found, key=lambda each: each[0])
            yield nbytes
        finally:
            self.present = before


class Formed:
    """A step of which one form is used at a time.

    Attributes:
        forms: its forms.
    """

    forms: StepForms

    @property
    def search(self) -> Search:
        """The search for plans of the present form."""
        return self.forms.present.search

    @property
    def locate(self) -> Callable[[str], str | None]:
        """From a node's name to the user's source line, where that is known."""
        return self.prepared.facts.locate

    @property
    def prepared(self) -> PreparedStep:
        """The prepared step."""
        return self.forms.present.prepared

    def use(self, plan: Plan) -> None:
        """Use the form of the step that a plan is for from now on."""
        self.forms.use(unrolled=plan.unrolled)

    @property
    def settled(self) -> Graph:
        """The prepared step with ordered bodies, and with the rewriting that all variants have."""
        return self.search.variants.plain.graph

    @property
    def flow(self) -> Dataflow:
        """The facts of `settled`."""
        return self.search.variants.plain.flow

    @property
    def planner(self) -> Planner:
        """The planner for `settled`, in the assumed arena."""
        return self.search.planners.of(self.search.variants.plain)

    def form_of(self, plan: Plan) -> PlannedForm:
        """`plan`, which fixes an order, with the form of the step that it is for."""
        return PlannedForm(plan, self.variant_of(plan))

    def variant_of(self, plan: Plan) -> Variant:
        """The variant that `plan` is of."""
        self.use(plan)
        return self.search.variants[Rewriting.of(plan)]
