"""Replicas are planned once, and checked on each device: counts of searches and simulations."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import several_gpu_kinds
import several_gpus
from gpu_compare import draws, reporting
from slow import slow


def attention() -> several_gpus.Made:
    """Replicas of two layers of attention. Grappler groups factors by name: differently in the first replica."""
    import keras

    keras.utils.set_random_seed(0)
    model = None

    def make_variables():
        nonlocal model
        x = inputs = keras.Input((32, 32))
        for _ in range(2):
            x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 16)(x, x))
            x = keras.layers.LayerNormalization()(x + keras.layers.Dense(32)(keras.layers.Dense(128, "relu")(x)))
        model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(x))
        return model.trainable_variables

    return several_gpu_kinds.replicated(
        lambda _, x: keras.ops.mean(model(x, training=True) ** 2),
        make_variables,
        lambda i: several_gpu_kinds.on(i, draws(32, 32, 32, seed=i)),
        make_optimizer=lambda: keras.optimizers.SGD(1e-2, momentum=0.9),
    )


def counted(make, limit):
    """As of `several_gpus.compare`, with the number of parts that are searched, and prepared, and of simulations that
    alike parts share.
    """
    from tfswap.compiler import prepared_step
    from tfswap.compiler.search import Search
    from tfswap.compiler.unoptimised import UnoptimisedStep
    from tfswap.passes.prepare import ordered_sums

    counts = {}
    with contextlib.ExitStack() as stack:
        shared = (UnoptimisedStep, "predict"), (ordered_sums, "simulate_sums"), (prepared_step, "prepare")
        for owner, name in ((Search, "fastest"), *shared):
            patch = mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))
            counts[name] = stack.enter_context(patch)
        found = several_gpus.compare(make, limit)
        searched = len({id(call.args[0]) for call in counts.pop("fastest").call_args_list})
    return {**found, "searched": searched, **{name: each.call_count for name, each in counts.items()}}


def check(found: dict) -> None:
    assert found["report"] == [] and found["same"] and all(found["moves"].values()), found
    assert all(planned == measured for planned, measured in found["planned"].values()), found
    assert all(measured <= found["limits"][device] for device, (_, measured) in found["planned"].items()), found


@pytest.mark.emulated_gpu(count=4)
def test_replicas_are_planned_once_and_have_the_names_of_the_first(on_gpus):
    found = on_gpus(reporting(lambda gpus: counted(several_gpus.mirrored, "60%")))
    check(found)
    assert found["searched"] == 1


@pytest.mark.emulated_gpu(count=4)
@pytest.mark.parametrize("limit", [*slow("60%"), 3_500_000])
def test_replicas_whose_products_are_grouped_otherwise_share_plans_and_simulations(on_gpus, limit):
    """The first one has another unoptimised peak, and so another limit where that is a share."""
    found = on_gpus(reporting(lambda gpus: counted(attention, limit)))
    check(found)
    assert found["searched"] == 1, found
    assert all(found[name] <= 2 for name in ("prepare", "simulate_sums", "predict")), found
