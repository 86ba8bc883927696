"""What a rewritten SavedModel keeps of the one that it was made from: enough to plan its steps again when loaded.

Two files in the folder of `saved_model.pb`: the request, as JSON, and the functions that were replaced, as a compressed
function library. All that they call is in the model's own library. `tf.saved_model.load` does not read either of them.

Not kept: a profile, whose times are those of one machine; a policy, of which only the answers are.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfswap.errors import InvalidModel, TfswapError
from tfswap.files import read_saved, require_regular
from tfswap.frontends.model_file import ConcreteStep, ModelFile
from tfswap.frontends.options import Options, Spill
from tfswap.frontends.policy import Policy, TensorFacts
from tfswap.json_fields import decode, parse_json
from tfswap.planner.plan import Plan

REQUEST_NAME = "tfswap_request.json"
FUNCTIONS_NAME = "tfswap_original.pb.zlib"
FORMAT = 1
MOST_BYTES = 2**31
"""A FunctionDefLibrary has no more: a damaged file is not decompressed without end."""


@dataclass(frozen=True)
class Sized:
    """An argument of a step, and the shape that its plan is for."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SavedStep:
    """One planned trace.

    Attributes:
        name: of its library function.
        plan: the file that the plan is in.
        rewritten: whether the function was replaced. A step that fits was left as it is.
        arguments: what the plan is for.
    """

    name: str
    plan: str
    rewritten: bool
    arguments: tuple[Sized, ...]


@dataclass(frozen=True)
class Answer:
    """What a policy said of a tensor: the tactics that may be used on it."""

    tensor: str
    tactics: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """A pattern of the names of nodes, and their precision."""

    pattern: str
    precision: str


@dataclass(frozen=True)
class Origin:
    """The request by which a SavedModel was rewritten, and its results.

    Attributes:
        format: FORMAT.
        function: the name by which the steps were found.
        limit_bytes: of all steps; None for what the device's allocator may have.
        steps: those that were planned.
        tactics, host_limit_bytes, precision, portable: as of Options.
        spill_dir, spill_limit_bytes: likewise.
        answers: of the policy, where it did not allow everything.
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

    @staticmethod
    def of(
        function: str, limit_bytes: int | None, steps: Iterable[SavedStep], options: Options, answers: Iterable[Answer]
    ) -> Origin:
        spill = options.spill
        return Origin(
            FORMAT,
            function,
            limit_bytes,
            tuple(steps),
            options.tactics,
            options.host_limit_bytes,
            None if spill is None else spill.folder,
            None if spill is None else spill.limit_bytes,
            tuple(Rule(pattern, precision) for pattern, precision in options.precision),
            options.portable,
            tuple(answers),
        )

    @property
    def options(self) -> Options:
        """The same for a process that has tfswap's ops."""
        return Options(
            self.tactics,
            self.host_limit_bytes,
            None if self.spill_dir is None else Spill(self.spill_dir, self.spill_limit_bytes),
            precision=tuple((rule.pattern, rule.precision) for rule in self.precision),
            policy=_answered(self.answers) if self.answers else None,
        )

    def write(self, folder: Path, replaced: Iterable[Any]) -> None:
        """Write both files.

        Args:
            replaced: the FunctionDefs that the model's library has others in the place of, or has lost.
        """
        from tensorflow.core.framework import function_pb2

        text = json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)
        (folder / REQUEST_NAME).write_text(text + "\n", encoding="utf-8")
        library = function_pb2.FunctionDefLibrary(function=replaced)
        if library.function:
            (folder / FUNCTIONS_NAME).write_bytes(zlib.compress(library.SerializeToString(deterministic=True), 9))

    @staticmethod
    def read(folder: Path) -> Origin:
        """Raises InvalidModel where the folder has no such file, or a damaged one."""
        if not (folder / REQUEST_NAME).is_file():
            raise InvalidModel(
                f"the SavedModel at {str(folder)!r} has no {REQUEST_NAME}: it is not one that this version of "
                "tfswap.optimize_graph has written, or a part of its folder is missing. Write it again from the "
                "original model; tf.saved_model.load loads others."
            )
        return read_saved(folder / REQUEST_NAME, "request", _parse)

    def require(self, file: ModelFile) -> tuple[ModelFile, dict[str, tuple[SavedStep, ConcreteStep, Plan]]]:
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
        plans = {saved.name: Plan.load(file.path / Path(saved.plan).name) for saved in self.steps}
        return file, {saved.name: (saved, traces[saved.name], plans[saved.name]) for saved in self.steps}

    def replaced(self, folder: Path) -> dict[str, Any]:
        """The functions that were replaced, by name. Raises InvalidModel where they are missing or damaged."""
        from google.protobuf.message import DecodeError
        from tensorflow.core.framework import function_pb2

        wanted = {step.name for step in self.steps if step.rewritten}
        found: dict[str, Any] = {}
        path = folder / FUNCTIONS_NAME
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


_AGAIN = "Copy the whole folder again, or rewrite the original model again."


def _parse(text: str) -> Origin:
    made = decode(Origin, parse_json(text), "request")
    if made.format != FORMAT:
        raise InvalidModel(f"request.format is {made.format}, and this version of tfswap reads {FORMAT}")
    try:
        made.options  # noqa: B018 checks them
    except TfswapError as error:
        raise InvalidModel(f"request: {error}") from error
    return made


@dataclass
class Asked:
    """A policy that keeps its answers."""

    policy: Policy
    answers: dict[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])

    def __call__(self, facts: TensorFacts) -> Collection[str] | None:
        answer = self.policy(facts)
        if answer is not None:
            self.answers[facts.name] = answer
        return answer

    @property
    def kept(self) -> list[Answer]:
        return [Answer(name, tuple(sorted(tactics))) for name, tactics in sorted(self.answers.items())]


def _answered(answers: Iterable[Answer]) -> Callable[[TensorFacts], Collection[str] | None]:
    known: Mapping[str, tuple[str, ...]] = {answer.tensor: answer.tactics for answer in answers}
    return lambda facts: known.get(facts.name)
