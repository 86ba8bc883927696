"""Memory sizes as people write them, to bytes and back."""

from __future__ import annotations

import re

from tfswap.errors import TfswapError

UNIT_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}

_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z%]*)\s*")

EXAMPLES = 'write bytes as an int, a size as "6GiB" or "512MiB", or a share of the unoptimised peak as "60%"'


def parse_limit(limit: int | str, baseline_bytes: int | None = None) -> int:
    """A memory limit in bytes.

    Args:
        limit: bytes, a size with a unit, or a share such as "60%".
        baseline_bytes: the planned unoptimised peak, which a share is of.

    Raises:
        TfswapError: it does not parse, is not positive, or is a share of an unknown peak.
    """
    if isinstance(limit, bool) or not isinstance(limit, (int, str)):
        raise TfswapError(f"memory_limit is {limit!r}, a {type(limit).__name__}: {EXAMPLES}")
    if isinstance(limit, int):
        result: float = limit
    else:
        match = _PATTERN.fullmatch(limit)
        if match is None:
            raise TfswapError(f"memory_limit is {limit!r}, which is not a size: {EXAMPLES}")
        number, unit = float(match[1]), match[2].upper()
        if unit == "%":
            if baseline_bytes is None:
                raise TfswapError(f"memory_limit is {limit!r}, a share, where only bytes can be used: {EXAMPLES}")
            result = baseline_bytes * number / 100
        elif unit in UNIT_BYTES or not unit:
            result = number * UNIT_BYTES.get(unit, 1)
        else:
            raise TfswapError(f"memory_limit is {limit!r}, and {match[2]!r} is not a unit: {EXAMPLES}")
    if result < 1:
        raise TfswapError(f"memory_limit is {limit!r}, and a limit must be positive: {EXAMPLES}")
    return int(result)


def format_bytes(size_bytes: int) -> str:
    """A size for people: "463.2 MiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
