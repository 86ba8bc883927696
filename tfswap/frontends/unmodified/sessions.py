"""Sessions of TensorFlow 1 in an unmodified program: runs whose fetches need gradients run under the limit.

Each `Session.run`, also of a MonitoredSession, passes through `BaseSession._do_run` with targets, fetches and feeds.
The nodes that these need are planned before they run first, as a GraphDef's step is (`graph_def.py`), for the arena as
it is. One node in the session's own graph, hidden from the program, then runs in their place. So variables, tables and
iterators are the session's own.

What a step takes from an iterator or a queue is taken first, in a run of its own, and fed: its sizes are known then,
and a step that is planned again does not lose it.

Not handled, so that it runs as it is: partial runs, sessions of a remote server, `make_callable` without feeds, and
steps that `graph_def.py` refuses.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfswap.analysis.phases import is_gradient
from tfswap.compiler.offline import ArenaInUse, carry_host_limit
from tfswap.device import arena, machine
from tfswap.device.one_region import make_one_region
from tfswap.errors import InfeasibleMemoryLimit
from tfswap.frontends.graph_def import GraphStep
from tfswap.frontends.unmodified import summary
from tfswap.frontends.unmodified.functions import PROGRAM, Unplannable, planning, within
from tfswap.frontends.unmodified.hidden_nodes import PREFIX, hidden_nodes
from tfswap.frontends.unmodified.settings import Settings, settings
from tfswap.ir.op_traits import writes_variable
from tfswap.passes.random_state import share_random_state
from tfswap.report.report import Report
from tfswap.runtime.batches import BATCHES_AHEAD, room_bytes
from tfswap.runtime.shapes import Shapes, covers, grown
from tfswap.support.reach import reach

log = logging.getLogger("tfswap")

STEPS = "_tfswap_steps"
"""The attribute of a session: its SessionSteps."""
TRIES = 3
"""How often a step is planned before a run. What TensorFlow makes for a plan is in the arena of the next."""
OWN_BYTES = 256
"""The least bytes that a session allocates for itself while a step runs, as for feeds. Its moments are not known, nor
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


class Run(NamedTuple):
    """The arguments of a `Session._do_run`.

    Attributes:
        targets: operations.
        fetches: tensors.
        feeds: arrays, by reference of their tensors.
    """

    targets: Sequence[Any]
    fetches: Sequence[Any]
    feeds: Mapping[Any, Any]


class Form(NamedTuple):
    """A planned step in the session's graph.

    Attributes:
        shapes: of the feeds that it is planned for.
        targets, fetches: what to run in place of the program's.
        report: of its plan.
    """

    shapes: Shapes
    targets: list[Any]
    fetches: list[Any]
    report: Report


def watched(plain: Callable[..., Any], given: Mapping[str, Any]) -> Callable[..., Any]:
    """`BaseSession._do_run`, which runs steps under the limit.

    Args:
        plain: TensorFlow's own.
        given: the options, as the environment has them.
    """

    def _do_run(
        self: Any, handle: Any, target_list: Any, fetch_list: Any, feed_dict: Any, options: Any, run_metadata: Any
    ) -> Any:
        if handle is None and not within.step and not self._target:
            steps = vars(self).get(STEPS)
            if steps is None:
                steps = SessionSteps(self, plain, settings(given))
                setattr(self, STEPS, steps)
            run = Run(target_list, fetch_list, feed_dict)
            if (step := steps.of(run)) is not None:
                return within.call(step.run, run, options, run_metadata)
        return plain(self, handle, target_list, fetch_list, feed_dict, options, run_metadata)

    return _do_run


class SessionSteps:
    """The steps of a session, by the names of their targets, fetches and feeds.

    Args:
        session: the session.
        plain: TensorFlow's own `_do_run`.
        given: the settings.
    """

    def __init__(self, session: Any, plain: Callable[..., Any], given: Settings):
        self._session = weakref.ref(session)
        self._plain = plain
        self._given = given
        self._known: dict[Any, SessionStep | None] = {}

    def of(self, run: Run) -> SessionStep | None:
        """The step of a run; None where that runs as it is."""
        key = tuple(op.name for op in run.targets), tuple(t.name for t in run.fetches), frozenset(run.feeds)
        if key not in self._known:
            ops = _needed(run)
            trains = any(is_gradient(op.type, op.name) for op in ops)
            self._known[key] = SessionStep(self._run, self._given, run, ops) if trains else None
        step = self._known[key]
        return None if step is None or step.runs_as_it_is else step

    def _run(self, run: Run, options: Any = None, run_metadata: Any = None) -> list[Any]:
        """Run it as it is."""
        session = self._session()
        return self._plain(session, None, run.targets, run.fetches, run.feeds, options, run_metadata)


class SessionStep:
    """The part of a session's graph that some fetches need.

    Args:
        plain: runs it as it is.
        given: the settings.
        run: the first run.
        ops: the operations that it needs.

    Attributes:
        runs_as_it_is: whether it can't be planned.
        latest_report: of the latest run; None before.
    """

    def __init__(self, plain: Callable[..., list[Any]], given: Settings, run: Run, ops: Sequence[Any]):
        self._plain = plain
        self._given = given
        self._ops = ops
        self._graph = ops[0].graph
        self._forms: list[Form] = []
        self._margin_bytes = 0  # left free in addition, since a run has shown the need
        self._has_room = True  # whether there was a plan with that margin
        self._batches = [output for op in ops if op.type in BATCHES for output in op.outputs]
        self._lock = threading.RLock()
        names = [*(op.name for op in run.targets), *(t.name for t in run.fetches)]
        self.__name__ = f"run of {', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"
        self.runs_as_it_is = False
        self.latest_report: Report | None = None

    def run(self, run: Run, options: Any, run_metadata: Any) -> list[Any]:
        """The results of a run, under the limit. Raises InfeasibleMemoryLimit."""
        with self._lock:
            taken = self._take(run)
            feeds = dict(sorted([*run.feeds.items(), *taken.items()], key=lambda each: each[0].deref().name))
            given = Run(run.targets, [t for t in run.fetches if t.ref() not in taken], feeds)
            found = None
            try:
                found = self._run(given, taken, options, run_metadata)
            except Unplannable as error:
                self.runs_as_it_is = True
                summary.note_as_it_was(self.__name__, str(error))
            if found is None:  # not above, where an error would seem to be one of planning
                found = self._plain(given, options, run_metadata)
        results = iter(found)
        return [taken[t.ref()] if t.ref() in taken else next(results) for t in run.fetches]

    def _take(self, run: Run) -> dict[Any, Any]:
        """The batches that it takes from iterators and queues, by reference of their tensors."""
        wanted = [tensor for tensor in self._batches if tensor.ref() not in run.feeds]
        if not wanted:
            return {}
        return dict(zip([t.ref() for t in wanted], self._plain(Run([], wanted, {})), strict=True))

    def _run(self, run: Run, taken: Mapping[Any, Any], options: Any, run_metadata: Any) -> list[Any]:
        import tensorflow as tf

        form = self._form(run, taken)
        for left in reversed(range(TRIES)):
            before = arena.memory_info(_device())
            try:
                found = self._plain(Run(form.targets, form.fetches, run.feeds), options, run_metadata)
            except tf.errors.ResourceExhaustedError as error:
                if not left or REFUSED not in error.message:
                    raise
                self._forms.remove(form)
                form = self._form(run, taken)
            else:
                self._note(form, before)
                return found
        raise AssertionError("the last try raises its error")

    def _note(self, form: Form, before: arena.MemoryInfo | None) -> None:
        """A run has ended."""
        after = arena.memory_info(_device())
        report = form.report
        if before is not None and after is not None and after.peak_bytes > before.peak_bytes:
            report = dataclasses.replace(report, measured_peak_bytes=after.peak_bytes)
            limit = report.memory_limit_bytes
            if limit is not None and after.peak_bytes > limit:
                log.warning("tfswap: %s: its peak, %d bytes, has passed the limit", self.__name__, after.peak_bytes)
                if self._has_room:  # it is planned again
                    self._margin_bytes += after.peak_bytes - limit
                    self._forms.clear()
        self.latest_report = report
        summary.row(self.__name__).note_call(self)

    def _form(self, run: Run, taken: Mapping[Any, Any]) -> Form:
        """The planned step for these feeds. Raises Unplannable and InfeasibleMemoryLimit."""
        shapes = tuple(np.shape(value) for value in run.feeds.values())
        for form in self._forms:
            if covers(form.shapes, shapes, exactly=False):
                return form
        larger = grown(shapes, [form.shapes for form in self._forms], len(shapes))
        try:
            form = self._planned(run, taken, larger)
        except InfeasibleMemoryLimit:
            if larger != shapes:
                form = self._planned(run, taken, shapes)
            elif self._margin_bytes:
                self._margin_bytes, self._has_room = 0, False
                return self._form(run, taken)
            else:
                raise
        self._forms.append(form)
        return form

    def _planned(self, run: Run, taken: Mapping[Any, Any], shapes: Shapes) -> Form:
        from tensorflow.python.eager import context

        with planning(), context.eager_mode():  # which the program may have turned off
            return self._made(run, taken, shapes)

    def _made(self, run: Run, taken: Mapping[Any, Any], shapes: Shapes) -> Form:
        import tfswap.ops

        graph_def, feeds = _with_placeholders(self._graph.as_graph_def(), [ref.deref() for ref in run.feeds])
        names = [*(t.name for t in run.fetches), *(op.name for op in run.targets)]
        step = GraphStep(graph_def, list(feeds), names)
        known = dict(zip(feeds, shapes, strict=True))
        self._own_buffers()
        limit = self._given.request.limit(_device())
        if isinstance(limit, int):
            make_one_region(_device(), limit)
        sizes = [np.asarray(value).nbytes for value in run.feeds.values()]
        room = room_bytes([np.asarray(value).nbytes for value in taken.values()])
        others = max(OWN_BYTES, BATCHES_AHEAD * room)
        found = ArenaInUse(arena.snapshot(_device()).with_allocations(sizes), others, self._margin_bytes)
        planned = step.planned(
            self.__name__, self._given.request, lambda _, given: {name: known[name] for name in given}, found
        )
        report = dataclasses.replace(planned.report, device=_device())
        if planned.changes_nothing:
            return Form(shapes, list(run.targets), list(run.fetches), report)
        carry_host_limit([planned], self._given.request)
        if share_random_state.apply(planned.graph, planned.target, PROGRAM.owner, f"session/{id(self._graph)}"):
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
        return Form(shapes, [operation, *others], fetches, report)

    def _own_buffers(self) -> None:
        """Give each variable that the step writes a buffer of its own: a session shares that of a constant initial
        value, and the first update would request another.
        """
        from tensorflow.python.ops import gen_array_ops
        from tensorflow.python.ops import gen_resource_variable_ops as variables

        written = {
            t.op for op in self._ops if writes_variable(op.type) for t in op.inputs if t.op.type == "VarHandleOp"
        }
        for handle in sorted(written, key=lambda op: op.name):
            with hidden_nodes(self._graph).added():
                value = variables.read_variable_op(handle.outputs[0], handle.get_attr("dtype"))
                copy = variables.assign_variable_op(handle.outputs[0], gen_array_ops.deep_copy(value))
            self._plain(Run([copy], [], {}))


def _needed(run: Run) -> list[Any]:
    """The operations that a run needs."""
    fed = {ref.deref().name for ref in run.feeds}

    def sources(op: Any) -> list[Any]:
        return [*(t.op for t in op.inputs if t.name not in fed), *op.control_inputs]

    return list(reach([*run.targets, *(t.op for t in run.fetches if t.name not in fed)], sources))


def _with_placeholders(graph_def: Any, fed: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    """The graph with a placeholder for each fed tensor, and these tensors by its name.

    As TensorFlow feeds them: what waits for a fed node that is no placeholder still waits for the node.
    """
    named, replaced = {}, {}
    for number, tensor in enumerate(fed):
        if tensor.op.type == "Placeholder":
            named[tensor.op.name] = tensor
            continue
        name = f"{PREFIX}_fed_{number}"
        node = graph_def.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = tensor.dtype.as_datatype_enum
        named[name], replaced[tensor.name] = tensor, name
    for node in graph_def.node if replaced else ():
        for i, source in enumerate(node.input):
            node.input[i] = replaced.get(source if ":" in source else f"{source}:0", source)
    return graph_def, named


def _device() -> str:
    return machine.current_device()[0]
