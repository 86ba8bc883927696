"""The requests of a group's kernels (concurrent.py), and the holders of the group's values.

A kernel's requests depend on which of its inputs it reads last, since it can write over these. Each case is computed at
its first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from tfswap.analysis.cost import cores_used, one_core_seconds
from tfswap.analysis.dataflow import Dataflow
from tfswap.kernels.alignment import round_up
from tfswap.kernels.hardware import Rates


class Request(NamedTuple):
    """One request of a kernel, or the release of a temporary.

    Attributes:
        kind: as in `Dataflow.requests`.
        subject: the value, or the number of the temporary.
        nbytes: rounded.
        over: the value that is written over; None where there is none.
    """

    kind: str
    subject: int
    nbytes: int
    over: int | None


class Requested(NamedTuple):
    """A kernel's requests.

    Attributes:
        most_bytes: the most bytes at one time.
        made_bytes: the bytes of its results, those written over an input included.
    """

    requests: list[Request]
    most_bytes: int
    made_bytes: int


class Work(NamedTuple):
    """The work of a kernel: its seconds on one core, and the number of cores that it can use."""

    one_core_s: float
    cores: float


class Group:
    """Kernels of a group.

    Args:
        members: the kernels, in an order that holds few bytes.

    Attributes:
        users: by value, the kernels of the group that read it.
        outside: values that others read.
        over: by kernel, the values that it can write over if it reads them last.
        before: by kernel, those of the group that it waits for.
        ended: by kernel, the values that it holds until it ends, each with whether it makes it.
    """

    def __init__(self, flow: Dataflow, members: Sequence[int]):
        self.flow, self.members = flow, members
        group = set(members)
        self.users: dict[int, set[int]] = {}
        self.outside = set(flow.fetched)
        for i, held in enumerate(flow.held):
            for v in held:
                if i in group:
                    self.users.setdefault(v, set()).add(i)
                else:
                    self.outside.add(v)
        self.over = {i: self._over(i) for i in members}
        self.before = {i: [d for d in flow.kernels_before(i) if d in group] for i in members}
        self.ended = {i: self._ended(i) for i in members}
        self._requested: dict[tuple[int, tuple[int, ...]], Requested] = {}
        self._works: dict[int, Work] = {}

    def works(self, cost_s: Sequence[float], rates: Rates) -> dict[int, Work]:
        """The work of each kernel. Computed once: all schedules of a group have the same costs."""
        if not self._works:
            nodes = self.flow.nodes
            self._works = {
                i: Work(one_core_seconds(nodes[i], cost_s[i], rates), cores_used(nodes[i], rates)) for i in self.members
            }
        return self._works

    def _over(self, i: int) -> tuple[int, ...]:
        outs = (candidates for kind, _, nbytes, candidates in self.flow.requests[i] if kind == "out" and nbytes)
        found = dict.fromkeys(v for candidates in outs for v in candidates)
        return tuple(v for v in found if v not in self.outside and self.position(i, v) is not None)

    def _ended(self, i: int) -> list[tuple[int, bool]]:
        made = {v for _, v in self.flow.makes[i]}
        return [(v, v in made) for v in {*self.flow.held[i], *made}]

    def position(self, i: int, v: int) -> int | None:
        """The input of a kernel that is a value; None where several are."""
        found = [p for p, t in enumerate(self.flow.nodes[i].inputs) if self.flow.value_of.get((t.node, t.index)) == v]
        return found[0] if len(found) == 1 else None

    @cached_property
    def nbytes(self) -> list[int]:
        """Rounded bytes per value."""
        return [round_up(value.nbytes) for value in self.flow.values]

    def requested(self, i: int, last: tuple[int, ...]) -> Requested:
        """A kernel's requests.

        Args:
            last: the values of `over` that it reads last.
        """
        found = self._requested.get((i, last))
        if found is None:
            found = self._requested[i, last] = self._requests(i, last)
        return found

    def _requests(self, i: int, last: tuple[int, ...]) -> Requested:
        requests: list[Request] = []
        free = list(last)
        now = most = made_bytes = 0
        temporaries: list[int] = []
        for kind, subject, nbytes, candidates in self.flow.requests[i]:
            if not nbytes and kind == "out":
                continue
            over = next((v for v in candidates if kind == "out" and v in free), None)
            if over is not None:
                free.remove(over)
            rounded = round_up(nbytes)
            requests.append(Request(kind, subject, rounded, over))
            if kind == "free":
                now -= temporaries[subject]
            else:
                now += rounded if over is None else 0
                most = max(most, now)
            if kind == "temp":
                temporaries.append(rounded)
            elif kind == "out":
                made_bytes += rounded
        return Requested(requests, most, made_bytes)
