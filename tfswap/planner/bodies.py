"""Plans evictions inside of the bodies of loops and conditionals, as for a step.

A body that holds a whole training computation (gradients summed over micro-batches, several steps in a loop) has
tensors that wait between uses, as a step has. Outside of the body only the peak of the loop counts. A ladder of plans,
for all bodies of a step that hold many bytes, trades this peak against seconds.

A rung is a target for the live bytes of the whole step. Each body is planned for the target less the bytes that are
live around it while it runs, inner bodies first. Targets do not depend on the limit, and the rung is chosen by judging
the whole step with it.

Not handled: other orders of a body than its own (passes/tactics/order_bodies.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from tfswap.analysis.analyse import analyse_body
from tfswap.analysis.cost import Costs
from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.graph import Graph
from tfswap.kernels.alignment import round_up
from tfswap.kernels.target import Target
from tfswap.plan.plan import Inside
from tfswap.plan.schedule import build_schedule
from tfswap.planner.chunk_splits import LEAST_SHARES, choose_splits
from tfswap.planner.host_tiers import Tiers
from tfswap.planner.planner import Planner
from tfswap.planner.problem import Problem
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN

RUNGS = 16
"""The most rungs: each is another form of the step, which is judged."""
STAGES = 4
"""The most rungs that are combined with evictions around bodies: each takes a ladder of the whole step."""
LEAST_SHARE = 0.05
"""A body is planned if it holds at least this share of the step's live peak."""


class Rung(NamedTuple):
    """One plan for the bodies of a step.

    Attributes:
        inside: the plans of bodies, inner bodies first. Other bodies are not changed.
        least_bytes: a lower bound of the peak of live bytes in a body and around it, for all evictions around it.
            Persistent bytes are left out.
        more_s: the seconds that it adds to a step.
        stands_for_others: whether it is one of the few rungs that are combined with evictions around bodies.
    """

    inside: tuple[Inside, ...]
    least_bytes: int
    more_s: float
    stands_for_others: bool


class PlannedBody(NamedTuple):
    """A body and its plan.

    Attributes:
        problem: the body without the plan.
        times: how often it runs in a step.
    """

    inside: Inside
    problem: Problem
    times: float


@dataclass(frozen=True)
class Terms:
    """Terms that are the same for all bodies of a step.

    Attributes:
        carry_out: carries out a plan in a body, in place. Its second argument is the facts of a copy of the body.
    """

    target: Target
    costs: Costs
    tactics: Collection[str]
    tiers: Tiers
    carry_out: Callable[[Graph, Dataflow, Inside], None]


class _Planned(NamedTuple):
    """A body with a plan.

    Attributes:
        inside: the plans of the body and of the bodies in it.
        own_bytes: the peak of its live bytes, without its arguments.
        least_bytes: the peak of live bytes in it, or in a body in it, with the bytes around it that can't be evicted.
        more_s: the additional seconds of all its runs in a step.
        graph: the body with these plans carried out.
    """

    inside: tuple[Inside, ...]
    own_bytes: int
    least_bytes: int
    more_s: float
    graph: Graph


@dataclass
class _Body:
    """A body that holds enough bytes to be planned.

    Attributes:
        around_bytes: bytes that are live around it while it runs, without evictions.
        pinned_bytes: those of them that can't be evicted while it runs.
        times: how often it runs in a step.
        inner: the bodies in it that are planned.
        planners: by plans of the inner bodies: the body with these carried out, and its planner.
    """

    name: str
    graph: Graph
    around_bytes: int
    pinned_bytes: int
    times: float
    terms: Terms
    inner: list[_Body]
    planners: dict[tuple[Inside, ...], tuple[Graph, Planner]] = field(
        default_factory=dict[tuple[Inside, ...], tuple[Graph, Planner]]
    )

    @cached_property
    def all(self) -> list[_Body]:
        """This body, and all bodies in it."""
        return [self, *(b for body in self.inner for b in body.all)]

    def planned(self, target_bytes: float) -> _Planned:
        """The plan with which the step holds at most `target_bytes`, or the plan that comes nearest."""
        inner = [body.planned(target_bytes) for body in self.inner]
        graph, planner = self._planner(inner)
        flow, problem = planner.flow, planner.problems[0]
        given_bytes = flow.persistent_bytes
        aim = max(target_bytes - self.around_bytes + given_bytes, planner.live_floor_bytes)
        draft = planner.drafted(int(min(aim, problem.live_peak_bytes)))
        assert draft is not None, "the lowest target of a ladder is one that was met"
        choice = draft.choice._replace(exact_chunks=False)  # the step's own, or none
        own_bytes = problem.live_peak_of(choice) - given_bytes
        inside = [i for made in inner for i in made.inside]
        more_s = sum(made.more_s for made in inner)
        if choice.order != problem.order or choice.intervals:
            before_s = self.terms.costs.body_seconds(graph)
            # A tensor swapped in a body goes to disk if host memory is full when the body runs.
            in_memory = choice._replace(intervals=[a._replace(disk=False, lent=None) for a in choice.intervals])
            splits = choose_splits(flow, build_schedule(*choice), NOTHING_KNOWN)[1]
            moved = Inside(self.name, *in_memory.named(flow), splits)
            graph = graph.copy()
            self.terms.carry_out(graph, flow, moved)
            inside.append(moved)
            more_s += self.times * (self.terms.costs.body_seconds(graph) - before_s)
        least_bytes = max((self.pinned_bytes + own_bytes, *(made.least_bytes for made in inner)))
        return _Planned(tuple(inside), own_bytes, least_bytes, more_s, graph)

    def _planner(self, inner: list[_Planned]) -> tuple[Graph, Planner]:
        key = tuple(i for made in inner for i in made.inside)
        if key not in self.planners:
            graph = self.graph
            if key:
                graph = graph.copy()
                for body, made in zip(self.inner, inner, strict=True):
                    _replace_body(graph, body.name.removeprefix(f"{self.name}/"), made.graph)
            self.planners[key] = graph, _planner_of(graph, self.terms)
        return self.planners[key]


def least_around(graph: Graph, problem: Problem) -> int | None:
    """The largest lower bound of the live bytes around a body that `find_rungs` plans, without persistent bytes. None
    where there is no such body.
    """
    nodes = _holding_nodes(graph, problem, _worth(problem))
    return max((pinned for _, _, pinned in nodes), default=None)


def find_rungs(graph: Graph, problem: Problem, terms: Terms) -> list[Rung]:
    """Plans for the bodies of a step, the one that adds least time first; none if no body holds enough bytes.

    Args:
        graph: the step, with ordered bodies.
        problem: the step in its order.
    """
    if not {"swap", "recompute"}.intersection(terms.tactics):
        return []
    bodies = list(_bodies(graph, problem, "", 0, 0, None, terms, _worth(problem)))
    flat = [b for body in bodies for b in body.all]
    if not flat:
        return []
    highest = max(b.around_bytes + b.planned(math.inf).own_bytes for b in flat)
    lowest = min(b.around_bytes + b.planned(-math.inf).own_bytes for b in flat)
    rungs: dict[tuple[Inside, ...], Rung] = {}
    for n in range(1, RUNGS + 1):
        planned = [body.planned(highest - (highest - lowest) * n / RUNGS) for body in bodies]
        inside = tuple(i for made in planned for i in made.inside)
        least_bytes = max(made.least_bytes for made in planned)
        more_s = sum(made.more_s for made in planned)
        for share in (1.0, *LEAST_SHARES):
            split = tuple(_with_splits(i, share * least_bytes) for i in inside)
            stands_for_others = n % (RUNGS // STAGES) == 0 and share in (1.0, LEAST_SHARES[-1])
            if inside and (split not in rungs or stands_for_others):
                rungs[split] = Rung(split, least_bytes, more_s, stands_for_others)
    return sorted(rungs.values(), key=lambda rung: rung.more_s)


def _with_splits(inside: Inside, least_bytes: float) -> Inside:
    """`inside` with its splits for requests of `least_bytes` or more."""
    return dataclasses.replace(inside, splits=tuple(s for s in inside.splits if s.nbytes >= least_bytes))


def _worth(problem: Problem) -> int:
    """The least bytes that a body must hold to be planned."""
    return int(LEAST_SHARE * (problem.live_peak_bytes - problem.there_bytes))


def _holding_nodes(graph: Graph, problem: Problem, least_bytes: int) -> Iterator[tuple[int, int, int]]:
    """The nodes whose bodies may hold `least_bytes`: index, bytes live around it, and the pinned ones of these."""
    if not graph.bodies:
        return
    flow = problem.flow
    waits = [(gap.start, gap.end, round_up(gap.nbytes)) for gap in problem.gaps]
    for position, i in enumerate(problem.order):
        if flow.nodes[i] in graph.bodies and flow.temporary_bytes(i) >= least_bytes:
            here_bytes = int(problem.before_bytes[position]) - problem.there_bytes - flow.persistent_bytes
            moved_bytes = sum(nbytes for start, end, nbytes in waits if start < position < end)
            yield i, here_bytes, max(0, here_bytes - moved_bytes)


def _bodies(
    graph: Graph,
    problem: Problem,
    within: str,
    around_bytes: int,
    pinned_bytes: int,
    runs: Mapping[Graph, float] | None,
    terms: Terms,
    least_bytes: int,
) -> Iterator[_Body]:
    """The bodies of a graph that hold `least_bytes` or more.

    Args:
        problem: the graph in its order.
        within: the prefix of the bodies' names.
        around_bytes, pinned_bytes: bytes live around the graph itself, and those of them that can't be evicted.
        runs: how often each body runs in a step; None where the graph is the step.
    """
    flow = problem.flow
    for i, here_bytes, stays_bytes in _holding_nodes(graph, problem, least_bytes):
        around, pinned = around_bytes + here_bytes, pinned_bytes + stays_bytes
        times = flow.runs[i] if runs is None else runs
        for n, body in enumerate(graph.bodies[flow.nodes[i]]):
            inner = _planner_of(body, terms)
            if inner.live_peak_bytes - inner.flow.persistent_bytes < least_bytes:
                continue
            name = f"{within}{flow.nodes[i].name}[{n}]"
            nested = list(_bodies(body, inner.problems[0], f"{name}/", around, pinned, times, terms, least_bytes))
            # Of two branches only the one that holds more is known to run.
            found = _Body(name, body, around, pinned, times.get(body, 1.0), terms, nested)
            found.planners[()] = body, inner
            yield found


def _planner_of(body: Graph, terms: Terms) -> Planner:
    device = terms.target.device
    one_thread = device._replace(inter_op_threads=1)  # a loop's kernels run one after another
    return Planner(
        analyse_body(body, device),
        dataclasses.replace(terms.target, device=one_thread),
        tiers=terms.tiers,
        tactics=terms.tactics,
        costs=terms.costs,
    )


def _replace_body(graph: Graph, name: str, body: Graph) -> None:
    """Replace the body called `name`."""
    node, _, number = name.removesuffix("]").rpartition("[")
    bodies = list(graph.bodies[graph[node]])
    bodies[int(number)] = body
    graph.bodies[graph[node]] = tuple(bodies)
