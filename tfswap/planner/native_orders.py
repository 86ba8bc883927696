"""The search over orders in C++ (csrc/core/order_search.cc), where the core library is loaded."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from tfswap.analysis.dataflow import Dataflow
from tfswap.analysis.flat_dataflow import Lists, lists_of
from tfswap.native import bound
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN
from tfswap.simulator.native_replay import c_facts


class _CLists(ctypes.Structure):
    _fields_ = (("begins", ctypes.c_void_p), ("elements", ctypes.c_void_p))


class Constants(ctypes.Structure):
    """OrderConstants in C++, field for field; order_search.py has their meaning."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("visits", "tries", "near_peak", "least_stride", "most_states"))


def is_available() -> bool:
    return bound.core is not None


def search(flow: Dataflow, nodes: Sequence[int], constants: Constants) -> list[int]:
    """As `OrderSearch.run`. Requires `is_available`.

    Args:
        nodes: all nodes, in order.
    """
    core = bound.core
    assert core is not None, "is_available"
    facts = c_facts(flow, NOTHING_KNOWN, live=True)
    deps, users = lists_of(flow.deps), lists_of(flow.users)
    order, is_kernel = array("q", nodes), array("b", flow.is_kernel)
    found: int = core.tfswap_search_order(
        ctypes.byref(facts.flow),
        facts.filled.pointer,
        _address(facts.filled.addresses),
        _address(facts.pins),
        _address(is_kernel),
        ctypes.byref(_c_lists(deps)),
        ctypes.byref(_c_lists(users)),
        ctypes.byref(constants),
        _address(order),
        len(order),
    )
    if found:
        raise ValueError("the order is not one of this step")
    return order.tolist()


def _c_lists(lists: Lists) -> _CLists:
    return _CLists(*map(_address, lists))


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
