"""A plan, and the form of the step that it is for: its requests of the allocator, its peak, its run over time."""

from __future__ import annotations

from typing import NamedTuple

from tfswap.analysis.cost import Costs
from tfswap.compiler.rewriting import Variant
from tfswap.plan.plan import Plan
from tfswap.plan.schedule import CopyTiers, Step, planned_choice, planned_schedule, tiers_of
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.memory import judge_memory
from tfswap.simulator.record import PlannedRecord, record_planned
from tfswap.simulator.requests import Requests, record_requests, requests_of_one


class PlannedForm(NamedTuple):
    """A plan with an order, and the form of the step after the plan's other changes, to which the order applies.

    Every method takes the content of the arena before the step, where the result depends on it.
    """

    plan: Plan
    variant: Variant

    @property
    def schedule(self) -> list[Step]:
        return planned_schedule(self.variant.flow, self.plan)

    @property
    def tiers(self) -> CopyTiers:
        """The tiers of the values that do not go to host memory."""
        return tiers_of(planned_choice(self.variant.flow, self.plan)[1])

    def peak_bytes(self, snapshot: ArenaSnapshot) -> int:
        """The simulated peak."""
        return judge_memory(self.variant.flow, self.schedule, snapshot).peak_bytes

    def requests(self, snapshot: ArenaSnapshot) -> Requests:
        """The requests of the allocator, for other contents of the arena as well."""
        return record_requests(self.variant.flow, self.schedule, snapshot)

    def requests_of_one(self) -> tuple[tuple[int, ...], ...]:
        """The requests for the gate of a saved step, which replays them in the arena that it finds."""
        return requests_of_one(self.variant.flow, self.schedule)

    def record(self, costs: Costs, snapshot: ArenaSnapshot) -> PlannedRecord:
        """The run under the plan: bytes in the arena over time."""
        flow = self.variant.flow
        return record_planned(
            flow,
            self.schedule,
            costs.of_step(flow),
            costs.rates,
            snapshot=snapshot,
            tiers=self.tiers,
            arrivals=costs.arrivals_in(flow),
        )
