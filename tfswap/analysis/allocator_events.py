"""Rebuilds which allocations an arena held at its highest moment, from its allocator's events over a time.

The allocator writes an event for each request and each release, under its lock, with the bytes in use after it
(AddTraceMe in TensorFlow's bfc_allocator.cc). So the events of one allocator are in the order in which they happened,
and the bytes of the chunks that are found here can be checked against the bytes in use.

An address whose first event is a release was allocated before. A chunk without an event was in use all the time.

Not handled: which tensor a chunk holds. It goes by the op that requested it; an op that writes its output into its
input's buffer requests none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

REQUEST, RELEASE = "MemoryAllocation", "MemoryDeallocation"
_FIELD = re.compile(r"(\w+)=(\[[^\]]*\]|[^,#]*)")
NO_OP = "(null)"
"""How TensorFlow writes that it does not know which op requests."""


@dataclass(frozen=True)
class AllocatorEvent:
    """A request or a release.

    Attributes:
        allocator: its name, "GPU_0_bfc".
        is_request: whether it is a request.
        address: of the chunk.
        chunk_bytes: the bytes of the chunk.
        in_use_bytes: of the arena, after the event.
        op: of a request the node that requests, in eager code the type of the op; "" where unknown.
        shape: of a request the tensor's, "[2,3]"; "" where unknown.
        dtype: of a request the number of the tensor's type (types.proto); 0 where unknown.
        is_temporary: whether a kernel requests it for itself.
    """

    allocator: str
    is_request: bool
    address: int
    chunk_bytes: int
    in_use_bytes: int
    op: str = ""
    shape: str = ""
    dtype: int = 0
    is_temporary: bool = False


@dataclass(frozen=True)
class Allocation:
    """A chunk that was in use at the highest moment.

    Attributes:
        address, nbytes: of the chunk.
        request: the event that requested it; None where it was allocated before the first event.
    """

    address: int
    nbytes: int
    request: AllocatorEvent | None = None


@dataclass(frozen=True)
class ArenaHeight:
    """The highest moment of an arena.

    Attributes:
        nbytes: the bytes in use.
        allocations: the chunks that are known to have been in use, the largest first.
    """

    nbytes: int
    allocations: tuple[Allocation, ...]

    @property
    def unknown_bytes(self) -> int:
        """The bytes in use that are in no known chunk; negative where chunks were freed before the first event."""
        return self.nbytes - sum(each.nbytes for each in self.allocations)


def parse_events(text: str) -> list[AllocatorEvent]:
    """The events, one a line, as TensorFlow writes them: "MemoryAllocation#addr=256,tf_op=MatMul,...#".

    Lines of other events, and those that lack a number, are left out.
    """
    events: list[AllocatorEvent] = []
    for line in text.splitlines():
        kind, _, rest = line.partition("#")
        if kind not in (REQUEST, RELEASE):
            continue
        fields = dict(_FIELD.findall(rest))
        try:
            op = fields.get("tf_op", "")
            events.append(
                AllocatorEvent(
                    fields["allocator_name"],
                    kind == REQUEST,
                    int(fields["addr"]),
                    int(fields["allocation_bytes"]),
                    int(fields["bytes_allocated"]),
                    "" if op == NO_OP else op,
                    fields.get("shape", ""),
                    int(fields.get("data_type", 0)),
                    fields.get("region_type") == "temp",
                )
            )
        except (KeyError, ValueError):
            continue
    return events


def heights(events: Iterable[AllocatorEvent], in_use: Mapping[str, Mapping[int, int]]) -> dict[str, ArenaHeight]:
    """The highest moment of each allocator that has events; of several the last, when more requests are known.

    Args:
        events: in order of time.
        in_use: by allocator, the chunks that were in use when the first event came: address and bytes. Those of which
            nothing is known may be missing.
    """
    by_allocator: dict[str, list[AllocatorEvent]] = {}
    for event in events:
        by_allocator.setdefault(event.allocator, []).append(event)
    return {name: _height(own, in_use.get(name, {})) for name, own in by_allocator.items()}


def _height(events: Sequence[AllocatorEvent], in_use: Mapping[int, int]) -> ArenaHeight:
    first = events[0]
    nbytes = first.in_use_bytes + (-first.chunk_bytes if first.is_request else first.chunk_bytes)
    count = 0  # of the events until the highest moment
    for number, event in enumerate(events, 1):
        if event.in_use_bytes >= nbytes:
            nbytes, count = event.in_use_bytes, number
    alive = {address: Allocation(address, size) for address, size in in_use.items()}
    seen: set[int] = set()
    for event in events:
        if event.address not in seen:
            seen.add(event.address)
            if event.is_request:
                alive.pop(event.address, None)  # it was freed between the snapshot and the first event
            else:
                alive[event.address] = Allocation(event.address, event.chunk_bytes)
    for event in events[:count]:
        if event.is_request:
            alive[event.address] = Allocation(event.address, event.chunk_bytes, event)
        else:
            alive.pop(event.address, None)
    return ArenaHeight(nbytes, tuple(sorted(alive.values(), key=lambda each: (-each.nbytes, each.address))))
