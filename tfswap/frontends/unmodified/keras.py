"""Keras models of an unmodified program: `fit`, `evaluate`, `predict`, and their `..._on_batch`, under the limit.

A model trains as one that `tfswap.keras.optimize` was called for, and its test step is put under the limit in the same
way. Where a step can't be planned, Keras' own function takes its place, beginning with the batch that was taken
already. `predict` takes its batches outside of its function, which `functions` puts under the limit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfswap.errors import TfswapError, UnsupportedGraph
from tfswap.frontends.function import OptimizedFunction
from tfswap.frontends.keras import TEST, TRAIN, Phase, Training, named, require_keras_model
from tfswap.frontends.optimize import as_tf_function
from tfswap.frontends.unmodified import summary
from tfswap.frontends.unmodified.functions import UnmodifiedFunction
from tfswap.frontends.unmodified.settings import Settings, settings
from tfswap.frontends.unmodified.within import within
from tfswap.runtime.batches import batches_ahead

MAKE_TRAIN, MAKE_PREDICT = "make_train_function", "make_predict_function"

TrainFunction = Callable[[Iterator[Any]], Any]


class UnmodifiedTraining(Training):
    """Makes a model's train function, for the limit or as it is.

    Args:
        model: the model.
        phase: what it makes the function of.
        plain: Keras' own method that does.
        given: the settings.
    """

    def __init__(self, model: Any, phase: Phase, plain: Callable[..., Any], given: Settings):
        super().__init__(model, phase, **given.options)
        self._plain = plain
        self._optimize = lambda function: UnmodifiedFunction(as_tf_function(function), named(model), given)
        self._as_it_is: TrainFunction | None = None

    def __call__(self, force: bool = False) -> Any:
        model = self._model
        if self._function is not None and not force:
            return self._function
        if isinstance(getattr(model, self._phase.step), OptimizedFunction):  # the program's own
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
        """From now on, run Keras' own function."""
        model = self._model
        summary.note_as_it_was(named(model), str(error))
        self._plain(model, True)
        self._as_it_is = self._function = functools.partial(within.call, self._function)
        return self._as_it_is


class RescuedTraining(UnmodifiedTraining):
    """As UnmodifiedTraining, without a limit: `functions` rescues the step, which has its batch as arguments."""

    def __init__(self, model: Any, phase: Phase, plain: Callable[..., Any], given: Settings):
        super().__init__(model, phase, plain, given)
        self._builds = False

    def _step(self, spec: Any, signature: Any, ahead: Mapping[str, int]) -> Any:
        import tensorflow as tf

        traced = tf.function(self.one_step(spec), input_signature=signature)

        def step(*tensors: Any) -> Any:
            within.batches_ahead = ahead
            try:
                return traced(*tensors)
            finally:
                within.batches_ahead = {}

        return step

    def _note(self) -> None:
        """There is no report."""


def maker(model: Any, name: str, plain: Callable[..., Any], given: Mapping[str, Any]) -> Callable[..., Any]:
    """What makes a function of a model that has no maker of its own.

    Args:
        name: of Keras' method that makes it, which this is called in place of.
        plain: that method.
        given: the options, as the environment has them.
    """
    found = settings(given)
    if found.training_only and name != MAKE_TRAIN:
        return functools.partial(plain, model)
    try:
        require_keras_model(model)
    except TfswapError as error:
        summary.note_as_it_was(named(model), str(error))
        return functools.partial(plain, model)
    if name == MAKE_PREDICT:
        return functools.partial(_make_predict, model, plain)
    phase = TRAIN if name == MAKE_TRAIN else TEST
    made = (RescuedTraining if found.rescues else UnmodifiedTraining)(model, phase, plain, found)
    setattr(model, name, made)
    return made


def _make_predict(model: Any, plain: Callable[..., Any], force: bool = False) -> Any:
    """Keras' own, without XLA where Keras chose that, and with room for the batches that the pipeline makes."""
    import tensorflow as tf

    if model.predict_function is not None and not force:
        return model.predict_function
    compiled = model.jit_compile
    model.jit_compile = compiled and not model._resolve_auto_jit_compile()
    try:
        plain(model, force)
    finally:
        model.jit_compile = compiled
    function: Any = model.predict_function

    @functools.wraps(function)
    def predict(batches: Any) -> Any:
        within.batches_ahead = batches_ahead(tf.nest.flatten(batches, expand_composites=True))
        try:
            return function(batches)
        finally:
            within.batches_ahead = {}

    model.predict_function = predict
    return predict
