"""The forms of one step that a plan chooses among: the same values from graphs that differ.

Some tactics change which kernels there are, and not only when they run. Each choice of them makes another graph, with
facts and ladders of its own, and the plan is the fastest of all that fit. Which variants there are does not depend on
the limit: so more limit never gives a slower plan, here as on a ladder.

What loops save is swapped in stages of a quarter of its bytes, the largest accumulators first. Some of it need not be
saved: what takes not much longer to make again than to swap, or all that can be made again; what is saved besides is
swapped then, or is not. Of what is swapped, what a loop would wait for is prefetched besides, or is not.
Kernels take encodings where a tensor then goes early, or they need less memory, or none does: they cost next to
nothing. What is encoded whole and decoded again takes time, and has stages too: first what frees most for its time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from tfswap.analysis.accumulators import Accumulator, find_accumulators
from tfswap.analysis.body_encodings import InnerEncoding, find_inner_encodings, is_inner
from tfswap.analysis.cost import Costs
from tfswap.analysis.dataflow import PERSISTENT, Dataflow, analyse_body
from tfswap.analysis.encodings import Encoding, find_encodings, waits_long
from tfswap.analysis.integer_ranges import Ranges
from tfswap.analysis.loop_recompute import Passage, Saved, choose_remade, find_passages
from tfswap.analysis.lossless_forms import SLACK, Form, Packing, smaller_form, sparse_form
from tfswap.analysis.permits import permit_of
from tfswap.analysis.reduced_precision import Reduction
from tfswap.compiler.body_orders import choose_body_orders
from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import reads_metadata_only
from tfswap.ir.permits import ANYTHING, Permit
from tfswap.ir.views import origin, passed_on
from tfswap.kernels.device import DeviceModel
from tfswap.passes.contract import Target
from tfswap.passes.tactics.body_plan import apply_inside, tell_effects
from tfswap.passes.tactics.encode import encode_tensors
from tfswap.passes.tactics.encode_in_bodies import encode_in_bodies
from tfswap.passes.tactics.loop_recompute import recompute_in_loops
from tfswap.passes.tactics.loop_swap import looped_pops, swap_in_loops
from tfswap.passes.tactics.pack import pack_tensors, readers_of
from tfswap.passes.tactics.reduce_precision import reduce_precision
from tfswap.plan.plan import Inside, Plan
from tfswap.planner.bodies import PlannedBody, Rung, Terms, find_rungs
from tfswap.planner.host_tiers import Tiers
from tfswap.planner.pairing import keep_apart
from tfswap.planner.planner import Candidate, Planner
from tfswap.planner.problem import Problem, make_problem
from tfswap.planner.validate import REMEDY, require_allowed, require_fit

STAGES = 4
"""In so many steps what loops save is swapped, and tensors wait in a smaller form, each taking as much of the bytes."""
AFFORDABLE = 4.0
"""To make something again takes at most so many times as long as to swap it: else it is for where nothing else fits."""
MOST_VARIANTS = 1 + STAGES + 4 + (STAGES + 2) + 3 + 2 * STAGES
"""Of a step: as it is, with what loops save swapped, with what they need not save made again, with what is swapped in
these prefetched, with kernels that take encodings, also beside the most of these, and with whole tensors in a smaller
form besides, as sparse rows last."""
LONG_SHARE = 0.02
"""Of the step's time, which a tensor must wait for kernels that can take an encoding of it, and for them alone."""
LEAST_SHARE = 0.02
"""Of the live peak: where all tensors that can be encoded have less, plans are not looked for twice."""
SPARSE_SHARE = 0.75
"""Of a tensor's bytes, which its sparse rows take at most: what is won with more is not worth the time."""
NOWHERE = -1
"""Stands for the value of a tensor that has none."""


class Rewriting(NamedTuple):
    """What is done to a step's graph before its kernels are ordered.

    Attributes:
        accumulators: names of the accumulators whose elements are swapped inside their loops.
        encoded: names of the kernels that take an encoding in place of a tensor; of one in a body, after the body's.
        reduced: what waits for the backward pass in fewer bits.
        remade: names of the accumulators whose elements are made again in place of being saved.
        inside: what is planned inside of bodies.
        packed: what waits in a smaller form that gives back every bit.
        prefetched: of `accumulators` those whose elements come back in the iteration before the one that reads them.
        grouped: whether the kernels of bodies run in groups, and not in pairs.
    """

    accumulators: tuple[str, ...] = ()
    encoded: tuple[str, ...] = ()
    reduced: tuple[Reduction, ...] = ()
    remade: tuple[str, ...] = ()
    inside: tuple[Inside, ...] = ()
    packed: tuple[Packing, ...] = ()
    prefetched: tuple[str, ...] = ()
    grouped: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Rewriting:
        """That of the step that `plan` is of: its fields are called the same."""
        return cls(*(getattr(plan, field) for field in cls._fields))

    @property
    def outside(self) -> Rewriting:
        """The same with nothing planned inside of bodies."""
        return self._replace(inside=())


PLAIN = Rewriting()


class Variant(NamedTuple):
    """One form of the step.

    Attributes:
        graph: the step so, with settled variables and ordered bodies.
        flow: its facts.
        encodings: those in the graph.
        inner: those in its bodies.
        bodies: of each of what is planned inside of bodies, the body as it is without that.
    """

    rewriting: Rewriting
    graph: Graph
    flow: Dataflow
    encodings: tuple[Encoding, ...] = ()
    inner: tuple[InnerEncoding, ...] = ()
    bodies: tuple[PlannedBody, ...] = ()


class Found(NamedTuple):
    """A candidate, and the variant that it is of."""

    variant: Variant
    candidate: Candidate

    @property
    def peaks_in_body(self) -> bool:
        """Whether a loop or a conditional runs when it holds most."""
        return self.variant.flow.nodes[self.candidate.largest_kernel()] in self.variant.graph.bodies

    def plan(
        self, fingerprint: str, limit_bytes: int | None, *, persistent_bytes: int, margin_bytes: int, solver: str
    ) -> Plan:
        """The candidate as a plan.

        Args:
            fingerprint: of the step's graph.
            limit_bytes: the limit that it was made under.
            persistent_bytes: bytes in the arena before the step.
            margin_bytes: added to the peak.
            solver: who made it.
        """
        choice = self.candidate.choice
        order, absences = choice.named(self.variant.flow)
        return Plan(
            fingerprint=fingerprint,
            limit_bytes=limit_bytes,
            order=order,
            absences=absences,
            planned_peak_bytes=self.candidate.peak_bytes + margin_bytes,
            persistent_bytes=persistent_bytes,
            host_bytes=self.candidate.memory.host_peak_bytes,
            seconds=self.candidate.timing.total_s,
            solver=solver,
            beside=choice.beside,
            splits=choice.splits,
            overlaps=choice.overlaps,
            disk_bytes=self.candidate.memory.disk_peak_bytes,
            **self.variant.rewriting._asdict(),
        )


class Variants:
    """The variants of one step, each made when it is first asked for.

    Args:
        graph: the prepared step; it is changed.
        facts: from a prepared step with ordered bodies to its facts.
        target: what the step runs on, and which ops it may have.
        costs: what kernels and copies take.

    Attributes:
        base: what is done whatever is chosen besides.
    """

    def __init__(
        self,
        graph: Graph,
        facts: Callable[[Graph], Dataflow],
        target: Target,
        costs: Costs,
    ):
        self.base = PLAIN
        self._target = target
        self._device = target.device
        self._costs = costs
        self._unordered = graph.copy() if graph.bodies else graph
        choose_body_orders(graph, target)
        self._graph = graph
        self._facts = facts
        self._keep_apart(graph)
        self._made = {PLAIN: Variant(PLAIN, graph, facts(graph))}
        self._bodies: dict[tuple[Rewriting, str, tuple[Inside, ...]], Problem] = {}

    def __getitem__(self, rewriting: Rewriting) -> Variant:
        if rewriting not in self._made:
            graph, inner = self._graph.copy(), ()
            self._require_allowed(rewriting)
            if rewriting.remade or rewriting.grouped or any(map(is_inner, rewriting.encoded)):
                graph = self._unordered_with(rewriting.remade)
                inner = self._encode_inside(graph, rewriting)
                choose_body_orders(graph, self._target, grouped=rewriting.grouped)
            swap_in_loops(graph, self._target, rewriting.accumulators, rewriting.prefetched)
            reduce_precision(graph, self._target, rewriting.reduced)
            encodings = self._encode(graph, rewriting)
            pack_tensors(graph, self._target, rewriting.packed)
            planned = self._carry_out(graph, rewriting)
            graph.prune()
            if not rewriting.grouped:
                self._keep_apart(graph)
            flow = self._facts(graph)
            bodies = tuple(PlannedBody(inside, problem, flow.times_of(body)) for inside, problem, body in planned)
            self._made[rewriting] = Variant(rewriting, graph, flow, encodings, inner, bodies)
        return self._made[rewriting]

    def _keep_apart(self, graph: Graph) -> None:
        """Let no kernels run side by side in bodies, in place, that would raise the body's peak so."""
        for body in graph.all_bodies():
            if body.beside:
                keep_apart(body, analyse_body(body, self._device))

    @property
    def plain(self) -> Variant:
        """The step as it is, but for what is done whatever is chosen."""
        return self[self.base]

    def _encode(self, graph: Graph, rewriting: Rewriting) -> tuple[Encoding, ...]:
        """Let kernels take encodings. Raises InvalidModel where one can't."""
        kernels = [name for name in rewriting.encoded if not is_inner(name)]
        if not kernels:
            return ()
        # Who accepts rounded values accepts a gradient's other last bits.
        same_bits = not rewriting.reduced
        possible = {e.kernel.name: e for e in find_encodings(graph, self._device, same_bits=same_bits)}
        found = _named(kernels, possible)
        for e in found:
            _require_encoded(graph, e)
        encode_tensors(graph, self._target, found)
        return found

    def _encode_inside(self, graph: Graph, rewriting: Rewriting) -> tuple[InnerEncoding, ...]:
        """Let kernels in bodies take encodings. Raises InvalidModel where one can't."""
        kernels = [name for name in rewriting.encoded if is_inner(name)]
        if not kernels:
            return ()
        same_bits = not rewriting.reduced
        possible = {e.name: e for e in find_inner_encodings(graph, self._device, same_bits=same_bits)}
        found = _named(kernels, possible)
        for e in possible.values():
            if e.name not in kernels and e.saved in {other.saved for other in found if other.saved}:
                raise _can_not_encode(e.name)
        bodies = graph.named_bodies()
        for e in found:
            if e.saved is None:
                _require_encoded(bodies[e.body], e.encoding)
            else:
                require_allowed(e.saved.permit, "encode", f"encodes what loops save in {e.saved.name!r}")
        encode_in_bodies(graph, self._target, found)
        return found

    def _carry_out(self, graph: Graph, rewriting: Rewriting) -> list[tuple[Inside, Problem, Graph]]:
        """Do in the bodies what is planned there. Raises InvalidModel where that can't be.

        Returns each with its body as it was, and the body.
        """
        planned = rewriting.inside
        bodies = graph.named_bodies() if planned else {}
        found: list[tuple[Inside, Problem, Graph]] = []
        for inside in planned:
            body = bodies.get(inside.body)
            if body is None:
                raise InvalidModel(
                    f"this plan moves tensors inside of {inside.body!r}, which this graph does not have. {REMEDY}"
                )
            # A body is what the form of the step makes it, and what is planned in the bodies that it contains.
            before = tuple(made for made, *_ in found if made.body.startswith(f"{inside.body}/"))
            key = rewriting.outside, inside.body, before
            if key not in self._bodies:
                self._bodies[key] = self._problem_of(analyse_body(body.copy(), self._device))
            problem = self._bodies[key]
            require_fit(inside, problem)
            apply_inside(body, problem.flow, inside)
            found.append((inside, problem, body))
        tell_effects(graph, [body for *_, body in found])
        return found

    def _problem_of(self, flow: Dataflow) -> Problem:
        """The body that these facts are of, in the order that it has."""
        order = [i for i, kernel in enumerate(flow.is_kernel) if kernel]
        return make_problem(flow, order, self._costs.rates, self._costs.of_step(flow))

    def rungs(self, rewriting: Rewriting, problem: Problem, tactics: Collection[str], tiers: Tiers) -> list[Rung]:
        """What may be chosen among by moving tensors inside of the bodies of a variant, which `problem` is of."""
        terms = Terms(self._device, self._costs, tactics, tiers, apply_inside)
        return find_rungs(self[rewriting].graph, problem, terms)

    def encoded(self, planner_of: Callable[[Variant], Planner]) -> Rewriting | None:
        """The step with every encoding that gains something; None where none does."""
        problem = planner_of(self.plain).problems[0]
        least_bytes = LEAST_SHARE * problem.live_peak_bytes
        chosen = _worth_encoding(problem, find_encodings(self.plain.graph, self._device), least_bytes)
        chosen += self._worth_inside(problem.smallest_bytes, least_bytes)
        return self.base._replace(encoded=(*self.base.encoded, *chosen)) if chosen else None

    def _worth_inside(self, smallest_bytes: int, least_bytes: float) -> tuple[str, ...]:
        """Names of the kernels in bodies that gain by their encodings.

        Args:
            smallest_bytes: a list that keeps less is left as it is.
            least_bytes: what all lists that can be encoded must keep, and all such tensors of a body.
        """
        possible = self._inner
        largest = self._largest(smallest_bytes, "encode")
        saved = [e for e in possible if e.saved and e.saved.name in largest]
        lists = {e.saved.name for e in saved if e.saved}
        chosen = [e.name for e in saved] if sum(self.saved_bytes[name] for name in lists) >= least_bytes else []
        own = {e.name for e in possible if e.saved is None}
        for name, ordered in self._graph.named_bodies().items() if own else ():
            body = ordered.copy()
            encodings = [e for e in find_encodings(body, self._device) if f"{name}/{e.kernel.name}" in own]
            if sum({e.tensor: e.tensor.type.nbytes or 0 for e in encodings}.values()) >= least_bytes:
                problem = self._problem_of(analyse_body(body, self._device))
                chosen += (f"{name}/{kernel}" for kernel in _worth_encoding(problem, encodings, least_bytes))
        return tuple(chosen)

    @functools.cached_property
    def _inner(self) -> list[InnerEncoding]:
        """What can be encoded in the bodies of the step as it is."""
        return find_inner_encodings(self._unordered, self._device)

    def encoded_too(self, encoded: Rewriting, stage: Rewriting) -> Rewriting | None:
        """`stage` of what loops save with what `encoded` encodes; None where that is nothing in bodies.

        A list of encodings stays where it is: it is small. Kernels that run again in a loop that goes back may read
        what is on it, as those there do.
        """
        chosen = [e for e in self._inner if e.name in encoded.encoded]
        lists = {e.saved.name for e in chosen if e.saved}
        inner = [
            e
            for e in find_inner_encodings(self._unordered_with(stage.remade), self._device)
            if (e.saved.name in lists if e.saved else e.name in encoded.encoded)
        ]
        if not inner:
            return None
        kernels = [kernel for kernel in encoded.encoded if not is_inner(kernel)]
        lists = {e.saved.name for e in inner if e.saved}
        return stage._replace(
            encoded=(*kernels, *(e.name for e in inner)),
            accumulators=tuple(name for name in stage.accumulators if name not in lists),
        )

    def _unordered_with(self, remade: Collection[str]) -> Graph:
        """A copy of the step with bodies that have no order, in which these lists are not saved."""
        graph = self._unordered.copy()
        recompute_in_loops(graph, self._target, remade)
        return graph

    def packed(self, planner_of: Callable[[Variant], Planner], encoded: Rewriting) -> list[Rewriting]:
        """`encoded` with packings besides that gain something, from few of them to all."""
        problem = planner_of(self.plain).problems[0]
        graph, device = self.plain.graph, self._device
        ranges = Ranges(graph)
        stages = _worth_packing(problem, graph, encoded.encoded, lambda tensor: smaller_form(tensor, ranges, device))
        return [encoded._replace(packed=packed) for packed in stages]

    def sparse(self, planner_of: Callable[[Variant], Planner], packed: Rewriting) -> list[Rewriting]:
        """`packed` with sparse rows besides, where the profile says that they gain something, from few of them to all.

        Kernels that need no more of such a tensor than its signs take a mask of it, in all of these: it costs nothing.
        """
        profile = self._costs.profile
        if profile is None or not profile.densities or packed.reduced:
            return []
        graph, problem = self.plain.graph, planner_of(self.plain).problems[0]
        masks = [e for e in find_encodings(graph, self._device) if e.codec.encode == custom_ops.ENCODE_MASK]
        stages = _worth_packing(
            problem,
            graph,
            {*packed.encoded, *(e.kernel.name for e in masks)},
            lambda tensor: _measured_sparse(tensor, profile.density(tensor), self._device),
        )
        rows = {p.tensor for sparse in stages for p in sparse}
        signs = (e.kernel.name for e in masks if origin(e.tensor).name in rows)
        encoded = tuple(dict.fromkeys((*packed.encoded, *signs)))
        return [packed._replace(encoded=encoded, packed=(*packed.packed, *sparse)) for sparse in stages]

    @functools.cached_property
    def accumulators(self) -> dict[str, Accumulator]:
        """All accumulators of the step, by name."""
        return {a.name: a for a in find_accumulators(self._graph)}

    @functools.cached_property
    def permits(self) -> dict[str, Permit]:
        """What may be done to the elements of each accumulator, by name."""
        return {name: a.permit for name, a in self.accumulators.items()}

    @functools.cached_property
    def saved_bytes(self) -> dict[str, int]:
        """The bytes of each accumulator, by name."""
        flow = self._made[PLAIN].flow  # of the graph that they are of
        return {name: a.nbytes(flow) for name, a in self.accumulators.items()}

    def stages(self, smallest_bytes: int) -> list[Rewriting]:
        """What may be chosen among by swapping what loops save, from nothing to the most.

        Args:
            smallest_bytes: an accumulator that keeps less costs more than it frees.
        """
        largest = self._largest(smallest_bytes, "swap")
        names = list(largest)
        stages = [tuple(sorted(names[:count])) for count in _in_stages(list(largest.values()))]
        return [self.base, *(self.base._replace(accumulators=stage) for stage in stages)]

    def prefetched(self, stages: Collection[Rewriting]) -> list[Rewriting]:
        """`stages` with the copies back that a loop would wait for started one iteration before."""
        found = [stage._replace(prefetched=self._waited_for(stage)) for stage in stages if stage.accumulators]
        return [stage for stage in found if stage.prefetched]

    def _waited_for(self, stage: Rewriting) -> tuple[str, ...]:
        """Of the accumulators that are swapped those whose elements a loop waits for, and could bring back before."""
        found: set[str | None] = set()
        for name, body in self[stage].graph.named_bodies().items():
            for node, wait_s in self._costs.body_run(body).waits.items():
                if wait_s and node.op == custom_ops.AWAIT:
                    loaded = node.inputs[0].node
                    found.add(self._looped.get((name, loaded.inputs[0].node.name)))
        return tuple(name for name in stage.accumulators if name in found)

    @functools.cached_property
    def _looped(self) -> dict[tuple[str, str], str]:
        """By body and name of the pop, the accumulators that each iteration of a loop pops once."""
        where = {body: name for name, body in self._graph.named_bodies().items()}
        looped = looped_pops(self._graph, self.accumulators.values())
        return {(where[pop.graph], pop.node.name): name for name, pops in looped.items() for pop in pops}

    def remade(self, smallest_bytes: int, costs: Costs, *, swap: bool) -> list[Rewriting]:
        """What may be chosen among where loops make again what they need not save.

        Args:
            smallest_bytes: as of `stages`.
            costs: what kernels and copies take.
            swap: whether what they still save may be swapped.
        """
        largest, rates = self._largest(smallest_bytes, "recompute"), costs.rates
        swappable = self._largest(smallest_bytes, "swap") if swap else {}
        passages = find_passages(self._unordered, find_accumulators(self._unordered))
        found: list[Rewriting] = []
        for price in (AFFORDABLE, math.inf):

            def worth(saved: Saved, kernels: list[Node], price: float = price) -> bool:
                nbytes = saved.push.pushed.type.nbytes or 0
                copies_s = nbytes / rates.out_bytes_per_s + nbytes / rates.in_bytes_per_s
                affordable = sum(map(costs.seconds, kernels)) <= price * copies_s
                return saved.name in largest and affordable and _may_run_again(saved, kernels)

            names = {name for passage in passages for name in choose_remade(passage, worth)}
            if names:
                made = self.base._replace(remade=tuple(sorted(names)))
                found.append(made)
                if swap:
                    found.append(made._replace(accumulators=tuple(sorted(swappable.keys() - names))))
        return list(dict.fromkeys(found))

    def remade_s(self, rewriting: Rewriting, costs: Costs) -> dict[str, float]:
        """By list whose elements are made again, the seconds that it takes in a step."""
        found: dict[str, float] = {}
        flow, graph = self.plain.flow, self.plain.graph
        for passage, saved, kernels in self._made_again(rewriting.remade):
            place = flow.place.get(passage.loop.name)  # None in the body of another loop
            times = 1.0 if place is None else flow.runs[place][graph.bodies[flow.nodes[place]][1]]
            found[saved.name] = times * sum(map(costs.seconds, kernels))
        return found

    def _made_again(self, remade: Collection[str]) -> Iterator[tuple[Passage, Saved, list[Node]]]:
        """Of lists whose elements are made again, the kernels that do it."""
        for passage in find_passages(self._unordered, find_accumulators(self._unordered)) if remade else ():
            kept = {passed_on(s.push.pushed) for s in passage.saved if s.name not in remade}
            for s in passage.saved:
                if s.name in remade:
                    yield passage, s, passage.remade(s.push.pushed, kept) or []

    def _largest(self, smallest_bytes: int, tactic: str) -> dict[str, int]:
        """The bytes of each accumulator that keeps so many and on which a tactic may be used, the largest first."""
        sizes = {name: nbytes for name, nbytes in self.saved_bytes.items() if self.permits[name].allows(tactic)}
        return {n: sizes[n] for n in sorted(sizes, key=lambda n: (-sizes[n], n)) if sizes[n] >= smallest_bytes}

    def _require_allowed(self, rewriting: Rewriting) -> None:
        """Raise InvalidModel for what the user does not allow; whether kernels may take encodings is checked there."""
        for name in rewriting.accumulators:
            require_allowed(self.permits.get(name, ANYTHING), "swap", f"swaps what loops save in {name!r}")
        for passage, saved, kernels in self._made_again(rewriting.remade):
            for tensor in _outputs(kernels):
                does = f"makes {tensor.name!r} again in place of saving {saved.name!r}"
                require_allowed(permit_of(passage.forward, tensor), "recompute", does)
        flow = self._made[PLAIN].flow
        for smaller in (*rewriting.reduced, *rewriting.packed):
            permit = flow.permits.get(flow.value_named.get(smaller.tensor, NOWHERE), ANYTHING)
            require_allowed(permit, "encode", f"keeps {smaller.tensor!r} in a smaller form")


Named = TypeVar("Named", Encoding, InnerEncoding)


def _named(kernels: Collection[str], possible: Mapping[str, Named]) -> tuple[Named, ...]:
    """Those of `possible`, in its order, for `kernels`. Raises InvalidModel where one is not there."""
    strange = min((name for name in kernels if name not in possible), default=None)
    if strange is not None:
        raise _can_not_encode(strange)
    named = set(kernels)
    return tuple(e for name, e in possible.items() if name in named)


def _can_not_encode(kernel: str) -> InvalidModel:
    return InvalidModel(
        f"this plan gives an encoding to {kernel!r}, which this graph does not have, or which can't take one "
        "here with the same bits. Plan again for this graph."
    )


def _require_encoded(graph: Graph, encoding: Encoding) -> None:
    """Raise InvalidModel where the user does not let a kernel of `graph` read an encoding."""
    for tensor in encoding.dropped:
        does = f"gives {encoding.kernel.name!r} an encoding in place of {tensor.name!r}"
        require_allowed(permit_of(graph, tensor), "encode", does)


def _may_run_again(saved: Saved, kernels: Iterable[Node]) -> bool:
    """Whether the user lets these kernels of the loop that saves it make something again."""
    return all(permit_of(saved.push.graph, tensor).allows("recompute") for tensor in _outputs(kernels))


def _outputs(kernels: Iterable[Node]) -> Iterator[Output]:
    return (kernel.out(index) for kernel in kernels for index in range(len(kernel.outputs)))


def _worth_encoding(problem: Problem, encodings: Collection[Encoding], least_bytes: float) -> tuple[str, ...]:
    """Names of the kernels that gain by their encodings: a tensor waits long for nothing else, or they need less.

    Tensor by tensor; of none where all of them together hardly matter.

    Args:
        problem: the step as it is, in the order that is planned first; or a body.
        least_bytes: what all tensors that gain must have.
    """
    flow, uses = problem.flow, problem.uses
    place = {kernel: position for position, kernel in enumerate(problem.order)}
    takers: dict[int, set[int]] = {}  # by value, the positions of those who would read an encoding of it, or nothing
    dropped: list[tuple[Encoding, set[int]]] = []
    for e in encodings:
        values = {flow.value_of.get((t.node, t.index), NOWHERE) for t in e.dropped}
        read = NOWHERE not in values and all(flow.may(v, "encode") for v in values)
        nbytes, at = e.tensor.type.nbytes or 0, place[flow.place[e.kernel.name]]
        if not read or nbytes < problem.smallest_bytes:
            continue
        positions = uses.positions.get(flow.value_of[e.tensor.node, e.tensor.index], ())
        wait_s = max((uses.starts[b] - uses.starts[a + 1] for a, b in pairwise(positions) if b <= at), default=0.0)
        if e.codec.encode == custom_ops.ENCODE_MASK and not waits_long(wait_s, nbytes, problem.rates):
            continue  # of the forward pass, it may be: the tensor is there all the same
        dropped.append((e, values))
        for v in values:
            takers.setdefault(v, set()).add(at)
    freed = {v for v, at in takers.items() if _waits_for_takers(problem, v, at)}
    chosen = [(e, values) for e, values in dropped if values & freed or e.codec.encode == custom_ops.ENCODE_MAX_POOL]
    matter = set().union(*(values for _, values in chosen))
    if sum(flow.values[v].nbytes for v in matter) < least_bytes:
        return ()
    return tuple(e.kernel.name for e, _ in chosen)


def _worth_packing(
    problem: Problem, graph: Graph, encoded: Collection[str], form_of: Callable[[Output], Form | None]
) -> list[tuple[Packing, ...]]:
    """What waits long in full and could wait in a smaller form: what frees most for its time, more, and all of it.

    Nothing where that hardly matters.

    Args:
        problem: the step as it is, in the order that is planned first.
        encoded: names of kernels that take an encoding, and read no tensor for it.
        form_of: the smaller form that a tensor has, where there is one.
    """
    flow, uses = problem.flow, problem.uses
    found: list[tuple[Packing, int, int]] = []  # with the bytes that it frees, and those that are gone through for it
    for v, positions in sorted(uses.positions.items()):
        tensor = flow.values[v].tensor
        form = None if v in problem.refusals or not flow.may(v, "encode") else form_of(tensor)
        if form is None:
            continue
        kernels = ((p, flow.nodes[problem.order[p]]) for p in positions[1:])
        called = {p: node.name for p, node in kernels if not reads_metadata_only(node.op)}
        if not readers_of(graph, tensor).keys() <= {*called.values()}:
            continue  # of some it is not known when they run
        groups = _late(problem, v, [positions[0], *(p for p in called if called[p] not in encoded)])
        if groups:
            readers = tuple(tuple(called[p] for p in group) for group in groups)
            packing = Packing(tensor.name, form.name, readers, form.minimum, form.capacity)
            nbytes = flow.values[v].nbytes
            found.append((packing, nbytes - form.nbytes, nbytes * (1 + len(groups))))
    return _stages(found, LEAST_SHARE * problem.live_peak_bytes)


def _in_stages(sizes: Sequence[int]) -> list[int]:
    """How many of these, from the first on, each stage takes: one after the other the same share of all bytes."""
    taken = list(itertools.accumulate(sizes))
    counts = (
        next(count for count, done in enumerate(taken, 1) if done * STAGES >= taken[-1] * stage)
        for stage in range(1, STAGES + 1)
    )
    return list(dict.fromkeys(counts)) if taken else []


def _stages(found: Collection[tuple[Packing, int, int]], least_bytes: float) -> list[tuple[Packing, ...]]:
    """Packings in stages: first those that free most for their time.

    Args:
        found: each with the bytes that it frees, and those that are gone through for it.
        least_bytes: what frees less is not worth a stage.
    """
    ranked = sorted(found, key=lambda entry: -entry[1] / entry[2])
    freed = [nbytes for _, nbytes, _ in ranked]
    stages = [ranked[:count] for count in _in_stages(freed) if sum(freed[:count]) >= least_bytes]
    return [tuple(entry[0] for entry in found if entry in stage) for stage in stages]


def _measured_sparse(tensor: Output, density: float | None, device: DeviceModel) -> Form | None:
    """Sparse rows of a tensor of which such a share is not zero, where that pays; None where it was not measured."""
    if density is None:
        return None
    elements = tensor.type.num_elements or 0
    form = sparse_form(tensor, min(elements, math.ceil(density * SLACK * elements)), device)
    return form if form is not None and form.nbytes <= SPARSE_SHARE * (tensor.type.nbytes or 0) else None


def _late(problem: Problem, v: int, positions: Collection[int]) -> list[list[int]]:
    """Of the uses of a tensor those that come when it has waited long, together that follow each other."""
    groups: list[list[int]] = []
    starts, nbytes = problem.uses.starts, problem.flow.values[v].nbytes
    for before, after in pairwise(positions):
        wait_s = starts[after] - starts[before + 1]
        long = waits_long(wait_s, nbytes, problem.rates)
        if long and (groups or wait_s >= LONG_SHARE * starts[-1]):
            groups.append([])
        if groups:
            groups[-1].append(after)
    return groups


def _waits_for_takers(problem: Problem, v: int, takers: Collection[int]) -> bool:
    """Whether a tensor waits long, and for these kernels alone, once all others have read it.

    Args:
        takers: their positions.
    """
    flow, uses = problem.flow, problem.uses
    if flow.values[v].producer == PERSISTENT or v in flow.fetched:
        return False  # it stays all the same
    last = max((p for p in uses.positions.get(v, ()) if p not in takers), default=None)
    if last is None:
        return False  # a small one, or there from before
    wait_s = uses.starts[max(takers)] - uses.starts[last + 1]
    return wait_s >= LONG_SHARE * uses.starts[-1] and waits_long(wait_s, flow.values[v].nbytes, problem.rates)
