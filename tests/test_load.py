"""`tfswap.load`, and gates of files that TensorFlow loads: a limit holds in the process that loads, or it is said."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

from processes import on_arena, run_forked
from saved_models import ARENA_MIB

import tfswap
from tfswap.oplib.names import GATE

BATCH = 4096


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Original models, and what they were rewritten to, with other kernels than oneDNN's."""
    folder = tmp_path_factory.mktemp("models")
    run_forked(
        f"""
import saved_models, tfswap
for name, limit in (("plain", "75%"), ("keras", "70%")):
    saved_models.save(name, {str(folder)!r} + "/" + name)
    given = dict(memory_limit=limit, batch_size={BATCH})
    tfswap.optimize_graph(f"{folder}/{{name}}", f"{folder}/{{name}}_smaller", **given)
""",
        TF_ENABLE_ONEDNN_OPTS="0",
    )
    return {name: folder / name for name in ("plain", "plain_smaller", "keras", "keras_smaller")}


def called(function: str, *arguments: Any) -> Any:
    """What a function of saved_models returns, in a process with an arena."""
    given = ", ".join(map(repr, arguments))
    return on_arena(f"import json, saved_models; print(json.dumps(saved_models.{function}({given})))", ARENA_MIB)


@pytest.mark.parametrize(
    ("name", "others_mib", "one_region"), [("plain", 0, True), ("plain", 12, False), ("keras", 4, False)]
)
def test_loaded_steps_keep_the_files_limit(
    models: dict[str, Path], name: str, others_mib: int, one_region: bool
) -> None:
    expected = called("train", str(models[name]), BATCH, True)
    smaller = models[f"{name}_smaller"]
    found = called("load_and_train", str(smaller), BATCH, others_mib, one_region)
    plan = tfswap.Plan.load(smaller / "tfswap_plan.json")
    for made in found:  # the second is loaded beside the first one's variables and constants
        assert made["bits"] == expected["bits"]
        assert made["whole"] <= made["limit"] == plan.limit_bytes < expected["peak"] + others_mib * 2**20
        assert made["copies"] > 0
    if not others_mib:
        assert found[0]["order"] == list(plan.order)  # the file's own plan, where it keeps the limit


def test_what_cant_keep_the_limit_is_refused_before_it_runs(models: dict[str, Path]) -> None:
    found = called("refused", str(models["plain_smaller"]), BATCH)
    limit = tfswap.Plan.load(models["plain_smaller"] / "tfswap_plan.json").limit_bytes
    for said in ("tfswap.load", f"a limit of {limit} bytes", "are in use before it begins"):
        assert said in found["error"]
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


def with_limit(model: Path, to: Path, limit_bytes: int) -> Path:
    """A copy of a rewritten model whose gates have another limit."""
    from tensorflow.core.protobuf import saved_model_pb2

    shutil.copytree(model, to)
    proto = saved_model_pb2.SavedModel.FromString((to / "saved_model.pb").read_bytes())
    gates = [n for f in proto.meta_graphs[0].graph_def.library.function for n in f.node_def if n.op == GATE]
    assert len(gates) == 1
    gates[0].attr["limit"].i = limit_bytes
    (to / "saved_model.pb").write_bytes(proto.SerializeToString())
    return to
