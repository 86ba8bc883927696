"""Sums whose order depends on the branches that conditionals take, or on when loops end."""

from __future__ import annotations

import functools

import pytest
from processes import on_arena

pytest.importorskip("tensorflow")


def normal(seed, *shape):
    import tensorflow as tf

    return tf.random.stateless_normal(shape, (seed, 7))


def sums_by_decision():
    import tensorflow as tf

    w = normal(3, 64, 64) * 0.1

    def alone_or_shared(decides, a):  # what is given as it is has another reader
        return tf.cond(decides, lambda: tf.sin(a) * 1.7, lambda: a)

    def outside(x):
        a, m = tf.tanh(x), tf.exp(-x * x)
        return tf.add_n([m, m, alone_or_shared(x[0, 0] > 0, a)]), w @ a

    def in_a_branch(x):
        a, m = tf.tanh(x), tf.exp(-x * x)
        c = alone_or_shared(x[0, 0] > 0, a)
        return tf.cond(x[0, 1] > 0, lambda: tf.add_n([m, m, c]), lambda: c), w @ a

    def of_a_branch(x):
        a, m = tf.tanh(x), tf.exp(-x * x)
        c = tf.cond(x[0, 0] > 0, lambda: alone_or_shared(x[0, 1] > 0, a), lambda: tf.cos(a))
        return tf.add_n([m, m, c]), w @ a

    def of_two(x):
        a, m = tf.tanh(x), tf.exp(-x * x)
        return tf.add_n([m, m, *(alone_or_shared(x[0, i] > 0, a) for i in range(2))]), w @ a

    def of_cases(x):
        a, m = tf.tanh(x), tf.exp(-x * x)
        number = tf.cast(x[0, 0] > 0, tf.int32) - tf.cast(x[0, 1] > 0, tf.int32)  # -1 is the last
        return tf.add_n([m, m, tf.switch_case(number, [lambda: a, lambda: tf.sin(a), lambda: tf.cos(a)])]), w @ a

    def in_a_loop(x):
        def body(i, a, b):
            m, t = tf.exp(-b * b), tf.tanh(a)
            return i + 1, tf.add_n([m, m, alone_or_shared(a[0, i] > 0, t)]) * 0.3, w @ t

        return tf.while_loop(lambda i, *_: i < 20, body, [0, x, x])[1:]

    def in_the_last_iteration(x):  # no other iteration reads its terms
        count = 1 + tf.cast(x[0, 0] > 0, tf.int32)

        def body(i, a, b):
            m, t = tf.exp(-b * b), tf.tanh(a) * 1.1
            return i + 1, t, tf.add_n([m, m, t]) * 0.3

        return tf.while_loop(lambda i, *_: i < count, body, [0, x, x])[1:]

    def after_a_loop(x):  # without iterations it gives what it was given
        a, m = tf.tanh(x), tf.exp(-x * x)
        count = 2 * tf.cast(x[0, 0] > 0, tf.int32)
        b = tf.while_loop(lambda i, _: i < count, lambda i, b: (i + 1, tf.sin(b) * 1.3), [0, a])[1]
        return tf.add_n([m, m, b]), w @ a, tf.reduce_sum(tf.exp(w @ tf.sin(x)) ** 2)

    branches = [outside, in_a_branch, of_a_branch, of_two, of_cases, in_a_loop]
    return [*branches, in_the_last_iteration, after_a_loop]


def steps():
    import tensorflow as tf

    import tfswap

    x = normal(1, 64, 300)
    arguments = [tf.concat([x[:, :2] * [a, b], x[:, 2:]], 1) for a in (1.0, -1.0) for b in (1.0, -1.0)]

    def bits(f):
        return {i: [t.numpy().tobytes() for t in f(x)] for i, x in enumerate(arguments)}

    entries = {}
    for step in sums_by_decision():
        planned = tfswap.optimize(tf.function(step, autograph=False), memory_limit="100%")
        found = bits(planned)
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        wrong = found
        for _ in range(20):  # traces of TensorFlow's loops differ: one in three gives in_a_loop other bits
            trace = bits(tf.function(step, autograph=False))
            wrong = {i: each for i, each in wrong.items() if each != trace[i]}
            if not wrong:
                break
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
        entries[step.__name__] = [len(wrong), planned.plan().changes_nothing]
    return entries


def test_a_sum_adds_as_tensorflow_s_does_whatever_is_decided() -> None:
    found = on_arena(steps, TF_NUM_INTEROP_THREADS="1")
    assert {name: entry for name, entry in found.items() if entry != [0, False]} == {}


# Each sum is 0 if it begins with one of its first two terms, and `x` with the third.
def seen():
    import itertools

    import tensorflow as tf

    import tfswap
    from tfswap.simulator.iteration_table import IterationTable
    from tfswap.simulator.sum_samples import FirstTerm, SumSamples

    def first(self, trips, seen):  # the third after the second branch of what its name says
        _, name = seen.args[0]
        wanted, _, when = name.rpartition("/")[2].partition("_")
        found = [d for d in seen() if wanted in d.predicate.tensor and d.previous == when.startswith("before")]
        loops = len(self._samples[0].iterations)
        return FirstTerm(IterationTable((1,) * loops + (2,), (0, 2)), (found[0],))

    SumSamples.first = first

    factors = itertools.count(1)

    def add(x, decision):  # no two sums are equal
        big = x * (1e8 * next(factors))
        return tf.add_n([x, big, tf.negative(big)], name=decision)[0]

    def step(x, trips):
        def three():
            less = tf.less(x[0], 5, name="less")
            return tf.cond(less, lambda: x * 4, lambda: x * 5)

        def body(i, total, seen):
            odd = tf.equal(tf.cast(i, tf.float32) % 2 + 0 * x[0], 1, name="odd")
            total += tf.cond(odd, lambda: x * 2, lambda: x * 3)
            within = tf.cond(x[2] > 0, lambda: add(x, "odd_now"), lambda: x[0])
            each = [add(x, "odd_now"), add(x, "odd_before"), add(x, "three_now"), within]
            return i + 1, total, seen + tf.one_hot(i, trips)[:, None] * tf.stack(each)

        total = tf.cond(tf.equal(x[0], 3, name="three"), three, lambda: x * 7)
        number = tf.cast(x[1], tf.int32, name="case")
        total += tf.switch_case(number, [lambda: x * 2, lambda: x * 6])
        _, total, seen = tf.while_loop(lambda i, *_: i < trips, body, [0, total, tf.zeros([trips, 4])])
        return total, seen, tf.stack([add(x, f"{name}_now") for name in ("three", "less", "case", "odd")])

    wrong = []
    for trips in 3, 20:  # the first is unrolled
        planned = tfswap.optimize(
            tf.function(functools.partial(step, trips=trips), autograph=False), memory_limit="100%"
        )
        for value, case in (3.0, 0.0), (7.0, 1.0):
            x = tf.constant([value, case, 1.0] + [0.0] * 61)
            odd = [i % 2 == 1 for i in range(-2, trips)]
            each = [[odd[i + 2], odd[i + 1] if i else False, value == 3, odd[i + 2]] for i in range(trips)]
            expected = [*itertools.chain(*each), value == 3, value == 3, case == 0, odd[-1]]
            found = [float(t) == 0 for part in planned(x)[1:] for t in part.numpy().flat]
            if found != expected:
                wrong.append([trips, value, found, expected])
        assert not planned.plan().changes_nothing
    return wrong


def test_decisions_are_seen_from_other_parts_of_a_step() -> None:
    """From the same graph, from within a loop or a branch, from outside of them, and from the next iteration."""
    assert on_arena(seen) == []
