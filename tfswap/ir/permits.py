"""The tactics that a user allows for a tensor."""

from __future__ import annotations

from typing import NamedTuple

TACTICS = ("swap", "recompute", "encode")
STATE = "state"
"""The tactic that keeps variables at home on the host. It is for variables, and the others are for tensors."""


class Permit(NamedTuple):
    """The tactics allowed for one tensor.

    A variable whose handle has one stays on the device.

    Attributes:
        tactics: a subset of TACTICS.
        why: the reason against the others, for reports.
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
"""The permit of a tensor without restrictions."""
