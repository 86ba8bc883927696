"""A step of a session under a limit: planned for its feeds and for the arena, as a node of the session's graph.

What a step takes from an iterator or a queue is taken first, in a run of its own, and fed: its sizes are known then,
and a step that is planned again does not lose it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfswap.compiler.offline import ArenaInUse, carry_host_limit
from tfswap.device import arena, machine
from tfswap.device.live import live_device
from tfswap.device.regions import make_one_region
from tfswap.errors import InfeasibleMemoryLimit
from tfswap.frontends.unmodified import summary
from tfswap.frontends.unmodified.functions import PROGRAM
from tfswap.frontends.unmodified.hidden_nodes import PREFIX, hidden_nodes
from tfswap.frontends.unmodified.room import KnownRoom
from tfswap.frontends.unmodified.session_runs import Run, bound, graph_step, out_of_arena
from tfswap.frontends.unmodified.session_variables import SessionVariables
from tfswap.frontends.unmodified.settings import Settings
from tfswap.frontends.unmodified.unplannable import Unplannable, planning
from tfswap.passes.random_state import share_random_state
from tfswap.passes.tactics.limit_check import number_gate
from tfswap.planner.promise import simulated_limit
from tfswap.report.report import Report
from tfswap.runtime.batches import BATCHES_AHEAD, room_bytes
from tfswap.runtime.shapes import Shapes, covers, grown

log = logging.getLogger("tfswap")

TRIES = 3
"""How often a step is planned before a run. What TensorFlow makes for a plan is in the arena of the next."""
OWN_BYTES = 256
"""The least bytes that a session allocates for itself while a step runs, as for texts. Its moments are not known, nor
are the holes in the arena: requests get chunks of their own sizes.
"""
REFUSED = "tfswap: this step was planned for a limit of"
"""How the error begins by which a step's gate refuses it, before its first kernel (limit_check.cc)."""
BATCHES = frozenset(
    {
        "IteratorGetNext",
        "IteratorGetNextSync",
        "QueueDequeueManyV2",
        "QueueDequeueUpToV2",
        "QueueDequeueV2",
    }
)
"""Ops that take a batch from what makes it."""
NAMED = 2
"""How many fetches a step's name has."""

_numbers = itertools.count()


class Form(NamedTuple):
    """A planned step in the session's graph.

    Attributes:
        shapes: of the feeds that it is planned for.
        targets, fetches: what to run in place of the program's.
        report: of its plan.
        gate: the number of its gate; None where the step runs as it is.
    """

    shapes: Shapes
    targets: list[Any]
    fetches: list[Any]
    report: Report
    gate: int | None = None

    @property
    def is_unchanged(self) -> bool:
        """Whether the step runs as it is."""
        return self.gate is None


class Taken(NamedTuple):
    """A run whose batches have been taken from iterators and queues.

    Attributes:
        run: feeds them, and does not fetch them.
        batches: arrays, by reference of their tensors.
        fetches: the program's.
    """

    run: Run
    batches: Mapping[Any, Any]
    fetches: Sequence[Any]

    def results(self, found: Sequence[Any]) -> list[Any]:
        """What the program gets where the run gives `found`."""
        values = iter(found)
        return [self.batches[t.ref()] if t.ref() in self.batches else next(values) for t in self.fetches]


class SessionStep:
    """The part of a session's graph that some fetches need.

    Args:
        plain: runs it as it is.
        given: the settings.
        run: the first run.
        ops: the operations that it needs.
        place: of the session's random states.

    Attributes:
        variables: those that it may write.
        runs_as_it_is: whether it can't be planned.
        latest_report: of the latest run that raised the allocator's peak, or with another plan since; None before.
        lock: held while it runs.
    """

    def __init__(self, plain: Callable[..., list[Any]], given: Settings, run: Run, ops: Sequence[Any], place: str):
        self.plain = plain
        self._given = given
        self._place = place
        self._graph = ops[0].graph
        self._forms: list[Form] = []
        self._latest: Form | None = None  # of `latest_report`
        self._margin_bytes = 0  # left free in addition, since a run has shown the need
        self._has_room = True  # whether there was a plan with that margin
        self._batches = [output for op in ops if op.type in BATCHES for output in op.outputs]
        self._room = KnownRoom(given.limit_bytes)
        self.lock = threading.RLock()
        self.variables = SessionVariables(ops, lambda *nodes: plain(Run(*nodes)))
        names = [*(op.name for op in run.targets), *(t.name for t in run.fetches)]
        self.__name__ = f"run of {', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"
        self.runs_as_it_is = False
        self.latest_report: Report | None = None

    def fits_as_it_is(self, run: Run) -> bool:
        """Whether a run has no need of a plan, since it is known to fit as it is. It is asked before each run."""
        return not self._batches and self._room.fits(run.by_name().shapes)

    def note_as_it_is(self, run: Run) -> None:
        """A run that was known to fit has ended."""
        self._row.note_call(self)

    @functools.cached_property
    def _row(self) -> summary.Row:
        """Of the summary."""
        return summary.row(self.__name__)

    def run(self, run: Run, options: Any, run_metadata: Any) -> list[Any]:
        """The results of a run, under the limit. Raises InfeasibleMemoryLimit."""
        taken = self._take(run)
        found = None
        try:
            found = self._found(taken, options, run_metadata)
        except Unplannable as error:
            self.runs_as_it_is = True
            summary.note_as_it_was(self.__name__, str(error))
        if found is None:  # not above, where an error would seem to be one of planning
            found = self.plain(taken.run, options, run_metadata)
        return taken.results(found)

    def _found(self, taken: Taken, options: Any, run_metadata: Any) -> list[Any]:
        """The fetched values. Raises Unplannable before it runs, and InfeasibleMemoryLimit."""
        return self.run_planned(taken, options, run_metadata)

    def without_batches(self, run: Run, batches: Mapping[Any, Any] | None = None) -> Run:
        """The run with batches of iterators and queues as feeds, by reference; by default, without their values."""
        fed = dict.fromkeys(t.ref() for t in self._batches) if batches is None else batches
        fetches = [t for t in run.fetches if t.ref() not in fed]
        return Run(run.targets, fetches, {**fed, **run.feeds}).by_name()

    def _take(self, run: Run) -> Taken:
        """The run, with the batches that it takes from iterators and queues as feeds."""
        wanted = [tensor for tensor in self._batches if tensor.ref() not in run.feeds]
        batches = dict(zip([t.ref() for t in wanted], self.plain(Run([], wanted, {})), strict=True)) if wanted else {}
        return Taken(self.without_batches(run, batches), batches, run.fetches)

    def run_planned(self, taken: Taken, options: Any, run_metadata: Any) -> list[Any]:
        """The fetched values, under the limit. Raises as `_found`."""
        import tensorflow as tf

        with self.lock:
            form, shapes = self._form(taken), taken.run.shapes
            if form.is_unchanged and self._room.fits(shapes):
                found = self.plain(taken.run, options, run_metadata)
                self._row.note_call(self)
                return found
            in_use = self._room.in_use()
            is_copied = form.is_unchanged or _copies_feeds()
            feeds = taken.run.feeds if is_copied else out_of_arena(taken.run).feeds
            refused: list[Form] = []
            most = len(self._forms) + TRIES
            while True:
                before = arena.memory_info(_device())
                try:
                    found = self.plain(Run(form.targets, form.fetches, feeds), options, run_metadata)
                except tf.errors.ResourceExhaustedError as error:
                    refused.append(form)
                    if len(refused) >= most or REFUSED not in error.message:
                        raise
                    form = self._form(taken, refused)
                    run_metadata = None  # the refused run has filled it, and TensorFlow takes none but empty ones
                else:
                    self._note(form, before)
                    if form.is_unchanged:
                        self._room.note(shapes, in_use)
                    return found

    def _note(self, form: Form, before: arena.MemoryInfo | None) -> None:
        """A run has ended."""
        after = arena.memory_info(_device())
        if before is not None and after is not None and after.peak_bytes > before.peak_bytes:
            self._note_peak(form, after.peak_bytes)
        elif form is not self._latest:
            self.latest_report = form.report
        self._latest = form
        self._row.note_call(self)

    def _note_peak(self, form: Form, peak_bytes: int) -> None:
        """A run has raised the allocator's peak."""
        import tfswap.ops

        planned = 0 if form.gate is None else tfswap.ops.peak_at_gate(form.gate)
        self.latest_report = dataclasses.replace(
            form.report,
            planned_peak_bytes=planned or form.report.planned_peak_bytes,
            measured_peak_bytes=peak_bytes,
        )
        self._row.read(self)
        limit = form.report.memory_limit_bytes
        if limit is not None and peak_bytes > limit:
            log.warning("tfswap: %s: its peak, %d bytes, has passed the limit", self.__name__, peak_bytes)
            if self._has_room:  # it is planned again
                self._margin_bytes += peak_bytes - limit
                self._forms.clear()

    def _form(self, taken: Taken, refused: Sequence[Form] = ()) -> Form:
        """The planned step for these feeds. Raises Unplannable and InfeasibleMemoryLimit.

        Args:
            refused: those that do not fit the arena as it is, or may not with smaller feeds than they are planned for.
        """
        shapes = taken.run.shapes
        for form in self._forms:
            if covers(form.shapes, shapes, exactly=False) and not any(form is each for each in refused):
                return form
        larger = shapes if refused else grown(shapes, [form.shapes for form in self._forms], len(shapes))
        try:
            form = self._planned(taken, larger)
        except InfeasibleMemoryLimit:
            if larger != shapes:
                form = self._planned(taken, shapes)
            elif self._margin_bytes:
                self._margin_bytes, self._has_room = 0, False
                return self._form(taken, refused)
            else:
                raise
        self._forms = [each for each in self._forms if each.shapes != form.shapes]
        self._forms.append(form)
        return form

    def _planned(self, taken: Taken, shapes: Shapes) -> Form:
        from tensorflow.python.eager import context

        with planning(), context.eager_mode():  # which the program may have turned off
            return self._made(taken, shapes)

    def _made(self, taken: Taken, shapes: Shapes) -> Form:
        import tfswap.ops

        run = taken.run
        step, feeds = graph_step(run)
        self.variables.own_buffers()
        limit = self._given.request.limit(_device())
        if isinstance(limit, int):
            make_one_region(_device(), limit)
        live_device().split_exactly_between_steps()
        # A CPU's arena has the batches that were taken, which are there by now, and no other feeds.
        sizes = [np.asarray(value).nbytes for value in run.feeds.values()] if _copies_feeds() else []
        room = room_bytes([np.asarray(value).nbytes for value in taken.batches.values()])
        others = max(OWN_BYTES, BATCHES_AHEAD * room)
        found = ArenaInUse(arena.snapshot(_device()).with_allocations(sizes), others, self._margin_bytes)
        planned = step.planned(self.__name__, self._given.request, bound(feeds, shapes), found)
        report = dataclasses.replace(planned.report, device=_device())
        if planned.changes_nothing:
            return Form(shapes, list(run.targets), list(run.fetches), report)
        # In this arena it needs no margin for others.
        report = dataclasses.replace(report, planned_peak_bytes=simulated_limit(planned.plan.planned_peak_bytes))
        number_gate(planned.graph, planned.target, gate := tfswap.ops.gate_number())
        carry_host_limit([planned], self._given.request)
        if share_random_state.apply(planned.graph, planned.target, PROGRAM.owner, self._place):
            tfswap.ops.keep_states(PROGRAM.owner)
        number = next(_numbers)
        call = step.call(planned.graph, planned.target, f"{PREFIX}/step_{number}", f"{PREFIX}_step_{number}")
        handles = {name: self._graph.as_graph_element(f"{name}:0") for name in call.node.input if name not in feeds}
        inputs = {f"{name}:0": handles.get(name, feeds.get(name)) for name in call.node.input}
        operation = hidden_nodes(self._graph).add_call(call.node, call.functions, inputs)
        results = iter(operation.outputs)
        outputs = {name: [next(results) for _ in types] for name, types in call.results.items()}
        fetches = [outputs[t.op.name][t.value_index] if t.op.name in outputs else t for t in run.fetches]
        others = [op for op in run.targets if op.name not in outputs]
        return Form(shapes, [operation, *others], fetches, report, gate)


def _copies_feeds() -> bool:
    """Whether feeds are copied into the device's arena."""
    return machine.current_device()[1].host_is_separate


def _device() -> str:
    return machine.current_device()[0]
