"""`tfswap.load`: a SavedModel with planned steps, which keep their limit in this process.

`optimize_graph` has written it, or a signature of it is a decorated function. A file's plan was made without knowledge
of the arena. Here each planned step is a trace like that of a decorated function. Its first call simulates the file's
plan in the arena. Where the plan does not keep the limit, the step is planned again from the function that it was
rewritten from (`compiler/origin.py`). So it has a gate, an audit and a report, and is planned again when the arena
changes.

All attributes and signatures that do nothing but run a step share one StepFunction, so that it is planned once.

Invariant: values are those of the original function, whichever plan runs: with Grappler off where `optimize_graph` has
written the model, and else those of the decorated function.

Not handled: functions that call a planned step among other things. They run the file's own plan, which the file's gate
checks. A process that loads with `tf.saved_model.load` runs that plan too.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tfswap.compiler.model_file import ConcreteStep, ModelFile, with_devices
from tfswap.compiler.origin import REQUEST_NAME, Carried, Origin, SavedStep
from tfswap.compiler.request import Request, one_of
from tfswap.compiler.rival_rewriters import refuse_rewriters
from tfswap.device import machine
from tfswap.device.live import live_device
from tfswap.device.regions import make_one_region
from tfswap.errors import InvalidModel, UnsupportedGraph
from tfswap.frontends.file_trace import FileStep, FileTrace
from tfswap.frontends.function import OptimizedFunction
from tfswap.frontends.saved_model import TRACED
from tfswap.importers.library import through_call
from tfswap.native.load import load_for
from tfswap.runtime.captures import with_placeholders
from tfswap.runtime.open_function import open_function
from tfswap.runtime.program import Program
from tfswap.runtime.step import Step
from tfswap.support.limit_file import LimitFile, watched
from tfswap.support.sizes import Limit, check_limits, is_share, parse_limit

log = logging.getLogger("tfswap")

_loading = threading.Lock()  # TensorFlow's loader class is shared by the process

OUTSIDE = (
    "tfswap has rewritten this step, and its gradients can't be taken outside of it: the file has the step alone. Call "
    "it outside of the tape or under tape.stop_recording(), or decorate the original model's function with "
    "tfswap.optimize"
)


def load(model: str | os.PathLike[str], *, memory_limit: Limit = None, on_exceeded: str = "warn") -> Any:
    """Load a SavedModel with planned steps, and keep their limit in this process.

        model = tfswap.load("model_6gib")
        model.train_step(x, y)
        print(model.train_step.report())

    The model was written by `optimize_graph`, or saved with a decorated function as a signature, which is then under
    its limit as an attribute too. A step's first call reads the state of the device's arena. The file's plan runs where
    it keeps the limit there; otherwise the step is planned again for this arena, under the same limit. An arena that
    can still grow and is almost empty gets one region of the limit's size.

    Args:
        model: the folder.
        memory_limit: another limit than the file's, of all steps: bytes, a size, a share of the unoptimised step's
            planned peak, a mapping with one for each device, or a file with a limit ("file:/run/job/limit"), as in
            `optimize`.
        on_exceeded: as in `optimize`.

    Returns:
        The object of `tf.saved_model.load`. Each planned step is an `OptimizedFunction`, called as before. Signatures
        that run one are called as before too, and have its `report()`, `plan()` and `stats()`.

    Raises:
        InvalidModel: there is no SavedModel with planned steps, or it is damaged. At the first call of a step also
            InfeasibleMemoryLimit, with `.floor_bytes`, before anything runs.
        TfswapError: an argument is malformed.
    """
    import tensorflow as tf
    from tensorflow.python.saved_model import load as saved_model_load

    memory_limit, limit_file = watched(memory_limit)
    memory_limit = check_limits(memory_limit)
    one_of("on_exceeded", on_exceeded, ("warn", "raise"))
    refuse_rewriters()
    file = ModelFile.load(model)
    loaded = _Loaded.of(file, memory_limit, limit_file, on_exceeded)
    loaded.require_devices(file)
    load_for(node for fdef in file.library.values() for node in fdef.node_def)
    for device, limit_bytes in loaded.largest_limits().items():
        make_one_region(device, limit_bytes)
    with _loading, mock.patch.object(saved_model_load, "Loader", _loader_of(loaded, file)):
        # A file has devices for its variables where it was saved with them, and where steps are on several devices.
        made = tf.saved_model.load(os.fspath(model), options=with_devices() if loaded.on_several else None)
    if not loaded.found and not all(step.decorated for step in loaded.steps.values()):
        name = next(iter(loaded.steps.values())).saved.name
        raise InvalidModel(
            f"nothing in the SavedModel at {str(file.path)!r} calls the step {name!r}, which was "
            "planned: its folder is put together from several. Rewrite the original model again."
        )
    return made


@dataclass(frozen=True)
class _Route:
    """How a function calls a planned step.

    Attributes:
        arguments: by argument of the step, the position of the function's input that is passed, captures included.
        results: by result of the function, the position of the step's.
    """

    file_step: FileStep
    arguments: tuple[int, ...]
    results: tuple[int, ...]


@dataclass
class _Loaded:
    """A file that is being loaded.

    Attributes:
        library: its functions as they were before they were rewritten, by name.
        steps: the planned ones, by name; a decorated one also by the name of the function that carries out its plan.
        program: the program of all steps.
        renamed: the file's name of a function, by that in this process.
        concretes: the functions in this process, by the file's name.
        found: whether an attribute or a signature that runs a step was loaded.
    """

    library: Mapping[str, Any]
    steps: dict[str, FileStep]
    on_exceeded: str
    renamed: dict[str, str] = field(default_factory=dict[str, str])
    concretes: dict[str, Any] = field(default_factory=dict[str, Any])
    program: Program = field(default_factory=Program)
    found: bool = False
    _functions: dict[str, StepFunction] = field(default_factory=dict[str, "StepFunction"])

    @staticmethod
    def of(file: ModelFile, memory_limit: Limit, limit_file: LimitFile | None, on_exceeded: str) -> _Loaded:
        """
        Args:
            memory_limit: of all steps, in place of the file's.
            limit_file: where that limit is read before each call; None for none.

        Raises InvalidModel.
        """

        def request(origin: Origin) -> Request:
            limit = origin.limit if memory_limit is None else memory_limit
            return Request(limit, origin.options, None, "optimize", limit_file)

        steps: dict[str, FileStep] = {}
        library: Mapping[str, Any] = file.library
        carried = Carried.of(file)
        if not carried or (file.path / REQUEST_NAME).exists():
            for origin in Origin.read(file.path):
                original, planned = origin.require(file)
                library = {**library, **original.library, **{name: library[name] for name in steps}}
                steps |= {name: FileStep(*found, request(origin)) for name, found in planned.items()}
        for each in carried:
            same = file.same_as(each.original)
            found = FileStep(
                each.origin.steps[0], file.trace(same[0]), {"": each.plan}, request(each.origin), decorated=True
            )
            steps |= dict.fromkeys((each.rewritten, each.original, *same), found)
        return _Loaded(library, steps, on_exceeded)

    def require_devices(self, file: ModelFile) -> None:
        """Raise UnsupportedGraph where a step is planned for a device that this process does not have."""
        for step in self.steps.values():
            if missing := [device for device in step.saved.devices if not machine.has_device(device)]:
                raise UnsupportedGraph(
                    f"{_name_of(step)!r} of {file.title} is planned for {', '.join(step.saved.devices)}, and this "
                    f"process has no {missing[0]}. Load it where these devices are, or rewrite the original model here."
                )

    @property
    def on_several(self) -> bool:
        """Whether a step is planned for several devices."""
        return any(step.saved.devices for step in self.steps.values())

    def largest_limits(self) -> dict[str, int]:
        """The largest limit of a step on each device, in bytes, where it is known."""
        found: dict[str, int] = {}
        for step in self.steps.values():
            devices, limit = step.saved.devices or (live_device().name,), step.request.memory_limit
            limits = limit if isinstance(limit, Mapping) else dict.fromkeys(devices, limit)
            for device, each in limits.items():
                if each is not None and not is_share(each) and machine.has_device(device):
                    found[device] = max(found.get(device, 0), parse_limit(each))
        return found

    def route(self, fdef: Any) -> _Route | None:
        """The planned step that a function runs, if it does nothing else."""
        arguments = list(range(len(fdef.signature.input_arg)))
        results = list(range(len(fdef.signature.output_arg)))
        while (name := self._file_name(fdef.signature.name)) not in self.steps:
            passed = through_call(fdef, lambda called: self.library.get(self._file_name(called)))
            if passed is None or (given := [passed.results[i] for i in results]).count(None):
                return None
            arguments = [arguments[i] for i in passed.arguments]
            results = [i for i in given if i is not None]
            fdef = passed.called
        return _Route(self.steps[name], tuple(arguments), tuple(results))

    def _file_name(self, function: str) -> str:
        return self.renamed.get(function, function)

    def runs_a_step(self, name: str) -> bool:
        """Whether the library function of this name does nothing but run a planned step."""
        return name in self.library and self.route(self.library[name]) is not None

    def note_traces(self, names: Sequence[str], file: Callable[[str], ConcreteStep]) -> None:
        """Record a function's traces: where one is a decorated step, the others are under its limit too."""
        known = [self.steps[name] for name in names if name in self.steps and self.steps[name].decorated]
        for name in names if known else ():
            if name not in self.steps:
                saved = SavedStep(name, "", rewritten=False, arguments=())
                self.steps[name] = FileStep(saved, file(name), {}, known[0].request, decorated=True)

    def function(self, file_step: FileStep) -> StepFunction:
        """The function that runs a step, the same for all callers."""
        name = file_step.step.name
        if name not in self._functions:
            self._functions[name] = StepFunction(self.concretes[name], file_step, self)
        return self._functions[name]

    def optimized(self, function: Any, runs: str) -> LoadedFunction:
        """`function`, which runs the library function `runs`, under the limit."""
        self.found = True
        route = self.route(self.library[runs])
        assert route is not None
        return LoadedFunction(function, route.file_step, self)


class StepFunction(OptimizedFunction):
    """A step of a file under its limit, with the signature of the file's function.

    Args:
        concrete: the file's function, as TensorFlow has loaded it.
    """

    def __init__(self, concrete: Any, file_step: FileStep, loaded: _Loaded):
        name, library = _name_of(file_step), loaded.library
        super().__init__(
            _nameless(),
            file_step.request,
            loaded.on_exceeded,
            loaded.program,
            name=name,
            trace_of=lambda concrete: FileTrace(name, concrete, file_step, library),
            first_shapes=file_step.planned_for,
            refuses_outer_gradients=OUTSIDE if file_step.saved.rewritten and not file_step.decorated else "",
        )
        self.concrete = concrete

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Its results, flat."""
        return self.concrete.function_type.output.to_tensors(self.call_trace(self.concrete, inputs))

    @property
    def latest(self) -> Step | None:
        """The step that ran last."""
        return self._latest.step


class LoadedFunction(OptimizedFunction):
    """A function of a loaded model that runs a planned step: all its traces that do nothing else are under its limit.

    Other traces of it run as TensorFlow loads them.
    """

    def __init__(self, function: Any, file_step: FileStep, loaded: _Loaded):
        super().__init__(function, file_step.request, loaded.on_exceeded, loaded.program, name=_name_of(file_step))
        self._loaded = loaded
        self._passing: dict[Any, _Passing | None] = {}

    def call_trace(self, concrete: Any, inputs: Sequence[Any], key: Any = None) -> Any:
        passing = self._passed_by(concrete)
        if passing is None:
            return self._call_traced(concrete, inputs, "it is a trace that was not planned when the file was written")
        result = passing(inputs)
        if (step := passing.function.latest) is not None:
            self._latest.note(step)
        return result

    def follow(self, limit: Limit) -> None:
        super().follow(limit)
        for passing in filter(None, self._passing.values()):  # others, which share the step, may have changed it
            passing.function.follow(limit)

    def change_request(self, request: Request) -> None:
        super().change_request(request)
        for passing in filter(None, self._passing.values()):
            passing.function.change_request(request)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        return self.under_limit(self._trace(args, kwargs))

    def under_limit(self, concrete: Any) -> Any:
        """A ConcreteFunction with the signature of a trace of this function, which runs its step under the limit."""
        call = functools.partial(self._under_file, self.call_trace, concrete)
        made = open_function(self.__name__, concrete, concrete, call, carries=True)
        made._function_type = concrete._function_type
        return made

    def _passed_by(self, concrete: Any) -> _Passing | None:
        if concrete not in self._passing:
            route = self._loaded.route(concrete.function_def)
            made = None if route is None else _Passing.of(route, concrete, self._loaded.function(route.file_step))
            if made is not None and made.function.memory_limit != self._request.memory_limit:
                made.function.change_request(self._request)
            self._passing[concrete] = made
        return self._passing[concrete]


@dataclass(frozen=True)
class _Passing:
    """A trace that passes its arguments on to a step.

    Attributes:
        arguments: by argument of the step that is no capture, the position of the trace's input.
        pack: gives the step's results the structure of the trace's.
    """

    concrete: Any
    function: StepFunction
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    pack: Callable[[Sequence[Any]], Any]

    @staticmethod
    def of(route: _Route, concrete: Any, function: StepFunction) -> _Passing | None:
        """None where the trace gives the step other variables than the file's function has."""
        own = with_placeholders(function.concrete)
        count = len(route.arguments) - len(own)
        before = len(concrete.inputs) - len(concrete._captured_inputs)
        captured = with_placeholders(concrete)
        for position, capture in zip(route.arguments[count:], own, strict=True):
            if position < before or captured[position - before] is not capture:
                return None
        return _Passing(concrete, function, route.arguments[:count], route.results, concrete.function_type.pack_output)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        given = [*inputs, *with_placeholders(self.concrete)]
        results = self.function.run([given[p] for p in self.arguments])
        return self.pack([results[i] for i in self.results])


def _with_flat_results(concrete: Any) -> Any:
    """A function with flat results: the file has no structure for it, and TensorFlow's loader would give it no
    results.
    """
    from tensorflow.core.function.polymorphism import function_type
    from tensorflow.python.eager.polymorphic_function import concrete_function

    graph = concrete.graph
    graph.structured_outputs = list(graph.outputs)
    made = function_type.from_structured_signature(
        graph.structured_input_signature, graph.structured_outputs, graph.function_captures.capture_types
    )
    return concrete_function.ConcreteFunction.from_func_graph(graph, made, attrs={})


def _nameless() -> Any:
    """A placeholder for a `tf.function` where there is none."""

    def python_function() -> None: ...

    return types.SimpleNamespace(python_function=python_function, _run_functions_eagerly=False)


def _name_of(file_step: FileStep) -> str:
    traced = TRACED.fullmatch(file_step.saved.name)
    return traced[1] if traced else file_step.saved.name


def _loader_of(loaded: _Loaded, file: ModelFile) -> Any:
    """A subclass of TensorFlow's loader of object graphs that makes LoadedFunctions of functions that run a planned
    step.

    It does so while objects are made, so that every object that holds one gets it.
    """
    from tensorflow.python.saved_model import load as load_module

    thread = threading.get_ident()

    class Loader(load_module.Loader):
        _is_ours = False

        def _load_all(self) -> None:
            if threading.get_ident() == thread:  # another thread may load another model at the same time
                self._is_ours = True
                loaded.concretes = dict(self._concrete_functions)
                loaded.renamed = {made.name.decode(): name for name, made in self._concrete_functions.items()}
            super()._load_all()

        def _setup_remaining_functions(self) -> None:
            super()._setup_remaining_functions()
            for step in loaded.steps.values() if self._is_ours else ():
                if step.step.name not in self._proto.concrete_functions:
                    self._restore_captures_of(step)

        def _restore_captures_of(self, step: FileStep) -> None:
            """Set the captures of a step that only functions call, from those of a function that calls it."""
            for name, concrete in sorted(self._proto.concrete_functions.items()):
                route = loaded.route(loaded.library[name]) if name in loaded.library else None
                if route is None or route.file_step is not step:
                    continue
                before = len(loaded.library[name].signature.input_arg) - len(concrete.bound_inputs)
                bound = [concrete.bound_inputs[p - before] for p in route.arguments if p >= before]
                loaded.concretes[step.step.name] = made = _with_flat_results(loaded.concretes[step.step.name])
                load_module.restore_captures.restore_captures(made, [self._nodes[index] for index in bound])
                return

        def _recreate_function(self, proto: Any, dependencies: Any) -> Any:
            made, setter = super()._recreate_function(proto, dependencies)
            if self._is_ours:
                loaded.note_traces(proto.concrete_functions, file.trace)
                if (name := next(filter(loaded.runs_a_step, proto.concrete_functions), None)) is not None:
                    made = loaded.optimized(made, name)
            return made, setter

        def _recreate_bare_concrete_function(self, proto: Any, dependencies: Any) -> Any:
            made, setter = super()._recreate_bare_concrete_function(proto, dependencies)
            if self._is_ours and loaded.runs_a_step(proto.concrete_function_name):
                function = loaded.optimized(_nameless(), proto.concrete_function_name)
                made = function.under_limit(made)
                made.report, made.plan, made.stats = function.report, function.plan, function.stats
            return made, setter

    return Loader
