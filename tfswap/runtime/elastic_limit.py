"""Calls of functions whose limit is in a file (`support/limit_file.py`): each takes the limit that the file has then.

Under a budget the limit is this process's share. A call that finds a smaller share plans for it, and the difference is
given up once such a call has run, no other call with more is left, and the arena holds less. A call that finds a larger
one that is not free yet runs under the present limit. Only a process that has nothing, or less than its floor, waits.

Invariant: the limits of all calls in progress, and the arena's bytes in use afterwards, are within what is granted.

Not handled: bytes that a process allocates before its first call, such as its variables. They are in its peak from then
on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from tfswap.device import arena
from tfswap.errors import InfeasibleMemoryLimit
from tfswap.support.limit_file import Budget, LimitFile
from tfswap.support.shared_budget import Share
from tfswap.support.sizes import Limit, format_bytes

log = logging.getLogger("tfswap")

R = TypeVar("R")

WAIT_S = 300.0
"""A process without a share waits this long for the others to give it up, which they do between two of their steps."""
POLL_S = 0.01
ATTEMPTS = 8
"""Floors differ a little from one planning to the next, so that a floor may be refused once or twice."""


class Follower(Protocol):
    """What changes its limit before a call."""

    def follow(self, limit: Limit) -> None:
        """Take this limit, unless it is the present one."""
        ...

    @property
    def reported_floor_bytes(self) -> int:
        """The floor of the latest step; 0 where it is not known."""
        ...


def call(file: LimitFile, follower: Follower, run: Callable[[], R]) -> R:
    """Run under the file's limit. Raises InfeasibleMemoryLimit, before anything runs, where it can't be kept."""
    limit = file.read()
    if isinstance(limit, Budget):
        return _shared(file).call(follower, run)
    follower.follow(limit)
    return run()


_budgets: dict[LimitFile, _SharedCalls] = {}
_lock = threading.Lock()


def _shared(file: LimitFile) -> _SharedCalls:
    if (found := _budgets.get(file)) is None:
        with _lock:
            found = _budgets.setdefault(file, _SharedCalls(file))
    return found


class _SharedCalls:
    """The calls of this process under one budget."""

    def __init__(self, file: LimitFile):
        self._file = file
        self._lock = threading.Lock()  # of the leases and what follows
        self._running: Counter[int] = Counter()  # by limit
        self._floor_bytes = 0
        self._kept_bytes = 0  # the limit of the latest call that ran
        self._reported = False

    def call(self, follower: Follower, run: Callable[[], R]) -> R:
        floor_before, refused = self._floor_bytes, set[int]()
        while True:
            limit = self._begin(floor_before)
            with self._counted(limit):
                try:
                    follower.follow(limit)
                    result = run()
                except InfeasibleMemoryLimit as error:
                    if limit in refused or len(refused) == ATTEMPTS:
                        self._floor_bytes = floor_before  # other functions need no more
                        raise
                    refused.add(limit)
                    self._floor_bytes = max(self._floor_bytes, error.floor_bytes, limit + 1)
                    continue
            self._end(follower.reported_floor_bytes, limit)
            return result

    @contextlib.contextmanager
    def _counted(self, limit: int) -> Iterator[None]:
        try:
            yield
        finally:
            with self._lock:
                self._running[limit] -= 1
                self._running += Counter()  # without zeros

    def _begin(self, floor_before: int) -> int:
        """The limit of a call that begins. Waits where this process has less than its floor.

        Args:
            floor_before: the floor without this call.

        Raises InfeasibleMemoryLimit where the floor of a process without a share does not fit.
        """
        ends = None
        while True:
            late = ends is not None and time.monotonic() >= ends
            with self._lock:
                share = self._update(take=late)
                try:
                    limit = self._limit_in(share, late=late)
                except InfeasibleMemoryLimit:
                    self._floor_bytes = floor_before
                    if not self._kept_bytes and not self._running:
                        self._file.leases.withdraw()
                    raise
                if limit is not None:
                    self._running[limit] += 1
                    return limit
            if ends is None:
                ends = time.monotonic() + WAIT_S
                log.info("tfswap: %s: waiting for a share of the budget", self._file.path)
            time.sleep(POLL_S)

    def _limit_in(self, share: Share | None, *, late: bool) -> int | None:
        """The limit of a call; None where it has to wait."""
        granted, floor = self._file.leases.granted_bytes, self._floor_bytes
        if share is None:  # the leases change: keep the present limit
            return self._kept_bytes or None
        if share.target_bytes is None:
            if self._kept_bytes:
                if not self._reported:
                    self._reported = True
                    log.warning(
                        "tfswap: %s: this process needs at least %s of the budget, and %s is free for it: "
                        "its limit stays",
                        self._file.path,
                        format_bytes(floor),
                        format_bytes(max(0, share.free_bytes)),
                    )
                return self._kept_bytes
            raise self._refusal(share.free_bytes)
        self._reported = False
        limit = min(share.target_bytes, granted)
        if limit and limit >= floor:
            return limit
        if late:
            raise self._refusal(granted, f", and the others have given up no more in {WAIT_S:.0f} s")
        return None

    def _refusal(self, free_bytes: int, why: str = "") -> InfeasibleMemoryLimit:
        floor = self._floor_bytes
        return InfeasibleMemoryLimit(
            f"the budget in {self._file.path} has {format_bytes(max(0, free_bytes))} ({free_bytes} bytes) free for "
            f"this process{why}. Its step needs at least {format_bytes(floor)} ({floor} bytes): raise the budget, "
            "or end a process that shares it",
            floor_bytes=floor,
            limit_bytes=free_bytes,
        )

    def _end(self, floor_bytes: int, limit: int) -> None:
        """Note a call that ran, and give up what is not used any longer."""
        with self._lock:
            self._kept_bytes = limit
            self._floor_bytes = max(self._floor_bytes, floor_bytes)
            if limit < self._file.leases.granted_bytes:
                self._update(release_to=max(_in_use_bytes(), limit, *self._running))

    def _update(self, *, release_to: int | None = None, take: bool = False) -> Share | None:
        budget = self._file.limit
        if not isinstance(budget, Budget):  # another thread has read another form since
            return None
        return self._file.leases.update(
            budget.total_bytes, floor_bytes=self._floor_bytes, release_to=release_to, take=take
        )


def _in_use_bytes() -> int:
    """The bytes in use in the arena that has most in use."""
    import tensorflow as tf

    names = [device.name.removeprefix("/device:") for device in tf.config.list_logical_devices()]
    return max((info.current_bytes for name in names if (info := arena.memory_info(name)) is not None), default=0)
