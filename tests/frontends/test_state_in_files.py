"""Files whose steps have variables at home on the host: what loads them moves the variables, and the limit is kept."""

from __future__ import annotations

import hashlib

import pytest
import tensorflow as tf
from processes import on_arena
from step_peaks import measuring

import tfswap
import tfswap.ops
from tfswap.ir.permits import TACTICS, TENSOR_TACTICS

WIDTH, LAYERS, LIMIT_MIB, ARENA_MIB = 384, 6, 3, 5
"""Weights and slots take 6.8 MiB."""


class Net(tf.Module):
    """Weights with a slot each."""

    @tfswap.scope()
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
    """Losses and final values; and the peak."""
    losses, peaks, x = [], [], tf.random.stateless_normal([32, WIDTH], (5, 6))
    for _ in range(steps):
        with measuring(peaks):
            losses.append(float(model(x)))
    return losses, max(peaks)


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
        with open(f"{folder}/rewritten/README.txt", encoding="utf-8") as file:
            said = "tfswap.scope()" in file.read() and any("tfswap.scope()" in note for note in report.notes)
        home = sum(row.tactic == "state" for row in report.variables)
        return {"result": [losses, digest(net)], "home": home, "said": said}

    def decorate():
        net = Net()
        step = tfswap.optimize(net.train_step, **options)
        step.get_concrete_function(tf.TensorSpec([32, WIDTH]))
        tf.saved_model.save(net, f"{folder}/decorated", signatures=step)
        return True

    found = on_arena(rewrite)
    assert found["home"] and found["said"] and on_arena(decorate)
    return folder, found["result"]


WAYS = {
    "tfswap": ("rewritten", False),
    "tensorflow": ("rewritten", True),
    "decorated": ("decorated", False),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loaded_step_moves_its_variables_home(way: str, files) -> None:
    folder, expected = files
    name, plainly = WAYS[way]

    def program():
        with tfswap.scope():
            loaded = (tf.saved_model.load if plainly else tfswap.load)(f"{folder}/{name}")
        signature = loaded.signatures["serving_default"] if name == "decorated" else None
        losses, peak = trained(loaded.train_step if signature is None else lambda x: signature(x=x)["output_0"])
        return {"result": [losses, digest(loaded)], "peak": peak}

    found = on_arena(program, ARENA_MIB)
    assert found["result"] == expected
    assert found["peak"] <= LIMIT_MIB << 20


def test_a_step_that_was_loaded_without_a_scope_fails_before_it_begins(files) -> None:
    folder, expected = files

    def program():
        loaded, x = tf.saved_model.load(f"{folder}/rewritten"), tf.random.stateless_normal([32, WIDTH], (5, 6))
        before, said = digest(loaded), ""
        try:
            loaded.train_step(x)
        except tf.errors.ResourceExhaustedError as error:
            said = str(error)
        same = digest(loaded) == before
        with tfswap.scope():
            for variable in (*loaded.weights, *loaded.slots):
                variable.assign(variable)
        losses, peak = trained(loaded.train_step)
        return {"said": said, "same": same, "result": [losses, digest(loaded)], "peak": peak}

    found = on_arena(program)
    assert "tfswap.scope()" in found["said"]
    assert found["same"] and found["result"] == expected
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


class Table(tf.Module):
    """A table with a slot, of 375 KiB each."""

    @tfswap.scope()
    def __init__(self):
        self.weights = [tf.Variable(tf.random.stateless_normal([4_003, 24], (1, 2)))]
        self.slots = [tf.Variable(tf.zeros([4_003, 24]))]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def train_step(self, ids):
        (table,), (slot,) = self.weights, self.slots
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.gather(table, ids)))
        slot.assign(0.9 * slot + tape.gradient(loss, table))
        table.assign_sub(0.1 * slot)
        return loss


def test_a_file_keeps_nothing_free_for_variables_at_home(tmp_path) -> None:
    """Its floor is that of slices, and its first step keeps it too."""
    folder = str(tmp_path)

    def ran(model, peaks):
        losses = []
        for _ in range(3):
            with measuring(peaks):
                losses.append(float(model.train_step(tf.range(32) * 113)))
        return [losses, digest(model)]

    def rewrite():
        net = Table()
        tf.saved_model.save(net, f"{folder}/plain")
        try:
            tfswap.optimize_graph(f"{folder}/plain", f"{folder}/none", batch_size=32, memory_limit=4096)
        except tfswap.InfeasibleMemoryLimit as error:
            limit = error.floor_bytes
        report = tfswap.optimize_graph(f"{folder}/plain", f"{folder}/made", batch_size=32, memory_limit=limit)
        return {"limit": limit, "planned": report.planned_peak_bytes, "result": ran(net, [])}

    def load():
        with tfswap.scope():
            loaded, peaks = tf.saved_model.load(f"{folder}/made"), []
        return {"result": ran(loaded, peaks), "peak": max(peaks)}

    made, loaded = on_arena(rewrite), on_arena(load)
    assert loaded["result"] == made["result"]
    assert loaded["peak"] <= made["planned"] <= made["limit"] < 100_000, (made, loaded)
