"""Which form of a step is planned under a limit: with blocks that save time, with others that save bytes, or none."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tfswap.ir.permits import FUSE
from tfswap.runtime import block_choice

RATES = SimpleNamespace(copy_share=0.5, out_bytes_per_s=1.0, in_bytes_per_s=1.0)  # a byte's copies take a second
WITHOUT = SimpleNamespace(blocks=())
LIVE = {(): 100, (0.0,): 80, (1.0,): 60, (4.0,): 40}
"""By the prices of a form's blocks, the peak of its live bytes."""


class Optimizer:
    """An optimizer whose plans take a second for each tenth of the bytes above the limit."""

    extra_margin_bytes = 0
    resident_bytes = 10
    costs = SimpleNamespace(rates=RATES)
    device = None

    def __init__(self, graph: Any, seconds: dict[tuple[float, ...], float]):
        self.graph, self._seconds = graph, seconds
        self.options = SimpleNamespace(tactics=(FUSE,), names=None)
        planners = SimpleNamespace(unmoved_bytes=lambda _: LIVE[graph.blocks])
        self.search = SimpleNamespace(planners=planners, variants=SimpleNamespace(base=None))
        self.planner = SimpleNamespace(drafted=self._drafted)

    def _drafted(self, limit_bytes: int) -> Any:
        seconds = self._seconds[self.graph.blocks]
        evicted = max(0, LIVE[self.graph.blocks] - limit_bytes)
        return None if math.isinf(seconds) else SimpleNamespace(timing=SimpleNamespace(total_s=seconds + evicted / 10))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the prices of the form that is planned, and those of all that were compiled."""
    compiled: list[tuple[float, ...]] = []

    def fuse(_graph: Any, _device: Any, _keeps: Any, price_s: float, room_bytes: float) -> Any:
        return SimpleNamespace(blocks=(price_s,)) if room_bytes > 0 else WITHOUT

    monkeypatch.setattr(block_choice, "fuse", fuse)
    monkeypatch.setattr(block_choice, "measure_compiled", lambda form, *_: compiled.append(form.blocks))
    monkeypatch.setattr(block_choice, "free_functions", lambda: None)
    monkeypatch.setattr(block_choice, "with_placeholders", lambda _: [])

    def choose(limit_bytes: int | None, *seconds: float) -> tuple[tuple[float, ...], list[tuple[float, ...]]]:
        by_form = dict(zip(LIVE, seconds, strict=True))
        trace: Any = SimpleNamespace(
            may_have_blocks=True, concrete=None, device=SimpleNamespace(name="CPU:0", model=None)
        )
        plain: Any = Optimizer(WITHOUT, by_form)
        found = block_choice.with_blocks(plain, trace, [], limit_bytes, lambda graph: Optimizer(graph, by_form))
        return found.graph.blocks, compiled

    return choose


@pytest.mark.parametrize("limit_bytes", [None, 80])
def test_where_nothing_is_evicted_the_blocks_are_those_that_save_time(chosen: Any, limit_bytes: int | None) -> None:
    assert chosen(limit_bytes, 9.0, 5.0, 1.0, 1.0) == ((0.0,), [(0.0,)])


def test_where_something_is_evicted_the_form_with_the_least_seconds_is_planned(chosen: Any) -> None:
    assert chosen(50, 9.0, 5.0, 5.5, 7.5)[0] == (1.0,), "5 + 3, 5.5 + 1, 7.5 + 0 and 9 + 5"


def test_blocks_that_gain_nothing_under_the_limit_are_left_out(chosen: Any) -> None:
    assert chosen(50, 1.0, 8.0, 8.0, 8.0)[0] == ()


def test_a_form_that_can_not_keep_the_limit_is_left_out(chosen: Any) -> None:
    assert chosen(50, math.inf, math.inf, math.inf, 9.0)[0] == (4.0,)


def test_without_room_beyond_the_variables_nothing_is_compiled(chosen: Any) -> None:
    assert chosen(10, 9.0, 5.0, 5.0, 5.0) == ((), [])
