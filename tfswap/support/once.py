"""Results that several objects share: each is computed by the first one that needs it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Once:
    """Results by their keys."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The result with this key, computed where there is none yet."""
        if key not in self._found:
            self._found[key] = compute()
        return self._found[key]


class Shared(NamedTuple):
    """Results that parts of a step share which compute alike (passes/alike_parts.py).

    Attributes:
        alike: those that hold for all parts with the same nodes, whatever the order in which they send and receive.
        same: those that hold for all parts that are the same but for their device.
    """

    alike: Once
    same: Once

    @classmethod
    def of_one(cls) -> Shared:
        """Of a step that is one part: nothing else shares it."""
        return cls(Once(), Once())
