"""The original steps in a rewritten SavedModel, so that they can be planned again when the model is loaded.

A model that `optimize_graph` has written has two files in the folder of `saved_model.pb`: the request, as JSON, and the
replaced functions, as a compressed function library. The functions that they call are in the model's own library.
`tf.saved_model.load` reads neither file. A decorated function that was saved as a signature has attributes in its gate:
the original function, the request and the plan.

Not kept: a profile, whose times are those of one machine; a policy itself. The policy's answers are kept.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfswap.compiler.model_file import ConcreteStep, ModelFile
from tfswap.compiler.options import Options, Spill
from tfswap.compiler.policy import Policy, TensorFacts, note_permits
from tfswap.errors import InvalidModel, TfswapError
from tfswap.importers.shapes import HANDLES
from tfswap.ir.custom_ops import GATE
from tfswap.ir.graph import Graph, Node, Opaque
from tfswap.ir.permits import BITS
from tfswap.plan.plan import Plan
from tfswap.support.files import read_saved, require_regular
from tfswap.support.json_fields import decode, parse_json
from tfswap.support.sizes import Limit

REQUEST_NAME = "tfswap_request.json"
FUNCTIONS_NAME = "tfswap_original.pb.zlib"
FORMAT = 1
Plans = Mapping[str, Plan]
"""The plans of a step, by device; of a step on one device by ""."""
MOST_BYTES = 2**31
"""The largest size of a FunctionDefLibrary, and the most bytes that are decompressed from a damaged file."""


@dataclass(frozen=True)
class Sized:
    """An argument of a step, and the shape that its plan is for."""

    name: str
    shape: tuple[int, ...]


def sized(arguments: Iterable[tuple[str, Node]]) -> Iterator[Sized]:
    """The arguments of a step with known shapes, by their feeds.

    Args:
        arguments: (name, feed) of each.
    """
    for name, feed in arguments:
        shape = tuple(size for size in feed.outputs[0].shape or () if size is not None)
        if feed.outputs[0].dtype not in HANDLES and shape == feed.outputs[0].shape:
            yield Sized(name, shape)


@dataclass(frozen=True)
class SavedStep:
    """One planned trace.

    Attributes:
        name: the name of its library function.
        plan: the name of the plan's file.
        rewritten: whether the function was replaced. A step that fits was left unchanged.
        arguments: the arguments and shapes that the plan is for.
        devices: those that it is planned for, where they are several: each has a plan.
    """

    name: str
    plan: str
    rewritten: bool
    arguments: tuple[Sized, ...]
    devices: tuple[str, ...] = ()

    @property
    def plan_names(self) -> dict[str, str]:
        """The names of the plans' files by device; of a step on one device by ""."""
        plan = Path(self.plan).name
        start, _, end = plan.rpartition(".")
        others = {device: Path(f"{start}.{device.replace(':', '_')}.{end}").name for device in self.devices[1:]}
        return {self.devices[0] if self.devices else "": plan, **others}


@dataclass(frozen=True)
class Answer:
    """A policy's answer for a tensor: the allowed tactics."""

    tensor: str
    tactics: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """A pattern of the names of nodes, and their precision."""

    pattern: str
    precision: str


@dataclass(frozen=True)
class DeviceLimit:
    """The limit of a device, in bytes."""

    device: str
    limit_bytes: int


@dataclass(frozen=True)
class Origin:
    """The request by which a SavedModel was rewritten, and its results.

    Attributes:
        format: FORMAT.
        function: the name by which the steps were found.
        limit_bytes: the limit of all steps; None for that of the device's allocator. Of several devices the first's.
        steps: the planned steps.
        tactics, host_limit_bytes, precision, portable, values: as of Options.
        spill_dir, spill_limit_bytes: the folder and limit of the options' Spill.
        answers: the policy's answers that do not allow everything.
        number: the number in the names of its files: above 0 where another function was rewritten later.
        device_limits: of several devices, the limit of each.
    """

    format: int
    function: str
    limit_bytes: int | None
    steps: tuple[SavedStep, ...]
    tactics: tuple[str, ...]
    host_limit_bytes: int | None
    spill_dir: str | None
    spill_limit_bytes: int | None
    precision: tuple[Rule, ...]
    portable: bool
    answers: tuple[Answer, ...]
    number: int = 0
    device_limits: tuple[DeviceLimit, ...] = ()
    values: str = BITS

    @staticmethod
    def of(
        function: str,
        limits: Mapping[str, int | None],
        steps: Iterable[SavedStep],
        options: Options,
        answers: Iterable[Answer],
    ) -> Origin:
        """
        Args:
            limits: by device, in bytes; of one device by "".
        """
        spill = options.spill
        return Origin(
            FORMAT,
            function,
            next(iter(limits.values())),
            tuple(steps),
            options.tactics,
            options.host_limit_bytes,
            None if spill is None else spill.folder,
            None if spill is None else spill.limit_bytes,
            tuple(Rule(pattern, precision) for pattern, precision in options.precision),
            options.portable,
            tuple(answers),
            device_limits=tuple(
                DeviceLimit(device, limit) for device, limit in limits.items() if device and limit is not None
            ),
            values=options.values,
        )

    @property
    def limit(self) -> Limit:
        """The limit, or that of each device."""
        return {each.device: each.limit_bytes for each in self.device_limits} or self.limit_bytes

    @property
    def options(self) -> Options:
        """The same for a process that has tfswap's ops."""
        return Options(
            self.tactics,
            self.host_limit_bytes,
            None if self.spill_dir is None else Spill(self.spill_dir, self.spill_limit_bytes),
            precision=tuple((rule.pattern, rule.precision) for rule in self.precision),
            policy=_answered(self.answers) if self.answers else None,
            values=self.values,
        )

    def carry(self, graph: Graph, plan: Plan) -> None:
        """Write this, which is of one step alone, and its plan into the gate of the step's graph, in place."""
        from tensorflow.core.framework import attr_value_pb2

        original = attr_value_pb2.AttrValue()
        original.list.func.add(name=self.steps[0].name)
        gate = next(node for node in graph if node.op == GATE)
        gate.attrs = {
            **gate.attrs,
            "origin": Opaque("attr", original.SerializeToString(deterministic=True)),
            "request": zlib.compress(self._json().encode()),
            "plan": zlib.compress(plan.to_json().encode()),
        }

    def _json(self) -> str:
        content = dataclasses.asdict(self)
        del content["number"]  # it is in the names of the files
        for each, name in ((content, "device_limits"), *((step, "devices") for step in content["steps"])):
            if not each[name]:  # as files of one device have always been
                del each[name]
        return json.dumps(content, indent=1, sort_keys=True)

    def write(self, folder: Path, replaced: Iterable[Any]) -> None:
        """Write both files.

        Args:
            replaced: the original FunctionDefs that were replaced or removed in the model's library.
        """
        from tensorflow.core.framework import function_pb2

        (folder / REQUEST_NAME).write_text(self._json() + "\n", encoding="utf-8")
        library = function_pb2.FunctionDefLibrary(function=replaced)
        if library.function:
            (folder / FUNCTIONS_NAME).write_bytes(zlib.compress(library.SerializeToString(deterministic=True), 9))

    @staticmethod
    def make_room(folder: Path) -> None:
        """Give the files of an earlier rewriting other names. Raises InvalidModel where they are damaged."""
        if not (folder / REQUEST_NAME).is_file():
            return
        number = len(Origin.read(folder))
        earlier = read_saved(folder / REQUEST_NAME, "request", _parse)
        steps: list[SavedStep] = []
        for step in earlier.steps:
            for plan in step.plan_names.values():
                if (folder / plan).is_file():
                    (folder / plan).rename(folder / numbered(plan, number))
            steps.append(dataclasses.replace(step, plan=numbered(Path(step.plan).name, number)))
        if (folder / FUNCTIONS_NAME).exists():
            (folder / FUNCTIONS_NAME).rename(folder / numbered(FUNCTIONS_NAME, number))
        (folder / REQUEST_NAME).unlink()
        moved = dataclasses.replace(earlier, steps=tuple(steps))
        (folder / numbered(REQUEST_NAME, number)).write_text(moved._json() + "\n", encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> list[Origin]:
        """The origins of a model: the latest first, then those of functions that were rewritten earlier, in order.

        Raises:
            InvalidModel: the folder has no such file, or a damaged one.
        """
        if not (folder / REQUEST_NAME).is_file():
            raise InvalidModel(
                f"the SavedModel at {str(folder)!r} has no {REQUEST_NAME}, and no signature that is a decorated step: "
                "no limit is known of its functions. Rewrite it with tfswap.optimize_graph (a rewritten one, from the "
                "original model), or save it with signatures=step, a function that tfswap.optimize has decorated."
            )
        found = [read_saved(folder / REQUEST_NAME, "request", _parse)]
        while (path := folder / numbered(REQUEST_NAME, len(found))).is_file():
            earlier = read_saved(path, "request", _parse)
            found.append(dataclasses.replace(earlier, number=len(found)))
        return found

    def require(self, file: ModelFile) -> tuple[ModelFile, dict[str, tuple[SavedStep, ConcreteStep, Plans]]]:
        """`file`, which this is of, with the functions as they were; and its planned steps with their plans, by name.

        Raises InvalidModel where something is missing or damaged.
        """
        file = dataclasses.replace(file, library={**file.library, **self.replaced(file.path)})
        traces = {step.name: step for step in file.steps(self.function)}
        for saved in self.steps:
            if saved.name not in traces:
                raise InvalidModel(
                    f"the SavedModel at {str(file.path)!r} has no function {saved.name!r}, which was planned. {_AGAIN}"
                )
        return file, {
            saved.name: (
                saved,
                traces[saved.name],
                {device: Plan.load(file.path / name) for device, name in saved.plan_names.items()},
            )
            for saved in self.steps
        }

    def replaced(self, folder: Path) -> dict[str, Any]:
        """The functions that were replaced, by name. Raises InvalidModel where they are missing or damaged."""
        from google.protobuf.message import DecodeError
        from tensorflow.core.framework import function_pb2

        wanted = {step.name for step in self.steps if step.rewritten}
        found: dict[str, Any] = {}
        path = folder / numbered(FUNCTIONS_NAME, self.number)
        try:
            if wanted:
                packed = zlib.decompressobj()
                require_regular(path)
                data = packed.decompress(path.read_bytes(), MOST_BYTES)
                if not packed.eof:
                    raise zlib.error("it is cut short")
                found = {f.signature.name: f for f in function_pb2.FunctionDefLibrary.FromString(data).function}
        except (OSError, zlib.error, DecodeError) as error:
            raise InvalidModel(f"the original functions can't be read from {str(path)!r}: {error}. {_AGAIN}") from error
        if missing := sorted(wanted - found.keys()):
            raise InvalidModel(f"{str(path)!r} does not have the function {missing[0]!r}. {_AGAIN}")
        return found


@dataclass(frozen=True)
class Carried:
    """A decorated step in a file, which a signature runs.

    Attributes:
        rewritten: the library function that carries out its plan.
        original: the one that was planned, which an attribute may run.
    """

    rewritten: str
    original: str
    origin: Origin
    plan: Plan

    @staticmethod
    def of(file: ModelFile) -> list[Carried]:
        """The carried steps of a file. Raises InvalidModel where an attribute of a gate is damaged."""
        found: list[Carried] = []
        for name, fdef in sorted(file.library.items()):
            for node in (n for n in fdef.node_def if n.op == GATE and "request" in n.attr):
                original = [function.name for function in node.attr["origin"].list.func]
                if len(original) != 1 or original[0] not in file.library:
                    raise InvalidModel(f"{file.title} has lost what {name!r} was made from. {_AGAIN}")
                texts = [_unpacked(file, name, node.attr[key].s) for key in ("request", "plan")]
                found.append(Carried(name, original[0], _parse(texts[0]), Plan.from_json(texts[1])))
        return found


def _unpacked(file: ModelFile, name: str, packed: bytes) -> str:
    try:
        text = zlib.decompressobj()
        found = text.decompress(packed, MOST_BYTES).decode()
        if not text.eof:
            raise zlib.error("it is cut short")
    except (zlib.error, UnicodeDecodeError) as error:
        raise InvalidModel(f"{file.title}: what {name!r} was planned by can't be read: {error}. {_AGAIN}") from error
    return found


def numbered(name: str, number: int) -> str:
    """The name of a file that belongs to an earlier rewriting."""
    start, _, end = name.partition(".")
    return f"{start}.{number}.{end}" if number else name


_AGAIN = "Copy the whole folder again, or rewrite the original model again."


def _parse(text: str) -> Origin:
    made = decode(Origin, parse_json(text), "request")
    if made.format != FORMAT:
        raise InvalidModel(f"request.format is {made.format}, and this version of tfswap reads {FORMAT}")
    try:
        made.options  # noqa: B018 raises for invalid ones
    except TfswapError as error:
        raise InvalidModel(f"request: {error}") from error
    return dataclasses.replace(made, number=0)


@dataclass
class RecordingPolicy:
    """A policy that records its answers."""

    policy: Policy
    answers: dict[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])

    def __call__(self, facts: TensorFacts) -> Collection[str] | None:
        answer = self.policy(facts)
        if answer is not None:
            self.answers[facts.tensor] = answer
        return answer

    @property
    def kept(self) -> list[Answer]:
        return [Answer(name, tuple(sorted(tactics))) for name, tactics in sorted(self.answers.items())]


def policy_answers(graph: Graph, policy: Policy | None, locate: Callable[[str], str | None]) -> list[Answer]:
    """A policy's answers for the tensors of `graph` that do not allow everything."""
    if policy is None:
        return []
    recording = RecordingPolicy(policy)
    note_permits(graph.copy(), (), recording, locate)
    return recording.kept


def _answered(answers: Iterable[Answer]) -> Callable[[TensorFacts], Collection[str] | None]:
    known: Mapping[str, tuple[str, ...]] = {answer.tensor: answer.tactics for answer in answers}
    return lambda facts: known.get(facts.tensor)
