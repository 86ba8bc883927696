"""Steps with loops and conditionals, each in a process of its own on an arena: values, planned and measured peaks."""

from __future__ import annotations

from typing import Any

import pytest
from processes import on_arena
from slow import slow

from tfswap.ir.permits import TENSOR_TACTICS

pytest.importorskip("tensorflow")

# What the step decides when it runs is bounded: the plan may be higher than the peak, and is never lower.
EXACT = (
    "nested",
    "overwritten",
    "branches",
    "scan",
    "ctc",
    "called",
    "cond",
    "conditional_update",
    "loss_scale",
)
ALIKE = ("while_loop", "slopes", "slopes_of_branches", "map_fn", "gradients_of_examples", "lstm", "gru")  # exact too
BOUNDED = ("until_small", "skipped")
NEAR = 0.005


def run(program: str, limit: str) -> dict[str, Any]:
    """As of control_flow.main. Variables stay on the device: the peak is that of the first step too."""
    return on_arena(
        f"import json, control_flow; print(json.dumps(control_flow.main({program!r}, {limit!r}, {TENSOR_TACTICS})))"
    )


@pytest.mark.parametrize("program", [*EXACT, "until_small", *slow("skipped", *ALIKE)])
def test_the_limit_is_kept_the_bits_are_the_same_and_the_plan_is_true(program):
    expected = run(program, "floor")
    # In a process of its own: the constants of bodies that were made for a refused step stay in the arena.
    found = run(program, str(int(expected["floor"] * 1.02)))
    assert found["digest"] == expected["digest"]
    assert found["peak"] <= found["limit"]
    assert found["peak"] * (1 - NEAR) <= found["planned"]
    if program not in BOUNDED:
        assert found["planned"] <= found["peak"] * (1 + NEAR)
    assert (found["bounds"] > 0) == (program in (*BOUNDED, "called", "cond", "conditional_update", "loss_scale"))


def test_any_sequence_of_branches_keeps_the_limit():
    """What a branch saves, and the holes that it leaves, differ: the plan is judged by several sequences."""
    found = on_arena("import json, undecided_steps; print(json.dumps(undecided_steps.every_sequence('85%')))")
    assert found["peak"] <= found["planned"] * (1 + NEAR)
    assert found["planned"] <= found["peak"] * (1 + NEAR)
    assert found["plans"] == 1


def test_any_end_of_a_loop_that_saves_keeps_the_limit():
    """A loop that ends early leaves other holes: without each end in the plan, by up to 17% over the limit."""
    found = on_arena("import json, undecided_steps; print(json.dumps(undecided_steps.any_end(1.001)))")
    assert found["peak"] <= found["planned"] <= found["limit"]
    assert found["plans"] == 1


def test_a_branch_of_one_iteration_and_a_count_left_by_another_loop_keep_the_limit():
    """Iterations that stand for all have no counter, and what a loop that ends early leaves is a bound: with neither, 8
    times the limit.
    """
    found = on_arena("import json, undecided_steps; print(json.dumps(undecided_steps.rare_branch_and_early_end(1.01)))")
    assert found["peak"] <= found["limit"]


def test_loops_with_no_bound_keep_their_plan_however_often_they_run():
    """None, one or many iterations, and either branch in each: one plan is that of all."""
    found = on_arena("import json, undecided_steps; print(json.dumps(undecided_steps.any_course(1.01)))")
    assert found["same"]
    assert max(found["peaks"]) <= found["planned"] <= found["limit"]
    assert found["planned"] <= max(found["peaks"]) * 1.02  # not all that may come has
    assert found["plans"] == 1


def overlapping():
    import tensorflow as tf

    import tfswap

    def loop(x):
        return tf.while_loop(lambda i, _: i < 40, lambda i, h: (i + 1, tf.tanh(h @ x)), [0, x])[1]

    found = []
    for function in (loop, tf.tanh):
        analysed = tfswap.optimize(tf.function(function), memory_limit="300%", mode="analyze")
        analysed(tf.ones([64, 64]))
        found.append([analysed.report().baseline.overlapping_bytes, "run concurrently" in str(analysed.report())])
    return found


def test_the_report_says_what_concurrent_iterations_can_hold_in_addition() -> None:
    # Nine others, each with two counters, a product and its tanh.
    assert on_arena(overlapping) == [[9 * (2 * 4 + 2 * 64 * 64 * 4), True], [0, False]]
