"""Calls of a step that are known to fit, since a call of the same sizes has shown what it adds to the bytes in use.

Known to fit: the bytes in use, with what a call for arguments of these shapes has added, and a margin for
fragmentation, are within the limit. What a call has added is bounded by the allocator's peak after it, which never
falls. So of a call that is known to fit nothing is read afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from tfswap.device import arena
from tfswap.device.placement import step_devices
from tfswap.runtime.shapes import Shapes

MARGIN = 8
"""A call must leave free one part in this number of what it adds: an arena in pieces needs more than the bytes."""

InUse = Mapping[str, tuple[int, int]]
"""By device, the bytes in use and the limit."""


class KnownRoom:
    """What calls of one step have added.

    Args:
        limit_bytes: gives the limit of a device that has an arena; None where there is none.
    """

    def __init__(self, limit_bytes: Callable[[str], int | None] = arena.device_limit_bytes):
        self._limit_bytes = functools.cache(limit_bytes)
        # By the arguments' shapes and by device, the most bytes in use with which a call is known to fit.
        self._most: dict[Shapes, dict[str, int]] = {}

    def in_use(self) -> InUse:
        """Of each device that has an arena with a limit."""
        found = {}
        for device in step_devices():
            info = arena.memory_info(device)
            if info is not None and (limit := self._limit_bytes(device)) is not None:
                found[device] = info.current_bytes, limit
        return found

    def fits(self, shapes: Shapes) -> bool:
        """Whether a call for arguments of these shapes is known to fit now. It is asked before each call."""
        known = self._most.get(shapes)
        if not known:
            return False
        read = self._read
        for device, most in known.items():  # noqa: SIM110 a generator would take as long as all the rest
            if read(device)["current"] > most:
                return False
        return True

    @functools.cached_property
    def _read(self) -> Callable[[str], Mapping[str, int]]:
        """As `tf.config.experimental.get_memory_info`, of whose time most is spent on the way."""
        from tensorflow.python import pywrap_tfe
        from tensorflow.python.eager import context

        return functools.partial(pywrap_tfe.TFE_GetMemoryInfo, context.context()._handle)

    def note(self, shapes: Shapes, before: InUse) -> None:
        """A call for arguments of these shapes, which was not known to fit, has found these bytes in use."""
        known = self._most.setdefault(shapes, {})
        for device, (used_bytes, limit_bytes) in before.items():
            info = arena.memory_info(device)
            if info is not None:
                added = max(0, info.peak_bytes - used_bytes)
                known[device] = max(limit_bytes - added - added // MARGIN, known.get(device, -1))
