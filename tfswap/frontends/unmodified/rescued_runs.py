"""Runs of sessions that are rescued (`rescue.py`).

A session's random op has one kernel, whichever run needs it. So once a run is planned, others that need its random ops
are planned too, at their next call: the numbers go on in the planned steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tfswap.frontends.unmodified.earlier_draws import Earlier, continue_draws
from tfswap.frontends.unmodified.rescue import Rescue, warn_of_draws
from tfswap.frontends.unmodified.session_runs import Run, bound, graph_step, has_other_effects, needed
from tfswap.frontends.unmodified.session_steps import Form, SessionStep, Taken
from tfswap.frontends.unmodified.settings import Settings
from tfswap.ir.custom_ops import DRAWS
from tfswap.runtime.shapes import Shapes


class Drawing(NamedTuple):
    """Runs of one step as it is, which need random ops that keep state in their kernels.

    Attributes:
        run: one of them.
        names: of the random ops.
        calls: how many there were, by the shapes of their feeds.
    """

    run: Run
    names: frozenset[str]
    calls: Counter[Shapes]


class SessionDraws:
    """The random ops of a session, which go on in planned steps.

    Args:
        owner: of the random states.
        place: of the session's among them.
    """

    def __init__(self, owner: int, place: str):
        self.place = place
        self._owner = owner
        self._drawing: dict[Any, Drawing | None] = {}
        self._moved: set[str] = set()  # into planned steps

    def note(self, run: Run) -> None:
        """It runs as it is."""
        key = run.key
        if key not in self._drawing:
            names = frozenset(op.name for op in needed(run) if op.type in DRAWS)
            kept = Run(run.targets, run.fetches, dict.fromkeys(run.feeds))
            self._drawing[key] = Drawing(kept, names, Counter()) if names else None
        drawing = self._drawing[key]
        if drawing is not None:
            drawing.calls[run.shapes] += 1

    def have_moved(self, names: frozenset[str]) -> bool:
        """Whether the numbers of some of these ops go on in planned steps."""
        return not self._moved.isdisjoint(names)

    def move(self, names: frozenset[str]) -> bool:
        """Have the planned steps draw on; returns whether they go on where all runs so far have ended."""
        new = names - self._moved
        self._moved |= new
        if not any(drawing and not drawing.names.isdisjoint(new) for drawing in self._drawing.values()):
            return True
        return continue_draws(self._earlier(new), self._owner, lambda name: f"{self.place}/{name}", new)

    def _earlier(self, names: frozenset[str]) -> Iterator[Earlier]:
        for drawing in self._drawing.values():
            if drawing is None or drawing.names.isdisjoint(names):
                continue
            for shapes, count in drawing.calls.items():
                step, feeds = graph_step(drawing.run)
                yield Earlier(step.read(bound(feeds, shapes)), count)


class RescuedRun(SessionStep):
    """A step of a session that runs as it is, and is planned once it has failed for lack of memory.

    Args:
        plain, given, run, ops: as of SessionStep.
        draws: of the session.
    """

    def __init__(
        self, plain: Callable[..., list[Any]], given: Settings, run: Run, ops: Sequence[Any], draws: SessionDraws
    ):
        super().__init__(plain, given, run, ops, draws.place)
        self._draws = draws
        self._drawn = frozenset(op.name for op in ops if op.type in DRAWS)
        possible = not has_other_effects(needed(self.without_batches(run)))
        self.rescue = Rescue(self.__name__, possible=possible)
        self.runs_as_it_is = not possible

    def fits_as_it_is(self, run: Run) -> bool:
        """As SessionStep's."""
        moved = self._drawn and self._draws.have_moved(self._drawn)
        return not self._batches and not moved and self.rescue.knows(run.by_name().shapes)

    def note_as_it_is(self, run: Run) -> None:
        """As SessionStep's."""
        self.rescue.calls[run.by_name().shapes] += 1
        if self._drawn:
            self._draws.note(run)

    def _found(self, taken: Taken, options: Any, run_metadata: Any) -> list[Any]:
        if self._draws.have_moved(self._drawn):
            self.rescue.is_planned = True
        return self.rescue.run(RunCall(self, taken, options, run_metadata))

    def run_as_it_is(self, taken: Taken, options: Any, run_metadata: Any) -> list[Any]:
        """The fetched values."""
        found = self.plain(taken.run, options, run_metadata)
        self._draws.note(taken.run)
        return found

    def _made(self, taken: Taken, shapes: Shapes) -> Form:
        form = super()._made(taken, shapes)
        if not self._draws.move(self._drawn):
            warn_of_draws(self.__name__)
        return form


class RunCall(NamedTuple):
    """A run of a step."""

    step: RescuedRun
    taken: Taken
    options: Any
    run_metadata: Any

    @property
    def shapes(self) -> Shapes:
        """Of the feeds."""
        return self.taken.run.shapes

    def run(self) -> list[Any]:
        """As Call's."""
        return self.step.run_as_it_is(self.taken, self.options, self.run_metadata)

    def run_planned(self) -> list[Any]:
        """As Call's. The metadata of a run that has failed stay: TensorFlow takes none to fill but empty ones."""
        is_first = self.step.rescue.is_planned
        return self.step.run_planned(self.taken, self.options, self.run_metadata if is_first else None)

    def values(self) -> list[Any]:
        """As Call's."""
        return self.step.variables.values()

    def put_back(self, kept: Sequence[Any]) -> None:
        """As Call's."""
        self.step.variables.put_back(kept)
