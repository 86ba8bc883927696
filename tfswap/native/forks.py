"""Refuses optimized steps in forked processes without TensorFlow's threads, where work for these threads never ends.

A process that was forked after its parent has initialised TensorFlow (by its first op or trace) has no such threads.
There, everything that would run an optimized step raises an error before TensorFlow is called. A process that was
forked earlier initialises its own TensorFlow.

Not handled: TensorFlow's own steps, and portable rewritten files, hang in such a process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from tfswap.errors import TfswapError
from tfswap.ir.custom_ops import NAMESPACE
from tfswap.support.reach import reach

REFUSAL = (
    "{what} can't run in this process: it was forked from one in which TensorFlow had started, whose threads do not "
    'exist here. Start processes by multiprocessing.get_context("spawn"), or fork before TensorFlow is first used.'
)

_late = False
_steps: dict[bytes, str] = {}  # names of optimized steps, by TensorFlow's names of their functions


def note_step(function: Any, name: str) -> None:
    """Record that a ConcreteFunction, which other functions may call, runs the optimized step `name`."""
    _steps[function._inference_function.name] = name


def runs_step(function: Any) -> bool:
    """Whether a ConcreteFunction itself was recorded as one that runs an optimized step."""
    return function._inference_function.name in _steps


def has_steps() -> bool:
    """Whether any optimized step was recorded."""
    return bool(_steps)


def refuse_in_late_child(what: str) -> None:
    """Raise TfswapError in a process that was forked too late to run `what`."""
    if _late:
        raise TfswapError(REFUSAL.format(what=what))


def _notice() -> None:
    """Called in each forked process at its start."""
    global _late
    context: Any = sys.modules.get("tensorflow.python.eager.context")
    here = None if context is None else context._context
    if not _late and here is not None and here._context_handle is not None:
        _late = True
        _guard_callers()


def _guard_callers() -> None:
    """Make TensorFlow's functions that call optimized steps refuse too: they run no Python code of tfswap."""
    from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction

    run = AtomicFunction.call_flat

    def call_flat(self: Any, *args: Any) -> Any:
        step = _step_in(self)
        if step is None and _has_own_ops(self):
            step = f"The rewritten function {self.name.decode()!r}"  # of a file that TensorFlow itself has loaded
        if step is not None:
            refuse_in_late_child(step)
        return run(self, *args)

    AtomicFunction.call_flat = call_flat


def calls_steps(function: Any) -> bool:
    """Whether a ConcreteFunction calls optimized steps."""
    return _step_in(function._inference_function, outer=function._inference_function) is not None


def _step_in(function: Any, outer: Any = None) -> str | None:
    """The name of an optimized step, other than `outer`, that an AtomicFunction is or calls."""
    return next((_steps[f.name] for f in with_children(function) if f.name in _steps and f is not outer), None)


def with_children(function: Any) -> Iterator[Any]:
    """An AtomicFunction, and those that it calls."""
    return reach([function], lambda each: getattr(each, "children", ()))  # functions of loops may be of another class


def _has_own_ops(function: Any) -> bool:
    """Whether an AtomicFunction, or one that it calls, has ops of tfswap."""
    definitions = (getattr(each, "cached_definition", None) for each in with_children(function))
    return any(node.op.startswith(NAMESPACE) for made in definitions if made is not None for node in made.node_def)


os.register_at_fork(after_in_child=_notice)
