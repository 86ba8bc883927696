"""The variants of one step: different graphs with the same values.

Some tactics change which kernels exist, not only when they run. Each choice of them makes another graph, with facts and
ladders of its own, and the plan is the fastest of all that fit. `alternatives.py` chooses the rewritings that are
tried.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator

from tfswap.analysis.accumulators import Accumulator, find_accumulators
from tfswap.analysis.analyse import analyse_body
from tfswap.analysis.cost import Costs
from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.groups import Concurrent
from tfswap.analysis.loop_recompute import Passage, Saved, find_passages
from tfswap.analysis.permits import permit_of
from tfswap.compiler.body_orders import choose_body_orders
from tfswap.compiler.rewriting import PLAIN, Rewriting, Variant
from tfswap.compiler.tactics import BEFORE_SLICES, BODIES, FORM, BodyKey, ResolvedRewriting
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.permits import ANYTHING, Permit
from tfswap.ir.views import passed_on
from tfswap.kernels.target import Target
from tfswap.passes.contract import apply_plan_table
from tfswap.passes.tactics.body_plan import carry_out_in_body
from tfswap.passes.tactics.join_concurrent import join_concurrent
from tfswap.passes.tactics.loop_recompute import recompute_in_loops
from tfswap.passes.tactics.sliced_updates import count_slices
from tfswap.passes.tactics.sliced_weights import count_weight_slices
from tfswap.plan.plan import Inside
from tfswap.planner.bodies import PlannedBody, Rung, Terms, find_rungs
from tfswap.planner.concurrent import ListSchedule, find_members, schedule_group
from tfswap.planner.group_places import place_group
from tfswap.planner.group_requests import Group
from tfswap.planner.host_tiers import Tiers
from tfswap.planner.pairing import keep_apart
from tfswap.planner.problem import Problem, make_problem
from tfswap.planner.step_orders import StepOrders
from tfswap.planner.validate import require_allowed

NOWHERE = -1
"""The number of a value that does not exist."""


class Variants:
    """The variants of one step, each made at its first use.

    Args:
        graph: the prepared step; it is changed.
        facts: from a prepared step with ordered bodies to its facts.
        target: the device, and which ops the step may have.
        costs: the cost model.
        base: the rewriting that the step has already.

    Attributes:
        base: the rewriting that all others contain.
        unordered: the prepared step, whose bodies have no order.
        ordered: the same with ordered bodies, without any rewriting.
        target: as given.
    """

    def __init__(
        self,
        graph: Graph,
        facts: Callable[[Graph], Dataflow],
        target: Target,
        costs: Costs,
        base: Rewriting = PLAIN,
    ):
        self.base = self._first = base
        self.target = target
        self._device = target.device
        self._costs = costs
        self.unordered = graph.copy() if graph.bodies else graph
        choose_body_orders(graph, target)
        self.ordered = graph
        self._facts = facts
        self._keep_apart(graph)
        self._made = {base: Variant(base, graph, facts(graph))}
        self._cost_s: dict[Rewriting, list[float]] = {}
        self._orders: dict[Rewriting, StepOrders] = {}
        self._problems: dict[BodyKey, Problem] = {}
        self._schedules: dict[int, list[ListSchedule]] = {}
        self._groups: dict[int, list[Concurrent]] = {}

    def __getitem__(self, rewriting: Rewriting) -> Variant:
        if rewriting not in self._made:
            self._require_allowed(rewriting)
            resolved = ResolvedRewriting(rewriting, self.target, self.problem_of, self._problems)
            if resolved.changes_unordered_bodies:
                graph = self.unordered.copy()
                apply_plan_table(BODIES, graph, self.target, resolved)
            else:
                graph = self.ordered.copy()
            apply_plan_table(FORM, graph, self.target, resolved)
            if rewriting.concurrent:
                join_concurrent(graph, self.target, self.plain.flow, self.groups(rewriting.concurrent))
            graph.prune()
            if not rewriting.grouped:
                self._keep_apart(graph)
            flow = self._facts(graph)
            bodies = tuple(
                PlannedBody(inside, problem, flow.times_of(body)) for inside, problem, body in resolved.bodies
            )
            self._made[rewriting] = Variant(rewriting, graph, flow, resolved.encodings, resolved.inner, bodies)
        return self._made[rewriting]

    def cost_s(self, variant: Variant) -> list[float]:
        """Seconds of each node of a variant."""
        if variant.rewriting not in self._cost_s:
            self._cost_s[variant.rewriting] = self._costs.of_step(variant.flow)
        return self._cost_s[variant.rewriting]

    def orders_of(self, rewriting: Rewriting) -> StepOrders:
        """The orders of a variant's kernels: with whatever is moved in bodies, they are the same."""
        outside = rewriting.outside
        if outside not in self._orders:
            variant = self[outside]
            self._orders[outside] = StepOrders(variant.flow, self.cost_s(variant), self._costs.rates)
        return self._orders[outside]

    @functools.cached_property
    def group_members(self) -> list[Group]:
        """The kernels of each group of the step."""
        flow = self.plain.flow
        return [Group(flow, members) for members in find_members(flow, self.orders_of(self.base).ranked[0])]

    def schedules(self, most_bytes: int) -> list[ListSchedule]:
        """List schedules of the step's groups that hold at most `most_bytes` while kernels run concurrently."""
        for bound, made in self._schedules.items():
            if max((each.allowed_bytes for each in made), default=0) <= most_bytes <= bound:
                return made
        cost_s, rates = self.cost_s(self.plain), self._costs.rates
        made = [schedule_group(group, cost_s, rates, most_bytes) for group in self.group_members]
        self._schedules[most_bytes] = made
        return made

    def groups(self, most_bytes: int) -> list[Concurrent]:
        """The step's groups, of `schedules`, with places for their tensors."""
        if most_bytes not in self._groups:
            threads = max(1, self._device.intra_op_threads)
            self._groups[most_bytes] = [place_group(each, threads) for each in self.schedules(most_bytes)]
        return self._groups[most_bytes]

    def _keep_apart(self, graph: Graph) -> None:
        """Unpair kernels of bodies, in place, whose concurrent run would raise the body's peak."""
        for body in graph.all_bodies():
            if body.paired:
                keep_apart(body, analyse_body(body, self._device))

    @property
    def plain(self) -> Variant:
        """The variant with the base rewriting alone."""
        return self[self.base]

    def problem_of(self, flow: Dataflow) -> Problem:
        """The problem of a body with these facts, in its order."""
        order = [i for i, kernel in enumerate(flow.is_kernel) if kernel]
        return make_problem(flow, order, self._costs.rates, self._costs.of_step(flow))

    def rungs(self, rewriting: Rewriting, problem: Problem, tactics: Collection[str], tiers: Tiers) -> list[Rung]:
        """Plans for the bodies of a variant with evictions in them; `problem` is the variant's."""

        def carried_out(body: Graph, flow: Dataflow, inside: Inside) -> None:
            carry_out_in_body(body, self.target, flow, inside)

        return find_rungs(self[rewriting].graph, problem, Terms(self.target, self._costs, tactics, tiers, carried_out))

    def unordered_with(self, recomputed: Collection[str]) -> Graph:
        """A copy of the step with bodies that have no order, in which these lists are not saved."""
        graph = self.unordered.copy()
        recompute_in_loops(graph, self.target, recomputed)
        return graph

    def slice_counts(self, at_home: Rewriting, sizes: Iterable[int]) -> dict[int, int]:
        """By size of slices in bytes, the number of slices in which `at_home` then updates and reads variables."""
        found: dict[int, int] = {}
        graph: Graph | None = None
        for nbytes in sizes:
            if graph is None or graph.bodies:  # conditionals are cut by the size of slices
                sliced = at_home._replace(slice_bytes=nbytes)
                graph = self.unordered.copy()
                resolved = ResolvedRewriting(sliced, self.target, self.problem_of, self._problems)
                apply_plan_table(BEFORE_SLICES, graph, self.target, resolved)
            device = self.target.device
            # Weights that updates write have no more slices than these, of fewer kernels.
            found[nbytes] = count_slices(graph, device, nbytes) or count_weight_slices(graph, device, nbytes)
        return found

    @functools.cached_property
    def accumulators(self) -> dict[str, Accumulator]:
        """All accumulators of the step, by name."""
        return {a.name: a for a in find_accumulators(self.ordered)}

    @functools.cached_property
    def permits(self) -> dict[str, Permit]:
        """The permits of each accumulator's elements, by name."""
        return {name: a.permit for name, a in self.accumulators.items()}

    @functools.cached_property
    def saved_bytes(self) -> dict[str, int]:
        """The bytes of each accumulator, by name."""
        flow = self._made[self._first].flow  # of `ordered`
        return {name: a.nbytes(flow) for name, a in self.accumulators.items()}

    def recomputing_s(self, rewriting: Rewriting, costs: Costs) -> dict[str, float]:
        """By list whose elements are recomputed: the additional seconds in a step."""
        found: dict[str, float] = {}
        flow, graph = self.plain.flow, self.plain.graph
        for passage, saved, kernels in self._recomputed(rewriting.recomputed):
            place = flow.place.get(passage.loop.name)  # None in the body of another loop
            times = 1.0 if place is None else flow.runs[place][graph.bodies[flow.nodes[place]][1]]
            found[saved.name] = times * sum(map(costs.seconds, kernels))
        return found

    def _recomputed(self, recomputed: Collection[str]) -> Iterator[tuple[Passage, Saved, list[Node]]]:
        """For each list whose elements are recomputed, the kernels that do it."""
        for passage in find_passages(self.unordered, find_accumulators(self.unordered)) if recomputed else ():
            kept = {passed_on(s.push.pushed) for s in passage.saved if s.name not in recomputed}
            for s in passage.saved:
                if s.name in recomputed:
                    yield passage, s, passage.recomputed(s.push.pushed, kept) or []

    def _require_allowed(self, rewriting: Rewriting) -> None:
        """Raise InvalidModel for a rewriting that permits do not allow; encodings of kernels are checked where they are
        applied.
        """
        for name in rewriting.accumulators:
            require_allowed(self.permits.get(name, ANYTHING), "swap", f"swaps what loops save in {name!r}")
        for passage, saved, kernels in self._recomputed(rewriting.recomputed):
            for tensor in outputs_of(kernels):
                does = f"recomputes {tensor.name!r} in place of saving {saved.name!r}"
                require_allowed(permit_of(passage.forward, tensor), "recompute", does)
        flow = self._made[self._first].flow
        for smaller in (*rewriting.reduced, *rewriting.packed):
            permit = flow.permits.get(flow.value_named.get(smaller.tensor, NOWHERE), ANYTHING)
            require_allowed(permit, "encode", f"keeps {smaller.tensor!r} in a smaller form")


def outputs_of(kernels: Iterable[Node]) -> Iterator[Output]:
    """All outputs of these kernels."""
    return (kernel.out(index) for kernel in kernels for index in range(len(kernel.outputs)))
