"""Updates of variables at home on the host in slices: limits below what whole updates hold are kept, with the same
values.
"""

from __future__ import annotations

import contextlib
import hashlib

import numpy as np
import pytest
import tensorflow as tf
from keras_net import KerasNet
from processes import on_arena
from step_peaks import measuring

import tfswap
import tfswap.ops as ops
from tfswap.exporters.function import memory_optimizer_off
from tfswap.ir.permits import TACTICS
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.products import same_in_columns, same_in_rows

SHARED = 560
ROWS, WIDTH = 20_003, 24
"""Of the table. Slices have a multiple of eight rows, and the last one has some elements that are no whole packet."""


class Table(KerasNet):
    """An embedding table, whose gradient has some rows several times, and a dense layer."""

    @tfswap.scope()
    def __init__(self, optimizer):
        tf.keras.utils.set_random_seed(1)
        self.table = tf.keras.layers.Embedding(ROWS, WIDTH)
        self.model = tf.keras.Sequential([self.table, tf.keras.layers.Flatten(), tf.keras.layers.Dense(3)])
        self.x = tf.constant([[7, 5, 7, 0], [ROWS - 1, 4096, 5, 7]] * 8)
        self.model(self.x)
        self.optimizer = optimizer()
        self.optimizer.build(self.model.trainable_variables)


class Layer(Table):
    """One wide layer, whose gradient is a matrix product."""

    @tfswap.scope()
    def __init__(self, optimizer):
        tf.keras.utils.set_random_seed(1)
        dense = tf.keras.layers.Dense(701, "relu")
        self.model = tf.keras.Sequential([tf.keras.Input((403,)), dense, tf.keras.layers.Dense(3)])
        self.x = tf.random.stateless_normal([16, 403], (1, 2))
        self.optimizer = optimizer()
        self.optimizer.build(self.model.trainable_variables)


class Deep(Table):
    """Several wide layers, whose gradients are larger together than the limit."""

    @tfswap.scope()
    def __init__(self, optimizer):
        tf.keras.utils.set_random_seed(1)
        layers = [tf.keras.layers.Dense(units, "relu") for units in (701, 403, 701, 3)]
        self.model = tf.keras.Sequential([tf.keras.Input((403,)), *layers])
        self.x = tf.random.stateless_normal([16, 403], (1, 2))
        self.optimizer = optimizer()
        self.optimizer.build(self.model.trainable_variables)


class Inner(Table):
    """A large layer that is not the first, so that the gradient of its input reads its weight."""

    @tfswap.scope()
    def __init__(self, optimizer):
        tf.keras.utils.set_random_seed(1)
        layers = [tf.keras.layers.Dense(units, "relu") for units in (2048, 256, 3)]
        self.model = tf.keras.Sequential([tf.keras.Input((8,)), *layers])
        self.x = tf.random.stateless_normal([16, 8], (1, 2))
        self.optimizer = optimizer()
        self.optimizer.build(self.model.trainable_variables)


class Shared(Table):
    """One wide layer that is used twice, so that its gradient is a sum of two products."""

    @tfswap.scope()
    def __init__(self, optimizer):
        tf.keras.utils.set_random_seed(1)
        inputs, dense = tf.keras.Input((SHARED,)), tf.keras.layers.Dense(SHARED, "relu")
        self.model = tf.keras.Model(inputs, tf.keras.layers.Dense(3)(dense(dense(inputs))))
        self.x = tf.random.stateless_normal([16, SHARED], (1, 2))
        self.optimizer = optimizer()
        self.optimizer.build(self.model.trainable_variables)


class Gathered:
    """A table whose rows `tf.gather` reads by its handle, with a slot."""

    @tfswap.scope()
    def __init__(self):
        self.state = [
            tf.Variable(tf.random.stateless_normal([ROWS, WIDTH], (1, 2))),
            tf.Variable(tf.zeros([ROWS, WIDTH])),
        ]
        self.x = tf.constant([[7, 5, 7, ROWS - 1]] * 8)

    def train(self, x):
        table, slot = self.state
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.gather(table, x)))
        slot.assign(0.9 * slot + tape.gradient(loss, table))
        table.assign_sub(0.1 * slot)
        return loss


KERAS = tf.keras.optimizers
OPTIMIZERS = {
    "adam": lambda: KERAS.Adam(0.01),
    "amsgrad": lambda: KERAS.Adam(0.01, amsgrad=True),
    "adamw": lambda: KERAS.AdamW(0.01, clipvalue=0.5),
    "adamax": lambda: KERAS.Adamax(0.01),
    "nadam": lambda: KERAS.Nadam(0.01),
    "momentum": lambda: KERAS.SGD(0.01, momentum=0.9, nesterov=True),
    "lion": lambda: KERAS.Lion(0.01),
    "averages": lambda: KERAS.Adam(0.01, use_ema=True, ema_overwrite_frequency=None),
    "clipped": lambda: KERAS.Adam(0.01, clipnorm=0.1),
    "rmsprop": lambda: KERAS.RMSprop(0.01, centered=True, momentum=0.9),
    "adagrad": lambda: KERAS.Adagrad(0.01),
    "adadelta": lambda: KERAS.Adadelta(0.01),
    "ftrl": lambda: KERAS.Ftrl(0.01),
    "scaled": lambda: KERAS.LossScaleOptimizer(KERAS.Adam(0.01)),
    "accumulated": lambda: KERAS.Adam(0.01, gradient_accumulation_steps=2),
}
"""The last two update in a branch of a conditional."""
TABLES = ("adam", "amsgrad", "adamw", "nadam", "momentum", "averages", "clipped", "ftrl", "scaled")
"""Those of a table. RMSprop, Adagrad and Adadelta divide its gradient in a conditional, which needs it whole."""


def trained_on(devices, net, limit=None, steps=3):
    """Losses and final values; under a limit also each device's peaks, planned one and updates in slices."""
    step = tf.function(net.train)
    if limit is not None:
        step = tfswap.optimize(step, memory_limit=limit, tactics=TACTICS)
    losses, peaks = [], {device: [] for device in devices}
    for _ in range(steps):
        with contextlib.ExitStack() as stack:
            for each in [memory_optimizer_off()] if limit is None else [measuring(peaks[d], d) for d in devices]:
                stack.enter_context(each)
            losses.append(float(step(net.x)))
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in net.state)).hexdigest()
    if limit is None:
        return {"result": [losses, digest]}
    report = step.report()
    parts = [report] if len(devices) == 1 else [report.devices[device] for device in devices]
    sliced = [sum("slices" in row.reason for row in part.variables if row.tactic == "state") for part in parts]
    planned = [part.planned_peak_bytes for part in parts]
    return {"result": [losses, digest], "devices": [*zip(peaks.values(), planned, sliced, strict=True)]}


def trained(net, limit=None, steps=3, device="CPU:0"):
    """The same on one device."""
    found = trained_on([device], net, limit, steps)
    if limit is None:
        return found
    return {**found, **dict(zip(("peaks", "planned", "sliced"), found["devices"][0], strict=True))}


def check(found, plain, limit):
    assert found["result"] == plain["result"]
    assert found["sliced"] >= 2, found
    assert max(found["peaks"]) <= found["planned"] <= limit, found


TABLE_LIMIT, LAYER_LIMIT = ROWS * WIDTH * 4 // 3, int(1.5 * 403 * 701 * 4)
IN_BRANCH = "scaled", "accumulated"


@pytest.mark.parametrize("optimizer", TABLES)
def test_a_table_trains_in_a_fraction_of_its_bytes(optimizer: str) -> None:
    # Whether a sparse gradient is finite is computed as a whole.
    limit = int(0.55 * ROWS * WIDTH * 4) if optimizer in IN_BRANCH else TABLE_LIMIT

    def program():
        return trained(Table(OPTIMIZERS[optimizer]), limit)

    def plain():
        return trained(Table(OPTIMIZERS[optimizer]))

    check(on_arena(program), on_arena(plain), limit)


def test_a_table_that_a_loop_updates() -> None:
    def looped(limit=None):
        net = Table(OPTIMIZERS["adam"])
        with tfswap.scope():
            net.steps = tf.Variable(20)
        one = net.train

        def several(x):
            before = tf.constant(0), tf.constant(0.0)
            return tf.while_loop(lambda i, _: i < net.steps, lambda i, loss: (i + 1, loss + one(x)), before)[1]

        net.train = several
        return trained(net, limit, steps=2)

    check(on_arena(lambda: looped(TABLE_LIMIT)), on_arena(looped), TABLE_LIMIT)


def test_a_table_whose_rows_are_gathered_by_its_handle() -> None:
    def program():
        return trained(Gathered(), TABLE_LIMIT)

    def plain():
        return trained(Gathered())

    check(on_arena(program), on_arena(plain), TABLE_LIMIT)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_layer_trains_in_the_bytes_of_its_weight(optimizer: str) -> None:
    net, limit = (Deep, int(1.15 * LAYER_LIMIT)) if optimizer in IN_BRANCH else (Layer, LAYER_LIMIT)

    def program():
        return trained(net(OPTIMIZERS[optimizer]), limit)

    def plain():
        return trained(net(OPTIMIZERS[optimizer]))

    check(on_arena(program), on_arena(plain), limit)


def test_a_layer_trains_in_less_than_the_bytes_of_its_weight() -> None:
    """Products read the weight in slices too."""
    limit = 2048 * 256 * 4 * 3 // 4

    def program():
        return trained(Inner(OPTIMIZERS["momentum"]), limit)

    def plain():
        return trained(Inner(OPTIMIZERS["momentum"]))

    exact = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_NUM_INTRAOP_THREADS": "2"}
    found = on_arena(program, **exact)
    assert found["result"] == on_arena(plain, **exact)["result"]
    assert found["sliced"] >= 1 and set(found["peaks"]) == {found["planned"]} and found["planned"] <= limit


def test_a_layer_that_is_used_twice_trains_in_the_bytes_of_its_weight() -> None:
    limit = int(1.5 * SHARED * SHARED * 4)
    found = on_arena(lambda: trained(Shared(OPTIMIZERS["adam"]), limit))
    check(found, on_arena(lambda: trained(Shared(OPTIMIZERS["adam"]))), limit)


@pytest.mark.parametrize("threads", [2, 8])
def test_rows_and_columns_of_products_have_the_bits_of_the_whole(threads: int) -> None:
    def program():
        numbers, compared = np.random.default_rng(threads), 0
        caches = {"l1_l2_bytes": ops.l1_l2_bytes(), "l3_cache_bytes": ops.l3_cache_bytes()}
        device = DeviceModel("cpu", intra_op_threads=threads, **caches)
        for _ in range(300):
            depth, rows, columns = (int(2 ** numbers.uniform(*each)) for each in ((0, 9), (5, 11), (3, 10)))
            count = int(numbers.integers(1, rows))
            if same_in_rows(count, rows, columns, depth, device):
                x, dy = (tf.constant(numbers.normal(size=(depth, n)), tf.float32) for n in (rows, columns))
                first = int(numbers.integers(0, rows - count))
                part = tf.matmul(x[:, first : first + count], dy, transpose_a=True)
                whole = tf.matmul(x, dy, transpose_a=True)[first : first + count]
                assert part.numpy().tobytes() == whole.numpy().tobytes(), (depth, rows, columns, first, count)
                compared += 1
            if same_in_columns(count, columns, rows, depth, device):
                x, w = (tf.constant(numbers.normal(size=(n, depth)), tf.float32) for n in (columns, rows))
                first = int(numbers.integers(0, rows - count))
                part = tf.matmul(x, w[first : first + count], transpose_b=True)
                whole = tf.matmul(x, w, transpose_b=True)[:, first : first + count]
                assert part.numpy().tobytes() == whole.numpy().tobytes(), (depth, rows, columns, first, count)
                compared += 1
        return compared

    assert on_arena(program, TF_ENABLE_ONEDNN_OPTS="0", TF_NUM_INTRAOP_THREADS=str(threads)) > 10


def test_slices_are_as_large_as_the_limit_permits() -> None:
    def program():
        found = []
        for share in (4, 1.5, 0.2):
            net = Table(OPTIMIZERS["adam"])
            step = tfswap.optimize(tf.function(net.train), memory_limit=int(share * 4 * ROWS * WIDTH), tactics=TACTICS)
            step(net.x)
            report = step.report()
            found.append([step.plan().slice_bytes, report.floor_bytes < 0.15 * 4 * ROWS * WIDTH])
        return found

    whole, large, small = on_arena(program)
    assert whole == [0, True]
    assert large[0] > small[0] > 0


@pytest.mark.slow
def test_host_memory_has_room_for_new_values() -> None:
    """Until the last slice there are the old values and the new ones."""

    def program(mib):
        step = tfswap.optimize(
            tf.function((net := Table(OPTIMIZERS["adam"])).train),
            memory_limit=TABLE_LIMIT,
            tactics=TACTICS,
            host_memory_limit=f"{mib}MiB",
        )
        try:
            losses = [float(step(net.x))]
        except tfswap.InfeasibleMemoryLimit as error:
            return str(error)
        ops.reset_stats()
        losses.append(float(step(net.x)))
        report = step.report()
        return [ops.stats().pool_peak_bytes == report.at_home_bytes + report.host_bytes, len(losses)]

    assert "with at most 10.0 MiB of host memory" in on_arena(lambda: program(10))
    assert on_arena(lambda: program(12)) == [True, 2]


@pytest.mark.emulated_gpu(memory=128 << 20)
@pytest.mark.parametrize(("net", "limit"), [(Table, TABLE_LIMIT), (Layer, LAYER_LIMIT)])
def test_slices_on_a_gpu(net, limit: int, on_gpus) -> None:
    def program(gpus):
        tf.config.experimental.enable_op_determinism()
        return {**trained(net(OPTIMIZERS["adam"]), limit, device="GPU:0"), "races": gpus.report().splitlines()}

    def plain():
        tf.config.experimental.enable_op_determinism()
        return trained(net(OPTIMIZERS["adam"]), device="GPU:0")

    found = on_gpus(program)
    check(found, on_gpus(plain), limit)
    assert found["races"] == []


@pytest.mark.emulated_gpu(memory=64 << 20, count=2)
def test_slices_of_two_replicas(on_gpus) -> None:
    """Each replica adds up the rows of both gradients, slice by slice."""

    def replicas(limit=None):
        tf.config.experimental.enable_op_determinism()
        apart = tf.distribute.HierarchicalCopyAllReduce(num_packs=0)
        strategy = tf.distribute.MirroredStrategy(cross_device_ops=apart)
        with strategy.scope():
            net = Table(OPTIMIZERS["adam"])
        one = net.train
        net.train = lambda x: strategy.reduce("SUM", strategy.run(one, args=(x,)), axis=None)
        return trained_on(["GPU:0", "GPU:1"], net, limit)

    def program(gpus):
        return {**replicas(TABLE_LIMIT), "races": gpus.report().splitlines()}

    def plain():
        return replicas()

    found = on_gpus(program)
    assert found["races"] == [] and found["result"] == on_gpus(plain)["result"]
    for peaks, planned, sliced in found["devices"]:
        assert max(peaks) <= planned <= TABLE_LIMIT and sliced >= 2, found
