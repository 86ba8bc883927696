"""TensorFlow's collectives.

A reduction follows a ring (ring_alg.cc, ring_reducer.cc). Each member splits the tensor into a chunk per member, or
into a multiple of that, and has a temporary for each chunk that it receives from its neighbour, on its own device. The
chunk that a member starts with needs none. Gathering (ring_gatherer.cc) and broadcasting receive into the output, as
the default rule says.

The answer is an upper bound: the number of parts of a chunk depends on the number of devices per worker, and the first
chunk of a member on its rank. NCCL's buffers are outside of the arena.
"""

from __future__ import annotations

from math import ceil

from tfswap.kernels.memory_rules import Entry, KernelMemory, candidates, with_events
from tfswap.kernels.temporaries import OUT0, Event, Facts

LARGEST_CHUNK_BYTES = 4 << 20
"""Larger chunks are split again (ring_alg.cc, kMaxChunkSizeBytes)."""
MOST_PARTS = 2
"""The most parts of such a chunk, for each device of a worker (kMaxSubdivsPerDeviceDefault)."""
NCCL = b"nccl"
"""The communication hint of a reduction that follows no ring."""
ALIGNMENT_BYTES = 64
"""Chunks begin at multiples of this (EIGEN_MAX_ALIGN_BYTES)."""


def reduce(facts: Facts) -> KernelMemory:
    """collective_ops.cc: the input's buffer is forwarded to the output where possible; then the ring's temporaries."""
    forward = candidates(facts, 0, (0,))
    total = facts.inputs[0].nbytes
    if total is None or facts.attrs.get("communication_hint") == NCCL:
        return with_events((OUT0,), forward=forward, exact=False)
    members = _members(facts)
    # Each GPU is a device of its own; CPUs of one worker are mostly one.
    most_parts = MOST_PARTS * members if facts.device.is_gpu and members else MOST_PARTS
    temporaries = tuple[Event, ...](("temp", nbytes) for nbytes in _chunks(total, members, most_parts))
    return with_events((OUT0, *temporaries), forward=forward, exact=not temporaries)


def _members(facts: Facts) -> int | None:
    size = facts.attrs.get("group_size")
    if isinstance(size, int):
        return size
    known = facts.values.get(1)
    return known[0] if known else None


def _chunks(total_bytes: int, members: int | None, most_parts: int) -> list[int]:
    """The temporaries' bytes."""
    if members is None:
        return [total_bytes]
    parts = 1
    while total_bytes // (members * parts) > LARGEST_CHUNK_BYTES and parts < most_parts:
        parts += 1
    chunk = ceil(total_bytes / (members * parts) / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return [min(chunk, total_bytes)] * ((members - 1) * parts)


RULES: dict[str, Entry] = {
    "CollectiveReduce": Entry(reduce, attrs=("communication_hint", "group_size")),
    "CollectiveReduceV2": Entry(reduce, attrs=("communication_hint",), values=(1,)),
    "CollectiveReduceV3": Entry(reduce),
}
