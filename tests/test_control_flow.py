"""Steps with loops and conditionals, each in a process of its own on a capped arena: values, and how true plans are."""

from __future__ import annotations

from typing import Any

import pytest
from processes import last_json, run_python

pytest.importorskip("tensorflow")

CAPPED = {
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "512",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # its graph pass merges ops unless a control edge stands between: other bits
}

# What the step decides when it runs is bounded: the plan may be higher than the peak, and is never lower.
EXACT = ("while_loop", "scan", "map_fn", "cond", "conditional_update", "lstm", "gru", "loss_scale")
BOUNDED = ("until_small",)
NEAR = 0.005


def run(program: str, limit: str) -> dict[str, Any]:
    code = "import sys; sys.path.insert(0, 'tests'); import json, control_flow; "
    code += f"print(json.dumps(control_flow.main({program!r}, {limit!r})))"
    return last_json(run_python(code, **CAPPED))


@pytest.mark.parametrize("program", (*EXACT, *BOUNDED))
def test_the_limit_is_kept_the_bits_are_the_same_and_the_plan_is_true(program):
    expected = run(program, "unoptimised")
    # In a process of its own: the constants of bodies that were made for a refused step stay in the arena.
    found = run(program, str(int(run(program, "floor")["floor"] * 1.02)))
    assert found["digest"] == expected["digest"]
    assert found["peak"] <= found["limit"]
    assert found["peak"] * (1 - NEAR) <= found["planned"]
    if program in EXACT:
        assert found["planned"] <= found["peak"] * (1 + NEAR)
    assert (found["bounds"] > 0) == (program in (*BOUNDED, "cond", "conditional_update", "loss_scale"))
