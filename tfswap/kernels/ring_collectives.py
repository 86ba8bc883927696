"""What TensorFlow's collectives take of the arena.

A reduction goes round a ring (ring_alg.cc, ring_reducer.cc): each member has the tensor in as many chunks as there are
members, or some times as many, and a temporary for each chunk that comes from its neighbour. A member begins with
another chunk, for which it needs none. Gathering and broadcasting receive into the output itself: their kernels follow
the rule of those that are not named.

Known by an upper bound: how many parts a chunk has depends on how many devices each worker has, and which chunk a
member begins with on its rank. NCCL has buffers of its own, outside of the arena.
"""

from __future__ import annotations

from math import ceil

from tfswap.kernels.memory_rules import KernelMemory, candidates, with_events
from tfswap.kernels.temporaries import OUT0, Event, Facts

LARGEST_CHUNK_BYTES = 4 << 20
"""Chunks larger than this are parted once more (ring_alg.cc, kMaxChunkSizeBytes), ..."""
MOST_PARTS = 2
"""... for one device per worker (kMaxSubdivsPerDeviceDefault)."""
ALIGNMENT_BYTES = 64
"""Chunks begin at multiples of this (EIGEN_MAX_ALIGN_BYTES)."""


def reduce(facts: Facts) -> KernelMemory:
    """collective_ops.cc: the output takes the input's buffer over where it can; then the ring's temporaries."""
    forward = candidates(facts, 0, (0,))
    total = facts.inputs[0].nbytes
    if total is None or facts.device.kind == "gpu":
        return with_events((OUT0,), forward=forward, exact=False)
    temporaries = tuple[Event, ...](("temp", nbytes) for nbytes in _chunks(total, _members(facts)))
    return with_events((OUT0, *temporaries), forward=forward, exact=not temporaries)


def _members(facts: Facts) -> int | None:
    size = facts.attrs.get("group_size")
    if isinstance(size, int):
        return size
    known = facts.values.get(1)
    return known[0] if known else None


def _chunks(total_bytes: int, members: int | None) -> list[int]:
    """The temporaries' bytes."""
    if members is None:
        return [total_bytes]
    parts = 1
    while total_bytes // (members * parts) > LARGEST_CHUNK_BYTES and parts < MOST_PARTS:
        parts += 1
    chunk = ceil(total_bytes / (members * parts) / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return [min(chunk, total_bytes)] * ((members - 1) * parts)
