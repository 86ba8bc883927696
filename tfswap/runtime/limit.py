"""The limit of one step in bytes, and the floors that this process has reported."""

from __future__ import annotations

import dataclasses

from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.request import Request
from tfswap.compiler.slowdown import bytes_for, smallest_limit
from tfswap.device.budgets import within_budget
from tfswap.errors import InfeasibleMemoryLimit
from tfswap.planner.promise import promised
from tfswap.runtime import messages
from tfswap.runtime.trace import Trace
from tfswap.simulator.arena_snapshot import ArenaSnapshot
from tfswap.simulator.bfc_allocator import regions_of
from tfswap.support.sizes import Limit, is_share, parse_limit

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
        granted_bytes: the highest limit of another trace of the function.

    Attributes:
        bytes: None for no limit. A share is of this step's unoptimised peak at the first planning, and then stays the
            same. It is no less than another trace's limit: a smaller last batch may use as much as the others.
        is_final: whether the bytes no longer change.
    """

    def __init__(self, trace: Trace, request: Request, granted_bytes: int):
        self._trace = trace
        self._request = request
        self._granted_bytes = granted_bytes
        self.bytes: int | None = None
        self._most_bytes: int | None = None  # the requested limit, whatever the slowdown that is allowed
        self._smallest_bytes: int | None = None  # of `smallest_limit`, once it is settled
        self.is_final = False

    def change(self, limit: Limit) -> None:
        """Take another limit, whose bytes are not known yet."""
        self._request = dataclasses.replace(self._request, memory_limit=limit)
        self._granted_bytes = 0
        self.bytes = self._most_bytes = self._smallest_bytes = None
        self.is_final = False

    def compute(self, optimizer: Optimizer, snapshot: ArenaSnapshot) -> None:
        """Compute the bytes: a share depends on the unoptimised peak."""
        limit = self._request.limit(self._trace.device.name)
        is_empty = not list(optimizer.graph)  # nothing of the step is on the device, and all plans are the same
        if limit is not None and not is_empty:
            requested = parse_limit(limit, lambda: optimizer.baseline.peak_bytes)
            if is_share(limit):
                requested = max(requested, self._granted_bytes)
            requested = within_budget(self._trace.device.name, requested)
            # No step can use more than the arena's own limit.
            self.bytes = self._most_bytes = min(requested, snapshot.limit_bytes or requested)

    def settle(self, optimizer: Optimizer, lacking_bytes: int) -> None:
        """Lower the limit to the smallest one for the slowdown that is allowed, until it is final.

        Args:
            lacking_bytes: by how much a plan under such a limit exceeded it in the arena, with its constants there.

        Raises InfeasibleMemoryLimit where the limit allows no plan that is as fast.
        """
        slowdown = self._request.max_slowdown
        if slowdown is None or self.is_final:
            return
        smallest = self._smallest_bytes
        if smallest is None or bytes_for(optimizer, slowdown, smallest + lacking_bytes) is None:
            smallest = self._smallest_bytes = smallest_limit(optimizer, slowdown, self._most_bytes)
        if smallest is not None:
            wanted = max(smallest + lacking_bytes, self._granted_bytes)
            self.bytes = wanted if self._most_bytes is None else min(wanted, self._most_bytes)

    def has_room(self, peak_bytes: int, margin_bytes: int) -> bool:
        """Whether a step with this peak leaves the margin."""
        return self.bytes is None or peak_bytes + margin_bytes <= self.bytes

    def lacking_bytes(self, peak_bytes: int, margin_bytes: int) -> int:
        """The bytes by which a plan's peak and margins exceed the limit; 0 where they do not."""
        return 0 if self.bytes is None else max(0, promised(peak_bytes) + margin_bytes - self.bytes)

    def allows_unchanged(self, optimizer: Optimizer, *, ordered: bool) -> bool:
        """Whether a step without a plan may run as it was traced.

        It may where the limit is a share, and no less than the unoptimised peak. The ops added to a rewritten step can
        need more memory than a tiny step does.
        """
        limit = self._request.limit(self._trace.device.name)
        if ordered or self.bytes is None or limit is None or not is_share(limit):
            return False  # without a prediction, which takes long
        return self.bytes >= optimizer.baseline.peak_bytes

    def cover_unchanged(self, optimizer: Optimizer) -> None:
        """Raise the limit to the highest likely unoptimised peak: the step runs as it was traced, and its peak differs
        from run to run.
        """
        assert self.bytes is not None, "a step without a limit has a plan"
        self.bytes = max(self.bytes, optimizer.unoptimised.likely_bound_bytes)

    def refusal(
        self, error: InfeasibleMemoryLimit, optimizer: Optimizer, snapshot: ArenaSnapshot
    ) -> InfeasibleMemoryLimit:
        """`error`, with the arena's own limit where that is the lower one."""
        arena_bytes = snapshot.limit_bytes
        requested = self._request.limit(self._trace.device.name)
        assert requested is not None, "a plan for no limit is never refused"
        requested_bytes = parse_limit(requested, lambda: optimizer.baseline.peak_bytes)
        if not arena_bytes or max(error.floor_bytes, requested_bytes) <= arena_bytes:
            return error
        return InfeasibleMemoryLimit(
            messages.refused_by_the_arena(
                error, self._trace.device.name, arena_bytes, len(regions_of(snapshot.chunks))
            ),
            floor_bytes=error.floor_bytes,
            limit_bytes=requested_bytes,
        )
