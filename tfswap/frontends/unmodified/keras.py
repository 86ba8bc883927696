"""Keras models of an unmodified program: `fit` and `train_on_batch` under the limit.

A model trains as one that `tfswap.keras.optimize` was called for. Where its step can't be planned, Keras' own train
function takes its place, beginning with the batch that was taken already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfswap.errors import TfswapError, UnsupportedGraph
from tfswap.frontends.function import OptimizedFunction
from tfswap.frontends.keras import Training, named, require_keras_model
from tfswap.frontends.optimize import as_tf_function
from tfswap.frontends.unmodified import summary
from tfswap.frontends.unmodified.functions import UnmodifiedFunction, within
from tfswap.frontends.unmodified.settings import Settings, settings

TrainFunction = Callable[[Iterator[Any]], Any]


class UnmodifiedTraining(Training):
    """Makes a model's train function, for the limit or as it is.

    Args:
        model: the model.
        plain: Keras' own method `make_train_function`.
        given: the settings.
    """

    def __init__(self, model: Any, plain: Callable[..., Any], given: Settings):
        super().__init__(model, **given.options)
        self._plain = plain
        self._optimize = lambda function: UnmodifiedFunction(as_tf_function(function), named(model), given)
        self._as_it_is: TrainFunction | None = None

    def __call__(self, force: bool = False) -> Any:
        model = self._model
        if model.train_function is not None and not force:
            return model.train_function
        if isinstance(model.train_step, OptimizedFunction):  # the program's own
            return self._plain(model, force)
        self._as_it_is = None
        try:
            return super().__call__(force)
        except UnsupportedGraph as error:
            return self._leave(error)

    def _run(self, spec: Any, batch: Any) -> Any:
        if self._as_it_is is None:
            try:
                return super()._run(spec, batch)
            except UnsupportedGraph as error:
                self._leave(error)
        assert self._as_it_is is not None, "it has just been left"
        return self._as_it_is(iter([batch]))

    def _note(self) -> None:
        if self._as_it_is is None:
            super()._note()

    def _leave(self, error: UnsupportedGraph) -> TrainFunction:
        """From now on, train by Keras' own train function."""
        model = self._model
        summary.note_as_it_was(named(model), str(error))
        self._plain(model, True)
        self._as_it_is = model.train_function = functools.partial(within.call, model.train_function)
        return self._as_it_is


class RescuedTraining(UnmodifiedTraining):
    """As UnmodifiedTraining, without a limit: `functions` rescues the step, which has its batch as arguments."""

    def __init__(self, model: Any, plain: Callable[..., Any], given: Settings):
        super().__init__(model, plain, given)
        self._builds = False

    def _step(self, spec: Any, signature: Any, ahead: Mapping[str, int]) -> Any:
        import tensorflow as tf

        traced = tf.function(self._one_step(spec), input_signature=signature)

        def step(*tensors: Any) -> Any:
            within.batches_ahead = ahead
            try:
                return traced(*tensors)
            finally:
                within.batches_ahead = {}

        return step

    def _note(self) -> None:
        """There is no report."""


def training_of(model: Any, plain: Callable[..., Any], given: Mapping[str, Any]) -> Callable[..., Any]:
    """What makes the train function of a model that has none of its own: called in place of `make_train_function`.

    Args:
        plain: Keras' own method `make_train_function`.
        given: the options, as the environment has them.
    """
    try:
        require_keras_model(model)
    except TfswapError as error:
        summary.note_as_it_was(named(model), str(error))
        return functools.partial(plain, model)
    found = settings(given)
    model.make_train_function = (RescuedTraining if found.rescues else UnmodifiedTraining)(model, plain, found)
    return model.make_train_function
