"""Runs of optimized steps: calls, failures, several threads, other tensors in the arena."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from processes import last_json, on_arena, run_forked

tf = pytest.importorskip("tensorflow")

from nets import LIMIT, Net, batch, bits, called, pool_in_use, unoptimised  # noqa: E402

import tfswap  # noqa: E402 needs TensorFlow to be worth it

pytestmark = pytest.mark.usefixtures("nothing_left_in_the_pool")

# --- what a call does ---------------------------------------------------------------------------------------


def counted():
    import sys

    import tensorflow as tf
    from nets import Net, batch

    import tfswap

    def work(step):
        """Functions that a call of it calls, in Python and from there: each takes time, and more where it is cold."""
        x = batch()
        for _ in range(3):
            step(x)
        calls = []
        sys.setprofile(lambda frame, event, arg: event in ("call", "c_call") and calls.append(event))
        step(x)
        sys.setprofile(None)
        return len(calls)

    counts = [work(tf.function(Net().step).get_concrete_function(batch()))]
    for limit in ("75%", "300%"):
        step = tfswap.optimize(tf.function(Net().step), memory_limit=limit)
        counts.append(work(step))
        assert step.plan().changes_nothing == (limit == "300%")
    return counts


@pytest.mark.parametrize("arena", [True, False])
def test_a_call_does_less_than_a_concrete_function_s(arena):
    concrete, rewritten, left_alone = on_arena(counted) if arena else last_json(run_forked(counted))
    assert rewritten < concrete / 3
    assert left_alone < concrete


# --- failure ----------------------------------------------------------------------------------------------


def test_a_step_that_fails_leaves_no_host_memory_and_can_run_again():
    net, twin = Net(), Net()

    def body(net):
        def step(x, fail):
            with tf.GradientTape() as tape:
                loss = net.loss(x)
                with tf.control_dependencies([tf.debugging.assert_equal(fail, False, "made to fail")]):
                    loss = tf.identity(loss)
            for weight, gradient in zip(net.weights, tape.gradient(loss, net.weights), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        return step

    step = tfswap.optimize(tf.function(body(net)), memory_limit=LIMIT)
    reference = tf.function(body(twin))
    yes, no = tf.constant(True), tf.constant(False)
    for fail in (no, yes, no, yes, no):
        if fail:
            before = bits(net.weights)
            with pytest.raises(tf.errors.InvalidArgumentError, match="made to fail"):
                step(batch(), fail)
            assert bits(net.weights) == before
            assert pool_in_use() == 0
        else:
            assert bits(step(batch(), fail)) == bits(unoptimised(reference, batch(), fail))
    assert step.plan().evictions
    assert bits(net.weights) == bits(twin.weights)


def test_a_step_that_fails_names_the_line_that_the_node_is_from():
    net = Net()

    def step(x, rows):
        return net.step(x) + tf.reduce_mean(tf.gather(x, rows))  # this gather is named

    traced = tf.function(step)
    optimized = tfswap.optimize(traced, memory_limit=LIMIT)

    @tf.function
    def nested(x, rows):
        return optimized(x, rows)

    (line,) = (
        i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("gather is named")
    )
    for function in (traced, optimized, optimized.get_concrete_function(batch(), tf.constant([0])), nested):
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf'{__file__}", line {line}, in step'):
            function(batch(), tf.constant([5000]))


def test_an_error_while_tracing_is_the_user_s_own():
    def body(x):
        raise ValueError("of the user")

    step = tfswap.optimize(tf.function(body), memory_limit=LIMIT)
    with pytest.raises(ValueError, match="of the user"):
        step(batch())


def test_a_wrong_argument_is_tensorflow_s_own_error():
    step = tfswap.optimize(tf.function(Net().step), memory_limit=LIMIT)
    with pytest.raises(TypeError):
        step(batch(), no_such_argument=1)


def test_concurrent_threads():
    """Each thread's result is that of its own argument; the function is planned once."""
    net = Net()
    forward = tfswap.optimize(tf.function(lambda x: tf.reduce_sum(tf.sin(net.loss(x)) + x * 0.0)), memory_limit="100%")
    reference = tf.function(lambda x: tf.reduce_sum(tf.sin(net.loss(x)) + x * 0.0))
    expected = [bits(unoptimised(reference, batch(seed=s))) for s in range(4)]
    results: dict[int, list] = {}
    plans = []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        start.wait()
        found = [bits(forward(batch(seed=seed))) for _ in range(5)]
        results[seed] = found
        plans.append(forward.plan())

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {s: [expected[s]] * 5 for s in range(4)}
    assert len(set(map(id, plans))) == 1


def test_threads_that_train_take_turns():
    """Whatever the order of the threads, the steps are the same ones, each done once."""
    net, twin = Net(), Net()
    step, reference = called(net), tf.function(twin.step)
    expected = [bits(unoptimised(reference, batch())) for _ in range(12)]
    losses = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(3):
            losses.append(bits(step(batch())))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(losses) == sorted(expected)
    assert bits(net.weights) == bits(twin.weights)


# --- on an arena with a cap ---------------------------------------------------------------------------------

WIDTH = 256


def capped(program, mib: int = 512):
    """The result of `program` in an arena of `mib` MiB that is one free region."""

    def settled():
        slab = tf.raw_ops.Empty(shape=[(mib - 2) << 20], dtype=tf.uint8)
        del slab
        tf.config.experimental.reset_memory_stats("CPU:0")
        return program()

    return on_arena(settled, mib)


def test_without_a_limit_the_allocator_s_own_counts():
    """It can't be met unoptimised: the step needs 150 MiB of 128."""

    def program():
        net = Net(8, width=WIDTH)
        step = tfswap.optimize(tf.function(net.step))
        x = tf.random.stateless_normal([9 << 10, WIDTH], seed=(1, 1))
        losses = [float(step(x)) for _ in range(3)]
        return [
            step.plan().limit_bytes,
            step.report().baseline_peak_bytes,
            losses,
            tf.config.experimental.get_memory_info("CPU:0")["peak"],
        ]

    found = capped(
        program,
        128,
    )
    limit, baseline, losses, peak = found
    assert limit == 128 << 20 < baseline
    assert peak <= limit
    assert losses[0] > losses[1] > losses[2]


def test_what_comes_into_the_arena_later_is_planned_around():
    def program():
        net = Net(8, width=WIDTH)
        x = tf.random.stateless_normal([2 << 10, WIDTH], seed=(1, 1))
        try:
            tfswap.optimize(tf.function(net.step), memory_limit="1MiB")(x)
        except tfswap.InfeasibleMemoryLimit as error:
            limit = error.floor_bytes + (5 << 20)
        step = tfswap.optimize(tf.function(net.step), memory_limit=limit, on_exceeded="raise")
        step(x)
        first = step.plan()
        _more = tf.zeros([2 << 20], tf.uint8)
        tf.config.experimental.reset_memory_stats("CPU:0")
        for _ in range(3):
            step(x)
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        return [limit, peak, len(first.evictions), len(step.plan().evictions)]

    found = capped(program)
    limit, peak, before, after = found
    assert peak <= limit
    assert 0 < before < after


def test_threads_on_one_arena_keep_the_limit_and_one_plan():
    def program():
        net = Net(8, width=WIDTH)
        x = tf.random.stateless_normal([2 << 10, WIDTH], seed=(1, 1))
        step = tfswap.optimize(tf.function(net.step), memory_limit="70%", on_exceeded="raise")
        losses, plans, start = [], set(), threading.Barrier(4)
        tf.config.experimental.reset_memory_stats("CPU:0")

        def work():
            start.wait()
            for _ in range(3):
                losses.append(float(step(x)))
                plans.add(id(step.plan()))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        return [step.plan().limit_bytes, peak, len(plans), losses]

    limit, peak, plans, losses = capped(program)
    assert peak <= limit
    assert plans == 1
    assert len(set(losses)) == len(losses) == 12


def test_a_step_that_was_left_as_it_is_is_planned_when_it_passes_its_limit_after_all():
    def program():
        net = Net(8, width=WIDTH)
        records = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("tfswap").addHandler(handler)
        extra, held = 0, []

        def more(a):
            held.append(tf.zeros([extra], tf.uint8))  # what no plan can know of
            return a

        def step(x):
            return net.step(tf.ensure_shape(tf.numpy_function(more, [x], tf.float32), x.shape))

        x = tf.random.stateless_normal([2 << 10, WIDTH], seed=(1, 1))
        step = tfswap.optimize(tf.function(step), memory_limit="130%")
        step(x)
        first = step.plan()
        tf.config.experimental.reset_memory_stats("CPU:0")
        extra = step.report().baseline_peak_bytes * 6 // 10
        step(x)
        reported, extra = list(records), 0
        held.clear()
        step(x)
        return [first.changes_nothing, step.plan().changes_nothing, reported]

    before, after, reported = capped(program)
    assert before
    assert not after
    assert any("over its limit" in message for message in reported)


def test_a_rewritten_concrete_function_can_be_a_signature(tmp_path):
    """Then the file needs tfswap.ops."""

    def program():
        net = Net(8, width=WIDTH)
        module = tf.Module()
        module.weights = net.weights
        step = tfswap.optimize(tf.function(lambda x: {"loss": net.step(x)}), memory_limit="70%", tactics=["swap"])
        x = tf.ones([2 << 10, WIDTH])
        step(x)
        concrete = step.get_concrete_function(x)
        tf.saved_model.save(module, str(tmp_path / "model"), signatures=concrete)
        losses = [float(step(x)["loss"])]
        assert step.plan().evictions
        return losses

    losses = capped(program)

    def another_program():
        loaded = tf.saved_model.load(str(tmp_path / "model"))
        before = tfswap.ops.stats().out_copies
        losses = [float(loaded.signatures["serving_default"](tf.ones([2 << 10, WIDTH]))["loss"])]
        assert tfswap.ops.stats().out_copies > before
        return losses

    loaded = capped(another_program)
    assert loaded == losses
