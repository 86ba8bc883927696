"""How little of the plans with kernels in slices is made where others are better."""

from __future__ import annotations

import pytest
from layered_steps import Layer, training_step
from planner_problems import optimizer_of

from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.variants import Variants
from tfswap.ir.permits import CLOSE, SLICE, TACTICS


@pytest.fixture
def optimizer() -> Optimizer:
    step = training_step([Layer("dense"), Layer("relu")] * 3, rows=512, width=128)
    return optimizer_of(step, tactics=(*TACTICS, SLICE), values=CLOSE)


def test_kernels_alone_bound_the_time_of_chains(optimizer: Optimizer) -> None:
    search = optimizer.search
    forms = search.alternatives.in_chains
    assert forms
    for form in forms:
        least_s = search.planners.least_kernels_s(form)
        assert 0.5 * search.planners.unmoved_s(form) < least_s <= search.planners.unmoved_s(form)


def test_chains_whose_kernels_take_too_long_are_not_ordered(
    optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered: list[bool] = []
    made = Variants.orders_of
    monkeypatch.setattr(Variants, "orders_of", lambda self, r: (ordered.append(bool(r.sliced)), made(self, r))[1])
    assert optimizer.search.fastest(optimizer.search.planners.unmoved_bytes(optimizer.search.variants.base) * 2)
    assert ordered and not any(ordered)


def test_without_variables_that_can_move_none_get_forms_in_slices(optimizer: Optimizer) -> None:
    search = optimizer.search
    assert not search.planners.variables and search.state is not None
    assert "in_row_slices" not in vars(search.alternatives)
