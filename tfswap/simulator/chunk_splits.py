"""Splitting free chunks of the simulated arena, step by step as the op does it (ops/csrc/core/chunk_split_ops.cc).

The allocator serves a request with a whole chunk unless that is twice as large or 128 MiB larger. Allocating and
freeing other chunks first leaves one of exactly the requested size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from tfswap.kernels.alignment import ALIGNMENT_BYTES, SPLIT_SLACK_BYTES, round_up

if TYPE_CHECKING:
    from tfswap.simulator.bfc_allocator import Arena

MOST_MISSED = 8
"""The most free chunks that are allocated during a split since they would fit the separator better."""
MOST_BETWEEN = 64
"""Where the allocator would split the chunk itself, the separator is smaller than the request by this factor."""


def split_chunks(arena: Arena, sizes: Sequence[int]) -> list[int]:
    """Split free chunks so that the next requests, which are held together, get chunks of exactly their sizes.

    Without this, the allocator would serve them with larger chunks, whole.

    Args:
        sizes: bytes. A single negative size is that of a request at the end of the largest free chunk.

    Returns:
        The addresses of the separators, which stay in use: chunks between the exact ones and the rest.
    """
    if len(sizes) == 1 and sizes[0] < 0:
        return _split_end(arena, -sizes[0])
    separators: list[int] = []
    pieces: list[int] = []
    later_bytes = sum(map(round_up, sizes))
    for size in sizes:
        later_bytes -= round_up(size)
        separators.append(_split_one(arena, size, later_bytes))
        if later_bytes:
            pieces.append(arena.allocate(size))  # so that the next split does not use it
    for address in pieces:
        arena.free(address)
    return [address for address in separators if address >= 0]


def _split_one(arena: Arena, size_bytes: int, later_bytes: int) -> int:
    """Split the chunk that a request would get. Returns the separator, or -1 if the chunk fits or can't be split.

    Bytes in use never exceed those with that chunk allocated, and as a rule not those of the request.

    Args:
        later_bytes: bytes of the requests after this one. If there are any, a chunk that the allocator splits itself
            is split here as well, or its rest would join a chunk that is split for them.
    """
    needed = round_up(size_bytes)
    whole = arena.best_fit_bytes(needed)
    if not whole:
        arena.free(arena.allocate(size_bytes))  # the arena grows
        whole = arena.best_fit_bytes(needed)
    rest_bytes = whole - needed
    splits_itself = rest_bytes >= min(needed, SPLIT_SLACK_BYTES)
    if not rest_bytes or (splits_itself and not later_bytes):
        return -1
    # The separator is cut from this chunk only if no other free chunk fits it better. So it is larger than all chunks
    # that are too small for the request, except for the largest of these, which are allocated meanwhile. Together they
    # take no more than would stay in use otherwise.
    first_bytes = needed if splits_itself else rest_bytes
    missed: list[int] = []
    smaller = arena.smaller_bytes(needed)
    largest = next(smaller, 0)
    while (
        largest
        and len(missed) < MOST_MISSED
        and sum(missed) + largest + first_bytes <= later_bytes + needed + min(largest, rest_bytes)
    ):
        missed.append(largest)
        largest = next(smaller, 0)
    if largest >= rest_bytes:
        return -1
    between_bytes = largest + ALIGNMENT_BYTES
    if splits_itself and between_bytes * MOST_BETWEEN > needed:
        return -1
    if 2 * between_bytes > rest_bytes:
        between_bytes = rest_bytes
    held = [arena.allocate(size) for size in missed]
    held.append(arena.allocate(needed if splits_itself else rest_bytes - between_bytes))
    between = arena.allocate(between_bytes)
    for address in held:
        arena.free(address)
    return between


def _split_end(arena: Arena, size_bytes: int) -> list[int]:
    """Split off the end of the largest free chunk, for a request of exactly that size.

    The part before it is allocated in pieces of at most half of the rest, since the allocator splits a chunk only for a
    request of at most half of it. Other free chunks would fit these pieces better: they are allocated meanwhile, except
    for small ones, and the separator is larger than these. So nearly all of the arena is in use during the split.
    """
    needed = round_up(size_bytes)
    free = arena.free_sizes()
    before = next(free, 0) - needed
    missed = list(islice(free, MOST_MISSED))
    between = next(free, 0) + ALIGNMENT_BYTES
    if before < between or 2 * between > needed:
        return []
    held = [arena.allocate(size) for size in missed]
    while True:
        half = (before + needed) // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        piece = min(half, before - between)
        if piece < between:
            break
        held.append(arena.allocate(piece))
        before -= piece
    separator = arena.allocate(before)
    for address in held:
        arena.free(address)
    return [separator]
