"""`tfswap.keras.max_batch`, `largest` and `tuned`."""

from __future__ import annotations

from typing import Any

import pytest
from processes import on_arena


def test_a_model_that_no_plan_fits_ends_its_trial() -> None:
    def program() -> Any:
        import sys
        import types

        import numpy
        from keras_programs import WIDTH, dense

        import tfswap

        x, y = numpy.ones([3, WIDTH], "f"), numpy.ones([3, 1], "f")

        def refusal() -> Any:
            try:
                tfswap.keras.tuned(lambda: dense(), x, y, batch_size=1 << 16, memory_limit="2MiB")()
            except Exception as error:
                return type(error).__name__, str(error)
            return None

        alone = refusal()
        errors = types.ModuleType("keras_tuner.errors")
        errors.FailedTrialError = type("FailedTrialError", (Exception,), {})
        sys.modules["keras_tuner"] = types.ModuleType("keras_tuner")
        sys.modules["keras_tuner.errors"] = errors
        return [alone, refusal()]

    alone, in_tuner = on_arena(program, mib=64)
    assert alone[0] == "InfeasibleMemoryLimit"
    assert "a batch of 65536 needs at least" in alone[1]
    assert in_tuner[0] == "FailedTrialError"
    assert "a batch of 65536 needs at least" in in_tuner[1]


@pytest.mark.slow
def test_the_largest_batch_runs_each_time() -> None:
    def program() -> Any:
        import keras
        import numpy
        import tensorflow as tf
        from keras_programs import WIDTH, dense

        import tfswap

        keras.utils.set_random_seed(1)
        limit = 6 << 20
        model, x = dense(), numpy.random.default_rng(1).normal(size=(4096, WIDTH)).astype("f")
        y = x[:, :1]
        model.fit(x[:32], y[:32], batch_size=32, verbose=0)
        before = [weight.tolist() for weight in model.get_weights()]
        found = tfswap.keras.max_batch(model, x, y, memory_limit=limit)
        same = before == [weight.tolist() for weight in model.get_weights()]
        tfswap.keras.optimize(model, memory_limit=limit)
        tf.config.experimental.reset_memory_stats("CPU:0")
        model.fit(x, y, batch_size=found.size, epochs=2, verbose=0)
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        sizes = [found.size, found.unoptimised_size]
        return {"same": same, "peak": peak, "sizes": sizes, "limit": limit}

    found = on_arena(program, mib=64)
    assert found["same"]
    assert found["peak"] <= found["limit"]
    size, unoptimised = found["sizes"]
    assert size > unoptimised
