"""Replays the bodies of a loop or a conditional, and records their requests.

The bodies are replayed in their order, iteration by iteration. A loop or conditional that TensorFlow lowers to the
executor's own control flow frees its inputs, and the kernels of its bodies run concurrently.

Invariant: `Record.exact` is False where the record is an upper bound over branches or numbers of iterations that the
step decides when it runs.

Not handled: iterations of a lowered loop that run concurrently.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, cast

from tfswap.analysis.buffers import Buffer, Contents, Part
from tfswap.analysis.executor import runs_within
from tfswap.analysis.function_runs import Bodies, Course, FunctionRuns, Lowered, Results, Seconds, Trips
from tfswap.analysis.heap import Heap
from tfswap.analysis.integer_values import AtMost, Loop, Values, common
from tfswap.analysis.pools import Merged, Way, structure
from tfswap.analysis.records import Findings, Record, UnboundedLoop, contents_of, record_of
from tfswap.analysis.request_log import Logged
from tfswap.analysis.tensor_lists import LIST_RULES, Call
from tfswap.ir.custom_ops import RELOCATED
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import control_flow
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel

STEADY_TRIPS = 3
"""The least number of replayed iterations where each leaves as many bytes as the one before."""
SETTLING_TRIPS, SETTLING_NODES = 18, 1_000
"""The most of them, and the nodes that these have together at most where they are more than a few. In a fragmented
arena it takes several iterations until values lie where they do in all later ones.
"""
ROTATION_TRIPS = 6
"""A multiple of this is left out. A value that each iteration computes anew alternates between two chunks, and two
values of one size rotate among three: where they lie after the loop depends on the remainder.
"""
RELOCATED_TRIPS = 2
"""The same where an iteration's results are relocated: the first reads the loop's inputs, the second an iteration's
results.
"""
LOWERED_RUNS = 5
"""The most runs of a lowered loop or conditional."""
LOWERED_EVENTS = 20_000
"""The most events of all these runs together, if one has no more: large loops have fewer runs."""
UNKNOWN_TRIPS = 8
"""The assumed number of iterations, for a loop's time, where it is not known."""


def record(
    node: Node,
    bodies: Sequence[Graph],
    device: DeviceModel,
    contents: Sequence[Contents | None],
    integers: Sequence[Values | None],
    *,
    strict: bool = True,
    given_up: Sequence[int | None] = (),
    lowered: Seconds | None = None,
    course: Course | None = None,
    covering: Sequence[int] | None = None,
    prepared: Bodies | None = None,
) -> Record:
    """The requests of a loop or a conditional.

    Args:
        contents: the known contents of each input that is a list.
        integers: the known integers of each input.
        strict: raise UnboundedLoop where a loop keeps bytes of each iteration, and their number is unknown. Otherwise a
            few iterations represent it.
        given_up: for lowered nodes, the value of the step that each input is. The node holds it only until the last
            read of it by a body.
        lowered: gives the seconds of a kernel. With it, the node is lowered: kernels of bodies have no order, and the
            record is that of the run with the median peak.
        course: the decisions of the step. None: the record is an upper bound.
        covering: the bytes held with each input. With these, the record covers all courses: at each point it holds for
            each buffer of a course another one that is no smaller.
        prepared: a cache of facts about bodies, for one device and nodes that are not lowered.
    """
    if lowered is None:
        replay = BodyReplay(device, strict, course=course, covering=covering is not None, prepared=prepared)
        return _run_of(replay, node, bodies, contents, integers, (), covering or ())[1]

    def run(seed: int) -> tuple[int, Record]:
        replay = BodyReplay(device, strict, lowered=Lowered(lowered, random.Random(seed)), course=course)
        return _run_of(replay, node, bodies, contents, integers, given_up)

    runs = [run(0)]
    most = min(LOWERED_RUNS, LOWERED_EVENTS // max(1, len(runs[0][1].events)))
    runs += [run(seed) for seed in range(1, runs_within(most))]
    return sorted(runs, key=lambda each: each[0])[len(runs) // 2][1]


def _run_of(
    replay: BodyReplay,
    node: Node,
    bodies: Sequence[Graph],
    contents: Sequence[Contents | None],
    integers: Sequence[Values | None],
    given_up: Sequence[int | None],
    given_bytes: Sequence[int] = (),
) -> tuple[int, Record]:
    """The peak of a run, in bytes, and its record."""
    inputs = replay.heap.inputs(node, contents)
    for buffer, nbytes in zip(inputs, given_bytes, strict=False):
        buffer.nbytes = max(buffer.nbytes, nbytes)
    for buffer, value in zip(inputs, given_up, strict=False):
        replay.heap.give_up(buffer, value)
    outputs, known = replay.run(node, bodies, inputs, integers)
    return replay.heap.peak_bytes, record_of(replay.heap, replay.found, outputs, known, covering=replay.covering)


def record_list(
    node: Node,
    device: DeviceModel,
    contents: Sequence[Contents | None],
    integers: Sequence[Values | None],
    *,
    covering: bool = False,
) -> Record:
    """The requests of an op of lists. Arguments as of `record`."""
    heap = Heap(device.in_bodies, covering=covering)
    call = Call(node, heap.inputs(node, contents), integers, {})
    outputs = LIST_RULES[node.op](heap, call)
    known = [call.known.get(o) for o in range(len(outputs))]
    return record_of(heap, Findings(), outputs, known, covering=covering)


class _Iterations(NamedTuple):
    """The replayed iterations of a loop.

    Attributes:
        replayed: their number.
        of_each: the number of the loop's iterations that each represents.
        certain: whether the number of the loop's iterations is known exactly.
        endless: whether it is unknown and has no bound.
        all_counted: whether it is known or bounded, and all iterations are replayed.
        all_run: the same, where the course decides the number.
        ended: the loop variables' integers after the last iteration; None where unknown.
    """

    replayed: int
    of_each: float
    certain: bool
    endless: bool
    all_counted: bool
    all_run: bool
    ended: list[Values | None] | None


class BodyReplay:
    """Replays one loop or conditional, with its bodies.

    Attributes:
        covering: whether the replay covers all decisions of the step.
    """

    def __init__(
        self,
        device: DeviceModel,
        strict: bool,
        *,
        lowered: Lowered | None = None,
        course: Course | None = None,
        covering: bool = False,
        prepared: Bodies | None = None,
    ):
        self.device = device
        self.strict = strict
        self.covering = covering
        self.lowered = lowered is not None
        runs_on = device if self.lowered else device.in_bodies
        self.heap = Heap(runs_on, frees_inputs=self.lowered, covering=covering)
        self.found = Findings()
        self.prepared: Bodies = {} if prepared is None else prepared
        self.functions = FunctionRuns(self.heap, self.found, self.prepared, self.run, course=course, lowered=lowered)

    def run(
        self, node: Node, bodies: Sequence[Graph], inputs: Sequence[Buffer], integers: Sequence[Values | None]
    ) -> Results:
        """Run what `node` runs; its outputs are held once each. Lowered, it frees its inputs, once each."""
        kind = control_flow(node.op)
        assert kind is not None
        arguments = inputs[kind.first_argument :]
        given = integers[kind.first_argument :]
        if kind.is_loop:
            return self._loop(node, bodies[0], bodies[1], arguments, given)
        choice = None if isinstance(integers[0], AtMost) else integers[0]
        known = None
        relocated = None if self.lowered else relocated_places(node)
        self.found.decided &= choice is not None or relocated is not None
        if choice is None and relocated is None and self.functions.course is not None:
            branch = bodies[self.functions.choose(len(bodies))]
        elif choice is not None and node.inputs[0].type.dtype == "bool":
            branch = bodies[0 if choice[0] else 1]
        elif choice is not None:
            branch = bodies[choice[0] if 0 <= choice[0] < len(bodies) else -1]
        elif relocated is not None:
            return self._any_branch(bodies, arguments, given, relocated)
        elif self.covering:
            return self._all_branches(bodies, arguments, given)
        else:
            branch, known = self._worst(node, bodies, arguments, given)
            self.heap.exact = False
        results, its = self.functions.run(branch, arguments, given, consume=self.lowered)
        if relocated is not None:
            self._relocate(relocated, results, branch)
        if self.lowered:
            self.heap.drop(inputs[0])
        return results, its if known is None else known

    def _any_branch(
        self,
        bodies: Sequence[Graph],
        arguments: Sequence[Buffer],
        integers: Sequence[Values | None],
        relocated: Sequence[int],
    ) -> Results:
        """Run one branch after another: each finds what the one before has found, and leaves the same results."""
        self.heap.exact = False
        results: list[Buffer] = []
        for branch in bodies:
            for buffer in results:
                self.heap.drop(buffer)
            results, _ = self.functions.run(branch, arguments, integers, consume=False)
        self._relocate(relocated, results, *bodies)
        return results, [None] * len(results)

    def _all_branches(
        self, bodies: Sequence[Graph], arguments: Sequence[Buffer], integers: Sequence[Values | None]
    ) -> Results:
        """Run one branch after another, and give results that cover those of each."""
        self.heap.exact = False
        ways: list[Way] = []
        known: list[list[Values | None]] = []
        for branch in bodies:
            results, its = self.functions.run(branch, arguments, integers, consume=False)
            ways.append(Way.of(results))
            known.append(its)
            for buffer in results:
                self.heap.drop(buffer)
        return self._merged(Merged.of(ways), []), common(known)

    def _merged(self, merged: Merged, results: Sequence[Buffer]) -> list[Buffer]:
        """Results that cover those of several branches or iterations, in place of `results`; one reference each."""
        shared = [self.heap.hold(b) for b in merged.shared]
        same = [None if b is None else self.heap.hold(b) for b in merged.same]
        for buffer in results:
            self.heap.drop(buffer)
        pool = self.heap.hold(Buffer(None, 0))
        pool.parts = [Part(b, b.nbytes) for b in (*shared, *map(self.heap.allocate, merged.pool_bytes))]
        found: list[Buffer] = []
        for result, buffer in enumerate(same):
            made = self.heap.allocate(merged.nbytes[result]) if buffer is None else buffer
            if buffer is None:
                made.parts = merged.parts(result, pool)
                for part in made.parts:
                    if part is not None:
                        self.heap.hold(part.buffer)
            found.append(made)
        self.heap.drop(pool)
        return found

    def _relocate(self, places: Sequence[int], results: list[Buffer], *bodies: Graph) -> None:
        """Free the results, and request new buffers for them in their order.

        Args:
            bodies: the bodies that may have computed them.
        """
        for place in places:
            self.heap.drop(results[place])
        for place in places:
            sizes = (body.fetches[place].type.nbytes or 0 for body in bodies)
            results[place] = self.heap.allocate(max(sizes))

    def _worst(
        self, node: Node, bodies: Sequence[Graph], arguments: Sequence[Buffer], integers: Sequence[Values | None]
    ) -> tuple[Graph, list[Values | None]]:
        """The branch that leaves the most bytes, and the integers that all branches have in common. Where another
        branch has a higher peak, requests and frees that many bytes.
        """
        known: list[list[Values | None]] = []
        found: list[tuple[int, int, Graph]] = []
        requests: set[tuple[Logged, ...]] = set()
        for body in bodies:
            trial = BodyReplay(self.device, self.strict, prepared=self.prepared)
            heap = trial.heap
            stand_ins = [
                heap.given(i, a.nbytes, None if a.endless else contents_of(a, {})) for i, a in enumerate(arguments)
            ]
            known.append(trial.functions.run(body, stand_ins, integers, consume=False)[1])
            # Arguments that a branch passes on or saves stay after all others have released them.
            given = (*stand_ins, *(part.buffer for b in stand_ins for part in b.parts if part is not None))
            kept_bytes = sum(round_up(b.nbytes) for b in given if b.refs)
            found.append((heap.live_bytes + kept_bytes, heap.peak_bytes, body))
            requests.add(tuple(heap.log))
            self.found.undetermined.update(trial.found.undetermined)
        if len(requests) > 1:
            self.found.undetermined[node] = None
            self.found.undecided = max(self.found.undecided, len(bodies))
            self.found.repeated |= bool(self.functions.iterations)
        _, peak, branch = max(found, key=lambda f: f[:2])
        highest = max(f[1] for f in found)
        if highest > peak:
            self.heap.drop(self.heap.allocate(highest))
        return branch, common(known)

    def _loop(
        self,
        node: Node,
        condition: Graph,
        body: Graph,
        arguments: Sequence[Buffer],
        integers: Sequence[Values | None],
    ) -> Results:
        """Run a loop, or the iterations that represent all."""
        relocated = None if self.lowered else relocated_places(node)
        trips = self._iterations(node, condition, body, integers, relocated is not None)
        held = list(arguments) if self.lowered else [self.heap.hold(a) for a in arguments]
        several = self.covering and not trips.certain and relocated is None
        ways = [Way.of(held)] if several else []
        before: tuple[object, ...] = ()
        values = list(integers) if trips.all_run else self._iterated(condition, body).unchanging(integers)
        left = self.heap.live_bytes
        weight = self.heap.weight
        self.heap.weight *= trips.of_each
        self.functions.iterations.append(0)
        for iteration in range(trips.replayed):
            self.functions.iterations[-1] = iteration
            results, _ = self.functions.run(condition, held, values, consume=False)
            self.heap.drop(results[0])
            left, before = self.heap.live_bytes, structure(held) if self.covering else ()
            held, values = self.functions.run(body, held, values, consume=True)
            if relocated is not None:
                self._relocate(relocated, held, body)
            if several:
                ways.append(Way.of(held))
        self.functions.iterations.pop()
        self.heap.weight = weight
        kept_bytes = self.heap.live_bytes - left  # the bytes that the last iteration leaves
        self.heap.exact &= not trips.endless or not kept_bytes
        differs = self.covering and trips.endless and trips.replayed > 0 and structure(held) != before
        if differs or (self.strict and not trips.all_counted and kept_bytes):
            raise UnboundedLoop(node.name, kept_bytes)
        results, _ = self.functions.run(condition, held, values, consume=False)
        self.heap.drop(results[0])
        if relocated is not None and not trips.replayed:
            self._relocate(relocated, held, body)
        if several:
            held = self._merged(Merged.of(ways), held)
        return held, trips.ended if trips.ended is not None else [None] * len(held)

    def _iterations(
        self, node: Node, condition: Graph, body: Graph, integers: Sequence[Values | None], relocated: bool
    ) -> _Iterations:
        """The iterations to replay."""
        trips, certain = self._trips(condition, body, integers)
        if trips is None or not certain:
            self.found.undetermined[node] = None
        ended = None if trips is None else trips[-1] if certain else common(trips, bounds=True)
        steady = not self.functions.prepare(body).lists and not self.functions.prepare(condition).lists
        enough = RELOCATED_TRIPS if relocated else STEADY_TRIPS
        chosen = False  # whether the course decides their number
        if not certain and not relocated and (trips is not None or not steady):
            self.found.decided, self.found.ends_early = False, True
            self.found.endless |= trips is None
            if self.functions.course is not None:
                most = self.functions.course.trips(UNKNOWN_TRIPS if trips is None else len(trips) - 1)
                trips = trips and trips[: 1 + most]
                ended = trips[-1] if trips else None
                enough = most if trips is None else enough
                chosen = True
        of_all = UNKNOWN_TRIPS if trips is None else len(trips) - 1
        count = enough if trips is None else of_all
        if steady and count > enough:
            count = enough if relocated else _represented(count, enough, body)
        counted = trips is not None and of_all == count
        all_run = chosen if trips is None else counted
        return _Iterations(count, of_all / count if count else 1.0, certain, trips is None, counted, all_run, ended)

    def _iterated(self, condition: Graph, body: Graph) -> Loop:
        return Loop(condition, body, self.functions.prepare(condition).given, self.functions.prepare(body).given)

    def _trips(self, condition: Graph, body: Graph, integers: Sequence[Values | None]) -> Trips:
        """The integers of a loop's variables, and whether its end is certain."""
        made, key = self.functions.prepare(body), tuple(integers)
        if key not in made.trips:
            made.trips[key] = self._iterated(condition, body).run(integers)
        found, certain = made.trips[key]
        self.heap.exact &= certain
        return found, certain


def _represented(count: int, least: int, body: Graph) -> int:
    """The number of replayed iterations of a steady loop of `count`."""
    nodes = len(body) + sum(map(len, body.all_bodies()))
    most = max(min(SETTLING_TRIPS, SETTLING_NODES // max(nodes, 1)), least + ROTATION_TRIPS - 1)
    return count - -(-max(count - most, 0) // ROTATION_TRIPS) * ROTATION_TRIPS


def relocated_places(node: Node) -> tuple[int, ...] | None:
    """The relocated results of a loop's iteration, or of a branch; None where the node has none."""
    return cast("tuple[int, ...] | None", node.attrs.get(RELOCATED))
