"""`tfswap.optimize`: a `tf.function` that keeps its device memory under a byte limit.

Each trace of the function is planned and rewritten once, at its first call, and called as before from then
on: the rewritten ConcreteFunction has the trace's own signature and captures. What happens to a trace is in
`runtime/step.py`.

A call that a tape watches is planned with its gradients (`runtime/outer_gradient_trace.py`). Not handled: tapes that
may ask for more than first-order gradients, once. Under those the function runs as it was traced, with a warning, and
there is no report of the call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
import os
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, TypedDict, TypeVar, overload

from tfswap.compiler.options import Options
from tfswap.compiler.policy import Policy
from tfswap.compiler.preconditions import UnknownSizes
from tfswap.compiler.request import Precision, Request, check, one_of
from tfswap.compiler.rival_rewriters import HIDES, refuse_compiled_caller, refuse_rewriters
from tfswap.device import machine
from tfswap.errors import InfeasibleMemoryLimit, InvalidModel, TfswapError, UnsupportedGraph
from tfswap.kernels.profile import Profile
from tfswap.native.forks import note_step, refuse_in_late_child
from tfswap.plan.plan import Plan
from tfswap.planner.planner import TACTICS
from tfswap.report.report import Report
from tfswap.runtime.captures import without_asking
from tfswap.runtime.dynamic_sizes import ToldSizes, find_told_sizes, follow_from_arguments, have_values
from tfswap.runtime.joint_trace import FORWARD_MODE, SEVERAL, WITHIN, Joint, in_forward_mode, joint_of
from tfswap.runtime.open_function import has_size, open_function
from tfswap.runtime.outer_gradient_trace import OuterGradientTrace
from tfswap.runtime.program import Program
from tfswap.runtime.step import Step
from tfswap.runtime.step_compiler import Shapes
from tfswap.runtime.trace import Trace
from tfswap.support.sizes import is_share

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tfswap.ops.runtime import StepStats

log = logging.getLogger("tfswap")

P = ParamSpec("P")
Rest = ParamSpec("Rest")
R = TypeVar("R")
"""What a function takes, what a method takes besides its object, and what it returns."""

MAX_PLAIN = 1024
"""So many kinds of calls are remembered with their traces. One of open dimensions has a kind for each size."""
GROWTH = 1.5
"""Sizes that keep growing are planned for with this much room: a tenfold range takes half a dozen plans."""
SCATTER = 4
"""Counts that follow from what batches hold are planned for with so many times the room that they have differed by, and
no more than GROWTH: near a limit half as much again has no plan, where the next batch differs by a hundredth."""


FOLLOWS = "It follows from what the arguments hold. Such sizes are computed before each call, but not "
UNTOLD_OUTSIDE = FOLLOWS + "for a call whose gradients are taken outside of the function: take them inside."
FROM_PYTHON = "Call the optimized function from Python, with the arguments themselves"
UNTOLD_WITHIN = FOLLOWS + (
    "where the arguments have no values: inside of another tf.function, or traced for specs. "
    f"{FROM_PYTHON}, and what is around it before or after."
)
OPEN_WITHIN = (
    "Arguments have open sizes here, as sparse tensors have inside of another tf.function, or where a step is traced "
    f"for specs. {FROM_PYTHON}, or give the function around it an input_signature of full shapes; "
    "batches of Keras' fit have one size with drop_remainder=True."
)

RECURS = 16
"""A size that is called so often is planned for by itself, where the plan that covers it moves tensors for larger ones:
what fits stays. It takes about as long as the first plan took, and so many steps win that back."""
MAX_OWN = 8
"""So many sizes of one trace have plans of their own. Each holds the step's constants once more."""


class OptimizedFunction(Generic[P, R]):
    """A `tf.function` under a memory limit; called, and otherwise used, as the function that it wraps.

    TensorFlow takes it for that function, and what it asks of one it finds here: an object that holds an
    OptimizedFunction can be saved, and what is saved is the function as it was traced.

    Steps of all optimized functions take turns: the limit is the allocator's, and two would take as much as both.

    Attributes:
        batches_beside: so many batches as a call is given are made in the device's memory while the step runs, by the
            data pipeline that feeds it; plans leave room for them.
    """

    __name__: str
    __qualname__: str

    # AutoGraph, tracing a function that calls this one, takes it as it is. (What it wraps is converted as ever.)
    autograph_info__: ClassVar[dict[str, Any]] = {}

    def __init__(self, function: Any, request: Request, on_exceeded: str, program: Program | None = None):
        self._function = function
        self._request = request
        self._on_exceeded = on_exceeded
        self._program = program or Program()
        self._program.add(self)
        self._told: set[str] = set()
        self._lock = threading.RLock()
        self._made: dict[Any, list[Step]] = {}
        self._joints: dict[Any, Joint | str] = {}
        self._told_sizes: dict[Any, ToldSizes] = {}  # by trace that shapes alone do not tell the sizes of
        self._latest: Step | None = None
        self._unplanned: str | None = None  # why the latest call had no plan
        self._calls: Counter[tuple[Any, Shapes]] = Counter()  # of sizes that a plan for larger ones covers
        self._open: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()  # by what they look like
        # By _plain_key, of calls with nothing but tensors: the trace, and the step, where it is always the same.
        self._plain: dict[Any, tuple[Any, Step | None]] = {}
        self._cloned_from: weakref.ref[OptimizedFunction] | None = None
        self._bound: weakref.WeakKeyDictionary[Any, OptimizedFunction] = weakref.WeakKeyDictionary()
        self.batches_beside = 0
        functools.update_wrapper(self, function.python_function, updated=())
        self.__name__ = name_of(function)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] object's is writable
        # What isinstance() goes by besides the type: TensorFlow saves, tracks and distributes only its own functions.
        from tensorflow.python.eager.polymorphic_function import polymorphic_function

        return polymorphic_function.Function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        refuse_in_late_child(self.__name__)
        if self._function._run_functions_eagerly:
            self._warn_once("tf.config.run_functions_eagerly is on, so it runs eagerly, without its memory limit.")
            return self._function(*args, **kwargs)
        key = _plain_key(args, kwargs)
        if (known := self._plain.get(key)) is None:
            concrete = self._trace(args, kwargs)
            inputs = concrete.function_type.unpack_inputs(bind_call(self._function, concrete, args, kwargs))
            return self._run(concrete, inputs, key if _is_plain(concrete, args, inputs) else None)
        concrete, step = known
        inputs = list(args)
        with self._lock:
            if step is None:
                step = self._step(concrete, inputs)
            else:
                self._note(step)
            return step(inputs, plain=True)

    def _run(self, concrete: Any, inputs: Sequence[Any], key: Any = None) -> Any:
        """Run a trace with these arguments; from then on such calls are known by `key`, where that is not None."""
        import tensorflow as tf

        refuse_in_late_child(self.__name__)
        at_once = tf.executing_eagerly()
        if not at_once:
            refuse_compiled_caller(self.__name__)
        if (watched := _watched(concrete, inputs)) is not None:
            joint = self._joint(concrete, inputs, watched)
            if isinstance(joint, str):
                return self._call_traced(concrete, inputs, joint)
            with self._lock:
                return self._step(joint if joint.gradients else concrete, inputs)(inputs, plain=True)
        with self._lock if at_once else contextlib.nullcontext():
            step = self._step(concrete, inputs)
            if key is not None:
                if len(self._plain) >= MAX_PLAIN:
                    self._plain.clear()
                self._plain[key] = concrete, step if step.is_made_for(_shapes(inputs)) else None
            return step(inputs, plain=_runs_plainly())

    def _joint(self, concrete: Any, inputs: Sequence[Any], watched: int) -> Joint | str:
        """A trace with its gradients, for a tape that watches these arguments and asks once; or why there is none."""
        import tensorflow as tf

        if not tf.executing_eagerly():
            return WITHIN
        arguments = [*inputs, *without_asking(concrete)]
        if in_forward_mode(arguments):
            return FORWARD_MODE
        if watched != FIRST_ORDER:
            return SEVERAL
        if concrete not in self._joints:
            self._joints[concrete] = joint_of(concrete, arguments)
        return self._joints[concrete]

    @property
    def traced(self) -> Any:
        """The `tf.function` that this was made from."""
        return self._function

    @property
    def memory_limit(self) -> int | str | None:
        """The limit as it was given."""
        return self._request.memory_limit

    @property
    def plans(self) -> int:
        """How many plans there are, of all traces."""
        return sum(step.planned for steps in self._made.values() for step in steps)

    @property
    def granted_bytes(self) -> int:
        """The highest limit of all plans; 0 where there is none."""
        made = [step for steps in tuple(self._made.values()) for step in tuple(steps)]  # perhaps of another thread's
        return max((step.limit_bytes or 0 for step in made), default=0)

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
            if instance not in self._bound:
                bound = self._function.__get__(instance, owner)
                if not hasattr(bound, "get_concrete_function"):  # a composite tensor's: it is an argument like others
                    return types.MethodType(self, instance)
                self._bound[instance] = self._of(bound)
            return self._bound[instance]

    if TYPE_CHECKING:
        # By name, so that type checkers tell others from misspelt ones.
        experimental_get_tracing_count: Callable[[], int]
        function_spec: Any
        function_type: Any
        get_initialization_function: Callable[..., Any]
        input_signature: Any
        name: str
        pretty_printed_concrete_signatures: Callable[..., str]
    else:

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
        return OptimizedFunction, (self._function._clone(None), self._request, self._on_exceeded)

    def __tf_tracing_type__(self, _: Any) -> Any:
        from tensorflow.core.function import trace_type

        return trace_type.Weakref(weakref.ref(self))

    def _of(self, function: Any) -> OptimizedFunction:
        """Another function, optimised as this one."""
        return OptimizedFunction(function, self._request, self._on_exceeded)

    def beside(self, function: Any) -> OptimizedFunction:
        """Another `tf.function` of the same program, optimised as this one."""
        return OptimizedFunction(function, self._request, self._on_exceeded, self._program)

    def _clone(self, python_function: Any) -> OptimizedFunction:
        """As `tf.function`'s: `strategy.run` runs one. What it plans is reported here too."""
        made = self.beside(self._function._clone(python_function))
        made._cloned_from = weakref.ref(self)
        return made

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
        Where the trace leaves sizes open it takes all of them, and those that it has no plan for are planned for when
        it is called with them.
        """
        refuse_in_late_child(self.__name__)
        concrete = self._trace(args, kwargs)
        arguments = stand_ins(self._function, concrete, args, kwargs)
        if all(map(has_size, arguments)):
            base = self._step(concrete, arguments).function
        elif planned := [step for step in self._made.get(concrete, ()) if step.planned]:
            base = max(planned, key=lambda step: step.elements).function
        else:
            sizes = self._planned_for(concrete)
            base = concrete if sizes is None else self._step(concrete, sizes).function
        if all(map(has_size, concrete.inputs)):
            return base
        made = self._open.get(base)
        if made is None:
            made = self._open[base] = open_function(
                self.__name__, base, concrete, functools.partial(self._run, concrete)
            )
        return made

    def _planned_for(self, concrete: Any) -> list[Any] | None:
        """Tensors without values of the largest sizes that a trace with the same arguments is planned for: TensorFlow
        traces anew what it saves. None where there is no such plan.
        """
        signature = concrete.structured_input_signature
        alike = [made for made in self._made if not isinstance(made, Joint)]
        alike = [made for made in alike if made.structured_input_signature == signature]
        planned = [step for made in alike for step in self._made[made] if step.planned]
        if not planned:
            return None
        shapes = max(planned, key=lambda step: step.elements).shapes
        inputs = concrete.inputs[: len(concrete.inputs) - len(concrete._captured_inputs)]
        return [t if shape is None else sized_like(t, shape) for t, shape in zip(inputs, shapes, strict=False)]

    def _get_concrete_function_garbage_collected(self, *args: Any, **kwargs: Any) -> Any:
        """What TensorFlow asks a `tf.function` for that it is to save as a signature."""
        return self.get_concrete_function(*args, **kwargs)

    def report(self) -> Report:
        """The report of the latest signature.

        Raises:
            TfswapError: there has been no call yet, or the latest ran as it was traced; or (VerificationError)
                TensorFlow has run something else than what was planned, inside of a function that calls this one.
        """
        return self._require_latest().report

    @property
    def latest_report(self) -> Report | None:
        """As `report`, without asking what TensorFlow has run; None where the latest call had no plan."""
        return None if self._latest is None or self._unplanned is not None else self._latest.report

    def plan(self) -> Plan:
        """The plan of the latest signature. Raises as `report`."""
        return self._require_latest().plan

    def stats(self) -> StepStats:
        """What swapping did in the latest step. Raises as `report`.

        It is counted by the step itself, so also of steps that run inside of another `tf.function`. Of the process as a
        whole: `tfswap.ops.stats()`.
        """
        return self._require_latest().stats()

    def _require_latest(self) -> Step:
        if self._unplanned is not None:
            raise TfswapError(f"{self.__name__}: there is no plan of the latest call: {self._unplanned}")
        if self._latest is None:
            raise TfswapError(
                f"{self.__name__} has not been planned yet: call it once, or get_concrete_function() it for known sizes"
            )
        self._latest.audit()
        return self._latest

    def _trace(self, args: Any, kwargs: Any) -> Any:
        # get_concrete_function() without handing the graph's ownership over on every call.
        concrete = self._function._get_concrete_function_garbage_collected(*args, **kwargs)
        if concrete not in self._made:
            concrete._garbage_collector.release()
            note_step(concrete, self.__name__)
        return concrete

    def _call_traced(self, concrete: Any, inputs: Sequence[Any], why: str) -> Any:
        """Run the function as it was traced: TensorFlow can differentiate it, and not the rewritten one."""
        self._note_unplanned(why)
        self._warn_once(why)
        return concrete._call_flat(inputs, captured_inputs=concrete.captured_inputs)

    def _step(self, concrete: Any, inputs: Sequence[Any]) -> Step:
        """The planned step for these arguments."""
        steps = self._made.get(concrete, ())
        if len(steps) == 1 and steps[0].covers_all:
            step = steps[0]
        else:
            shapes = self._sizes(concrete, inputs)
            with self._lock:
                covering = [s for s in self._made.get(concrete, ()) if s.covers(shapes)]
                if covering:
                    step = min(covering, key=lambda s: s.elements)
                    step.prepare(inputs)
                    if step.plan.moves and step.shapes != shapes:
                        step = self._own(concrete, shapes, inputs, step)
                else:
                    step = self._planned(concrete, shapes, inputs)
        self._note(step)
        return step

    def _planned(self, concrete: Any, shapes: Shapes, inputs: Sequence[Any]) -> Step:
        """A new step for these arguments; for larger ones too where they keep growing and the limit allows it."""
        refuse_rewriters()
        made = self._made.setdefault(concrete, [])
        if all(has_size(t) for t in concrete.inputs[: len(inputs)]):
            shapes = (*(None,) * len(inputs), *shapes[len(inputs) :])
        planned = [step.shapes for step in made if step.planned and step.instead_of is None]
        larger = grown(shapes, planned, len(inputs))
        if larger != shapes:
            step = self._new_step(concrete, larger)
            with contextlib.suppress(InfeasibleMemoryLimit, InvalidModel, UnsupportedGraph):
                step.prepare(inputs)
                made.append(step)
                return step
        step = self._new_step(concrete, shapes)
        made.append(step)
        try:
            step.prepare(inputs)
        except InfeasibleMemoryLimit:
            # Perhaps since some sizes are known by a bound only.
            if isinstance(concrete, Joint) or not have_values(inputs) or not self._tell_more(concrete, inputs):
                raise
            made.remove(step)
            return self._step(concrete, inputs)
        except UnsupportedGraph as error:
            made.remove(step)
            untold = UNTOLD_OUTSIDE if isinstance(concrete, Joint) else "" if have_values(inputs) else UNTOLD_WITHIN
            if untold and isinstance(error, UnknownSizes):
                if untold is UNTOLD_WITHIN and not all(map(has_size, inputs)):
                    untold = OPEN_WITHIN
                elif not isinstance(concrete, Joint) and not follow_from_arguments(concrete, inputs):
                    raise
                raise UnknownSizes(error.what, untold) from None
            if untold:
                raise
            if not self._tell_more(concrete, inputs):
                raise
            return self._step(concrete, inputs)
        return step

    def _tell_more(self, concrete: Any, inputs: Sequence[Any]) -> bool:
        """Let these arguments tell more of the trace's sizes; whether they do."""
        known = self._told_sizes.get(concrete)  # of smaller arguments, which left fewer sizes open
        told = find_told_sizes(concrete, inputs, self._under_limit, known)
        if told is not None:
            self._told_sizes[concrete] = told
        return told is not None

    def _under_limit(self, function: Any) -> Any:
        """What tells sizes of this one's, kept to its limit too, as far as that is known before they are."""
        limit = self._request.memory_limit
        if limit is None or is_share(limit):
            limit = self.granted_bytes or machine.device_limit_bytes(machine.current_device()[0])
        if limit is None or self._request.changes_nothing:
            return function
        tactics = tuple(t for t in self._request.options.tactics if t != "swap")  # host memory is the step's
        return OptimizedFunction(function, Request(limit, Options(tactics), None, "optimize"), self._on_exceeded)

    def _sizes(self, concrete: Any, inputs: Sequence[Any]) -> Shapes:
        """The shapes of a call's arguments, and what they tell besides of the trace's sizes."""
        told = self._told_sizes.get(concrete)
        shapes = _shapes(inputs)
        return shapes if told is None or not have_values(inputs) else (*shapes, *told.sizes(concrete, inputs))

    def _own(self, concrete: Any, shapes: Shapes, inputs: Sequence[Any], covering: Step) -> Step:
        """The step for these arguments: `covering`, or, where they recur, one that keeps what has room at their size.

        Which tensors could stay is not decided as the step runs: in an arena, what stays changes where everything else
        lies, and only a plan that was simulated with it is known to keep the limit.
        """
        import tensorflow as tf

        if self._request.plan is not None or self._request.changes_nothing or not tf.executing_eagerly():
            return covering
        if len(self._calls) >= MAX_PLAIN:
            self._calls.clear()
        self._calls[concrete, shapes] += 1
        made = self._made[concrete]
        if self._calls[concrete, shapes] != RECURS or sum(s.instead_of is not None for s in made) >= MAX_OWN:
            return covering
        own = self._new_step(concrete, shapes, covering.instead_of or covering)
        with contextlib.suppress(InfeasibleMemoryLimit):
            own.prepare(inputs)
            # What it holds besides, its constants, must not cost the others their limit.
            if own.plan.moves < covering.plan.moves and covering.fits():
                made.append(own)
                return own
        return covering

    def _note_unplanned(self, why: str) -> None:
        """Take note that the latest call had no plan."""
        self._unplanned = why
        original = self._cloned_from and self._cloned_from()
        if original is not None:
            original._note_unplanned(why)

    def _note(self, step: Step) -> None:
        """Make `step` the one that is reported."""
        self._latest, self._unplanned = step, None
        original = self._cloned_from and self._cloned_from()
        if original is not None:
            original._note(step)

    def _new_step(self, concrete: Any, shapes: Shapes, instead_of: Step | None = None) -> Step:
        granted = self._program.granted_bytes
        first = not any(self._made.values())
        given = (self._on_exceeded, self._program, self.batches_beside, instead_of, granted, first)
        if isinstance(concrete, Joint):
            return Step(OuterGradientTrace(self.__name__, concrete, self._lock), shapes, self._request, *given)
        # A share is of what training takes, where that is known: of the forward pass alone it would be far too little.
        limits = [step.limit_bytes for step in self._made.get(self._joints.get(concrete), ())]
        most = max((limit for limit in limits if limit is not None), default=self._request.memory_limit)
        request = dataclasses.replace(self._request, memory_limit=most)
        return Step(self._trace_of(concrete), shapes, request, *given, self._told_sizes.get(concrete))

    def _trace_of(self, concrete: Any) -> Trace:
        """A trace whose gradients nobody takes outside."""
        return Trace(self.__name__, concrete)

    def _warn_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            log.warning("tfswap: %s: %s", self.__name__, message)


def bind_call(function: Any, concrete: Any, args: Any, kwargs: Any) -> Any:
    """The arguments of a call by the names of the trace's parameters, as inspect.BoundArguments."""
    from tensorflow.python.eager.polymorphic_function import function_type_utils

    full = function_type_utils.canonicalize_function_inputs(
        args, kwargs, function.function_type, function._default_values
    )
    return concrete.function_type.bind(*full.args, **full.kwargs)


@functools.cache
def _internals() -> tuple[Any, Any, Any]:
    """What `_plain_key` asks TensorFlow for, without an import in every call."""
    from tensorflow.python.framework import ops
    from tensorflow.python.saved_model import save_context

    return ops.EagerTensor, ops.get_default_graph, save_context.in_save_context


@functools.cache
def _watchers() -> tuple[Any, Any, Any]:
    """The same of `_runs_plainly`."""
    from tensorflow.python.eager import cancellation, context, record

    return context.context, record.could_possibly_record, cancellation.context


def _runs_plainly() -> bool:
    """Whether a call runs at once, and neither a tape nor who may cancel it has a part in it."""
    context, could_record, cancellation = _watchers()
    return context().executing_eagerly() and not could_record() and cancellation() is None


def _plain_key(args: Any, kwargs: Any) -> Any:
    """Tells apart the calls of a `tf.function` that may have traces of their own; None for all but the plainest.

    What TensorFlow goes by besides the arguments (function_context.py) is always the same where a call runs plainly,
    outside of a distribution strategy, and not to be saved. So one look-up finds the trace, and binding the arguments
    would give them back as they are. All of this takes as long as the rest of a call, and more.
    """
    eager_tensor, default_graph, in_save_context = _internals()
    if kwargs or not _runs_plainly() or default_graph()._distribution_strategy_stack:
        return None
    key: list[Any] = []
    for value in args:
        if type(value) is not eager_tensor:
            return None
        dtype = value._datatype_enum()
        if dtype in HANDLE_TYPES:
            return None
        key += (dtype, value._shape_tuple())
    return None if in_save_context() else tuple(key)


HANDLE_TYPES = (20, 21)
"""DT_RESOURCE and DT_VARIANT, as types.proto numbers them: what they refer to is part of their type."""


def _is_plain(concrete: Any, args: Any, inputs: Sequence[Any]) -> bool:
    """Whether a trace depends on nothing but its arguments, and takes them as they are."""
    return (
        len(args) == len(inputs)
        and all(a is i for a, i in zip(args, inputs, strict=True))
        and not concrete.graph.function_captures.by_ref_internal
    )


def stand_ins(function: Any, concrete: Any, args: Any, kwargs: Any) -> list[Any]:
    """Tensors without values for the arguments of a trace, of the shapes that these arguments or specs have."""
    from tensorflow.core.function import trace_type

    traced = concrete.inputs[: len(concrete.inputs) - len(concrete._captured_inputs)]
    if all(map(has_size, traced)) or not (args or kwargs):
        return traced
    specs = trace_type.InternalTracingContext(is_legacy_signature=True)
    # Bound without a cast: to an input signature's type everything would be as open as that.
    full = function.function_type.bind(*args, **kwargs)
    full.apply_defaults()
    bound = concrete.function_type.bind(*full.args, **full.kwargs).arguments
    parameters = concrete.function_type.parameters.values()
    # In the order of FunctionType.unpack_inputs: what is keyword-only comes last, by name.
    ordered = sorted(parameters, key=lambda p: p.name if p.kind is p.KEYWORD_ONLY else "")
    flat = [t for p in ordered for t in trace_type.from_value(bound[p.name], specs).flatten()]
    if len(flat) != len(traced):
        return traced
    return [t if has_size(t) else sized_like(t, given.shape) for t, given in zip(traced, flat, strict=True)]


def sized_like(tensor: Any, shape: Any) -> Any:
    """A tensor without a value in the place of a trace's argument, of this shape where that is open."""
    import tensorflow as tf

    with tf.Graph().as_default():
        return tf.compat.v1.placeholder(tensor.dtype, tensor.shape.merge_with(shape), tensor.op.name)


def grown(shapes: Shapes, planned: Sequence[Shapes], arguments: int) -> Shapes:
    """The sizes to plan for next, where there are plans for others: so many that plans stay few.

    Of arguments the second plan is for the sizes that are asked for. From the third on it covers all that came before
    as well, and an axis that is longer than ever gets GROWTH times what it had at most. Sizes that depend on what
    arguments hold scatter from batch to batch: from the second plan on, those that differ get SCATTER times what they
    differ by.

    Args:
        arguments: so many of the shapes are the arguments' own.
    """
    planned = [each for each in planned if len(each) == len(shapes)]  # others knew nothing of some sizes
    if not planned:
        return shapes

    def size(axis: int, sizes: Sequence[int], told: bool) -> int:
        most = max(sizes)
        longest = max(axis, int(most * GROWTH))
        if not told:
            return most if axis <= most else longest
        high = max(axis, most)
        return min(high + SCATTER * (high - min(axis, *sizes)), max(high, longest))

    made = []
    for position, shape in enumerate(shapes):
        told = position >= arguments
        earlier = [p for each in planned if (p := each[position]) is not None and len(p) == len(shape or ())]
        if not shape or not earlier or (len(planned) < 2 and not told):
            made.append(shape)
            continue
        columns = zip(shape, zip(*earlier, strict=True), strict=True)
        made.append(tuple(size(axis, sizes, told) for axis, sizes in columns))
    return tuple(made)


FIRST_ORDER = 1
"""gradients_util.POSSIBLE_GRADIENT_TYPES_FIRST_ORDER: one tape watches, and it is not persistent."""


def _watched(concrete: Any, inputs: Sequence[Any]) -> int | None:
    """What gradients a tape may ask for of this call; None for none. Follows ConcreteFunction._call_flat."""
    from tensorflow.python.eager import record
    from tensorflow.python.ops import gradients_util, resource_variable_ops

    if not record.could_possibly_record():
        return None
    for variable in concrete.graph.variables:
        resource_variable_ops.variable_accessed(variable)
    arguments = [*inputs, *without_asking(concrete)]
    return gradients_util.PossibleTapeGradientTypes(arguments) or None


def _shapes(inputs: Sequence[Any]) -> Shapes:
    return tuple(map(_shape, inputs))


def _shape(tensor: Any) -> tuple[int, ...] | None:
    shape = getattr(tensor, "shape", None)
    return None if shape is None or shape.rank is None else tuple(shape.as_list())


class OptimizeOptions(TypedDict, total=False):
    """What `optimize` takes besides the function and the limit, for type checkers."""

    tactics: Sequence[str]
    host_memory_limit: int | str | None
    plan: Plan | str | os.PathLike[str] | None
    mode: str
    on_exceeded: str
    profile: Profile | str | os.PathLike[str] | None
    precision: Precision
    spill_dir: str | os.PathLike[str] | None
    spill_limit: int | str | None
    limit_workspaces: bool
    policy: Policy | None


@overload
def optimize(
    *, memory_limit: int | str | None = None, **options: Unpack[OptimizeOptions]
) -> Callable[[Callable[P, R]], OptimizedFunction[P, R]]: ...
@overload
def optimize(
    function: Callable[P, R], *, memory_limit: int | str | None = None, **options: Unpack[OptimizeOptions]
) -> OptimizedFunction[P, R]: ...
def optimize(
    function: Any = None,
    *,
    memory_limit: int | str | None = None,
    tactics: Sequence[str] = TACTICS,
    host_memory_limit: int | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    mode: str = "optimize",
    on_exceeded: str = "warn",
    profile: Profile | str | os.PathLike[str] | None = None,
    precision: Precision = None,
    spill_dir: str | os.PathLike[str] | None = None,
    spill_limit: int | str | None = None,
    limit_workspaces: bool = False,
    policy: Policy | None = None,
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
        tactics: what may be used, of ("swap", "recompute", "encode"); ordering is always on, and alone with ().
        host_memory_limit: the most host memory that swapped tensors may take; bytes or a size.
        spill_dir: a folder on a local disk for the swapped tensors that host memory has no room for; None, and a step
            that swaps more than `host_memory_limit` is planned otherwise. The file has no name there, only this user
            can read it, and it goes with the process.
        spill_limit: the most that they may take there; bytes or a size.
        plan: a plan made before, or the path of a saved one; applied instead of making one, under `memory_limit`, or
            under its own where that is None.
        mode: "optimize", or "analyze" to change nothing and only report, also on a limit that can't be met.
        on_exceeded: "warn" or "raise" when a step's measured peak passes its limit, or what a given plan takes does.
        profile: times that `tfswap.profile` measured, or the path of saved ones, to plan with. What they do not hold,
            and without a profile all, comes from the analytic model of this kind of device.
        precision: what tensors that wait for the backward pass may be rounded to, of "fp16", "bf16", "fp10", "fp8",
            "fp8_e4m3", "fp8_e5m2", "int8" and "int4", for all, or by pattern of the names of nodes, of which the first
            that fits holds: {"head/*": "exact", "*": "fp8"}. It changes gradients. By default nothing is rounded.
        limit_workspaces: tell cuDNN, for the whole process, to take no more for a convolution than the plan leaves to
            each (`report().workspace_bytes`). TensorFlow reads that once, when the first convolution of the process
            runs on a GPU; see docs/memory_model.md.
        policy: says of each tensor which of `tactics` may be used on it: a function that is called with its
            `TensorFacts` once when a step is planned, and returns some of them, None for all of them, or () where it
            must stay, as with `tfswap.keep`.

    Returns:
        An `OptimizedFunction`, or a decorator that makes one.

    Raises:
        TfswapError: an argument is malformed. At the first call of a signature also InfeasibleMemoryLimit,
            with `.floor_bytes`, before anything runs, and UnsupportedGraph.
    """
    one_of("on_exceeded", on_exceeded, ("warn", "raise"))
    request = check(
        memory_limit,
        tactics,
        host_memory_limit,
        plan,
        mode,
        profile,
        precision,
        spill_dir,
        spill_limit,
        limit_workspaces,
        policy=policy,
    )

    def decorate(target: Any) -> OptimizedFunction[..., Any]:
        return OptimizedFunction(as_tf_function(target), request, on_exceeded)

    return decorate if function is None else decorate(function)


def undecorated(function: Any) -> Any:
    """As `as_tf_function`, also of a function that is optimized already: the one that it was made from."""
    return as_tf_function(function.traced if isinstance(function, OptimizedFunction) else function)


def name_of(function: Any) -> str:
    """What messages call a `tf.function`: as its Python function, of which some (`functools.partial`) have no name."""
    python_function = function.python_function
    return getattr(python_function, "__name__", type(python_function).__name__)


KERAS = ("keras", "tf_keras")
"""The packages of Keras 3 and of Keras 2."""


def as_tf_function(target: Any) -> Any:
    """The `tf.function` to optimise. Raises TfswapError, saying what to give, for what is none and makes none."""
    tf = machine.require_tensorflow()
    name = getattr(target, "__name__", repr(target))
    if isinstance(target, OptimizedFunction):
        raise TfswapError(f"{name} is optimized already: call tfswap.optimize on the tf.function itself")
    if isinstance(target, tf.types.experimental.ConcreteFunction):
        raise TfswapError(
            "optimize got a ConcreteFunction, one trace of a tf.function: give the tf.function itself, or the "
            "Python function, and each of its traces is optimized at its first call"
        )
    if any(b.__name__ == "Model" and b.__module__.partition(".")[0] in KERAS for b in type(target).__mro__):
        raise TfswapError(
            f"{name} is a Keras model, and a call of it does not train: to keep its fit() to a limit, call "
            "tfswap.keras.optimize(model, memory_limit=...); else give the tf.function that trains it"
        )
    if not isinstance(target, tf.types.experimental.PolymorphicFunction):
        if not callable(target) or isinstance(target, type):
            raise TfswapError(f"optimize needs a tf.function or a Python function, not {target!r}")
        target = tf.function(target)
    if getattr(target, "_jit_compile", None):
        raise UnsupportedGraph(f"{name} has jit_compile=True: {HIDES}. Remove jit_compile=True and decorate again.")
    return target
