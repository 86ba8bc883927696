"""Memory sizes as people write them, to bytes and back."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from numbers import Integral
from typing import NamedTuple

from tfswap.errors import TfswapError

Limit = int | str | Mapping[str, int | str] | None
"""A memory limit: of every device, or by device; None for the device's own."""

_BINARY_UNITS = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))
UNIT_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    **{name.upper(): nbytes for name, nbytes in _BINARY_UNITS},
}

MAX_BYTES = 2**63 - 1
"""TensorFlow's allocators count bytes in 64 bits: no device has more."""

_PATTERN = re.compile(r"\s*(-?[0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([A-Za-z%]*)\s*")

_DEVICE = re.compile(r"(?:/job:localhost/replica:0/task:0)?/?(?:device:)?(gpu|cpu):(\d{1,4})", re.IGNORECASE)

_SIZES = 'write bytes as an int, or a size as "6GiB" or "512MiB"'
_SHARES = 'write bytes as an int, a size as "6GiB" or "512MiB", or a share of the unoptimised peak as "60%"'


def parse_limit(limit: int | str, baseline_bytes: Callable[[], int] | None = None, name: str = "memory_limit") -> int:
    """A memory limit in bytes.

    Args:
        limit: bytes (of any integer type, NumPy's too), a size with a unit, or a share such as "60%".
        baseline_bytes: gives the unoptimised peak in bytes, for shares. None: shares are refused.
        name: the argument's name, for messages.

    Raises:
        TfswapError: it does not parse, is not positive, exceeds 64 bits, or is a share without `baseline_bytes`.
    """
    examples = _SIZES if baseline_bytes is None else _SHARES
    if isinstance(limit, str):
        result = _parse_text(limit, baseline_bytes, name, examples)
    elif isinstance(limit, Integral) and not isinstance(limit, bool):
        result = int(limit)
    else:
        raise TfswapError(f"{name} is {limit!r}, of type {type(limit).__name__}: {examples}")
    if result < 1:
        raise TfswapError(f"{name} is {_shown(limit)}, and a limit must be positive: {examples}")
    if result > MAX_BYTES:
        raise TfswapError(f"{name} is {_shown(limit)}, more bytes than any device has: {examples}")
    return result


def check_limit(limit: int | str, name: str = "memory_limit") -> None:
    """Raise TfswapError, as `parse_limit`, for values that are invalid for every unoptimised peak."""
    parse_limit(limit, baseline_bytes=lambda: 1 << 40, name=name)


def check_limits(limit: Limit) -> Limit:
    """A limit, or one for each device with the devices' names as TensorFlow has them ("GPU:0").

    Raises TfswapError for what is neither.
    """
    if not isinstance(limit, Mapping):
        if limit is not None:
            check_limit(limit)
        return limit
    found: dict[str, int | str] = {}
    for name, each in limit.items():
        match = _DEVICE.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise TfswapError(
                f'memory_limit has {name!r}, which is no device of this process: name each as "GPU:0" or "CPU:0"'
            )
        check_limit(each, f"memory_limit[{name!r}]")
        device = f"{match[1].upper()}:{match[2]}"
        if device in found:
            raise TfswapError(f"memory_limit has {device} twice, the second time as {name!r}: give one limit for it")
        found[device] = each
    if not found:
        raise TfswapError("memory_limit is an empty mapping: give a limit for each device of the step")
    return found


def is_share(limit: Limit) -> bool:
    """Whether a limit is a share of the unoptimised peak."""
    return isinstance(limit, str) and "%" in limit


def _parse_text(limit: str, baseline_bytes: Callable[[], int] | None, name: str, examples: str) -> int:
    match = _PATTERN.fullmatch(limit)
    if match is None:
        raise TfswapError(f"{name} is {_shown(limit)}, which is not a size: {examples}")
    number, unit = Fraction(match[1]), match[2].upper()
    if unit == "%":
        if baseline_bytes is None:
            raise TfswapError(f"{name} is {limit!r}, a share, where only bytes can be used: {examples}")
        return math.floor(baseline_bytes() * number / 100)
    if unit and unit not in UNIT_BYTES:
        raise TfswapError(f"{name} is {_shown(limit)}, and {_shown(match[2])} is not a unit: {examples}")
    return math.floor(number * UNIT_BYTES.get(unit, 1))


def _shown(value: object) -> str:
    """The user's value for a message, shortened. (An int of thousands of digits has no decimal form.)"""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    return reprlib.repr(value)


def format_bytes(size_bytes: int) -> str:
    """A size for people: "463.2 MiB"."""
    name, nbytes = _unit_below(abs(size_bytes))
    return f"{size_bytes / nbytes:.{0 if nbytes == 1 else 1}f} {name}"


def _unit_below(size_bytes: int) -> tuple[str, int]:
    """The largest unit that is no larger than a size, and its bytes."""
    return next((unit for unit in reversed(_BINARY_UNITS) if unit[1] <= size_bytes), _BINARY_UNITS[0])


class Unit(NamedTuple):
    """One unit for all sizes of a table, so that they stand below each other and compare at a glance.

    Attributes:
        name: "MiB".
        nbytes: its bytes.
        digits: behind the point.
    """

    name: str
    nbytes: int
    digits: int

    @classmethod
    def of(cls, largest_bytes: int) -> Unit:
        """The unit of a table whose largest size this is."""
        name, nbytes = _unit_below(largest_bytes)
        return cls(name, nbytes, 0 if nbytes == 1 else 1 if largest_bytes >= 100 * nbytes else 2)

    def number(self, size_bytes: int) -> str:
        """A size without the unit; of one that would be shown as nothing, that it is less."""
        text, least = f"{size_bytes / self.nbytes:,.{self.digits}f}", 10**-self.digits
        is_shown = not size_bytes or abs(size_bytes) >= least * self.nbytes / 2
        return text if is_shown else f"<{least:.{self.digits}f}"

    def text(self, size_bytes: int) -> str:
        """A size with the unit."""
        return f"{self.number(size_bytes)} {self.name}"


def format_count(count: int, noun: str) -> str:
    """A number of things, for people: "1 tensor", "12 tensors". The noun's plural has an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
