"""The search over orders in C++ has the results of the one in Python."""

from __future__ import annotations

from unittest import mock

import pytest

pytest.importorskip("tensorflow")

from graphs import training_steps
from hypothesis import given
from planner_problems import CPU, live_peak, slow

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.graph import Graph
from tfswap.native.load import load
from tfswap.planner import native_orders, order_search
from tfswap.planner.ordering import traced_order

VISITS, TRIES = 20_000, 300


def compare(flow: Dataflow, order: list[int]) -> list[int]:
    load()
    assert native_orders.is_available()
    found = order_search.searched(flow, order, VISITS, TRIES)
    with mock.patch.object(native_orders, "is_available", lambda: False):
        assert order_search.searched(flow, order, VISITS, TRIES) == found
    return found


@slow
@given(training_steps())
def test_training_steps(graph: Graph):
    flow = analyse_dataflow(graph, CPU)
    traced = [i for i in traced_order(flow) if flow.is_kernel[i]]
    assert live_peak(flow, compare(flow, traced)) <= live_peak(flow, traced)
