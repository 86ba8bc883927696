"""Runs at the start of a Python process whose environment requests a limit, or to be watched, before the program does.

`tfswap run` and `tfswap watch` put this folder in front of PYTHONPATH, so that Python imports this file as its
`sitecustomize`; the hook that `tfswap hook --install` writes runs it too. It imports nothing but the standard library
and wrapt, on which TensorFlow depends: the program may still set variables that TensorFlow reads when it is imported.
Once TensorFlow and Keras have been imported, the first call that may train imports tfswap; to be watched, the first use
of a device does.

Child processes inherit the environment, and do the same.
"""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from typing import Any

RUN, LIMIT, WATCH = "TFSWAP_RUN", "TFSWAP_MEMORY_LIMIT", "watch"
"""The variables with the options of `tfswap run`, as JSON, and with a limit alone; the option of `tfswap watch`."""
SHOWN = "live", "html"
"""The other options of `tfswap watch`."""
CONTEXT = "tensorflow.python.eager.context"
FUNCTIONS = "tensorflow.python.eager.polymorphic_function.concrete_function"
SESSIONS = "tensorflow.python.client.session"
KERAS = "keras.src.backend.tensorflow.trainer"
KERAS_MAKERS = "make_train_function", "make_test_function", "make_predict_function"
STEPS = "tfswap.native.forks"
SUMMARY = "tfswap.frontends.unmodified.summary"
WATCHING = "tfswap.frontends.watching.process"
STARTED = "tfswap_startup"


def _begin() -> None:
    """Watch for imports, once in a process, where the environment requests a limit and tfswap can be imported."""
    requested = RUN in os.environ or os.environ.get(LIMIT)
    if not requested or STARTED in sys.modules or importlib.util.find_spec("tfswap") is None:
        return
    try:
        import wrapt
    except ImportError:  # then there is no TensorFlow either
        return
    sys.modules[STARTED] = types.ModuleType(STARTED)
    given = {"memory_limit": os.environ.get(LIMIT) or None, **json.loads(os.environ.get(RUN, "{}"))}
    is_first = given.pop("process", None) == os.getpid()
    if given.get(WATCH):
        if is_first:
            atexit.register(_report_unwatched)
        shown = {name: given[name] for name in SHOWN if name in given and is_first}
        wrapt.register_post_import_hook(lambda module: _watch_device(module, shown), CONTEXT)
        return
    if is_first and (given["memory_limit"] or given.get("max_slowdown")):
        atexit.register(_report_nothing)
    wrapt.register_post_import_hook(lambda module: _watch_functions(module, given), FUNCTIONS)
    wrapt.register_post_import_hook(lambda module: _watch_sessions(module, given), SESSIONS)
    wrapt.register_post_import_hook(lambda module: _watch_keras(module, given), KERAS)


def _watch_functions(module: Any, given: dict[str, Any]) -> None:
    """Make the first call of a traced function replace this method by the one that plans."""
    kind = module.ConcreteFunction
    plain = kind._call_flat

    def _call_flat(self: Any, tensor_inputs: Any, captured_inputs: Any) -> Any:
        from tfswap.frontends.unmodified import functions

        if kind._call_flat is _call_flat:
            kind._call_flat = functions.watched(plain, given)
        return kind._call_flat(self, tensor_inputs, captured_inputs)

    kind._call_flat = _call_flat


def _watch_sessions(module: Any, given: dict[str, Any]) -> None:
    """Make the first run of a session replace this method by the one that plans."""
    kind = module.BaseSession
    plain = kind._do_run

    def _do_run(self: Any, *arguments: Any, **named: Any) -> Any:
        from tfswap.frontends.unmodified import sessions

        if kind._do_run is _do_run:
            kind._do_run = sessions.watched(plain, given)
        return kind._do_run(self, *arguments, **named)

    kind._do_run = _do_run


def _watch_keras(module: Any, given: dict[str, Any]) -> None:
    """Make models without functions of their own train, evaluate and predict under the limit."""
    kind = module.TensorFlowTrainer
    for name in KERAS_MAKERS:
        setattr(kind, name, _maker(name, getattr(kind, name), given))


def _maker(name: str, plain: Any, given: dict[str, Any]) -> Any:
    @functools.wraps(plain)
    def make_function(self: Any, force: bool = False) -> Any:
        from tfswap.frontends.unmodified import keras

        return keras.maker(self, name, plain, given)(force)

    return make_function


def _watch_device(module: Any, shown: dict[str, Any]) -> None:
    """Make the start of TensorFlow's devices begin the watch: settings of TensorFlow are the program's until then.

    Args:
        shown: how it is shown, by the first process: others do not write to the same page.
    """
    kind = module.Context
    plain = kind.ensure_initialized

    def ensure_initialized(self: Any) -> None:
        plain(self)
        if hasattr(sys.modules.get("tensorflow"), "__version__"):  # it has been imported
            kind.ensure_initialized = plain
            from tfswap.frontends.watching import process

            process.begin(**shown)

    kind.ensure_initialized = ensure_initialized


def _report_unwatched() -> None:
    """At the end of the process that `tfswap watch` became: say so where no device was used but by sessions."""
    if WATCHING not in sys.modules and sys.stderr is not None:
        print(
            "tfswap: no eager code and no function of TensorFlow ran here, so nothing was watched",
            file=sys.stderr,
        )


def _report_nothing() -> None:
    """At the end of the process that `tfswap run` became: say so where no step was seen."""
    summary, steps = sys.modules.get(SUMMARY), sys.modules.get(STEPS)
    if (summary is not None and not summary.saw_nothing()) or sys.stderr is None:
        return
    seen = "no training step was seen in this process, so none was put under a limit"
    if steps is not None and steps.has_steps():
        seen = "the program itself gave its steps limits, which they keep; no other training step was seen"
    print(f"tfswap: {seen}", file=sys.stderr)


def _run_hidden() -> None:
    """Take this folder out of the program's sight, and run the `sitecustomize` that it hides."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != folder]
    spec = importlib.machinery.PathFinder.find_spec(__name__)
    if spec is not None and spec.loader is not None:
        sys.modules[__name__] = hidden = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(hidden)


_begin()
if __name__ == "sitecustomize":
    _run_hidden()
