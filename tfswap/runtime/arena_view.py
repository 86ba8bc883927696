"""The arena before a step, and the variables whose buffers the step writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfswap.analysis.variables import copied_bytes, written_in_bodies, written_variables
from tfswap.compiler.compiler import Optimizer
from tfswap.device import machine
from tfswap.device.live import LiveDevice
from tfswap.device.variable_buffers import WrittenVariables
from tfswap.runtime.captures import without_asking
from tfswap.simulator.arena_snapshot import ArenaSnapshot

if TYPE_CHECKING:
    from tfswap.native.load import CLook


class ArenaView:
    """What one step finds in the device's arena.

    Attributes:
        shared: feeds of variables whose buffers tensors hold too, at the latest look.
    """

    def __init__(self, device: LiveDevice):
        self._device = device
        self.shared: frozenset[str] = frozenset()
        self._variables: WrittenVariables | None = None

    def look_before(self) -> CLook:
        """What the step that comes next finds."""
        self.shared = frozenset() if self._variables is None else self._variables.shared()
        return self._device.look(before=True)

    def snapshot(self, *, instantiated: bool = False) -> ArenaSnapshot:
        """What is in the arena now.

        Args:
            instantiated: whether the step's constants are.
        """
        found = machine.snapshot(self._device.name)
        return dataclasses.replace(found, instantiated=instantiated, shared=self.shared)

    def copied_bytes(self, optimizer: Optimizer) -> int:
        """Of variables whose buffers tensors hold too, which this step's updates therefore copy."""
        return copied_bytes(optimizer.flow, self.shared) if self.shared else 0

    def own_buffers(self, optimizer: Optimizer, concrete: Any, inputs: Sequence[Any]) -> None:
        """Give each variable that the step writes a buffer that nothing else holds, where it keeps its content.

        One that was assigned a NumPy array may have that array's, outside of the arena, and replicas' variables are
        assigned one buffer: the first update takes another. Also where the step is traced into a function around it,
        as far as variables are known there. Before later steps these are looked at again (`look_before`).
        """
        import tensorflow as tf

        captures = without_asking(concrete)
        feeds = optimizer.graph.feeds
        handles = {
            feeds[p].name: captures[p - len(inputs)]
            for p in written_variables(optimizer.graph, optimizer.flow)
            if p >= len(inputs)
        }
        known = {name: handle for name, handle in handles.items() if not tf.is_symbolic_tensor(handle)}
        if known:
            with tf.init_scope():
                self._variables = WrittenVariables(known, written_in_bodies(optimizer.graph, optimizer.flow))
                self._variables.own()
