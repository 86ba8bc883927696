"""`tfswap.optimize`: a `tf.function` that keeps its device memory under a byte limit.

Each trace of the function is planned and rewritten once, at its first call, and called as before from then
on: the rewritten ConcreteFunction has the trace's own signature and captures.

Not handled: gradients taken outside of the decorated function. A call that a tape watches runs the function as
it was traced, with a warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tfswap.errors import InfeasibleMemoryLimit, TfswapError, UnsupportedGraph
from tfswap.frontends import machine
from tfswap.frontends.audit import audited_call
from tfswap.frontends.backward import require_backward
from tfswap.frontends.pipeline import TACTICS, Optimizer, Options
from tfswap.planner.plan import Plan
from tfswap.planner.simulate import Resident
from tfswap.report.report import Report
from tfswap.sizes import format_bytes, parse_limit

log = logging.getLogger("tfswap")

PLANNING_TRIES = 4
_gates = itertools.count(1)


@dataclass
class _Optimised:
    """One trace, planned for arguments up to certain shapes."""

    shapes: tuple[tuple[int, ...] | None, ...]
    function: Any
    optimizer: Optimizer
    plan: Plan
    report: Report
    audited: bool = False
    resident_bytes: int = 0
    broken: bool = False

    def covers(self, shapes: Sequence[tuple[int, ...] | None]) -> bool:
        """Whether arguments of these shapes are no larger than what was planned for."""
        return all(
            made is None or (len(made) == len(got or ()) and all(g <= m for g, m in zip(got or (), made, strict=True)))
            for made, got in zip(self.shapes, shapes, strict=True)
        )


class OptimizedFunction:
    """A `tf.function` under a memory limit; called, and otherwise used, as the function that it wraps."""

    __name__: str

    # AutoGraph, tracing a function that calls this one, takes it as it is. (What it wraps is converted as ever.)
    autograph_info__: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        function: Any,
        memory_limit: int | str | None,
        options: Options,
        plan: Plan | None,
        mode: str,
        on_exceeded: str,
    ):
        self._function = function
        self._memory_limit = memory_limit
        self._options = options
        self._given_plan = plan
        self._mode = mode
        self._on_exceeded = on_exceeded
        self._margin_bytes = 0
        self._told_of_tape = False
        self._lock = threading.RLock()
        self._made: dict[Any, list[_Optimised]] = {}
        self._latest: _Optimised | None = None
        self._bound: weakref.WeakKeyDictionary[Any, OptimizedFunction] = weakref.WeakKeyDictionary()
        functools.update_wrapper(self, getattr(function, "python_function", function), updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        concrete = self._trace(args, kwargs)
        inputs = self._flat_inputs(concrete, args, kwargs)
        if _is_watched(concrete, inputs):
            return self._call_traced(concrete, inputs)
        made = self._optimised(concrete, inputs)
        if made.broken or self._crowded(made):
            made = self._adapt(made, concrete, inputs)
        return self._run(made, inputs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        if instance not in self._bound:
            self._bound[instance] = OptimizedFunction(
                self._function.__get__(instance, owner),
                self._memory_limit,
                self._options,
                self._given_plan,
                self._mode,
                self._on_exceeded,
            )
        return self._bound[instance]

    @property
    def python_function(self) -> Callable[..., Any]:
        """The Python function that is traced."""
        return self._function.python_function

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """The rewritten ConcreteFunction for these arguments or specs, as `tf.function`'s method of that name."""
        concrete = self._function.get_concrete_function(*args, **kwargs)
        known = [t for t in concrete.inputs if t.dtype.name != "resource"]
        open_ = [t.name for t in known if not t.shape.is_fully_defined()]
        if open_ and concrete not in self._made:
            raise UnsupportedGraph(
                f"{self.__name__}: the arguments {', '.join(open_)} have open dimensions, and a plan needs "
                "sizes: call the function once with real tensors, or give specs with full shapes"
            )
        if concrete in self._made:
            return self._made[concrete][-1].function
        arguments = len(concrete.inputs) - len(concrete.captured_inputs)
        return self._optimised(concrete, concrete.inputs[:arguments]).function

    def report(self) -> Report:
        """The report of the latest signature. Raises TfswapError before the first call."""
        return self._require_latest().report

    def plan(self) -> Plan:
        """The plan of the latest signature. Raises TfswapError before the first call."""
        return self._require_latest().plan

    def _require_latest(self) -> _Optimised:
        if self._latest is None:
            raise TfswapError(f"{self.__name__} has not been planned yet: call it once, or get_concrete_function() it")
        return self._latest

    def _trace(self, args: Any, kwargs: Any) -> Any:
        # get_concrete_function() without handing the graph's ownership over on every call.
        concrete = self._function._get_concrete_function_garbage_collected(*args, **kwargs)
        if concrete not in self._made:
            concrete._garbage_collector.release()
        return concrete

    def _flat_inputs(self, concrete: Any, args: Any, kwargs: Any) -> list[Any]:
        from tensorflow.python.eager.polymorphic_function import function_type_utils

        traced = self._function
        full = function_type_utils.canonicalize_function_inputs(
            args, kwargs, traced.function_type, traced._default_values
        )
        return concrete.function_type.unpack_inputs(concrete.function_type.bind(*full.args, **full.kwargs))

    def _call_traced(self, concrete: Any, inputs: Sequence[Any]) -> Any:
        """Run the function as it was traced: TensorFlow can differentiate it, and not the rewritten one."""
        if not self._told_of_tape:
            self._told_of_tape = True
            log.warning(
                "tfswap: %s: a gradient tape watches this call from outside, so it runs as it was traced, without "
                "its memory limit. Take the gradients inside the function that is optimized; or, if none are "
                "wanted, call it outside of the tape or under tape.stop_recording().",
                self.__name__,
            )
        return concrete._call_flat(inputs, captured_inputs=concrete.captured_inputs)

    def _optimised(self, concrete: Any, inputs: Sequence[Any]) -> _Optimised:
        entries = self._made.get(concrete)
        if entries is not None and len(entries) == 1 and _is_static(entries[0]):
            self._latest = entries[0]
            return entries[0]
        shapes = tuple(_shape(t) for t in inputs)
        with self._lock:
            for entry in self._made.get(concrete, ()):
                if entry.covers(shapes):
                    self._latest = entry
                    return entry
            made = self._optimise(concrete, inputs, shapes)
            self._made.setdefault(concrete, []).append(made)
            self._latest = made
            return made

    def _optimise(self, concrete: Any, inputs: Sequence[Any], shapes: tuple[Any, ...]) -> _Optimised:
        from tfswap.importers.function import import_function, source_lines

        graph = import_function(concrete, inputs)
        device, model = machine.current_device()
        resident = machine.resident(device)
        for _ in range(PLANNING_TRIES):
            optimizer = Optimizer(graph, model, self._options, resident=resident, extra_margin_bytes=self._margin_bytes)
            try:
                plan = self._given_plan or optimizer.plan(self._limit(device))
            except InfeasibleMemoryLimit:
                require_backward(self.__name__, graph)
                raise
            function, audited = concrete, False
            if self._mode == "analyze" or plan.changes_nothing:
                break
            function, resident = self._prepare(optimizer, plan, concrete, inputs, device)
            audited = resident is not None
            if resident is None:
                break
            plan = dataclasses.replace(plan, planned_peak_bytes=optimizer.peak_bytes(plan, resident))
            limit = plan.limit_bytes
            if self._given_plan or limit is None or plan.planned_peak_bytes <= limit - self._margin_bytes:
                function.open_gate()
                break
            # Planned again for that arena, less this function's constants.
            function = None
            gc.collect()  # a function's graph is full of cycles, and its kernels hold the constants
            resident = machine.resident(device)
        else:
            raise TfswapError(
                f"{self.__name__}: the arena changed under each of {PLANNING_TRIES} plans: is something else "
                "allocating on the device at the same time?"
            )
        report = optimizer.report(plan, source_lines(concrete))
        log.info("tfswap: %s: %s", self.__name__, report.headline())
        static = all(t.shape.is_fully_defined() for t in concrete.inputs[: len(shapes)] if t.dtype.name != "resource")
        kept = (None,) * len(shapes) if static else shapes
        return _Optimised(kept, function, optimizer, plan, report, audited, resident.total_bytes if audited else 0)

    def _prepare(
        self, optimizer: Optimizer, plan: Plan, concrete: Any, inputs: Sequence[Any], device: str
    ) -> tuple[Any, Resident | None]:
        """Make the planned function, and let TensorFlow make its kernels and constants without running any.

        Returns the function and what is in the arena then; None where that can't be told: while a graph is
        being built, when the inputs have no values yet, or the device keeps no figures.
        """
        import tensorflow as tf

        import tfswap.ops
        from tfswap.exporters.function import export_function

        if plan.absences:
            try:
                tfswap.ops.reserve(plan.host_bytes)
            except MemoryError as error:
                raise TfswapError(
                    f"{self.__name__}: no {format_bytes(plan.host_bytes)} of host memory for swapped tensors: "
                    f"{error}. Ask for a higher memory_limit, or free host memory."
                ) from error
        known = tf.executing_eagerly() and machine.memory_info(device) is not None
        if not known or any(tf.is_symbolic_tensor(t) for t in inputs):
            return export_function(optimizer.rewrite(plan), concrete), None
        captured = concrete.captured_inputs
        for position in optimizer.written_variables():
            if position >= len(inputs):
                tfswap.ops.own_buffer(captured[position - len(inputs)])
        gate = next(_gates)
        function = export_function(optimizer.rewrite(plan, gate), concrete)
        function.open_gate = functools.partial(tfswap.ops.open_gate, gate)
        with contextlib.suppress(tf.errors.AbortedError):
            audited_call(function, inputs)
        return function, dataclasses.replace(machine.resident(device), instantiated=True)

    def _limit(self, device: str) -> int | str:
        if self._memory_limit is not None:
            return self._memory_limit
        limit = machine.device_limit_bytes(device)
        if limit is None:
            raise TfswapError(
                f"memory_limit is not given and {device}'s allocator has no limit of its own: "
                'say how much the step may take, such as memory_limit="6GiB"'
            )
        return limit

    def _run(self, made: _Optimised, inputs: Sequence[Any]) -> Any:
        function = made.function
        if (function is not None and made.plan.changes_nothing) or self._mode == "analyze":
            return function._call_flat(inputs, captured_inputs=function.captured_inputs)
        if not made.audited:
            made.audited = True
            return self._watched(made, lambda: audited_call(function, inputs))
        return self._watched(made, lambda: function._call_flat(inputs, captured_inputs=function.captured_inputs))

    def _crowded(self, made: _Optimised) -> bool:
        """Whether more has moved into the arena since the plan was made than the plan leaves room for."""
        limit = made.plan.limit_bytes
        if made.plan.changes_nothing or limit is None or self._given_plan or self._mode == "analyze":
            return False
        info = machine.memory_info(_device_once()[0])
        room = max(0, limit - made.plan.planned_peak_bytes)
        return info is not None and bool(made.resident_bytes) and info.current_bytes > made.resident_bytes + room

    def _adapt(self, made: _Optimised, concrete: Any, inputs: Sequence[Any]) -> _Optimised:
        """Plan again, before the step runs, when the arena as it is now would break the limit."""
        with self._lock:
            now = dataclasses.replace(machine.resident(_device_once()[0]), instantiated=True)
            made.resident_bytes = now.total_bytes
            if not made.broken and made.optimizer.peak_bytes(made.plan, now) <= (made.plan.limit_bytes or 0):
                return made
            made.broken = False
            try:
                fresh = self._optimise(concrete, inputs, made.shapes)
            except InfeasibleMemoryLimit as error:
                if self._on_exceeded == "raise":
                    raise
                log.warning("tfswap: %s: the limit will not hold any more: %s", self.__name__, error)
                self._margin_bytes = made.optimizer.extra_margin_bytes
                return made
            entries = self._made[concrete]
            entries[entries.index(made)] = fresh
            self._latest = fresh
            return fresh

    def _watched(self, made: _Optimised, call: Callable[[], Any]) -> Any:
        """Run a step and notice when the allocator's peak passes the plan's."""
        device, _ = _device_once()
        before = machine.memory_info(device)
        result = call()
        if before is None:
            return result
        after = machine.memory_info(device)
        assert after is not None
        limit = made.plan.limit_bytes or made.plan.planned_peak_bytes
        if after.peak_bytes > before.peak_bytes and after.peak_bytes > limit:
            self._exceeded(made, after.peak_bytes - limit, after.peak_bytes)
        return result

    def _exceeded(self, made: _Optimised, excess_bytes: int, peak_bytes: int) -> None:
        message = (
            f"tfswap: {self.__name__} peaked at {format_bytes(peak_bytes)}, {format_bytes(excess_bytes)} over its "
            "limit: something else shares the device's memory, or a kernel took more than is known of it. The "
            "next call is planned again with that much more room."
        )
        with self._lock:
            self._margin_bytes += excess_bytes
            made.broken = True
        if self._on_exceeded == "raise":
            raise TfswapError(message)
        log.warning(message)


@functools.cache
def _device_once() -> tuple[str, Any]:
    return machine.current_device()


def _is_watched(concrete: Any, inputs: Sequence[Any]) -> bool:
    """Whether a gradient tape may ask for gradients of this call. Follows ConcreteFunction._call_flat."""
    from tensorflow.python.eager import record
    from tensorflow.python.ops import gradients_util, resource_variable_ops

    if not record.could_possibly_record():
        return False
    for variable in concrete.graph.variables:
        resource_variable_ops.variable_accessed(variable)
    arguments = [*inputs, *concrete.captured_inputs]
    return gradients_util.PossibleTapeGradientTypes(arguments) != gradients_util.POSSIBLE_GRADIENT_TYPES_NONE


def _shape(tensor: Any) -> tuple[int, ...] | None:
    shape = getattr(tensor, "shape", None)
    return None if shape is None or shape.rank is None else tuple(shape.as_list())


def _is_static(entry: _Optimised) -> bool:
    return all(shape is None for shape in entry.shapes)


def optimize(
    function: Any = None,
    *,
    memory_limit: int | str | None = None,
    tactics: Sequence[str] = TACTICS,
    host_memory_limit: int | str | None = None,
    plan: Plan | None = None,
    mode: str = "optimize",
    on_exceeded: str = "warn",
) -> Any:
    """Keep a training step's device memory under a limit. Use it on a `tf.function` or as its decorator.

        @tfswap.optimize(memory_limit="6GiB")
        @tf.function
        def train_step(x, y): ...

    Args:
        function: a `tf.function` or a Python function that one is made of; None when used as a decorator.
        memory_limit: bytes, a size ("6GiB"), a share of the unoptimised step's planned peak ("60%"), or None
            for what the device's allocator may have. It bounds the allocator's whole peak
            (`tf.config.experimental.get_memory_info(device)["peak"]`).
        tactics: what may be used, of ("swap",); ordering is always on, and alone with ().
        host_memory_limit: the most host memory that swapped tensors may take; bytes or a size.
        plan: a plan made before; applied instead of making one.
        mode: "optimize", or "analyze" to change nothing and only report.
        on_exceeded: "warn" or "raise" when a step's measured peak passes its limit.

    Returns:
        An `OptimizedFunction`, or a decorator that makes one.

    Raises:
        TfswapError: an argument is malformed. At the first call of a signature also InfeasibleMemoryLimit,
            with `.floor_bytes`, before anything runs, and UnsupportedGraph.
    """
    if memory_limit is not None:
        parse_limit(memory_limit, baseline_bytes=1 << 40)
    _one_of("mode", mode, ("optimize", "analyze"))
    _one_of("on_exceeded", on_exceeded, ("warn", "raise"))
    host = None if host_memory_limit is None else parse_limit(host_memory_limit)
    options = Options(tuple(tactics), host)

    def decorate(target: Any) -> OptimizedFunction:
        tf = machine.require_tensorflow()

        if not hasattr(target, "get_concrete_function"):
            if not callable(target):
                raise TfswapError(f"optimize needs a tf.function, not {target!r}")
            target = tf.function(target)
        if getattr(target, "_jit_compile", None):
            raise UnsupportedGraph(
                f"{getattr(target, '__name__', target)!s} has jit_compile=True: XLA fuses the step and hides its "
                "tensors, so no graph rewrite can bound them. Remove jit_compile=True and decorate again."
            )
        return OptimizedFunction(target, memory_limit, options, plan, mode, on_exceeded)

    return decorate if function is None else decorate(function)


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise TfswapError(f"{name} is {value!r}; it can be {' or '.join(map(repr, allowed))}")
