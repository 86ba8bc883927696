"""Variables and optimizer slots at home in host memory: limits below their bytes are kept, with the same values."""

from __future__ import annotations

import gc
import hashlib
import threading

import pytest
import tensorflow as tf
from gpu_compare import draws, relu_loss, run, weights
from processes import on_arena
from slow import slow
from step_peaks import measuring

import tfswap
from tfswap import ops
from tfswap.exporters.function import memory_optimizer_off as reference
from tfswap.ir.permits import TACTICS, TENSOR_TACTICS

WIDTH, LAYERS, ROWS = 384, 6, 32


class Net:
    """Dense layers, trained by Keras' Adam, or by updates in place."""

    @tfswap.scope()
    def __init__(self, optimizer="adam"):
        tf.keras.utils.set_random_seed(1)
        dense = [tf.keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS)]
        self.model = tf.keras.Sequential([tf.keras.Input((WIDTH,)), *dense, tf.keras.layers.Dense(4)])
        self.slots = []
        if optimizer == "in place":
            self.slots = [tf.Variable(tf.zeros_like(v)) for v in self.model.trainable_variables]
            self.optimizer = None
        else:
            self.optimizer = tf.keras.optimizers.get(optimizer)
            self.optimizer.build(self.model.trainable_variables)
            self.slots = self.optimizer.variables
        self.x = tf.random.stateless_normal([ROWS, WIDTH], (1, 2))

    def train(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(x, training=True)))
        weights = self.model.trainable_variables
        gradients = tape.gradient(loss, weights)
        if self.optimizer is not None:
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        else:
            for weight, slot, gradient in zip(weights, self.slots, gradients, strict=True):
                slot.assign_add(0.5 * gradient)
                weight.value.assign_sub(0.1 * slot)
        return loss

    def between(self, how, folder, held):
        """Read, assign, or save and restore variables between two steps."""
        if how == "held":
            held[:] = [v.value.numpy() for v in self.model.trainable_variables]
        elif how == "assigned":
            for v in self.model.trainable_variables:
                v.assign(v * 0.99)
        elif how == "restored":
            checkpoint = tf.train.Checkpoint(model=self.model, slots=self.slots)
            checkpoint.restore(checkpoint.write(folder + "/saved"))

    @property
    def state(self):
        return [*self.model.variables, *self.slots]

    def digest(self):
        return hashlib.sha256(b"".join(v.numpy().tobytes() for v in self.state)).hexdigest()

    @property
    def state_bytes(self):
        return sum(v.numpy().nbytes for v in self.state)


def trained(optimizer="adam", share=None, how="untouched", folder="", steps=5):
    """A net's losses and values after some steps, without a limit, or under a share of its state's bytes."""
    net = Net(optimizer)
    step, limit = tf.function(net.train), None
    if share is not None:
        limit = int(share * net.state_bytes)
        step = tfswap.optimize(step, memory_limit=limit, tactics=TACTICS)
    losses, peaks, planned, held = [], [], [], []
    for call in range(steps):
        if call:
            net.between(how if call % 2 else "untouched", folder, held)
        with (
            reference() if share is None else measuring(peaks)
        ):  # where others have put variables in the arena, these count too
            losses.append(float(step(net.x)))
        planned.append(share and step.report().planned_peak_bytes)
    found = {"result": [losses, net.digest()], "limit": limit, "state": net.state_bytes, "peaks": peaks[::2]}
    if share is not None:
        report = step.report()
        found |= {"planned": planned[::2], "home": len(step.plan().at_home), "floor": report.floor_bytes}
        ops.reset_stats()
        step(net.x)
        own, all_copies = step.stats(), ops.stats()
        found["moved"] = [[counted.in_bytes, counted.out_bytes] for counted in (own, all_copies)]
    return found


def check(found, plain):
    assert found["home"]
    assert found["result"] == plain["result"]
    assert max(found["peaks"]) <= found["limit"] < found["state"]
    assert all(peak <= planned for peak, planned in zip(found["peaks"], found["planned"], strict=True)), found
    assert found["moved"][0] == found["moved"][1] and min(found["moved"][0]) > 0


@pytest.mark.parametrize(
    ("optimizer", "share"), [("adam", 0.3), ("in place", 0.45), ("sgd", 0.8), *slow(("adam", 0.6), ("rmsprop", 0.4))]
)
def test_a_limit_below_the_bytes_of_the_state_is_kept(optimizer: str, share: float) -> None:
    def program():
        return trained(optimizer, share)

    def plain():
        return trained(optimizer)

    found = on_arena(program)
    check(found, on_arena(plain))
    assert found["floor"] < found["limit"]


def test_another_thread_reads_old_values_or_new_ones() -> None:
    """A reader would see a part of a value, or an older one, in a buffer that is being filled."""

    def program():
        with tfswap.scope():
            counters = [tf.Variable(tf.zeros([2048, 1024])) for _ in range(6)]

        def count():
            for counter in counters:
                counter.assign(counter + 1.0)

        step = tfswap.optimize(tf.function(count), memory_limit="28MiB", tactics=TACTICS)
        step()
        read, wrong, done = 0, 0, threading.Event()

        def reading():
            nonlocal read, wrong
            last = [0.0] * 6
            while not done.is_set():
                values = counters[read % 6].numpy().copy()
                wrong += int(values.min() != values.max() or values[0, 0] < last[read % 6])
                last[read % 6] = values[0, 0]
                read += 1

        reader = threading.Thread(target=reading)
        reader.start()
        for _ in range(200):
            step()
        done.set()
        reader.join()
        return {"home": step.report().at_home_bytes, "read": read, "wrong": wrong}

    found = on_arena(program)
    assert found["home"] >= 20 << 20 and found["read"] > 20 and not found["wrong"]


def test_without_the_tactic_such_a_limit_is_refused() -> None:
    def program():
        net = Net()
        step = tfswap.optimize(tf.function(net.train), memory_limit=net.state_bytes // 2, tactics=TENSOR_TACTICS)
        try:
            step(net.x)
        except tfswap.InfeasibleMemoryLimit as error:
            return error.floor_bytes > net.state_bytes
        return None

    assert on_arena(program)


@pytest.mark.slow
def test_a_limit_below_the_floor_is_refused_with_the_bytes_that_stay() -> None:
    def program():
        net = Net()
        step = tfswap.optimize(tf.function(net.train), memory_limit="512KiB", tactics=TACTICS)
        try:
            step(net.x)
        except tfswap.InfeasibleMemoryLimit as error:
            floor, text = error.floor_bytes, str(error)
        before = net.digest()
        again = tfswap.optimize(tf.function(net.train), memory_limit=floor, tactics=TACTICS)
        again(net.x)
        return {"floor": floor, "state": net.state_bytes, "text": text, "trained": before != net.digest()}

    found = on_arena(program)
    assert found["floor"] < found["state"] / 4
    assert found["trained"]


@pytest.mark.parametrize("how", ["held", "assigned", "restored"])
def test_state_that_is_accessed_between_steps_is_at_home_in_the_next(how: str, tmp_path) -> None:
    folder = str(tmp_path)

    def program():
        return trained(share=0.5, how=how, folder=folder)

    def plain():
        return trained(how=how, folder=folder)

    check(on_arena(program), on_arena(plain))


def test_a_higher_limit_brings_variables_back() -> None:
    def program():
        net = Net()
        step = tfswap.optimize(tf.function(net.train), memory_limit=net.state_bytes // 2, tactics=TACTICS)
        losses = [float(step(net.x)) for _ in range(2)]
        few = len(step.plan().at_home)
        step.memory_limit = 4 * net.state_bytes
        peaks = []
        for _ in range(2):
            with measuring(peaks):
                losses.append(float(step(net.x)))
        there = min(peaks) > net.state_bytes
        return {"result": [losses, net.digest()], "before": few, "after": len(step.plan().at_home), "there": there}

    found = on_arena(program)
    assert found["result"] == on_arena(lambda: trained(steps=4))["result"]
    assert found["before"] and not found["after"] and found["there"]


def test_two_functions_share_variables() -> None:
    """One has them at home, and the other in the arena: each keeps its own limit."""

    def program():
        net = Net()
        limit = net.state_bytes // 2
        step = tfswap.optimize(tf.function(net.train), memory_limit=limit, tactics=TACTICS)
        predict = tfswap.optimize(
            tf.function(lambda x: tf.reduce_sum(net.model(x))), memory_limit=2 * net.state_bytes, tactics=TACTICS
        )
        peaks, found = [], []
        for _ in range(3):
            step(net.x)
            found.append(float(predict(net.x)))
            with measuring(peaks):
                step(net.x)
        return {"kept": max(peaks) <= limit, "found": [*found, net.digest()]}

    def plain():
        net = Net()
        step, predict, found = tf.function(net.train), tf.function(lambda x: tf.reduce_sum(net.model(x))), []
        with reference():
            for _ in range(3):
                step(net.x)
                found.append(float(predict(net.x)))
                step(net.x)
        return [*found, net.digest()]

    assert on_arena(program) == {"kept": True, "found": on_arena(plain)}


class Updates:
    """Eight weights of 256 KiB with slots."""

    @tfswap.scope()
    def __init__(self):
        self.weights, self.slots = weights(*[[256, 256]] * 8), weights(*[[256, 256]] * 8)

    def train(self, x):
        with tf.GradientTape() as tape:
            loss = relu_loss(self.weights, x)
        gradients = tape.gradient(loss, self.weights)
        for weight, slot, gradient in zip(self.weights, self.slots, gradients, strict=True):
            slot.assign(0.9 * slot + gradient)
            weight.assign_sub(0.1 * slot)
        return loss

    @property
    def state(self):
        return [*self.weights, *self.slots]


def on_a_gpu(gpus):
    tf.config.experimental.enable_op_determinism()
    inputs = tf.constant(draws(64, 256))
    plain = Updates()
    expected, _ = run(tf.function(plain.train), [inputs], plain.state, steps=4)
    del plain
    gc.collect()
    net = Updates()
    state_bytes = sum(v.numpy().nbytes for v in net.state)
    step = tfswap.optimize(tf.function(net.train), memory_limit=int(0.3 * state_bytes), tactics=TACTICS)
    first, _ = run(step, [inputs], [], steps=1)
    rest, peak = run(step, [inputs], net.state, steps=3)
    plan = step.plan()
    return {
        "same": [*first, *rest] == expected,
        "peak": peak,
        "planned": step.report().planned_peak_bytes,
        "kept": peak <= plan.limit_bytes < state_bytes,
        "home": len(plan.at_home),
        "races": gpus.report().splitlines(),
    }


@pytest.mark.emulated_gpu(memory=64 << 20)
def test_state_at_home_on_a_gpu(on_gpus) -> None:
    found = on_gpus(on_a_gpu)
    assert found["races"] == []
    assert found["home"] and found["same"] and found["kept"]
    assert found["peak"] == found["planned"]


def fused(op, variable, slots, gradient):
    """Update a variable by one of TensorFlow's fused kernels."""
    raw, handles = tf.raw_ops, [slot.handle for slot in slots]
    if op == "ResourceApplyAdam":
        rates = {"beta1_power": 0.9, "beta2_power": 0.9, "lr": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-7}
        raw.ResourceApplyAdam(var=variable.handle, m=handles[0], v=handles[1], grad=gradient, **rates)
    elif op == "ResourceApplyMomentum":
        raw.ResourceApplyMomentum(var=variable.handle, accum=handles[0], lr=0.1, grad=gradient, momentum=0.9)
    elif op == "ResourceApplyGradientDescent":
        raw.ResourceApplyGradientDescent(var=variable.handle, alpha=0.1, delta=gradient)


class Fused:
    """Eight weights, trained by a fused optimizer."""

    @tfswap.scope()
    def __init__(self, op, slots):
        self.op, self.weights = op, weights(*[[256, 256]] * 8)
        self.slots = [weights(*[[256, 256]] * slots) for _ in self.weights]
        self.state = [*self.weights, *(slot for slots in self.slots for slot in slots)]
        for slot in self.state[len(self.weights) :]:
            slot.assign(tf.zeros_like(slot))

    def train(self, x):
        with tf.GradientTape() as tape:
            loss = relu_loss(self.weights, x)
        for weight, slots, gradient in zip(self.weights, self.slots, tape.gradient(loss, self.weights), strict=True):
            fused(self.op, weight, slots, gradient)
        return loss


class Table:
    """An embedding table and dense layers. The optimizer updates the rows that a batch has, or all."""

    @tfswap.scope()
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.table = tf.Variable(tf.random.stateless_normal([20000, 32], (3, 1)))
        self.weights = weights(*[[128, 128]] * 3)
        if optimizer == "keras":
            self.keras = tf.keras.optimizers.Adam()
            self.keras.build([self.table, *self.weights])
            self.state = [self.table, *self.weights, *self.keras.variables]
            return
        slotted = self.weights if optimizer == "scatter" else [*self.weights, self.table]
        self.slots = [tf.Variable(tf.zeros_like(v)) for v in slotted]
        self.state = [self.table, *self.weights, *self.slots]

    def train(self, ids):
        with tf.GradientTape() as tape:
            x = tf.reshape(tf.gather(self.table, ids), [-1, 128])
            loss = relu_loss(self.weights, x)
        gradients = tape.gradient(loss, [self.table, *self.weights])
        if self.optimizer == "keras":
            self.keras.apply_gradients(zip(gradients, [self.table, *self.weights], strict=True))
            return loss
        rows = {"grad": gradients[0].values, "indices": gradients[0].indices}
        if self.optimizer == "sparse momentum":
            tf.raw_ops.ResourceSparseApplyMomentum(
                var=self.table.handle, accum=self.slots[-1].handle, lr=0.1, momentum=0.9, **rows
            )
        else:
            self.table.scatter_sub(tf.IndexedSlices(0.1 * gradients[0].values, gradients[0].indices))
        for weight, slot, gradient in zip(self.weights, self.slots[:3], gradients[1:], strict=True):
            fused("ResourceApplyMomentum", weight, [slot], gradient)
        return loss


class Loops:
    """Twenty-four weights, four of them read by a loop; or all of them trained by a loop inside of the step."""

    @tfswap.scope()
    def __init__(self, steps):
        self.steps = steps
        self.weights, self.slots = weights(*[[256, 256]] * 24), weights(*[[256, 256]] * 24)
        self.state = [*self.weights, *self.slots]

    def step(self, x):
        def body(i, h):
            for weight in self.weights[:4]:
                h = tf.nn.tanh(h @ weight)
            return i + 1, h

        with tf.GradientTape() as tape:
            for weight in self.weights[4:]:
                x = tf.nn.tanh(x @ weight)
            if self.steps == 1:
                _, x = tf.while_loop(lambda i, h: i < 3, body, (0, x))
            else:
                _, x = body(0, x)
            loss = tf.reduce_mean(tf.square(x))
        for weight, slot, gradient in zip(self.weights, self.slots, tape.gradient(loss, self.weights), strict=True):
            slot.assign(0.9 * slot + gradient)
            weight.assign_sub(0.1 * slot)
        return loss

    def train(self, x):
        if self.steps == 1:
            return self.step(x)
        loop = tf.while_loop(lambda i, _: i < self.steps, lambda i, _: (i + 1, self.step(x)), (0, tf.constant(0.0)))
        return loop[1]


def results(net, x, share=None, steps=4, device="CPU:0"):
    """Losses and final values, and where `share` is of the state's bytes, whether the limit was kept with all at home.

    Between the steps another function reads the variables, and an array holds the buffer of the first.
    """
    state_bytes = sum(v.numpy().nbytes for v in net.state)
    step, read = tf.function(net.train), tf.function(lambda: tf.reduce_sum(tf.gather(net.weights[0], [1, 2])))
    limit = None if share is None else int(share * state_bytes)
    if limit is not None:
        step = tfswap.optimize(step, memory_limit=limit, tactics=TACTICS)
    losses, peaks = [], []
    for call in range(steps):
        with reference() if limit is None else measuring(peaks, device):
            losses.append(float(step(x)))
        held = net.weights[0].numpy() if call == 1 else None
        read()
    del held
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in net.state)).hexdigest()
    if limit is None:
        return {"result": [losses, digest]}
    report = step.report()
    return {
        "result": [losses, digest],
        "kept": max(peaks) <= report.planned_peak_bytes <= limit,
        "home": report.at_home_bytes / state_bytes,
        "figures": [peaks, report.planned_peak_bytes, limit],
    }


IN_PLACE = {
    "adam": (lambda: (Fused("ResourceApplyAdam", 2), tf.constant(draws(32, 256))), 0.3, 0.8),
    "momentum": (lambda: (Fused("ResourceApplyMomentum", 1), tf.constant(draws(32, 256))), 0.4, 0.7),
    "descent": (lambda: (Fused("ResourceApplyGradientDescent", 0), tf.constant(draws(32, 256))), 0.8, 0.2),
    "table": (lambda: (Table("keras"), tf.constant([[7, 5, 7, 19999]] * 16)), 0.7, 0.9),
    "rows": (lambda: (Table("sparse momentum"), tf.constant([[7, 5, 7, 19999]] * 16)), 0.3, 0.9),
    "scatter": (lambda: (Table("scatter"), tf.constant([[7, 5, 7, 19999]] * 16)), 0.6, 0.4),
    "loop": (lambda: (Loops(1), tf.constant(draws(32, 256))), 0.4, 0.7),
    "steps": (lambda: (Loops(3), tf.constant(draws(32, 256))), 0.6, 0.5),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_kernels_that_work_in_a_variables_buffer(name: str) -> None:
    made, share, least = IN_PLACE[name]

    def program():
        return results(*made(), share)

    def plain():
        return results(*made())

    found = on_arena(program)
    assert found["result"] == on_arena(plain)["result"]
    assert found["kept"] and found["home"] >= least, found


@pytest.mark.emulated_gpu(memory=128 << 20)
@pytest.mark.parametrize("name", ["adam", "scatter", "loop", "steps"])
def test_kernels_that_work_in_a_variables_buffer_on_a_gpu(name: str, on_gpus) -> None:
    made, share, least = IN_PLACE[name]

    def program(gpus):
        tf.config.experimental.enable_op_determinism()
        return {**results(*made(), share, device="GPU:0"), "races": gpus.report().splitlines()}

    def plain():
        tf.config.experimental.enable_op_determinism()
        return results(*made(), device="GPU:0")

    found = on_gpus(program)
    assert found["result"] == on_gpus(plain)["result"]
    assert found["kept"] and found["home"] >= least and found["races"] == [], found
