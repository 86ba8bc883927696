"""`tfswap.keras.optimize`: programs as users write them, each on an arena of its own; refusals; what Keras keeps."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import pytest
from processes import on_arena

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402
from keras_programs import dense, dense_data, fit_dense  # noqa: E402

import tfswap  # noqa: E402 needs TensorFlow to be worth it

# What an LSTM of this size holds in its loops is too little to be moved; the VAE's floor is 72%, and the third's 71%,
# of which a fifth is room for batches that are made during its tiny step.
LIMITS = {"lstm": "100%", "several_inputs": "75%", "vae": "75%"}
PROGRAMS = (
    *(pytest.param(program, marks=pytest.mark.slow) for program in ("mobilenet", "vae", "convnet", "gan")),
    "transformer",
    "lstm",
    "unet",
    "several_inputs",
    "accumulated",
    "mixed",
    "parts",
    "on_batches",
)


@functools.cache
def run(program: str) -> dict[str, Any]:
    limit = LIMITS.get(program, "70%")
    code = f"import json, keras_programs; print(json.dumps(keras_programs.main({program!r}, {limit!r})))"
    return on_arena(code, 1024)


@pytest.mark.parametrize("program", PROGRAMS)
def test_values_are_those_of_plain_fit_and_the_limit_is_kept(program):
    found = run(program)
    assert found["same"], "losses, metrics, weights or the optimizer's variables differ"
    assert found["variables"] > 2
    assert found["peak"] <= found["limit"]
    if program not in LIMITS:
        assert found["peak"] < 0.75 * found["baseline"]


@pytest.mark.parametrize("program", ["several_inputs", "unet"])
def test_the_last_batch_needs_no_plan_of_its_own(program):
    assert run(program)["plans"] == 1


def test_an_epoch_whose_pipeline_holds_more_batches_needs_no_new_plan():
    assert run("several_inputs")["plannings"] == 1  # its batches are large compared with its step


def test_one_plan_serves_fit_and_batches_of_any_smaller_size():
    # fit gives a weight to every sample, train_on_batch does not; of its batches Keras traces the first as it is.
    assert run("on_batches")["plans"] <= 3


def test_a_share_leaves_batches_of_another_kind_what_the_others_have():
    """Such as have no weights, and so few rows that a share of what they take would never do."""

    def program():
        from keras_programs import dense, dense_data, settle

        import tfswap
        from tfswap.ir.permits import TENSOR_TACTICS

        settle()
        x, y = dense_data()
        model = tfswap.keras.optimize(dense(), memory_limit="75%")
        model.fit(x, y, batch_size=256, verbose=0)
        first = tfswap.keras.report(model).memory_limit_bytes
        model.train_on_batch(x[:2], y[:2])
        other = tfswap.keras.report(model).memory_limit_bytes
        try:
            alone = tfswap.keras.optimize(dense(), memory_limit="75%", tactics=TENSOR_TACTICS)
            alone.train_on_batch(x[:2], y[:2])
            refused = False
        except tfswap.InfeasibleMemoryLimit:
            refused = True
        return [first, other, refused]

    first, other, refused = on_arena(program)
    assert first == other
    assert refused


def test_arrays_that_are_given_to_train_on_batch_leave_no_room_for_a_pipeline():
    """Tensors may come from a pipeline, which then makes two more batches during the step."""

    def program():
        import numpy as np
        import tensorflow as tf
        from keras_programs import dense, dense_data, settle

        import tfswap

        settle()
        x, y = (np.tile(each, (16, 1)) for each in dense_data())
        model, floors = tfswap.keras.optimize(dense(), memory_limit=1), []
        for given in ((x, y), (tf.constant(x), tf.constant(y)), (x, y)):
            try:
                model.train_on_batch(*given)
            except tfswap.InfeasibleMemoryLimit as error:
                floors.append(error.floor_bytes)
        return [floors, x.nbytes]

    (arrays, tensors, again), batch_bytes = on_arena(program)
    assert tensors > arrays + batch_bytes
    assert tensors > again + batch_bytes


def test_batches_that_are_traced_apart_share_the_host_memory():
    def program():
        from keras_programs import dense, dense_data, settle

        import tfswap

        settle()
        x, y = dense_data()
        model = tfswap.keras.optimize(dense(), memory_limit="80%", host_memory_limit="8MiB")
        limits = []
        for rows in (256, 100, 200):
            model.train_on_batch(x[:rows], y[:rows])
            limits.append(tfswap.ops.stats().pool_limit_bytes)
        return [limits, len(set(model.make_train_function._steps.values()))]

    limits, traces = on_arena(program)
    assert traces == 2
    assert set(limits) == {8 << 20}


def test_batches_are_traced_as_keras_traces_them():
    """As a `tf.function` does that Keras makes, with what shapes and how often."""
    x, y = np.ones((8, 6, 5), "float32"), np.ones((8, 1), "float32")
    shapes = [(4, 6), (4, 5), (3, 5), (4, 6), (2, 2)]

    class Traced(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.seen = keras.layers.Dense(1), []

        def call(self, inputs):
            if not isinstance(inputs, keras.KerasTensor):
                self.seen.append(inputs.shape.as_list())
            return self.dense(tf.reduce_sum(inputs, axis=1))

    def train(model, data):
        model.compile("sgd", "mse", jit_compile=False)
        model.train_on_batch(x, y)  # builds it, which calls it eagerly too
        model.seen.clear()
        if data is not None:
            model.fit(data, verbose=0, shuffle=False)
        for rows, length in shapes:
            model.train_on_batch(x[:rows, :length], y[:rows])
        return model.seen

    for data in (
        None,
        tf.data.Dataset.from_tensors((x[:2], y[:2])),
        tf.data.Dataset.from_tensor_slices((x, y)).batch(4),
    ):
        found = train(tfswap.keras.optimize(Traced(), memory_limit="200%"), data)
        assert found == train(Traced(), data)
        assert [None, None, 5] in found


# --- without an arena: what is refused, and what stays ----------------------------------------------------------


def optimized(**compiled: Any) -> Any:
    return tfswap.keras.optimize(dense(**compiled), memory_limit="80%")


def weights(model: Any) -> list[bytes]:
    return [np.asarray(v).tobytes() for v in model.variables]


@pytest.mark.parametrize(
    ("compiled", "says"),
    [
        ({"run_eagerly": True}, r"model 'sequential.*' is compiled with run_eagerly=True"),
        ({"jit_compile": True}, r"model 'sequential.*' is compiled with jit_compile=True.*jit_compile=False"),
    ],
)
def test_a_step_that_is_no_graph_is_refused(compiled, says):
    model = optimized(**compiled)
    before = weights(model)
    with pytest.raises(tfswap.UnsupportedGraph, match=says):
        fit_dense(model)
    assert weights(model) == before


def test_the_compilation_that_keras_chose_is_left_out_and_said_once(monkeypatch, caplog):
    monkeypatch.setattr(keras.Model, "_resolve_auto_jit_compile", lambda _: True)  # as it is with a GPU
    model = optimized()
    assert model.jit_compile
    with caplog.at_level(logging.WARNING, "tfswap"):
        fit_dense(model)
        fit_dense(model)
    assert [r.message for r in caplog.records if "jit_compile is off" in r.message][1:] == []
    assert tfswap.keras.report(model).memory_limit_bytes
    assert model.jit_compile, "what evaluate and predict go by, and what is saved, stays"


def test_a_limit_that_can_not_be_met_is_refused_before_anything_runs():
    model = tfswap.keras.optimize(dense(), memory_limit="1KiB")
    before = weights(model)
    with pytest.raises(tfswap.InfeasibleMemoryLimit) as raised:
        fit_dense(model)
    assert weights(model) == before
    assert model.optimizer.iterations.numpy() == 0
    tfswap.keras.optimize(model, memory_limit=raised.value.floor_bytes)
    fit_dense(model)
    assert tfswap.keras.report(model).planned_peak_bytes <= raised.value.floor_bytes


def test_what_is_no_keras_model_is_refused():
    with pytest.raises(tfswap.TfswapError, match="needs a Keras model, not 3"):
        tfswap.keras.optimize(3, memory_limit="1GiB")
    legacy = type("Model", (), {"__module__": "tf_keras.src.engine.training", "name": "old"})
    with pytest.raises(tfswap.TfswapError, match="'old' is a Keras 2 model.*model.train_step = tfswap.optimize"):
        tfswap.keras.optimize(legacy(), memory_limit="1GiB")


def test_a_train_function_of_the_models_own_is_refused():
    class Own(keras.Sequential):
        def make_train_function(self, force=False):
            raise NotImplementedError

    with pytest.raises(tfswap.TfswapError, match="a make_train_function of its own"):
        tfswap.keras.optimize(Own(), memory_limit="1GiB")


def test_a_step_that_is_optimized_already_is_refused():
    model = optimized()
    model.train_step = tfswap.optimize(model.train_step, memory_limit="80%")
    with pytest.raises(tfswap.TfswapError, match="optimized already"):
        fit_dense(model)


def test_malformed_options_are_refused_immediately():
    with pytest.raises(tfswap.TfswapError, match="memory_limit"):
        tfswap.keras.optimize(dense(), memory_limit="lots")
    with pytest.raises(TypeError, match="unknown"):
        tfswap.keras.optimize(dense(), memory_limit="1GiB", unknown=1)


def test_there_is_no_report_before_the_first_step():
    with pytest.raises(tfswap.TfswapError, match="is not optimized"):
        tfswap.keras.report(dense())
    with pytest.raises(tfswap.TfswapError, match="has not been planned yet"):
        tfswap.keras.report(optimized())


def test_replicas_that_share_an_arena_keep_its_limit():
    def program():
        import tensorflow as tf
        from keras_programs import dense, fit_dense

        import tfswap

        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            plain, model = dense(), dense()
        model.set_weights(plain.get_weights())
        expected = fit_dense(plain)["loss"]
        tfswap.keras.optimize(model, memory_limit="90%")
        tf.config.experimental.reset_memory_stats("CPU:0")
        found = fit_dense(model)["loss"]
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        return [found == expected, peak, tfswap.keras.report(model).memory_limit_bytes]

    same, peak, limit = on_arena(program)
    assert same
    assert peak <= limit


@pytest.mark.parametrize("make", [lambda: tf.distribute.OneDeviceStrategy("CPU:0"), tf.distribute.MirroredStrategy])
def test_a_strategy_of_one_device_trains_it(make):
    with make().scope():
        model = optimized()
    plain = dense()
    plain.set_weights(model.get_weights())
    expected = fit_dense(plain)["loss"]
    assert np.allclose(fit_dense(model)["loss"], expected, rtol=1e-4)
    assert tfswap.keras.report(model).kernels, "it has been ordered"


def test_saved_cloned_and_copied_models_are_plain_and_complete(tmp_path):
    model = optimized(metrics=["mae"])
    fit_dense(model)
    x, _ = dense_data()
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    cloned = keras.models.clone_model(model)
    cloned.set_weights(model.get_weights())
    model.export(tmp_path / "exported", verbose=False)
    for other in (loaded, cloned):
        assert "make_train_function" not in vars(other)
        assert np.array_equal(other.predict(x, verbose=0), expected)
    assert np.allclose(tf.saved_model.load(tmp_path / "exported").serve(x), expected, atol=1e-5)
    assert loaded.optimizer.iterations.numpy() == model.optimizer.iterations.numpy()
    fit_dense(loaded)
    fit_dense(model)
    assert np.allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-3, atol=1e-4)


def test_compiled_again_it_is_planned_again():
    model = optimized(optimizer=keras.optimizers.Adam())
    fit_dense(model)
    first = tfswap.keras.report(model)
    model.compile(keras.optimizers.SGD(), "mae")
    fit_dense(model)
    second = tfswap.keras.report(model)
    assert second.baseline_peak_bytes < first.baseline_peak_bytes, "no moments"


def test_memory_is_reported_epoch_by_epoch(tmp_path):
    def program():
        import logging

        import tensorflow as tf
        from keras_programs import dense, fit_dense, settle
        from tensorflow.core.util import event_pb2

        import tfswap

        settle()
        reported = []
        handler = logging.Handler()
        handler.emit = lambda record: reported.append(record.getMessage())
        logging.getLogger("tfswap").addHandler(handler)
        logging.getLogger("tfswap").setLevel(logging.INFO)
        model = tfswap.keras.optimize(dense(), memory_limit="75%")
        memory = tfswap.keras.MemoryReport(str(tmp_path))
        logs = fit_dense(model, callbacks=[memory], validation_split=0.2)
        written = {}
        for file in tf.io.gfile.glob(str(tmp_path / "*")):
            for record in tf.data.TFRecordDataset(file):
                event = event_pb2.Event.FromString(record.numpy())
                for value in event.summary.value:
                    written.setdefault(value.tag, []).append((event.step, float(tf.make_ndarray(value.tensor))))
        epochs = [vars(epoch) for epoch in memory.epochs]
        return {"epochs": epochs, "written": written, "reported": reported, "logs": logs}

    found = on_arena(program)
    assert [epoch["epoch"] for epoch in found["epochs"]] == [0, 1]
    for epoch in found["epochs"]:
        assert 0 < epoch["measured_peak_bytes"] <= epoch["limit_bytes"]
        assert 0 < epoch["planned_peak_bytes"] <= epoch["limit_bytes"]
    for name in ("planned_peak_bytes", "measured_peak_bytes", "limit_bytes"):
        expected = [[epoch["epoch"], float(np.float32(epoch[name]))] for epoch in found["epochs"]]
        assert found["written"][f"memory/{name}"] == expected
    assert sum("epoch" in line and "measured" in line for line in found["reported"]) == 2
    for name, field in (("peak", "measured_peak_bytes"), ("limit", "limit_bytes")):
        assert found["logs"][f"memory_{name}_bytes"] == [epoch[field] for epoch in found["epochs"]]
    assert all(0 <= stall_s < 60 for stall_s in found["logs"]["memory_stall_s"])


def test_the_figures_of_an_epoch_are_of_all_its_steps():
    """Not of the latest alone, which may be one of few rows with a limit of its own."""
    model = optimized()
    x, y = dense_data()
    memory = tfswap.keras.MemoryReport()
    memory.set_model(model)
    memory.on_train_begin()
    figures = []
    for sizes in ((256, 4, 100), (2, 3), (4, 256)):
        memory.on_epoch_begin(len(figures))
        reports = []
        for rows in sizes:
            model.train_on_batch(x[:rows], y[:rows])
            reports.append(tfswap.keras.report(model))
        memory.on_epoch_end(len(figures))
        figures.append((max(r.planned_peak_bytes for r in reports), max(r.memory_limit_bytes for r in reports)))
    assert [(e.planned_peak_bytes, e.limit_bytes) for e in memory.epochs] == figures
    assert figures[0][0] > figures[1][0]


def test_a_memory_report_needs_an_optimized_model_and_no_arena(caplog):
    memory = tfswap.keras.MemoryReport()
    with pytest.raises(tfswap.TfswapError, match="is not optimized"):
        fit_dense(dense(), callbacks=[memory])
    with caplog.at_level(logging.INFO, "tfswap"):
        fit_dense(optimized(), callbacks=[memory], epochs=1)
    assert memory.epochs[0].measured_peak_bytes is None
    assert "keeps no statistics" in caplog.text


def test_a_line_of_the_users_is_named_in_a_folder_called_keras():
    scope = {"tf": tf}
    program = "def step(x):\n    return x * tf.py_function(lambda: x, [], tf.float32)\n"
    exec(compile(program, "/home/user/keras/train.py", "exec"), scope)
    step = tfswap.optimize(tf.function(scope["step"], autograph=False), memory_limit="1GiB")
    with pytest.raises(tfswap.UnsupportedGraph, match=r"/home/user/keras/train.py:2"):
        step(tf.ones([4096]))
