"""`optimize_graph` on SavedModels: the same values, under the limit, and nothing half-written.

More than 500 lines: these tests share models that are traced and saved once.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from processes import on_arena, run_forked
from saved_models import ARENA_MIB

import tfswap
from tfswap.device import machine
from tfswap.errors import InfeasibleMemoryLimit, InvalidModel, TfswapError, UnsupportedGraph
from tfswap.ir.permits import TENSOR_TACTICS

BATCH = 4096


def train(model: Path, reference: bool = False) -> dict[str, Any]:
    arguments = f"{str(model)!r}, {BATCH}, {reference}"
    return on_arena(f"import json, saved_models; print(json.dumps(saved_models.train({arguments})))", ARENA_MIB)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    names = ("plain", "keras")
    for name in names:
        run_forked(f"import saved_models; saved_models.save({name!r}, {str(folder / name)!r})")
    return {name: folder / name for name in names}


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for the kernels that the training processes run with."""
    monkeypatch.setattr(machine, "_onednn", lambda: False)


@pytest.mark.parametrize(("name", "limits"), [("plain", ("60%", "floor")), ("keras", ("60%",))])
@pytest.mark.usefixtures("plain_kernels")
def test_rewritten_model_trains_under_the_limit_with_the_same_bits(
    models: dict[str, Path], tmp_path: Path, name: str, limits: tuple[str, ...]
) -> None:
    expected = train(models[name], reference=True)
    of_tensors = {"tactics": TENSOR_TACTICS}  # variables would be in the arena when the first step begins
    analysis = optimize(models[name], tmp_path, memory_limit=None, mode="analyze", **of_tensors)
    for limit in limits:
        wanted = analysis.floor_bytes if limit == "floor" else limit
        report = optimize(models[name], tmp_path / limit, memory_limit=wanted, **of_tensors)
        got = train(tmp_path / limit)
        assert got["losses"] == expected["losses"]
        assert got["bits"] == expected["bits"]
        plan = tfswap.Plan.load(tmp_path / limit / "tfswap_plan.json")
        assert got["copies"] == 3 * sum(a.out is not None for a in plan.evictions) > 0
        assert got["peak"] <= report.memory_limit_bytes < expected["peak"]
        assert 0.95 * report.planned_peak_bytes <= got["peak"] <= 1.02 * report.planned_peak_bytes


def optimize(model: Path, folder: Path, **options: Any) -> Any:
    return tfswap.optimize_graph(model, folder, **{"memory_limit": "60%", "batch_size": BATCH, **options})


def test_only_the_function_library_changes(models: dict[str, Path], tmp_path: Path) -> None:
    from tensorflow.core.protobuf import saved_model_pb2

    optimize(models["plain"], tmp_path / "out")
    before, after = (
        saved_model_pb2.SavedModel.FromString((p / "saved_model.pb").read_bytes())
        for p in (models["plain"], tmp_path / "out")
    )
    added = {"README.txt", "tfswap_plan.json", "tfswap_request.json", "tfswap_original.pb.zlib"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in models["plain"].iterdir()} | added
    readme = (tmp_path / "out" / "README.txt").read_text()
    assert "import tfswap.ops" in readme
    assert "pip install .  " in readme and "clone of tfswap" in readme  # in no index yet
    for file in (models["plain"] / "variables").iterdir():
        assert filecmp.cmp(file, tmp_path / "out" / "variables" / file.name, shallow=False)
    old, new = before.meta_graphs[0], after.meta_graphs[0]
    assert old.object_graph_def == new.object_graph_def
    assert dict(old.signature_def) == dict(new.signature_def)
    assert list(old.graph_def.node) == list(new.graph_def.node)
    functions = {f.signature.name: f for f in new.graph_def.library.function}
    changed = [f.signature.name for f in old.graph_def.library.function if functions[f.signature.name] != f]
    assert len(changed) == 1
    assert "train_step" in changed[0]
    assert set(functions) - {f.signature.name for f in old.graph_def.library.function} == {f"{changed[0]}_tfswap"}


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with custom gradients, in the step and in a function that is differentiated after loading."""
    import tensorflow as tf

    @tf.custom_gradient
    def steep(x: Any) -> Any:
        y = tf.exp(-x * x)
        return y, lambda upstream: upstream * y * -2.0

    batch = tf.TensorSpec([BATCH, 64])

    class Custom(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = [tf.Variable(tf.random.stateless_normal([64, 64], [i, 1]) * 0.1) for i in range(6)]

        @tf.function(input_signature=[batch])
        def predict(self, x: Any) -> Any:
            for weight in self.weights:
                x = steep(x @ weight)
            return x

        @tf.function(input_signature=[batch])
        def train_step(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                features = self.predict.python_function(x)
                loss = tf.reduce_mean(features)
            for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
                weight.assign_sub(0.1 * gradient)
            return features

    model = tmp_path_factory.mktemp("custom") / "model"
    tf.saved_model.save(Custom(), str(model))
    return model


def test_a_custom_gradient_goes_with_the_body_that_it_was_of(custom: Path, tmp_path: Path) -> None:
    import tensorflow as tf

    import tfswap.ops  # noqa: F401 the rewritten model's
    from tfswap.exporters.function import grappler_off

    optimize(custom, tmp_path / "out", memory_limit="80%")
    x = tf.random.stateless_normal([BATCH, 64], [1, 2])
    found = []
    for path in (custom, tmp_path / "out"):
        model = tf.saved_model.load(str(path))
        with grappler_off():
            features = [model.train_step(x).numpy() for _ in range(2)]
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = model.predict(x)
        found.append([*features, tape.gradient(result, x).numpy(), *(v.numpy() for v in model.weights)])
    assert [a.tobytes() for a in found[0]] == [a.tobytes() for a in found[1]]
    with tf.GradientTape() as tape, pytest.raises(LookupError, match="tfswap has rewritten|No gradient"):
        tape.watch(x)
        model.train_step(x)


def test_a_capture_that_is_not_there_is_refused(custom: Path, tmp_path: Path) -> None:
    from tensorflow.core.protobuf import saved_model_pb2

    model = tmp_path / "model"
    shutil.copytree(custom, model)
    proto = saved_model_pb2.SavedModel.FromString((model / "saved_model.pb").read_bytes())
    nodes = proto.meta_graphs[0].object_graph_def.nodes
    captured = [n.captured_tensor for n in nodes if n.WhichOneof("kind") == "captured_tensor"]
    next(c for c in captured if "predict" in c.concrete_function).name = "nowhere:0"
    (model / "saved_model.pb").write_bytes(proto.SerializeToString())
    with pytest.raises(InvalidModel, match="captures 'nowhere:0' of the function '__inference_predict"):
        optimize(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_same_model_and_limit_give_the_same_file(models: dict[str, Path], tmp_path: Path) -> None:
    first = optimize(models["plain"], tmp_path / "a")
    plan = tfswap.Plan.load(tmp_path / "a" / "tfswap_plan.json")
    again = optimize(models["plain"], tmp_path / "b", plan=plan)
    assert (tmp_path / "a" / "saved_model.pb").read_bytes() == (tmp_path / "b" / "saved_model.pb").read_bytes()
    assert first.planned_peak_bytes == again.planned_peak_bytes


def test_a_limit_above_the_peak_gives_a_plain_copy(models: dict[str, Path], tmp_path: Path) -> None:
    report = optimize(models["plain"], tmp_path / "out", memory_limit="10GiB")
    assert report.kernels == 0
    for name in ("saved_model.pb", "fingerprint.pb"):
        assert filecmp.cmp(models["plain"] / name, tmp_path / "out" / name, shallow=False)
    assert not (tmp_path / "out" / "README.txt").exists()


def test_a_signature_names_the_function_that_it_calls(models: dict[str, Path], tmp_path: Path) -> None:
    by_name = optimize(models["plain"], tmp_path / "a")
    by_signature = optimize(models["plain"], tmp_path / "b", function="train")
    assert by_signature.step == by_name.step
    assert (tmp_path / "a" / "saved_model.pb").read_bytes() == (tmp_path / "b" / "saved_model.pb").read_bytes()


def test_every_trace_that_trains_is_rewritten(models: dict[str, Path], tmp_path: Path) -> None:
    report = optimize(models["plain"], tmp_path / "out", function="traced_step", batch_size=None, memory_limit="90%")
    plans = [tfswap.Plan.load(p) for p in sorted((tmp_path / "out").glob("tfswap_plan*.json"))]
    assert len(plans) == 2
    assert report.planned_peak_bytes in {p.planned_peak_bytes for p in plans}
    assert all(not p.changes_nothing for p in plans)
    assert {p.limit_bytes for p in plans} == {report.baseline_peak_bytes * 90 // 100}  # of the one that takes most


def test_the_floor_of_several_traces_is_the_highest(models: dict[str, Path], tmp_path: Path) -> None:
    asked = {"function": "traced_step", "batch_size": None, "tactics": TENSOR_TACTICS}
    with pytest.raises(tfswap.InfeasibleMemoryLimit) as refused:
        optimize(models["plain"], tmp_path / "out", **asked, memory_limit="60%")
    assert optimize(models["plain"], tmp_path / "out", **asked, memory_limit=refused.value.floor_bytes)


def test_sizes_by_argument_are_those_of_a_batch(models: dict[str, Path], tmp_path: Path) -> None:
    by_batch = optimize(models["plain"], tmp_path / "a", mode="analyze")
    shapes = {"x": (BATCH, 256), "y": (BATCH, 256)}
    by_shape = optimize(models["plain"], tmp_path / "b", batch_size=None, input_shapes=shapes, mode="analyze")
    assert by_shape == by_batch
    assert list(tmp_path.iterdir()) == []


def test_look_ups_in_tables_leave_no_size_open(tmp_path: Path) -> None:
    import tensorflow as tf

    import tfswap.ops  # noqa: F401 the rewritten model's
    from tfswap.exporters.function import grappler_off

    (tmp_path / "words.txt").write_text("a\nb\n")
    listed = tf.lookup.TextFileInitializer(
        str(tmp_path / "words.txt"),
        tf.string,
        tf.lookup.TextFileIndex.WHOLE_LINE,
        tf.int64,
        tf.lookup.TextFileIndex.LINE_NUMBER,
    )

    class Worded(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = tf.lookup.StaticHashTable(listed, default_value=0)
            self.rows = tf.Variable(tf.random.stateless_normal([2, 64], [1, 1]))
            self.weights = [tf.Variable(tf.random.stateless_normal([64, 64], [i, 1]) * 0.1) for i in range(6)]

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
        def train_step(self, words: Any) -> Any:
            variables = [self.rows, *self.weights]
            with tf.GradientTape() as tape:
                x = tf.gather(self.rows, self.table.lookup(words))
                for weight in self.weights:
                    x = tf.nn.relu(x @ weight)
                loss = tf.reduce_mean(x * x)
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
            return {"loss": loss, "features": x}

    tf.saved_model.save(Worded(), str(tmp_path / "model"))
    report = optimize(tmp_path / "model", tmp_path / "out", memory_limit="80%")
    assert report.swapped
    onednn = machine.current_device()[1].onednn  # whose kernels' workspaces are not known
    assert all(onednn and "(MatMul)" in kernel for kernel in report.unmodelled)
    words = tf.constant(["a", "b", "c"] * BATCH)[:BATCH]
    found = []
    for path in ("model", "out"):
        model = tf.saved_model.load(str(tmp_path / path))
        with grappler_off():
            found.append([model.train_step(words)["features"].numpy().tobytes() for _ in range(2)])
    assert found[0] == found[1]


def damage(model: Path) -> None:
    (model / "saved_model.pb").write_bytes(b"\x0a\xff not a model")


def empty(model: Path) -> None:
    (model / "saved_model.pb").write_bytes(b"")


def remove(model: Path) -> None:
    shutil.rmtree(model)


def take_away_the_graph(model: Path) -> None:
    (model / "saved_model.pb").unlink()


def put_a_folder_there(model: Path) -> None:
    (model / "saved_model.pb").unlink()
    (model / "saved_model.pb").mkdir()


def cut_the_graph(model: Path) -> None:
    whole = (model / "saved_model.pb").read_bytes()
    (model / "saved_model.pb").write_bytes(whole[: len(whole) // 2])


def cut_a_wire(model: Path) -> None:
    """Let a node of the step read one that is not there."""
    from tensorflow.core.protobuf import saved_model_pb2

    proto = saved_model_pb2.SavedModel.FromString((model / "saved_model.pb").read_bytes())
    for function in proto.meta_graphs[0].graph_def.library.function:
        for node in function.node_def:
            if node.op == "ReluGrad":
                node.input[0] = "nowhere:output:0"
    (model / "saved_model.pb").write_bytes(proto.SerializeToString())


def misnumber_the_objects(model: Path) -> None:
    from tensorflow.core.protobuf import saved_model_pb2

    proto = saved_model_pb2.SavedModel.FromString((model / "saved_model.pb").read_bytes())
    for node in proto.meta_graphs[0].object_graph_def.nodes:
        for child in node.children:
            child.node_id += 10_000
    (model / "saved_model.pb").write_bytes(proto.SerializeToString())


def lose_the_objects(model: Path) -> None:
    from tensorflow.core.protobuf import saved_model_pb2

    proto = saved_model_pb2.SavedModel.FromString((model / "saved_model.pb").read_bytes())
    proto.meta_graphs[0].ClearField("object_graph_def")
    proto.meta_graphs[0].signature_def["train"].method_name = "train"
    (model / "saved_model.pb").write_bytes(proto.SerializeToString())


def take_away_the_variables(model: Path) -> None:
    shutil.rmtree(model / "variables")


def take_away_the_index(model: Path) -> None:
    (model / "variables" / "variables.index").unlink()


def damage_the_index(model: Path) -> None:
    (model / "variables" / "variables.index").write_bytes(b"not an index, and long enough to have a footer " * 4)


def data_of(model: Path) -> Path:
    (data,) = (model / "variables").glob("variables.data-*")
    return data


def take_away_the_data(model: Path) -> None:
    data_of(model).unlink()


def cut_the_data(model: Path) -> None:
    os.truncate(data_of(model), 1000)


def damage_the_data(model: Path) -> None:
    with data_of(model).open("r+b") as file:
        file.seek(100_000)
        file.write(b"four")


def lose_an_asset(model: Path) -> None:
    from tensorflow.core.protobuf import saved_model_pb2

    proto = saved_model_pb2.SavedModel.FromString((model / "saved_model.pb").read_bytes())
    proto.meta_graphs[0].asset_file_def.add(filename="words.txt")
    (model / "saved_model.pb").write_bytes(proto.SerializeToString())


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (damage, "can't be read"),
        (empty, "is empty"),
        (remove, "does not exist"),
        (take_away_the_graph, "holds no saved_model.pb"),
        (put_a_folder_there, "can't be read: .*saved_model.pb"),
        (cut_the_graph, "can't be read"),
        (cut_a_wire, "'train_step' of .* is damaged.*nowhere"),
        (misnumber_the_objects, "is damaged"),
        (lose_the_objects, r"of TensorFlow 2\..*no object graph that names functions.*or has lost it"),
        (take_away_the_variables, "variables .* are missing or damaged"),
        (take_away_the_index, "variables .* are missing or damaged"),
        (damage_the_index, "variables .* are missing or damaged"),
        (take_away_the_data, "variables .* are missing or damaged"),
        (cut_the_data, "variables .* are missing or damaged"),
        (damage_the_data, "variables .* are missing or damaged.*[Cc]hecksum"),
        (lose_an_asset, "the asset 'words.txt', which is missing"),
    ],
)
def test_a_broken_model_is_refused(models: dict[str, Path], tmp_path: Path, break_it: Any, says: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(models["plain"], model)
    break_it(model)
    with pytest.raises(InvalidModel, match=says):
        optimize(model, tmp_path / "out")
    assert not any(p.name != "model" for p in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"function": "fit"}, InvalidModel, "has no function 'fit'.*predict.*train_step"),
        (
            {"function": "predict"},
            UnsupportedGraph,
            "^'predict' has no backward pass: .*"
            "file's functions these train: 'compiled_step', 'looping_step', 'traced_step', 'train', 'train_step'",
        ),
        ({"function": "looping_step"}, UnsupportedGraph, "loop over a dataset"),
        ({"function": "compiled_step"}, UnsupportedGraph, "compiled by XLA"),
        ({"batch_size": None}, UnsupportedGraph, r"x \[\?, 256\]; y \[\?, 256\]"),
        ({"batch_size": 0}, TfswapError, "batch_size is 0"),
        ({"batch_size": True}, TfswapError, "batch_size is True, of type bool"),
        ({"batch_size": 8.0}, TfswapError, "batch_size is 8.0, of type float"),
        ({"batch_size": 2**62}, TfswapError, "input shapes"),
        ({"batch_size": 10**40}, TfswapError, "input shapes"),
        ({"input_shapes": [8, 256]}, TfswapError, "give a dict"),
        ({"input_shapes": {"x": 8}}, TfswapError, r"input_shapes\['x'\] is 8"),
        ({"input_shapes": {"x": "8,256"}}, TfswapError, "give whole numbers"),
        ({"input_shapes": {"x": (-1, 256)}}, TfswapError, "give whole numbers"),
        ({"function": None}, TfswapError, "function is None"),
        ({"function": ""}, InvalidModel, "has no function ''"),
        ({"feeds": ["x"]}, TfswapError, "feeds is .*, and it is for a GraphDef"),
        ({"fetches": ["loss"]}, TfswapError, "fetches is .*, and it is for a GraphDef or a MetaGraphDef"),
        ({"signature": "train"}, TfswapError, "signature is 'train'.*give function="),
        ({"plan": "nowhere.json"}, InvalidModel, "no plan can be read from 'nowhere.json'"),
        ({"plan": {}}, TfswapError, "plan is {}, of type dict"),
        ({"tactics": "swap"}, TfswapError, "give a list of names"),
        ({"input_shapes": {"z": (1, 2)}}, InvalidModel, "'z'.*x, y"),
        ({"input_shapes": {"x": (8, 255)}}, InvalidModel, "255"),
        ({"input_shapes": {"x": (8, 256), "y": (9, 256)}}, InvalidModel, "input shapes"),
        ({"memory_limit": "much"}, TfswapError, "'much'.*not a size"),
        ({"memory_limit": -1}, TfswapError, "must be positive"),
        ({"memory_limit": "1MiB"}, InfeasibleMemoryLimit, "needs at least"),
        ({"tactics": ("magic",)}, TfswapError, "'magic'"),
        ({"mode": "guess"}, TfswapError, "'guess'"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any], error: type[TfswapError], says: str
) -> None:
    with pytest.raises(error, match=says):
        optimize(models["plain"], tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_the_floor_is_the_smallest_limit(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InfeasibleMemoryLimit) as refused:
        optimize(models["plain"], tmp_path / "a", memory_limit="1MiB")
    floor = refused.value.floor_bytes
    optimize(models["plain"], tmp_path / "b", memory_limit=floor)
    with pytest.raises(InfeasibleMemoryLimit):
        optimize(models["plain"], tmp_path / "c", memory_limit=floor - 1)


def test_auto_clustering_is_refused(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=2")
    with pytest.raises(UnsupportedGraph, match="auto-clustering"):
        optimize(models["plain"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_another_graph_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    optimize(models["keras"], tmp_path / "keras")
    plan = tfswap.Plan.load(tmp_path / "keras" / "tfswap_plan.json")
    with pytest.raises(InvalidModel, match="another graph"):
        optimize(models["plain"], tmp_path / "out", plan=plan)
    assert not (tmp_path / "out").exists()


def test_a_rewritten_step_is_not_rewritten_again(models: dict[str, Path], tmp_path: Path) -> None:
    optimize(models["plain"], tmp_path / "out")
    with pytest.raises(InvalidModel, match="already"):
        optimize(tmp_path / "out", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    for model in (None, 3, b"model", object()):
        with pytest.raises(TfswapError, match="needs a SavedModel's folder, a GraphDef or a MetaGraphDef"):
            tfswap.optimize_graph(model, tmp_path / "out", memory_limit="60%")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InvalidModel, match="is not a folder"):
        tfswap.optimize_graph(file, tmp_path / "out", memory_limit="60%")


def test_a_model_without_functions_is_not_taken_for_tensorflow_1_s(tmp_path: Path) -> None:
    import tensorflow as tf

    tf.saved_model.save(tf.Module(), str(tmp_path / "model"))
    with pytest.raises(InvalidModel, match="has no function 'train_step': it has none. Save an object"):
        optimize(tmp_path / "model", tmp_path / "out")


def test_numpy_s_numbers_are_numbers(models: dict[str, Path], tmp_path: Path) -> None:
    import numpy as np

    options = {"memory_limit": np.int64(50 << 20), "mode": "analyze"}
    by_batch = optimize(models["plain"], tmp_path, batch_size=np.int32(BATCH), **options)
    shape = np.array([BATCH, 256])
    by_shape = optimize(models["plain"], tmp_path, batch_size=None, input_shapes={"x": shape, "y": shape}, **options)
    assert by_batch == by_shape
    assert json.loads(by_batch.to_json())["memory_limit_bytes"] == 50 << 20


def test_an_analysis_of_a_limit_that_can_t_be_met_names_the_smallest(models: dict[str, Path], tmp_path: Path) -> None:
    report = optimize(models["plain"], tmp_path, memory_limit="1MiB", mode="analyze")
    assert not report.keeps_limit
    assert report.title == "tfswap: train_step"
    assert report.memory_limit_bytes == 1 << 20 < report.floor_bytes < report.baseline_peak_bytes
    assert optimize(models["plain"], tmp_path / "out", memory_limit=report.floor_bytes).keeps_limit


def test_a_given_plan_is_held_against_the_requested_limit(models: dict[str, Path], tmp_path: Path) -> None:
    optimize(models["plain"], tmp_path / "a")
    path = tmp_path / "a" / "tfswap_plan.json"
    plan = tfswap.Plan.load(path)
    with pytest.raises(TfswapError, match="the given plan peaks at .* and the limit is .*Plan again"):
        optimize(models["plain"], tmp_path / "b", plan=path, memory_limit=plan.planned_peak_bytes - 1)
    assert not (tmp_path / "b").exists()
    report = optimize(models["plain"], tmp_path / "b", plan=path, memory_limit="90%")
    assert report.memory_limit_bytes == report.baseline_peak_bytes * 9 // 10
    assert report.swapped


def test_an_existing_folder_is_left_alone(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(TfswapError, match="exists"):
        optimize(models["plain"], tmp_path / "out")
    with pytest.raises(TfswapError, match="no folder"):
        optimize(models["plain"], tmp_path / "none" / "out")
    with pytest.raises(TfswapError, match="inside the model"):
        optimize(models["plain"], models["plain"] / "out")
    with pytest.raises(TfswapError, match="can't be written.*Nothing was left"):
        optimize(models["plain"], Path("/proc/out"))
    with pytest.raises(TfswapError, match="can't be written: a path can hold no NUL. Nothing was left"):
        optimize(models["plain"], tmp_path / "o\0ut")
    with pytest.raises(TfswapError, match="can't be written: its path is not UTF-8"):
        optimize(models["plain"], tmp_path / os.fsdecode(b"o\xffut"))
    with pytest.raises(TfswapError, match="output_dir is 3, of type int"):
        tfswap.optimize_graph(models["plain"], 3, memory_limit="60%", batch_size=BATCH)
    with pytest.raises(TfswapError, match="output_dir is '': say where"):
        tfswap.optimize_graph(models["plain"], "", memory_limit="60%", batch_size=BATCH)
    with pytest.raises(TfswapError, match="output_dir is not given"):
        tfswap.optimize_graph(models["plain"], memory_limit="60%", batch_size=BATCH)
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


def test_a_full_disk_leaves_nothing(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)  # the README comes after the model
    with pytest.raises(TfswapError, match="No space left"):
        optimize(models["plain"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_of_many_files_that_can_t_be_copied_one_reason_is_given(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise shutil.Error([("a", "b", "[Errno 27] File too large"), ("c", "d", "[Errno 27] File too large")])

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(TfswapError, match=r"can't be written: \[Errno 27\] File too large\. Nothing"):
        optimize(models["plain"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
