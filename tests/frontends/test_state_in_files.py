"""Files whose steps have variables at home on the host: what loads them moves the variables, and the limit is kept."""

from __future__ import annotations

import contextlib
import hashlib

import pytest
import tensorflow as tf
from processes import on_arena
from step_peaks import measuring

import tfswap
import tfswap.ops
from tfswap.ir.permits import TACTICS, TENSOR_TACTICS

WIDTH, LAYERS, LIMIT_MIB = 384, 6, 3
"""Weights and slots take 6.8 MiB."""


class Net(tf.Module):
    """Weights with a slot each."""

    def __init__(self):
        self.weights = [tf.Variable(0.05 * tf.random.stateless_normal([WIDTH, WIDTH], (i, 1))) for i in range(LAYERS)]
        self.slots = [tf.Variable(tf.zeros_like(weight)) for weight in self.weights]

    @tf.function(input_signature=[tf.TensorSpec([None, WIDTH])])
    def train_step(self, x):
        with tf.GradientTape() as tape:
            h = x
            for weight in self.weights:
                h = tf.nn.relu(h @ weight)
            loss = tf.reduce_mean(h * h)
        for weight, slot, gradient in zip(self.weights, self.slots, tape.gradient(loss, self.weights), strict=True):
            slot.assign(0.9 * slot + gradient)
            weight.assign_sub(0.1 * slot)
        return loss


def trained(model, steps=4):
    """Losses and final values; and the peak without the first step, which begins with variables in the arena."""
    losses, peaks, x = [], [], tf.random.stateless_normal([32, WIDTH], (5, 6))
    for _ in range(steps):
        with measuring(peaks):
            losses.append(float(model(x)))
    return losses, max(peaks[1:])


def digest(net):
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in (*net.weights, *net.slots))).hexdigest()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The folders of a rewritten model and of a decorated step, and what a plain net computes."""
    folder = str(tmp_path_factory.mktemp("files"))

    options = {"memory_limit": f"{LIMIT_MIB}MiB", "tactics": TACTICS}

    def rewrite():
        net = Net()
        tf.saved_model.save(net, f"{folder}/plain")
        losses, _ = trained(net.train_step)
        report = tfswap.optimize_graph(f"{folder}/plain", f"{folder}/rewritten", batch_size=32, **options)
        return {"result": [losses, digest(net)], "home": sum(row.tactic == "state" for row in report.variables)}

    def decorate():
        net = Net()
        step = tfswap.optimize(net.train_step, **options)
        step.get_concrete_function(tf.TensorSpec([32, WIDTH]))
        tf.saved_model.save(net, f"{folder}/decorated", signatures=step)
        return True

    found = on_arena(rewrite)
    assert found["home"] and on_arena(decorate)
    return folder, found["result"]


WAYS = {
    "tfswap": ("rewritten", False, 512),
    "tensorflow": ("rewritten", True, 512),
    "tfswap in a scope": ("rewritten", False, 5),
    "tensorflow in a scope": ("rewritten", True, 5),
    "decorated": ("decorated", False, 512),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loaded_step_moves_its_variables_home(way: str, files) -> None:
    folder, expected = files
    name, plainly, arena_mib = WAYS[way]

    def program():
        with tfswap.scope() if arena_mib < 8 else contextlib.nullcontext():
            loaded = (tf.saved_model.load if plainly else tfswap.load)(f"{folder}/{name}")
        signature = loaded.signatures["serving_default"] if name == "decorated" else None
        losses, peak = trained(loaded.train_step if signature is None else lambda x: signature(x=x)["output_0"])
        return {"result": [losses, digest(loaded)], "peak": peak}

    found = on_arena(program, arena_mib)
    assert found["result"] == expected
    assert found["peak"] <= LIMIT_MIB << 20


def test_a_step_that_another_function_calls_moves_its_variables_home(files) -> None:
    _, expected = files

    def program():
        net = Net()
        step = tfswap.optimize(net.train_step, memory_limit=f"{LIMIT_MIB}MiB", tactics=TACTICS)
        losses, peak = trained(tf.function(lambda x: step(x)))
        return {"result": [losses, digest(net)], "peak": peak}

    found = on_arena(program)
    assert found["result"] == expected
    assert found["peak"] <= LIMIT_MIB << 20


def test_a_simulated_machine_may_be_smaller_than_the_state(files) -> None:
    folder, _ = files

    def program():
        options = {"batch_size": 32, "device": "rtx-4090"}
        return [
            tfswap.simulate(f"{folder}/plain", tactics=tactics, **options).points[0].limit_bytes
            for tactics in (TACTICS, TENSOR_TACTICS)
        ]

    with_state, without = on_arena(program)
    state_bytes = 2 * LAYERS * 4 * WIDTH * WIDTH
    assert with_state < state_bytes / 2 and state_bytes < without
