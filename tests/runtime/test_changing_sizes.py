"""Batches of many sizes: few plans, none made twice, the right values, each within the limit."""

from __future__ import annotations

import math
import random

import pytest
from processes import on_arena
from step_peaks import measuring

tf = pytest.importorskip("tensorflow")

from nets import WIDTH, Net, as_traced, batch, bits, unoptimised  # noqa: E402

import tfswap  # noqa: E402 needs TensorFlow to be worth it
from tfswap.ir.custom_ops import DRAWS, OWN_KERNEL  # noqa: E402
from tfswap.runtime.shapes import GROWTH, grown  # noqa: E402

OPEN = [tf.TensorSpec([None, WIDTH])]


def test_batches_that_keep_growing_take_few_plans_and_none_twice():
    net, twin = Net(layers=3), Net(layers=3)
    step = tfswap.optimize(tf.function(net.step, input_signature=OPEN), memory_limit="60%")
    reference = tf.function(twin.step, input_signature=OPEN)
    sizes = range(400, 1700, 100)
    for rows in sizes:
        assert bits(step(batch(rows))) == bits(unoptimised(reference, batch(rows)))
    plans = step.plans
    assert 3 <= plans <= 6 < len(sizes)
    for rows in random.Random(0).sample(sizes, 6):
        assert bits(step(batch(rows))) == bits(unoptimised(reference, batch(rows)))
    assert step.plans == plans
    assert bits(net.weights) == bits(twin.weights)


def test_arguments_of_any_rank_are_planned_for_as_they_come():
    net, twin = Net(layers=3), Net(layers=3)
    step = tfswap.optimize(tf.function(net.step, input_signature=[tf.TensorSpec(None)]), memory_limit="62%")
    reference = tf.function(twin.step, input_signature=[tf.TensorSpec(None)])
    for shape in ([1024, WIDTH], [5, WIDTH], [16, 32, WIDTH]):
        x = tf.reshape(batch()[: math.prod(shape) // WIDTH], shape)
        assert bits(step(x)) == bits(unoptimised(reference, x))
    assert step.plans == 2
    assert bits(net.weights) == bits(twin.weights)


def test_a_share_leaves_a_small_last_batch_what_the_others_have():
    """A trace of its own, that takes little more than its variables: a share of that would never do."""
    net, twin = Net(layers=3), Net(layers=3)
    step, reference = tfswap.optimize(tf.function(net.step), memory_limit="62%"), tf.function(twin.step)
    for rows in (1500, 3, 1500):
        assert bits(step(batch(rows))) == bits(unoptimised(reference, batch(rows)))
    with pytest.raises(tfswap.InfeasibleMemoryLimit):
        tfswap.optimize(tf.function(net.step), memory_limit="62%")(batch(3))


def drawing(optimized):
    """Losses of a step that draws random numbers, also in a loop and in a conditional, on batches of several sizes."""
    tf.random.set_seed(5)
    net = Net(layers=3)

    def body(x):
        factor = 0.0
        for _ in tf.range(2):
            factor += tf.random.uniform([], 1.0, 2.0)
        shifted = tf.cond(factor > 0.0, lambda: x + tf.random.normal([WIDTH]), lambda: x)
        return net.step(tf.nn.dropout(shifted, 0.3), factor)

    step = tf.function(body, input_signature=OPEN)
    if optimized:
        step = tfswap.optimize(step, memory_limit="80%")
    losses = [as_traced(step, batch(rows)) for rows in (400, 400, 900, 100, 900, 1500, 400)]
    return step, bits(losses)


def test_random_numbers_go_on_from_plan_to_plan():
    step, losses = drawing(True)
    assert step.plans > 1
    assert losses == drawing(False)[1]


def test_each_op_that_keeps_a_generator_has_the_kernel_that_shares_it():
    from tensorflow.python.framework import kernels

    import tfswap.ops  # noqa: F401 registers them

    for op in sorted(DRAWS):
        labels = {kernel.label for kernel in kernels.get_registered_kernels_for_op(op).kernel}
        assert {"", OWN_KERNEL} <= labels, op


def test_rows_and_columns_that_change_apart_are_covered_together():
    random_sizes = random.Random(1)
    planned: list[tuple[tuple[int, ...] | None, ...]] = []
    for _ in range(1000):
        asked = ((random_sizes.randint(1, 512), random_sizes.randint(1, 2000)), None)
        if not any(all(a <= p for a, p in zip(asked[0], made[0], strict=True)) for made in planned):
            planned.append(grown(asked, planned, 1))
            assert all(a <= p for a, p in zip(asked[0], planned[-1][0], strict=True))
    assert len(planned) < 20


def test_the_first_two_plans_are_for_what_is_asked_and_ranks_are_not_mixed():
    assert grown(((8,),), [], 1) == ((8,),)
    assert grown(((9,),), [((8,),)], 1) == ((9,),)
    assert grown(((10,),), [((8,),), ((9,),)], 1) == ((int(9 * GROWTH),),)
    assert grown(((100,),), [((8,),), ((9,),)], 1) == ((100,),)
    assert grown(((3, 4),), [((8,),), ((9,),)], 1) == ((3, 4),)
    assert grown(((100,), (9,)), [((100,), (8,))], 1) == ((100,), (12,)), "a size that values decide"
    assert grown(((8,), (9,)), [((100,), (100,))], 1) == ((8,), (150,))
    assert grown((None, ()), [(None, ()), (None, ())], 2) == (None, ())


def test_where_the_limit_has_no_room_for_more_the_plan_is_for_what_is_asked():
    net = Net(layers=3)
    probe = tfswap.optimize(tf.function(net.step, input_signature=OPEN), memory_limit=1)
    with pytest.raises(tfswap.InfeasibleMemoryLimit) as raised:
        probe(batch(1200))
    step = tfswap.optimize(tf.function(net.step, input_signature=OPEN), memory_limit=raised.value.floor_bytes)
    for plans, rows in enumerate((1000, 1100, 1200), start=1):
        step(batch(rows))
        assert step.plans == plans
    with pytest.raises(tfswap.InfeasibleMemoryLimit) as raised:
        step(batch(1600))
    assert step.plans == 3


def test_every_size_keeps_the_limit():
    def program():
        import random

        import tensorflow as tf
        from nets import WIDTH, Net, batch, bits, unoptimised

        import tfswap

        slab = tf.raw_ops.Empty(shape=[(512 << 20) - (2 << 20)], dtype=tf.uint8)
        del slab
        net, twin = Net(), Net()
        spec = [tf.TensorSpec([None, WIDTH])]
        step = tfswap.optimize(tf.function(net.step, input_signature=spec), memory_limit="12MiB", on_exceeded="raise")
        reference = tf.function(twin.step, input_signature=spec)
        sizes = [500, 900, *random.Random(0).choices(range(400, 2400, 50), k=8), 2400]
        peaks, same = [], []
        for rows in sizes:
            x = batch(rows)
            with measuring(peaks):
                loss = step(x)
            same.append(bits(loss) == bits(unoptimised(reference, x)))
        return [peaks, same, step.plans, step.report().baseline_peak_bytes]

    found = on_arena(program)
    peaks, same, plans, baseline = found
    assert all(same)
    assert baseline > 12 << 20
    assert max(peaks) <= 12 << 20
    assert plans <= 5
