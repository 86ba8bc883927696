"""What is added to a refusal where an arena has less than the floor."""

from __future__ import annotations

import pytest

from tfswap.errors import InfeasibleMemoryLimit
from tfswap.planner.promise import promised
from tfswap.runtime.messages import refused_by_the_arena

ARENA_BYTES = 384 << 20


@pytest.mark.parametrize(
    ("floor_bytes", "regions", "added"),
    [
        (promised(ARENA_BYTES + 256), 1, "each tensor lie in one piece"),  # no request that did not fit counts for more
        (2 * ARENA_BYTES, 1, ""),
        (2 * ARENA_BYTES, 3, "in 3 regions so far"),
        (ARENA_BYTES // 2, 1, ""),
    ],
)
def test_a_floor_above_the_arena_has_a_reason(floor_bytes: int, regions: int, added: str) -> None:
    refusal = InfeasibleMemoryLimit("Too little.", floor_bytes=floor_bytes, limit_bytes=ARENA_BYTES)
    message = refused_by_the_arena(refusal, "GPU:0", ARENA_BYTES, regions)
    assert message.startswith("Too little. GPU:0's allocator may have 402653184 bytes (384.0 MiB) in all")
    assert added in message
    assert ("region" in message) == (regions > 1)
    assert ("piece" in message) == ("piece" in added)
