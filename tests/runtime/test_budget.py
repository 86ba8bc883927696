"""`tfswap.budget`: one limit for several models of a process."""

from __future__ import annotations

from typing import Any

import pytest
from processes import on_arena

import tfswap


def test_models_of_a_process_share_a_budget() -> None:
    def program() -> Any:
        import tensorflow as tf
        from nets import Net, batch
        from step_peaks import measuring

        import tfswap

        plain = [tf.function(Net(6).step) for _ in range(2)]
        alone: list[int] = []
        for step in plain:
            with measuring(alone):
                step(batch())
        limit = max(alone) * 3 // 4
        tfswap.budget("CPU:0", limit)
        without, higher = (
            tfswap.optimize(tf.function(Net(6).step), memory_limit=given) for given in (None, 10 * limit)
        )
        peaks: list[int] = []
        for _ in range(3):
            for step in (without, higher):
                with measuring(peaks):
                    step(batch())
        limits = [step.report().memory_limit_bytes for step in (without, higher)]
        tfswap.budget("CPU:0", None)
        free = tfswap.optimize(tf.function(Net(6).step), memory_limit=10 * limit)
        free(batch())
        return {"limit": limit, "peaks": peaks, "limits": limits, "free": free.report().memory_limit_bytes}

    found = on_arena(program, mib=512)
    assert found["limits"] == [found["limit"]] * 2
    assert max(found["peaks"]) <= found["limit"]
    assert found["free"] == 10 * found["limit"]


@pytest.mark.parametrize(
    ("device", "limit", "says"),
    [("GPU:99", "1GiB", "no such one"), ("cpu", "1GiB", "no such one"), (None, 1, "no such one"), ("CPU:0", "x", "x")],
)
def test_bad_input_is_refused(device: Any, limit: Any, says: str) -> None:
    with pytest.raises(tfswap.TfswapError, match=says):
        tfswap.budget(device, limit)
