"""The kernel that runs a planned step's loops: values and errors as of TensorFlow's own."""

from __future__ import annotations

import pytest
from processes import on_arena
from step_peaks import measuring

tf = pytest.importorskip("tensorflow")

import tfswap.ops  # noqa: E402, F401 registers the kernel; all of these need TensorFlow
from tfswap.importers.inline import LOWERING  # noqa: E402
from tfswap.ir.custom_ops import FIRST, FIRST_SHAPE, KERNEL, OWN_KERNEL, RELOCATED  # noqa: E402


def labelled(function, relocated=()):
    """`function`, whose loops and conditionals have tfswap's kernels.

    Args:
        relocated: places of the results that are relocated.
    """

    def traced(*arguments):
        result = function(*arguments)
        label(relocated)
        return result

    return tf.function(traced)


def label(relocated=()):
    """Give the loops and conditionals of the graph that is being traced tfswap's kernels."""
    from tensorflow.core.framework.attr_value_pb2 import AttrValue

    operations = tf.compat.v1.get_default_graph().get_operations()
    nodes = [op for op in operations if op.type.removeprefix("Stateless") in ("While", "If", "Case")]
    assert nodes
    for node in nodes:
        node._set_attr(KERNEL, AttrValue(s=OWN_KERNEL.encode()))
        node._set_attr(LOWERING, AttrValue(b=False))
        node._set_attr(RELOCATED, AttrValue(list=AttrValue.ListValue(i=relocated)))


@pytest.mark.parametrize("times", (0, 1, 7))
def test_values_are_those_of_tensorflow(times):
    def loop(n, x):
        rows = tf.TensorArray(tf.float32, size=0, dynamic_size=True, element_shape=[3])
        n, x, rows = tf.while_loop(
            lambda i, *_: i > 0, lambda i, x, rows: (i - 1, tf.sin(x) + x, rows.write(i, x)), [n, x, rows]
        )
        return n, x, rows.stack()

    arguments = tf.constant(times), tf.constant([1.0, -2.0, 3.0])
    for found, expected in zip(labelled(loop)(*arguments), tf.function(loop)(*arguments), strict=True):
        assert found.numpy().tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize("times", (0, 1, 7))
def test_values_are_the_same_where_they_are_relocated(times):
    def loop(n, x, y):
        return tf.while_loop(lambda i, *_: i > 0, lambda i, x, y, z: (i - 1, y, tf.sin(x) + y, x), [n, x, y, x])

    arguments = tf.constant(times), tf.constant([1.0, -2.0, 3.0]), tf.constant([0.5, 0.25, 1.0])
    found = labelled(loop, relocated=(0, 1, 2, 3))(*arguments)
    for one, expected in zip(found, tf.function(loop)(*arguments), strict=True):
        assert one.numpy().tobytes() == expected.numpy().tobytes()


def test_sums_know_the_iterations_of_all_loops_around():
    """Also in a branch and in a loop's condition."""
    from tensorflow.core.framework.attr_value_pb2 import AttrValue

    def one_where(first, shape):  # 1 if it begins with its last term, 0 if with the first
        total = tf.add_n(terms)
        total.op._set_attr(KERNEL, AttrValue(s=OWN_KERNEL.encode()))
        for name, numbers in ((FIRST, first), (FIRST_SHAPE, shape)):
            total.op._set_attr(name, AttrValue(list=AttrValue.ListValue(i=numbers)))
        return total

    def nested():
        def inner(j, digits):
            found = one_where([0, 2, 2, 0], [2, 2])
            found += tf.cond(j < 9, lambda: 2 * one_where([0, 2, 0], [1, 3]), lambda: 0.0)
            label()
            return j + 1, 4 * digits + found

        def goes_on(j, _):
            return tf.cast(j, tf.float32) < 3 * one_where([2, 2, 2, 2, 2, 0], [2, 3])

        def outer(i, digits):
            digits = tf.while_loop(goes_on, inner, [0, digits])[1]
            label()
            return i + 1, digits

        return tf.while_loop(lambda i, _: i < 3, outer, [0, 0.0])[1]

    terms = list(tf.constant([1.0, 1e8, -1e8]))
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    found = labelled(nested)().numpy()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    assert found == int("031" + "12" + "12", 4)


def test_a_loop_peaks_the_same_however_often_it_runs_where_its_results_are_relocated():
    def program():

        def loop(n, x, y):
            def body(i, x, y):
                z = tf.concat([x, y[:50_000]], 0)
                return i - 1, tf.tanh(y)[:64_000] * 0.5 + z[:64_000], tf.sin(z[:100_000]) + 0.25

            return tf.reduce_sum(tf.while_loop(lambda i, *_: i > 0, body, [n, x, y])[2])

        def peaks(function):
            found = []
            for times in (1, 1, 2, 3, 5, 8, 13):
                with measuring(found):
                    function(tf.constant(times), x, y)
            return found[1:]

        slab = tf.raw_ops.Empty(shape=[60, 2**20], dtype=tf.uint8)
        del slab
        x, y = tf.random.stateless_normal([64_000], [1, 2]), tf.random.stateless_normal([100_000], [3, 4])
        return [peaks(labelled(loop, relocated)) for relocated in ((1, 2), ())]

    relocated, as_they_come = on_arena(program, mib=64)
    assert len(set(relocated[1:])) == 1, relocated
    assert len(set(as_they_come)) > 1 and max(as_they_come) > max(relocated), as_they_come


@pytest.mark.parametrize("chosen", (-1, 0, 1, 2, 7))
def test_a_branch_gives_what_tensorflow_gives(chosen):
    def choose(i, x):
        one = tf.cond(i > 0, lambda: tf.sin(x), lambda: x)
        return one, tf.switch_case(i, [lambda: x, lambda: one * 2.0, lambda: tf.zeros_like(x)])

    arguments = tf.constant(chosen), tf.constant([1.0, -2.0, 3.0])
    for relocated in ((), (0,)):
        found = labelled(choose, relocated)(*arguments)
        for one, expected in zip(found, tf.function(choose)(*arguments), strict=True):
            assert one.numpy().tobytes() == expected.numpy().tobytes()


def test_what_fails_in_a_branch_fails_the_conditional():
    def choose(x):
        return tf.cond(x > 0.0, lambda: tf.debugging.check_numerics(x / 0.0, "in the branch"), lambda: x)

    function = labelled(choose, relocated=(0,))
    assert function(tf.constant(-1.0)).numpy() == -1.0
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="in the branch"):
            function(tf.constant(1.0))


@pytest.mark.parametrize("value", (3.0, 0.5, "text", 2, True))
def test_a_condition_may_be_of_any_type(value):
    """TensorFlow 1's loops can say it with a number or a text."""
    last = type(value)()  # nothing, or false, in each type

    @tf.function
    def condition(i, values):
        return tf.gather(values, i)

    @tf.function
    def body(i, values):
        return i + 1, values

    def loop(values):
        i = tf.constant(0)
        functions = [f.get_concrete_function(i, values) for f in (condition, body)]
        return tf.raw_ops.While(input=[i, values], cond=functions[0], body=functions[1], output_shapes=[[], None])[0]

    assert labelled(loop)(tf.constant([value, value, last])).numpy() == 2


CONDITIONS = {
    "less": lambda i, n: i < n,
    "less, in 64 bits": lambda i, n: tf.cast(i, tf.int64) < tf.cast(n, tf.int64),
    "less or equal": lambda i, n: i <= n,
    "greater": lambda i, n: n > i,
    "greater or equal": lambda i, n: n >= i,
    "both": lambda i, n: tf.logical_and(i < n, i < 3),
    "either": lambda i, n: tf.logical_or(i < n, tf.greater(2, i)),
    "constant": lambda i, n: i < 4,
    "never": lambda i, n: tf.constant(False),
    "of a vector": lambda i, n: tf.reduce_all(tf.stack([i, i]) < n),
}


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
def test_a_condition_that_compares_numbers_is_as_tensorflow_computes_it(condition):
    def loop(n):
        return tf.while_loop(condition, lambda i, n: (i + 1, n), [0, n])[0]

    for n in (0, 1, 5):
        found, expected = (f(tf.constant(n)).numpy() for f in (labelled(loop), tf.function(loop)))
        assert found == expected


def test_a_condition_that_does_something_is_run_each_time():
    asked = tf.Variable(0)

    def loop(n):
        def condition(i, n):
            asked.assign_add(1)
            return i < n

        return tf.while_loop(condition, lambda i, n: (i + 1, n), [0, n])[0]

    assert labelled(loop)(tf.constant(5)).numpy() == 5
    assert asked.numpy() == 6


def test_sums_have_the_same_bits_whether_threads_share_them_or_not():
    # A sum of all elements is one per part and thread. Both ways are tried in the first two dozen iterations.
    def program():
        tf.config.threading.set_intra_op_parallelism_threads(4)

        def loop(x):
            def body(i, rows, x):
                product = tf.matmul(
                    x[:4], x[:4] * tf.cast(i, tf.float32), transpose_b=True
                )  # shared out along what is summed
                return i + 1, rows.write(i, tf.reduce_sum(x) + tf.reduce_sum(product)), x + 0.125

            rows = tf.TensorArray(tf.float32, 40, element_shape=[])
            return tf.while_loop(lambda i, *_: i < 40, body, [0, rows, x])[1].stack()

        x = tf.random.stateless_normal([64, 40_000], [1, 2])
        return [labelled(loop)(x).numpy().tobytes().hex(), tf.function(loop)(x).numpy().tobytes().hex()]

    found, expected = on_arena(program)
    assert found == expected


@pytest.mark.parametrize("where", ("condition", "body"))
def test_what_fails_inside_fails_the_loop(where):
    def checked(x, i):
        return tf.debugging.check_numerics(x / tf.cast(4 - i, tf.float32), f"in the {where}")

    def loop(x):
        def condition(i, x):
            return tf.reduce_all(checked(x, i) > 0) if where == "condition" else i < 9

        return tf.while_loop(condition, lambda i, x: (i + 1, checked(x, i) if where == "body" else x), [0, x])

    function = labelled(loop)
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"in the {where}"):
            function(tf.ones([2]))


def test_one_thread_runs_it_without_an_end_of_its_stack():
    """A data pipeline may run a function on one thread."""
    from tensorflow.python.data.ops import map_op

    def count(limit):
        zero = limit - limit
        return tf.while_loop(lambda i: i < limit, lambda i: [i + 1], [zero])[0]

    limits = tf.data.Dataset.from_tensors(20_000)
    with_kernel = labelled(count).get_concrete_function(limits.element_spec)
    assert next(iter(map_op._MapDataset(limits, with_kernel, use_inter_op_parallelism=False))) == 20_000


def test_loops_in_loops_need_no_thread_each():
    """Where TensorFlow has one thread for kernels, a loop that waited on it for another one would wait for ever."""
    one_thread = "import tensorflow as tf; tf.config.threading.set_inter_op_parallelism_threads(1)"
    run = "import json, control_flow; print(json.dumps(control_flow.main('nested', '60%')))"
    result = on_arena(f"{one_thread}\n{run}")
    assert result["peak"] <= result["limit"]
