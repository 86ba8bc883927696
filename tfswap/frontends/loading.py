"""`tfswap.load`: a SavedModel that `optimize_graph` has written, with steps that keep their limit in this process.

A file's plan was made without knowledge of the arena. Here each rewritten step is a trace like that of a decorated
function: at its first call the arena is looked at, the file's plan is simulated in it, and where it does not keep the
limit the step is planned again, from the function that it was rewritten from (`frontends/origin.py`). So it has a gate,
an audit, a report, and is planned again when the arena changes.

Invariant: values are those of the original function with Grappler off, whichever plan runs.

Not handled: functions that call a rewritten step and do more run the file's own plan, which the gate in the
file checks; so does a process that loads with `tf.saved_model.load`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tfswap.errors import InfeasibleMemoryLimit, InvalidModel, UnsupportedGraph
from tfswap.frontends.arguments import Request, one_of
from tfswap.frontends.captures import without_asking
from tfswap.frontends.function import OptimizedFunction, Program
from tfswap.frontends.live_device import live_device
from tfswap.frontends.model_file import ConcreteStep, ModelFile
from tfswap.frontends.one_region import make_one_region
from tfswap.frontends.open_function import open_function
from tfswap.frontends.origin import Origin, SavedStep
from tfswap.frontends.pipeline import Optimizer
from tfswap.frontends.placement import place
from tfswap.frontends.rewriters import refuse_rewriters
from tfswap.frontends.saved_model import TRACED
from tfswap.frontends.step import Shapes, Step
from tfswap.importers.library import through_call
from tfswap.ir.graph import Graph
from tfswap.oplib.load import load_for
from tfswap.planner.plan import Plan, fingerprint
from tfswap.sizes import check_limit, is_share, parse_limit

log = logging.getLogger("tfswap")

_loading = threading.Lock()  # TensorFlow's loader is one for the process

OUTSIDE = (
    "tfswap has rewritten this step, and its gradients can't be taken outside of it: the file has the step alone. Call "
    "it outside of the tape or under tape.stop_recording(), or decorate the original model's function with "
    "tfswap.optimize"
)


def load(model: str | os.PathLike[str], *, memory_limit: int | str | None = None, on_exceeded: str = "warn") -> Any:
    """Load a SavedModel that `optimize_graph` has written, and keep its steps' limit in this process.

        model = tfswap.load("model_6gib")
        model.train_step(x, y)
        print(model.train_step.report())

    A step's first call reads the state of the device's arena. The file's plan runs where it keeps the limit there;
    otherwise the step is planned again for this arena, under the same limit. An arena that can still grow and is almost
    empty gets one region of the limit's size.

    Args:
        model: the folder.
        memory_limit: another limit than the file's: bytes, a size, or a share of the unoptimised step's planned peak.
        on_exceeded: as in `optimize`.

    Returns:
        What `tf.saved_model.load` returns. The steps that were planned are each an `OptimizedFunction`, called as
        before; signatures that run them are called as before too, and have its `report()`, `plan()` and `stats()`.

    Raises:
        InvalidModel: no SavedModel that `optimize_graph` has written, or a damaged one. At the first call of a step
            also InfeasibleMemoryLimit, with `.floor_bytes`, before anything runs.
        TfswapError: an argument is malformed.
    """
    import tensorflow as tf
    from tensorflow.python.saved_model import load as saved_model_load

    if memory_limit is not None:
        check_limit(memory_limit)
    one_of("on_exceeded", on_exceeded, ("warn", "raise"))
    refuse_rewriters()
    file = ModelFile.load(model)
    origin = Origin.read(file.path)
    load_for(node for fdef in file.library.values() for node in fdef.node_def)
    limit = origin.limit_bytes if memory_limit is None else memory_limit
    loaded = _Loaded.of(file, origin, Request(limit, origin.options, None, "optimize"), on_exceeded)
    if limit is not None and not is_share(limit):
        make_one_region(live_device()[0], parse_limit(limit))
    with _loading, mock.patch.object(saved_model_load, "Loader", _loader_of(loaded)):
        made = tf.saved_model.load(os.fspath(model))
    if not loaded.found:
        raise InvalidModel(
            f"nothing in the SavedModel at {str(file.path)!r} calls the step {origin.steps[0].name!r}, which was "
            "planned: its folder is put together from several. Rewrite the original model again."
        )
    return made


@dataclass(frozen=True)
class _FileStep:
    """A planned trace of a file: where it is in the library, and its plan."""

    saved: SavedStep
    step: ConcreteStep
    plan: Plan

    def shape_of(self, argument: str) -> tuple[int, ...] | None:
        """What the plan is for."""
        return next((each.shape for each in self.saved.arguments if each.name == argument), None)


@dataclass
class _Loaded:
    """A file that is being loaded.

    Attributes:
        library: its functions as they were before they were rewritten, by name.
        steps: the planned ones, by name.
        renamed: the file's name of a function, by that in this process.
        request: for all steps.
        program: what they are parts of.
        found: whether something was loaded that runs one of them.
    """

    library: Mapping[str, Any]
    steps: Mapping[str, _FileStep]
    request: Request
    on_exceeded: str
    renamed: dict[str, str] = field(default_factory=dict[str, str])
    program: Program = field(default_factory=Program)
    found: bool = False

    @staticmethod
    def of(file: ModelFile, origin: Origin, request: Request, on_exceeded: str) -> _Loaded:
        """Raises InvalidModel."""
        original, planned = origin.require(file)
        steps = {name: _FileStep(*found) for name, found in planned.items()}
        return _Loaded(original.library, steps, request, on_exceeded)

    def route(self, fdef: Any) -> _Route | None:
        """The planned step that a function runs, if that is all it does."""
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

    def optimized(self, function: Any, runs: str) -> LoadedFunction:
        """`function`, which runs the library function `runs`, under the limit."""
        self.found = True
        made = LoadedFunction(function, self)
        route = self.route(self.library[runs])
        assert route is not None
        traced = TRACED.fullmatch(route.file_step.saved.name)
        made.__name__ = traced[1] if traced else route.file_step.saved.name
        return made


@dataclass(frozen=True)
class _Route:
    """How a function calls a planned step.

    Attributes:
        arguments: by argument of the step, the position of the function's input that it is given.
        results: by result of the function, the position of the step's.
    """

    file_step: _FileStep
    arguments: tuple[int, ...]
    results: tuple[int, ...]

    def shapes(self, inputs: int) -> Shapes:
        """The shapes that the step's plan is for, by the function's inputs, of which there are so many."""
        names = [a for _, a in sorted(zip(self.arguments, self._names, strict=True))]
        return tuple(self.file_step.shape_of(name) for name in names[:inputs])

    @property
    def _names(self) -> list[str]:
        return list(self.file_step.step.user_names)

    def graph(self, library: Mapping[str, Any], shapes: Sequence[Any]) -> tuple[Graph, Plan | None]:
        """The step's graph for arguments of these shapes, in the function's order, and the file's plan if it is of it.

        Args:
            shapes: of the function's inputs, captures not among them.
        """
        from tfswap.importers.library_function import import_library_function

        step = self.file_step.step
        given = {name: shapes[p] for name, p in zip(self._names, self.arguments, strict=True) if p < len(shapes)}
        known = {name: shape for name, shape in given.items() if shape is not None and name not in step.handles}
        graph = import_library_function(library, step.name, known, step.handles)
        plan = self.file_step.plan
        same = not plan.changes_nothing and plan.fingerprint == fingerprint(graph)
        graph.feeds = [feed for _, feed in sorted(zip(self.arguments, graph.feeds, strict=True), key=lambda p: p[0])]
        graph.fetches = [graph.fetches[i] for i in self.results]
        return graph, _renamed(plan, graph) if same else None


def _renamed(plan: Plan, graph: Graph) -> Plan:
    """`plan`, for the same step with its arguments and results in another order."""
    return dataclasses.replace(plan, fingerprint=fingerprint(graph))


class LoadedStep(Step):
    """As Step, of a trace that runs a step of a file and nothing else."""

    def __init__(self, name: str, concrete: Any, *args: Any, route: _Route, library: Mapping[str, Any], **options: Any):
        super().__init__(name, concrete, *args, **options)
        self._route = route
        self._library = library
        self._file_plan: Plan | None = None

    def _plan(self, inputs: Sequence[Any], *, given: Plan | None = None, ordered: bool = False) -> None:
        # The trace itself runs the file's plan: nothing is left as it is there.
        super()._plan(inputs, given=given, ordered=ordered or self._route.file_step.saved.rewritten)

    def _import(self, arguments: Sequence[Any]) -> tuple[Graph, Sequence[str]]:
        shapes = [None if t.shape.rank is None else tuple(t.shape.as_list()) for t in arguments]
        graph, self._file_plan = self._route.graph(self._library, shapes)
        place(self.name, graph, [*arguments, *without_asking(self._concrete)], live_device()[1])
        return graph, ()

    def _choose(self, optimizer: Optimizer, ordered: bool, lacking: int = 0) -> Plan:
        if self._file_plan is not None:
            optimizer.extra_margin_bytes = self._margin_bytes
            try:
                if (plan := optimizer.judged(self._file_plan, self.limit_bytes)) is not None:
                    return plan
            except InvalidModel as error:  # another device, or another version of tfswap
                log.info("tfswap: %s: the file's plan can't be carried out here: %s", self.name, error)
                self._file_plan = None
        return super()._choose(optimizer, ordered, lacking)


class LoadedFunction(OptimizedFunction):
    """A function of a loaded model that runs a planned step: all its traces that do nothing else are under its limit.

    Other traces of it run as TensorFlow loads them.
    """

    def __init__(self, function: Any, loaded: _Loaded):
        super().__init__(function, loaded.request, loaded.on_exceeded, loaded.program)
        self._loaded = loaded
        self._routes: dict[Any, _Route | None] = {}

    def route(self, concrete: Any) -> _Route | None:
        if concrete not in self._routes:
            self._routes[concrete] = self._loaded.route(concrete.function_def)
        return self._routes[concrete]

    def _run(self, concrete: Any, inputs: Sequence[Any], key: Any = None) -> Any:
        if self.route(concrete) is None:
            return self._call_traced(concrete, inputs, "it is a trace that was not planned when the file was written")
        return super()._run(concrete, inputs, key)

    def _joint(self, concrete: Any, inputs: Sequence[Any], watched: int) -> Any:
        route = self.route(concrete)
        if route is not None and route.file_step.saved.rewritten:
            raise UnsupportedGraph(f"{self.__name__}: {OUTSIDE}")
        return super()._joint(concrete, inputs, watched)

    def _planned(self, concrete: Any, shapes: Shapes, inputs: Sequence[Any]) -> Step:
        route = self.route(concrete)
        if route is not None and not self._made.get(concrete):
            planned_for = route.shapes(len(inputs))
            if planned_for != shapes:
                step = self._new_step(concrete, planned_for)
                step.planned = True  # to be asked what it covers
                covers, step.planned = step.covers(shapes), False
                with contextlib.suppress(InfeasibleMemoryLimit):
                    if covers:
                        step.prepare(inputs)
                        self._made.setdefault(concrete, []).append(step)
                        return step
        return super()._planned(concrete, shapes, inputs)

    def _step_of(self, concrete: Any, *args: Any, **options: Any) -> Step:
        route = self.route(concrete)
        if route is None:
            return super()._step_of(concrete, *args, **options)
        return LoadedStep(self.__name__, concrete, *args, route=route, library=self._loaded.library, **options)


def _loader_of(loaded: _Loaded) -> Any:
    """TensorFlow's loader of object graphs, which makes a LoadedFunction of what runs a planned step.

    As objects are made, and not afterwards: they are then set where the file has them, whatever holds them.
    """
    from tensorflow.python.saved_model import load as load_module

    thread = threading.get_ident()

    class Loader(load_module.Loader):
        _is_ours = False

        def _load_all(self) -> None:
            if threading.get_ident() == thread:  # another one loads another model meanwhile
                self._is_ours = True
                loaded.renamed = {made.name.decode(): name for name, made in self._concrete_functions.items()}
            super()._load_all()

        def _recreate_function(self, proto: Any, dependencies: Any) -> Any:
            made, setter = super()._recreate_function(proto, dependencies)
            runs = filter(self._runs_a_step, proto.concrete_functions) if self._is_ours else ()
            if (name := next(iter(runs), None)) is not None:
                made = loaded.optimized(made, name)
            return made, setter

        def _recreate_bare_concrete_function(self, proto: Any, dependencies: Any) -> Any:
            made, setter = super()._recreate_bare_concrete_function(proto, dependencies)
            if self._is_ours and self._runs_a_step(proto.concrete_function_name):
                made = _bare(made, proto.concrete_function_name, loaded)
            return made, setter

        def _runs_a_step(self, name: str) -> bool:
            return name in loaded.library and loaded.route(loaded.library[name]) is not None

    return Loader


def _bare(concrete: Any, name: str, loaded: _Loaded) -> Any:
    """A ConcreteFunction that is called as `concrete`, a signature as a rule, and runs its step under the limit."""

    def python_function() -> None: ...

    function = loaded.optimized(
        types.SimpleNamespace(python_function=python_function, _run_functions_eagerly=False), name
    )
    made = open_function(function.__name__, concrete, concrete, functools.partial(function._run, concrete))
    made._function_type = concrete._function_type
    made.report, made.plan, made.stats = function.report, function.plan, function.stats
    return made
