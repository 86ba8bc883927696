"""Sizes by which TensorFlow's BFC allocator rounds and splits (bfc_allocator.h)."""

from __future__ import annotations

ALIGNMENT_BYTES = 256
SPLIT_SLACK_BYTES = 128 << 20
"""A chunk is split if it is at least this much larger than the request, or twice as large."""


def round_up(size_bytes: int) -> int:
    """The allocator's rounding of a request; 0 stays 0 (nothing is allocated for it)."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
