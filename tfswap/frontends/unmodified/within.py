"""What a thread of an unmodified program does: whether it runs a step."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping
from typing import Any


class Within(threading.local):
    """What this thread does.

    Attributes:
        step: whether it runs a step: functions that tfswap calls then are not the program's.
        batches_ahead: by device, how many batches a pipeline makes during the step that it runs.
    """

    step = False
    batches_ahead: Mapping[str, int] = types.MappingProxyType({})

    def call(self, run: Callable[..., Any], *arguments: Any) -> Any:
        before, self.step = self.step, True
        try:
            return run(*arguments)
        finally:
            self.step = before


within = Within()
