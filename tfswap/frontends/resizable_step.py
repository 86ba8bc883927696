"""A training step of a `tf.function` or a SavedModel, as a graph of any size.

Nothing runs: a function is traced for the sizes, a saved one is bound to them.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfswap.compiler.backward import require_backward
from tfswap.compiler.grappler import as_planned
from tfswap.compiler.model_file import ModelFile
from tfswap.compiler.offline import Variable
from tfswap.device import machine
from tfswap.device.offline_placement import place_offline
from tfswap.device.placement import gpus_here
from tfswap.errors import InvalidModel, TfswapError, UnsupportedGraph
from tfswap.frontends.optimize import undecorated
from tfswap.frontends.saved_model import ArgumentSizes, import_step, open_axes
from tfswap.frontends.tracing import name_of, stand_ins
from tfswap.ir.graph import Graph
from tfswap.ir.types import Shape, TensorType
from tfswap.kernels.device import DeviceModel

Sizes = Mapping[str, Mapping[int, int]]
"""By argument, the size of some of its axes."""


@dataclass(frozen=True)
class TrainingStep:
    """A step whose sizes can be chosen.

    Attributes:
        name: its name in messages.
        shapes: by argument, the shape that it has when no sizes are given; of several tensors, the first's.
        free: by argument, the axes whose sizes can be chosen.
        variables: those of its model.
        make: from sizes to the graph. Raises UnsupportedGraph or InvalidModel where it can't have them.
    """

    name: str
    shapes: Mapping[str, Shape]
    free: Mapping[str, Sequence[int]]
    variables: Sequence[Variable]
    make: Callable[[Sizes], Graph] = field(repr=False)

    def graph(self, sizes: Sizes | None = None) -> Graph:
        """The step's graph, with these sizes instead of its own."""
        graph = self.make(sizes or {})
        require_backward(self.name, graph)
        return graph


def find_step(
    step: Any,
    args: Sequence[Any],
    *,
    function: str = "train_step",
    batch_size: int | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    start: Sizes | None = None,
    device: DeviceModel | None = None,
    gpus: Collection[str] | None = None,
) -> TrainingStep:
    """The step that a user gave: a function and its arguments, or a SavedModel's folder. Its nodes are placed.

    Args:
        device: the device of the graphs; by default this machine's.
        gpus: the units of the GPUs that there are; by default this machine's.
        start: sizes of a SavedModel's open axes that have no other size.
    """
    if not isinstance(step, (str, os.PathLike)):
        if batch_size is not None or input_shapes is not None:
            raise TfswapError("batch_size and input_shapes are for a SavedModel: a function's sizes are its arguments'")
        return _function_step(step, args, device or machine.current_device()[1], gpus)
    if args:
        raise TfswapError("a SavedModel takes no arguments: give batch_size= or input_shapes=")
    on = device or machine.current_device()[1], gpus
    return _saved_step(step, function, ArgumentSizes(batch_size, input_shapes, start), on)


def _function_step(
    function: Any, args: Sequence[Any], device: DeviceModel, gpus: Collection[str] | None
) -> TrainingStep:
    import tensorflow as tf

    traced = undecorated(function)
    concrete = traced.get_concrete_function(*args)
    variables = [_variable(v, "") for v in concrete.variables]  # with their devices once the graph is made

    def make(sizes: Sizes) -> Graph:
        specs = sized_arguments(traced, args, sizes, values=False)
        try:
            made = traced.get_concrete_function(*specs) if sizes else concrete
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            raise UnsupportedGraph(
                f"{name_of(traced)} can't be traced with the sizes {dict(sizes)}: {error}. If it has a fixed size "
                "in it, make that follow from the arguments. If it takes only multiples of a number, give multiple_of=."
            ) from error
        given = stand_ins(traced, made, specs, {})
        graph, variables[:] = graph_of_trace(name_of(traced), made, given, device, gpus)
        return graph

    arguments = inspect.signature(traced.python_function).bind(*args).arguments
    tensors = {name: [t for t in tf.nest.flatten(value) if _is_tensor(t)] for name, value in arguments.items()}
    shapes = {name: tuple(found[0].shape) for name, found in tensors.items() if found}
    free = {name: range(min(len(t.shape) for t in tensors[name])) for name in shapes}
    return TrainingStep(name_of(traced), shapes, free, variables, make)


def graph_of_trace(
    name: str,
    trace: Any,
    arguments: Sequence[Any],
    device: DeviceModel,
    gpus: Collection[str] | None,
    known_types: Callable[[Graph], Mapping[str, TensorType]] = lambda _: {},
) -> tuple[Graph, list[Variable]]:
    """The graph of a trace, whose nodes are placed, and its variables.

    Args:
        name: of the step, for messages.
        trace: a ConcreteFunction.
        arguments: the flat arguments of a call, or specs of their sizes.
        device, gpus: as of `find_step`.
        known_types: from the imported graph to types of its tensors ("node:0") whose sizes the trace leaves open.

    Raises UnsupportedGraph.
    """
    from tfswap.importers.function import import_function
    from tfswap.runtime.captures import with_placeholders

    graph = import_function(trace, arguments)
    if known := known_types(graph):
        graph = import_function(trace, arguments, known)
    captures = with_placeholders(trace)
    given = [None] * (len(graph.feeds) - len(captures)) + captures
    devices = [_device_of(tensor) for tensor in given]
    devices = place_offline(name, graph, devices, device, gpus)
    by_handle = {id(tensor): where for tensor, where in zip(given, devices, strict=True)}
    variables = [_variable(v, by_handle.get(id(v.handle), "")) for v in trace.variables]
    graph = as_planned(graph, trace, device)
    place_offline(name, graph, devices, device, gpus)  # nodes that TensorFlow's optimizers have made
    return graph, variables


def _device_of(tensor: Any) -> str:
    """The device of a captured handle; empty where it is not known: without GPUs a variable is on the CPU, whatever
    its function names.
    """
    import tensorflow as tf

    if tensor is None or tensor.dtype != tf.resource or tf.is_symbolic_tensor(tensor):
        return ""
    return tensor.device if gpus_here() else ""


def _variable(variable: Any, device: str) -> Variable:
    return Variable(variable.dtype.name, tuple(variable.shape.as_list()), device)


def sized_arguments(traced: Any, args: Sequence[Any], sizes: Sizes, *, values: bool = True) -> tuple[Any, ...]:
    """The arguments of a call, resized by repeating or leaving out rows. Without `values`, as specs.

    Raises TfswapError where an argument does not have such an axis.
    """
    import tensorflow as tf

    bound = inspect.signature(traced.python_function).bind(*args)

    def resized(tensor: Any, axes: Mapping[int, int]) -> Any:
        if not _is_tensor(tensor):
            return tensor
        shape = [axes.get(axis, size) for axis, size in enumerate(tensor.shape)]
        if not values or isinstance(tensor, tf.TensorSpec):
            return tf.zeros(shape, tensor.dtype) if values else tf.TensorSpec(shape, tensor.dtype)
        for axis, size in axes.items():
            tensor = tf.gather(tensor, tf.range(size) % tensor.shape[axis], axis=axis)
        return tensor

    for name, axes in sizes.items():
        bound.arguments[name] = tf.nest.map_structure(lambda t, axes=axes: resized(t, axes), bound.arguments[name])
    return bound.args


def loaded_step(model: str | os.PathLike[str], function: str, step: TrainingStep) -> tuple[Any, Callable[[Sizes], Any]]:
    """A SavedModel's step as a function that can be called, and its arguments for sizes: zeros.

    Args:
        step: the step as it was found in the SavedModel.

    Raises TfswapError where what TensorFlow loads has no function with these arguments.
    """
    import tensorflow as tf

    loaded = ModelFile.load(model).loaded()
    called = getattr(loaded, function, None) or loaded.signatures[function]
    traces = getattr(called, "concrete_functions", [called])
    names = set(step.shapes)
    trace = next((t for t in traces if names <= {spec.name for spec in _specs(t)}), None)
    if trace is None:
        raise TfswapError(
            f"{function!r} of {os.fspath(model)} has no trace with the arguments {', '.join(step.shapes)}"
        )
    signature = trace.structured_input_signature

    @tf.function
    def run(*tensors: Any) -> Any:
        left = iter(tensors)
        flat = [next(left) if isinstance(s, tf.TensorSpec) else s for s in tf.nest.flatten(signature)]
        args, keywords = tf.nest.pack_sequence_as(signature, flat)
        return called(*args, **keywords)

    run.loaded = loaded  # which has the variables

    def arguments(sizes: Sizes) -> list[Any]:
        made: list[Any] = []
        for spec in _specs(trace):
            shape = list(step.shapes.get(spec.name) or spec.shape)
            for axis, size in sizes.get(spec.name, {}).items():
                shape[axis] = size
            made.append(tf.zeros(shape, spec.dtype))
        return made

    return run, arguments


def _specs(trace: Any) -> list[Any]:
    import tensorflow as tf

    return [s for s in tf.nest.flatten(trace.structured_input_signature) if isinstance(s, tf.TensorSpec)]


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _saved_step(
    model: str | os.PathLike[str],
    function: str,
    sizes: ArgumentSizes,
    on: tuple[DeviceModel, Collection[str] | None],
) -> TrainingStep:
    file = ModelFile.load(model)
    refused: list[UnsupportedGraph | InvalidModel] = []
    found: list[tuple[int, Any, Graph]] = []
    for trace in file.steps(function):
        try:
            graph = import_step(file, function, trace, sizes, on)
            require_backward(function, graph, file.training_functions)
            found.append((sum(t.nbytes or 0 for n in graph for t in n.outputs), trace, graph))
        except (UnsupportedGraph, InvalidModel) as error:
            refused.append(error)
    if not found:
        raise refused[0]
    _, trace, graph = max(found, key=lambda f: f[0])  # of several, the one that takes most
    own = list(trace.user_names)[: len(trace.user_names) - trace.captures]
    given = {n.name: n.outputs[0].shape for n in graph.feeds if n.name in own and n.outputs[0].dtype != "resource"}
    users = {name: next(iter(trace.user_names.get(name, ())), name) for name in given}
    shapes = {users[name]: shape for name, shape in given.items()}
    free = {users[name]: open_axes(file, trace, name, shape) for name, shape in given.items()}

    def make(chosen: Sizes) -> Graph:
        if not chosen:
            return graph
        wanted: dict[str, Any] = {name: list(shape) for name, shape in shapes.items() if shape is not None}
        for name, axes in chosen.items():
            for axis, size in axes.items():
                wanted[name][axis] = size
        return import_step(file, function, trace, ArgumentSizes(None, wanted), on)

    return TrainingStep(function, shapes, free, file.variables(), make)
