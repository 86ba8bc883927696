"""`tfswap.load`, and gates of files that TensorFlow loads: a limit holds there, or a warning is given."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import load_convolutions
import pytest

pytest.importorskip("tensorflow")

import load_programs
from processes import on_arena, run_forked
from saved_models import ARENA_MIB
from slow import slow

import tfswap
from tfswap.compiler.origin import FUNCTIONS_NAME, REQUEST_NAME
from tfswap.errors import InvalidModel, TfswapError
from tfswap.frontends.verify_model import verify_model
from tfswap.ir.custom_ops import CODECS, GATE

BATCH = 2048


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Original models, and what they were rewritten to, with other kernels than oneDNN's."""
    folder = tmp_path_factory.mktemp("models")

    def make() -> None:
        import saved_models

        for name, limit in (("plain", "75%"), ("keras", "70%")):
            saved_models.save(name, f"{folder}/{name}")
            tfswap.optimize_graph(folder / name, folder / f"{name}_smaller", memory_limit=limit, batch_size=BATCH)

    run_forked(make, TF_ENABLE_ONEDNN_OPTS="0")
    return {name: folder / name for name in ("plain", "plain_smaller", "keras", "keras_smaller")}


def called(function: str, *arguments: Any) -> Any:
    """What a function of saved_models returns, in a process with an arena."""

    def call() -> Any:
        import saved_models

        return getattr(saved_models, function)(*arguments)

    return on_arena(call, ARENA_MIB)


@pytest.mark.parametrize(
    ("name", "others_mib", "one_region"), [("plain", 0, True), ("plain", 4, False), ("keras", 2, False)]
)
def test_loaded_steps_keep_the_files_limit(
    models: dict[str, Path], name: str, others_mib: int, one_region: bool
) -> None:
    expected = called("train", str(models[name]), BATCH, True)
    smaller = models[f"{name}_smaller"]
    found = called("load_and_train", str(smaller), BATCH, others_mib, one_region)
    plan = tfswap.Plan.load(smaller / "tfswap_plan.json")
    for made in found:  # the second is loaded with the first one's still there, its variables and constants
        assert made["bits"] == expected["bits"]
        assert made["whole"] <= made["limit"] == plan.limit_bytes < expected["peak"] + others_mib * 2**20
        assert made["copies"] > 0
    if not others_mib:
        assert found[0]["order"] == list(plan.order)  # the file's own plan, where it keeps the limit


def test_what_cant_keep_the_limit_is_refused_before_it_runs(models: dict[str, Path]) -> None:
    found = called("refused", str(models["plain_smaller"]), BATCH)
    limit = tfswap.Plan.load(models["plain_smaller"] / "tfswap_plan.json").limit_bytes
    for errors in ("tfswap.load", f"a limit of {limit} bytes", "are in use before it begins"):
        assert errors in found["error"]
    assert found["rise"] < 2**16, "its kernels have run"
    assert found["same"]
    assert found["floor"] > limit
    assert found["enough"]["whole"] <= found["floor"]


def test_the_gate_refuses_what_would_pass_the_limit_and_nothing_else(models: dict[str, Path], tmp_path: Path) -> None:
    free = called("passes", str(with_limit(models["plain_smaller"], tmp_path / "free", 2**40)), BATCH)
    assert free["ran"]
    just = called("passes", str(with_limit(models["plain_smaller"], tmp_path / "just", free["peak"])), BATCH)
    assert just == free
    less = called("passes", str(with_limit(models["plain_smaller"], tmp_path / "less", free["peak"] - 1)), BATCH)
    assert not less["ran"]


def test_models_of_every_kind_are_called_as_before(tmp_path: Path) -> None:
    found = on_arena(f"import json, load_programs; print(json.dumps(load_programs.ways({str(tmp_path)!r})))", ARENA_MIB)
    for name in ("ours", "portable", "left_alone", "policy"):
        assert found[name]["same"], name
        assert found[name]["kept"], name
    assert "Tanh:0" in found["ours"]["moved"]
    assert "Tanh:0" not in found["policy"]["moved"]
    assert not found["left_alone"]["moved"]
    assert found["larger"] in ("planned", "refused")
    assert "can't be taken outside" in found["taped"]
    assert found["called"]
    assert found["saved"]
    assert found["within"]


@pytest.mark.parametrize("others_mib", [0, 12])
def test_a_sessions_step_is_refused_too(others_mib: int) -> None:
    errors = on_arena(f"import json, load_programs; print(json.dumps(load_programs.in_a_session({others_mib})))")
    assert ("was planned for a limit of" in errors) == bool(others_mib), errors


@pytest.fixture(scope="module")
def signatures(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, int]]:
    """Models whose signatures are decorated steps, and their limits."""
    folder = str(tmp_path_factory.mktemp("signatures"))
    return folder, on_arena(f"import json, load_programs; print(json.dumps(load_programs.save_signatures({folder!r})))")


@pytest.mark.parametrize(
    ("way", "others_mib"),
    [
        *((way, 0) for way in load_programs.SIGNATURES),
        *(("itself", 12), ("open", 12)),
        *slow(*((way, 12) for way in load_programs.SIGNATURES if way not in ("itself", "open"))),
    ],
)
def test_a_signature_that_is_a_decorated_step_keeps_its_limit_or_fails_before_it_runs(
    signatures: tuple[str, dict[str, int]], way: str, others_mib: int
) -> None:
    folder, limits = signatures

    def program():
        import load_programs

        return load_programs.run_signature(folder, way, others_mib)

    found = on_arena(program)
    if found["errors"]:
        assert f"a limit of {limits[way]} bytes" in found["errors"][0]
        assert found["peak"] < found["before"] + 2**16, "its kernels have run, or the peak is of the region"
    else:
        assert found["peak"] <= limits[way]
    assert bool(found["errors"]) or not others_mib


@pytest.mark.parametrize(
    ("way", "others_mib"), [("itself", 0), ("concrete", 3), ("of specs", 1), ("open", 0), ("open", 3)]
)
def test_a_decorated_step_that_was_saved_keeps_its_limit_where_tfswap_loads_it(
    signatures: tuple[str, dict[str, int]], way: str, others_mib: int
) -> None:
    folder, limits = signatures

    def program():
        import load_programs

        return load_programs.load_signature(folder, way, others_mib)

    found = on_arena(program)
    assert found["peak"] <= found["limit"] == limits[way]
    assert found["planned once"]
    assert found["same"]
    assert found["the file's plan"] or others_mib


def test_steps_of_one_model_have_a_limit_each(tmp_path: Path) -> None:
    folder = repr(str(tmp_path))
    run_forked(f"import load_programs; load_programs.save_steps({folder})", TF_ENABLE_ONEDNN_OPTS="0")
    found = on_arena(f"import json, load_programs; print(json.dumps(load_programs.run_steps({folder}, 1)))")
    limits = [made["limit"] for made in found[:-1]]
    assert limits[2] < limits[0] < limits[1]
    assert all(made["peak"] <= made["limit"] for made in found[:-1])
    assert all(made["once"] for made in found[:-1])
    assert found[-1]["same"]
    assert len(verify_model(tmp_path / "made")) == 3
    plans = [tfswap.Plan.load(tmp_path / "made" / f"tfswap_plan{n}.json") for n in ("", ".1", ".2")]
    assert [plan.limit_bytes for plan in plans] == [limits[2], limits[0], limits[1]]
    readme = (tmp_path / "made" / "README.txt").read_text()
    for name, plan in (("third", ""), ("first", ".1"), ("second", ".2")):
        section = readme.partition(f"The function {name!r}")[2].partition("The function")[0]
        assert f"The plan is in tfswap_plan{plan}.json." in section


def test_a_folder_without_planned_steps_is_distinguished(tmp_path: Path) -> None:
    def program():
        import load_programs
        import tensorflow as tf

        tf.saved_model.save(load_programs.nested(), str(tmp_path / "model"))

    run_forked(
        program,
    )
    with pytest.raises(InvalidModel, match="signatures=step"):
        tfswap.load(tmp_path / "model")


def test_in_an_arena_that_grows_the_gate_makes_one_region(tmp_path: Path) -> None:

    def make() -> None:
        import tensorflow as tf

        model = load_programs.nested()
        tf.saved_model.save(model, str(tmp_path / "model"), signatures=model.inner.served)
        given = {"function": "inner.step", "batch_size": load_programs.ROWS, "memory_limit": "60%"}
        tfswap.optimize_graph(tmp_path / "model", tmp_path / "made", **given)

    run_forked(make, TF_ENABLE_ONEDNN_OPTS="0")
    limit = tfswap.Plan.load(tmp_path / "made" / "tfswap_plan.json").limit_bytes
    found = on_arena(lambda: load_programs.in_small_regions(str(tmp_path / "made")))
    assert limit is not None
    assert found["peak"] <= limit
    assert "for smaller arguments: of [2048,128], and is given [2049,128]" in found["larger"]
    assert found["rise"] < 2**16, "its kernels have run"


def test_what_is_known_by_bounds_gets_the_region_that_it_needs_or_is_refused(tmp_path: Path) -> None:
    run_forked(lambda: load_convolutions.save_convolving(str(tmp_path)), TF_ENABLE_ONEDNN_OPTS="0")

    def ran(path: Path, mib: int) -> dict[str, Any]:
        return on_arena(lambda: load_convolutions.run_convolving(str(path)), mib)

    limit = tfswap.Plan.load(tmp_path / "made" / "tfswap_plan.json").limit_bytes
    assert limit is not None
    found = ran(tmp_path / "made", 512)  # in a region of the limit's size convolutions are given all of it
    assert not found["errors"]
    assert found["peak"] <= limit
    less = with_limit(tmp_path / "made", tmp_path / "less", found["peak"] - 2**20)
    refused = ran(less, 512)
    assert f"a limit of {found['peak'] - 2**20} bytes" in refused["errors"][0]
    assert refused["peak"] < limit / 2, "its kernels have run"
    assert ran(tmp_path / "made", found["peak"] // 2**20 - 2)["errors"], "no room for that region"


def test_codecs_are_loaded_that_only_joined_kernels_have(tmp_path: Path) -> None:
    def ran(way: str) -> dict[str, Any]:
        return on_arena(
            f"import json, load_programs; print(json.dumps(load_programs.ran_drawing_loop({str(tmp_path)!r}, {way!r})))"
        )

    expected = ran("plain")["loss"]
    assert ran("memory") == {"loss": expected, "loaded": True}
    assert ran("file")["encoded"]
    assert ran("loaded") == {"loss": expected, "loaded": True}
    assert ran("verified") == {"loaded": True}
    library = read_model(tmp_path / "made").meta_graphs[0].graph_def.library.function
    assert not CODECS.intersection(node.op for f in library for node in f.node_def), "not inside alone: tests nothing"


def damaged_request(model: Path) -> None:
    content = json.loads((model / REQUEST_NAME).read_text())
    content["limit_bytes"] = "much"
    (model / REQUEST_NAME).write_text(json.dumps(content))


def deep_request(model: Path) -> None:
    (model / REQUEST_NAME).write_text("[" * 100_000)


def another_tactic(model: Path) -> None:
    content = json.loads((model / REQUEST_NAME).read_text())
    content["tactics"] = ["magic"]
    (model / REQUEST_NAME).write_text(json.dumps(content))


def another_step(model: Path) -> None:
    content = json.loads((model / REQUEST_NAME).read_text())
    content["steps"][0]["name"] = "unknown"
    (model / REQUEST_NAME).write_text(json.dumps(content))


def no_request(model: Path) -> None:
    (model / REQUEST_NAME).unlink()


def no_functions(model: Path) -> None:
    (model / FUNCTIONS_NAME).unlink()


def cut_functions(model: Path) -> None:
    (model / FUNCTIONS_NAME).write_bytes((model / FUNCTIONS_NAME).read_bytes()[:-100])


def other_functions(model: Path) -> None:
    (model / FUNCTIONS_NAME).write_bytes(zlib.compress(b""))


def no_plan(model: Path) -> None:
    (model / "tfswap_plan.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        damaged_request,
        deep_request,
        another_tactic,
        another_step,
        no_request,
        no_functions,
        cut_functions,
        other_functions,
        no_plan,
    ],
)
def test_damaged_folders_are_refused_by_name(models: dict[str, Path], tmp_path: Path, damage: Any) -> None:
    shutil.copytree(models["plain_smaller"], tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(InvalidModel):
        tfswap.load(tmp_path / "model")
    with pytest.raises(InvalidModel):
        verify_model(tmp_path / "model")


def test_wrong_arguments_are_named(models: dict[str, Path]) -> None:
    with pytest.raises(TfswapError, match="on_exceeded"):
        tfswap.load(models["plain_smaller"], on_exceeded="shout")
    with pytest.raises(TfswapError, match="memory_limit"):
        tfswap.load(models["plain_smaller"], memory_limit="lots")
    with pytest.raises(InvalidModel, match=REQUEST_NAME):
        tfswap.load(models["plain"])


def read_model(model: Path) -> Any:
    from tensorflow.core.protobuf import saved_model_pb2

    return saved_model_pb2.SavedModel.FromString((model / "saved_model.pb").read_bytes())


def with_limit(model: Path, to: Path, limit_bytes: int) -> Path:
    """A copy of a rewritten model whose gates have another limit."""
    shutil.copytree(model, to)
    proto = read_model(to)
    gates = [n for f in proto.meta_graphs[0].graph_def.library.function for n in f.node_def if n.op == GATE]
    assert len(gates) == 1
    gates[0].attr["limit"].i = limit_bytes
    (to / "saved_model.pb").write_bytes(proto.SerializeToString())
    return to
