"""The alignment of TensorFlow's BFC allocator (bfc_allocator.h)."""

from __future__ import annotations

ALIGNMENT_BYTES = 256


def round_up(size_bytes: int) -> int:
    """The allocator's rounding of a request; 0 stays 0 (nothing is allocated for it)."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
