"""A SavedModel on disk: found, parsed, searched for the function that trains, and written back whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfswap.compiler.backward import is_training
from tfswap.compiler.offline import Variable
from tfswap.errors import InvalidModel
from tfswap.importers.corrupt_files import named_as_damage
from tfswap.importers.function import dense_shapes
from tfswap.importers.library import through_call
from tfswap.importers.references import reachable
from tfswap.importers.shapes import HandleType, shape_of
from tfswap.importers.validate import is_type, validate_functions
from tfswap.support import progress
from tfswap.support.files import require_new_folder, require_regular, unwritable_folder

README_NAME = "README.txt"
PLAN_NAME = "tfswap_plan.json"
NAMES_SHOWN = 20
ENDINGS = ("pb", "pbtxt", "cpb")
"""The endings of the file `saved_model` in a SavedModel's folder."""


@dataclass(frozen=True)
class ConcreteStep:
    """One trace of the function that trains.

    Attributes:
        name: the name of the library function whose body is the step.
        traced: the concrete function that a user's call reaches, which may only call `name`.
        user_names: other names of each argument of `name` that a user may know.
        captures: the number of captures, which are its last arguments.
        handles: the types of variables behind resource arguments, as far as the object graph has them.
        values: known values of arguments: the dense shapes of sparse tensors.
        captured: by captured argument, the number of the object.
    """

    name: str
    traced: str
    user_names: dict[str, list[str]]
    captures: int
    handles: dict[str, HandleType]
    values: dict[str, tuple[int, ...]]
    captured: dict[str, int]


@dataclass
class ModelFile:
    """A parsed SavedModel. `library` shares its FunctionDefs with `proto`.

    Attributes:
        devices: by object, the device that it is loaded on, as far as that is known: from the file
            (`tf.saved_model.SaveOptions(experimental_variable_policy=...)`), or from how steps use it.
    """

    path: Path
    proto: Any
    meta_graph: Any
    library: dict[str, Any] = field(default_factory=dict)
    devices: dict[int, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelFile:
        """Parse the SavedModel at `path`. Raises InvalidModel when there is none or it is damaged."""
        import tensorflow as tf
        from tensorflow.python.saved_model import loader_impl

        where = os.fspath(path)
        if not os.path.isdir(where):
            state = "is not a folder" if os.path.exists(where) else "does not exist"
            raise InvalidModel(f"{where!r} {state}: give the folder that tf.saved_model.save wrote")
        try:
            _require_regular_files(Path(where))
            proto = loader_impl.parse_saved_model(where)
        except (OSError, ValueError, tf.errors.OpError) as error:
            if not any((Path(where) / f"saved_model.{e}").exists() for e in ENDINGS):
                raise InvalidModel(
                    f"{where!r} holds no saved_model.pb: give the folder that tf.saved_model.save wrote"
                ) from error
            reason = str(error).rstrip(".")
            raise InvalidModel(f"the SavedModel at {where!r} can't be read: {reason}. Save it again.") from error
        if not proto.meta_graphs:
            raise InvalidModel(f"the SavedModel at {where!r} is empty: it has no graph. Save it again.")
        meta_graph = next((m for m in proto.meta_graphs if "serve" in m.meta_info_def.tags), proto.meta_graphs[0])
        made = cls(Path(where), proto, meta_graph)
        made.library = {f.signature.name: f for f in meta_graph.graph_def.library.function}
        made._validate_objects()
        made.devices = dict(_saved_devices(meta_graph.object_graph_def.nodes))
        return made

    def _validate_objects(self) -> None:
        """Raises InvalidModel where objects, or what functions capture, refer to objects that are not there."""
        graph = self.meta_graph.object_graph_def
        there = range(len(graph.nodes))
        wrong = {child.node_id for node in graph.nodes for child in node.children if child.node_id not in there}
        for name, concrete in graph.concrete_functions.items():
            wrong |= {index for index in concrete.bound_inputs if index not in there}
            function = self.library.get(name)
            if function is not None and len(concrete.bound_inputs) > len(function.signature.input_arg):
                raise self._damaged(f"{name!r} captures more than it takes")
        if wrong:
            raise self._damaged(f"it refers to an object {min(wrong)} of {len(there)}")
        for node in graph.nodes:
            if node.WhichOneof("kind") == "variable" and not is_type(node.variable.dtype):
                raise self._damaged(f"a variable is of an unknown element type ({node.variable.dtype})")

    def _damaged(self, why: str) -> InvalidModel:
        return InvalidModel(f"{self.title} is damaged: {why}. Save it again.")

    def loaded(self) -> Any:
        """The model, as TensorFlow loads it. Raises InvalidModel where it can't be."""
        import tensorflow as tf

        with self.named():
            validate_functions(self.title, self.library, self.library)
            options = with_devices() if len(set(self.devices.values())) > 1 else None
            return tf.saved_model.load(str(self.path), options=options)

    def named(self) -> contextlib.AbstractContextManager[None]:
        """`named_as_damage` for this file."""
        return named_as_damage(self.title)

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"the SavedModel at {str(self.path)!r}"

    def function_names(self) -> dict[str, list[str]]:
        """Concrete functions by the names that a user can give: attribute paths, then signatures."""
        found: dict[str, list[str]] = {}
        nodes = self.meta_graph.object_graph_def.nodes
        pending = [("", 0)] if nodes else []
        seen = {0}
        while pending:
            path, index = pending.pop(0)
            for child in sorted(nodes[index].children, key=lambda c: c.local_name):
                name = f"{path}.{child.local_name}" if path else child.local_name
                node = nodes[child.node_id]
                kind = node.WhichOneof("kind")
                if kind == "function" and node.function.concrete_functions:
                    found.setdefault(name, list(node.function.concrete_functions))
                elif kind == "bare_concrete_function" and path == "signatures":
                    found.setdefault(child.local_name, [node.bare_concrete_function.concrete_function_name])
                elif child.node_id not in seen:
                    seen.add(child.node_id)
                    pending.append((name, child.node_id))
        return found

    def steps(self, function: str) -> list[ConcreteStep]:
        """The traces of a function. Raises InvalidModel, with the names of all functions, where there is none."""
        with self.named():
            names = self.function_names()
            if function not in names:
                raise InvalidModel(self._no_function(function, names))
            steps: dict[str, ConcreteStep] = {}
            for traced in names[function]:
                if traced not in self.library:
                    raise InvalidModel(
                        f"{function!r} of {str(self.path)!r} is {traced!r}, which the file's library does not have: "
                        "the SavedModel is damaged. Save it again."
                    )
                step = self._resolve(traced)
                steps.setdefault(step.name, step)
            return list(steps.values())

    def training_functions(self) -> list[str]:
        """Names of the functions that train, also by functions that they call; sorted."""
        return [
            name
            for name, traces in sorted(self.function_names().items())
            if any(
                is_training(node.op, node.name)
                for called in {*traces, *reachable((n for t in traces for n in self._nodes(t)), self.library)}
                for node in self._nodes(called)
            )
        ]

    def _nodes(self, function: str) -> Iterable[Any]:
        return self.library[function].node_def if function in self.library else ()

    def _no_function(self, function: str, names: dict[str, list[str]]) -> str:
        if not self.meta_graph.object_graph_def.nodes and self.meta_graph.signature_def:
            version = self.meta_graph.meta_info_def.tensorflow_version
            of_version = f", of TensorFlow {version}," if version else ""
            return (
                f"the SavedModel at {str(self.path)!r}{of_version} has signatures but no object graph that names "
                "functions, as tf.saved_model.save writes one: it was saved in TensorFlow 1's way, or has lost it. "
                "Load its MetaGraphDef and call "
                "optimize_graph(meta_graph_def, signature=..., fetches=[train op]), or save the model again."
            )
        shown = sorted(names)[:NAMES_SHOWN]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        there = f"those that it has are {', '.join(shown)}{more}. Give function=."
        if not shown:
            there = "it has none. Save an object that has the tf.function that trains as an attribute."
        return f"the SavedModel at {str(self.path)!r} has no function {function!r}: {there}"

    def trace(self, name: str) -> ConcreteStep:
        """The library function of this name, without following calls."""
        concrete = self.meta_graph.object_graph_def.concrete_functions
        bound = concrete[name].bound_inputs if name in concrete else []
        arguments = enumerate(self.library[name].signature.input_arg)
        names = {a.name: _specified_names(self.library[name], i) for i, a in arguments}
        handles, values = self._handles(name, bound), self._values(name, len(bound))
        captured = dict(zip([*names][len(names) - len(bound) :], bound, strict=True))
        return ConcreteStep(name, name, names, len(bound), handles, values, captured)

    def same_as(self, name: str) -> list[str]:
        """The traces with the same content as a library function, since saving copies some; else itself."""

        def content(function: str) -> Any:
            made = type(self.library[function])()
            made.CopyFrom(self.library[function])
            made.signature.name = ""
            return made

        if name in self.meta_graph.object_graph_def.concrete_functions:
            return [name]
        traces = {trace for traces in self.function_names().values() for trace in traces if trace in self.library}
        own = content(name)
        return sorted(trace for trace in traces if content(trace) == own) or [name]

    def _resolve(self, traced: str) -> ConcreteStep:
        """Follow functions that do nothing but call another, such as a signature's wrapper."""
        start = self.trace(traced)
        name, names, handles, fdef = traced, start.user_names, start.handles, self.library[traced]
        values, captured = start.values, start.captured
        while (passed := through_call(fdef, self.library.get)) is not None:
            caller, fdef = fdef, passed.called
            inputs = [caller.signature.input_arg[position].name for position in passed.arguments]
            callee = [a.name for a in fdef.signature.input_arg]
            pairs = list(zip(callee, inputs, strict=True))
            names = {a: [*_specified_names(fdef, i), source, *names[source]] for i, (a, source) in enumerate(pairs)}
            handles = {a: handles[source] for a, source in pairs if source in handles}
            values = {a: values[source] for a, source in pairs if source in values}
            captured = {a: captured[source] for a, source in pairs if source in captured}
            name = fdef.signature.name
        return ConcreteStep(name, traced, names, start.captures, handles, values, captured)

    def _handles(self, name: str, bound: Any) -> dict[str, HandleType]:
        arguments = self.library[name].signature.input_arg
        nodes = self.meta_graph.object_graph_def.nodes
        found = {}
        for argument, index in zip(arguments[len(arguments) - len(bound) :], bound, strict=True):
            if nodes[index].WhichOneof("kind") == "variable":
                found[argument.name] = (nodes[index].variable.dtype, nodes[index].variable.shape)
        return found

    def _values(self, name: str, captures: int) -> dict[str, tuple[int, ...]]:
        from tensorflow.python.saved_model import nested_structure_coder

        concrete = self.meta_graph.object_graph_def.concrete_functions
        if name not in concrete or not concrete[name].HasField("canonicalized_input_signature"):
            return {}
        arguments = [argument.name for argument in self.library[name].signature.input_arg]
        try:
            signature = nested_structure_coder.decode_proto(concrete[name].canonicalized_input_signature)
        except (TypeError, ValueError, LookupError, nested_structure_coder.NotEncodableError):
            return {}  # types of another package, without which TensorFlow refuses to load the file
        return dense_shapes(signature, arguments[: len(arguments) - captures])

    def variables(self) -> list[Variable]:
        """Every variable that loading creates, with its device where that is known."""
        from tensorflow.python.framework import dtypes

        nodes = enumerate(self.meta_graph.object_graph_def.nodes)
        found = ((i, n.variable) for i, n in nodes if n.WhichOneof("kind") == "variable")
        with self.named():
            return [
                Variable(dtypes.as_dtype(v.dtype).name, shape_of(v.shape), self.devices.get(i, "")) for i, v in found
            ]

    def note_devices(self, step: ConcreteStep, devices: Mapping[str, str]) -> None:
        """Note on which device the objects are that a step captures, where that is not known yet.

        Args:
            devices: by argument; empty for others.
        """
        for argument, index in step.captured.items():
            if devices.get(argument):
                self.devices.setdefault(index, devices[argument])

    def write_devices(self) -> None:
        """Write the devices of the variables into the proto, for loading with `save_variable_devices`."""
        for index, device in self.devices.items():
            node = self.meta_graph.object_graph_def.nodes[index]
            if node.WhichOneof("kind") == "variable":
                node.variable.device = device

    def check_variables(self) -> None:
        """Read the saved values of the variables, without keeping them: a copy without them could not be loaded.

        Raises:
            InvalidModel: the index or data is missing or damaged.
        """
        import tensorflow as tf

        try:
            reader = tf.train.load_checkpoint(str(self.path / "variables" / "variables"))
            for name in progress.over("reading variables", sorted(reader.get_variable_to_shape_map())):
                reader.get_tensor(name)  # checks its length and checksum
        # The reader raises the library's status as one of these.
        except (tf.errors.OpError, RuntimeError, ValueError, LookupError) as error:
            reason = " ".join(str(error).split())  # one line
            raise InvalidModel(
                f"the variables of the SavedModel at {str(self.path)!r} are missing or damaged: {reason}. It takes the "
                "whole of its variables folder; copy that again, or save the model again."
            ) from error

    def check_assets(self) -> None:
        """Raises InvalidModel where a file that the model names is not there: a copy would not load either."""
        import tensorflow as tf

        assets = self.path / tf.saved_model.ASSETS_DIRECTORY
        missing = [a.filename for a in self.meta_graph.asset_file_def if not (assets / a.filename).is_file()]
        if missing:
            raise InvalidModel(
                f"the SavedModel at {str(self.path)!r} names the asset {missing[0]!r}, which is missing: it takes the "
                "whole of its assets folder; copy that again, or save the model again."
            )

    def replace_function(self, fdef: Any) -> None:
        """Put `fdef` in the place of the library's function of that name, or add it."""
        name = fdef.signature.name
        if name in self.library:
            self.library[name].CopyFrom(fdef)
        else:
            self.library[name] = self.meta_graph.graph_def.library.function.add()
            self.library[name].CopyFrom(fdef)

    def copy(self, folder: Path) -> None:
        """Copy the SavedModel's files, as they are on disk."""
        shutil.copytree(self.path, folder)

    def write(self, folder: Path) -> None:
        """Write the proto into `folder`, a copy of this SavedModel."""
        from tensorflow.python.framework import meta_graph
        from tensorflow.python.saved_model import fingerprinting_utils

        operations = meta_graph.stripped_op_list_for_graph(self.meta_graph.graph_def)
        self.meta_graph.meta_info_def.stripped_op_list.CopyFrom(operations)
        (folder / "saved_model.pb").write_bytes(self.proto.SerializeToString(deterministic=True))
        (folder / "saved_model.pbtxt").unlink(missing_ok=True)
        fingerprint = folder / "fingerprint.pb"
        if fingerprint.exists():  # of the old bytes
            fingerprint.unlink()
            fingerprinting_utils.write_fingerprint(str(folder))


def with_devices() -> Any:
    """Options of `tf.saved_model.load` with which variables are on the devices that the file has for them."""
    import tensorflow as tf

    policy = tf.saved_model.experimental.VariablePolicy.SAVE_VARIABLE_DEVICES
    return tf.saved_model.LoadOptions(experimental_variable_policy=policy)


def _saved_devices(nodes: Iterable[Any]) -> Iterator[tuple[int, str]]:
    """The objects of a file that have a device there, by number."""
    for index, node in enumerate(nodes):
        kind = node.WhichOneof("kind")
        if kind in ("variable", "resource") and (device := getattr(node, kind).device):
            yield index, device


def _require_regular_files(folder: Path) -> None:
    """Raise OSError where something in the folder of a SavedModel is neither a file nor a folder."""
    if not any(os.path.lexists(folder / f"saved_model.{e}") for e in ENDINGS):
        return  # any folder, however large
    for top in (folder, folder / "variables", folder / "assets"):  # the latter two can be links
        for inside, _, names in os.walk(top):
            for name in names:
                require_regular(Path(inside) / name)


def _specified_names(fdef: Any, index: int) -> list[str]:
    if index in fdef.arg_attr and "_user_specified_name" in fdef.arg_attr[index].attr:
        return [fdef.arg_attr[index].attr["_user_specified_name"].s.decode()]
    return []


@contextlib.contextmanager
def new_folder(source: Path, target: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to make a folder at that becomes `target` when the block ends well, and is gone when it does not.

    Args:
        source: the model that `target` is made from.

    Raises:
        TfswapError: `target` exists, lies inside `source`, or can't be written.
    """
    require_new_folder(target, source)
    final = Path(os.path.abspath(target))
    # Named before it is made: a signal that comes right after that finds it too.
    working = final.with_name(f".{final.name}.{uuid.uuid4().hex[:16]}.tmp")
    try:
        try:
            working.mkdir(mode=0o700)
        except ValueError as error:  # a name that no file can have
            raise unwritable_folder(target, _reason(error)) from error
        yield working / "model"
        os.rename(working / "model", final)
    except OSError as error:
        raise unwritable_folder(target, _reason(error)) from error
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _reason(error: Exception) -> str:
    """Why a file can't be written. (shutil.copytree collects a reason for each file.)"""
    if isinstance(error, shutil.Error):
        _, _, why = error.args[0][0]
        return str(why)
    return getattr(error, "strerror", None) or str(error)
