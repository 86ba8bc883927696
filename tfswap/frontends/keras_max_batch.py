"""The largest batch of a Keras model under a limit, and trials of a tuner that keep one.

The training step is searched as any step is (`max_batch.py`). What the search finds is then trained with by `fit`
itself, which also has the batches that its pipeline makes in the arena, so that what is named runs.

Not handled: models of several replicas, whose `fit` divides a batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tfswap.device import arena, machine
from tfswap.device.live import free_functions
from tfswap.errors import InfeasibleMemoryLimit, TfswapError
from tfswap.frontends.keras import Training, build, named, optimize_model, require_keras_model
from tfswap.frontends.max_batch import largest_that_runs, search_of
from tfswap.frontends.max_batch import max_batch as max_batch_of_step
from tfswap.report.max_batch import Fit
from tfswap.runtime.batches import BATCHES_AHEAD, batch_sizes, shared_device
from tfswap.support.sizes import format_bytes, parse_limit

KerasModel = TypeVar("KerasModel")
SEARCHED = ("memory_limit", "multiple_of", "confirm")
"""Options of the search, which are not those of training."""
STEPS = 2
"""Steps of `fit` that confirm a size: the second has the arena that the first has left."""


def max_batch(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    memory_limit: int | str | None = None,
    multiple_of: int = 1,
    confirm: bool = True,
    **options: Any,
) -> Fit:
    """Find the largest batch with which `model.fit` keeps a limit, once the model is optimized for that.

        tfswap.keras.max_batch(model, x, y, memory_limit="6GiB").size

    Args:
        model: a compiled Keras 3 model on the TensorFlow backend. It is built where it is not.
        x, y: as of `fit`, arrays or structures of them, of any number of rows from one on.
        memory_limit: bytes or a size; by default the limit of the device's allocator.
        multiple_of: only multiples of this are tried.
        confirm: train by `fit` with the size found, and with smaller ones where that fails. The variables get their old
            values back afterwards.
        options: those that `tfswap.max_batch` and `tfswap.optimize` both have, as `tactics`.

    Raises:
        InfeasibleMemoryLimit: not even the smallest size fits.
        TfswapError, UnsupportedGraph: as `tfswap.max_batch`.
    """
    require_keras_model(model)
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise TfswapError(f"{named(model)} has several replicas: search the batch of one, on one device")
    step, batch = _step(model, x, y)
    found = max_batch_of_step(
        step, *batch, memory_limit=memory_limit, multiple_of=multiple_of, confirm=False, **options
    )
    if not confirm:
        return found
    peaks: dict[int, int] = {}

    def takes(size: int) -> float:
        limit_bytes = found.limit_bytes - _room_bytes(batch, size)
        peak = None if limit_bytes <= 0 else _trained(model, x, y, size, limit_bytes, options)
        if peak is not None:
            peaks[size] = peak
        return math.inf if peak is None else peak / limit_bytes

    size = largest_that_runs(found.size, multiple_of, takes)
    if not size:
        raise InfeasibleMemoryLimit(
            f"{named(model)}: a batch of {found.size} has a plan that keeps memory_limit={found.limit_bytes}, but none "
            "that was trained with did, with what else is in the device's memory",
            floor_bytes=found.peak_bytes,
            limit_bytes=found.limit_bytes,
        )
    return dataclasses.replace(found, size=size, confirmed=True, measured_bytes=peaks[size] or None)


def largest(model: Any, x: Any, y: Any = None, **options: Any) -> int:
    """The size that `max_batch` finds, for `fit(x, y, batch_size=tfswap.keras.largest(model, x, y, ...))`. The model is
    optimized for that limit too.

    Args:
        model, x, y, options: as of `max_batch`.
    """
    found = max_batch(model, x, y, **options)
    chosen = {name: value for name, value in options.items() if name not in SEARCHED}
    optimize_model(model, memory_limit=found.limit_bytes, **chosen)
    return found.size


def tuned(
    build_model: Callable[..., KerasModel], x: Any, y: Any = None, *, batch_size: int, memory_limit: int | str
) -> Callable[..., KerasModel]:
    """A function that builds the models of a tuner's trials, under a limit: for `keras_tuner.RandomSearch` and others.

        tuner = keras_tuner.RandomSearch(tfswap.keras.tuned(build, x, y, batch_size=64, memory_limit="6GiB"), ...)

    A model that fits is optimized for the limit, which changes nothing where it has room. One that no plan fits ends
    its trial before it trains.

    Args:
        build_model: makes a compiled model from hyperparameters.
        x, y: as of `fit`, of any number of rows.
        batch_size: of the trials.
        memory_limit: bytes or a size.

    Raises (the function): keras_tuner's FailedTrialError, with the floor, for a model that no plan fits;
        InfeasibleMemoryLimit where keras_tuner can't be imported.
    """

    def built(*hyperparameters: Any) -> KerasModel:
        model: Any = build_model(*hyperparameters)
        step, batch = _step(model, x, y)
        search = search_of(step, batch, parse_limit(memory_limit), unit=batch_size)
        floor_bytes = search.floor_bytes(batch_size)
        if floor_bytes > search.limit_bytes:
            raise _failed_trial(named(model), batch_size, floor_bytes, search.limit_bytes)
        return optimize_model(model, memory_limit=memory_limit)

    return built


def _failed_trial(name: str, batch_size: int, floor_bytes: int, limit_bytes: int) -> Exception:
    limit, floor = format_bytes(limit_bytes), format_bytes(floor_bytes)
    refusal = InfeasibleMemoryLimit(
        f"{name}: memory_limit is {limit}, and a batch of {batch_size} needs at least {floor}",
        floor_bytes=floor_bytes,
        limit_bytes=limit_bytes,
    )
    try:
        from keras_tuner.errors import FailedTrialError  # pyright: ignore[reportMissingImports] no requirement
    except ImportError:
        return refusal
    return FailedTrialError(str(refusal))


def _step(model: Any, x: Any, y: Any) -> tuple[Any, list[Any]]:
    """The training step on the tensors of a batch, and these tensors."""
    import tensorflow as tf

    data = tf.nest.map_structure(tf.convert_to_tensor, (_rows(x, 1), _rows(y, 1)) if y is not None else (_rows(x, 1),))
    build(model, data)
    spec = tf.nest.map_structure(tf.type_spec_from_value, data)
    return tf.function(Training(model).one_step(spec)), tf.nest.flatten(data)


def _rows(structure: Any, count: int) -> Any:
    """Arrays of this many rows: those that there are, again and again."""
    import tensorflow as tf

    return tf.nest.map_structure(lambda each: np.resize(each, (count, *np.shape(each)[1:])), structure)


def _room_bytes(batch: Sequence[Any], size: int) -> int:
    """Room for batches of this size that a pipeline in the step's arena may buffer in addition: how many it does
    depends on the times of its stages.
    """
    return 0 if shared_device() is None else BATCHES_AHEAD * size * sum(batch_sizes(batch))


def _trained(model: Any, x: Any, y: Any, size: int, limit_bytes: int, options: Mapping[str, Any]) -> int | None:
    """The peak of a `fit` with batches of this size, 0 where it is not known; None where it fails."""
    import tensorflow as tf

    device, _ = machine.current_device()
    free_functions()  # the arrays of a fit before this one
    with _as_it_was(model):
        optimize_model(model, memory_limit=limit_bytes, **options)
        if arena.memory_info(device) is not None:
            tf.config.experimental.reset_memory_stats(device)
        try:
            rows = max(STEPS * size, *(len(each) for each in tf.nest.flatten(x)))  # all of them are in the arena
            given = {"y": _rows(y, rows)} if y is not None else {}
            model.fit(_rows(x, rows), **given, batch_size=size, steps_per_epoch=STEPS, verbose=0)
        except (InfeasibleMemoryLimit, tf.errors.ResourceExhaustedError):
            return None
        after = arena.memory_info(device)
    return 0 if after is None else after.peak_bytes


@contextlib.contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """Within this a model may train; afterwards its variables, history and functions are those from before."""
    variables = [*model.variables, *(model.optimizer.variables if model.optimizer is not None else ())]
    values = [np.array(variable) for variable in variables]
    kept = {
        name: vars(model).get(name, _ABSENT)
        for name in ("make_train_function", "train_function", "_history", "history")
    }
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        for name, value in kept.items():
            if value is not _ABSENT:
                setattr(model, name, value)
            elif name in vars(model):
                delattr(model, name)


_ABSENT = object()
