"""Training steps with loops and conditionals: what test_control_flow.py runs in processes of their own.

    python control_flow.py PROGRAM unoptimised
    python control_flow.py PROGRAM default        # TensorFlow as it is: the reference for the unoptimised peak
    python control_flow.py PROGRAM predicted      # only the unoptimised peak that tfswap expects
    python control_flow.py PROGRAM floor          # the smallest limit, then unoptimised
    python control_flow.py PROGRAM LIMIT          # bytes, or a share such as 120%

Prints a JSON object: the measured peak, the planned figures, and a digest of losses and variables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import tensorflow as tf
from branch_steps import cond, conditional_update, hard_examples, masked_loss, skipped, training_branch
from loop_steps import (
    act,
    branches,
    called,
    ctc,
    gradients_of_examples,
    map_fn,
    nested,
    overwritten,
    scan,
    slopes,
    slopes_of_branches,
    until_small,
    while_loop,
)
from micro_batch_steps import (
    dropout_in_loop,
    micro_batches,
    pools_in_micro_batches,
    recurrent_micro_batches,
    steps_in_loop,
)
from models import settle, train
from recurrent_steps import attention, bidirectional, gru, loss_scale, lstm
from step_parts import Made

PROGRAMS: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (
        while_loop,
        until_small,
        nested,
        overwritten,
        slopes,
        slopes_of_branches,
        branches,
        act,
        scan,
        map_fn,
        gradients_of_examples,
        ctc,
        called,
        masked_loss,
        hard_examples,
        cond,
        skipped,
        conditional_update,
        lstm,
        gru,
        bidirectional,
        attention,
        loss_scale,
        micro_batches,
        pools_in_micro_batches,
        dropout_in_loop,
        recurrent_micro_batches,
        steps_in_loop,
        training_branch,
    )
}


class _Holder:
    def __init__(self, variables: list[Any]):
        self.variables = variables


def main(name: str, limit: str, tactics: Sequence[str] | None = None) -> dict[str, Any]:
    import tfswap
    from tfswap.exporters.function import grappler_off

    settle()
    tf.keras.utils.set_random_seed(0)
    variables, step, arguments = PROGRAMS[name]()
    holder = _Holder(variables)
    if limit == "unoptimised":
        with grappler_off():
            return train(holder, tf.function(step), arguments)
    if limit == "default":
        return train(holder, tf.function(step), arguments)
    if limit == "predicted":
        analysed = tfswap.optimize(tf.function(step), memory_limit="100%", mode="analyze")
        analysed.get_concrete_function(*arguments)
        return {"baseline": analysed.report().baseline_peak_bytes}
    options = {} if tactics is None else {"tactics": tuple(tactics)}
    if limit == "floor":
        try:
            tfswap.optimize(tf.function(step), memory_limit=1, **options)(*arguments)
        except tfswap.InfeasibleMemoryLimit as error:
            floor = error.floor_bytes
        with grappler_off():
            return {"floor": floor, **train(holder, tf.function(step), arguments)}
    optimized = tfswap.optimize(
        tf.function(step), memory_limit=limit if "%" in limit else int(limit), on_exceeded="raise", **options
    )
    result = train(holder, optimized, arguments)
    plan = optimized.plan()
    unmodelled = optimized.report().unmodelled
    return {
        **result,
        "limit": plan.limit_bytes,
        "planned": plan.planned_peak_bytes,
        "bounds": len(unmodelled),
        "accumulators": len(plan.accumulators),
        "prefetched": len(plan.prefetched),
        "recomputed": len(plan.recomputed),
        "encoded": len(plan.encoded),
        "inside": {i.body: [len(i.evictions), len(i.order) - len(set(i.order))] for i in plan.inside},
        "host_bytes": plan.host_bytes,
    }


def prefetching() -> Any:
    """Lets what loops save be prefetched wherever it is swapped, whether it would be waited for or not."""
    from tfswap.compiler.alternatives import Alternatives

    stages = Alternatives.stages

    def ahead(alternatives: Alternatives, smallest_bytes: int) -> list[Any]:
        return [stage._replace(prefetched=stage.accumulators) for stage in stages(alternatives, smallest_bytes)]

    return mock.patch.object(Alternatives, "stages", ahead)


def prefetched(name: str, limit: str) -> dict[str, Any]:
    """As `main`, with all that loops save prefetched."""
    with prefetching():
        return main(name, limit, ("swap",))


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
