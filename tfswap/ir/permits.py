"""What a user allows to be done to a tensor."""

from __future__ import annotations

from typing import NamedTuple

TACTICS = ("swap", "recompute", "encode")


class Permit(NamedTuple):
    """What may be done to one tensor.

    Attributes:
        tactics: of TACTICS, those that may be used on it.
        why: the reason that a report gives for those that may not.
    """

    tactics: frozenset[str]
    why: str

    def allows(self, tactic: str) -> bool:
        return tactic in self.tactics

    def __and__(self, other: Permit) -> Permit:
        """What both allow."""
        if self.tactics <= other.tactics:
            return self
        if other.tactics <= self.tactics:
            return other
        return Permit(self.tactics & other.tactics, f"{self.why}; {other.why}")


ANYTHING = Permit(frozenset(TACTICS), "")
"""Of a tensor of which nobody said anything."""
