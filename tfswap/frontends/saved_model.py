"""`tfswap.optimize_graph`: a training step in a SavedModel, a GraphDef or a MetaGraphDef, under a byte limit.

A SavedModel is edited in its own function library: variables, assets, signatures and the object graph stay as
they are. The step moves into a function of its own (see exporters/library_function.py) and its old place calls
it, so that everything that called the step still does.

Not handled: a SavedModel that TensorFlow 1 wrote, whose steps are not functions (use its MetaGraphDef).
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, overload

from tfswap.compiler.backward import require_backward
from tfswap.compiler.custom_gradients import check_captures, drop_gradients_of
from tfswap.compiler.model_file import PLAN_NAME, README_NAME, ConcreteStep, ModelFile, new_folder
from tfswap.compiler.offline import OfflineStep, Planned, carry_host_limit, plan_with, step_here
from tfswap.compiler.origin import Origin, RecordingPolicy, SavedStep, sized
from tfswap.compiler.policy import Policy
from tfswap.compiler.request import PlanOptions, Precision, Request, check, names
from tfswap.device import machine
from tfswap.device.offline_placement import place_offline
from tfswap.errors import InfeasibleMemoryLimit, InvalidModel, TfswapError, UnsupportedGraph
from tfswap.frontends.graph_def import OptimizedGraph, optimize_graph_def, optimize_meta_graph_def
from tfswap.frontends.model_readme import readme
from tfswap.importers.corrupt_files import named_as_damage
from tfswap.importers.validate import validate_functions
from tfswap.ir.permits import BITS, TACTICS
from tfswap.ir.types import Shape
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.profile import Profile
from tfswap.plan.plan import Plan
from tfswap.report.report import Report
from tfswap.support.files import require_new_folder
from tfswap.support.sizes import Limit, is_share, parse_limit

if TYPE_CHECKING:
    from typing_extensions import Unpack

TRAIN_STEP = "train_step"
TRACED = re.compile(r"__inference_(.+)_\d+")
"""TensorFlow's name of a function's trace."""
SUFFIX = "_tfswap"
"""Ends the name of a library function that tfswap has made."""


class GraphOptions(PlanOptions, total=False):
    """What `optimize_graph` takes of any model, for type checkers."""

    memory_limit: Limit
    batch_size: int | None
    input_shapes: Mapping[str, Sequence[int]] | None
    portable: bool


@overload
def optimize_graph(
    model: str | os.PathLike[str],
    output_dir: str | os.PathLike[str] | None = None,
    *,
    function: str = TRAIN_STEP,
    **options: Unpack[GraphOptions],
) -> Report: ...
@overload
def optimize_graph(
    model: Any,
    *,
    feeds: Sequence[str] | None = None,
    fetches: Sequence[str] | None = None,
    signature: str | None = None,
    **options: Unpack[GraphOptions],
) -> OptimizedGraph: ...
def optimize_graph(
    model: Any,
    output_dir: str | os.PathLike[str] | None = None,
    *,
    memory_limit: Limit = None,
    function: str = TRAIN_STEP,
    feeds: Sequence[str] | None = None,
    fetches: Sequence[str] | None = None,
    signature: str | None = None,
    batch_size: int | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    tactics: Sequence[str] = TACTICS,
    host_memory_limit: int | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    mode: str = "optimize",
    profile: Profile | str | os.PathLike[str] | None = None,
    precision: Precision = None,
    spill_dir: str | os.PathLike[str] | None = None,
    spill_limit: int | str | None = None,
    portable: bool = False,
    policy: Policy | None = None,
    max_slowdown: float | None = None,
    values: str = BITS,
) -> Report | OptimizedGraph:
    """Keep the device memory of a saved training step under a limit.

        tfswap.optimize_graph("model", "model_6gib", memory_limit="6GiB", function="train_step", batch_size=64)
        made = tfswap.optimize_graph(graph_def, feeds=["x"], fetches=["loss", "train"], memory_limit="6GiB")

    Load the rewritten model by `tfswap.load`, which keeps its limit, or by `tf.saved_model.load` after `import
    tfswap.ops`. Its values are those of the original with Grappler off, for the sizes planned for and for smaller ones.

    Args:
        model: the folder of a SavedModel, a GraphDef, or a MetaGraphDef.
        output_dir: where the rewritten SavedModel goes; must not exist. Only for a SavedModel.
        memory_limit: bytes, a size ("6GiB"), a share of the unoptimised step's planned peak ("60%"; of several traces
            that of the one that takes most), or None for what the device's allocator may have. It bounds the
            allocator's whole peak. Of a SavedModel's step on several GPUs each has this limit, or a mapping has one for
            each: {"GPU:0": "6GiB", "GPU:1": "4GiB"}.
        function: for a SavedModel, the attribute that holds the training step ("train_step",
            "trainer.step"), or a signature's name. All its traces that train are rewritten.
        feeds: for a GraphDef, the names of the nodes that are fed.
        fetches: for a GraphDef, the tensors that are fetched and the ops that are run, update ops included. For a
            MetaGraphDef, those in addition to the signature's outputs and its `train_op` collection.
        signature: for a MetaGraphDef, the signature that the step is.
        batch_size: size of the leading dimension of every argument that leaves it open.
        input_shapes: full shapes by argument name, for arguments with open dimensions.
        tactics: as in `optimize`.
        host_memory_limit: the most host memory that swapped tensors may take; bytes or a size.
        spill_dir, spill_limit: as in `optimize`, of the machine that the step will run on.
        plan: as in `optimize`.
        mode: "optimize", or "analyze" to write nothing and only report, also for a limit that can't be met.
        profile: as in `optimize`.
        precision: as in `optimize`.
        portable: write TensorFlow's own ops alone, so that the model loads and serves without tfswap. It may be a model
            that only predicts. Without tfswap's ops its peak is predicted, not guaranteed.
        max_slowdown: as in `optimize`. The file's limit is then the lowest peak; of several traces each has its own.
        policy: as in `optimize`; a file does not have the tensors' source lines.
        values: as in `optimize`.

    Returns:
        For a SavedModel its Report (of the trace that takes most, when there are several). For a proto an
        OptimizedGraph: `.graph_def`, `.report`, `.plan`, and `.meta_graph_def` where one was given.

    Raises:
        InvalidModel: the model, or a part of it that an argument names, is missing or damaged; or `plan` is for another
            graph.
        UnsupportedGraph: the step has no backward pass, has unknown sizes, or is compiled by XLA.
        InfeasibleMemoryLimit: with `.floor_bytes`.
        TfswapError: an argument is malformed, or the output folder exists or can't be written.
    """
    from tensorflow.core.framework import graph_pb2
    from tensorflow.core.protobuf import meta_graph_pb2

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
        portable=portable,
        policy=policy,
        max_slowdown=max_slowdown,
        values=values,
    )
    _refuse_limit_file(request)
    sizes = ArgumentSizes(batch_size, input_shapes)
    if isinstance(model, (graph_pb2.GraphDef, meta_graph_pb2.MetaGraphDef)):
        _refuse(output_dir=output_dir, function=None if function == TRAIN_STEP else function)
        return _optimize_proto(model, feeds, fetches, signature, request, sizes)
    if not isinstance(model, (str, os.PathLike)):
        raise TfswapError(
            "optimize_graph needs a SavedModel's folder, a GraphDef or a MetaGraphDef, not "
            f"{reprlib.repr(model)}, of type {type(model).__name__}"
        )
    _refuse(feeds=feeds, fetches=fetches, signature=signature)
    if not isinstance(function, str):
        raise TfswapError(
            f"function is {function!r}, of type {type(function).__name__}: give its name in the SavedModel"
        )
    if request.changes_nothing:
        return _largest(_plan_file(ModelFile.load(model), function, request, sizes)).report
    return _optimize_file(model, _as_output(output_dir), function, request, sizes)


def _as_output(given: Any) -> str | os.PathLike[str]:
    """The folder that is written. Raises TfswapError for what is none."""
    if given is None:
        raise TfswapError("output_dir is not given: say where the rewritten SavedModel goes")
    if not isinstance(given, (str, os.PathLike)):
        raise TfswapError(f"output_dir is {given!r}, of type {type(given).__name__}: give a path")
    return given


def _optimize_proto(
    model: Any,
    feeds: Sequence[str] | None,
    fetches: Sequence[str] | None,
    signature: str | None,
    request: Request,
    sizes: ArgumentSizes,
) -> OptimizedGraph:
    """Optimize a GraphDef or a MetaGraphDef."""
    from tensorflow.core.protobuf import meta_graph_pb2

    wanted = names("fetches", fetches or (), ("loss:0", "train"))
    if isinstance(model, meta_graph_pb2.MetaGraphDef):
        _refuse(feeds=feeds)
        return optimize_meta_graph_def(model, signature, wanted, request, sizes.bind)
    _refuse(signature=signature)
    if feeds is None or not wanted:
        raise TfswapError("a GraphDef needs feeds= and fetches=: the tensors that are fed, and those that are fetched")
    return optimize_graph_def(model, names("feeds", feeds, ("x",)), wanted, request, sizes.bind)


_USED_FOR = {
    "output_dir": "a SavedModel's folder; the result of a proto is returned",
    "function": "a SavedModel's folder; a proto's step is given by feeds=, fetches= or signature=",
    "feeds": "a GraphDef; a SavedModel and a MetaGraphDef name their own",
    "fetches": "a GraphDef or a MetaGraphDef; for a SavedModel's folder give function=",
    "signature": "a MetaGraphDef; for a SavedModel's folder give function=, for a GraphDef feeds= and fetches=",
}


def _refuse_limit_file(request: Request) -> None:
    """Raise TfswapError for a limit that is in a file."""
    if request.limit_file is not None:
        raise TfswapError(
            f"memory_limit is the file {request.limit_file.path}, and a model in a file is planned for one limit: give "
            'that. tfswap.load(folder, memory_limit="file:...") reads the file before each call.'
        )


def _refuse(**given: object) -> None:
    """Raise TfswapError for an argument that this kind of model does not take."""
    for name, value in given.items():
        if value is not None:
            raise TfswapError(f"{name} is {value!r}, and it is for {_USED_FOR[name]}")


class ArgumentSizes:
    """The sizes that a user gave for dimensions that the file leaves open.

    Args:
        start: by argument, sizes of axes that have no other size; the axes that `vary` names.
    """

    def __init__(
        self,
        batch_size: int | None,
        input_shapes: Mapping[str, Sequence[int]] | None,
        start: Mapping[str, Mapping[int, int]] | None = None,
    ):
        self.start = start or {}
        if batch_size is not None and not (_is_whole(batch_size) and batch_size >= 1):
            raise TfswapError(f"batch_size is {batch_size!r}, of type {type(batch_size).__name__}: give a positive int")
        self.batch_size = None if batch_size is None else int(batch_size)
        if not isinstance(input_shapes, (Mapping, type(None))):
            raise TfswapError(f"input_shapes is {input_shapes!r}: give a dict of full shapes by argument name")
        self.input_shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in (input_shapes or {}).items():
            whole = isinstance(shape, Iterable) and all(_is_whole(d) and d >= 0 for d in shape)
            if not whole:
                raise TfswapError(f"input_shapes[{name!r}] is {shape!r}: give whole numbers, such as (64, 224, 224, 3)")
            self.input_shapes[name] = tuple(int(d) for d in shape)

    def bind(self, step: str, arguments: Mapping[str, tuple[Sequence[str], Shape]]) -> dict[str, Shape]:
        """A full shape for each argument.

        Args:
            arguments: by name, its other names and the shape that the file gives it.

        Raises:
            InvalidModel: a name in `input_shapes` is no argument's, or its shape contradicts the file's.
            UnsupportedGraph: dimensions stay open.
        """
        known = {n for name, (others, _) in arguments.items() for n in (name, *others)}
        for where, named in (("input_shapes", self.input_shapes), ("vary", self.start)):
            for stranger in sorted(set(named) - known):
                raise InvalidModel(
                    f"{where} names {stranger!r}, which {step!r} does not take: its arguments are "
                    f"{', '.join(sorted(arguments)) or 'none'}"
                )
        result, still_open = {}, []
        for name, (others, shape) in arguments.items():
            given = next((self.input_shapes[n] for n in (name, *others) if n in self.input_shapes), None)
            if given is not None:
                shape = _agreed(name, given, shape)
            elif shape is not None and shape and shape[0] is None and self.batch_size is not None:
                shape = (self.batch_size, *shape[1:])
            axes = next((self.start[n] for n in (name, *others) if n in self.start), {})
            if shape is not None:
                if beyond := [axis for axis in axes if axis not in range(len(shape))]:
                    raise InvalidModel(f"vary has axis {beyond[0]} of {name!r}, whose shape is {_shape_text(shape)}")
                shape = tuple(axes.get(i) if d is None else d for i, d in enumerate(shape))
            if shape is None or None in shape:
                still_open.append(f"{name} {_shape_text(shape)}")
            result[name] = shape
        if still_open:
            raise UnsupportedGraph(
                f"{step!r} leaves sizes open, and a plan needs them: {'; '.join(still_open)}. Give batch_size= (the "
                "leading dimension) or input_shapes={name: full shape}."
            )
        return result


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _shape_text(shape: Shape) -> str:
    return "of unknown rank" if shape is None else f"[{', '.join('?' if d is None else str(d) for d in shape)}]"


def _agreed(name: str, given: tuple[int, ...], shape: Shape) -> Shape:
    if shape is not None and (
        len(shape) != len(given) or any(d is not None and d != g for d, g in zip(shape, given, strict=True))
    ):
        raise InvalidModel(f"input_shapes[{name!r}] is {given}, and the model has {shape} (None is open)")
    return given


def _optimize_file(
    model: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    function: str,
    request: Request,
    sizes: ArgumentSizes,
) -> Report:
    require_new_folder(output_dir, model)  # checked again where it is made: reading a large model takes long
    file = ModelFile.load(model)
    file.check_variables()
    file.check_assets()
    recording = None if request.options.policy is None else RecordingPolicy(request.options.policy)
    request = replace(request, options=replace(request.options, policy=recording))
    with new_folder(file.path, output_dir) as folder:
        planned = _plan_file(file, function, request, sizes)
        changed = {step: made for step, made in planned.items() if not made.changes_nothing}
        if any("" not in made.plans for made in changed.values()):
            file.write_devices()
        carry_host_limit(changed.values(), request)
        original = {name: type(fdef).FromString(fdef.SerializeToString()) for name, fdef in file.library.items()}
        for step, made in changed.items():
            _replace_step(file, step, made)
        drop_gradients_of(file, changed)
        check_captures(file)
        file.copy(folder)
        if changed:
            file.write(folder)
            text = readme(folder, function, changed, request.options)
            (folder / README_NAME).write_text(text, encoding="utf-8")
        Origin.make_room(folder)
        main = _largest(planned)
        steps: list[SavedStep] = []
        for step, made in planned.items():
            name = PLAN_NAME if made is main else f"tfswap_plan.{step}.json"
            arguments = tuple(sized((feed.name, feed) for feed in made.graph.feeds))
            steps.append(SavedStep(step, name, step in changed, arguments, tuple(filter(None, made.plans))))
            for device, plan_name in steps[-1].plan_names.items():
                (folder / plan_name).write_text(made.plans[device].to_json(), encoding="utf-8")
        answers = () if recording is None else recording.kept
        replaced = [fdef for name, fdef in original.items() if name in changed or name not in file.library]
        limits = {device: plan.limit_bytes for device, plan in main.plans.items()}
        Origin.of(function, limits, steps, request.options, answers).write(folder, replaced)
    return main.report


def _plan_file(file: ModelFile, function: str, request: Request, sizes: ArgumentSizes) -> dict[str, Planned]:
    """Plan each trace of a function that trains; by name of its library function."""
    planned: dict[str, Planned] = {}
    refused: list[UnsupportedGraph | InvalidModel] = []
    found: dict[str, OfflineStep] = {}
    # Of several traces one may not train (training=False), or a given plan may be of another one.
    for step in file.steps(function):
        graph = import_step(file, function, step, sizes)
        try:
            if not request.options.portable:  # which may be for serving
                require_backward(function, graph, file.training_functions)
            found[step.name] = step_here(graph, request.options, file.variables())
        except (UnsupportedGraph, InvalidModel) as error:
            refused.append(error)
    request = _with_one_limit(request, list(found.values()))
    too_large: list[InfeasibleMemoryLimit] = []
    for name, offline in found.items():
        try:
            traced = TRACED.fullmatch(name)
            step = traced[1] if traced is not None and len(found) == 1 else name  # the full name distinguishes several
            planned[name] = plan_with(offline, step, request)
        except InvalidModel as error:
            refused.append(error)
        except InfeasibleMemoryLimit as error:
            too_large.append(error)
    if too_large:
        raise max(too_large, key=lambda error: error.floor_bytes)
    if not planned:
        raise refused[0]
    return planned


def _with_one_limit(request: Request, steps: Sequence[OfflineStep]) -> Request:
    """`request` with the same bytes for all traces: a share is of the largest trace's peak. A smaller last batch may
    use as much.
    """
    if len(steps) < 2:
        return request
    devices = list(dict.fromkeys(device for step in steps for device in step.optimizers))
    limits: dict[str, int | str] = {}
    for device in devices:
        try:
            limit = request.limit(device) if device else request.single_limit
        except TfswapError:
            return request  # the plan of the step says so
        if limit is None or not is_share(limit):
            return request
        there = [step.optimizers[device] for step in steps if device in step.optimizers]
        limits[device] = max(parse_limit(limit, lambda one=one: one.baseline.peak_bytes) for one in there)
    return replace(request, memory_limit=limits[""] if devices == [""] else limits)


def import_step(
    file: ModelFile,
    function: str,
    step: ConcreteStep,
    sizes: ArgumentSizes,
    on: tuple[DeviceModel, Collection[str] | None] | None = None,
) -> Any:
    """The graph of one trace, with these sizes; its nodes and the file's variables are placed.

    Args:
        on: the device and the GPUs to place them on, as of `place_offline`; by default those of this machine.

    Raises InvalidModel, UnsupportedGraph.
    """
    from tensorflow.core.framework import types_pb2

    from tfswap.importers.library_function import (
        file_shape,
        import_library_function,
        refuse_compiled,
        require_known_ops,
    )

    what = f"{function!r} of the SavedModel at {str(file.path)!r}"
    with named_as_damage(what):
        traced, fdef = file.library[step.traced], file.library[step.name]
        for part in (traced, fdef):
            refuse_compiled(part.signature.name, part.attr, part.node_def, file.library)
            require_known_ops(part.node_def)
        validate_functions(what, file.library, [step.traced, step.name])
        if step.name.endswith(SUFFIX):
            raise InvalidModel(
                f"{function!r} of {str(file.path)!r} has been rewritten by tfswap already: start from the original "
                "model"
            )
        arguments = [a.name for a in fdef.signature.input_arg]
        resources = {a.name for a in fdef.signature.input_arg if a.handle_data or a.type == types_pb2.DT_RESOURCE}
        own = [a for a in arguments[: len(arguments) - step.captures] if a not in resources]
        shapes = sizes.bind(function, {a: (step.user_names[a], file_shape(fdef, a)) for a in own})
        graph = import_library_function(file.library, step.name, shapes, step.handles, step.values)
    known = [file.devices.get(step.captured.get(feed.name, -1), "") for feed in graph.feeds]
    model, gpus = on or (machine.current_device()[1], None)
    given = place_offline(function, graph, known, model, gpus)
    file.note_devices(step, {feed.name: device for feed, device in zip(graph.feeds, given, strict=True)})
    return graph


def open_axes(file: ModelFile, step: ConcreteStep, argument: str, shape: Shape) -> tuple[int, ...]:
    """The axes of an argument, of this shape when bound, whose sizes the file leaves open."""
    from tfswap.importers.library_function import file_shape

    stated = file_shape(file.library[step.name], argument)
    return tuple(axis for axis in range(len(shape or ())) if stated is None or stated[axis] is None)


def _replace_step(file: ModelFile, name: str, made: Planned) -> None:
    from tfswap.exporters.library_function import export_library_function, wrap_function

    original = file.library[name]
    outputs = [a.name for a in original.signature.output_arg]
    inner, bodies = export_library_function(made.graph, name + SUFFIX, outputs, made.target)
    for key in ("_construction_context",):
        if key in original.attr:
            inner.attr[key].CopyFrom(original.attr[key])
    wrapper = wrap_function(original, inner)
    for function in (inner, *bodies):
        file.replace_function(function)
    file.replace_function(wrapper)


def _largest(planned: Mapping[str, Planned]) -> Planned:
    return max(planned.values(), key=lambda made: made.report.baseline_peak_bytes)
