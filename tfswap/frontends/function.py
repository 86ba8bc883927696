"""A `tf.function` that keeps its device memory under a byte limit: what `tfswap.optimize` returns.

Each trace of the function is planned and rewritten once, at its first call, and called as before from then
on: the rewritten ConcreteFunction has the trace's own signature and captures. What happens to a trace is in
`runtime/step.py`.

A call that a tape watches is planned with its gradients (`runtime/outer_gradient_trace.py`), or, where the tape may
take gradients of higher order, or more than once, as two passes (`runtime/separate_passes.py`). Not handled: forward
mode, and tapes inside of another function. There the function runs as it was traced, with a warning, and there is no
report.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar, overload

from tfswap.compiler.request import Request
from tfswap.compiler.rival_rewriters import HIDES, refuse_compiled_caller
from tfswap.errors import UnsupportedGraph
from tfswap.frontends.changeable_limit import ChangeableLimit
from tfswap.frontends.derived_functions import DerivedFunctions
from tfswap.frontends.latest_step import LatestStep
from tfswap.frontends.rewritten_functions import RewrittenFunctions
from tfswap.frontends.scope import scope_of_first_trace
from tfswap.frontends.tracing import (
    FIRST_ORDER,
    bind_call,
    is_plain,
    name_of,
    plain_key,
    runs_plainly,
    stand_ins,
    watched,
)
from tfswap.native.forks import note_step, refuse_in_late_child
from tfswap.plan.plan import Plan
from tfswap.report.report import Report
from tfswap.runtime.batches import copies_ahead
from tfswap.runtime.captures import with_placeholders
from tfswap.runtime.joint_trace import FORWARD_MODE, WITHIN, Joint, in_forward_mode, joint_of
from tfswap.runtime.program import Program
from tfswap.runtime.separate_passes import SeparatePasses
from tfswap.runtime.shapes import Shapes, shapes_of
from tfswap.runtime.step import Step
from tfswap.runtime.step_cache import StepCache
from tfswap.runtime.trace import Trace

if TYPE_CHECKING:
    from tfswap.ops.runtime import StepStats

log = logging.getLogger("tfswap")

P = ParamSpec("P")
Rest = ParamSpec("Rest")
R = TypeVar("R")
"""Parameters of a function, parameters of a method besides its object, and the result."""

MAX_PLAIN = 1024
"""The most calls that are remembered by their `plain_key`. A trace with open dimensions has a key for each size."""


class OptimizedFunction(ChangeableLimit[P, R]):
    """A `tf.function` under a memory limit; called, and otherwise used, as the function that it wraps.

    It passes for a `tf.function`, in `isinstance` and by its attributes, so that TensorFlow can save an object that
    holds it. What is saved is the function as it was traced.

    Steps of all optimized functions of a process run one at a time: the limit is of the allocator's peak, and two
    concurrent steps would need the memory of both.

    Args:
        function: the `tf.function`.
        request: what to do to it.
        on_exceeded: "warn" or "raise".
        program: the program that it is a part of; by default a new one.
        name: its name in messages; by default the function's.
        trace_of: makes the trace of a step from a ConcreteFunction.
        first_shapes: as of StepCache.
        refuses_outer_gradients: why a tape outside can't take its gradients; "" where it can.
    """

    __name__: str
    __qualname__: str

    # AutoGraph does not convert this object when it traces a caller. (The wrapped function is converted as usual.)
    autograph_info__: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        function: Any,
        request: Request,
        on_exceeded: str,
        program: Program | None = None,
        *,
        name: str | None = None,
        trace_of: Callable[[Any], Trace] | None = None,
        first_shapes: Callable[[int], Shapes] | None = None,
        refuses_outer_gradients: str = "",
    ):
        self._function = function
        self._request = request
        self._on_exceeded = on_exceeded
        self._program = program or Program()
        self._program.add(self)
        self._lock = threading.RLock()
        # By plain_key, of calls with nothing but tensors: the trace, and the step, where it is always the same.
        self._plain: dict[Any, tuple[Any, Step | None]] = {}
        self._derived = DerivedFunctions()
        self._refuses_outer_gradients = refuses_outer_gradients
        functools.update_wrapper(self, function.python_function, updated=())
        self.__name__ = name or name_of(function)
        self._latest = LatestStep(self.__name__)
        self._steps = StepCache(
            self.__name__,
            request,
            on_exceeded,
            self._program,
            self._lock,
            OptimizedFunction,
            trace_of or functools.partial(Trace, self.__name__),
            first_shapes,
        )
        self._rewritten = RewrittenFunctions(self.__name__, self._steps)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] object's is writable
        # isinstance() uses this besides the type: TensorFlow saves, tracks and distributes only its own functions.
        from tensorflow.python.eager.polymorphic_function import polymorphic_function

        return polymorphic_function.Function

    def _run(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._function._run_functions_eagerly:
            self._latest.warn_once(
                "tf.config.run_functions_eagerly is on, so it runs eagerly, without its memory limit."
            )
            return self._function(*args, **kwargs)
        key = plain_key(args, kwargs)
        if (known := self._plain.get(key)) is None:
            concrete = self._trace(args, kwargs)
            if not self.batches_ahead and concrete not in self._steps:
                self.batches_ahead = copies_ahead((args, kwargs))
            inputs = concrete.function_type.unpack_inputs(bind_call(self._function, concrete, args, kwargs))
            return self.call_trace(concrete, inputs, key if is_plain(concrete, args, inputs) else None)
        concrete, step = known
        inputs = list(args)
        with self._lock:
            if step is None:
                step = self._step(concrete, inputs)
            else:
                self._latest.note(step)
            return step(inputs, plain=True)

    def call_trace(self, concrete: Any, inputs: Sequence[Any], key: Any = None) -> Any:
        """Run a trace with these arguments; from then on such calls are known by `key`, where that is not None."""
        import tensorflow as tf

        refuse_in_late_child(self.__name__)
        eager = tf.executing_eagerly()
        if not eager:
            refuse_compiled_caller(self.__name__)
        if (gradients := watched(concrete, inputs)) is not None:
            joint = self._joint(concrete, inputs, gradients)
            if isinstance(joint, SeparatePasses):
                with self._lock:
                    return joint.call(inputs, self._run_pass, self.call_trace, self._latest.note_unplanned)
            if isinstance(joint, str):
                return self._call_traced(concrete, inputs, joint)
            with self._lock:
                return self._step(joint if joint.gradients else concrete, inputs)(inputs, plain=True)
        with self._lock if eager else contextlib.nullcontext():
            step = self._step(concrete, inputs)
            if key is not None:
                if len(self._plain) >= MAX_PLAIN:
                    self._plain.clear()
                always = step.covers_all or step.shapes == shapes_of(inputs)
                self._plain[key] = concrete, step if always else None
            return step(inputs, plain=runs_plainly())

    def _joint(self, concrete: Any, inputs: Sequence[Any], gradients: int) -> Joint | SeparatePasses | str:
        """A trace with its gradients, for a tape outside that takes gradients once; its passes, for tapes that may take
        more; or why there is neither.
        """
        import tensorflow as tf

        if self._refuses_outer_gradients:
            raise UnsupportedGraph(f"{self.__name__}: {self._refuses_outer_gradients}")
        if not tf.executing_eagerly():
            return WITHIN
        arguments = [*inputs, *with_placeholders(concrete)]
        if in_forward_mode(arguments):
            return FORWARD_MODE
        if gradients != FIRST_ORDER or self._steps.is_pass(concrete):
            return self._steps.separate_passes(concrete, arguments)
        if concrete not in self._steps.joint_of:
            self._steps.joint_of[concrete] = joint_of(concrete, arguments)
        return self._steps.joint_of[concrete]

    @property
    def traced(self) -> Any:
        """The `tf.function` that this was made from."""
        return self._function

    @property
    def batches_ahead(self) -> Mapping[str, int]:
        """By device, how many batches the data pipeline makes on it during a step. Plans leave room for them."""
        return self._steps.batches_ahead

    @batches_ahead.setter
    def batches_ahead(self, counts: Mapping[str, int]) -> None:
        self._steps.batches_ahead = counts

    @property
    def plans(self) -> int:
        """The number of plans of all traces."""
        return self._steps.plans

    def granted_bytes(self, device: str) -> int:
        """The highest limit of all plans on a device; 0 where there is none."""
        return self._steps.granted_bytes(device)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> OptimizedFunction[P, R]: ...
    @overload
    def __get__(
        self: OptimizedFunction[Concatenate[Any, Rest], R], instance: object, owner: Any = None
    ) -> OptimizedFunction[Rest, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        with self._lock:
            alike = functools.partial(OptimizedFunction, request=self._request, on_exceeded=self._on_exceeded)
            return self._derived.bound_to(instance, self._function, alike) or types.MethodType(self, instance)

    if TYPE_CHECKING:
        # By name, so that type checkers reject misspelt ones.
        experimental_get_tracing_count: Callable[[], int]
        function_spec: Any
        function_type: Any
        get_initialization_function: Callable[..., Any]
        input_signature: Any
        name: str
        pretty_printed_concrete_signatures: Callable[..., str]
    else:

        def __getattr__(self, name: str) -> Any:
            # Other attributes of a tf.function: signature, tracing count, and those that TensorFlow saves it by.
            if name.startswith("__") or "_function" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self._function, name)

    def __repr__(self) -> str:
        return f"<tfswap.OptimizedFunction {self.__name__}, memory_limit={self._request.memory_limit!r}>"

    def __reduce__(self) -> Any:
        """Pickled and copied by name, where its module has it by that name; else rebuilt without its plans."""
        try:
            if operator.attrgetter(self.__qualname__)(sys.modules[self.__module__]) is self:
                return self.__qualname__
        except (AttributeError, KeyError):
            pass
        return OptimizedFunction, (self._function._clone(None), self._request, self._on_exceeded)

    def __tf_tracing_type__(self, _: Any) -> Any:
        from tensorflow.core.function import trace_type

        return trace_type.Weakref(weakref.ref(self))

    def same_program(self, function: Any) -> OptimizedFunction:
        """Another `tf.function` of the same program, optimised as this one."""
        return OptimizedFunction(function, self._request, self._on_exceeded, self._program)

    def _clone(self, python_function: Any) -> OptimizedFunction:
        """As `tf.function._clone`, whose result `strategy.run` calls. `report` finds the clone's steps too."""
        made = self.same_program(self._function._clone(python_function))
        made._latest.report_to(self._latest)
        self._derived.add(made)
        return made

    @property
    def python_function(self) -> Callable[..., Any]:
        """The Python function that is traced."""
        return self._function.python_function

    def experimental_get_compiler_ir(self, *_: Any, **__: Any) -> Any:
        """Raises UnsupportedGraph: XLA compiles no optimized function."""
        raise UnsupportedGraph(
            f"{self.__name__} is optimized by tfswap, and has no XLA form: {HIDES}. Call it on the tf.function itself."
        )

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """The rewritten ConcreteFunction for these arguments or specs, as `tf.function`'s method of that name.

        It has a plan for sizes up to those of the arguments, or up to larger ones where such a plan exists. Where the
        trace leaves sizes open, it accepts all sizes; those without a plan are planned for at their first call.

        It keeps the limit that there is now. Under a file with a limit, each call has that which the file has then.
        """
        refuse_in_late_child(self.__name__)
        concrete = self._trace(args, kwargs)
        arguments = stand_ins(self._function, concrete, args, kwargs)
        call = functools.partial(self._under_file, self.call_trace)
        return self._rewritten.of(concrete, arguments, self._step, call, follows=self.limit_file is not None)

    def _get_concrete_function_garbage_collected(self, *args: Any, **kwargs: Any) -> Any:
        """The method that TensorFlow calls to save a `tf.function` as a signature."""
        return self.get_concrete_function(*args, **kwargs)

    def report(self, device: str | None = None) -> Report:
        """The report of the latest signature, on all of the step's devices (`Report.devices`) or on one ("GPU:1").

        Raises:
            TfswapError: there has been no call yet, the latest call ran as it was traced, the step is not on that
                device, or (VerificationError) TensorFlow ran another graph than the planned one, inside of a function
                that calls this one.
        """
        return self._latest.require().report(device)

    @property
    def latest_report(self) -> Report | None:
        """As `report`, without the check of what TensorFlow ran; None where the latest call had no plan."""
        planned = self._latest.planned
        return None if planned is None else planned.report(None)

    def plan(self, device: str | None = None) -> Plan:
        """The plan of the latest signature; of several devices, on one ("GPU:1"; the first). Errors as of `report`."""
        return self._latest.require().parts.on(device).plan

    def stats(self) -> StepStats:
        """The swaps of the latest step: bytes, copies, seconds waited. Raises as `report`.

        The step's own kernels count them, so steps inside of another `tf.function` are included. For the whole process:
        `tfswap.ops.stats()`.
        """
        return self._latest.require().stats()

    def _trace(self, args: Any, kwargs: Any) -> Any:
        # As get_concrete_function(), which would pass on the graph's ownership in every call.
        with scope_of_first_trace(self._function, self._request.options):
            concrete = self._function._get_concrete_function_garbage_collected(*args, **kwargs)
        if concrete not in self._steps:
            concrete._garbage_collector.release()
            note_step(concrete, self.__name__)
        return concrete

    def _call_traced(self, concrete: Any, inputs: Sequence[Any], why: str) -> Any:
        """Run the function as it was traced: TensorFlow can differentiate it, and not the rewritten one."""
        self._latest.note_unplanned(why)
        return concrete._call_flat(inputs, captured_inputs=concrete.captured_inputs)

    def _run_pass(self, concrete: Any, inputs: Sequence[Any]) -> Any:
        """Run a trace that no tape watches."""
        return self._step(concrete, inputs)(inputs, plain=True)

    def _step(self, concrete: Any, inputs: Sequence[Any]) -> Step:
        """The planned step for these arguments."""
        step = self._steps.step_for(concrete, inputs)
        self._latest.note(step)
        return step
