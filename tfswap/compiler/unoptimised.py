"""The step as TensorFlow runs it without tfswap: its predicted peak and time, and a likely upper bound of its peak.

A share such as "60%" is of this peak, and a step that keeps its limit so is left as it was traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from statistics import median_low

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.constants import computed_bytes, thrown_away
from tfswap.analysis.cost import Costs, cores_used, unordered_seconds
from tfswap.analysis.dataflow import Dataflow
from tfswap.compiler.grappler import MOST_NODES, as_executed
from tfswap.compiler.plan_cache import StepPlans, Unoptimised
from tfswap.ir.graph import Graph
from tfswap.ir.op_traits import control_flow
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.prepare.unroll_loops import unroll_loops
from tfswap.planner.promise import MARGIN_SHARE, promised
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.lowered_peak import TooLarge, simulate_lowered
from tfswap.simulator.record import Record
from tfswap.simulator.unordered import Baseline, range_of, record_baseline, simulate_delayed, simulate_unordered
from tfswap.support import progress
from tfswap.support.gc_pause import without_collector

BASELINE_SPREAD = 1.1
"""The peak of an unordered step varies from run to run. A limit above the highest simulated peak by this factor is kept
without an order. Of 12 random programs on a busy machine, each run 58 times, the highest measured peak was 1.07 times
the simulated one."""

HELD_SPREAD = 1.3
"""The same factor where gradients are taken outside: not all tensors that TensorFlow's tape holds are known. A
transformer reached 1.26 of its predicted peak.
"""

ALIKE_SHARE = 0.01
"""Arenas that differ by at most this share of the peak are alike: runs of an unordered step differ by more."""


class UnoptimisedStep:
    """Predictions of one step without tfswap.

    Args:
        graph: the step, with every size bound.
        target: the device, and the tensors that the caller holds.
        costs: the cost model.
        ordered_seconds: gives the predicted seconds of the step's kernels one after the other.
        fingerprint: of `graph`.
        others_bytes: bytes that others allocate while the step runs, as a data pipeline does for its batches.
        known: earlier plans and predictions of this step, where there is a cache.
        snapshot: the arena before the step.
        resident_bytes: the bytes in use in it throughout the step.
        unrolled: whether loops of the step are unrolled.
        overlapping_bytes: the most that concurrent iterations of loops hold.

    Attributes:
        least_s: the least seconds of the step, which may wait for other devices.
    """

    least_s = 0.0

    def __init__(
        self,
        graph: Graph,
        target: Target,
        costs: Costs,
        ordered_seconds: Callable[[], float],
        *,
        fingerprint: str,
        others_bytes: int,
        known: StepPlans | None,
        snapshot: ArenaSnapshot,
        resident_bytes: int,
        unrolled: bool,
        overlapping_bytes: int,
    ):
        self._graph = graph
        self._target = target
        self._device = target.device
        self._costs = costs
        self._packed = dataclasses.replace(costs, rates=dataclasses.replace(costs.rates, packs=True))
        self._ordered_seconds = ordered_seconds
        self._fingerprint = fingerprint
        self._others_bytes = others_bytes
        self._known = known
        self._first_snapshot = self._snapshot = snapshot
        self._first_bytes = resident_bytes
        self._earlier: Unoptimised | None = None  # the prediction of another process
        self._knows_variables = False
        self._unrolled = unrolled
        self._overlapping_bytes = overlapping_bytes

    def assume_variables(self, snapshot: ArenaSnapshot) -> None:
        """Note where the variables are, the first time that they are known. Without tfswap all are on the device."""
        if not self._knows_variables and any(not variable.address for variable in snapshot.variables):
            self.renew(snapshot.with_at_home(()))
        self._knows_variables |= bool(snapshot.variables)

    def renew(self, snapshot: ArenaSnapshot) -> None:
        """From now on predict for this arena.

        A prediction of another process is for an arena that holds the step's constants. It stays.
        """
        if self._earlier is None:
            self._snapshot = snapshot
            self.__dict__.pop("_alone", None)
            self.__dict__.pop("_highest_bytes", None)

    @property
    def baseline(self) -> Baseline:
        """The prediction, with the bytes that others allocate. It takes seconds."""
        alone = self._alone.more(self._others_bytes)
        return alone._replace(seconds=max(alone.seconds, self.least_s), overlapping_bytes=self._overlapping_bytes)

    @functools.cached_property
    def _alone(self) -> Baseline:
        """The prediction without the bytes that others allocate."""
        if self._known is None:
            return self._predicted()
        with self._known.predicting():
            renewed = self._snapshot is not self._first_snapshot
            found = None if renewed else self._recalled(self._known)
            if found is None:
                found = self._predicted()
                self._keep(self._known, found)
            return found

    def _predicted(self) -> Baseline:
        """As `predict`; from that of a part that computes alike, where its arena has about as many bytes."""
        made: list[tuple[int, Baseline]] = self._target.shared.alike.get((UnoptimisedStep, self._target), list)
        there_bytes = self._snapshot.total_bytes
        for nbytes, found in made:
            if abs(more := there_bytes - nbytes) <= ALIKE_SHARE * found.peak_bytes:
                return found.more(more)
        found = self.predict()
        made.append((there_bytes, found))
        return found

    def _keep(self, known: StepPlans, found: Baseline, bound_bytes: int | None = None) -> None:
        known.keep_unoptimised(
            Unoptimised(
                self._first_bytes,
                found.peak_bytes,
                found.lowest_bytes,
                found.highest_bytes,
                found.seconds,
                bound_bytes,
            )
        )

    def _recalled(self, known: StepPlans) -> Baseline | None:
        """An earlier prediction of the same step, in an arena with about as many bytes.

        Runs of an unordered step differ by far more than such a difference in the arena.
        """
        found = known.unoptimised()
        if found is None or abs(found.there_bytes - self._first_bytes) > MARGIN_SHARE * found.peak_bytes:
            return None
        self._earlier = found
        return Baseline(
            found.peak_bytes, found.seconds, lowest_bytes=found.lowest_bytes, highest_bytes=found.highest_bytes
        )

    @progress.task("predicting the step as it is")
    @without_collector
    def predict(self) -> Baseline:
        """The prediction without the bytes that others allocate, made now."""
        flow, cost_s, runs = self._executed
        if len(self._graph) > MOST_NODES:
            del self._executed  # as large as the step's own facts, and soon recomputed, without Grappler
        profile = self._costs.profile
        peaks = self._peaks(flow, cost_s)
        # With the margin that plans have, so that a share of it can be met where order changes nothing.
        peak = promised(median_low(peaks))
        lowest, highest = range_of(peaks)
        ends = {"lowest_bytes": lowest, "highest_bytes": max(peak, highest)}
        if profile is None or profile.unordered is None or profile.fingerprint != self._fingerprint:
            rates = self._costs.rates
            cores = [cores_used(node, rates) if ran else 0.0 for node, ran in zip(flow.nodes, runs, strict=True)]
            seconds = [s if ran else 0.0 for s, ran in zip(self._costs.of_step(flow), runs, strict=True)]
            return Baseline(peak, unordered_seconds(seconds, cores, flow.own_deps, rates), **ends)
        return Baseline(peak, profile.unordered * self._ordered_seconds(), **ends)

    def _peaks(self, flow: Dataflow, cost_s: list[float]) -> list[int]:
        """The peaks of runs."""
        return self._lowered_peaks(flow, delayed=False) or simulate_unordered(
            flow, cost_s, self._device, snapshot=self._snapshot
        )

    def _lowered_peaks(self, flow: Dataflow, *, delayed: bool) -> list[int]:
        """As of `simulate_lowered`; none for a step without loops, or one that is too large."""
        if any(kind.is_loop for node in self._made.bodies if (kind := control_flow(node.op))):
            with contextlib.suppress(TooLarge):
                return simulate_lowered(
                    self._made, flow, self._device, self._packed.seconds, snapshot=self._snapshot, delayed=delayed
                )
        return []

    @functools.cached_property
    def _made(self) -> Graph:
        """What Grappler makes of the step, with what its caller holds."""
        held = self._target.held
        if not self.holds_lists:
            return as_executed(self._graph, self._device, held)
        graph = (self._graph.traced or self._graph).copy()
        graph.fetches += map(graph.tensor, held)  # Grappler's result does not show the contents of a returned list
        return graph

    def may_pass(self, limit_bytes: int) -> bool:
        """Whether the step is likely to pass a limit in some of its runs."""
        # The prediction is known in most cases, and the highest peak in few.
        return limit_bytes < self._bound(self._alone.peak_bytes) or limit_bytes < self.likely_bound_bytes

    @property
    def likely_bound_bytes(self) -> int:
        """A peak that the step is not likely to pass, without the bytes that others allocate.

        Iterations of a loop overlap more on a busy machine than in the prediction.
        """
        return self._bound(self._highest_bytes)

    def _bound(self, peak_bytes: int) -> int:
        spread = HELD_SPREAD if self._target.held else BASELINE_SPREAD
        return math.floor(peak_bytes * spread) + self._overlapping_bytes

    @functools.cached_property
    @without_collector
    def _highest_bytes(self) -> int:
        """The highest of the simulated peaks, with loops whose iterations overlap more than they are likely to."""
        alone = self._alone
        if self._earlier is not None and self._earlier.bound_bytes is not None:
            return self._earlier.bound_bytes
        flow, cost_s, _ = self._executed
        peaks = [alone.highest_bytes, *self._lowered_peaks(flow, delayed=True)]
        if self._unrolled or len(peaks) == 1:
            there, overlaps = self._snapshot, self._unrolled
            peaks += simulate_delayed(flow, cost_s, self._device, snapshot=there, overlaps=overlaps)
        highest = max(peaks)
        if self._known is not None:
            self._keep(self._known, alone, highest)
        return highest

    @property
    def holds_lists(self) -> bool:
        """Whether the step holds lists that loops save in until its end."""
        return any(self._graph.tensor(name).type.dtype == "variant" for name in self._target.held)

    def record(self) -> Record:
        """One run: its bytes in the arena over time. A loop is one kernel in it, so that its peak may be another."""
        flow, cost_s, _ = self._executed
        return record_baseline(flow, cost_s, self._device, snapshot=self._snapshot)

    @functools.cached_property
    @without_collector
    def _executed(self) -> tuple[Dataflow, list[float], list[bool]]:
        """The facts of the step as executed: variables adopt buffers, and Grappler has optimised it.

        With its nodes' seconds, packing included, and which of them run.
        """
        graph = self._made.copy()
        unroll_loops(graph, self._target, lowered=True)
        flow = analyse_dataflow(graph, self._device, lowered=self._costs.seconds)
        live = graph.live_nodes()
        runs = [kernel and node in live for node, kernel in zip(flow.nodes, flow.is_kernel, strict=True)]
        cost_s = [s if ran else 0.0 for s, ran in zip(self._packed.of_step(flow), runs, strict=True)]
        return flow, cost_s, runs


def discarded_constant_bytes(graph: Graph, device: DeviceModel) -> int:
    """The most bytes that TensorFlow takes to instantiate the traced step, where a rewritten one takes less; otherwise
    0.

    On a GPU this is host memory, and the result is 0.
    """
    if device.host_is_separate or not any(map(thrown_away, (graph, *graph.all_bodies()))):
        return 0
    return computed_bytes(graph)
