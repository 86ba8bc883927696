"""The replay of schedules in C++ (csrc/core/schedule_replay.h), where the core library is loaded.

It takes about a tenth of the time of `Replay`, which has the same results.

Not handled: arenas with a chunk at address 0, which no real arena has.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import weakref
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.flat_dataflow import FlatDataflow, Lists
from tfswap.native import bound
from tfswap.plan.schedule import AWAIT, EXACT, IN, LEAD, OUT, RELEASE, RERUN, RUN, SPLIT, Step
from tfswap.simulator.arena_snapshot import ArenaSnapshot, added_bytes
from tfswap.simulator.replay import BEGIN, FINISH, Repeats

KINDS = {
    kind: number for number, kind in enumerate((RUN, LEAD, RERUN, OUT, RELEASE, IN, AWAIT, SPLIT, EXACT, BEGIN, FINISH))
}
"""The numbers of kinds of steps: `StepKind` in C++."""
NO_LIMIT = -1
_WITHIN, _ABOVE = 1, 0


class CLists(ctypes.Structure):
    _fields_ = (("begins", ctypes.c_void_p), ("elements", ctypes.c_void_p))


_ARRAYS = tuple(field for field in dataclasses.fields(FlatDataflow) if field.name != "nodes")


class _CFlow(ctypes.Structure):
    """FlatDataflow in csrc/core/schedule_replay.h, field for field: counts, and the arrays of FlatDataflow."""

    _fields_ = (
        ("node_count", ctypes.c_int64),
        ("value_count", ctypes.c_int64),
        ("persistent_count", ctypes.c_int64),
        ("fetched_count", ctypes.c_int64),
        *((field.name, CLists if field.type == "Lists" else ctypes.c_void_p) for field in _ARRAYS),
    )


class Filled:
    """An arena in C++, or a ledger, with the contents before a step. Replays copy it.

    Attributes:
        addresses: of the persistent values; 0 where they are among the snapshot's chunks.
    """

    def __init__(self, core: ctypes.CDLL, snapshot: ArenaSnapshot, sizes: Sequence[int], live: bool):
        chunks = () if live else snapshot.chunks
        rows = array("q", [int(field) for chunk in chunks for field in chunk])
        known_bytes = snapshot.total_bytes if live and snapshot.chunks else 0
        asked = array("q", sizes)
        self.addresses = array("q", bytes(8 * len(sizes)))
        limit_bytes = NO_LIMIT if snapshot.limit_bytes is None else snapshot.limit_bytes
        self.pointer: int = core.tfswap_fill(
            live,
            known_bytes,
            _address(rows),
            len(chunks),
            limit_bytes,
            snapshot.collects,
            _address(asked),
            len(asked),
            snapshot.total_bytes,
            _address(self.addresses),
        )
        weakref.finalize(self, core.tfswap_free_filled, self.pointer).atexit = False


class CFacts(NamedTuple):
    """What replays in C++ read, valid as long as this is.

    Attributes:
        pins: the number of holders of each persistent value.
    """

    flow: _CFlow
    filled: Filled
    pins: array[int]


def c_facts(flow: Dataflow, snapshot: ArenaSnapshot, *, live: bool) -> CFacts:
    """The facts, and the contents before the step. Requires `is_available`."""
    return CFacts(_c_flow(flow.flat), _filled(snapshot, added_bytes(flow, snapshot), live), _pins(flow, snapshot))


def replay(
    flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot, *, live: bool, most_bytes: float, repeats: int
) -> Repeats | None:
    """As `repeated` in replay.py. Requires `is_available`."""
    core, (c_flow, filled, pins) = _core(), c_facts(flow, snapshot, live=live)
    kinds, subjects = encoded(steps)
    before, during = array("q", bytes(8 * len(steps))), array("q", bytes(8 * len(steps)))
    peak = (ctypes.c_int64 * 2)()
    found = core.tfswap_replay_steps(
        ctypes.byref(c_flow),
        filled.pointer,
        _address(filled.addresses),
        _address(pins),
        _address(kinds),
        _address(subjects),
        len(steps),
        NO_LIMIT if most_bytes == math.inf else int(most_bytes),
        repeats,
        _address(before),
        _address(during),
        peak,
    )
    if found == _ABOVE:
        return None
    if found != _WITHIN:
        raise ValueError("the schedule is not one of this step")
    return Repeats(peak[0], peak[1], before, during)


def lives(
    flow: Dataflow, steps: Sequence[Step], snapshot: ArenaSnapshot
) -> tuple[array[int], array[int], array[int], array[int], array[int], int]:
    """The fields of `lives.Lives`, of one run. Requires `is_available`."""
    core, filled = _core(), _filled(snapshot, added_bytes(flow, snapshot), live=True)
    kinds, subjects = encoded(steps)
    flat, pins = flow.flat, _pins(flow, snapshot)
    c_flow, begins = _c_flow(flat), flat.request_begins
    again = sum(begins[i + 1] - begins[i] for kind, i in steps if kind == RERUN)
    most = len(flat.persistent) + 2 + len(flat.request_kinds) + len(flat.update_old) + len(steps) + again
    nbytes, made, gone, made_before_gone = (array("q", bytes(8 * most)) for _ in range(4))
    during, peak = array("q", bytes(8 * len(steps))), (ctypes.c_int64 * 1)()
    count = core.tfswap_replay_lives(
        ctypes.byref(c_flow),
        filled.pointer,
        *map(_address, (filled.addresses, pins, kinds, subjects)),
        len(steps),
        *map(_address, (nbytes, made, gone, made_before_gone)),
        most,
        _address(during),
        peak,
    )
    if count < 0:
        raise ValueError("the schedule is not one of this step")
    return nbytes[:count], made[:count], gone[:count], made_before_gone[:count], during, peak[0]


def is_available(snapshot: ArenaSnapshot) -> bool:
    """Whether schedules can be replayed in C++ in an arena with this content."""
    return bound.core is not None and not (snapshot.chunks and snapshot.chunks[0][0] <= 0)


def addresses(flow: Dataflow, snapshot: ArenaSnapshot) -> list[int]:
    """Those of the persistent values, as of `arena_snapshot.fill`. Requires `is_available`."""
    return [address or -1 for address in _filled(snapshot, added_bytes(flow, snapshot), live=False).addresses]


@lru_cache(maxsize=8)
def _filled(snapshot: ArenaSnapshot, sizes: tuple[int, ...], live: bool) -> Filled:
    """Plans are judged by the dozen in one arena."""
    return Filled(_core(), snapshot, sizes, live)


def encoded(steps: Sequence[Step]) -> tuple[array[int], array[int]]:
    """The kinds and the subjects of steps."""
    return array("i", [KINDS[step[0]] for step in steps]), array("q", [step[1] for step in steps])


def _pins(flow: Dataflow, snapshot: ArenaSnapshot) -> array[int]:
    """The number of holders of each persistent value."""
    pins = array("i", [1]) * len(flow.persistent)
    shared = flow.first_versions(snapshot.shared) if snapshot.shared else ()
    for k, v in enumerate(flow.persistent if shared else ()):
        pins[k] += v in shared
    return pins


def _core() -> ctypes.CDLL:
    assert bound.core is not None, "is_available"
    return bound.core


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


def _c_flow(flat: FlatDataflow) -> _CFlow:
    """Valid as long as `flat` is."""

    def pointer(field: Any) -> Any:
        return CLists(*map(_address, field)) if isinstance(field, Lists) else _address(field)

    counts = (flat.nodes, len(flat.value_bytes), len(flat.persistent), len(flat.fetched))
    return _CFlow(*counts, *(pointer(getattr(flat, field.name)) for field in _ARRAYS))
