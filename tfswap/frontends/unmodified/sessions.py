"""Sessions of TensorFlow 1 in an unmodified program: runs whose fetches need gradients run under the limit.

Each `Session.run`, also of a MonitoredSession, passes through `BaseSession._do_run` with targets, fetches and feeds.
The nodes that these need are planned before they run first, as a GraphDef's step is (`graph_def.py`), for the arena as
it is. One node in the session's own graph, hidden from the program, then runs in their place. So variables, tables and
iterators are the session's own. Without a limit, they are planned when they run out of memory (`rescued_runs.py`).

Runs without gradients are planned where there may be no room for them (`forward_runs.py`).

Not handled, so that it runs as it is: partial runs, sessions of a remote server, `make_callable` without feeds, and
steps that `graph_def.py` refuses.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from tfswap.analysis.phases import is_gradient
from tfswap.frontends.unmodified.forward_runs import ForwardRun, may_be_planned
from tfswap.frontends.unmodified.functions import PROGRAM
from tfswap.frontends.unmodified.rescued_runs import RescuedRun, SessionDraws
from tfswap.frontends.unmodified.session_runs import Run, needed
from tfswap.frontends.unmodified.session_steps import SessionStep
from tfswap.frontends.unmodified.settings import Settings, settings
from tfswap.frontends.unmodified.within import within

STEPS = "_tfswap_steps"
"""The attribute of a session: its SessionSteps."""

_numbers = itertools.count()


def watched(plain: Callable[..., Any], given: Mapping[str, Any]) -> Callable[..., Any]:
    """`BaseSession._do_run`, which runs steps under the limit.

    Args:
        plain: TensorFlow's own.
        given: the options, as the environment has them.
    """

    def _do_run(
        self: Any, handle: Any, target_list: Any, fetch_list: Any, feed_dict: Any, options: Any, run_metadata: Any
    ) -> Any:
        if handle is None and not within.step and not self._target:
            steps = self.__dict__.get(STEPS)
            if steps is None:
                steps = SessionSteps(self, plain, settings(given))
                setattr(self, STEPS, steps)
            run = Run(target_list, fetch_list, feed_dict)
            if (step := steps.of(run)) is not None:
                with step.lock:
                    if step.fits_as_it_is(run):
                        arguments = target_list, fetch_list, feed_dict, options, run_metadata
                        found = within.call(plain, self, handle, *arguments)
                        step.note_as_it_is(run)
                        return found
                return within.call(step.run, run, options, run_metadata)
        return plain(self, handle, target_list, fetch_list, feed_dict, options, run_metadata)

    return _do_run


class SessionSteps:
    """The steps of a session, by the names of their targets, fetches and feeds.

    Args:
        session: the session.
        plain: TensorFlow's own `_do_run`.
        given: the settings.
    """

    def __init__(self, session: Any, plain: Callable[..., Any], given: Settings):
        self._session = weakref.ref(session)
        self._plain = plain
        self._given = given
        self._known: dict[Any, SessionStep | None] = {}
        self._draws = SessionDraws(PROGRAM.owner, f"session/{next(_numbers)}")

    def of(self, run: Run) -> SessionStep | None:
        """The step of a run; None where that runs as it is."""
        key = run.key
        if key not in self._known:
            self._known[key] = self._made(run)
        step = self._known[key]
        if step is None or step.runs_as_it_is:
            if self._given.rescues:
                self._draws.note(run)
            return None
        return step

    def _made(self, run: Run) -> SessionStep | None:
        ops = needed(run)
        trains = any(is_gradient(op.type, op.name) for op in ops)
        if not trains and (self._given.training_only or not may_be_planned(run, ops)):
            return None
        if self._given.rescues:
            return RescuedRun(self._run, self._given, run, ops, self._draws)
        made = SessionStep if trains else ForwardRun
        return made(self._run, self._given, run, ops, self._draws.place)

    def _run(self, run: Run, options: Any = None, run_metadata: Any = None) -> list[Any]:
        """Run it as it is."""
        session = self._session()
        return self._plain(session, None, run.targets, run.fetches, run.feeds, options, run_metadata)
