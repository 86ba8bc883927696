"""Watches whether a planned step keeps its limit: in the arena that it finds, and once it has run.

Before each step the arena's layout is read, and in a new layout the plan's requests are replayed. After the step the
allocator's peak is read. A peak above the limit is reported with its cause, as far as it is known.

Not handled: what other steps, eager code or pipelines allocate while the step runs. That is noticed afterwards, and the
next plan leaves room for it.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from tfswap.analysis.variables import fetched_bytes
from tfswap.compiler.request import Request
from tfswap.device.memory_owners import MemoryOwners
from tfswap.errors import InfeasibleMemoryLimit, TfswapError
from tfswap.plan.plan import Plan
from tfswap.planner.promise import promised
from tfswap.report.report import Report
from tfswap.runtime import messages, turn
from tfswap.runtime.arena_view import ArenaView
from tfswap.runtime.function_maker import FunctionMaker
from tfswap.runtime.limit import StepLimit
from tfswap.runtime.margins import Margins
from tfswap.runtime.requests_replay import RequestsReplay
from tfswap.runtime.trace import Trace
from tfswap.simulator.arena_snapshot import ArenaSnapshot

if TYPE_CHECKING:
    from tfswap.compiler.compiler import Optimizer
    from tfswap.native.load import CArenaReading
    from tfswap.runtime.planning_loop import Planned

log = logging.getLogger("tfswap")

MAX_LAYOUTS = 1024
"""The most layouts of the arena that are remembered. A program that keeps more tensors at each step never repeats
one.
"""


class ArenaWatch:
    """Watches one step.

    Args:
        on_exceeded: "warn" or "raise".

    Attributes:
        report: the latest plan's report, with the measured peak.
        live: whether the plan was made for the arena as it is.
        resident_bytes: the arena's bytes in use at the latest planning.
    """

    report: Report
    _optimizer: Optimizer
    _plan: Plan

    def __init__(
        self,
        trace: Trace,
        request: Request,
        limit: StepLimit,
        margins: Margins,
        arena: ArenaView,
        maker: FunctionMaker,
        on_exceeded: str,
    ):
        self._trace = trace
        self._request = request
        self._limit = limit
        self._margins = margins
        self._arena = arena
        self._maker = maker
        self._on_exceeded = on_exceeded
        self._owners = MemoryOwners()
        self.live = False
        self.resident_bytes = 0
        self._gate: int | None = None
        # By shared variables; empty for a plan that changes nothing.
        self._requests: dict[frozenset[str], RequestsReplay] = {}
        # By the arena's layout and shared variables: the plan's peak, where it fits.
        self._peaks: dict[tuple[int, frozenset[str]], int] = {}
        self._expected_bytes = 0  # the latest step's peak
        self._seen_bytes = 0  # the arena's peak after the latest step
        self._measured_bytes = 0  # the peak that broke the limit, until the next planning
        self._unsatisfiable_bytes: int | None = None  # bytes in use in the arena with which no plan fitted
        self._unplannable_bytes = 0  # a peak was once so far above the planned one, and no plan has room for that

    # --- plans --------------------------------------------------------------------------------------------

    def renew(self, planned: Planned, report: Report) -> None:
        """Watch another plan from now on."""
        self._optimizer = planned.optimizer
        self.report = report
        self.live, self.resident_bytes = planned.live, planned.snapshot.total_bytes
        self._plan, self._gate = planned.plan, planned.gate
        requests = planned.requests
        self._requests = {} if requests is None else {self._arena.shared: RequestsReplay(requests)}
        self._peaks, self._expected_bytes = {}, planned.peak_bytes

    def remember_arena(self) -> None:
        """Note that the plan fits the arena as it is."""
        if layout := self._arena.read_before().layout:
            self._peaks[layout, self._arena.shared] = self._expected_bytes
            self._owners.remember(layout, self._arena.snapshot())

    def forget_excess(self) -> None:
        """Forget what exceeded a limit that is no longer the step's."""
        self._measured_bytes = self._unplannable_bytes = 0
        self._unsatisfiable_bytes = None

    def drop_requests(self) -> None:
        """Note that the plan is no longer carried out."""
        self._requests = {}

    def cause_of_lack(self) -> str:
        """Why the device has too little memory for the step; "" where that is not known."""
        chunks = self._arena.snapshot().chunks
        arena_bytes = sum(size for _, size, _ in chunks)
        if not chunks or arena_bytes >= self._expected_bytes:
            return ""
        limit_bytes = self._limit.bytes or arena_bytes
        return messages.device_is_full(self._trace.name, arena_bytes, self._expected_bytes, limit_bytes)

    @property
    def keeps_limit(self) -> bool:
        """Whether the plan keeps the limit in the arena that it was made for, with the margin of its making."""
        margin = min(self._optimizer.extra_margin_bytes, self._margins.others_bytes)
        return self._limit.has_room(promised(self._expected_bytes), margin)

    def margins_to_try(self) -> list[int]:
        """Margins for others with which to plan again, the largest first, since the present plan does not fit.

        They leave room for what others allocated during an earlier step.
        """
        margins = [self._margins.others_bytes]
        if not self._measured_bytes:
            self._note_layout_change()
        elif self._requests:
            # The arena's present contents are in the snapshot: room is left for the rest.
            known = max(self._expected_bytes, self._peak_in(self._arena.snapshot(instantiated=True)))
            if self._measured_bytes - known > margins[0]:
                margins.insert(0, self._measured_bytes - known)
        self._measured_bytes = 0
        return margins

    def note_planned_again(self, unplannable_bytes: int) -> None:
        """Note that there is a plan for the arena.

        Args:
            unplannable_bytes: bytes that others allocated once, and that no plan has room for.
        """
        self._unplannable_bytes = unplannable_bytes
        self._unsatisfiable_bytes = None

    def note_unsatisfiable(self, refusal: InfeasibleMemoryLimit) -> None:
        """Note that no plan fits the arena, and report it. Raises `refusal` where `on_exceeded` is "raise"."""
        self._unsatisfiable_bytes = self.resident_bytes
        if self._on_exceeded == "raise":
            raise refusal
        copied_bytes = self._arena.copied_bytes(self._optimizer)
        log.warning("tfswap: %s", messages.not_kept(self._trace.name, refusal, copied_bytes))

    def _note_layout_change(self) -> None:
        limit_bytes = self._limit.bytes
        if self.live and self._requests and limit_bytes is not None and self._margins.layout_changes():
            peak = self._peak_in(self._arena.snapshot(instantiated=True))
            lacking = self._limit.lacking_bytes(peak, self._margins.others_bytes)
            self._margins.add_for_layouts(lacking, limit_bytes)

    # --- before a step ------------------------------------------------------------------------------------

    def fits(self, now: CArenaReading) -> bool:
        """Whether the step stays within its limit in the arena as it is now, as far as is known."""
        if self._trace.has_unseen_part:
            self._notice_unseen_part(now)
        shared = self._arena.shared
        found = (now.layout or -now.current_bytes, shared)  # for an allocator without a layout, by its bytes
        if found in self._peaks and not self._measured_bytes:
            self._expected_bytes = self._peaks[found]
            return True
        limit_bytes = self._limit.bytes
        if self._request.plan is not None or limit_bytes is None:
            return True
        if self._unsatisfiable_bytes is not None and now.current_bytes >= self._unsatisfiable_bytes:
            if self._requests:
                self._expected_bytes = self._peak_in(self._arena.snapshot(instantiated=True))
            return True
        if not self.live or self._measured_bytes:
            return False
        if self._gate is None or not self._requests:  # a plan that changes nothing
            grown = now.current_bytes - self.resident_bytes + self._arena.copied_bytes(self._optimizer)
            return not self._optimizer.unoptimised.may_pass(limit_bytes - grown)
        if found not in self._peaks:
            snapshot = self._arena.snapshot(instantiated=True)
            self._owners.remember(found[0], snapshot)
            peak = self._peak_in(snapshot)
            if not self._limit.has_room(peak, self._margins.others_bytes):
                return False
            if len(self._peaks) >= MAX_LAYOUTS:
                self._peaks.clear()
            self._peaks[found] = peak
        self._expected_bytes = self._peaks[found]
        return True

    def _peak_in(self, snapshot: ArenaSnapshot) -> int:
        """The plan's peak in this arena, which has its constants."""
        if snapshot.shared not in self._requests:
            if len(self._requests) >= MAX_LAYOUTS:
                self._requests.clear()
            requests = self._optimizer.form_of(self._plan).requests(snapshot)
            self._requests[snapshot.shared] = RequestsReplay(requests)
        return self._requests[snapshot.shared].peak_bytes(snapshot)

    def _notice_unseen_part(self, now: CArenaReading) -> None:
        """Notice the peak of TensorFlow's own backward pass, which can be read only when the step is called again."""
        limit_bytes = self._limit.bytes
        left_alone = self.live and self._gate is None and not self._measured_bytes
        if left_alone and limit_bytes is not None and now.peak_bytes > limit_bytes >= self._seen_bytes > 0:
            self._exceeded(now.peak_bytes, limit_bytes, "", alone=True, known=False)

    # --- after a step -------------------------------------------------------------------------------------

    def notice(self, before: CArenaReading, ticket: int, result: Any) -> None:
        """Check whether the step that has just returned `result` passed the limit.

        Args:
            before: the arena before the step.
            ticket: as `turn.begin` gives it.
        """
        after = self._trace.device.read_arena(before=False)
        self._seen_bytes = after.peak_bytes
        self._maker.audit_new(after)
        if after.peak_bytes <= before.peak_bytes:
            return
        planned = self._expected_bytes or self.report.planned_peak_bytes
        self.report = dataclasses.replace(self.report, planned_peak_bytes=planned, measured_peak_bytes=after.peak_bytes)
        limit = self._plan.limit_bytes or self._plan.planned_peak_bytes
        known = self._unsatisfiable_bytes is not None and after.peak_bytes <= promised(planned)
        known |= after.peak_bytes <= planned + self._unplannable_bytes
        if after.peak_bytes > limit and not (known and self._on_exceeded != "raise"):
            others = self._allocated_by_others(before, after, result)
            self._exceeded(after.peak_bytes, limit, others, alone=turn.alone(ticket), known=known)

    def _allocated_by_others(self, before: CArenaReading, after: CArenaReading, result: Any) -> str:
        """The message on bytes that others allocated during the step; "" where there are none."""
        own = fetched_bytes(self._optimizer.flow) + self._arena.copied_bytes(self._optimizer)
        nbytes = after.current_bytes - before.current_bytes - own
        if nbytes <= promised(0):
            return ""
        return messages.allocated_by_others(
            nbytes, self._owners.largest_of_others(before.layout, self._arena.snapshot(), result)
        )

    def _exceeded(self, peak_bytes: int, limit_bytes: int, others: str, *, alone: bool, known: bool) -> None:
        """Report that the limit was passed, with the cause as far as it is known.

        Args:
            others: as of `_allocated_by_others`.
            alone: whether no other optimized function ran at the same time.
            known: whether it is known that no plan has room for it.
        """
        again = alone and self._request.plan is None and not known
        if again:
            self._measured_bytes = peak_bytes
        cause = (others or self._possible_cause()) if alone else messages.CONCURRENT_STEPS
        self.complain(messages.exceeded(self._trace.name, peak_bytes, limit_bytes, cause, again=again))

    def _possible_cause(self) -> str:
        """Possible causes of memory use that left no trace."""
        tightest = next(iter(self.report.convolutions), None) if self._trace.device.model.uses_cudnn else None
        return messages.what_may_have_taken_it(tightest, self.report.unmodelled)

    def complain(self, message: str) -> None:
        """Raise or log, as `on_exceeded` says."""
        if self._on_exceeded == "raise":
            raise TfswapError(f"tfswap: {message}")
        log.warning("tfswap: %s", message)
