"""The step of a function's latest call, for its report, plan and statistics.

Not handled: concurrent calls. The last to be noted is the latest.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from tfswap.errors import TfswapError

if TYPE_CHECKING:
    from tfswap.runtime.step import Step

log = logging.getLogger("tfswap")


class LatestStep:
    """The step of the latest call, or why that call had no plan.

    Args:
        name: of the function, for messages.

    Attributes:
        step: the step; None before the first planned call.
    """

    def __init__(self, name: str):
        self._name = name
        self._unplanned: str | None = None
        self._original: weakref.ref[LatestStep] | None = None
        self._warned: set[str] = set()
        self.step: Step | None = None

    def report_to(self, original: LatestStep) -> None:
        """Note every call with `original` too: the function is a clone of that one."""
        self._original = weakref.ref(original)

    def note(self, step: Step) -> None:
        """The latest call runs `step`."""
        self.step, self._unplanned = step, None
        if self._original is not None and (original := self._original()) is not None:
            original.note(step)

    def note_unplanned(self, why: str) -> None:
        """The latest call has no plan. Warns of each reason once."""
        self._note_unplanned(why)
        self.warn_once(why)

    def _note_unplanned(self, why: str) -> None:
        self._unplanned = why
        if self._original is not None and (original := self._original()) is not None:
            original._note_unplanned(why)

    @property
    def planned(self) -> Step | None:
        """The step; None where the latest call had no plan."""
        return None if self._unplanned is not None else self.step

    def require(self) -> Step:
        """The step, audited.

        Raises:
            TfswapError: there has been no call yet, or the latest had no plan.
            VerificationError: TensorFlow ran another graph than the planned one.
        """
        if self._unplanned is not None:
            raise TfswapError(f"{self._name}: there is no plan of the latest call: {self._unplanned}")
        if self.step is None:
            raise TfswapError(
                f"{self._name} has not been planned yet: call it once, or get_concrete_function() it for known sizes"
            )
        self.step.audit()
        return self.step

    def warn_once(self, message: str) -> None:
        """Log a warning, unless it was logged before."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning("tfswap: %s: %s", self._name, message)
