"""`tfswap.optimize` as a user uses it: forms, signatures, reports, plans. Bits are those of the tf.function."""

from __future__ import annotations

import copy
import functools
import gc
import json
import logging
import pickle
import weakref

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from nets import LIMIT, WIDTH, Net, batch, bits, called, swaps, unoptimised  # noqa: E402

import tfswap  # noqa: E402 needs TensorFlow to be worth it
from tfswap.compiler import compiler  # noqa: E402 needs TensorFlow too
from tfswap.frontends.tracing import stand_ins  # noqa: E402 needs TensorFlow too

pytestmark = pytest.mark.usefixtures("nothing_left_in_the_pool")

# --- forms ----------------------------------------------------------------------------------------------


def decorated(net):
    @tfswap.optimize(memory_limit=LIMIT)
    @tf.function
    def step(x):
        """Train."""
        return net.step(x)

    return step


def of_a_python_function(net):
    return tfswap.optimize(net.step, memory_limit=LIMIT)


def of_a_partial(net):
    return tfswap.optimize(functools.partial(Net.step, net), memory_limit=LIMIT)


@pytest.mark.parametrize("form", [decorated, called, of_a_python_function, of_a_partial])
def test_each_form_swaps_and_changes_no_bit(form):
    import tfswap.ops

    net, twin = Net(), Net()
    step, reference = form(net), tf.function(twin.step)
    tfswap.ops.reset_stats()
    for seed in range(3):
        x = batch(seed=seed)
        assert bits(step(x)) == bits(unoptimised(reference, x))
    assert bits(net.weights) == bits(twin.weights)
    assert tfswap.ops.stats().out_copies >= 3
    assert step.plan().evictions


def test_what_waits_for_an_argument_finds_it_there():
    """A step with a loop in it runs as it was traced: TensorFlow's optimizers would leave such an edge out."""
    net, twin = Net(), Net()

    def step(of, x):
        with tf.control_dependencies([x]):
            turns = tf.while_loop(lambda i: i < 3, lambda i: (i + 1,), [tf.identity(net.weights[0][0, 0] * 0)])
        return of.step(x + turns[0] - turns[0])

    made = tfswap.optimize(lambda x: step(net, x), memory_limit=LIMIT)
    reference = tf.function(lambda x: step(twin, x))
    for seed in range(2):
        x = batch(seed=seed)
        assert bits(made(x)) == bits(unoptimised(reference, x))
    assert made.plan().evictions


def test_it_keeps_the_function_s_name_and_documentation():
    step = decorated(Net())
    assert step.__name__ == "step"
    assert step.__doc__ == "Train."
    assert step.python_function.__name__ == "step"


def test_arguments_by_keyword_python_arguments_and_defaults():
    net, twin = Net(), Net()
    step, reference = called(net), tf.function(twin.step)
    x = batch()
    for args, kwargs in [((x,), {}), ((), {"x": x}), ((x, 2.0), {}), ((x,), {"scale": tf.constant(3.0)})]:
        assert bits(step(*args, **kwargs)) == bits(unoptimised(reference, *args, **kwargs))
        assert swaps(step.get_concrete_function(*args, **kwargs))
    assert bits(net.weights) == bits(twin.weights)


def test_nested_structures_go_in_and_come_out():
    net = Net()

    def body(inputs, *rest, **named):
        (a, b), c = inputs["pair"], inputs["one"]
        loss = net.loss(a + b) + net.loss(c) + tf.add_n(list(rest)) + named["last"]
        out = {"loss": loss, "none": None, "tuple": (a[0], [tf.constant("text"), 5])}
        return {**out, "ragged": tf.RaggedTensor.from_row_lengths(b[0, :3], [1, 2])}

    x = batch(512)
    inputs = {"pair": (x, x + 1.0), "one": x * 2.0}
    args, kwargs = (inputs, tf.constant(1.0), tf.constant(2.0)), {"last": tf.constant(0.5)}
    step = tfswap.optimize(tf.function(body), memory_limit="90%")
    result, expected = step(*args, **kwargs), unoptimised(tf.function(body), *args, **kwargs)
    assert not step.plan().changes_nothing
    tf.nest.assert_same_structure(result, expected, expand_composites=True)
    assert result["none"] is None
    assert isinstance(result["ragged"], tf.RaggedTensor)
    assert bits(tf.nest.flatten(result, expand_composites=True)) == bits(
        tf.nest.flatten(expected, expand_composites=True)
    )


@pytest.mark.parametrize("value", [None, "text", 3, (), {"a": None}])
def test_an_output_that_is_no_tensor(value):
    net, twin = Net(), Net()

    def of(net):
        def body(x):
            net.step(x)
            return value

        return body

    step = tfswap.optimize(tf.function(of(net)), memory_limit=LIMIT)
    reference = tf.function(of(twin))
    result, expected = step(batch()), unoptimised(reference, batch())
    assert type(result) is type(expected)
    assert bits(result) == bits(expected)
    assert bits(net.weights) == bits(twin.weights)
    assert not step.plan().changes_nothing


@tfswap.optimize(memory_limit=LIMIT)
@tf.function
def at_module_level(x):
    return tf.reduce_sum(x)


def test_it_is_used_as_the_tf_function_that_it_wraps():
    spec = [tf.TensorSpec([None, WIDTH])]
    plain = tf.function(Net().step, input_signature=spec)
    step = tfswap.optimize(plain, memory_limit=LIMIT)
    assert isinstance(step, tfswap.OptimizedFunction)
    assert isinstance(step, tf.types.experimental.PolymorphicFunction)
    assert isinstance(step, type(plain))
    assert step.input_signature == plain.input_signature == tuple(spec)
    assert step.function_type == plain.function_type
    assert step.function_spec.fullargspec == plain.function_spec.fullargspec
    assert step.name == plain.name
    step(batch())
    assert step.experimental_get_tracing_count() == plain.experimental_get_tracing_count() == 1
    assert step.pretty_printed_concrete_signatures() == plain.pretty_printed_concrete_signatures()
    with pytest.raises(tfswap.UnsupportedGraph, match="has no XLA form"):
        step.experimental_get_compiler_ir(batch())
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = step.no_such_thing
    assert LIMIT in repr(step)


def test_one_with_a_name_is_pickled_and_copied_as_functions_are():
    assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level
    assert copy.copy(at_module_level) is at_module_level
    assert copy.deepcopy(at_module_level) is at_module_level


def test_one_without_a_name_is_copied_with_what_it_trains():
    net, twin = Net(), Net()
    step, reference = called(net), tf.function(twin.step)
    step(batch())
    unoptimised(reference, batch())
    before = bits(net.weights)
    other = copy.deepcopy(step)
    expected = bits(unoptimised(reference, batch()))
    assert bits(other(batch())) == expected
    assert bits(net.weights) == before
    assert other.plan().evictions
    assert bits(copy.copy(step)(batch())) == expected, "a shallow copy trains what the original does"


def test_run_functions_eagerly_is_heeded(caplog):
    step = called(Net())
    tf.config.run_functions_eagerly(True)
    try:
        with caplog.at_level(logging.WARNING, "tfswap"):
            for _ in range(2):
                step(batch())
    finally:
        tf.config.run_functions_eagerly(False)
    assert step.experimental_get_tracing_count() == 0
    assert [r.message for r in caplog.records if "eagerly" in r.message] == [caplog.records[0].message]


# --- retracing --------------------------------------------------------------------------------------------


def test_a_first_call_visits_all_objects_once(monkeypatch):
    """TensorFlow alone has some 100,000: collecting them twice takes as long as planning a small step."""
    generations: list[int] = []
    whole = gc.collect
    monkeypatch.setattr(gc, "collect", lambda generation=2: generations.append(generation) or whole(generation))
    called(Net())(batch())
    assert sorted(generations) == [1, 2]


def test_each_signature_is_planned_once():
    step = called(Net())
    step(batch(1024))
    first = step.plan()
    step(batch(2048))
    second = step.plan()
    assert second.fingerprint != first.fingerprint
    assert second.limit_bytes > first.limit_bytes
    step(batch(1024))
    assert step.plan() is first
    step(batch(2048))
    assert step.plan() is second


def test_an_open_dimension_is_planned_again_only_for_larger_sizes():
    net, twin = Net(), Net()
    spec = [tf.TensorSpec([None, WIDTH])]
    step = tfswap.optimize(tf.function(net.step, input_signature=spec), memory_limit=LIMIT)
    reference = tf.function(twin.step, input_signature=spec)
    plans = []
    for rows in (1024, 512, 1024, 2048, 1000, 2048):
        assert bits(step(batch(rows))) == bits(unoptimised(reference, batch(rows)))
        plans.append(step.plan())
    assert bits(net.weights) == bits(twin.weights)
    assert plans[0] is plans[1] is plans[2]
    assert plans[3] is not plans[0]
    assert plans[3].planned_peak_bytes > plans[0].planned_peak_bytes
    assert plans[5] is plans[3]
    assert plans[4] in (plans[0], plans[3])


# --- methods and variables --------------------------------------------------------------------------------


class Trainer:
    def __init__(self, layers: int):
        self.net = Net(layers)

    @tfswap.optimize(memory_limit=LIMIT)
    @tf.function
    def step(self, x):
        return self.net.step(x)


def test_a_method_is_planned_for_each_instance():
    small, large, twin = Trainer(4), Trainer(8), Net(8)
    reference = tf.function(twin.step)
    small.step(batch())
    for _ in range(2):
        assert bits(large.step(batch())) == bits(unoptimised(reference, batch()))
    assert bits(large.net.weights) == bits(twin.weights)
    assert small.step is small.step
    assert small.step is not large.step
    assert len(large.step.plan().order) > len(small.step.plan().order)
    assert Trainer.step.__name__ == "step"


def test_an_instance_is_not_kept_alive():
    trainer = Trainer(4)
    trainer.step(batch())
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None


def test_variables_made_by_the_first_call():
    class Lazy(tf.Module):
        def __init__(self):
            super().__init__()
            self.net = None

        def step(self, x):
            if self.net is None:
                self.net = Net()
            return self.net.step(x)

    lazy, twin = Lazy(), Lazy()
    step, reference = tfswap.optimize(tf.function(lazy.step), memory_limit=LIMIT), tf.function(twin.step)
    for _ in range(3):
        assert bits(step(batch())) == bits(unoptimised(reference, batch()))
    assert bits(lazy.net.weights) == bits(twin.net.weights)
    assert step.plan().evictions


# --- reports, plans, analyses ---------------------------------------------------------------------------------


def test_report_and_plan_need_a_call():
    step = called(Net())
    with pytest.raises(tfswap.TfswapError, match="not been planned yet"):
        step.plan()
    with pytest.raises(tfswap.TfswapError, match="not been planned yet"):
        step.report()
    step.get_concrete_function(tf.TensorSpec([1024, WIDTH]))
    assert step.plan().evictions


def test_a_concrete_function_is_the_rewritten_one():
    net, twin = Net(), Net()
    step, reference = called(net), tf.function(twin.step)
    concrete = step.get_concrete_function(tf.TensorSpec([1024, WIDTH]))
    assert swaps(concrete) >= 4
    assert bits(concrete(batch())) == bits(unoptimised(reference, batch()))
    assert bits(net.weights) == bits(twin.weights)
    assert step.get_concrete_function(tf.TensorSpec([1024, WIDTH])) is concrete


OPEN = [tf.TensorSpec([None, WIDTH])]


def test_a_concrete_function_of_open_dimensions_is_planned_when_it_is_called():
    net, twin = Net(), Net()
    step, plain = called(net, input_signature=OPEN), tf.function(twin.step, input_signature=OPEN)
    concrete, reference = step.get_concrete_function(), plain.get_concrete_function()
    assert step.plans == 0
    assert step.get_concrete_function() is concrete
    assert isinstance(concrete, tf.types.experimental.ConcreteFunction)
    assert concrete.pretty_printed_signature(False) == reference.pretty_printed_signature(False)
    for rows in (1024, 512, 2048):
        assert bits(concrete(batch(rows))) == bits(unoptimised(reference, batch(rows)))
    assert bits(concrete(x=batch(64))) == bits(unoptimised(reference, x=batch(64)))
    assert step.plans == 2, "one for the smaller ones, one for 2048"
    assert swaps(step.get_concrete_function()) >= 4, "it looks like the largest"
    # That of a plan takes larger sizes too, as its trace does, and they are planned for.
    assert bits(step.get_concrete_function()(batch(4096))) == bits(unoptimised(reference, batch(4096)))
    assert step.plans == 3
    assert bits(net.weights) == bits(twin.weights)


def test_a_concrete_function_of_open_dimensions_inside_another_function():
    concrete = called(Net(), input_signature=OPEN).get_concrete_function()
    reference = tf.function(Net().step)
    assert bits(tf.function(concrete)(batch())) == bits(unoptimised(reference, batch()))
    with pytest.raises(tfswap.UnsupportedGraph, match=r"x \(None, 128\) have open dimensions, .* call the"):
        tf.function(concrete, input_signature=OPEN).get_concrete_function()


def test_a_concrete_function_covers_the_sizes_of_its_signature():
    step = called(Net(), input_signature=OPEN)
    small = step.get_concrete_function(tf.TensorSpec([512, WIDTH]))
    peak = step.plan().planned_peak_bytes
    large = step.get_concrete_function(batch(2048))
    assert large is not small
    assert step.plan().planned_peak_bytes > peak
    assert step.get_concrete_function(tf.TensorSpec([512, WIDTH])) is small
    assert step.get_concrete_function(tf.TensorSpec([1024, WIDTH])) is large
    assert step.get_concrete_function(x=tf.TensorSpec([256, WIDTH])) is small
    for spec in ((), OPEN):
        assert step.get_concrete_function(*spec) is large, "open: the one for the largest"
    step.get_concrete_function(tf.TensorSpec([4096, WIDTH]))
    assert step.experimental_get_tracing_count() == 1


def test_stand_ins_follow_the_order_of_keyword_only_arguments():
    def spec(rows, width):
        return tf.TensorSpec([rows, width])

    function = tf.function(lambda x, *, b, a: tf.reduce_sum(x) + tf.reduce_sum(b) * tf.reduce_sum(a))
    concrete = function.get_concrete_function(spec(None, 2), b=spec(None, 3), a=spec(None, 4))
    inputs = stand_ins(function, concrete, (spec(5, 2),), {"b": spec(6, 3), "a": spec(7, 4)})
    assert [each.shape for each in inputs] == [[5, 2], [7, 4], [6, 3]]


def test_a_limit_that_is_kept_is_not_below_the_floor(monkeypatch):
    step = called(Net())
    step(batch())
    monkeypatch.setattr(compiler, "floor_bytes", lambda _: 2**40)  # what comes next is planned in another arena
    assert step.report().planned_peak_bytes <= step.report().floor_bytes <= step.report().memory_limit_bytes


def test_the_report_adds_up():
    step = called(Net())
    step(batch())
    report, plan = step.report(), step.plan()
    assert report.planned_peak_bytes == plan.planned_peak_bytes <= report.memory_limit_bytes == plan.limit_bytes
    assert report.memory_limit_bytes == report.baseline_peak_bytes * int(LIMIT[:-1]) // 100
    assert report.floor_bytes <= report.memory_limit_bytes
    assert {row.name for row in report.swapped} == {eviction.tensor for eviction in plan.evictions}
    assert all(row.reason for row in report.rows)
    assert any(row.source and "nets.py" in row.source for row in report.swapped)
    loaded = json.loads(report.to_json())
    assert loaded["floor_bytes"] == report.floor_bytes
    assert len(loaded["rows"]) == len(report.rows)
    assert "smallest limit" in str(report)
    assert "<table>" in report._repr_html_()


def test_a_plan_can_be_saved_and_given_back(tmp_path):
    net = Net()
    step = called(net)
    step(batch())
    step.plan().save(tmp_path / "plan.json")
    for given in (tmp_path / "plan.json", str(tmp_path / "plan.json"), tfswap.Plan.load(tmp_path / "plan.json")):
        again = tfswap.optimize(tf.function(net.step), plan=given)
        again(batch())
        assert again.plan() == step.plan()
        assert swaps(again.get_concrete_function(batch())) == swaps(step.get_concrete_function(batch()))
    with pytest.raises(tfswap.InvalidModel, match="no plan can be read from .*nowhere"):
        tfswap.optimize(tf.function(net.step), plan=tmp_path / "nowhere")
    with pytest.raises(tfswap.TfswapError, match="plan is 5, of type int"):
        tfswap.optimize(tf.function(net.step), plan=5)
    other = tfswap.optimize(tf.function(Net(layers=3).step), plan=step.plan())
    with pytest.raises(tfswap.InvalidModel, match="another graph"):
        other(batch())


def test_a_given_plan_is_held_against_the_requested_limit(caplog):
    made = called(Net())
    made(batch())
    plan = made.plan()
    net = Net()
    before = bits(net.weights)
    options = {"memory_limit": plan.planned_peak_bytes - 1, "plan": plan}
    strict = tfswap.optimize(tf.function(net.step), on_exceeded="raise", **options)
    with pytest.raises(tfswap.TfswapError, match="the given plan peaks at .* and the limit is .*Plan again"):
        strict(batch())
    assert bits(net.weights) == before
    with caplog.at_level(logging.WARNING, "tfswap"):
        tfswap.optimize(tf.function(net.step), **options)(batch())
        assert ["the given plan peaks at" in r.message for r in caplog.records] == [True]
        caplog.clear()
        roomy = tfswap.optimize(tf.function(net.step), memory_limit="90%", plan=plan)
        roomy(batch())
    assert not caplog.records
    assert roomy.plan().limit_bytes == roomy.report().baseline_peak_bytes * 9 // 10
    assert roomy.plan().evictions == plan.evictions


def test_analyze_reports_a_limit_that_can_t_be_met():
    net, twin = Net(), Net()
    step = tfswap.optimize(tf.function(net.step), memory_limit="1KiB", mode="analyze")
    assert np.allclose(step(batch()), tf.function(twin.step)(batch()))
    report = step.report()
    assert not report.keeps_limit
    assert report.memory_limit_bytes == 1024 < report.floor_bytes < report.planned_peak_bytes
    assert json.loads(report.to_json())["keeps_limit"] is False
    assert "NOT KEPT" in str(report)
    tfswap.optimize(tf.function(net.step), memory_limit=report.floor_bytes)(batch())
    without = tfswap.optimize(tf.function(net.step), mode="analyze")
    without(batch())
    assert without.report().memory_limit_bytes is None
    assert without.report().keeps_limit


def test_analyze_changes_nothing():
    import tfswap.ops

    net, twin = Net(), Net()
    step = tfswap.optimize(tf.function(net.step), memory_limit=LIMIT, mode="analyze")
    reference = tf.function(twin.step)
    tfswap.ops.reset_stats()
    assert np.allclose(step(batch()), reference(batch()))
    assert swaps(step.get_concrete_function(batch())) == 0
    assert tfswap.ops.stats().out_copies == 0
    assert step.report().swapped
