"""Refusals of `tfswap.optimize`, and the limits that it keeps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

tf = pytest.importorskip("tensorflow")

from nets import LIMIT, WIDTH, Net, batch, bits, called, swaps, unoptimised  # noqa: E402

import tfswap  # noqa: E402 needs TensorFlow to be worth it
from tfswap.compiler.unoptimised import UnoptimisedStep  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_left_in_the_pool")

# --- what can't be optimised ----------------------------------------------------------------------------------


def test_jit_compile_is_refused():
    with pytest.raises(tfswap.UnsupportedGraph, match="jit_compile=True"):
        tfswap.optimize(tf.function(Net().step, jit_compile=True), memory_limit=LIMIT)


def test_jit_compile_around_it_or_inside_it_is_refused():
    net = Net()
    before = bits(net.weights)
    step = called(net)
    with pytest.raises(tfswap.UnsupportedGraph, match="called by a function with jit_compile=True"):
        tf.function(lambda x: step(x), jit_compile=True)(batch())
    inner = tf.function(net.step, jit_compile=True)
    with pytest.raises(tfswap.UnsupportedGraph, match="compiled by XLA"):
        tfswap.optimize(tf.function(lambda x: inner(x)), memory_limit=LIMIT)(batch())
    assert bits(net.weights) == before


def auto_clustering(on):
    tf.config.optimizer.set_jit("autoclustering" if on else False)


def mixed_precision(on):
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision": on})


@pytest.mark.parametrize(
    ("rewriter", "says"), [(auto_clustering, "tf.config.optimizer.set_jit"), (mixed_precision, "auto_mixed_precision")]
)
@pytest.mark.parametrize("limit", [LIMIT, "500%"])
def test_what_would_rewrite_it_afterwards_is_refused(rewriter, says, limit):
    net = Net()
    before = bits(net.weights)
    rewriter(True)
    try:
        with pytest.raises(tfswap.UnsupportedGraph, match=says):
            tfswap.optimize(tf.function(net.step), memory_limit=limit)(batch())
    finally:
        rewriter(False)
    assert bits(net.weights) == before


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: 3, "optimize needs a .*, not 3"),
        (lambda: tf.Module, "optimize needs a .*, not .*Module"),
        (
            lambda: tf.function(Net().step).get_concrete_function(batch()),
            "got a ConcreteFunction.*give the tf.function",
        ),
        (lambda: called(Net()), "step is optimized already"),
        (lambda: tf.keras.Sequential([tf.keras.layers.Dense(2)]), "is a Keras model.*tfswap.keras.optimize"),
    ],
)
def test_what_is_no_function_is_refused(make, says):
    with pytest.raises(tfswap.TfswapError, match=says):
        tfswap.optimize(make(), memory_limit=LIMIT)


def over_a_dataset(net, inside=lambda net, x: net.step(x)):
    def step(dataset):
        total = 0.0
        for x in dataset:  # this loop is named
            total += inside(net, x)
        return total

    return step


def in_batches(rows=512, **options):
    return tf.data.Dataset.from_tensor_slices(batch()).batch(rows, **options)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("limit", [LIMIT, "500%"])
def test_a_loop_over_a_dataset_is_refused_with_its_line(dropped, limit):
    net = Net()
    before = bits(net.weights)
    step = tfswap.optimize(tf.function(over_a_dataset(net)), memory_limit=limit)
    with pytest.raises(tfswap.UnsupportedGraph, match=r"test_optimize_refused.py:\d+\).*loop over a dataset") as error:
        step(in_batches(drop_remainder=dropped))
    line = int(re.search(r"test_optimize_refused.py:(\d+)", str(error.value))[1])
    assert "this loop is named" in Path(__file__).read_text().splitlines()[line - 1]
    assert bits(net.weights) == before


def reduced(net, x):
    return tf.data.Dataset.from_tensors(x).reduce(0.0, lambda total, y: total + net.step(y))


def elsewhere(net, x):
    from tensorflow.python.ops import functional_ops

    body = tf.function(net.step).get_concrete_function(x)
    device = "/job:localhost/replica:0/task:0/device:CPU:0"
    return functional_ops.remote_call(device, [x, *body.captured_inputs], [tf.float32], body)[0]


def row_by_row(net, x):
    body = tf.function(tf.sin).get_concrete_function(tf.TensorSpec([512, WIDTH]))
    return net.step(
        tf.raw_ops.MapDefun(
            arguments=[tf.reshape(x, [2, 512, WIDTH])],
            captured_inputs=[],
            output_types=[tf.float32],
            output_shapes=[[512, WIDTH]],
            f=body,
        )[0][0]
    )


@pytest.mark.parametrize("hidden", [reduced, elsewhere, row_by_row])
@pytest.mark.parametrize("nested", [False, True])
def test_what_runs_outside_of_the_graph_is_refused(hidden, nested):
    net = Net()
    function = tf.function(lambda x: hidden(net, x))
    if nested:
        function = tf.function(lambda x, called=function: called(x))
    with pytest.raises(tfswap.UnsupportedGraph, match="outside of the graph"):
        tfswap.optimize(function, memory_limit=LIMIT)(batch())


def test_a_loop_over_a_dataset_that_holds_next_to_nothing_is_no_harm():
    def step(net, x):
        scale = 0.0
        for i in tf.data.Dataset.range(3):
            scale += tf.cast(i, tf.float32)
        return net.step(x, scale)

    net, twin = Net(), Net()
    optimized = tfswap.optimize(tf.function(lambda x: step(net, x)), memory_limit=LIMIT)
    assert bits(optimized(batch())) == bits(unoptimised(tf.function(lambda x: step(twin, x)), batch()))
    assert bits(net.weights) == bits(twin.weights)
    assert optimized.plan().order


@pytest.mark.parametrize("unrolled", [False, True])
def test_a_loop_over_an_iterator_is_what_the_refusal_says_to_write(unrolled):
    def over_an_iterator(net):
        def step(iterator):
            total = 0.0
            for _ in range(2) if unrolled else tf.range(2):
                total += net.step(next(iterator))
            return total

        return step

    net, twin = Net(), Net()
    step = tfswap.optimize(tf.function(over_an_iterator(net)), memory_limit="108%")
    expected = unoptimised(tf.function(over_an_iterator(twin)), iter(in_batches(drop_remainder=True)))
    assert bits(step(iter(in_batches(drop_remainder=True)))) == bits(expected)
    assert bits(net.weights) == bits(twin.weights)
    assert step.plan().order


@pytest.mark.parametrize("looped", [False, True])
def test_batches_of_an_iterator_without_a_size_are_refused_with_what_to_do(looped):
    net = Net(layers=1)

    def step(iterator):
        total = 0.0
        for _ in tf.range(2) if looped else range(1):
            total += net.step(next(iterator))
        return total

    with pytest.raises(tfswap.UnsupportedGraph, match=r"from an iterator .*drop_remainder=True.*step\(next\(iterator"):
        tfswap.optimize(tf.function(step), memory_limit=LIMIT)(iter(in_batches()))


def with_numpy(net, declare):
    def step(x):
        with tf.GradientTape() as tape:
            made = tf.numpy_function(lambda: 2 * batch().numpy(), [], tf.float32)  # this line is named
            loss = net.loss(declare(made) + 0 * x)
        for weight, gradient in zip(net.weights, tape.gradient(loss, net.weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return step


def set_shape(tensor):
    tensor.set_shape([1024, WIDTH])
    return tensor


@pytest.mark.parametrize("nested", [False, True])
def test_a_size_that_tensorflow_can_t_infer_can_be_declared(nested):
    def step_of(net, declare):
        if nested:
            net.loss = tf.function(net.loss)
        return tf.function(with_numpy(net, declare))

    expected = bits(unoptimised(tf.function(with_numpy(Net(), tf.identity)), batch()))
    with pytest.raises(
        tfswap.UnsupportedGraph, match=r"PyFunc.*made at .*test_optimize_refused.py:\d+.*tf.ensure_shape"
    ) as error:
        tfswap.optimize(step_of(Net(), tf.identity), memory_limit=LIMIT)(batch())
    line = int(re.search(r"test_optimize_refused.py:(\d+)", str(error.value))[1])
    assert "this line is named" in Path(__file__).read_text().splitlines()[line - 1]
    for declare in (lambda y: tf.ensure_shape(y, [1024, WIDTH]), set_shape):
        step = tfswap.optimize(step_of(Net(), declare), memory_limit=LIMIT)
        assert bits(step(batch())) == expected
        assert step.plan().evictions


def test_a_step_without_a_backward_pass_is_planned_like_any_other():
    """It is the function that the user decorated; only in a file can the wrong one have been named."""
    net = Net()
    forward, reference = tfswap.optimize(tf.function(net.loss), memory_limit="105%"), tf.function(net.loss)
    assert bits(forward(batch())) == bits(unoptimised(reference, batch()))
    assert forward.plan().order
    for reported in (forward.report().headline(), str(forward.report()), forward.report()._repr_html_()):
        assert "no backward pass" in reported
    assert not forward.report().trains
    with pytest.raises(tfswap.InfeasibleMemoryLimit) as error:
        tfswap.optimize(tf.function(net.loss), memory_limit=1000)(batch())
    tfswap.optimize(tf.function(net.loss), memory_limit=error.value.floor_bytes)(batch())


# --- limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["six", "-3GiB", 0, -1, "0%", 1.5, True, "3 parsecs", b"1GiB", 10**40])
def test_a_malformed_limit_is_refused_when_decorating(limit):
    with pytest.raises(tfswap.TfswapError, match="memory_limit"):
        tfswap.optimize(tf.function(Net().step), memory_limit=limit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode is 'fast'; it can be 'optimize' or 'analyze'"),
        ({"on_exceeded": "ignore"}, "on_exceeded"),
        ({"mode": None}, "mode is None"),
        ({"on_exceeded": []}, r"on_exceeded is \[\]"),
        ({"tactics": ("swap", "magic")}, "'magic'"),
        ({"tactics": "swap"}, "tactics is 'swap', of type str: give a list of names"),
        ({"tactics": None}, "tactics is None"),
        ({"tactics": [b"swap"]}, "tactics has b'swap', of type bytes"),
        ({"host_memory_limit": True}, "host_memory_limit is True, of type bool"),
        ({"host_memory_limit": "much"}, "'much'"),
        ({"host_memory_limit": "50%"}, "share"),
        ({"max_slowdown": 0.9}, "max_slowdown is 0.9: give a number of 1 or more"),
    ],
)
def test_a_malformed_option_is_refused_when_decorating(options, message):
    with pytest.raises(tfswap.TfswapError, match=message):
        tfswap.optimize(tf.function(Net().step), memory_limit=LIMIT, **options)


def test_a_limit_is_needed_where_the_allocator_has_none():
    step = tfswap.optimize(tf.function(Net().step))
    with pytest.raises(tfswap.TfswapError, match="memory_limit is not given"):
        step(batch())


def test_below_the_floor_nothing_runs_and_at_it_the_step_does(monkeypatch: pytest.MonkeyPatch):
    net = Net()
    before = bits(net.weights)
    step = tfswap.optimize(tf.function(net.step), memory_limit="1KiB")
    with monkeypatch.context() as patch, pytest.raises(tfswap.InfeasibleMemoryLimit) as error:
        patch.delattr(UnoptimisedStep, "predict")  # it takes long, and a limit in bytes needs none
        step(batch())
    assert bits(net.weights) == before
    assert error.value.limit_bytes == 1024
    assert re.search(r"most of all \w+ '[\w/]+' \(.*nets\.py:\d+\), which reads .* MiB, makes", str(error.value))
    floor = error.value.floor_bytes
    tfswap.optimize(tf.function(net.step), memory_limit=floor)(batch())
    with pytest.raises(tfswap.InfeasibleMemoryLimit):
        tfswap.optimize(tf.function(net.step), memory_limit=floor - 1)(batch())


def test_host_memory_limit():
    free = called(Net())
    free(batch())
    host = free.plan().host_bytes
    assert host > 0
    enough = tfswap.optimize(tf.function(Net().step), memory_limit=LIMIT, host_memory_limit=host)
    enough(batch())
    # Two pairs of swaps cost the same, and either may be chosen.
    assert len({(p.host_bytes, p.planned_peak_bytes, p.seconds) for p in (free.plan(), enough.plan())}) == 1
    net = Net()
    before = bits(net.weights)
    little = tfswap.optimize(tf.function(net.step), memory_limit=LIMIT, host_memory_limit=1024, tactics=("swap",))
    with pytest.raises(tfswap.InfeasibleMemoryLimit, match=r"1\.0 KiB of host memory") as error:
        little(batch())
    assert bits(net.weights) == before
    assert error.value.floor_bytes > free.plan().limit_bytes


def test_ordering_alone():
    net, twin = Net(), Net()
    step = tfswap.optimize(tf.function(net.step), memory_limit="100%", tactics=())
    assert bits(step(batch())) == bits(unoptimised(tf.function(twin.step), batch()))
    assert step.plan().order
    assert "no backward pass" not in f"{step.report().headline()} {step.report()}"
    assert swaps(step.get_concrete_function(batch())) == 0


def test_a_limit_that_the_step_keeps_by_itself_leaves_it_to_tensorflow():
    """To Grappler too. With Grappler off for the process the limit changes no bit."""
    net, twin = Net(), Net()
    generous, reference = tfswap.optimize(tf.function(net.step), memory_limit="500%"), tf.function(twin.step)
    assert bits(generous(batch())) == bits(reference(batch()))
    assert generous.plan().changes_nothing
    assert generous.get_concrete_function(batch()) is generous._function.get_concrete_function(batch())
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        runs = []
        for limit in ("500%", "110%", "100%", LIMIT):
            net = Net()
            step = tfswap.optimize(tf.function(net.step), memory_limit=limit)
            runs.append((bits(step(batch())), bits(net.weights)))
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    assert runs == [runs[0]] * 4
