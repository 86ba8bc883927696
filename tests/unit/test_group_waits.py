"""Constants that joined kernels read: what only they waited for still runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tfswap.ir.text import parse_graph
from tfswap.passes.tactics.join_concurrent import _free_constants

pytestmark = pytest.mark.fast


def test_what_only_a_constant_waits_for_is_a_target() -> None:
    """TensorFlow 1's `minimize(loss, global_step)` counts by a constant that waits for the updates."""
    graph = parse_graph(
        "%step = VarHandleOp() -> resource[]\n%weight = VarHandleOp() -> resource[]\n%x = Placeholder() -> float32[4]\n"
        "%update = AssignSubVariableOp(%weight, %x)\n%one = Const() ^update -> float32[4]\n"
        "%same = Identity(%one) -> float32[4]\n%count = AssignAddVariableOp(%step, %same)\n"
        "feeds %x\ntargets %count\n"
    )
    one, same, count, update = (graph[name] for name in ("one", "same", "count", "update"))
    assert one.controls == (update,)
    facts: Any = SimpleNamespace(constants={one, same})
    _free_constants(graph, facts)
    assert one.controls == same.controls == ()
    assert count.controls == () and graph.targets == [count, update]
    graph.prune()
    assert "update" in graph, "the update is in the step still"
