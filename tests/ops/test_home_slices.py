"""Rows of variables at home on the host: read, stored in slices, and computed in slices with the bits of the whole."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import tfswap.ops  # noqa: E402, F401 needs TensorFlow
from tfswap.ir import philox  # noqa: E402
from tfswap.ir.op_table import TRAITS  # noqa: E402
from tfswap.ir.trait import Trait  # noqa: E402
from tfswap.kernels.slices import ELEMENTS  # noqa: E402
from tfswap.native.load import load  # noqa: E402

VALUE = np.arange(60, dtype=np.float32).reshape(10, 6)


@pytest.fixture
def ops():
    return load().ops


@pytest.fixture
def variable(ops):
    made = tf.Variable(VALUE)
    ops.tfswap_move_home(resource=made.handle, host=True)
    return made


def loaded(ops, variable, **rows):
    """What a step loads from the variable's home."""

    @tf.function
    def step():
        value, ticket = ops.tfswap_load_home(resource=variable.handle, dtype=tf.float32, **rows)
        return ops.tfswap_await(tensor=value, ticket=ticket)

    return step().numpy()


@pytest.mark.parametrize(("begin", "rows"), [(0, 10), (0, 1), (3, 4), (9, 1), (10, 0), (4, 0)])
def test_rows_are_read(ops, variable, begin: int, rows: int) -> None:
    expected = VALUE[begin : begin + rows]
    read = ops.tfswap_read_home(resource=variable.handle, dtype=tf.float32, begin=begin, rows=rows)
    assert np.array_equal(read.numpy(), expected)
    assert np.array_equal(loaded(ops, variable, begin=begin, rows=rows), expected)


@pytest.mark.parametrize(("begin", "rows"), [(0, 11), (5, 6), (11, 0), (-1, 2), (2**62, 2**62)])
def test_other_rows_are_refused(ops, variable, begin: int, rows: int) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"accesses .* rows from row .* of shape \[10,6\]"):
        ops.tfswap_read_home(resource=variable.handle, dtype=tf.float32, begin=begin, rows=rows)
    with pytest.raises(tf.errors.InvalidArgumentError, match="accesses .* rows"):
        loaded(ops, variable, begin=begin, rows=rows)


def test_rows_of_a_variable_on_the_device_are_read(ops) -> None:
    assert np.array_equal(loaded(ops, tf.Variable(VALUE), begin=2, rows=5), VALUE[2:7])


def store(ops, variable, values, rows):
    """Store slices of a new value, (first row, value) each, and commit it."""

    @tf.function
    def step():
        stored, waits = [], []
        for begin, value in values:
            value = tf.constant(value)
            with tf.control_dependencies(waits[-1:]):
                stored.append(ops.tfswap_store_home(value=value, before=stored[-1:], begin=begin, rows=rows))
            waits.append(ops.tfswap_await_store(value=value, stored=stored[-1]))
        with tf.control_dependencies(waits):
            ops.tfswap_commit_home(resource=variable.handle, value=values[-1][1], stored=stored[-1])

    step()


def test_slices_of_a_new_value_are_stored(ops, variable) -> None:
    new = VALUE[::-1] * 2
    store(ops, variable, [(0, new[:4]), (4, new[4:8]), (8, new[8:])], 10)
    assert np.array_equal(variable.numpy(), new)


def test_a_step_that_fails_between_slices_leaves_the_old_value(ops, variable) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="accesses 4 rows from row 8"):
        store(ops, variable, [(0, VALUE[:4] * 2), (8, VALUE[:4])], 10)
    assert np.array_equal(variable.numpy(), VALUE)


def test_slices_of_different_values_are_refused(ops, variable) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="slices of different values"):
        store(ops, variable, [(0, VALUE[:4]), (4, VALUE[4:, :3])], 10)
    assert np.array_equal(variable.numpy(), VALUE)


def test_homes_of_impossible_sizes_are_refused(ops) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="overflow"):
        ops.tfswap_store_home(value=VALUE, before=[], begin=0, rows=2**62)
    for rows in (2**61, 2**58):  # whose bytes are 0 in 64 bits, or more than there are
        with pytest.raises(tf.errors.ResourceExhaustedError):
            ops.tfswap_make_home(shape=[rows, 2], dtype=tf.float64)
    assert ops.tfswap_make_home(shape=[0, 2], dtype=tf.float32).shape == (0, 2)


def test_rows_of_a_tensor_are_in_its_buffer(ops) -> None:
    tensor = tf.random.normal([64, 16])
    rows = ops.tfswap_rows(tensor=tensor, begin=16, rows=3)
    assert np.array_equal(rows.numpy(), tensor[16:19].numpy())
    with pytest.raises(tf.errors.InvalidArgumentError, match="accesses 3 rows from row 62"):
        ops.tfswap_rows(tensor=tensor, begin=62, rows=3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not aligned, from row 1"):
        ops.tfswap_rows(tensor=tf.ones([64, 3]), begin=1, rows=3)


def test_a_home_is_filled_and_becomes_a_variables(ops) -> None:
    home = ops.tfswap_make_home(shape=[10, 6], dtype=tf.float32)
    for begin, end in ((0, 7), (7, 60)):
        ops.tfswap_fill_home(home=home, value=VALUE.reshape(-1)[begin:end], begin=begin)
    for begin, values in ((54, np.ones(7)), (-1, np.ones(1)), (2**62, np.ones(1))):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"elements from element .* of shape \[10,6\]"):
            ops.tfswap_fill_home(home=home, value=tf.constant(values, tf.float32), begin=begin)
    with pytest.raises(tf.errors.InvalidArgumentError, match="fills no home"):
        ops.tfswap_fill_home(home=tf.zeros([4]), value=tf.zeros([1]), begin=0)
    variable = tf.Variable(home)
    assert variable.numpy().tobytes() == VALUE.tobytes()


# ---------------------------------------------------------------------------------------------------
# Bits

FLOATS = (tf.bfloat16, tf.float16, tf.float32, tf.float64)
ELEMENTWISE = sorted(op for op, traits in TRAITS.items() if Trait.ELEMENTWISE in traits)


def inputs_of(op: str, dtype, count: int):
    """Inputs of an op by name, of `count` elements, with a few that are 0, infinite and not a number."""
    rng = np.random.default_rng(len(op))
    found = {}
    for arg in tf.raw_ops.__dict__[op].__signature__.parameters.values():
        if arg.default is not arg.empty or arg.name in ("DstT", "name"):
            continue
        values = rng.standard_normal(count) * 3
        values[rng.integers(0, count, 40)] = [0.0, -0.0, np.inf, -np.inf, np.nan] * 8
        is_flag = op.startswith("Logical") or arg.name == "condition"
        found[arg.name] = tf.constant(values > 0) if is_flag else tf.cast(tf.constant(values), dtype)
    return found


@pytest.mark.parametrize("op", ELEMENTWISE)
def test_elements_of_slices_have_the_bits_of_the_whole(op: str) -> None:
    """With a tail that is no whole packet, and enough elements for several threads to share the whole."""
    count, tried = 40 * ELEMENTS * 64 + 37, 0
    for dtype in FLOATS:
        inputs = inputs_of(op, dtype, count)
        others = {"DstT": tf.float16 if dtype == tf.float32 else tf.float32} if op == "Cast" else {}

        def run(first, end, inputs=inputs, others=others):
            given = {name: tf.identity(tensor[first:end]) for name, tensor in inputs.items()}
            made = tf.raw_ops.__dict__[op](**given, **others)
            return (made[0] if isinstance(made, list) else made).numpy().tobytes()

        try:
            whole = run(0, count)
        except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError, tf.errors.UnimplementedError, TypeError):
            continue  # has no kernel for this type
        for size in (ELEMENTS, 300 * ELEMENTS):
            ends = [*range(size, min(count, 100 * size), size), count]
            firsts = [0, *ends[:-1]]
            assert b"".join(map(run, firsts, ends)) == whole, (op, dtype, size)
        tried += 1
    assert tried >= 1


@pytest.mark.parametrize("op", ["StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2"])
def test_random_numbers_of_slices_have_the_bits_of_the_whole(op: str) -> None:
    """From counters at the ends of both of their words too."""
    count = 400 * ELEMENTS + 37
    for dtype in FLOATS:
        for counter in ((0, 0), (2**64 - 900, 5), (2**64 - 900, 2**64 - 1)):

            def draw(begin, end, dtype=dtype, counter=counter):
                first = philox.advanced(counter, philox.counters_before(op, dtype.size, begin))
                key, first = tf.constant([77], tf.uint64), tf.constant(first, tf.uint64)
                made = tf.raw_ops.__dict__[op](shape=[end - begin], key=key, counter=first, alg=1, dtype=dtype)
                return made.numpy().tobytes()

            whole = draw(0, count)
            for size in (ELEMENTS, 77 * ELEMENTS):
                assert b"".join(draw(begin, min(begin + size, count)) for begin in range(0, count, size)) == whole
