"""Deterministic draws: the same in C++ (csrc/core/draws.h) and in Python."""

from __future__ import annotations

from collections.abc import Sequence

_MASK = (1 << 64) - 1
_UNIT_BITS = 53


class Draws:
    """Random numbers: splitmix64 (Steele et al. 2014).

    `random`, `randrange` and `sample` are as those of `random.Random`.
    """

    def __init__(self, seed: int = 1):
        self._state = seed

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

    def random(self) -> float:
        """A number from 0 to below 1."""
        return (self.bits() >> (64 - _UNIT_BITS)) * 2.0**-_UNIT_BITS

    def randrange(self, count: int) -> int:
        """As `below`."""
        return self.below(count)

    def sample(self, population: Sequence[int], k: int) -> list[int]:
        """The first `k` of a random order (Fisher and Yates)."""
        found = list(population)
        for last in range(len(found) - 1, 0, -1):
            other = self.below(last + 1)
            found[last], found[other] = found[other], found[last]
        return found[:k]
