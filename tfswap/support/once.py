"""Results that several objects share: each is computed by the first one that needs it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

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
