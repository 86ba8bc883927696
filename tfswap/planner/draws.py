"""Deterministic draws: the same in C++ and in Python."""

from __future__ import annotations

_MASK = (1 << 64) - 1


class Draws:
    """Random numbers: splitmix64 (Steele et al. 2014)."""

    def __init__(self):
        self._state = 1

    def bits(self) -> int:
        """64 bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def below(self, count: int) -> int:
        """A number below a count."""
        return self.bits() % count
