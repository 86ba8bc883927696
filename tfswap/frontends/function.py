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
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tfswap.errors import InfeasibleMemoryLimit, TfswapError, UnsupportedGraph
from tfswap.frontends import machine
from tfswap.frontends.arguments import Request, check, one_of
from tfswap.frontends.audit import audited_call
from tfswap.frontends.pipeline import TACTICS, Optimizer
from tfswap.frontends.rewriters import HIDES, refuse_compiled_caller, refuse_rewriters
from tfswap.planner.plan import Plan
from tfswap.planner.simulate import Resident
from tfswap.report.report import Report
from tfswap.sizes import format_bytes

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
    """A `tf.function` under a memory limit; called, and otherwise used, as the function that it wraps.

    TensorFlow takes it for that function (`isinstance` says so too), and what it asks of one it finds here: an object
    that holds an OptimizedFunction can be saved, and what is saved is the function as it was traced.

    Calls take turns: the limit is the allocator's, and two steps at once would take twice as much.
    """

    __name__: str
    __qualname__: str

    # AutoGraph, tracing a function that calls this one, takes it as it is. (What it wraps is converted as ever.)
    autograph_info__: ClassVar[dict[str, Any]] = {}

    def __init__(self, function: Any, request: Request, on_exceeded: str):
        self._function = function
        self._request = request
        self._on_exceeded = on_exceeded
        self._margin_bytes = 0
        self._told: set[str] = set()
        self._lock = threading.RLock()
        self._made: dict[Any, list[_Optimised]] = {}
        self._latest: _Optimised | None = None
        self._bound: weakref.WeakKeyDictionary[Any, OptimizedFunction] = weakref.WeakKeyDictionary()
        functools.update_wrapper(self, getattr(function, "python_function", function), updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        if self._function._run_functions_eagerly:
            self._warn_once("tf.config.run_functions_eagerly is on, so it runs eagerly, without its memory limit.")
            return self._function(*args, **kwargs)
        if not tf.executing_eagerly():
            refuse_compiled_caller(self.__name__)
        concrete = self._trace(args, kwargs)
        inputs = self._flat_inputs(concrete, args, kwargs)
        if _is_watched(concrete, inputs):
            return self._call_traced(concrete, inputs)
        with self._lock if tf.executing_eagerly() else contextlib.nullcontext():
            made = self._optimised(concrete, inputs)
            if made.broken or self._crowded(made):
                made = self._adapt(made, concrete, inputs)
            return self._run(made, inputs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        with self._lock:
            if instance not in self._bound:
                bound = self._function.__get__(instance, owner)
                if not hasattr(bound, "get_concrete_function"):  # a composite tensor's: it is an argument like others
                    return types.MethodType(self, instance)
                self._bound[instance] = self._of(bound)
            return self._bound[instance]

    def __getattr__(self, name: str) -> Any:
        # What a tf.function has besides: its signature, tracing count, and what TensorFlow asks of it to save it.
        if name.startswith("__") or "_function" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._function, name)

    def __repr__(self) -> str:
        return f"<tfswap.OptimizedFunction {self.__name__}, memory_limit={self._request.memory_limit!r}>"

    def __reduce__(self) -> Any:
        """Pickled and copied as a function is, by its name, where it has one; else made anew, to be planned again."""
        try:
            if operator.attrgetter(self.__qualname__)(sys.modules[self.__module__]) is self:
                return self.__qualname__
        except (AttributeError, KeyError):
            pass
        return OptimizedFunction, (self._function, self._request, self._on_exceeded)

    def __tf_tracing_type__(self, _: Any) -> Any:
        from tensorflow.core.function import trace_type

        return trace_type.Weakref(weakref.ref(self))

    def _of(self, function: Any) -> OptimizedFunction:
        """Another function, optimised as this one."""
        return OptimizedFunction(function, self._request, self._on_exceeded)

    def _clone(self, python_function: Any) -> OptimizedFunction:
        """As `tf.function`'s: `strategy.run` makes its own with it."""
        return self._of(self._function._clone(python_function))

    @property
    def python_function(self) -> Callable[..., Any]:
        """The Python function that is traced."""
        return self._function.python_function

    def experimental_get_compiler_ir(self, *_: Any, **__: Any) -> Any:
        """Raises UnsupportedGraph: XLA compiles no optimized function."""
        raise UnsupportedGraph(
            f"{self.__name__} is optimized by tfswap, and has no XLA form: {HIDES}. Ask the tf.function itself."
        )

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """The rewritten ConcreteFunction for these arguments or specs, as `tf.function`'s method of that name.

        It is planned for sizes up to those of the arguments, or up to larger ones where such a plan is there already.
        """
        concrete = self._trace(args, kwargs)
        arguments = self._stand_ins(concrete, args, kwargs)
        open_ = [t.name for t in arguments if not _has_size(t)]
        if open_ and concrete in self._made:
            return max(self._made[concrete], key=lambda made: made.plan.baseline_peak_bytes).function
        if open_:
            raise UnsupportedGraph(
                f"{self.__name__}: the arguments {', '.join(open_)} have open dimensions, and a plan needs "
                "sizes: call the function once with real tensors, or give specs with full shapes"
            )
        return self._optimised(concrete, arguments).function

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

    def _bind(self, concrete: Any, args: Any, kwargs: Any) -> Any:
        """The arguments by the names of the trace's parameters, as inspect.BoundArguments."""
        from tensorflow.python.eager.polymorphic_function import function_type_utils

        function = self._function
        full = function_type_utils.canonicalize_function_inputs(
            args, kwargs, function.function_type, function._default_values
        )
        return concrete.function_type.bind(*full.args, **full.kwargs)

    def _flat_inputs(self, concrete: Any, args: Any, kwargs: Any) -> list[Any]:
        return concrete.function_type.unpack_inputs(self._bind(concrete, args, kwargs))

    def _stand_ins(self, concrete: Any, args: Any, kwargs: Any) -> list[Any]:
        """Tensors without values for the arguments of a trace, of the shapes that these arguments or specs have."""
        import tensorflow as tf
        from tensorflow.core.function import trace_type

        traced = concrete.inputs[: len(concrete.inputs) - len(concrete.captured_inputs)]
        if all(map(_has_size, traced)) or not (args or kwargs):
            return traced
        specs = trace_type.InternalTracingContext(is_legacy_signature=True)
        bound = self._bind(concrete, args, kwargs).arguments
        names = [p.name for p in concrete.function_type._sorted_parameters]
        flat = [t for name in names for t in trace_type.from_value(bound[name], specs).flatten()]
        if len(flat) != len(traced):
            return traced
        with tf.Graph().as_default():
            return [
                tensor
                if _has_size(tensor)
                else tf.compat.v1.placeholder(tensor.dtype, tensor.shape.merge_with(given.shape), tensor.op.name)
                for tensor, given in zip(traced, flat, strict=True)
            ]

    def _call_traced(self, concrete: Any, inputs: Sequence[Any]) -> Any:
        """Run the function as it was traced: TensorFlow can differentiate it, and not the rewritten one."""
        self._warn_once(
            "a gradient tape watches this call from outside, so it runs as it was traced, without its memory limit. "
            "Take the gradients inside the function that is optimized; or, if none are wanted, call it outside of the "
            "tape or under tape.stop_recording()."
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
            refuse_rewriters()
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
            optimizer = Optimizer(
                graph,
                model,
                self._request.options,
                resident=resident,
                extra_margin_bytes=self._margin_bytes,
                locate=source_lines(concrete),
            )
            plan = self._request.choose(optimizer, device)
            function, audited = concrete, False
            if self._request.changes_nothing or plan.changes_nothing:
                break
            function, resident = self._prepare(optimizer, plan, concrete, inputs, device)
            audited = resident is not None
            if resident is None:
                break
            plan = dataclasses.replace(plan, planned_peak_bytes=optimizer.peak_bytes(plan, resident))
            limit = plan.limit_bytes
            if self._request.plan or limit is None or plan.planned_peak_bytes <= limit - self._margin_bytes:
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
        if (complaint := self._request.complaint(self.__name__, plan)) is not None:
            self._complain(complaint)
        report = optimizer.report(plan)
        log.info("tfswap: %s: %s", self.__name__, report.headline())
        static = all(_has_size(t) for t in concrete.inputs[: len(shapes)])
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

    def _run(self, made: _Optimised, inputs: Sequence[Any]) -> Any:
        function = made.function

        def call() -> Any:
            return function._call_flat(inputs, captured_inputs=function.captured_inputs)

        if self._request.changes_nothing or (made.plan.changes_nothing and made.plan.limit_bytes is None):
            return call()
        if made.audited or made.plan.changes_nothing:
            return self._watched(made, call)
        made.audited = True
        return self._watched(made, lambda: audited_call(function, inputs))

    def _crowded(self, made: _Optimised) -> bool:
        """Whether more has moved into the arena since the plan was made than the plan leaves room for."""
        limit = made.plan.limit_bytes
        if made.plan.changes_nothing or limit is None or self._request.plan or self._request.changes_nothing:
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
            f"{self.__name__} peaked at {format_bytes(peak_bytes)}, {format_bytes(excess_bytes)} over its "
            "limit: something else shares the device's memory, or a kernel took more than is known of it. The "
            "next call is planned again with that much more room."
        )
        with self._lock:
            self._margin_bytes += excess_bytes
            made.broken = True
        self._complain(message)

    def _warn_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            log.warning("tfswap: %s: %s", self.__name__, message)

    def _complain(self, message: str) -> None:
        """Raise or log, as `on_exceeded` says."""
        if self._on_exceeded == "raise":
            raise TfswapError(f"tfswap: {message}")
        log.warning("tfswap: %s", message)


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


def _has_size(tensor: Any) -> bool:
    return tensor.dtype.name == "resource" or tensor.shape.is_fully_defined()


def _is_static(entry: _Optimised) -> bool:
    return all(shape is None for shape in entry.shapes)


def optimize(
    function: Any = None,
    *,
    memory_limit: int | str | None = None,
    tactics: Sequence[str] = TACTICS,
    host_memory_limit: int | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
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
        tactics: what may be used, of ("swap", "recompute"); ordering is always on, and alone with ().
        host_memory_limit: the most host memory that swapped tensors may take; bytes or a size.
        plan: a plan made before, or the path of a saved one; applied instead of making one, under `memory_limit`, or
            under its own where that is None.
        mode: "optimize", or "analyze" to change nothing and only report, also on a limit that can't be met.
        on_exceeded: "warn" or "raise" when a step's measured peak passes its limit, or what a given plan takes does.

    Returns:
        An `OptimizedFunction`, or a decorator that makes one.

    Raises:
        TfswapError: an argument is malformed. At the first call of a signature also InfeasibleMemoryLimit,
            with `.floor_bytes`, before anything runs, and UnsupportedGraph.
    """
    one_of("on_exceeded", on_exceeded, ("warn", "raise"))
    request = check(memory_limit, tactics, host_memory_limit, plan, mode)

    def decorate(target: Any) -> OptimizedFunction:
        return OptimizedFunction(_as_tf_function(target), request, on_exceeded)

    return decorate if function is None else decorate(function)


def _as_tf_function(target: Any) -> Any:
    """The `tf.function` to optimise. Raises TfswapError, saying what to give, for what is none and makes none."""
    tf = machine.require_tensorflow()
    from tensorflow.python.eager.polymorphic_function import polymorphic_function

    name = getattr(target, "__name__", repr(target))
    if isinstance(target, OptimizedFunction):
        raise TfswapError(f"{name} is optimized already: call tfswap.optimize on the tf.function itself")
    if isinstance(target, tf.types.experimental.ConcreteFunction):
        raise TfswapError(
            f"{target.name} is a ConcreteFunction, one trace of a tf.function: give the tf.function itself, or the "
            "Python function, and each of its traces is optimized at its first call"
        )
    if not isinstance(target, tf.types.experimental.PolymorphicFunction):
        if not callable(target) or isinstance(target, type):
            raise TfswapError(f"optimize needs a tf.function or a Python function, not {target!r}")
        target = tf.function(target)
    if getattr(target, "_jit_compile", None):
        raise UnsupportedGraph(f"{name} has jit_compile=True: {HIDES}. Remove jit_compile=True and decorate again.")
    polymorphic_function.Function.register(OptimizedFunction)
    return target
