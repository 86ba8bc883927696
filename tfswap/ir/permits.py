"""The tactics that a user allows."""

from __future__ import annotations

from typing import NamedTuple

TENSOR_TACTICS = ("swap", "recompute", "encode")
"""The tactics for tensors."""
STATE = "state"
"""The tactic for variables: it keeps them at home on the host."""
TACTICS = (*TENSOR_TACTICS, STATE)
"""All tactics for tensors and variables, which is the default."""
SLICE = "slice"
"""The opt-in tactic for kernels: it runs them in slices of rows."""
FUSE = "fuse"
"""The opt-in tactic for chains of kernels: XLA compiles them into blocks. Only with close values."""
KNOWN_TACTICS = (*TACTICS, SLICE, FUSE)
"""All tactics."""
BITS, CLOSE = VALUES = "bits", "close"
"""What values a planned step has: the same bits as the traced one, or others where sums are added in another order."""


class Permit(NamedTuple):
    """The tactics allowed for one tensor.

    A variable whose handle has one stays on the device.

    Attributes:
        tactics: a subset of TENSOR_TACTICS.
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


ANYTHING = Permit(frozenset(TENSOR_TACTICS), "")
"""The permit of a tensor without restrictions."""
