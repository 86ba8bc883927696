"""Leases of a budget that processes share.

A process holds a lease: a record in a file that all of them open, with the bytes granted to it and its floor. It locks
its record as long as it lives. The locks are the kernel's record locks (fcntl): they belong to a process, end with it
however it ends, and are not inherited by a fork. Records change under one more lock, for microseconds.

Invariant: the granted bytes of all processes together never exceed the budget. A process gets more only where it is
free, and gives bytes up only after it has ceased to use them. (A budget that becomes smaller holds as soon as every
process has given up its part.)

Each process computes everyone's share in the same way from the floors: equal shares, at least the floor of each.

Not handled: file systems without record locks; several users.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tfswap.errors import TfswapError

RECORD_BYTES = 64
MOST_PROCESSES = 1024
_CHANGES = RECORD_BYTES * MOST_PROCESSES
"""The byte, after all records, whose lock is held while records change."""

_RECORD = re.compile(rb"(\d{1,19}) (\d{1,19}) *\n")


@dataclass(frozen=True)
class Lease:
    """What one process has.

    Attributes:
        granted_bytes: it may use these now.
        floor_bytes: it can't do with less; 0 while that is not known.
    """

    granted_bytes: int
    floor_bytes: int


@dataclass(frozen=True)
class Share:
    """A process's share of the budget.

    Attributes:
        target_bytes: what it is to have; None where the floors of all exceed the budget.
        granted_bytes: what it has.
        free_bytes: the most that it could have: the budget without the others' floors.
    """

    target_bytes: int | None
    granted_bytes: int
    free_bytes: int


def shares(budget_bytes: int, floors: Sequence[int]) -> list[int] | None:
    """Equal shares of a budget, at least the floor of each; None where the floors exceed it."""
    if sum(floors) > budget_bytes:
        return None
    left, above = budget_bytes, set[int]()
    while True:
        equal = left // max(1, len(floors) - len(above))
        more = {number for number, floor in enumerate(floors) if number not in above and floor > equal}
        if not more:
            return [floor if number in above else equal for number, floor in enumerate(floors)]
        above |= more
        left = budget_bytes - sum(floors[number] for number in above)


class Leases:
    """The leases of a budget, with that of this process. Not for several threads at the same time.

    Args:
        open_file: opens their file.
    """

    def __init__(self, open_file: Callable[[], int]):
        self._open_file = open_file
        self._process = 0
        self._descriptor = -1  # never closed: closing any descriptor of a file ends the process's locks on it
        self._slot: int | None = None
        self.granted_bytes = 0

    def update(self, budget_bytes: int, *, floor_bytes: int, release_to: int | None, take: bool) -> Share | None:
        """Take this process's share, as far as it is free.

        Args:
            release_to: give up what it has above this, and above its share; None to give up nothing.
            take: take what is free where that is less than its share.

        Returns:
            None where another process changes its lease at this moment, or a record is damaged, which its process
            writes anew at its next call.
        """
        with self._changing() as changing:
            others = self._others() if changing else None
            if others is None:
                return None
            if self._slot is None:
                self._slot = self._new_slot()
            computed = shares(budget_bytes, [floor_bytes, *(lease.floor_bytes for lease in others)])
            target = None if computed is None else computed[0]
            granted = self.granted_bytes
            free = budget_bytes - sum(lease.granted_bytes for lease in others)
            if target is not None and target > granted and (target <= free or take):
                granted = max(granted, min(target, free))
            elif target is not None and release_to is not None:
                granted = min(granted, max(target, release_to))
            record = f"{granted} {floor_bytes}".encode().ljust(RECORD_BYTES - 1) + b"\n"
            os.pwrite(self._descriptor, record, self._slot * RECORD_BYTES)
            self.granted_bytes = granted
            return Share(target, granted, budget_bytes - sum(lease.floor_bytes for lease in others))

    def withdraw(self) -> None:
        """Give up the lease."""
        if self._slot is not None and self._process == os.getpid():
            os.pwrite(self._descriptor, bytes(RECORD_BYTES), self._slot * RECORD_BYTES)
            self._unlock(self._slot * RECORD_BYTES)
        self._slot, self.granted_bytes = None, 0

    @contextlib.contextmanager
    def _changing(self) -> Iterator[bool]:
        if self._process != os.getpid():  # a forked child has no lease
            self._process, self._descriptor = os.getpid(), self._open_file()
            self._slot, self.granted_bytes = None, 0
        locked = self._lock(_CHANGES)
        try:
            yield locked
        finally:
            if locked:
                self._unlock(_CHANGES)

    def _others(self) -> list[Lease] | None:
        """The leases of others that live; None where one is damaged. Those of processes that have ended are cleared."""
        content = os.pread(self._descriptor, _CHANGES, 0)
        found = []
        for start in range(0, len(content), RECORD_BYTES):
            record = content[start : start + RECORD_BYTES]
            if self._slot is not None and start == self._slot * RECORD_BYTES:
                continue
            if self._lock(start):  # its process has ended
                if record.strip(b"\0"):
                    os.pwrite(self._descriptor, bytes(RECORD_BYTES), start)
                self._unlock(start)
            elif (match := _RECORD.fullmatch(record)) is not None:
                found.append(Lease(int(match[1]), int(match[2])))
            elif record.strip(b"\0"):  # zeros: its process gives it up
                return None
        return found

    def _new_slot(self) -> int:
        for slot in range(MOST_PROCESSES):
            if self._lock(slot * RECORD_BYTES):
                return slot
        raise TfswapError(f"over {MOST_PROCESSES} processes share a budget")

    def _lock(self, start: int) -> bool:
        """Lock a byte; returns whether no other process has it."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, start)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock(self, start: int) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, start)
