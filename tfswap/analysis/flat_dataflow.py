"""The facts of a step in flat arrays, for the replay in C++ (csrc/core/schedule_replay.h).

A list of lists is an array of elements and an array of begins: list i has the elements from begins[i] to begins[i + 1].
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tfswap.analysis.dataflow import Dataflow

KINDS = ("out", "temp", "free", "release", "split", "part", "rest")
"""The kinds of requests, by their numbers."""
NONE = -1


class Lists(NamedTuple):
    """A list of lists of numbers."""

    begins: array[int]
    elements: array[int]


@dataclass(frozen=True)
class FlatDataflow:
    """`Dataflow`'s fields with these names, as arrays, in the order of the structure in C++.

    Attributes:
        value_bytes: per value.
        fetched: in ascending order.
        update_begins: per node, the begin of its updates.
        update_reads: per update, how often the kernel reads the old version.
        update_variable: per update, the position in `persistent` of the variable's first version.
        request_begins: per node, the begin of its requests.
        candidates: per request.
    """

    nodes: int
    value_bytes: array[int]
    persistent: array[int]
    fetched: array[int]
    reads: Lists
    consumes: Lists
    makes: Lists
    update_begins: array[int]
    update_old: array[int]
    update_new: array[int]
    update_adopted: array[int]
    update_copies: array[int]
    update_reads: array[int]
    update_variable: array[int]
    request_begins: array[int]
    request_kinds: array[int]
    request_subjects: array[int]
    request_bytes: array[int]
    candidates: Lists


def flatten(flow: Dataflow) -> FlatDataflow:
    """The facts as arrays."""
    nodes = len(flow.reads)
    updates = [(update, i) for i, its in enumerate(flow.updates) for update in its]
    requests = [request for its in flow.requests for request in its]
    kinds = {kind: number for number, kind in enumerate(KINDS)}
    return FlatDataflow(
        nodes=nodes,
        value_bytes=array("q", [value.nbytes for value in flow.values]),
        persistent=_ints(flow.persistent),
        fetched=_ints(sorted(flow.fetched)),
        reads=lists_of(flow.reads),
        consumes=lists_of([flow.consumes.get(i, ()) for i in range(nodes)]),
        makes=lists_of([[v for _, v in its] for its in flow.makes]),
        update_begins=_begins(flow.updates),
        update_old=_ints(update.old for update, _ in updates),
        update_new=_ints(update.new for update, _ in updates),
        update_adopted=_ints(NONE if update.adopted is None else update.adopted for update, _ in updates),
        update_copies=_ints(update.copies for update, _ in updates),
        update_reads=_ints(flow.reads[i].count(update.old) for update, i in updates),
        update_variable=_variables(flow),
        request_begins=_begins(flow.requests),
        request_kinds=_ints(kinds[request.kind] for request in requests),
        request_subjects=_ints(request.subject for request in requests),
        request_bytes=array("q", [request.nbytes for request in requests]),
        candidates=lists_of([request.candidates for request in requests]),
    )


def _variables(flow: Dataflow) -> array[int]:
    """Per update, the position in `persistent` of the variable's first version."""
    position = {v: k for k, v in enumerate(flow.persistent)}
    older = {update.new: update.old for its in flow.updates for update in its}
    found = array("i")
    for its in flow.updates:
        for update in its:
            version = update.old
            while version not in position:
                version = older[version]
            found.append(position[version])
    return found


def _ints(numbers: Iterable[int]) -> array[int]:
    return array("i", numbers)


def _begins(lists: Sequence[Sequence[object]]) -> array[int]:
    begins = array("i", [0])
    for each in lists:
        begins.append(begins[-1] + len(each))
    return begins


def lists_of(lists: Sequence[Sequence[int]]) -> Lists:
    """A list of lists as arrays."""
    return Lists(_begins(lists), _ints(element for each in lists for element in each))
