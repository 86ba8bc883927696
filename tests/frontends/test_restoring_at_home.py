"""Variables that are restored and assigned in a scope: the device has the bytes of one after the other."""

from __future__ import annotations

import hashlib

import pytest
import tensorflow as tf
from processes import on_arena
from slow import slow
from step_peaks import measuring

import tfswap
from tfswap.device.variable_buffers import move_home
from tfswap.ir.permits import TACTICS

WIDTH, LAYERS, ARENA_MIB = 512, 10, 8
FEW_BYTES = 5 * 4 * WIDTH * WIDTH
"""Variables and slots of the net take 31 MiB. An initializer takes a few times those of a weight."""


class Net:
    """Dense layers with Adam's slots."""

    def __init__(self, seed):
        tf.keras.utils.set_random_seed(seed)
        dense = [tf.keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS)]
        self.model = tf.keras.Sequential([tf.keras.Input((WIDTH,)), *dense])
        self.model.compile(tf.keras.optimizers.Adam(0.1), "mse", jit_compile=False)
        self.model.optimizer.build(self.model.trainable_variables)

    @property
    def state(self):
        return [*self.model.variables, *self.model.optimizer.variables]

    def digest(self):
        return hashlib.sha256(b"".join(v.numpy().tobytes() for v in self.state)).hexdigest()

    def draw(self, seed):
        for number, v in enumerate(self.state):
            if v.dtype == "float32":
                v.assign(tf.random.stateless_normal(v.shape, (seed, number)))

    @property
    def checkpoint(self):
        return tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer)

    @property
    def module(self):
        made = tf.Module()
        made.state = [v.value for v in self.state]
        return made


def by_checkpoint(net, folder):
    path = net.checkpoint.write(f"{folder}/saved")
    yield
    net.checkpoint.read(path).assert_consumed()
    yield net.digest()


def by_weights(net, folder):
    net.model.save_weights(f"{folder}/saved.weights.h5")
    yield
    net.model.load_weights(f"{folder}/saved.weights.h5")
    yield net.digest()


def by_model_file(net, folder):
    net.model.save(f"{folder}/saved.keras")
    yield
    net.model = tf.keras.models.load_model(f"{folder}/saved.keras")
    yield net.digest()


def by_saved_model(net, folder):
    tf.saved_model.save(net.module, f"{folder}/saved")
    yield
    loaded = tf.saved_model.load(f"{folder}/saved")
    for v, other in zip(net.state, loaded.state, strict=True):
        v.assign(other)
    yield net.digest()


def by_values(net, folder):
    held = [v.numpy().copy() for v in net.state]
    yield
    for v, value in zip(net.state, held, strict=True):
        v.assign(value)
    yield net.digest()


WAYS = {"checkpoint": by_checkpoint, "weights": by_weights, "model": by_model_file}
WAYS |= {"saved_model": by_saved_model, "values": by_values}


def restored(way, folder, device="CPU:0", train=True):
    """Save a model in one way, change its values, restore them, and train a step."""
    with tfswap.scope():
        net = Net(1)
        net.draw(1)
        before, steps = net.digest(), WAYS[way](net, folder)
        next(steps)
        net.draw(2)
        other, peaks = net.digest(), []
        with measuring(peaks, device):
            after = next(steps)
    found = {"same": after == before != other, "peak": max(peaks), "trained": False}
    if not train:
        return found
    limit = (ARENA_MIB << 20) - (1 << 19)
    tfswap.keras.optimize(net.model, memory_limit=limit, tactics=TACTICS)
    x = tf.random.stateless_normal([16, WIDTH], (1, 2))
    return {**found, "trained": net.model.train_on_batch(x, x) is not None}


@pytest.mark.parametrize("way", ["checkpoint", "saved_model", *slow("weights", "model", "values")])
def test_a_model_larger_than_the_arena_is_restored(way: str, tmp_path) -> None:
    folder = str(tmp_path)

    def program():
        return restored(way, folder)

    found = on_arena(program, ARENA_MIB)
    assert found["same"] and found["trained"]
    assert found["peak"] <= FEW_BYTES


@pytest.mark.emulated_gpu(memory=ARENA_MIB << 20)
@pytest.mark.parametrize("way", ["checkpoint", *slow("weights", "model", "saved_model", "values")])
def test_a_model_larger_than_a_gpu_is_restored(way: str, on_gpus, tmp_path) -> None:
    folder = str(tmp_path)

    def program(gpus):
        return {**restored(way, folder, "GPU:0"), "races": gpus.report().splitlines()}

    found = on_gpus(program)
    assert found["same"] and found["trained"] and found["races"] == []
    assert found["peak"] <= FEW_BYTES


def table_restored(folder, device):
    """Save variables of which each is larger than the device, change them, and restore them in two ways."""
    small = (1 << 20) - 3
    with tfswap.scope():
        table = tf.keras.layers.Embedding(40_001, 64)
        table.build(None)
        other = tf.Variable(lambda: tf.random.stateless_uniform([3 * small], (1, 2)), name="other")
        saved = tf.Module()
        saved.state = [table.variables[0].value, other]
        checkpoint, peaks = tf.train.Checkpoint(table=table, other=other), []
        before = [hashlib.sha256(v.numpy().tobytes()).hexdigest() for v in saved.state]
        path = checkpoint.write(f"{folder}/saved")
        tf.saved_model.save(saved, f"{folder}/model")
        for v in saved.state:
            v.scatter_sub(tf.IndexedSlices(tf.ones([1, *v.shape[1:]]), [5]))
            move_home(v.handle, host=True)  # whose mode the sparse update has changed
        other = [hashlib.sha256(v.numpy().tobytes()).hexdigest() for v in saved.state]
        with measuring(peaks, device):
            checkpoint.read(path).assert_consumed()
        with measuring(peaks, device):
            loaded = tf.saved_model.load(f"{folder}/model")
        after = [[hashlib.sha256(v.numpy().tobytes()).hexdigest() for v in s] for s in (saved.state, loaded.state)]
        model = tf.keras.Sequential([tf.keras.Input((1,), dtype="int32"), table])
        model.save_weights(f"{folder}/table.weights.h5")
        held = [v.numpy().copy() for v in saved.state]
        for written in (
            lambda: model.load_weights(f"{folder}/table.weights.h5"),
            lambda: model.set_weights([-held[0]]),
            lambda: saved.state[1].assign(-held[1][::-1]),
        ):
            with measuring(peaks, device):
                written()
            after.append([hashlib.sha256(v.numpy().tobytes()).hexdigest() for v in saved.state])
        negative = [hashlib.sha256(v.tobytes()).hexdigest() for v in (-held[0], -held[1][::-1])]
    expected = [before, before, before, [negative[0], before[1]], negative]
    return {"same": after == expected and before != other, "peaks": peaks}


def test_a_variable_larger_than_the_arena_is_restored(tmp_path) -> None:
    folder = str(tmp_path)

    def program():
        return table_restored(folder, "CPU:0")

    found = on_arena(program, ARENA_MIB)
    assert found["same"] and max(found["peaks"]) < 5 << 20, found


@pytest.mark.emulated_gpu(memory=ARENA_MIB << 20)
def test_a_variable_larger_than_a_gpu_is_restored(on_gpus, tmp_path) -> None:
    folder = str(tmp_path)

    def program(gpus):
        return {**table_restored(folder, "GPU:0"), "races": gpus.report().splitlines()}

    found = on_gpus(program)
    assert found["same"] and max(found["peaks"]) < 5 << 20 and found["races"] == [], found


@pytest.mark.emulated_gpu(memory=ARENA_MIB << 20, count=2)
def test_the_variables_of_two_replicas_are_restored(on_gpus, tmp_path) -> None:
    folder = str(tmp_path)

    def program(gpus):
        with tf.distribute.MirroredStrategy().scope():
            found = restored("checkpoint", folder, "GPU:1", train=False)
        return {**found, "races": gpus.report().splitlines()}

    found = on_gpus(program)
    assert found["same"] and found["races"] == []
    assert found["peak"] <= FEW_BYTES


@pytest.mark.slow
def test_callbacks_of_fit_in_a_scope_restore_a_model_larger_than_the_arena(tmp_path) -> None:
    folder = str(tmp_path)

    def fitted(capped):
        with tfswap.scope():
            net = Net(1)
        if capped:
            tfswap.keras.optimize(net.model, memory_limit=(ARENA_MIB << 20) - (1 << 19), tactics=TACTICS)
        x = tf.random.stateless_normal([64, WIDTH], (1, 2))
        callbacks = [
            tf.keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e9, restore_best_weights=True),
            tf.keras.callbacks.BackupAndRestore(f"{folder}/{capped}"),
        ]
        with tfswap.scope():
            history = net.model.fit(x, x, batch_size=16, epochs=5, shuffle=False, verbose=0, callbacks=callbacks)
        return [history.history["loss"], net.digest()]

    def program():
        return fitted(True)

    def plain():
        return fitted(False)

    found = on_arena(program, ARENA_MIB)
    assert len(found[0]) < 5
    assert found == on_arena(plain)
