"""Bytes of the limit that the plans of one step leave free, for uses that are not known exactly.

Each has a cause: batches that a pipeline makes while the step runs, results that the caller still holds, bytes that
others allocated during an earlier step, an arena whose layout changes from step to step. docs/design/fragmentation.md
lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.pipelines import element_bytes
from tfswap.analysis.variables import fetched_bytes
from tfswap.ir.graph import Graph
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel
from tfswap.planner.promise import promised
from tfswap.runtime.batches import ELEMENT_COPIES_AHEAD, ELEMENTS_AHEAD, batch_sizes, room_bytes, shared_device

TOLERATED_CHANGES = 1
"""The first layout change is treated as one-off. If it happens again, assume the layout changes every step."""
MOST_FOR_CHANGES = 1 / 16
"""The largest share of the limit that is left free for such an arena."""


class Margins:
    """The margins of one step's plans.

    Attributes:
        others_bytes: for bytes that others allocate during the step, as far as they are known.
        growth_bytes: by which the pipeline's buffers may grow between steps.
        elements_bytes: an element of each of the pipelines that the step itself takes batches from.
    """

    def __init__(self) -> None:
        self.others_bytes = 0
        self.growth_bytes = 0
        self.elements_bytes = 0
        self._elements_ahead = 0
        self._changes = 0  # how often a changed layout made the step be planned again
        self._changes_bytes = 0  # by how much the plans exceeded the limit then, in total

    def add_batches(self, graph: Graph, device: DeviceModel, inputs: Sequence[Any], count: int) -> int:
        """Leave room for batches like these; returns their bytes in the arena.

        Args:
            count: how many are made while the step runs.
        """
        if device.host_is_separate or shared_device() is not None:
            self.elements_bytes = sum(map(round_up, element_bytes(graph, device)))
            self._elements_ahead = ELEMENT_COPIES_AHEAD if device.host_is_separate else ELEMENTS_AHEAD
        nbytes = room_bytes(batch_sizes(inputs) * count)
        self.growth_bytes = nbytes // 2
        self.others_bytes += nbytes
        return nbytes

    def layout_changes(self) -> bool:
        """Note that a plan does not fit since the arena's layout changed; returns whether that is assumed of every
        step.
        """
        self._changes += 1
        return self._changes > TOLERATED_CHANGES

    def add_for_layouts(self, lacking_bytes: int, limit_bytes: int) -> None:
        """Let later plans depend less on the layout.

        Args:
            lacking_bytes: by how much the present plan exceeds the limit in this layout.
        """
        self._changes_bytes = min(self._changes_bytes + lacking_bytes, int(limit_bytes * MOST_FOR_CHANGES))

    def spare(self, flow: Dataflow, lacking_bytes: int) -> list[int]:
        """Margins to try, the largest first, before that for others alone.

        They leave room for results that the caller still holds, for more batches than wait now, and for the elements of
        pipelines that the step takes from.

        Args:
            lacking_bytes: by how much an earlier plan exceeded the limit in the arena.
        """
        spare = fetched_bytes(flow) + self.growth_bytes + self._changes_bytes + lacking_bytes
        # An element may get a free chunk of up to twice its size whole. Where there is no room for all, for some.
        most = self._elements_ahead
        elements = (2 * most, *range(most, 0, -1)) if self.elements_bytes else ()
        spares = [*(spare + each * self.elements_bytes for each in elements), spare]
        return [self.others_bytes + each for each in spares if each > promised(0)]  # less is free anyway
