"""The limit of one step in bytes, and the lowest limits that this process has reported."""

from __future__ import annotations

from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.request import Request
from tfswap.errors import InfeasibleMemoryLimit
from tfswap.planner.promise import promised
from tfswap.runtime import messages
from tfswap.runtime.trace import Trace
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.bfc_allocator import regions_of
from tfswap.support.sizes import is_share, parse_limit

_reported_floors: dict[str, int] = {}  # by fingerprint


def report_floor(fingerprint: str, floor_bytes: int) -> None:
    """Note that `floor_bytes` was reported as the smallest limit of a step."""
    _reported_floors[fingerprint] = min(_reported_floors.get(fingerprint, floor_bytes), floor_bytes)


def reported_floor(fingerprint: str) -> int:
    """The lowest floor of a step that this process has reported; 0 where it has reported none."""
    return _reported_floors.get(fingerprint, 0)


class StepLimit:
    """The limit of one step.

    Args:
        granted_bytes: the most that another trace of the function was granted.

    Attributes:
        bytes: None for no limit. A share is of this step's unoptimised peak at the first planning, and stays what it
            was. It comes to no less than what another trace was granted: a smaller last batch may take what the others
            may.
        is_final: whether a share has become bytes for good.
    """

    def __init__(self, trace: Trace, request: Request, granted_bytes: int):
        self._trace = trace
        self._request = request
        self._granted_bytes = granted_bytes
        self.bytes: int | None = None
        self.is_final = False

    def compute(self, optimizer: Optimizer, snapshot: ArenaSnapshot) -> None:
        """Compute the bytes: a share depends on the unoptimised peak."""
        limit = self._request.limit(self._trace.device.name)
        if limit is not None:
            asked = parse_limit(limit, lambda: optimizer.baseline.peak_bytes)
            if is_share(limit):
                asked = max(asked, self._granted_bytes)
            # More than the arena may have is no limit that can be kept.
            self.bytes = min(asked, snapshot.limit_bytes or asked)

    def has_room(self, peak_bytes: int, margin_bytes: int) -> bool:
        """Whether a step with this peak leaves the margin."""
        return self.bytes is None or peak_bytes + margin_bytes <= self.bytes

    def lacking_bytes(self, peak_bytes: int, margin_bytes: int) -> int:
        """By how much a plan with this peak passes the limit, with its margins."""
        return 0 if self.bytes is None else max(0, promised(peak_bytes) + margin_bytes - self.bytes)

    def allows_unchanged(self, optimizer: Optimizer, *, ordered: bool) -> bool:
        """Whether a step that has no plan may run as it was traced.

        Its limit is a share, of the whole of its unoptimised peak, which it was not seen to pass: ops of a rewritten
        step can take more than a tiny step has.
        """
        limit = self._request.limit(self._trace.device.name)
        is_whole = self.bytes is not None and self.bytes >= optimizer.baseline.peak_bytes
        return limit is not None and is_share(limit) and is_whole and not ordered

    def cover_unchanged(self, optimizer: Optimizer) -> None:
        """Take the highest likely peak for the whole of the unoptimised one: the step runs as it was traced, and its
        peak differs from run to run.
        """
        assert self.bytes is not None, "a step without a limit has a plan"
        self.bytes = max(self.bytes, optimizer.unoptimised.likely_bound_bytes)

    def refusal(
        self, error: InfeasibleMemoryLimit, optimizer: Optimizer, snapshot: ArenaSnapshot
    ) -> InfeasibleMemoryLimit:
        """`error`, with what else there is to know where the arena itself may have no more."""
        arena_bytes = snapshot.limit_bytes
        asked = self._request.limit(self._trace.device.name)
        assert asked is not None, "a plan for no limit is never refused"
        asked_bytes = parse_limit(asked, lambda: optimizer.baseline.peak_bytes)
        if not arena_bytes or max(error.floor_bytes, asked_bytes) <= arena_bytes:
            return error
        return InfeasibleMemoryLimit(
            messages.refused_by_the_arena(
                error, self._trace.device.name, arena_bytes, len(regions_of(snapshot.chunks))
            ),
            floor_bytes=error.floor_bytes,
            limit_bytes=asked_bytes,
        )
