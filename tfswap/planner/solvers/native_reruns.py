"""The search over reruns in C++ (csrc/core/rerun_search.h), where the core library is loaded."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

from tfswap.analysis.flat_dataflow import Lists
from tfswap.native import bound
from tfswap.planner.solvers.rerun_layout import Facts

CONSTANTS = ("least_tries", "most_tries", "most_chain", "least_removed", "removed_share", "change_share")
"""Whole numbers among the search's constants, in the order of the structure in C++."""


class _CLists(ctypes.Structure):
    _fields_ = (("begins", ctypes.c_void_p), ("elements", ctypes.c_void_p))


_NUMBERS = ("count", "copies")
_FIELDS = [field for field in fields(Facts) if field.name not in _NUMBERS]


class _CFacts(ctypes.Structure):
    """RerunFacts in C++, field for field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((field.name, _CLists if field.type == "Lists" else ctypes.c_void_p) for field in _FIELDS),
    )


class _CConstants(ctypes.Structure):
    """RerunConstants in C++, field for field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in CONSTANTS),
        ("worse", ctypes.c_double),
        ("factors", ctypes.c_void_p),
    )


def is_available() -> bool:
    return bound.core is not None


def search(
    facts: Facts,
    most_bytes: int,
    visits: int,
    begins: Sequence[Sequence[int]],
    *,
    constants: Sequence[int],
    worse: float,
    factors: Sequence[float],
) -> list[int] | None:
    """As `RerunSearch.run`. Requires `is_available`.

    Args:
        constants: the values of CONSTANTS.
    """
    core = bound.core
    assert core is not None, "is_available"
    sizes, keys = array("q", map(len, begins)), array("q", chain.from_iterable(begins))
    table = array("d", factors)
    c_constants = _CConstants(*constants, worse, _address(table))
    c_facts = _CFacts(facts.count, facts.copies, *(_pointer(getattr(facts, field.name)) for field in _FIELDS))
    count: int = core.tfswap_search_reruns(
        ctypes.byref(c_facts),
        ctypes.byref(c_constants),
        most_bytes,
        visits,
        _address(sizes),
        _address(keys),
        len(sizes),
    )
    if count < 0:
        return None
    found = array("q", bytes(8 * count))
    core.tfswap_take_reruns(_address(found))
    return found.tolist()


def _pointer(field: Any) -> Any:
    return _CLists(*map(_address, field)) if isinstance(field, Lists) else _address(field)


def _address(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]
