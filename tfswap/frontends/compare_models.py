"""Compares two SavedModels: runs the same steps of both on the same inputs, and compares all values to the bit.

Both run with Grappler off, as which the values of a rewritten step are those of the original. They run one after the
other, so that the memory of one is enough.

Not handled: steps whose random numbers differ from run to run; their values differ between two runs of one model too.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

import numpy as np

from tfswap.compiler.model_file import ModelFile
from tfswap.errors import InvalidModel, TfswapError
from tfswap.frontends.saved_model import ArgumentSizes
from tfswap.native.load import load_for
from tfswap.support import progress
from tfswap.support.printable import as_lines, one_line

SEED = 1
CLASSES = 2
"""Integers are drawn below this, so that they are valid labels."""
SHOWN = 5


@dataclass(frozen=True)
class Difference:
    """A tensor whose values differ.

    Attributes:
        name: an output of a step, or a variable after all steps.
        elements: how many elements differ, and how many there are.
        largest: the largest absolute difference; NaN where shapes differ, and for strings.
    """

    name: str
    elements: tuple[int, int]
    largest: float


@dataclass(frozen=True)
class Comparison:
    """What was compared, and what differs.

    Attributes:
        function: the step that was run.
        steps: how often.
        outputs, variables: how many tensors were compared.
        differences: empty where both are the same to the bit.
    """

    function: str
    steps: int
    outputs: int
    variables: int
    differences: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        return not self.differences

    def to_json(self) -> str:
        """All of it as JSON text."""
        return json.dumps({**asdict(self), "same": self.same}, indent=1, sort_keys=True)

    def __str__(self) -> str:
        what = f"{self.steps} steps of {self.function}: {self.outputs} results and {self.variables} variables"
        if self.same:
            return one_line(f"{what} are the same to the bit")
        lines = [f"{what}, of which {len(self.differences)} DIFFER"]
        for found in self.differences[:SHOWN]:
            count, of = found.elements
            lines.append(f"  {found.name}: {count} of {of} elements, by up to {found.largest:.3g}")
        if len(self.differences) > SHOWN:
            lines.append(f"  and {len(self.differences) - SHOWN} more")
        return as_lines(lines)


def compare_models(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    function: str = "train_step",
    batch_size: int | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    steps: int = 3,
) -> Comparison:
    """Run a training step of two SavedModels a few times, on the same random inputs, and compare all values.

    Args:
        function: as in `optimize_graph`; both must have it.
        batch_size, input_shapes: sizes of dimensions that the files leave open.
        steps: how often.

    Raises:
        InvalidModel: there is no such model, or no such function in it.
        UnsupportedGraph: sizes stay open.
        TfswapError: an argument is malformed, can't be drawn at random (strings), or differs between the models.
    """
    sizes = ArgumentSizes(batch_size, input_shapes)
    runs = [_run(path, function, sizes, steps) for path in (first, second)]
    (specs, results, variables), (other_specs, other_results, other_variables) = runs
    if specs != other_specs:
        raise TfswapError(
            f"{function} of {os.fspath(first)!r} takes {specs}, and of {os.fspath(second)!r} {other_specs}"
        )
    for what, names, others in (("result", results, other_results), ("variable", variables, other_variables)):
        if strangers := sorted(names.keys() ^ others.keys()):
            raise TfswapError(f"only one of the models has the {what} {strangers[0]!r}: they are not of one step")
    pairs = [
        (name, a, others[name])
        for mine, others in ((results, other_results), (variables, other_variables))
        for name, a in mine.items()
    ]
    differences = tuple(d for name, a, b in pairs if (d := _difference(name, a, b)) is not None)
    return Comparison(function, steps, len(results), len(variables), differences)


Run = tuple[dict[str, str], dict[str, Any], dict[str, Any]]
"""A step's arguments, its results, and the variables after all steps; by name, as NumPy arrays."""


def _run(path: str | os.PathLike[str], function: str, sizes: ArgumentSizes, steps: int) -> Run:
    import tensorflow as tf

    from tfswap.exporters.function import grappler_off
    from tfswap.ops.runtime import limits_unchecked

    file = ModelFile.load(path)
    load_for(node for f in file.library.values() for node in f.node_def)
    model = file.loaded()
    step = _step(model, function, path)
    args, kwargs = step.structured_input_signature
    specs = {s.name or f"argument_{n}": s for n, s in enumerate(tf.nest.flatten((args, kwargs))) if _is_spec(s)}
    shapes = sizes.bind(function, {name: ((), tuple(spec.shape)) for name, spec in specs.items()})
    random = np.random.default_rng(SEED)
    results: dict[str, Any] = {}
    with grappler_off(), limits_unchecked(), file.named():
        for n in progress.over(f"running {function} of {os.fspath(path)}", range(steps)):
            drawn = iter([_drawn(random, name, spec.dtype, shapes[name]) for name, spec in specs.items()])
            called = tf.nest.map_structure(lambda s, drawn=drawn: next(drawn) if _is_spec(s) else s, (args, kwargs))
            made = step(*called[0], **called[1])
            for place, value in enumerate(tf.nest.flatten(made, expand_composites=True)):
                if value is not None:
                    results[f"result {place} of step {n}"] = value.numpy()
    variables = {f"{n}: {v.name}": v.numpy() for n, v in enumerate(_variables(model))}
    taken = {name: f"{spec.dtype.name}{list(shapes[name] or ())}" for name, spec in specs.items()}
    del model, step
    gc.collect()  # frees the memory for the other model
    return taken, results, variables


def _is_spec(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _step(model: Any, function: str, path: str | os.PathLike[str]) -> Any:
    """The concrete function that `function` names: an attribute's first trace, or a signature."""
    found = reduce(_child, function.split("."), model)
    traces = getattr(found, "concrete_functions", None)
    if traces:
        return traces[0]
    if function in model.signatures:
        return model.signatures[function]
    raise InvalidModel(f"{os.fspath(path)!r} has no function {function!r} that could be called")


def _child(owner: Any, name: str) -> Any:
    """The child of a loaded object by this name, as the file calls it: an attribute, or a place in a list or dict."""
    if isinstance(owner, Mapping):
        return owner.get(name)
    if isinstance(owner, list):
        return dict(enumerate(owner)).get(int(name)) if name.isdecimal() else None
    return getattr(owner, name, None)


def _drawn(random: np.random.Generator, name: str, dtype: Any, shape: Any) -> Any:
    import tensorflow as tf

    if dtype.is_floating:
        return tf.constant(random.standard_normal(shape), dtype)
    if dtype.is_integer or dtype.is_bool:
        return tf.cast(tf.constant(random.integers(0, CLASSES, shape)), dtype)
    raise TfswapError(f"the argument {name!r} is a {dtype.name}, and such values can't be drawn at random")


def _variables(model: Any) -> list[Any]:
    """All variables that the model tracks, in an order that its structure gives."""
    import tensorflow as tf
    from tensorflow.python.checkpoint.trackable_view import TrackableView

    return [v for v in TrackableView(model).descendants() if isinstance(v, tf.Variable)]


def _difference(name: str, a: Any, b: Any) -> Difference | None:
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return Difference(name, (max(a.size, b.size), max(a.size, b.size)), float("nan"))
    if a.dtype == object:  # strings
        changed = int((a != b).sum())
        return Difference(name, (changed, a.size), float("nan")) if changed else None
    if a.tobytes() == b.tobytes():
        return None
    parted = a.reshape(-1).view(np.uint8).reshape(a.size, -1) != b.reshape(-1).view(np.uint8).reshape(b.size, -1)
    largest = float(np.nanmax(np.abs(a.astype(np.float64) - b.astype(np.float64)), initial=0.0))
    return Difference(name, (int(parted.any(axis=1).sum()), a.size), largest)
