"""The arena before a step, and the variables whose buffers the step writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfswap.analysis.variables import (
    copied_bytes,
    read_as_a_whole,
    resources_used,
    sparsely_accessed,
    written_in_bodies,
    written_variables,
)
from tfswap.compiler.compiler import Optimizer
from tfswap.device import arena
from tfswap.device.live import LiveDevice
from tfswap.device.regions import add_regions
from tfswap.device.variable_buffers import HomePlaces, StepVariables
from tfswap.simulator.arena_snapshot import ArenaSnapshot

if TYPE_CHECKING:
    from tfswap.native.load import CArenaReading


class ArenaView:
    """The device's arena as one step finds it.

    Attributes:
        shared: feeds of variables whose buffers other tensors share, at the latest reading.
    """

    def __init__(self, device: LiveDevice):
        self._device = device
        self.shared: frozenset[str] = frozenset()
        self._variables: StepVariables | None = None

    def read_before(self) -> CArenaReading:
        """Read the arena before the next step."""
        self.shared = frozenset() if self._variables is None else self._variables.shared()
        return self._device.read_arena(before=True)

    def snapshot(self, *, instantiated: bool = False) -> ArenaSnapshot:
        """The arena's snapshot.

        Args:
            instantiated: whether the step's constants are in it.
        """
        found = arena.snapshot(self._device.name)
        variables = self._variables.places() if self._variables is not None and found.chunks else ()
        return dataclasses.replace(found, instantiated=instantiated, shared=self.shared, variables=variables)

    def add_regions(self, sizes: Sequence[int]) -> None:
        """As of regions.py."""
        add_regions(self._device.name, sizes)

    @property
    def variables(self) -> StepVariables | None:
        """The step's variables; None where it accesses none that is known."""
        return self._variables

    def at_home(self) -> HomePlaces:
        """As of `StepVariables`."""
        return HomePlaces() if self._variables is None else self._variables.at_home()

    def keep_at_home(self, places: HomePlaces, *, move: bool = False) -> None:
        """As of `StepVariables`.

        Args:
            move: move the variables now, and not before the next step.
        """
        if self._variables is not None:
            self._variables.keep_at_home(places)
            if move:
                self._variables.shared()

    def copied_bytes(self, optimizer: Optimizer) -> int:
        """The bytes of variables that this step's updates copy, since other tensors share their buffers."""
        return copied_bytes(optimizer.flow, self.shared) if self.shared else 0

    def own_buffers(self, optimizer: Optimizer, captures: Mapping[str, Any]) -> None:
        """Give each variable that the step writes a buffer of its own, with its value, and turn copy-on-read modes off.

        A variable that was assigned a NumPy array may share that array's buffer, outside of the arena, and replicas'
        variables may share one buffer: the first update would allocate another. It is done too where the step is traced
        into another function, for variables that are known there. Before later steps sharing is checked again
        (`read_before`).

        Args:
            captures: by the names of the step's arguments.
        """
        import tensorflow as tf

        graph, feeds = optimizer.graph, optimizer.graph.feeds
        written = {feeds[p].name for p in written_variables(graph, optimizer.flow)}
        used = {node: resources_used(node, bodies) for node, bodies in graph.bodies.items()}
        in_part = {node.name for node in sparsely_accessed(graph, used)}
        read = ({node.name for node in read_as_a_whole(graph, used)} | in_part) - written
        used_handles = {name: handle for name, handle in captures.items() if name in written | read}
        known = {name: handle for name, handle in used_handles.items() if not tf.is_symbolic_tensor(handle)}
        if known:
            with tf.init_scope():
                self._variables = StepVariables(known, written_in_bodies(graph, optimizer.flow), in_part, read)
                self._variables.own()
