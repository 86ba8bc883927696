"""Keras' fit with variables and slots at home in host memory: models that are larger than the arena."""

from __future__ import annotations

import hashlib

import pytest
import tensorflow as tf
from processes import on_arena
from slow import slow
from step_peaks import measuring

import tfswap
from tfswap.ir.permits import TACTICS

WIDTH, LAYERS, ARENA_MIB = 512, 10, 8
"""Variables and slots of the net take 31 MiB."""


def fitted(kind, capped, folder):
    """What training and what comes between gives: of a model that is unbuilt, or made in a scope."""
    tf.keras.utils.set_random_seed(1)
    layers = [tf.keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS)]
    options = {"ema": {"use_ema": True, "ema_overwrite_frequency": 3}, "norm": {"global_clipnorm": 0.1}}.get(kind, {})
    model = tf.keras.Sequential([*layers, tf.keras.layers.Dropout(0.1), tf.keras.layers.Dense(4)])
    if kind == "frozen":
        layers[1].trainable = layers[2].trainable = False
    model.compile(tf.keras.optimizers.Adam(**options), "mse", jit_compile=False, steps_per_execution=2)
    if capped:
        tfswap.keras.optimize(model, memory_limit=(ARENA_MIB << 20) - (1 << 19), tactics=TACTICS)
    x, y = tf.random.stateless_normal([64, WIDTH], (1, 2)), tf.random.stateless_normal([64, 4], (3, 4))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    found, peaks = [], []
    for time in range(2):
        if time:  # no scope: both write more than the arena has room for
            model.save_weights(f"{folder}/first.weights.h5")
            model.set_weights([0.5 * value for value in model.get_weights()])
            model.load_weights(f"{folder}/first.weights.h5")
        with measuring(peaks):
            found.append(model.fit(data, epochs=2, shuffle=False, verbose=0).history["loss"])
        found.append(model.evaluate(data, verbose=0))
        found.append(float(tf.reduce_sum(model.predict(data, verbose=0))))
    model.save_weights(f"{folder}/{kind}.weights.h5")
    with open(f"{folder}/{kind}.weights.h5", "rb") as file:
        saved = len(file.read())
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in (*model.variables, *model.optimizer.variables)))
    return {"result": [found, saved, digest.hexdigest()], "peak": max(peaks)}


@pytest.mark.parametrize("kind", ["ema", "norm", *slow("plain", "frozen")])
def test_fit_builds_and_trains_a_model_larger_than_the_arena(kind: str, tmp_path) -> None:
    folder = str(tmp_path)

    def program():
        return fitted(kind, True, folder)

    def plain():
        return fitted(kind, False, folder)

    found = on_arena(program, ARENA_MIB)
    assert found["result"] == on_arena(plain)["result"]
    assert found["peak"] <= ARENA_MIB << 20
