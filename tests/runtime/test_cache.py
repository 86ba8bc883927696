"""Sizes that recur get plans of their own, without the evictions that only larger sizes need."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")


import tensorflow as tf
from nets import WIDTH, Net, batch, bits, unoptimised
from processes import on_arena

import tfswap
from tfswap.runtime import step_cache

SPEC = [tf.TensorSpec([None, WIDTH])]


def optimized(net, limit):
    traced = tf.function(net.step, input_signature=SPEC)
    return tfswap.optimize(traced, memory_limit=limit, tactics=("swap",), on_exceeded="raise")


def run(step, rows, seed):
    tf.config.experimental.reset_memory_stats("CPU:0")
    loss = bits(step(batch(rows, seed)))
    return loss, tf.config.experimental.get_memory_info("CPU:0")["peak"]


def test_a_smaller_batch_that_recurs_keeps_what_has_room():
    def program():
        net, twin = Net(8), Net(8)
        reference = tf.function(twin.step, input_signature=SPEC)
        step_cache.RECURS = recurs = 4
        sizes = [4096, *[1024] * (recurs + 2), 4096, *[3072] * (recurs + 1), 4096, 1024, 3072, 512]
        expected = [bits(unoptimised(reference, batch(rows, n))) for n, rows in enumerate(sizes)]
        step = optimized(net, "60%")
        moved, hits, limits = [], [], set()
        for n, rows in enumerate(sizes):
            loss, peak = run(step, rows, n)
            assert loss == expected[n], n
            limits.add(step.report().memory_limit_bytes)
            assert peak <= step.report().memory_limit_bytes, (n, peak, limits)
            moved.append(step.stats().out_bytes)
            hits.append(step.stats().cache_hits)
        assert len(limits) == 1
        # The large ones' plan moves tensors. One of its own moves none, or fewer: what is needed last.
        small, first = moved[1 : recurs + 3], sizes.index(3072)
        middle = moved[first : first + recurs + 1]
        assert min(small[: recurs - 1]) > 0 == max(small[recurs - 1 :]), moved
        assert max(middle[recurs - 1 :]) < min(middle[: recurs - 1]), moved
        assert all(m > 0 for m, rows in zip(moved, sizes, strict=True) if rows == 4096), moved
        assert hits[1] == 0 < hits[recurs] and hits[first + recurs] > 0, hits
        # The smallest plan that covers a size is taken.
        assert moved[-3] == moved[-1] == 0 and moved[-2] < min(middle[: recurs - 1]), moved
        assert step.plans == 3
        return 0

    on_arena(program, 1024)


def test_where_nothing_moves_or_little_recurs_there_is_one_plan():
    def program():
        step_cache.RECURS = recurs = 4
        ordered = tfswap.optimize(tf.function(Net(4).step, input_signature=SPEC), memory_limit="100%", tactics=())
        for n in range(recurs + 1):
            run(ordered, 2048 if n == 0 else 1024, n)
        assert ordered.plans == 1 and ordered.report().kernels

        many = optimized(Net(4), "60%")
        for n in range(3 * recurs):
            run(many, 4096 if n == 0 else 1024 + n, n)
        assert many.plans == 1 and many.stats().out_bytes > 0

        step_cache.MAX_OWN = 1
        for rows in (1024, 1030):
            for n in range(recurs):
                run(many, rows, n)
            assert many.plans == 2, rows
        first = many._steps.planned_of(next(iter(many._steps.traces)))[0]
        given = tfswap.optimize(tf.function(Net(4).step, input_signature=SPEC), plan=first.plan)
        for n in range(recurs + 1):
            run(given, 4096 if n == 0 else 1024, n)
        assert given.plans == 1
        return 0

    on_arena(program, 1024)
