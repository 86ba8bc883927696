"""Calls of functions that XLA compiles, whose temporaries were measured (runtime/xla_calls.py)."""

from __future__ import annotations

from tfswap.ir.graph import Node
from tfswap.kernels.memory_rules import Entry, KernelMemory, fresh, with_events
from tfswap.kernels.temporaries import Event, Facts

XLA_POINTER_BYTES = 8


def compiled(facts: Facts) -> KernelMemory:
    """The function's results and the table of them, the largest first; then all temporaries in one buffer.

    That buffer has the measured size (buffer_assignment.cc, cpu_executable.cc; seen in the allocator's log). The order
    of the other buffers is XLA's, and not always this one.
    """
    if facts.temporary_bytes is None:  # not compiled
        return fresh(facts)
    count = len(facts.outputs)
    buffers: list[tuple[int, Event]] = [(kind.nbytes or 0, ("out", i)) for i, kind in enumerate(facts.outputs)]
    if count > 1:
        table = XLA_POINTER_BYTES * count
        buffers.append((table, ("temp", table)))
    buffers.sort(key=lambda buffer: -buffer[0])
    return with_events((*(event for _, event in buffers), ("temp", facts.temporary_bytes)), exact=False)


def is_compiled(node: Node) -> bool:
    """Whether a node is a call of a function that XLA compiles, whose temporaries were measured."""
    return node.op in RULES and node.measured.temporary_bytes is not None


RULES: dict[str, Entry] = {
    "PartitionedCall": Entry(compiled),
    "StatefulPartitionedCall": Entry(compiled),
}
