"""`tfswap.keras.optimize`: a Keras model whose `fit` and `train_on_batch` keep to a memory limit.

Keras' own train function takes batches from the iterator inside of a `tf.function`, where their numbers of rows are
unknown. Here a batch is taken first. The step on it is an optimized function: traced as Keras traces it (for the
iterator's spec, or for the batches given to train_on_batch()), and planned for the batch's own sizes.
`steps_per_execution` is a loop around it.

`evaluate` and `predict` stay as Keras makes them. So do the arguments of `compile`: what Keras saves is the same as
without tfswap.

A model made under a strategy trains on its replicas: a batch is then what the strategy's iterator gives, a part for
each replica of this worker. Keras' own aggregation of their logs is part of the step.

Not handled: several workers, which Keras 3 itself can't train on (its `fit`
sums up batches as one tensor, and takes means over the rows of scalars), `run_eagerly=True`, `jit_compile=True` (all
refused), Keras 2 and other backends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tfswap.compiler.rival_rewriters import HIDES
from tfswap.device import arena, machine
from tfswap.errors import TfswapError, UnsupportedGraph
from tfswap.frontends.function import OptimizedFunction
from tfswap.frontends.optimize import optimize
from tfswap.frontends.scope import scope, scope_of_writes
from tfswap.ir.permits import STATE, TACTICS
from tfswap.native.forks import refuse_in_late_child
from tfswap.report.report import Report
from tfswap.runtime.batches import batches_ahead
from tfswap.support.sizes import Limit

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tfswap.frontends.optimize import OptimizeOptions

log = logging.getLogger("tfswap")

KerasModel = TypeVar("KerasModel")

Signature = tuple[Any, ...]
"""The specs of a batch's tensors."""


class Phase(NamedTuple):
    """What Keras runs on batches in a phase, by the names of the model's attributes.

    Attributes:
        step: the method that runs one batch.
        function: the function that takes batches from an iterator.
        builds: whether variables that do not exist yet are made.
    """

    step: str
    function: str
    builds: bool


TRAIN = Phase("train_step", "train_function", builds=True)
TEST = Phase("test_step", "test_function", builds=False)

WRITES = ("load_weights", "set_weights")
"""A model's methods that write all of its variables. Callbacks call them too, such as EarlyStopping."""

REST_S, READINGS, MOST_READINGS = 0.01, 3, 100
"""A new pipeline first fills its buffers. It is at rest if this many readings, this far apart, are equal."""


@dataclass(frozen=True)
class Highest:
    """The highest figures of several steps, in bytes.

    Attributes:
        planned_peak_bytes: the planned peak; each step's is of the arena in which it ran.
        limit_bytes: None where a step had none.
    """

    planned_peak_bytes: int
    limit_bytes: int | None

    @classmethod
    def of(cls, report: Report) -> Highest:
        return cls(report.planned_peak_bytes, report.memory_limit_bytes)

    def with_those_of(self, report: Report) -> Highest:
        limits = self.limit_bytes, report.memory_limit_bytes
        return Highest(
            max(self.planned_peak_bytes, report.planned_peak_bytes),
            None if limits[0] is None or limits[1] is None else max(limits[0], limits[1]),
        )


class Training:
    """Makes a model's train function; replaces the model's `make_train_function`. Or those of another phase.

    Args:
        model: a compiled Keras model, or one that will be compiled before it trains.
        phase: what it makes the function of.
        options: as of `tfswap.optimize`.
    """

    def __init__(self, model: Any, phase: Phase = TRAIN, **options: Any):
        self._model = model
        self._phase = phase
        self._optimize = optimize(**options)
        # By the spec of a whole batch, and whether a pipeline makes others during the step; by the parts of a batch,
        # and their specs with the same.
        self._steps: dict[tuple[str, bool], OptimizedFunction] = {}
        self._traces: dict[str, dict[tuple[Signature, bool], OptimizedFunction]] = {}
        self._latest: OptimizedFunction | None = None
        self._highest: dict[str, Highest] = {}  # by device
        self._pipeline: Any = None  # a weak reference to the latest batch's iterator
        self._has_homes = STATE in options.get("tactics", TACTICS)
        self._builds = phase.builds and self._has_homes  # whether variables that the first step would make are at home
        self._host = {name: options[name] for name in ("host_memory_limit", "spill_dir") if name in options}

    def __call__(self, force: bool = False) -> Any:
        """As `Model.make_train_function`, which fit() and train_on_batch() call before they train."""
        model = self._model
        refuse_in_late_child(f"The {self._phase.step} of {named(model)}")
        if self._function is not None and not force:
            return self._function
        _refuse_eager(model)
        _turn_off_xla(model)
        self._steps.clear()
        self._traces.clear()
        self._function = self._train
        return self._function

    @property
    def _function(self) -> Any:
        """The model's function of the phase; None where there is none yet."""
        return getattr(self._model, self._phase.function)

    @_function.setter
    def _function(self, function: Any) -> None:
        setattr(self._model, self._phase.function, function)

    @property
    def plans(self) -> int:
        """How many plans there are: one for most models, and one more for every size of batch that needs its own."""
        return sum(step.plans for step in set(self._steps.values()))

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """A scope for writes of all of the model's variables, for which the device may have no room."""
        return scope_of_writes(**self._host) if self._has_homes else contextlib.nullcontext()

    def report(self) -> Report:
        """The report of the step that ran last. Raises TfswapError before the first."""
        if self._latest is None:
            raise TfswapError(f"model {self._model.name!r} has not been planned yet: call fit() or train_on_batch()")
        return self._latest.report()

    def take_highest(self) -> dict[str, Highest]:
        """By device, the highest figures of the steps that ran since this was called last; empty where none did."""
        highest, self._highest = self._highest, {}
        return highest

    def _train(self, batches: Any) -> Any:
        """The train function: up to `steps_per_execution` steps, and the logs of the last.

        Raises StopIteration when there is no batch left.
        """
        refuse_in_late_child(f"The {self._phase.step} of {named(self._model)}")
        spec = getattr(batches, "element_spec", None)
        logs = None
        for _, batch in zip(range(self._model.steps_per_execution), batches):  # noqa: B905 - whichever ends first
            if spec is not None and (self._pipeline is None or self._pipeline() is not batches):
                self._pipeline = weakref.ref(batches)
                _await_rest(batch)
            logs = self._run(_spec(batch) if spec is None else spec, batch)
            self._note()
        if logs is None:
            raise StopIteration
        return logs

    def _note(self) -> None:
        """Record the figures of the latest step."""
        ran = None if self._latest is None else self._latest.latest_report
        for device, each in {} if ran is None else ran.devices.items():
            known = self._highest.get(device)
            self._highest[device] = Highest.of(each) if known is None else known.with_those_of(each)

    def _run(self, spec: Any, batch: Any) -> Any:
        """One step on a batch of this spec. Raises UnsupportedGraph and InfeasibleMemoryLimit."""
        import tensorflow as tf

        if self._builds:
            with scope(**self._host):
                build(self._model, batch)
            self._builds = False
        tensors = _present(batch)
        leaves = tf.nest.flatten(tensors, expand_composites=True)  # a part for each replica where there are several
        text, piped = repr(spec), any(map(tf.is_tensor, leaves))  # a caller of train_on_batch may have arrays
        if (step := self._steps.get((text, True)) or self._steps.get((text, piped))) is not None:
            self._latest = step
            return step(*tensors)
        spec = tf.nest.map_structure(lambda each, given: None if _is_absent(given) else each, spec, batch)
        traces = self._traces.setdefault(repr(tf.nest.map_structure(lambda each: each is None, spec)), {})
        signature = traced_for(_present(spec), [signature for signature, _ in traces])
        known = traces.get((signature, True)) or traces.get((signature, piped))
        ahead = batches_ahead(leaves) if piped else {}
        try:
            self._latest = step = known or self._step(spec, signature, ahead)
            logs = step(*tensors)
        except UnsupportedGraph:
            # In the graph for any number of rows the sizes of some tensors may be open, in loops above all.
            self._latest = step = self._step(spec, None, ahead)
            logs = step(*tensors)
            log.info("tfswap: %s: traced and planned for each size of batch by itself", named(self._model))
        traces[signature, piped] = self._steps[text, piped] = step
        return logs

    def _step(self, spec: Any, signature: Any, ahead: Mapping[str, int]) -> OptimizedFunction:
        """The step for batches of this spec.

        Args:
            signature: it is traced for; None to trace it for each size of batch.
            ahead: by device, how many other batches a pipeline makes during the step.
        """
        import tensorflow as tf

        another = self._latest.same_program if self._latest is not None and self._steps else self._optimize
        made = another(tf.function(self.one_step(spec), input_signature=signature))
        made.batches_ahead = ahead
        return made

    def one_step(self, spec: Any) -> Any:
        """As `one_step_on_data` in Keras' trainer, on the tensors that a batch has."""
        import tensorflow as tf
        from keras.src.backend.tensorflow.trainer import reduce_per_replica

        model, custom = self._model, getattr(self._model, self._phase.step)
        if isinstance(custom, OptimizedFunction):
            raise TfswapError(
                f"{self._phase.step} of {named(model)} is optimized already: take tfswap.optimize from it, or "
                "tfswap.keras.optimize from the model"
            )

        @tf.autograph.experimental.do_not_convert
        def train_step(*tensors: Any) -> Any:
            left = iter(tensors)
            data = tf.nest.map_structure(lambda each: None if each is None else next(left), spec)
            logs = model.distribute_strategy.run(custom, args=(data,))
            return reduce_per_replica(logs, model.distribute_strategy, reduction="auto")

        return train_step


class WritesAtHome:
    """A method of an optimized model that writes its variables; replaces the model's. Each variable is at home in host
    memory before the next one is written.
    """

    def __init__(self, model: Any, method: Any):
        self._model = model
        self._method = method
        functools.update_wrapper(self, method)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As the model's method."""
        with training(self._model).writing():
            return self._method(*args, **options)


def optimize_model(model: KerasModel, *, memory_limit: Limit = None, **options: Unpack[OptimizeOptions]) -> KerasModel:
    """Keep the device memory of `model.fit` and `model.train_on_batch` under a limit.

        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        tfswap.keras.optimize(model, memory_limit="6GiB")
        model.fit(x, y)

    Call it before or after `compile`; it holds until the model is optimized again, with another limit. Saved models,
    clones and copies are without it.

    With `"state"` in `tactics`, variables that do not exist yet before the first batch are made at home in host memory,
    those of the model and of its optimizer: both may be larger than the device. `load_weights` and `set_weights` put
    variables there too.

    Args:
        model: a Keras 3 model on the TensorFlow backend; also with a `train_step` of its own.
        memory_limit: as of `tfswap.optimize`: bytes, a size ("6GiB"), a share of the unoptimised step's planned peak
            ("60%"), or None for what the device's allocator may have.
        options: other options of `tfswap.optimize`.

    Returns:
        The model itself.

    Raises:
        TfswapError: `model` is no such model, or an option is malformed. When training starts also UnsupportedGraph and
            InfeasibleMemoryLimit, before anything has run.
    """
    require_keras_model(model)
    trained: Any = model
    trained.make_train_function = Training(model, memory_limit=memory_limit, **options)
    trained.train_function = None
    for name in WRITES:
        if not isinstance(method := getattr(trained, name), WritesAtHome):
            setattr(trained, name, WritesAtHome(trained, method))
    return model


def report(model: Any) -> Report:
    """The report of the training step of an optimized model. Raises TfswapError before its first step."""
    return training(model).report()


def training(model: Any) -> Training:
    """The `Training` of an optimized model. Raises TfswapError for any other model."""
    found = getattr(model, "make_train_function", None)
    if not isinstance(found, Training):
        raise TfswapError(f"{named(model)} is not optimized: tfswap.keras.optimize(model, memory_limit=...) first")
    return found


def named(model: Any) -> str:
    return f"model {model.name!r}" if hasattr(model, "name") else repr(model)


def require_keras_model(model: Any) -> None:
    machine.require_tensorflow()
    import keras
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    if any(base.__module__.partition(".")[0] == "tf_keras" for base in type(model).__mro__):
        raise TfswapError(
            f"{named(model)} is a Keras 2 model, and tfswap.keras.optimize takes Keras 3's. Optimize its step: "
            "model.train_step = tfswap.optimize(model.train_step, ...), with compile(..., jit_compile=False)"
        )
    if not isinstance(model, keras.Model):
        raise TfswapError(f"tfswap.keras.optimize needs a Keras model, not {model!r}; a tf.function: tfswap.optimize")
    if keras.backend.backend() != "tensorflow":
        raise TfswapError(
            f"Keras runs on {keras.backend.backend()!r}, and tfswap rewrites TensorFlow's graphs: set "
            "KERAS_BACKEND=tensorflow before Keras is imported"
        )
    if _has_several_workers(model.distribute_strategy):
        raise TfswapError(
            f"{named(model)} is one of several workers', and Keras 3's fit() and train_on_batch() fail there, without "
            "tfswap too. Write the loop: call the model and its optimizer in the step that strategy.run() runs, and "
            "apply tfswap.optimize to the function around it, as examples/multi_worker.py does"
        )
    own = type(model).make_train_function
    if own is not TensorFlowTrainer.make_train_function:
        raise TfswapError(
            f"{named(model)} has a make_train_function of its own ({own.__qualname__}), which tfswap would replace. "
            "Apply tfswap.optimize to the tf.function in it that trains on one batch"
        )


def _has_several_workers(strategy: Any) -> bool:
    import tensorflow as tf

    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and strategy.extended._in_multi_worker_mode()


def _refuse_eager(model: Any) -> None:
    if model.run_eagerly:
        raise UnsupportedGraph(
            f"{named(model)} is compiled with run_eagerly=True: then there is no graph to rewrite. Leave it out of "
            "compile()"
        )


def _turn_off_xla(model: Any) -> None:
    """Log that the step is not compiled where Keras chose XLA by "auto"; refuse where the user asked for XLA.

    A model keeps what "auto" became: where that is True, it looks the same as the user's own True.
    """
    if not model.jit_compile:
        return
    if not model._resolve_auto_jit_compile():
        raise UnsupportedGraph(
            f"{named(model)} is compiled with jit_compile=True: {HIDES}. Use compile(..., jit_compile=False), or "
            "leave it out"
        )
    log.warning("tfswap: %s: jit_compile is off for its training step, since %s", named(model), HIDES)


def build(model: Any, batch: Any) -> None:
    """Make the variables of the model and of its optimizer that do not exist yet.

    A model that Keras can't build from a batch's shapes, as one that has a `train_step` of its own and no `call`, makes
    them in its first step.
    """
    if not model.built:
        try:
            model._symbolic_build(data_batch=batch)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            log.info("tfswap: %s: built by its first step: %s", named(model), error)
            return
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)


def _await_rest(batch: Any) -> None:
    """Wait until a new pipeline has filled its buffers, so that these count as persistent bytes of the step."""
    import tensorflow as tf

    devices = [*batches_ahead(tf.nest.flatten(_present(batch), expand_composites=True))]
    seen: list[tuple[int, ...]] = []
    while devices and len(seen) < MOST_READINGS and (len(seen) < READINGS or len({*seen[-READINGS:]}) > 1):
        seen.append(tuple(info.current_bytes for info in map(arena.memory_info, devices) if info is not None))
        time.sleep(REST_S)


def traced_for(wanted: Sequence[Any], traced: Collection[Signature]) -> Signature:
    """The signature of the trace that Keras runs for a batch: the closest existing one that accepts the batch, or else
    one for this batch and all that was traced before.

    Follows a `tf.function` with reduce_retracing=True (type_dispatch.py), as Keras' step is: a trace in which a size is
    open may have other ops, and so other last bits, than one in which it is known.
    """

    def takes(signature: Signature, other: Sequence[Any]) -> bool:
        return all(given.is_subtype_of(taken) for given, taken in zip(other, signature, strict=True))

    made = tuple(wanted)
    if made in traced:
        return made
    if taking := [each for each in traced if takes(each, made)]:
        return functools.reduce(lambda closest, each: each if takes(closest, each) else closest, taking)
    for each in traced:
        common = tuple(a.most_specific_common_supertype([b]) for a, b in zip(made, each, strict=True))
        if None not in common:
            made = common
    return made


def _spec(batch: Any) -> Any:
    """The spec of a batch with all of its sizes, as a `tf.function` describes its arguments."""
    import tensorflow as tf

    return tf.nest.map_structure(lambda leaf: None if _is_absent(leaf) else tf.type_spec_from_value(leaf), batch)


def _present(structure: Any) -> list[Any]:
    """The tensors of a batch, or their specs."""
    import tensorflow as tf

    return [leaf for leaf in tf.nest.flatten(structure) if not _is_absent(leaf)]


def _is_absent(leaf: Any) -> bool:
    """Whether a leaf stands for a part that the batch lacks: None, or an Optional, as Keras passes through tf.data."""
    import tensorflow as tf

    return leaf is None or isinstance(leaf, tf.experimental.Optional)
